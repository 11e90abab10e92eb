//! Architectures as data: configuration to plan; attention, router, experts; key-value cache;
//! tokenizer and chat template.
//!
//! A family's configuration becomes a [`Plan`]; a [`Plan`] has an inventory of tensors; a
//! [`Model`] is a plan with its dense weights in memory. [`Model::forward`] computes one step for
//! rows of any number of sequences. It knows parts (latent attention, router, …), never families.
#![forbid(unsafe_code)]

mod accelerated;
mod attention;
mod config;
mod error;
mod families;
mod ffn;
pub mod gguf;
mod kv;
mod linear;
mod load;
mod model;
mod observer;
mod plan;
mod rope;
mod step;
pub mod text;

pub use config::{ConfigError, ConfigReader};
pub use error::ModelError;
pub use families::{FAMILIES, Family};
pub use ffn::{Experts, Foresight, Predictor};
pub use kv::{KvCache, Stream};
pub use model::{LoadOptions, Model, expert_places};
pub use observer::{ModelEvent, ModelObserver, Selected, Silent};
pub use plan::{
    AttentionPlan, DecayRate, DeltaNetPlan, DeltaProjections, ExpertBiasForm, FfnPlan, GqaPlan, HeadSharing,
    IndexerPlan, IndexerUse, KvExpansion, LayerPlan, MlaForm, MlaPlan, MoeNames, MoePlan, NormWeights, Plan,
    QkNorm, RopePairs, RopePlan, RouterPlan, Scoring,
};
pub use step::{CancelFlag, Phase, Row};
