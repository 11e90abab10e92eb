//! Where barriers are needed.

use metaltail_kernels::Footprint;

/// What was recorded since the last barrier.
#[derive(Debug, Default)]
pub(crate) struct Hazards {
    since: Footprint,
}

impl Hazards {
    /// Adds a launch. Whether a barrier is needed before it, which is taken to be set then.
    pub(crate) fn needs_barrier(&mut self, next: &Footprint) -> bool {
        let conflicts = self.since.conflicts(next);
        if conflicts {
            self.clear();
        }
        self.since.reads.extend(&next.reads);
        self.since.writes.extend(next.written());
        conflicts
    }

    /// All that comes is ordered behind what was.
    pub(crate) fn clear(&mut self) {
        self.since = Footprint::default();
    }
}

#[cfg(test)]
mod tests {
    use metaltail_kernels::{Buffer, Extent};

    use super::*;

    fn footprint(reads: &[(u32, usize, usize)], writes: &[(u32, usize, usize)]) -> Footprint {
        let extents = |all: &[(u32, usize, usize)]| {
            all.iter().map(|&(buffer, start, end)| Extent { buffer: Buffer(buffer), start, end }).collect()
        };
        Footprint { reads: extents(reads), writes: extents(writes), changes: Vec::new() }
    }

    #[test]
    fn readers_and_writers_of_one_place_are_kept_apart() {
        let read = footprint(&[(0, 0, 10)], &[(1, 0, 10)]);
        for (next, needed, what) in [
            (footprint(&[(0, 0, 10)], &[(2, 0, 10)]), false, "two readers"),
            (footprint(&[(1, 9, 12)], &[(2, 0, 10)]), true, "read after write"),
            (footprint(&[(1, 10, 12)], &[(2, 0, 10)]), false, "behind what was written"),
            (footprint(&[], &[(0, 3, 4)]), true, "write after read"),
            (footprint(&[], &[(1, 3, 4)]), true, "write after write"),
        ] {
            let mut hazards = Hazards::default();
            assert!(!hazards.needs_barrier(&read));
            assert_eq!(hazards.needs_barrier(&next), needed, "{what}");
        }
    }

    #[test]
    fn after_a_barrier_what_came_before_counts_no_more() {
        let (write, read) = (footprint(&[], &[(0, 0, 9)]), footprint(&[(0, 0, 9)], &[(1, 0, 9)]));
        let mut hazards = Hazards::default();
        assert!(!hazards.needs_barrier(&write) && hazards.needs_barrier(&read));
        assert!(!hazards.needs_barrier(&footprint(&[(0, 0, 9)], &[])), "the write was before the barrier");
        assert!(
            hazards.needs_barrier(&footprint(&[(1, 0, 9)], &[])),
            "what needed the barrier counts from there"
        );
        assert!(!hazards.needs_barrier(&footprint(&[], &[(2, 0, 9)])));
        hazards.clear();
        assert!(!hazards.needs_barrier(&write));
    }

    #[test]
    fn what_is_changed_in_place_is_written() {
        let mut hazards = Hazards::default();
        let change = Footprint { changes: footprint(&[], &[(0, 0, 9)]).writes, ..Footprint::default() };
        assert!(!hazards.needs_barrier(&change) && hazards.needs_barrier(&change));
    }
}
