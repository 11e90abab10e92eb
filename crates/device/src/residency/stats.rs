//! Figures of residency.

use std::time::Duration;

/// Counted since the ledger began; times are the driver's clock's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResidencyStats {
    /// Allocations declared now.
    pub allocations: usize,
    /// Sets in use now.
    pub sets: usize,
    /// Bytes declared now.
    pub bytes: u64,
    /// Allocations declared in all.
    pub registered: u64,
    /// Allocations removed in all.
    pub unregistered: u64,
    /// Submissions.
    pub submissions: u64,
    /// Declarations for a single submission, over all of them.
    pub declared: u64,
    /// Commits, of additions and of removals.
    pub commits: u64,
    /// Time in commits of additions.
    pub flush: Duration,
    /// Time in commits of removals.
    pub unregister: Duration,
    /// Sets given up under memory pressure.
    pub given_up: u64,
    /// Sets asked for again after that.
    pub rebuilt: u64,
    /// Times that idle sets were kept resident.
    pub kept_alive: u64,
    /// Times that the driver refused that.
    pub keep_alive_refused: u64,
    /// Captures that made sets be walked.
    pub captures: u64,
    /// Why everything is declared with each submission, although sets were asked for.
    pub fallback: Option<String>,
}

impl ResidencyStats {
    /// Declarations a submission, in the mean; none without submissions.
    pub fn declared_per_submit(&self) -> Option<f64> {
        (self.submissions > 0).then(|| self.declared as f64 / self.submissions as f64)
    }
}
