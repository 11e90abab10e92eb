//! What a step carries through the layers.

use std::sync::atomic::{AtomicBool, Ordering};

use metaltail_kernels::{Kernels, Pool};

use crate::error::ModelError;
use crate::kv::KvCache;
use crate::observer::ModelObserver;

/// What a row is computed for. A device may add in another order for a prompt than for what follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The row is of a text that was there.
    Prompt,
    /// The row was generated.
    Generation,
}

/// One row of a step: the next position of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Index into the step's caches.
    pub sequence: usize,
    /// Position in that sequence.
    pub position: u32,
    /// Token id at that position.
    pub token: u32,
    /// Part of the prompt, or generated.
    pub phase: Phase,
}

/// Asks a running step to end; seen between layers.
#[derive(Debug, Default)]
pub struct CancelFlag(AtomicBool);

impl CancelFlag {
    /// A flag that is not set.
    pub const fn new() -> Self {
        CancelFlag(AtomicBool::new(false))
    }

    /// Sets the flag.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Clears the flag.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Whether the flag is set.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn check(&self) -> Result<(), ModelError> {
        if self.is_cancelled() { Err(ModelError::Cancelled) } else { Ok(()) }
    }
}

/// Positions that a row attends to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Selection {
    /// All positions up to the row's own.
    #[default]
    All,
    /// These, ascending.
    Some(Vec<u32>),
}

impl Selection {
    /// Number of positions for a row at `position`.
    pub(crate) fn len(&self, position: u32) -> usize {
        match self {
            Selection::All => position as usize + 1,
            Selection::Some(list) => list.len(),
        }
    }

    /// The `index`-th position.
    #[inline]
    pub(crate) fn position(&self, index: usize) -> usize {
        match self {
            Selection::All => index,
            Selection::Some(list) => list[index] as usize,
        }
    }
}

/// State of one step on its way through the layers.
pub(crate) struct StepContext<'a, 'k> {
    pub rows: &'a [Row],
    pub caches: &'a mut [&'k mut KvCache],
    pub selections: Vec<Selection>,
    pub pool: &'a Pool,
    pub kernels: Kernels,
    pub observer: &'a dyn ModelObserver,
}
