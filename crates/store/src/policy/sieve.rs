//! SIEVE.

use super::lists::{Lists, NONE};
use super::{ExpertId, Replacement};

/// SIEVE (Zhang and others, NSDI 2024): slots stay in the order of their coming; a hand walks from old to
/// new, spares those that were used since it last came by, and stops at one that was not.
pub struct Sieve {
    lists: Lists,
    used: Vec<bool>,
    hands: Vec<u32>,
}

impl Sieve {
    /// A policy for `scopes` scopes over `slots` slots.
    pub fn new(scopes: usize, slots: usize) -> Sieve {
        Sieve { lists: Lists::new(scopes, slots), used: vec![false; slots], hands: vec![NONE; scopes] }
    }
}

impl Replacement for Sieve {
    fn inserted(&mut self, scope: u32, slot: u32, _id: ExpertId) {
        self.lists.push_newest(scope as usize, slot);
        self.used[slot as usize] = false;
    }

    fn touched(&mut self, _scope: u32, slot: u32) {
        self.used[slot as usize] = true;
    }

    fn removed(&mut self, scope: u32, slot: u32) {
        let hand = &mut self.hands[scope as usize];
        if *hand == slot {
            *hand = self.lists.newer(slot);
        }
        self.lists.unlink(scope as usize, slot);
    }

    fn grow(&mut self, slots: usize) {
        self.lists.grow(slots);
        self.used.resize(slots, false);
    }

    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        let list = scope as usize;
        let mut slot = self.hands[list];
        let mut turns = 0;
        loop {
            if slot == NONE {
                slot = self.lists.oldest(list);
                turns += 1;
                // The first turn may begin in the middle and only spare, the second finds what it
                // spared; after a third everything is leased.
                if slot == NONE || turns > 3 {
                    return None;
                }
            }
            if evictable(slot) {
                if !self.used[slot as usize] {
                    self.hands[list] = slot;
                    return Some(slot);
                }
                self.used[slot as usize] = false;
            }
            slot = self.lists.newer(slot);
        }
    }
}
