//! The one stream of events from which all telemetry of the store is drawn.

use std::time::Duration;

/// Receives events, from the fetching thread and from loader threads, never under a lock of the store.
pub trait Observer: Send + Sync {
    /// Takes one event. Must be quick: a loader or the forward pass waits for it.
    fn on(&self, event: &StoreEvent);
}

/// An observer that ignores everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn on(&self, _: &StoreEvent) {}
}

/// Why an expert left the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EvictReason {
    /// Another expert, of its layer or of those that share its slots, took its place.
    Replaced,
    /// Memory was over its limit.
    Memory,
}

/// Something that happened in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreEvent {
    /// A fetch looked its experts up; `lookups == cached + misses`.
    Lookup {
        /// Layer.
        layer: u32,
        /// Distinct experts asked for.
        lookups: u32,
        /// Of these, in memory.
        cached: u32,
        /// Of these, not in memory.
        misses: u32,
        /// Of the misses, those that another fetch was loading already (they cause no read).
        joined: u32,
    },
    /// A caller of `next_batch` stood still for an expert.
    Waited {
        /// Layer.
        layer: u32,
        /// For how long.
        felt: Duration,
    },
    /// A loader began to read an expert.
    ReadStarted {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// Time from the request to now.
        queued: Duration,
    },
    /// A loader is done with an expert, well or not.
    ReadFinished {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// Bytes that the operating system delivered, alignment padding and repeated blocks included.
        bytes: u64,
        /// Read calls issued.
        calls: u32,
        /// Time in read calls.
        service: Duration,
        /// Whether the expert arrived whole.
        ok: bool,
    },
    /// A queued load was dropped before it began, since no fetch wants it any more.
    LoadCancelled {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
    },
    /// An expert left the cache.
    Evicted {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// Why.
        reason: EvictReason,
    },
    /// An expert's checksum was verified: once an expert and store, or at every load from several drives.
    Verified {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
    },
    /// Memory was over its limit; slots were given back to the system and caps lowered for good.
    Shrunk {
        /// Bytes given back.
        bytes: u64,
        /// Bytes that remain over the limit and are not the store's to give.
        short: u64,
        /// Smallest cap of a layer from now on.
        min_cap: usize,
        /// Largest cap of a layer from now on.
        max_cap: usize,
    },
    /// Something the user should read once.
    Notice(String),
}
