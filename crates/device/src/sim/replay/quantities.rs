//! What a run did, apart from what it cost, so that other prices are tried without another run.

use std::collections::BTreeMap;

use crate::sim::driver::SimCounts;
use crate::sim::profile::Profile;

/// Seconds of the device and its driver.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeviceSeconds {
    /// In kernels.
    pub kernel: f64,
    /// Handed over and not in kernels.
    pub stall: f64,
    /// What else slowed down while memory was wired.
    pub coupled: f64,
    /// Making memory known.
    pub register: f64,
    /// Commits of additions.
    pub flush: f64,
    /// Commits of removals.
    pub unregister: f64,
}

/// Submissions that declare more than so many bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Above {
    bytes: f64,
    submissions: f64,
    /// Bytes that they declare in all.
    declared: f64,
}

/// Counts of a run without pauses and pressure.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Quantities {
    /// Submissions.
    pub submissions: u64,
    /// Allocations declared with them, in all.
    pub declared: u64,
    /// Bytes that kernels read.
    pub kernel_bytes: u64,
    /// Bytes wired since memory declared before had been removed.
    pub rewired: u64,
    /// Allocations made known while running.
    pub registered: u64,
    /// Commits.
    pub commits: u64,
    /// Members of the sets committed, over all commits.
    pub members: u64,
    /// Submissions by the bytes that each declares; those that wire everything are not among them.
    walks: BTreeMap<u64, u64>,
    /// The same from the largest on, summed up.
    above: Vec<Above>,
}

impl Quantities {
    /// Submissions were made; `walk` has the allocations and bytes that each declares, and whether it wires
    /// all of them.
    pub(super) fn submitted(&mut self, times: u64, kernel_bytes: u64, walk: Option<(usize, u64, bool)>) {
        self.submissions += times;
        self.kernel_bytes += kernel_bytes * times;
        if let Some((allocations, bytes, anew)) = walk {
            self.declared += allocations as u64 * times;
            if !anew {
                *self.walks.entry(bytes).or_default() += times;
            }
        }
    }

    pub(super) fn counted(&mut self, now: &SimCounts, before: &SimCounts) {
        self.registered = now.registered - before.registered;
        self.commits = now.commits - before.commits;
        self.members = now.members - before.members;
        self.rewired = now.rewired - before.rewired;
    }

    pub(super) fn end(mut self) -> Quantities {
        let mut sum = Above { bytes: 0.0, submissions: 0.0, declared: 0.0 };
        for (&bytes, &submissions) in self.walks.iter().rev() {
            sum.bytes = bytes as f64;
            sum.submissions += submissions as f64;
            sum.declared += bytes as f64 * submissions as f64;
            self.above.push(sum);
        }
        self
    }

    /// Bytes above `limit` that submissions declare, in all.
    fn over(&self, limit: f64) -> f64 {
        let more = self.above.partition_point(|above| above.bytes > limit);
        let Some(last) = more.checked_sub(1).and_then(|n| self.above.get(n)) else { return 0.0 };
        last.declared - limit * last.submissions
    }

    /// What the run would have cost at a machine's prices: as the device itself charges, but for time between
    /// commits of additions and of removals, which is one here.
    pub fn price(&self, profile: &Profile) -> DeviceSeconds {
        let rewire = profile.rewire * (self.over(profile.unwired()) + self.rewired as f64);
        DeviceSeconds {
            kernel: self.kernel_bytes as f64 / profile.kernel_rate,
            stall: profile.submit * self.submissions as f64 + profile.declare * self.declared as f64 + rewire,
            coupled: profile.coupling * rewire,
            register: profile.register * self.registered as f64,
            flush: profile.commit * self.commits as f64 + profile.commit_member * self.members as f64,
            unregister: 0.0,
        }
    }
}
