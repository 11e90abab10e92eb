//! S3-FIFO.

use super::lists::{Lists, NONE};
use super::{ExpertId, PerExpert, PolicyShape, Replacement};

/// A tenth of a scope is for newcomers.
const SMALL_SHARE: usize = 10;
/// The most uses that are remembered of a slot.
const MOST_USES: u8 = 3;

/// S3-FIFO (Yang and others, SOSP 2023): newcomers wait in a small queue; those used twice there move to the
/// main queue, where a use buys another round; the others leave, and if they come back soon, within as many
/// departures as the scope has slots, they go to the main queue at once.
pub struct S3Fifo {
    /// Lists `2 · scope` (small) and `2 · scope + 1` (main).
    lists: Lists,
    slots: Vec<Slot>,
    scopes: Vec<Counts>,
    /// Number of the departure, counted from 1, with which an expert last left the small queue.
    left: PerExpert<u64>,
}

#[derive(Clone, Copy)]
struct Slot {
    id: ExpertId,
    main: bool,
    uses: u8,
}

/// A slot that keeps nothing.
const EMPTY: Slot = Slot { id: ExpertId { layer: 0, expert: 0 }, main: false, uses: 0 };

#[derive(Clone, Copy, Default)]
struct Counts {
    small: usize,
    kept: usize,
    departures: u64,
}

impl S3Fifo {
    /// A policy of this shape.
    pub fn new(shape: &PolicyShape) -> S3Fifo {
        S3Fifo {
            lists: Lists::new(2 * shape.scopes, shape.slots),
            slots: vec![EMPTY; shape.slots],
            scopes: vec![Counts::default(); shape.scopes],
            left: PerExpert::new(&shape.experts, 0),
        }
    }

    fn list(&self, scope: u32, slot: u32) -> usize {
        2 * scope as usize + usize::from(self.slots[slot as usize].main)
    }

    /// Moves to the newest end of the main queue.
    fn promote(&mut self, scope: u32, slot: u32) {
        let list = self.list(scope, slot);
        self.lists.unlink(list, slot);
        let fresh = !std::mem::replace(&mut self.slots[slot as usize].main, true);
        self.scopes[scope as usize].small -= usize::from(fresh);
        self.lists.push_newest(2 * scope as usize + 1, slot);
    }
}

impl Replacement for S3Fifo {
    fn inserted(&mut self, scope: u32, slot: u32, id: ExpertId) {
        let counts = &mut self.scopes[scope as usize];
        let left = std::mem::take(self.left.get_mut(id));
        let main = left > 0 && counts.departures - left < counts.kept as u64;
        counts.kept += 1;
        counts.small += usize::from(!main);
        self.slots[slot as usize] = Slot { id, main, uses: 0 };
        self.lists.push_newest(2 * scope as usize + usize::from(main), slot);
    }

    fn touched(&mut self, _scope: u32, slot: u32) {
        let uses = &mut self.slots[slot as usize].uses;
        *uses = (*uses + 1).min(MOST_USES);
    }

    fn removed(&mut self, scope: u32, slot: u32) {
        let list = self.list(scope, slot);
        self.lists.unlink(list, slot);
        let Slot { id, main, .. } = self.slots[slot as usize];
        let counts = &mut self.scopes[scope as usize];
        counts.kept -= 1;
        if !main {
            counts.small -= 1;
            counts.departures += 1;
            *self.left.get_mut(id) = counts.departures;
        }
    }

    fn grow(&mut self, slots: usize) {
        self.lists.grow(slots);
        self.slots.resize(slots, EMPTY);
    }

    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        let (small, main) = (2 * scope as usize, 2 * scope as usize + 1);
        // Every round takes a use away or ends.
        loop {
            let counts = self.scopes[scope as usize];
            let crowded = counts.small * SMALL_SHARE > counts.kept || self.lists.oldest(main) == NONE;
            if crowded && let Some(slot) = self.lists.oldest_that(small, evictable) {
                if self.slots[slot as usize].uses < 2 {
                    return Some(slot);
                }
                self.slots[slot as usize].uses = 0;
                self.promote(scope, slot);
                continue;
            }
            let Some(slot) = self.lists.oldest_that(main, evictable) else {
                return self.lists.oldest_that(small, evictable);
            };
            if self.slots[slot as usize].uses == 0 {
                return Some(slot);
            }
            self.slots[slot as usize].uses -= 1;
            self.promote(scope, slot);
        }
    }
}
