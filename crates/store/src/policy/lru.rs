//! Least recently used.

use super::lists::Lists;
use super::{ExpertId, Replacement};

/// Least recently used: one list a scope.
pub struct Lru {
    lists: Lists,
}

impl Lru {
    /// A policy for `scopes` scopes over `slots` slots.
    pub fn new(scopes: usize, slots: usize) -> Lru {
        Lru { lists: Lists::new(scopes, slots) }
    }
}

impl Replacement for Lru {
    fn inserted(&mut self, scope: u32, slot: u32, _id: ExpertId) {
        self.lists.push_newest(scope as usize, slot);
    }

    fn touched(&mut self, scope: u32, slot: u32) {
        self.lists.unlink(scope as usize, slot);
        self.lists.push_newest(scope as usize, slot);
    }

    fn removed(&mut self, scope: u32, slot: u32) {
        self.lists.unlink(scope as usize, slot);
    }

    fn grow(&mut self, slots: usize) {
        self.lists.grow(slots);
    }

    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        self.lists.oldest_that(scope as usize, evictable)
    }
}
