//! Why a model could not be loaded or a step not be computed.

use metaltail_kernels::ComputeError;
use metaltail_quant::LayoutError;
use metaltail_store::StoreError;
use thiserror::Error;

use crate::config::ConfigError;

/// Errors of this room.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The configuration is refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The files are refused.
    #[error(transparent)]
    Container(#[from] metaltail_container::Error),
    /// An expert could not be had.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An expert could not be computed.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// A matrix has another size than its layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A token id that the vocabulary does not have.
    #[error("token id {id} is outside the vocabulary of {vocab}")]
    TokenOutOfRange {
        /// The id.
        id: u32,
        /// Vocabulary size.
        vocab: usize,
    },
    /// A row of a sequence that is not the next one, in a model with recurrent layers.
    #[error("a row at position {position} was to be computed where the sequence goes on at {wanted}")]
    NotNext {
        /// Position of the row.
        position: u32,
        /// The position that comes next.
        wanted: usize,
    },
    /// A cache that was made for another plan.
    #[error("the sequence's memory has no state for a recurrent layer: it was made for another model")]
    NoState,
    /// The step was asked to end.
    #[error("cancelled")]
    Cancelled,
    /// The dense weights lie on an accelerator, and the experts of this step are computed by something else.
    #[error("the model's dense weights lie on an accelerator that this step was not given")]
    NoAccelerator,
    /// A draft was asked for, but there is no draft layer.
    #[error("this model was loaded without a draft layer")]
    NoDraft,
}
