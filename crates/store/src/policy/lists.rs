//! Doubly linked lists of slots, threaded through one array.

pub(super) const NONE: u32 = u32::MAX;

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

/// Many lists over the same slots. A slot is in one list at most; the caller knows in which.
pub(super) struct Lists {
    links: Vec<Link>,
    ends: Vec<Ends>,
}

impl Lists {
    pub(super) fn new(lists: usize, slots: usize) -> Lists {
        Lists {
            links: vec![Link { older: NONE, newer: NONE }; slots],
            ends: vec![Ends { oldest: NONE, newest: NONE }; lists],
        }
    }

    /// There are `slots` slots from now on.
    pub(super) fn grow(&mut self, slots: usize) {
        self.links.resize(slots, Link { older: NONE, newer: NONE });
    }

    pub(super) fn push_newest(&mut self, list: usize, slot: u32) {
        let ends = &mut self.ends[list];
        let older = std::mem::replace(&mut ends.newest, slot);
        match older {
            NONE => ends.oldest = slot,
            older => self.links[older as usize].newer = slot,
        }
        self.links[slot as usize] = Link { older, newer: NONE };
    }

    pub(super) fn unlink(&mut self, list: usize, slot: u32) {
        let Link { older, newer } = self.links[slot as usize];
        let ends = &mut self.ends[list];
        match older {
            NONE => ends.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => ends.newest = older,
            newer => self.links[newer as usize].older = older,
        }
    }

    /// Puts all of `from` before the oldest of `to`.
    pub(super) fn prepend(&mut self, from: usize, to: usize) {
        let none = Ends { oldest: NONE, newest: NONE };
        let moved = std::mem::replace(&mut self.ends[from], none);
        if moved.newest == NONE {
            return;
        }
        let ends = &mut self.ends[to];
        let next = std::mem::replace(&mut ends.oldest, moved.oldest);
        match next {
            NONE => ends.newest = moved.newest,
            next => self.links[next as usize].older = moved.newest,
        }
        self.links[moved.newest as usize].newer = next;
    }

    pub(super) fn is_empty(&self, list: usize) -> bool {
        self.ends[list].oldest == NONE
    }

    pub(super) fn oldest(&self, list: usize) -> u32 {
        self.ends[list].oldest
    }

    pub(super) fn newer(&self, slot: u32) -> u32 {
        self.links[slot as usize].newer
    }

    /// The first slot that passes, oldest first.
    pub(super) fn oldest_that(&self, list: usize, passes: &dyn Fn(u32) -> bool) -> Option<u32> {
        let mut slot = self.ends[list].oldest;
        while slot != NONE && !passes(slot) {
            slot = self.links[slot as usize].newer;
        }
        (slot != NONE).then_some(slot)
    }

    /// The first slot that passes, newest first.
    pub(super) fn newest_that(&self, list: usize, passes: &dyn Fn(u32) -> bool) -> Option<u32> {
        let mut slot = self.ends[list].newest;
        while slot != NONE && !passes(slot) {
            slot = self.links[slot as usize].older;
        }
        (slot != NONE).then_some(slot)
    }
}
