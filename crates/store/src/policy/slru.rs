//! Segmented LRU.

use super::lists::Lists;
use super::{ExpertId, Replacement};

/// Segmented LRU (Karedla, Love and Wherry, 1994): newcomers are on probation; a second use protects.
/// At most four fifths of a scope's slots are protected, the least recently used of them falls back.
pub struct Slru {
    /// Lists `2 · scope` (probation) and `2 · scope + 1` (protected).
    lists: Lists,
    protected: Vec<bool>,
    scopes: Vec<Counts>,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    kept: usize,
    protected: usize,
}

impl Slru {
    /// A policy for `scopes` scopes over `slots` slots.
    pub fn new(scopes: usize, slots: usize) -> Slru {
        Slru {
            lists: Lists::new(2 * scopes, slots),
            protected: vec![false; slots],
            scopes: vec![Counts::default(); scopes],
        }
    }

    fn list(&self, scope: u32, slot: u32) -> usize {
        2 * scope as usize + usize::from(self.protected[slot as usize])
    }

    fn balance(&mut self, scope: u32) {
        let counts = &mut self.scopes[scope as usize];
        let list = 2 * scope as usize;
        while counts.protected > counts.kept * 4 / 5 {
            let slot = self.lists.oldest(list + 1);
            self.lists.unlink(list + 1, slot);
            self.lists.push_newest(list, slot);
            self.protected[slot as usize] = false;
            counts.protected -= 1;
        }
    }
}

impl Replacement for Slru {
    fn inserted(&mut self, scope: u32, slot: u32, _id: ExpertId) {
        self.lists.push_newest(2 * scope as usize, slot);
        self.scopes[scope as usize].kept += 1;
    }

    fn touched(&mut self, scope: u32, slot: u32) {
        let list = self.list(scope, slot);
        self.lists.unlink(list, slot);
        self.lists.push_newest(2 * scope as usize + 1, slot);
        let fresh = !std::mem::replace(&mut self.protected[slot as usize], true);
        self.scopes[scope as usize].protected += usize::from(fresh);
        self.balance(scope);
    }

    fn removed(&mut self, scope: u32, slot: u32) {
        let list = self.list(scope, slot);
        self.lists.unlink(list, slot);
        let counts = &mut self.scopes[scope as usize];
        counts.kept -= 1;
        counts.protected -= usize::from(std::mem::take(&mut self.protected[slot as usize]));
        self.balance(scope);
    }

    fn grow(&mut self, slots: usize) {
        self.lists.grow(slots);
        self.protected.resize(slots, false);
    }

    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        let list = 2 * scope as usize;
        self.lists.oldest_that(list, evictable).or_else(|| self.lists.oldest_that(list + 1, evictable))
    }
}
