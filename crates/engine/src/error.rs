//! Why a model cannot be run, or a request cannot be answered.

use metaltail_model::{ConfigError, ModelError};
use metaltail_store::StoreError;
use thiserror::Error;

/// Errors of this room.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The configuration is refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The files are refused.
    #[error(transparent)]
    Container(#[from] metaltail_container::Error),
    /// The store refuses or failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A step failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The memory budget is refused; the sum is in the message.
    #[error(transparent)]
    Budget(#[from] metaltail_store::BudgetError),
    /// A demanded limit is above the machine's, a control group's or an accelerator's.
    #[error("{refusal}\nthe model needs, experts apart: {demand}")]
    Limit {
        /// The refusal.
        refusal: Box<metaltail_store::BudgetError>,
        /// What the model would have been charged.
        demand: crate::memory::Demand,
    },
    /// A file of pins or usage is refused.
    #[error(transparent)]
    Usage(metaltail_store::usage::UsageError),
    /// An accelerator was asked for that there is not, or that cannot be used.
    #[error("--device {device} cannot be had: {reason}")]
    NoDevice {
        /// Its name.
        device: &'static str,
        /// Why not, and what to do.
        reason: String,
    },
    /// An accelerator was asked for and computed nothing.
    #[error("the {device} device computed no expert, although experts were used")]
    DeviceIdle {
        /// Its name.
        device: &'static str,
    },
    /// An accelerator's memory cannot be kept resident as was asked.
    #[error(transparent)]
    KeepAlive(#[from] metaltail_device::residency::KeepAliveError),
    /// A prompt has no ids.
    #[error("the prompt is empty: there is nothing to continue")]
    EmptyPrompt,
    /// A prompt is longer than the context.
    #[error("the prompt has {prompt} tokens, the context {context}: shorten the prompt or raise --context")]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that the context holds.
        context: usize,
    },
    /// A context longer than the model was made for.
    #[error("--context {asked} is longer than the model's {max}")]
    ContextTooLong {
        /// Tokens asked for.
        asked: usize,
        /// `max_position_embeddings`.
        max: usize,
    },
    /// A position past the end of a sequence.
    #[error("position {position} is past the end of a sequence of {len} tokens")]
    PositionPastEnd {
        /// Position asked for.
        position: usize,
        /// Tokens of the sequence.
        len: usize,
    },
    /// A logit that is not a number, or infinite.
    #[error(
        "the model's logit of token {id} is {value}: its weights are damaged (metaltail inspect --verify) or its numbers overflow"
    )]
    NotFinite {
        /// Token id.
        id: usize,
        /// The logit.
        value: f32,
    },
    /// A setting that cannot be.
    #[error("{0}")]
    Setting(String),
}
