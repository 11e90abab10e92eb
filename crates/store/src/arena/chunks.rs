//! Chunks as a whole: what devices know, and what goes back to the system at once.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::{Arena, Chunk, GENERATION, GENERATION_ONE, READERS, WRITING, pages};
use crate::sync::Ordering;

/// Its slots can be read and written.
pub(super) const IN_USE: u64 = 0;
/// A [`Withdrawn`] has all its slots.
const WITHDRAWN: u64 = 1;
/// Its pages are with the system; its addresses are still ours.
const AWAY: u64 = 2;

/// Memory that holds slots: one mapping, whose addresses stay for as long as the store lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaChunk {
    /// Which one, in the order in which they came.
    pub number: usize,
    /// Address of its first byte.
    pub base: usize,
    /// Bytes.
    pub len: usize,
    /// Bytes of each slot in it.
    pub slot_bytes: usize,
}

/// Where the slots of a store lie, for devices that must know memory before they touch it. Chunks come when the
/// cache grows; where a [`ChunkListener`](crate::ChunkListener) hears of it they go as a whole when it shrinks, and
/// may come back in the same place.
#[derive(Clone)]
pub struct ArenaView(pub(crate) Arc<Arena>);

impl ArenaView {
    /// Chunks so far, those that went included.
    pub fn chunks(&self) -> usize {
        self.0.mappings()
    }

    /// The `number`th chunk, in the order in which they came; none while it is gone or about to go.
    pub fn chunk(&self, number: usize) -> Option<ArenaChunk> {
        let chunk = self.0.chunks.get(number)?.get()?;
        (chunk.place.load(Ordering::Acquire) == IN_USE).then(|| chunk.describe(number))
    }

    /// A number that is another one whenever chunks have come or gone.
    pub fn changes(&self) -> u64 {
        self.0.changes.load(Ordering::Acquire)
    }
}

/// Slots of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChunkSlots {
    /// The chunk's number.
    pub(crate) number: usize,
    pub(crate) slots: Range<u32>,
    pub(crate) slot_bytes: usize,
}

impl Chunk {
    fn describe(&self, number: usize) -> ArenaChunk {
        let (base, len) = (self.map.as_ptr() as usize, self.map.len());
        ArenaChunk { number, base, len, slot_bytes: self.slot_bytes }
    }

    /// Lets readers and writers in again, under new generations: nothing that was there can be asked for.
    fn open(&self) {
        for state in &self.states {
            let next = state.load(Ordering::Relaxed).wrapping_add(GENERATION_ONE);
            state.store(next & GENERATION, Ordering::Release);
        }
        self.place.store(IN_USE, Ordering::Release);
    }
}

impl Arena {
    /// Chunks in use.
    pub(crate) fn in_use(&self) -> Vec<ChunkSlots> {
        self.at_place(IN_USE)
    }

    /// Chunks whose memory is with the system.
    pub(crate) fn away(&self) -> Vec<ChunkSlots> {
        self.at_place(AWAY)
    }

    fn at_place(&self, place: u64) -> Vec<ChunkSlots> {
        let known = self.chunks.iter().map_while(|chunk| chunk.get()).enumerate();
        let there = known.filter(|(_, chunk)| chunk.place.load(Ordering::Acquire) == place);
        let slots = |(number, chunk): (usize, &Chunk)| ChunkSlots {
            number,
            // `add_chunk` found that the end fits.
            slots: chunk.first..chunk.first + chunk.states.len() as u32,
            slot_bytes: chunk.slot_bytes,
        };
        there.map(slots).collect()
    }

    /// Takes a chunk out of use: no slot of it can be read or written from now on. `None` while one is.
    pub(crate) fn withdraw(self: &Arc<Self>, number: usize) -> Option<Withdrawn> {
        let chunk = self.chunks.get(number)?.get()?;
        let taken = chunk.place.compare_exchange(IN_USE, WITHDRAWN, Ordering::Acquire, Ordering::Relaxed);
        taken.ok()?;
        for (at, state) in chunk.states.iter().enumerate() {
            let claim = |seen: u64| (seen & (WRITING | READERS) == 0).then_some(seen | WRITING);
            if state.fetch_update(Ordering::Acquire, Ordering::Relaxed, claim).is_err() {
                for claimed in &chunk.states[..at] {
                    claimed.fetch_and(!WRITING, Ordering::Release);
                }
                chunk.place.store(IN_USE, Ordering::Release);
                // Whoever looked meanwhile missed it.
                self.changes.fetch_add(1, Ordering::Release);
                return None;
            }
        }
        self.changes.fetch_add(1, Ordering::Release);
        Some(Withdrawn { arena: Arc::clone(self), number })
    }

    /// Takes a chunk that went into use again: its addresses are the same, and its pages come into being when they
    /// are written. False where it is not away.
    pub(crate) fn bring_back(&self, number: usize) -> bool {
        let Some(chunk) = self.chunks.get(number).and_then(|chunk| chunk.get()) else { return false };
        let taken = chunk.place.compare_exchange(AWAY, WITHDRAWN, Ordering::Acquire, Ordering::Relaxed);
        if taken.is_ok() {
            chunk.open();
            self.changes.fetch_add(1, Ordering::Release);
        }
        taken.is_ok()
    }
}

/// A chunk out of use: exclusive access to all of its slots. Dropping it takes the chunk into use again.
pub(crate) struct Withdrawn {
    arena: Arc<Arena>,
    number: usize,
}

impl Withdrawn {
    fn chunk(&self) -> &Chunk {
        self.arena.chunks[self.number].get().expect("it was found when this was made")
    }

    /// The chunk that nobody uses but perhaps a device.
    pub(crate) fn describe(&self) -> ArenaChunk {
        self.chunk().describe(self.number)
    }

    /// Gives all its pages back to the system, in one call. No device may know them any more. The chunk stays away
    /// until [`Arena::bring_back`]; after an error it is in use as before.
    pub(crate) fn give_back(self) -> io::Result<()> {
        let chunk = self.chunk();
        if chunk.locked.iter().any(|locked| locked.load(Relaxed)) {
            // SAFETY: a whole mapping that the arena keeps; no byte of it changes.
            unsafe { pages::unlock(chunk.map.as_mut_ptr(), chunk.map.len())? };
            let base = |index: usize| chunk.map.as_mut_ptr().wrapping_add(index * chunk.slot_bytes);
            let were = chunk.locked.iter().enumerate().filter(|(_, locked)| locked.swap(false, Relaxed));
            let bytes = were.map(|(index, _)| pages::bytes(base(index), chunk.slot_bytes)).sum();
            self.arena.unlocked(bytes);
        }
        // SAFETY: a whole private anonymous mapping, of which `self` has every slot's WRITING bit; dropping its
        // pages turns it into zeros, which is a valid value of bytes.
        unsafe { pages::give_back(chunk.map.as_mut_ptr(), chunk.map.len())? };
        chunk.place.store(AWAY, Ordering::Release);
        Ok(())
    }
}

impl Drop for Withdrawn {
    fn drop(&mut self) {
        let chunk = self.chunk();
        if chunk.place.load(Ordering::Relaxed) == WITHDRAWN {
            chunk.open();
            self.arena.changes.fetch_add(1, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena() -> Arc<Arena> {
        Arc::new(Arena::new(&[(4096, 16)]).unwrap())
    }

    #[test]
    fn a_chunk_that_is_read_or_written_stays_as_it_is() {
        let arena = arena();
        let mut write = arena.begin_write(7).unwrap();
        write.fill(3);
        assert!(arena.withdraw(0).is_none(), "written");
        let generation = write.generation();
        drop(write);
        let read = arena.begin_read(7, generation).unwrap();
        assert!(arena.withdraw(0).is_none(), "read");
        assert_eq!((read[0], arena.in_use().len()), (3, 2));
        assert!((0..7).all(|slot| arena.begin_write(slot).is_some()), "no slot was forgotten");
        assert!(arena.withdraw(2).is_none(), "there is no such chunk");
    }

    #[test]
    fn what_is_gone_cannot_be_used_and_comes_back_empty_in_its_place() {
        let arena = arena();
        let view = ArenaView(Arc::clone(&arena));
        let (before, changes) = (view.chunk(1).unwrap(), view.changes());
        let mut write = arena.begin_write(9).unwrap();
        write.fill(3);
        let generation = write.generation();
        drop(write);
        let withdrawn = arena.withdraw(1).unwrap();
        assert_eq!((view.chunk(1), withdrawn.describe()), (None, before));
        assert!(arena.begin_write(9).is_none() && arena.begin_read(9, generation).is_none());
        assert!(arena.withdraw(1).is_none() && !arena.bring_back(1), "it has one owner");
        withdrawn.give_back().unwrap();
        assert!(arena.begin_write(9).is_none() && arena.begin_read(9, generation).is_none());
        assert_eq!((view.chunks(), view.chunk(1), arena.away().len()), (2, None, 1));
        assert!(arena.begin_write(3).is_some(), "the other chunk");

        assert!(arena.bring_back(1) && !arena.bring_back(1));
        assert_eq!((view.chunk(1), arena.in_use().len()), (Some(before), 2));
        assert!(arena.begin_read(9, generation).is_none(), "a lease on what was there");
        assert!(arena.begin_write(9).unwrap().iter().all(|&byte| byte == 0));
        assert!(view.changes() > changes);
    }

    #[test]
    fn a_chunk_that_was_withdrawn_in_vain_keeps_its_memory_and_nothing_of_its_leases() {
        let arena = arena();
        let mut write = arena.begin_write(1).unwrap();
        write.fill(3);
        let generation = write.generation();
        drop(write);
        drop(arena.withdraw(0).unwrap());
        assert!(arena.begin_read(1, generation).is_none(), "the table has freed it");
        assert_eq!(arena.begin_write(1).unwrap()[0], 3);
    }
}
