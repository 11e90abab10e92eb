//! Keeps the cache as large as memory allows while the process runs: a pure function of readings.
//!
//! The limit follows the machine: it falls at once when others need memory and rises when there has been more
//! for a while, an explicit one up to what was said. What the cache *may* take is kept within it, not only what
//! it has: others may need the difference before the next look. With room below the limit and no trouble lately
//! the cache takes a chunk.

use std::time::Duration;

use crate::budget::{Budget, LimitSource, usual_limit};

/// How often the machine is looked at: others that take 100 MiB a second have a tenth of a small group by then.
const PROBE_EVERY: Duration = Duration::from_millis(250);
/// How often pressure makes the cache give back: its measure is a mean of ten seconds.
const PRESSED_EVERY: Duration = Duration::from_secs(1);
/// More room counts after it has been there so long.
const RISE_AFTER: Duration = Duration::from_secs(10);
/// Nothing grows for so long after memory was short.
const CALM: Duration = Duration::from_secs(30);
/// Share of a limit by which readings may wander.
const SLACK: u64 = 32;
/// Percent of time with stalls that is too much, where there is also little left.
const PRESSURE: f64 = 10.0;
/// Given back at a time while there is pressure.
const STEP: u64 = 256 << 20;
/// Swapped out between two looks, it is more than chance.
const SWAPPED: u64 = 16 << 20;

/// What the machine says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probe {
    /// Anonymous memory that this process may have in all; see [`crate::Machine::headroom`].
    pub headroom: u64,
    /// See [`crate::Machine::memory_pressure`].
    pub pressure: Option<f64>,
    /// See [`crate::Machine::own_swapped_now`]: a hit there costs a read and a page fault for each page of it.
    pub swapped: u64,
}

/// What the cache is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Nothing.
    Stay,
    /// Give memory back until the process is at this limit; see [`crate::ExpertStore::enforce`].
    GiveBack {
        /// Anonymous memory in bytes.
        limit: u64,
    },
    /// Keep all that is charged within this limit: lower what the cache may take, and give back what it has of
    /// that; see [`crate::ExpertStore::restrict`].
    Restrict {
        /// Charged memory in bytes.
        limit: u64,
    },
    /// Take as much more as fits into these bytes; see [`crate::ExpertStore::grow`].
    Take {
        /// Bytes.
        bytes: u64,
    },
}

/// Judges readings; see the module.
#[derive(Clone, Debug)]
pub struct Governor {
    limit: u64,
    /// An explicit limit: more is never taken.
    ceiling: Option<u64>,
    growth: bool,
    probed: Option<Duration>,
    /// When pressure last made the cache give back.
    pressed: Option<Duration>,
    /// Since when there has been more room, and how much at least.
    risen: Option<(Duration, u64)>,
    /// No growth before.
    calm_at: Duration,
    /// What was swapped out when the machine was looked at.
    swapped: u64,
}

impl Governor {
    /// A governor of a process with this budget. Without `growth` it only gives back.
    pub fn new(budget: &Budget, growth: bool) -> Governor {
        let held = matches!(budget.source, LimitSource::Explicit | LimitSource::Device(_));
        let ceiling = held.then_some(budget.limit);
        let (limit, calm_at) = (budget.limit, Duration::ZERO);
        Governor { limit, ceiling, growth, probed: None, pressed: None, risen: None, calm_at, swapped: 0 }
    }

    /// The limit now.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether the next judgement wants a look at the machine. `now` counts from any one time.
    pub fn wants_probe(&self, now: Duration) -> bool {
        self.probed.is_none_or(|last| now.saturating_sub(last) >= PROBE_EVERY)
    }

    /// Judges the process's anonymous memory now and what is charged in all, the cache's slots included.
    pub fn judge(&mut self, now: Duration, anon: u64, charged: u64, probe: Option<Probe>) -> Order {
        if let Some(probe) = probe {
            self.probed = Some(now);
            self.follow(now, probe.headroom);
            let swapped = probe.swapped.saturating_sub(std::mem::replace(&mut self.swapped, probe.swapped));
            if swapped >= SWAPPED {
                self.calm_at = now + CALM;
                return Order::GiveBack { limit: self.limit.min(anon.saturating_sub(swapped)) };
            }
            let short = probe.headroom < anon.saturating_add(probe.headroom - usual_limit(probe.headroom));
            let rested = self.pressed.is_none_or(|last| now.saturating_sub(last) >= PRESSED_EVERY);
            if short && rested && probe.pressure.is_some_and(|percent| percent >= PRESSURE) {
                self.pressed = Some(now);
                self.calm_at = now + CALM;
                return Order::GiveBack { limit: self.limit.min(anon.saturating_sub(STEP)) };
            }
        }
        if charged > self.limit {
            self.calm_at = now + CALM;
            return Order::Restrict { limit: self.limit };
        }
        if anon > self.limit {
            self.calm_at = now + CALM;
            return Order::GiveBack { limit: self.limit };
        }
        let room = self.limit.saturating_sub(charged);
        if self.growth && probe.is_some() && now >= self.calm_at && room > 0 {
            return Order::Take { bytes: room };
        }
        Order::Stay
    }

    /// There was nothing to take: asking again soon is of no use.
    pub fn took_nothing(&mut self, now: Duration) {
        self.calm_at = now + RISE_AFTER;
    }

    fn follow(&mut self, now: Duration, headroom: u64) {
        let fresh = match self.ceiling {
            // What was demanded stands as long as there is so much.
            Some(ceiling) if headroom >= ceiling => ceiling,
            Some(ceiling) => usual_limit(headroom).min(ceiling),
            None => usual_limit(headroom),
        };
        let slack = self.limit / SLACK;
        if fresh < self.limit.saturating_sub(slack) {
            self.limit = fresh;
            self.risen = None;
            self.calm_at = now + CALM;
        } else if fresh > self.limit.saturating_add(slack) {
            let (since, least) = self.risen.unwrap_or((now, fresh));
            let least = least.min(fresh);
            self.risen = Some((since, least));
            if now.saturating_sub(since) >= RISE_AFTER {
                self.limit = least;
                self.risen = None;
            }
        } else {
            self.risen = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn governor(limit: u64, source: LimitSource, growth: bool) -> Governor {
        Governor::new(&Budget { limit, source, terms: Vec::new() }, growth)
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A machine that leaves a default limit of `gib`.
    fn leaves(gib: u64) -> Option<Probe> {
        Some(Probe { headroom: gib * GIB + (512 << 20), pressure: Some(0.0), swapped: 0 })
    }

    #[test]
    fn the_limit_falls_at_once_and_rises_after_a_while() {
        let mut g = governor(8 * GIB, LimitSource::Memory, true);
        assert_eq!(g.judge(at(0), 7 * GIB, 8 * GIB, leaves(8)), Order::Stay);
        assert_eq!(g.judge(at(1), 7 * GIB, 8 * GIB, leaves(6)), Order::Restrict { limit: 6 * GIB });
        assert_eq!(g.judge(at(2), 6 * GIB, 6 * GIB, leaves(8)), Order::Stay);
        assert_eq!(g.judge(at(9), 6 * GIB, 6 * GIB, leaves(7)), Order::Stay);
        // Ten seconds later the least of what was seen counts; growth waits for thirty seconds of calm.
        assert_eq!(g.judge(at(12), 6 * GIB, 6 * GIB, leaves(8)), Order::Stay);
        assert_eq!(g.limit(), 7 * GIB);
        assert_eq!(g.judge(at(31), 6 * GIB, 6 * GIB, leaves(7)), Order::Take { bytes: GIB });
    }

    #[test]
    fn an_explicit_limit_stands_while_there_is_so_much_and_comes_back() {
        let mut g = governor(4 * GIB, LimitSource::Explicit, true);
        for second in 0..60 {
            assert_eq!(g.judge(at(second), 3 * GIB, 4 * GIB, leaves(64)), Order::Stay);
        }
        // Without a reserve: that is the user's to say.
        let tight = Some(Probe { headroom: 4 * GIB, pressure: None, swapped: 0 });
        let others = Some(Probe { headroom: 3 * GIB, pressure: None, swapped: 0 });
        assert_eq!(g.judge(at(60), 3 * GIB, 4 * GIB, tight), Order::Stay);
        assert_eq!(g.judge(at(61), 5 * GIB, 4 * GIB, tight), Order::GiveBack { limit: 4 * GIB });
        // Others in its group take memory: less is better than being killed.
        let limit = usual_limit(3 * GIB);
        assert_eq!(g.judge(at(62), 3 * GIB, 4 * GIB, others), Order::Restrict { limit });
        assert_eq!(g.judge(at(63), 2 * GIB, 2 * GIB, leaves(64)), Order::Stay);
        assert_eq!(g.judge(at(93), 2 * GIB, 2 * GIB, leaves(64)), Order::Take { bytes: 2 * GIB });
    }

    #[test]
    fn what_may_be_taken_counts_before_it_is() {
        let mut g = governor(8 * GIB, LimitSource::Memory, false);
        // Nothing was loaded yet, and the next loads would take what others have now.
        assert_eq!(g.judge(at(0), GIB, 8 * GIB, leaves(5)), Order::Restrict { limit: 5 * GIB });
        assert_eq!(g.judge(at(1), GIB, 5 * GIB, leaves(5)), Order::Stay);
    }

    #[test]
    fn a_file_mapped_or_a_wandering_reading_evicts_nothing() {
        let mut g = governor(32 * GIB, LimitSource::Memory, false);
        for (second, headroom) in [(0, 32), (1, 32), (2, 33), (3, 32)] {
            assert_eq!(g.judge(at(second), 31 * GIB, 32 * GIB, leaves(headroom)), Order::Stay);
        }
        assert_eq!(g.limit(), 32 * GIB);
    }

    #[test]
    fn pressure_counts_only_where_little_is_left() {
        let mut g = governor(8 * GIB, LimitSource::Memory, true);
        let stalled = |headroom| Some(Probe { headroom, pressure: Some(40.0), swapped: 0 });
        // Refaults of the page cache stall too; there is plenty all the same.
        assert_eq!(g.judge(at(0), 6 * GIB, 8 * GIB, stalled(9 * GIB)), Order::Stay);
        let order = g.judge(at(1), 8 * GIB, 8 * GIB, stalled(8 * GIB + (300 << 20)));
        assert!(matches!(order, Order::GiveBack { limit } if limit <= 8 * GIB - STEP), "{order:?}");
    }

    #[test]
    fn what_is_swapped_out_is_given_back_and_nothing_grows_meanwhile() {
        let mut g = governor(8 * GIB, LimitSource::Explicit, true);
        let swapped = |mib: u64| leaves(8).map(|probe| Probe { swapped: mib << 20, ..probe });
        // A little of it goes in any long run; what is gone for good is no reason to give more.
        assert_eq!(g.judge(at(0), 7 * GIB, 8 * GIB, swapped(10)), Order::Stay);
        let limit = 6 * GIB - (490 << 20);
        assert_eq!(g.judge(at(1), 6 * GIB, 7 * GIB, swapped(500)), Order::GiveBack { limit });
        assert_eq!(g.judge(at(2), 5 * GIB, 6 * GIB, swapped(500)), Order::Stay);
        assert_eq!(g.judge(at(31), 5 * GIB, 6 * GIB, swapped(500)), Order::Take { bytes: 2 * GIB });
    }

    #[test]
    fn without_growth_room_is_left_alone() {
        let mut g = governor(8 * GIB, LimitSource::Memory, false);
        assert_eq!(g.judge(at(0), GIB, 2 * GIB, leaves(8)), Order::Stay);
        let mut g = governor(8 * GIB, LimitSource::Memory, true);
        assert_eq!(g.judge(at(0), GIB, 2 * GIB, leaves(8)), Order::Take { bytes: 6 * GIB });
        g.took_nothing(at(0));
        assert_eq!(g.judge(at(1), GIB, 2 * GIB, leaves(8)), Order::Stay);
    }
}
