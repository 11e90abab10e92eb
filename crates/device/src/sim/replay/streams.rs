//! The drive, the page cache and the processor of a run.

use super::Run;
use crate::sim::profile::Profile;

/// Where the selections of a run come from, and what is waited for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Streams {
    /// Share of the selections that the engine has in memory.
    pub hits: f64,
    /// Share that is read and that the system's page cache has.
    pub page_hits: f64,
    /// Seconds of waiting for reads.
    pub disk: f64,
    /// Seconds of everything that is neither device nor waiting.
    pub host: f64,
}

impl Streams {
    /// Of a run on a machine, without the session's factor.
    ///
    /// The page cache has the memory that is left beside cached, pinned and other memory. It sees only what the
    /// engine's cache missed, and keeps the last of it: experts that went into the engine's cache with the same
    /// read. While it is the smaller of both it holds nothing that the other has not. So the larger one counts,
    /// and this is why a run that declares once is as fast with any cap.
    pub fn of(profile: &Profile, run: &Run) -> Streams {
        let (workload, streaming) = (&profile.workload, &profile.streaming);
        let layers = workload.layers as f64;
        let slots = run.most_slots() as f64;
        let pinned = run.pinned_a_layer(workload);
        let hits = run.hits.unwrap_or_else(|| workload.hits(slots + pinned)).clamp(0.0, 1.0);
        let taken = (slots + pinned) * layers * workload.expert_bytes as f64;
        let left = (profile.memory as f64 - workload.rest as f64 - taken).max(0.0);
        let page = if run.direct { 0.0 } else { left / workload.expert_bytes as f64 / layers };
        let all = hits.max(workload.hits(pinned + slots.max(page)));
        let bytes = workload.bytes();
        let wait = (1.0 - all) * bytes / streaming.drive_rate + (all - hits) * bytes / streaming.page_rate;
        let left = if run.async_loaders { streaming.async_wait } else { 1.0 };
        let host = streaming.host * workload.tokens as f64;
        Streams { hits, page_hits: all - hits, disk: wait * left, host }
    }
}
