//! Traces of routing: which experts a run chose, token by token; and their replay on any policy.
//!
//! A trace is comma-separated text. Lines that begin with `#` come first and give, among other things, each
//! layer's bytes an expert; then a line of names; then a line a selection:
//!
//! ```text
//! # route_trace v1
//! # model=… arch=… n_layer=48 n_expert=128 n_expert_used=6
//! # layer=0 expert_bytes=3059712 dense_bytes=11953152
//! turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
//! 0,0,0,0,0,49,0.221297,0,3059712
//! ```
//! `phase` is 0 for prefill and 1 for decode, `step` the row within the turn and phase, `slot` the rank,
//! `weight` the router's. Prefill goes layer by layer, decode token by token. `residency` and what else
//! follows is not read, `expert_bytes` only where the head names no size of the layer.

mod parse;
mod phases;
mod replay;
mod write;

pub use phases::{PhaseError, PhaseSpec};
pub use replay::{Counts, Played, Rule, Scope, replay, replay_pinned};
pub use write::TraceWriter;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use metaltail_container::read_regular;

use crate::policy::Share;

/// Bytes of a file at most: 200 thousand tokens of GLM-5 (600 selections a token, some 35 bytes each).
const MOST_BYTES: u64 = 4 << 30;

/// What a step is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TracePhase {
    /// Reading a prompt.
    Prefill,
    /// Generating.
    Decode,
}

/// A layer of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceLayer {
    /// Its number in the model.
    pub number: u32,
    /// Bytes of one of its experts.
    pub expert_bytes: u64,
    /// One more than the largest expert that appears.
    pub experts: usize,
}

/// One use of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The expert.
    pub expert: u32,
    /// How much the router wanted it.
    pub share: Share,
}

/// What one token chose in one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRow {
    /// Index among the trace's layers.
    pub layer: u32,
    /// What for.
    pub phase: TracePhase,
    /// Rows of one number were computed together: all of a prompt's rows of a layer, one row in decode.
    pub group: u32,
    /// Indices of its selections.
    pub selections: Range<usize>,
}

/// A trace in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Layers that choose experts, ascending by number.
    pub layers: Vec<TraceLayer>,
    /// Rows in the order in which they were computed.
    pub rows: Vec<TraceRow>,
    /// Selections of all rows.
    pub selections: Vec<Selection>,
}

/// Why a trace is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read the trace {}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// It is no text.
    #[error("{} is no trace: it is not UTF-8 text", file.display())]
    NotText {
        /// The file.
        file: PathBuf,
    },
    /// A line is not what it should be.
    #[error("line {line} of the trace: {reason}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// It names more experts than any model has.
    #[error("the trace names {experts} experts over all its layers; at most {most} are taken")]
    TooManyExperts {
        /// Experts, by the largest number of each layer.
        experts: usize,
        /// The limit.
        most: usize,
    },
    /// Nothing says how large a layer's experts are.
    #[error(
        "the trace does not say how large the experts of layer {layer} are: add a line `# layer={layer} expert_bytes=…` at its head"
    )]
    NoSize {
        /// The layer.
        layer: u32,
    },
    /// There are no selections.
    #[error("the trace has no selections")]
    Empty,
}

impl Trace {
    /// Reads a file.
    ///
    /// # Errors
    /// A file that cannot be read or is no trace.
    pub fn read(file: &Path) -> Result<Trace, TraceError> {
        let bytes = read_regular(file, MOST_BYTES)
            .map_err(|source| TraceError::Read { file: file.into(), source })?;
        let text = std::str::from_utf8(&bytes).map_err(|_| TraceError::NotText { file: file.into() })?;
        Trace::parse(text)
    }

    /// Bytes of the distinct experts that a decoded token uses, the mean over all; 0 without decode.
    ///
    /// A cache smaller than this cannot hold what one token needs: below it, LRU finds nothing.
    pub fn token_bytes(&self) -> u64 {
        let (mut bytes, mut rows_of) = (0u128, HashMap::<u32, u128>::new());
        for row in self.rows.iter().filter(|row| row.phase == TracePhase::Decode) {
            let layer = &self.layers[row.layer as usize];
            bytes += row.selections.len() as u128 * u128::from(layer.expert_bytes);
            *rows_of.entry(row.layer).or_default() += 1;
        }
        let tokens = rows_of.into_values().max().unwrap_or(1);
        u64::try_from(bytes / tokens).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests;
