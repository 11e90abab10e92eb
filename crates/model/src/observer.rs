//! What the model tells those above it.

use std::time::Duration;

use crate::ffn::Predictor;

/// Something that happened inside a step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ModelEvent {
    /// A sparse layer chose experts.
    Routed {
        /// Layer index.
        layer: u32,
        /// Rows of the step.
        rows: usize,
        /// Experts chosen, counted for each row: rows × top-k.
        selections: usize,
        /// Distinct experts among them.
        distinct: usize,
    },
    /// A layer with routed experts was computed.
    SparseLayer {
        /// Layer index.
        layer: u32,
        /// Wall time, waits for experts included.
        took: Duration,
    },
    /// A guess at a layer's choice was compared with it.
    Foreseen {
        /// Layer index.
        layer: u32,
        /// How the guess was made.
        predictor: Predictor,
        /// Experts guessed.
        expected: usize,
        /// Distinct experts chosen.
        chosen: usize,
        /// Of these, guessed.
        right: usize,
    },
    /// Of the experts that a layer chose, the lightest were left out (`Experts::top_p`).
    Dropped {
        /// Layer index.
        layer: u32,
        /// Selections left out, of those that [`ModelEvent::Routed`] counts.
        selections: usize,
        /// Their weights, each as a share of its row's sum, added up.
        weight: f64,
    },
    /// Router scores were not numbers; the lowest expert ids were taken with weight zero.
    RouterNotANumber {
        /// Layer index.
        layer: u32,
        /// Rows with such scores.
        rows: usize,
    },
}

/// What routers chose for the rows of a step in one sparse layer, what is left out of it then included. Tells who wants to know more than
/// [`ModelEvent::Routed`] counts, which comes beside it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Selected<'a> {
    /// Layer index.
    pub layer: u32,
    /// For each row of the step its experts with their weights, best first.
    pub rows: &'a [Vec<(u32, f32)>],
}

/// Receives [`ModelEvent`]s; called on the thread that runs the step.
pub trait ModelObserver: Send + Sync {
    /// Takes one event.
    fn on_model(&self, event: &ModelEvent);

    /// Takes what a layer chose, before its experts are fetched. Ignored unless implemented.
    fn on_selected(&self, _selected: &Selected<'_>) {}
}

/// Ignores everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl ModelObserver for Silent {
    fn on_model(&self, _event: &ModelEvent) {}
}
