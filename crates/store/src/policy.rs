//! Which kept expert goes when a layer keeps too many.

/// Names an expert whatever slot it sits in; ghost lists and frequency counts are kept by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertId {
    /// Index of the layer among the store's layers.
    pub layer: u32,
    /// Expert number.
    pub expert: u32,
}

/// A replacement policy over kept slots.
///
/// A *scope* is a set of slots that share one limit: today a layer, for a global pool a size class.
/// The slot table decides *when* a scope holds too much, the policy *which* slot goes.
/// Every call must take constant time in the number of slots; [`Replacement::victim`] may also
/// step over slots that are leased. Called under the table's lock: no I/O, no locks.
pub trait Replacement: Send {
    /// `slot` of `scope` now keeps `id`.
    fn inserted(&mut self, scope: u32, slot: u32, id: ExpertId);
    /// A fetch found `slot`.
    fn touched(&mut self, scope: u32, slot: u32);
    /// `slot` is no longer kept (evicted; possibly not by this policy's choice).
    fn removed(&mut self, scope: u32, slot: u32);
    /// The slot to evict next, among those that `evictable` allows. It is not removed yet.
    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32>;
}

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Link {
    older: u32,
    newer: u32,
}

#[derive(Clone, Copy)]
struct Ends {
    oldest: u32,
    newest: u32,
}

/// Least recently used: a doubly linked list per scope, threaded through an array over slots.
pub struct Lru {
    links: Vec<Link>,
    ends: Vec<Ends>,
}

impl Lru {
    /// A policy for `scopes` scopes over `slots` slots.
    pub fn new(scopes: usize, slots: usize) -> Lru {
        let link = Link { older: NONE, newer: NONE };
        let ends = Ends { oldest: NONE, newest: NONE };
        Lru { links: vec![link; slots], ends: vec![ends; scopes] }
    }

    fn push_newest(&mut self, scope: u32, slot: u32) {
        let ends = &mut self.ends[scope as usize];
        let older = std::mem::replace(&mut ends.newest, slot);
        match older {
            NONE => ends.oldest = slot,
            older => self.links[older as usize].newer = slot,
        }
        self.links[slot as usize] = Link { older, newer: NONE };
    }

    fn unlink(&mut self, scope: u32, slot: u32) {
        let Link { older, newer } = self.links[slot as usize];
        let ends = &mut self.ends[scope as usize];
        match older {
            NONE => ends.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => ends.newest = older,
            newer => self.links[newer as usize].older = older,
        }
    }
}

impl Replacement for Lru {
    fn inserted(&mut self, scope: u32, slot: u32, _id: ExpertId) {
        self.push_newest(scope, slot);
    }

    fn touched(&mut self, scope: u32, slot: u32) {
        self.unlink(scope, slot);
        self.push_newest(scope, slot);
    }

    fn removed(&mut self, scope: u32, slot: u32) {
        self.unlink(scope, slot);
    }

    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        let mut slot = self.ends[scope as usize].oldest;
        while slot != NONE && !evictable(slot) {
            slot = self.links[slot as usize].newer;
        }
        (slot != NONE).then_some(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Two scopes with interleaved calls behave as two plain vectors, oldest first.
        #[test]
        fn lru_orders_as_a_plain_vector(ops in prop::collection::vec((0u8..3, 0u32..8), 0..200)) {
            let mut lru = Lru::new(2, 8);
            let mut plain: [Vec<u32>; 2] = Default::default();
            for (op, slot) in ops {
                let scope = slot % 2;
                let list = &mut plain[scope as usize];
                let at = list.iter().position(|&s| s == slot);
                match (op, at) {
                    (0, None) => {
                        lru.inserted(scope, slot, ExpertId { layer: scope, expert: slot });
                        list.push(slot);
                    }
                    (1, Some(at)) => {
                        lru.touched(scope, slot);
                        list.remove(at);
                        list.push(slot);
                    }
                    (2, Some(at)) => {
                        lru.removed(scope, slot);
                        list.remove(at);
                    }
                    _ => {}
                }
                for scope in 0..2u32 {
                    let list = &plain[scope as usize];
                    prop_assert_eq!(lru.victim(scope, &|_| true), list.first().copied());
                    // The oldest is leased: the next goes.
                    prop_assert_eq!(lru.victim(scope, &|s| Some(&s) != list.first()), list.get(1).copied());
                }
            }
        }
    }
}
