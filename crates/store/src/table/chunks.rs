//! Whole chunks of the arena leave the table and come back: where a device knows them, pages inside stay.

use std::cmp::Reverse;
use std::ops::Range;

use super::{Phase, Slot, Table};
use crate::arena::ChunkSlots;
use crate::event::{EvictReason, StoreEvent, Tier};

/// What a chunk is to leave for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// Memory that exists.
    Memory,
    /// That fewer bytes may be kept, at most so many.
    Room(u64),
}

/// A chunk that left the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    pub(crate) chunk: ChunkSlots,
    /// Bytes of its slots that had been written.
    pub(crate) touched: u64,
    /// Bytes by which less may be kept.
    pub(crate) lowered: u64,
}

/// What a chunk holds.
#[derive(Clone, Copy, Debug, Default)]
struct Content {
    kept: usize,
    pinned: usize,
    touched: usize,
    /// Leased, waited for or being loaded: it cannot leave now.
    busy: bool,
}

impl Table {
    /// Takes the chunk out of the table whose leaving costs least: with the fewest pinned experts, of those the
    /// fewest bytes of cached ones, since the fewer it names the more of the victims are the policy's choice; of
    /// equal ones the one with most memory. What is in it is evicted, and caps are lowered by the slots that are
    /// missing then; pins go last. `None` where no chunk can leave: each has leases or loads, or its size class
    /// needs the slots for experts on their way.
    pub(crate) fn take_chunk(
        &mut self,
        chunks: &[ChunkSlots],
        want: Want,
        out: &mut Vec<StoreEvent>,
    ) -> Option<Left> {
        let candidates = chunks.iter().filter_map(|chunk| {
            let (content, class) =
                (self.content(&chunk.slots), self.slots.get(chunk.slots.start as usize)?.class);
            let (class, bytes) = (class as usize, chunk.slot_bytes as u64);
            let missing = self.missing(class, chunk.slots.len());
            let lowered = (missing as u64).saturating_mul(bytes);
            let suits = match want {
                Want::Memory => content.touched > 0,
                Want::Room(most) => missing > 0 && lowered <= most,
            };
            let loss = (content.pinned, content.kept as u64 * bytes, Reverse(content.touched));
            (suits && !content.busy && missing <= self.reducible(class))
                .then_some((loss, chunk, class, missing))
        });
        let (_, chunk, class, missing) = candidates.min_by_key(|&(loss, ..)| loss)?;
        let bytes = chunk.slot_bytes as u64;
        let before = self.capacity_bytes();
        self.empty(&chunk.slots, out);
        self.classes[class].free.retain(|number| !chunk.slots.contains(number));
        let slots = &mut self.slots[chunk.slots.start as usize..chunk.slots.end as usize];
        slots.iter_mut().for_each(|slot| slot.phase = Phase::Away);
        let touched = slots.iter().filter(|slot| slot.touched).count() as u64;
        self.lower_class(class, missing, out);
        let lowered = before.saturating_sub(self.capacity_bytes());
        Some(Left { chunk: chunk.clone(), touched: touched.saturating_mul(bytes), lowered })
    }

    /// The pages of a chunk that left are gone.
    pub(crate) fn chunk_gone(&mut self, slots: &Range<u32>) {
        self.slots[slots.start as usize..slots.end as usize].iter_mut().for_each(|slot| slot.touched = false);
    }

    /// The slots of a chunk that left can be used again.
    pub(crate) fn chunk_back(&mut self, slots: &Range<u32>) {
        for number in slots.clone() {
            let slot = &mut self.slots[number as usize];
            slot.phase = Phase::Free;
            let free = &mut self.classes[slot.class as usize].free;
            match slot.touched {
                true => free.push_back(number),
                false => free.push_front(number),
            }
        }
    }

    fn content(&self, slots: &Range<u32>) -> Content {
        let mut content = Content::default();
        // A chunk that was mapped just now is not in the table yet.
        let Some(slots) = self.slots.get(slots.start as usize..slots.end as usize) else {
            return Content { busy: true, ..content };
        };
        for slot in slots {
            content.busy |=
                slot.holds > 0 || matches!(slot.phase, Phase::Loading | Phase::Failed | Phase::Away);
            content.touched += usize::from(slot.touched);
            match (slot.phase, slot.tier) {
                (Phase::Free, _) => {}
                (_, Tier::Pinned) => content.pinned += 1,
                (_, Tier::Cached) => content.kept += 1,
                (_, Tier::InFlight | Tier::Staged) => {}
            }
        }
        content
    }

    /// Free slots of a class beyond those that caps, pins, staging and loads may need at any time; negative while
    /// leases keep more in memory than caps allow.
    pub(super) fn spare(&self, class: usize) -> i64 {
        let of = &self.classes[class];
        let pins = self.pinned.iter().filter(|pin| self.layers[pin.layer as usize].class == class).count();
        let caps = self.scopes.iter().filter(|scope| scope.class == class);
        let caps: usize = caps.map(|scope| scope.cap.saturating_sub(scope.kept)).sum();
        let needed = self.in_flight_limit.saturating_sub(of.in_flight)
            + self.staging_limit.saturating_sub(of.staged)
            + pins.saturating_sub(of.pinned)
            + caps;
        of.free.len() as i64 - needed as i64
    }

    /// Slots by which caps and pins of a class must fall where `count` slots of it leave.
    fn missing(&self, class: usize, count: usize) -> usize {
        usize::try_from(count as i64 - self.spare(class)).unwrap_or(0)
    }

    /// Slots by which caps and pins of a class can fall at once, whatever is leased.
    fn reducible(&self, class: usize) -> usize {
        let held = self.held();
        let scopes = self.scopes.iter().zip(held).filter(|(scope, _)| scope.class == class);
        let caps: usize = scopes.map(|(scope, held)| scope.cap.saturating_sub(held)).sum();
        // Pins go from the end of one list: one that is held or loading keeps its slot for a while.
        let stuck =
            |slot: &Slot| slot.tier == Tier::Pinned && (slot.holds > 0 || slot.phase == Phase::Loading);
        let pins = match self.slots.iter().any(stuck) {
            true => 0,
            false => self.pinned.iter().filter(|pin| self.layers[pin.layer as usize].class == class).count(),
        };
        caps + pins
    }

    /// Cached slots of each scope that are leased.
    fn held(&self) -> Vec<usize> {
        let mut held = vec![0; self.scopes.len()];
        for slot in self.slots.iter().filter(|slot| slot.tier == Tier::Cached && slot.holds > 0) {
            held[self.layers[slot.id.layer as usize].scope] += 1;
        }
        held
    }

    /// Frees all slots of a chunk of which none is held or being loaded. A pinned expert loses its place alone: it
    /// gets another one when it is next asked for.
    fn empty(&mut self, slots: &Range<u32>, out: &mut Vec<StoreEvent>) {
        for number in slots.clone() {
            let slot = &self.slots[number as usize];
            match (slot.phase, slot.tier) {
                (Phase::Ready, Tier::Cached) => {
                    let scope = self.layers[slot.id.layer as usize].scope;
                    self.policy.removed(scope as u32, number);
                    self.evict(number, EvictReason::Memory, out);
                }
                (Phase::Ready, Tier::Pinned) => self.evict(number, EvictReason::Memory, out),
                (Phase::Ready, Tier::Staged) => self.discard(number, out),
                (Phase::Queued, _) => self.free(number),
                _ => {}
            }
        }
    }

    /// Lowers caps of a class by `count` in all, the highest first and none below what is leased, then gives up
    /// pins.
    fn lower_class(&mut self, class: usize, count: usize, out: &mut Vec<StoreEvent>) {
        let held = self.held();
        for _ in 0..count {
            let lowerable = |&s: &usize| self.scopes[s].class == class && self.scopes[s].cap > held[s];
            match (0..self.scopes.len()).filter(lowerable).max_by_key(|&s| self.scopes[s].cap) {
                Some(scope) => {
                    self.scopes[scope].cap -= 1;
                    self.trim(scope, EvictReason::Memory, out);
                }
                None => break,
            }
        }
        while self.spare(class) < 0 && self.unpin(out) {}
    }
}
