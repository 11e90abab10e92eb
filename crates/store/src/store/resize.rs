//! The cache gives memory back when it is short and takes more when there is room.

use std::sync::PoisonError;

use super::ExpertStore;
use super::chunks::{Goal, Returning};
use crate::arena::MIN_CHUNK_SLOTS;
use crate::error::StoreError;
use crate::event::StoreEvent;

impl ExpertStore {
    /// To be called where no leases are out (what is leased stays): when `measured_anon`, the process's
    /// *current* anonymous memory in bytes ([`crate::Machine::own_anon_now`]; no peak, no file pages), exceeds
    /// `limit_anon`, evicts in place, gives pages back to the system and lowers caps, so that the memory
    /// does not grow back. Where a [`ChunkListener`](super::ChunkListener) is set whole chunks go, or nothing does.
    /// Returns the bytes given back.
    pub fn enforce(&self, limit_anon: u64, measured_anon: u64) -> u64 {
        let over = measured_anon.saturating_sub(limit_anon);
        if over == 0 {
            return 0;
        }
        let mut events = Vec::new();
        if let Some(listener) = self.listener.get() {
            self.shared.lock().table.clear_stage(&mut events);
            let bytes = self.retire(&**listener, Goal::Memory(over), &mut events);
            return self.shrunk(bytes, over, events);
        }
        let taken = self.shared.lock().table.shrink(over, &mut events);
        self.give_back(taken, over, events)
    }

    /// Lets the cache take `bytes` less than it may, before it does: caps are lowered, pins go last, and the
    /// pages of what is kept no longer are given back. Where a [`ChunkListener`](super::ChunkListener) is set whole
    /// chunks go as far as they fit into `bytes`, and for the rest caps are lowered alone. Returns the bytes given
    /// back.
    pub fn restrict(&self, bytes: u64) -> u64 {
        if bytes == 0 {
            return 0;
        }
        let mut events = Vec::new();
        if let Some(listener) = self.listener.get() {
            let before = self.capacity_bytes();
            let given = self.retire(&**listener, Goal::Room(bytes), &mut events);
            let mut state = self.shared.lock();
            let lowered = before.saturating_sub(state.table.capacity_bytes());
            state.table.lower(bytes.saturating_sub(lowered), &mut events);
            drop(state);
            return self.shrunk(given, 0, events);
        }
        let taken = self.shared.lock().table.restrict(bytes, &mut events);
        self.give_back(taken, 0, events)
    }

    /// Gives the pages of slots back that were taken out of the table; of `over` bytes that should be freed,
    /// what is left is told.
    fn give_back(&self, taken: Vec<u32>, over: u64, events: Vec<StoreEvent>) -> u64 {
        let mut bytes = 0;
        let mut done = Vec::with_capacity(taken.len());
        for slot in taken {
            let given = self.shared.arena.begin_write(slot).map(|w| w.give_back());
            bytes += given.as_ref().map_or(0, |g| *g.as_ref().unwrap_or(&0));
            done.push((slot, matches!(given, Some(Ok(_)))));
        }
        let mut state = self.shared.lock();
        done.into_iter().for_each(|(slot, given)| state.table.given_back(slot, given));
        drop(state);
        self.shrunk(bytes, over, events)
    }

    /// Tells that `bytes` were given back where `over` should have been.
    fn shrunk(&self, bytes: u64, over: u64, mut events: Vec<StoreEvent>) -> u64 {
        let (min_cap, max_cap) = self.caps();
        self.shared.changed();
        events.push(StoreEvent::Shrunk { bytes, short: over.saturating_sub(bytes), min_cap, max_cap });
        events.iter().for_each(|e| self.shared.emit(e));
        bytes
    }

    /// Lets the cache take up to `bytes` more, at most as much as a chunk of the arena. Slots that shrinking
    /// left behind come first, then the largest chunk that went and fits, in its old place; else one mapping is
    /// added, while none is away. Pages come into being when experts are loaded.
    /// Returns the bytes that it may take more, 0 where it has slots for all experts or a chunk does not fit.
    ///
    /// # Errors
    /// [`StoreError::Map`] when the system gives no address space.
    pub fn grow(&self, bytes: u64) -> Result<u64, StoreError> {
        let _one = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        let arena = &self.shared.arena;
        let mut state = self.shared.lock();
        let room = state.table.room();
        let by_bytes = |&(_, &(slots, bytes)): &(usize, &(usize, u64))| (slots as u64).saturating_mul(bytes);
        let Some((class, &(room, slot))) = room.iter().enumerate().max_by_key(by_bytes) else {
            return Ok(0);
        };
        let slot_bytes = usize::try_from(slot).unwrap_or(usize::MAX);
        let chunk = arena.chunk_slots(slot_bytes);
        let fitting = usize::try_from(bytes / slot.max(1)).unwrap_or(usize::MAX);
        let count = room.min(chunk).min(fitting);
        let left_behind = state.table.unused(class).min(count);
        // Mappings of a slot or two are not worth having.
        if count == 0 || left_behind == 0 && count < room.min(MIN_CHUNK_SLOTS as usize) {
            return Ok(0);
        }
        let added = if left_behind > 0 {
            left_behind
        } else {
            drop(state);
            let added = match self.returning(slot_bytes, fitting) {
                Returning::Chunk(chunk) => {
                    state = self.shared.lock();
                    state.table.chunk_back(&chunk.slots);
                    chunk.slots.len()
                }
                Returning::TooLarge => return Ok(0),
                Returning::None => {
                    arena.add_chunk(slot_bytes, count)?;
                    state = self.shared.lock();
                    state.table.add_slots(class, count);
                    count
                }
            };
            added.min(room)
        };
        let raised = state.table.raise(class, added);
        let (min_cap, max_cap) = state.table.caps();
        drop(state);
        let bytes = (raised as u64).saturating_mul(slot);
        if bytes > 0 {
            self.shared.emit(&StoreEvent::Grown { bytes, min_cap, max_cap });
        }
        Ok(bytes)
    }
}
