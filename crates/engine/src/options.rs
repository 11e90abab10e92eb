//! Settings of an engine, and what they became.

use std::path::PathBuf;

use metaltail_model::MlaForm;
use metaltail_store::{Direct, Io, PolicyKind};

use crate::device::DeviceOptions;
use crate::pins::PinMode;
use crate::usage::UsageMode;

/// Rows of a prefill step where nothing is said: enough that most experts of a layer are shared
/// by several rows, little enough that scratch stays small.
pub const DEFAULT_PREFILL_CHUNK: usize = 256;

/// Context where nothing is said and the model allows more.
pub const DEFAULT_CONTEXT: usize = 8192;

/// Replacement policy where nothing is said: it finds most on traces of real models.
pub const DEFAULT_POLICY: PolicyKind = PolicyKind::Frecency;

/// Settings of an engine; what is absent is measured or derived.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// Memory budget in bytes.
    pub ram: Option<u64>,
    /// Experts kept a layer.
    pub cap: Option<usize>,
    /// Whether the cache grows while running where memory allows. On unless a cap is given.
    pub cap_growth: Option<bool>,
    /// Which kept expert makes room for another.
    /// Frecency unless told otherwise.
    pub policy: Option<PolicyKind>,
    /// Whether experts may be loaded ahead of demand. On unless told otherwise.
    pub prefetch: Option<bool>,
    /// Loader threads.
    pub loaders: Option<usize>,
    /// Direct or buffered reads.
    pub direct: Direct,
    /// Further directories with copies of the model's weight files, or with files that it lacks; on other
    /// drives, as a rule.
    pub further: Vec<PathBuf>,
    /// What carries reads of experts out.
    pub io: Io,
    /// Longest part of an expert that is read at once, in bytes.
    pub chunk_bytes: Option<u64>,
    /// Whether the checksum of an expert is verified when it is first read.
    pub checksums: Option<bool>,
    /// Whether cached and pinned experts are locked in memory. Off unless told otherwise.
    pub mlock: Option<bool>,
    /// Rows of a prefill step.
    pub prefill_chunk: Option<usize>,
    /// Positions of a session.
    pub context: Option<usize>,
    /// Compute threads.
    pub threads: Option<usize>,
    /// Whether activations stay in f32 for expert products too.
    pub exact: bool,
    /// Form of latent attention, for the whole engine.
    pub mla_form: MlaForm,
    /// Share of a row's expert weights that is computed; lossy below 1.
    pub expert_top_p: Option<f32>,
    /// The usage profile.
    pub usage: UsageMode,
    /// What stays in memory for good.
    pub pin: PinMode,
    /// What computes experts.
    pub device: DeviceOptions,
    /// Bytes to pin; absent, a replay of the usage profile's sample decides, or the length of a list.
    pub pin_size: Option<u64>,
}

/// What the settings became.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Resolved {
    /// Model directory.
    pub model: PathBuf,
    /// `hf`, `colibri` or `slab`.
    pub container: String,
    /// Memory budget in bytes.
    pub ram: u64,
    /// Experts kept a layer; the mean where layers share their slots.
    pub cap: usize,
    /// `on` or `off`.
    pub cap_growth: String,
    /// Which kept expert makes room for another.
    pub policy: &'static str,
    /// `on` or `off`: whether experts may be loaded ahead of demand.
    pub prefetch: String,
    /// Whether layers share their slots.
    pub pool: bool,
    /// Loader threads.
    pub loaders: usize,
    /// `on` or `off`.
    pub direct: String,
    /// `uring` or `threads`.
    pub io: &'static str,
    /// `on` or `off`.
    pub checksums: String,
    /// `on` or `off`: whether cached and pinned experts are locked in memory as far as the system allows.
    pub mlock: String,
    /// Rows of a prefill step.
    pub prefill_chunk: usize,
    /// Positions of a session.
    pub context: usize,
    /// Compute threads.
    pub threads: usize,
    /// Instruction set.
    pub isa: String,
    /// Whether activations stay in f32 for expert products too.
    pub exact: bool,
    /// File of the usage profile, with `read-only:` before it where it is not written, or `off`.
    pub usage: String,
    /// Bytes of pinned experts.
    pub pin_size: u64,
    /// What computes experts.
    pub device: &'static str,
    /// How memory is declared to the device; of no effect on the processor.
    pub residency: &'static str,
    /// What is one allocation to the device; of no effect on the processor.
    pub slab_allocation: &'static str,
}
