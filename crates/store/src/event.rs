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

/// Where an expert in memory counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// On its way to a fetch, or leased and not kept.
    InFlight,
    /// Kept for good, for it was used most in earlier runs.
    Pinned,
    /// Kept until the policy chooses it as a victim.
    Cached,
    /// Loaded since it was expected to be asked for.
    Staged,
}

/// What a load is for; the first goes before the second, that before the third.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadRank {
    /// A fetch waits for it.
    Demand,
    /// It is expected to be asked for soon.
    Speculation,
    /// It belongs in a pinned slot.
    Pin,
}

/// Something that happened in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreEvent {
    /// A fetch looked its experts up; `lookups == pinned + cached + staged + misses`.
    Lookup {
        /// Layer.
        layer: u32,
        /// Distinct experts asked for.
        lookups: u32,
        /// Of these, in pinned slots, or on their way there unasked.
        pinned: u32,
        /// Of these, in memory otherwise.
        cached: u32,
        /// Of these, in staged slots, or on their way there before they were asked for.
        staged: u32,
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
        /// What it was loaded for when that began.
        rank: LoadRank,
        /// Whether the expert arrived whole.
        ok: bool,
    },
    /// An expert was asked for that had been loaded, or begun to load, because it was expected.
    SpeculationUsed {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// Bytes that its load read.
        bytes: u64,
    },
    /// An expert left its staged slot without having been asked for.
    SpeculationDiscarded {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// Bytes that its load read.
        bytes: u64,
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
    /// Memory was over its limit, and a chunk of the arena stays although it was to go: who knows it by address
    /// could not let go of it.
    ChunkKept {
        /// Bytes of it.
        bytes: u64,
        /// Why, in the listener's words.
        reason: String,
    },
    /// There is more room than before: the cache grew.
    Grown {
        /// Bytes that it may take more.
        bytes: u64,
        /// Smallest cap of a layer from now on.
        min_cap: usize,
        /// Largest cap of a layer from now on.
        max_cap: usize,
    },
    /// Something the user should read once.
    Notice(String),
}
