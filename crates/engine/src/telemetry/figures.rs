//! What was gathered.

use std::collections::BTreeMap;

/// Counts of one phase.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PhaseFigures {
    /// Rows computed.
    pub rows: u64,
    /// Wall time of the phase, logits and sampling included.
    pub seconds: f64,
    /// Experts used, counted for each row.
    pub selections: u64,
    /// Of these, left out by `--expert-top-p`.
    pub dropped: u64,
    /// Weights of those, each as a share of its row's sum, added up.
    pub dropped_weight: f64,
    /// Look-ups of one distinct expert in a layer and step.
    pub lookups: u64,
    /// Look-ups answered from pinned slots.
    pub pinned: u64,
    /// Look-ups answered from the cache.
    pub cached: u64,
    /// Look-ups of experts that had been loaded, or begun to, because they were expected.
    pub staged: u64,
    /// Look-ups that had to read.
    pub misses: u64,
    /// Time that computing stood still for a load.
    pub felt_wait_seconds: f64,
    /// Time in layers with routed experts, waits for them included.
    pub sparse_seconds: f64,
}

impl PhaseFigures {
    /// Look-ups answered without a read of their own.
    pub fn hits(&self) -> u64 {
        self.pinned + self.cached + self.staged
    }

    /// Both phases together.
    pub fn plus(&self, other: &PhaseFigures) -> PhaseFigures {
        PhaseFigures {
            rows: self.rows + other.rows,
            seconds: self.seconds + other.seconds,
            selections: self.selections + other.selections,
            dropped: self.dropped + other.dropped,
            dropped_weight: self.dropped_weight + other.dropped_weight,
            lookups: self.lookups + other.lookups,
            pinned: self.pinned + other.pinned,
            cached: self.cached + other.cached,
            staged: self.staged + other.staged,
            misses: self.misses + other.misses,
            felt_wait_seconds: self.felt_wait_seconds + other.felt_wait_seconds,
            sparse_seconds: self.sparse_seconds + other.sparse_seconds,
        }
    }
}

/// Of the computing in layers with routed experts, the share that went on while experts were being read: busy
/// time of drives less the felt wait in it, over the layers' time less the felt wait, at most 1. `None` where
/// nothing was computed. (What is read ahead goes on in other layers too, hence the bound.)
pub fn hidden_share(busy: f64, felt: f64, sparse: f64) -> Option<f64> {
    let computing = sparse - felt;
    (computing > 0.0).then(|| ((busy - felt) / computing).clamp(0.0, 1.0))
}

/// What was loaded ahead of demand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefetchFigures {
    /// Steps in which it was allowed.
    pub steps: u64,
    /// Bytes read for experts that were expected.
    pub issued_bytes: u64,
    /// Bytes of those that were asked for.
    pub useful_bytes: u64,
    /// Distinct experts chosen in layers for which there was a guess.
    pub chosen: u64,
    /// Of these, guessed.
    pub right: u64,
}

/// Figures of input and output.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IoFigures {
    /// Bytes of completed expert reads: misses, loads ahead of demand and pins.
    pub bytes: u64,
    /// Read calls of those.
    pub reads: u64,
    /// Bytes of completed reads of experts that were missed: misses × expert, padding included.
    pub demanded_bytes: u64,
    /// Read calls of those.
    pub demanded_reads: u64,
    /// Time of phases with at least one read under way.
    pub busy_seconds: f64,
    /// Integral of reads under way over that time, in read-seconds.
    pub depth_seconds: f64,
    /// Time that computing stood still for a load, by layer.
    pub felt_wait_by_layer: BTreeMap<u32, f64>,
    /// Bytes read into pinned slots.
    pub pinned_bytes: u64,
    /// Ahead of demand.
    pub prefetch: PrefetchFigures,
}

/// Everything gathered since the last reset.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// Prompt rows.
    pub prefill: PhaseFigures,
    /// Generated rows.
    pub decode: PhaseFigures,
    /// Reads.
    pub io: IoFigures,
    /// Experts that left the cache.
    pub evictions: u64,
    /// Bytes by which the cache grew while running.
    pub grown_bytes: u64,
    /// Bytes that the cache gave back because memory was short.
    pub given_back_bytes: u64,
    /// How often what the cache may take was lowered for that.
    pub shrinks: u64,
    /// How often a chunk of the cache stayed that was to go back to the system, since the device could not let go.
    pub chunks_kept: u64,
    /// Checksums verified.
    pub verified: u64,
    /// Largest anonymous memory seen at a step's end, in bytes.
    pub peak_anonymous: u64,
    /// Notices, each once.
    pub notices: Vec<String>,
}
