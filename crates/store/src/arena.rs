//! Memory for slots: few large anonymous mappings, and the only raw pointers of the store.
//!
//! Every slot carries one atomic word: `writing | generation | readers`. A slot is handed out either
//! to one writer or to readers of one generation, so overwriting what someone reads is impossible
//! whatever the slot table believes; the table only decides which slot to ask for.

use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use crate::sync::{AtomicU64, AtomicUsize, Ordering};

use memmap2::{MmapOptions, MmapRaw};

use crate::error::StoreError;

mod chunks;
mod locks;
mod pages;

pub(crate) use chunks::ChunkSlots;
pub use chunks::{ArenaChunk, ArenaView};

/// Alignment of every slot and granule of direct reads, in bytes.
pub const PAGE: u64 = 4096;

const GIB: u64 = 1 << 30;
/// Size of a large page. Smaller slots go without: the first use of one would bring others' memory into being.
#[cfg(target_os = "linux")]
const LARGE_PAGE: u64 = 2 << 20;
/// Slots of the smallest chunk.
pub(crate) const MIN_CHUNK_SLOTS: u64 = 8;

const READERS: u64 = (1 << 24) - 1;
const GENERATION_ONE: u64 = 1 << 24;
const WRITING: u64 = 1 << 63;
const GENERATION: u64 = !(READERS | WRITING);

struct Chunk {
    /// Number of its first slot.
    first: u32,
    map: MmapRaw,
    slot_bytes: usize,
    /// The word of each slot.
    states: Vec<AtomicU64>,
    /// Whether each slot's pages are locked. Changed by who has the slot.
    locked: Vec<AtomicBool>,
    /// One of `IN_USE`, `WITHDRAWN` and `AWAY`.
    place: AtomicU64,
}

/// Most chunks that an arena can have: 4 TiB of a gibibyte each.
const MOST_CHUNKS: usize = 4096;

/// All slots. Numbers run through the size classes in the order given, and on through what is added.
pub(crate) struct Arena {
    /// Filled from the front; a chunk once there stays, so that slots are found without a lock.
    chunks: Vec<OnceLock<Chunk>>,
    used: AtomicUsize,
    /// Counts chunks that came, went and came back.
    changes: AtomicU64,
    locks: locks::Locks,
    /// Bytes of all slots at the beginning, from which the size of chunks follows.
    total: u64,
}

/// Slots a chunk of a class holds: min(1 GiB, total/16) bytes, but at least 8 slots.
fn chunk_slots(slot_bytes: u64, total: u64) -> u64 {
    (GIB.min(total / 16) / slot_bytes.max(1)).max(MIN_CHUNK_SLOTS)
}

impl Arena {
    /// Maps `(slot bytes, slots)` of each class. Slot bytes must be multiples of [`PAGE`].
    /// Memory is reserved only; pages come into being when a loader writes them.
    pub(crate) fn new(classes: &[(usize, usize)]) -> Result<Arena, StoreError> {
        let total = classes.iter().try_fold(0u64, |sum, &(bytes, count)| {
            (bytes as u64).checked_mul(count as u64).and_then(|b| sum.checked_add(b))
        });
        let total = total.ok_or_else(|| StoreError::Config("expert slots exceed 2^64 bytes".into()))?;
        let chunks = std::iter::repeat_with(OnceLock::new).take(MOST_CHUNKS).collect();
        let arena = Arena {
            chunks,
            used: AtomicUsize::new(0),
            changes: AtomicU64::new(0),
            locks: locks::Locks::default(),
            total,
        };
        for &(slot_bytes, count) in classes {
            if slot_bytes == 0 || !(slot_bytes as u64).is_multiple_of(PAGE) {
                return Err(StoreError::Internal(format!("a slot of {slot_bytes} bytes is not whole pages")));
            }
            let per_chunk = arena.chunk_slots(slot_bytes);
            let mut left = count;
            while left > 0 {
                let slots = left.min(per_chunk);
                arena.add_chunk(slot_bytes, slots)?;
                left -= slots;
            }
        }
        Ok(arena)
    }

    /// Slots that a chunk of such slots holds.
    pub(crate) fn chunk_slots(&self, slot_bytes: usize) -> usize {
        usize::try_from(chunk_slots(slot_bytes as u64, self.total)).unwrap_or(usize::MAX)
    }

    /// Maps `slots` more slots, numbered after the last one. One caller at a time.
    pub(crate) fn add_chunk(&self, slot_bytes: usize, slots: usize) -> Result<(), StoreError> {
        let too_big =
            || StoreError::Config(format!("{slots} slots of {slot_bytes} bytes do not fit an address space"));
        let len = slot_bytes.checked_mul(slots).ok_or_else(too_big)?;
        let number = self.used.load(Ordering::Acquire);
        let place = self.chunks.get(number).ok_or_else(too_big)?;
        let last = number.checked_sub(1).and_then(|last| self.chunks[last].get());
        let first = last.map_or(0, |last| last.first as usize + last.states.len());
        let end = first.checked_add(slots).and_then(|end| u32::try_from(end).ok());
        let map = MmapOptions::new()
            .len(len)
            .no_reserve_swap()
            .map_anon()
            .map_err(|e| StoreError::Map { bytes: len as u64, source: Arc::new(e) })?;
        // Without large pages all works as well, but a direct read pins each page of its own.
        #[cfg(target_os = "linux")]
        if slot_bytes as u64 >= LARGE_PAGE {
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        let states = std::iter::repeat_with(|| AtomicU64::new(0)).take(slots).collect();
        end.ok_or_else(too_big)?;
        let chunk = Chunk {
            first: first as u32,
            map: MmapRaw::from(map),
            slot_bytes,
            states,
            locked: std::iter::repeat_with(|| AtomicBool::new(false)).take(slots).collect(),
            place: AtomicU64::new(chunks::IN_USE),
        };
        place.set(chunk).map_err(|_| StoreError::Internal("two callers add slots at a time".into()))?;
        self.used.store(number + 1, Ordering::Release);
        self.changes.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Number of mappings made.
    pub(crate) fn mappings(&self) -> usize {
        self.used.load(Ordering::Acquire)
    }

    /// A slot's chunk and its index there.
    fn locate(&self, slot: u32) -> (&Chunk, usize) {
        let after = |chunk: &OnceLock<Chunk>| chunk.get().is_some_and(|chunk| chunk.first <= slot);
        let number = self.chunks[..self.mappings()].partition_point(after) - 1;
        let chunk = self.chunks[number].get().expect("chunks below `used` are set");
        (chunk, (slot - chunk.first) as usize)
    }

    fn state(&self, slot: u32) -> &AtomicU64 {
        let (chunk, index) = self.locate(slot);
        &chunk.states[index]
    }

    fn place(&self, slot: u32) -> (*mut u8, usize) {
        let (chunk, index) = self.locate(slot);
        // `wrapping_add` needs no proof here; the slots fill the mapping by `add_chunk`.
        (chunk.map.as_mut_ptr().wrapping_add(index * chunk.slot_bytes), chunk.slot_bytes)
    }

    /// Exclusive access, under a new generation; `None` while anyone reads or writes the slot.
    pub(crate) fn begin_write(self: &Arc<Self>, slot: u32) -> Option<SlotWrite> {
        let state = self.state(slot);
        let seen = state.load(Ordering::Relaxed);
        if seen & (WRITING | READERS) != 0 {
            return None;
        }
        let generation = seen.wrapping_add(GENERATION_ONE) & GENERATION;
        state
            .compare_exchange(seen, generation | WRITING, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| SlotWrite { arena: Arc::clone(self), slot, generation })
    }

    /// Shared access to what generation `generation` wrote; `None` if it was overwritten since, or is being.
    pub(crate) fn begin_read(self: &Arc<Self>, slot: u32, generation: u64) -> Option<SlotRead> {
        let add = |seen: u64| {
            let free = seen & READERS != READERS;
            (seen & (WRITING | GENERATION) == generation && free).then(|| seen + 1)
        };
        let state = self.state(slot);
        let pinned = state.fetch_update(Ordering::Acquire, Ordering::Relaxed, add);
        pinned.ok().map(|_| SlotRead { arena: Arc::clone(self), slot })
    }
}

/// Exclusive access to a slot's bytes.
pub(crate) struct SlotWrite {
    arena: Arc<Arena>,
    slot: u32,
    generation: u64,
}

impl SlotWrite {
    /// The generation to read these bytes by, once this value is dropped.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Gives the slot's pages back to the system; they read as zeros then. Returns their bytes: less than the slot's
    /// where the system's pages are larger than 4 KiB.
    pub(crate) fn give_back(self) -> std::io::Result<u64> {
        self.unlock()?;
        let (base, len) = self.arena.place(self.slot);
        // SAFETY: the range is one slot of a private anonymous mapping, to which `self` has exclusive
        // access; dropping its pages turns it into zeros, which is a valid value of bytes.
        unsafe { pages::give_back(base, len) }
    }
}

impl Deref for SlotWrite {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let (base, len) = self.arena.place(self.slot);
        // SAFETY: base..base+len lies in a mapping that `self.arena` keeps alive, zeroed by the system,
        // and the WRITING bit makes `self` its only user.
        unsafe { std::slice::from_raw_parts(base, len) }
    }
}

impl DerefMut for SlotWrite {
    fn deref_mut(&mut self) -> &mut [u8] {
        let (base, len) = self.arena.place(self.slot);
        // SAFETY: as in `deref`; the borrow of `self` is exclusive too.
        unsafe { std::slice::from_raw_parts_mut(base, len) }
    }
}

/// A disjoint part of a slot that is being written. Parts may be filled by several threads, or by the
/// kernel; the slot is whole again when the last one is rejoined, and given up when the last one is dropped.
pub(crate) struct SlotPiece {
    /// Never used through its own `Deref` while another part may exist: see `rejoin`.
    slot: Arc<SlotWrite>,
    start: usize,
    len: usize,
}

impl SlotWrite {
    /// Cuts the slot into parts: one for each of `ranges`, which must be ascending, disjoint and inside it.
    pub(crate) fn split(self, ranges: &[Range<usize>]) -> Result<Vec<SlotPiece>, StoreError> {
        let (_, len) = self.arena.place(self.slot);
        let mut end = 0;
        for range in ranges {
            if range.start < end || range.end < range.start || range.end > len {
                let text = format!("parts {ranges:?} of a slot of {len} bytes overlap or leave it");
                return Err(StoreError::Internal(text));
            }
            end = range.end;
        }
        let slot = Arc::new(self);
        let piece = |range: &Range<usize>| SlotPiece {
            slot: Arc::clone(&slot),
            start: range.start,
            len: range.len(),
        };
        Ok(ranges.iter().map(piece).collect())
    }
}

impl SlotPiece {
    /// The whole slot as its only part.
    pub(crate) fn whole(slot: SlotWrite) -> SlotPiece {
        let (_, len) = slot.arena.place(slot.slot);
        SlotPiece { slot: Arc::new(slot), start: 0, len }
    }

    /// Gives this part up; with the last one the whole slot comes back.
    pub(crate) fn rejoin(self) -> Option<SlotWrite> {
        // Of several threads that give up the last parts at once exactly one gets the slot, and it
        // sees what the others wrote.
        Arc::into_inner(self.slot)
    }

    /// First byte of the part, for a kernel that writes it. Valid for the part's length while it lives.
    #[cfg(target_os = "linux")]
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.base()
    }

    /// Length in bytes.
    #[cfg(target_os = "linux")]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn base(&self) -> *mut u8 {
        // `split` found start + len <= slot bytes.
        self.slot.arena.place(self.slot.slot).0.wrapping_add(self.start)
    }
}

impl Deref for SlotPiece {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies in the slot, whose WRITING bit `self.slot` keeps set; `split` made the
        // parts disjoint and the whole is out of reach until they are gone, so nobody else uses it.
        unsafe { std::slice::from_raw_parts(self.base(), self.len) }
    }
}

impl DerefMut for SlotPiece {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the borrow of `self` is exclusive too.
        unsafe { std::slice::from_raw_parts_mut(self.base(), self.len) }
    }
}

impl Drop for SlotWrite {
    fn drop(&mut self) {
        // Release: readers that pin this generation see the bytes.
        self.arena.state(self.slot).fetch_and(!WRITING, Ordering::Release);
    }
}

/// Shared access to a slot's bytes; while it lives the slot cannot be overwritten.
pub(crate) struct SlotRead {
    arena: Arc<Arena>,
    slot: u32,
}

impl Deref for SlotRead {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let (base, len) = self.arena.place(self.slot);
        // SAFETY: base..base+len lies in a mapping that `self.arena` keeps alive; the reader count
        // bars writers until `self` drops.
        unsafe { std::slice::from_raw_parts(base, len) }
    }
}

impl Drop for SlotRead {
    fn drop(&mut self) {
        // Release: a later writer's Acquire orders its writes after our reads.
        self.arena.state(self.slot).fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_slot_cannot_be_written_and_a_written_slot_not_read() {
        let arena = Arc::new(Arena::new(&[(4096, 2)]).unwrap());
        let mut write = arena.begin_write(1).unwrap();
        write[..3].copy_from_slice(b"abc");
        let generation = write.generation();
        assert!(arena.begin_read(1, generation).is_none(), "still being written");
        assert!(arena.begin_write(1).is_none(), "two writers");
        drop(write);
        let (one, two) = (arena.begin_read(1, generation).unwrap(), arena.begin_read(1, generation).unwrap());
        assert_eq!(&one[..3], b"abc");
        drop(one);
        assert!(arena.begin_write(1).is_none(), "one reader is left");
        drop(two);
        drop(arena.begin_write(1).unwrap());
        assert!(arena.begin_read(1, generation).is_none(), "a stale generation is refused");
    }

    #[test]
    fn parts_of_a_slot_are_filled_apart_and_rejoined() {
        let arena = Arc::new(Arena::new(&[(12_288, 1)]).unwrap());
        let write = arena.begin_write(0).unwrap();
        let generation = write.generation();
        let mut parts = write.split(&[0..4096, 4096..8192, 8192..8192, 8192..12_288]).unwrap();
        std::thread::scope(|scope| {
            for (n, part) in (1u8..).zip(&mut parts) {
                scope.spawn(move || part.fill(n));
            }
        });
        let last = parts.pop().unwrap();
        assert!(parts.into_iter().all(|part| part.rejoin().is_none()));
        assert!(arena.begin_read(0, generation).is_none(), "one part is left");
        let whole = last.rejoin().unwrap();
        assert_eq!([whole[0], whole[4096], whole[8192], whole[12_287]], [1, 2, 4, 4]);
        drop(whole);
        assert!(arena.begin_read(0, generation).is_some());
    }

    #[test]
    fn parts_that_overlap_or_leave_the_slot_are_refused() {
        let arena = Arc::new(Arena::new(&[(8192, 1)]).unwrap());
        let backwards = Range { start: 4096, end: 0 };
        let bad: [&[Range<usize>]; 3] = [&[0..4096, 4095..8192], &[0..1, 1..8193], &[0..1, backwards]];
        for ranges in bad {
            assert!(matches!(arena.begin_write(0).unwrap().split(ranges), Err(StoreError::Internal(_))));
        }
        drop(arena.begin_write(0).unwrap().split(&[0..1, 1..4096]).unwrap());
        assert!(arena.begin_write(0).is_some(), "dropped parts give the slot up");
    }

    #[test]
    fn giving_back_zeroes_the_slot_alone() {
        let arena = Arc::new(Arena::new(&[(8192, 3)]).unwrap());
        for slot in 0..3 {
            arena.begin_write(slot).unwrap().fill(7);
        }
        assert_eq!(arena.begin_write(1).unwrap().give_back().unwrap(), 8192);
        for (slot, byte) in [(0, 7), (1, 0), (2, 7)] {
            assert!(arena.begin_write(slot).unwrap().iter().all(|&b| b == byte));
        }
    }

    #[test]
    fn twenty_thousand_slots_are_few_mappings() {
        let arena = Arena::new(&[(4096, 15_000), (12_288, 5_000)]).unwrap();
        assert_eq!(arena.locate(19_999).1 + arena.locate(19_999).0.first as usize, 19_999);
        assert!(arena.mappings() <= 20, "{} mappings", arena.mappings());
        assert_eq!(chunk_slots(21 << 20, 400 << 30), 48, "a gibibyte at most");
        assert_eq!(chunk_slots(21 << 20, 1 << 30), 8, "eight slots at least");
    }

    #[test]
    fn what_is_added_is_numbered_on_and_moves_nothing() {
        let arena = Arc::new(Arena::new(&[(4096, 2)]).unwrap());
        let mut write = arena.begin_write(1).unwrap();
        write[0] = 7;
        let (generation, before) = (write.generation(), arena.place(1));
        drop(write);
        let held = arena.begin_read(1, generation).unwrap();
        arena.add_chunk(8192, 3).unwrap();
        assert_eq!((arena.place(1), held[0], arena.mappings()), (before, 7, 2));
        assert_eq!(arena.begin_write(4).unwrap().len(), 8192);
        assert_eq!(arena.begin_write(0).unwrap().len(), 4096);
    }

    #[test]
    fn slots_are_page_aligned_and_disjoint() {
        let arena = Arena::new(&[(4096, 9), (8192, 9)]).unwrap();
        let mut ranges: Vec<_> = (0..18).map(|s| arena.place(s)).map(|(p, len)| (p as usize, len)).collect();
        ranges.sort_unstable();
        assert!(ranges.iter().all(|&(p, _)| p % 4096 == 0));
        assert!(ranges.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0));
    }
}
