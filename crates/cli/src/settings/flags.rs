//! The declaration of the shared flags.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::{Serialize, Serializer};

use super::parse::{chunk, on_off, probability, share, size, temperature, whole};
use super::usage::{Pin, Usage};
use crate::words::shortest;

/// The largest `--cap`: no layer has as many experts.
const MAX_CAP: u64 = u32::MAX as u64;
/// The largest `--context` in positions.
const MAX_CONTEXT: u64 = 1 << 28;

/// Every flag that run, chat, score, plan and bench share. `None` means that nothing was given.
///
/// Numbers may be written with a minus, so that it is their parsers that refuse one, by name.
#[derive(Args, Clone, Debug, Default, Serialize)]
pub struct Flags {
    #[command(flatten)]
    #[serde(flatten)]
    #[allow(missing_docs)]
    pub input: ModelFlags,

    /// Memory to use, such as 24G or 1.5T (K, M, G and T are powers of 1024); default: what is free
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Memory and storage")]
    pub ram: Option<u64>,
    /// Experts kept a layer, 0 for none, any number above a layer's experts for all of them; default:
    /// what the memory allows
    #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = whole::<0, MAX_CAP>, help_heading = "Memory and storage")]
    pub cap: Option<usize>,
    /// Whether the cache grows while running where memory allows; default: on, off where --cap is given
    #[arg(long, value_name = "ON|OFF", value_parser = on_off, help_heading = "Memory and storage")]
    #[serde(serialize_with = "as_on_off")]
    pub cap_growth: Option<bool>,
    /// Which expert makes room for another
    #[arg(long, value_enum, value_name = "POLICY", help_heading = "Memory and storage")]
    pub policy: Option<Policy>,
    /// Experts that stay in memory for good: the ones used most (auto; how many, a replay of recent tokens
    /// decides), none (off), or those of a file with `layer expert` lines, a usage profile or a
    /// `.coli_usage`; default: auto, off with --cap
    #[arg(long, value_name = "auto|off|FILE", value_parser = Pin::parse, help_heading = "Memory and storage")]
    pub pin: Option<Pin>,
    /// Bytes to pin, such as 4G
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Memory and storage")]
    pub pin_size: Option<u64>,
    /// Where it is remembered which experts were used: a file, off, read-only or read-only:FILE; default: a
    /// file for each model under $XDG_STATE_HOME/metaltail/usage
    #[arg(long, value_name = "FILE|off|read-only", value_parser = Usage::parse, help_heading = "Memory and storage")]
    pub usage: Option<Usage>,
    /// Threads that read experts; default: 4, or 2 on one processor
    #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = whole::<1, 256>, help_heading = "Memory and storage")]
    pub loaders: Option<usize>,
    /// How experts are read
    #[arg(long, value_enum, value_name = "HOW", help_heading = "Memory and storage")]
    pub io: Option<Io>,
    /// Whether reads go around the page cache
    #[arg(long, value_enum, value_name = "WHEN", help_heading = "Memory and storage")]
    pub direct: Option<Direct>,
    /// Read experts in parts of at most this size, such as 2M, in whole pages; default: whole runs from one
    /// drive, parts from several
    #[arg(long, value_name = "SIZE", value_parser = chunk, help_heading = "Memory and storage")]
    pub chunk_size: Option<u64>,
    /// Whether an expert's checksum is verified when it is first read: on or off
    #[arg(long, value_name = "ON|OFF", value_parser = on_off, help_heading = "Memory and storage")]
    #[serde(serialize_with = "as_on_off")]
    pub checksums: Option<bool>,
    /// Whether experts in memory are locked there, so that the system cannot swap them out: on or off; default:
    /// off, since what others need then leaves only while tokens are computed
    #[arg(long, value_name = "ON|OFF", value_parser = on_off, help_heading = "Memory and storage")]
    #[serde(serialize_with = "as_on_off")]
    pub mlock: Option<bool>,
    /// Whether experts that will probably be needed are read while the drive is idle: on or off; on tries it
    /// and goes on where it pays
    #[arg(long, value_name = "ON|OFF", value_parser = on_off, help_heading = "Memory and storage")]
    #[serde(serialize_with = "as_on_off")]
    pub prefetch: Option<bool>,

    /// Prompt tokens computed at once
    #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = whole::<1, 65_536>, help_heading = "Computation")]
    pub prefill_chunk: Option<usize>,
    /// What computes
    #[arg(long, value_enum, value_name = "DEVICE", help_heading = "Computation")]
    pub device: Option<Device>,
    /// How memory is declared to an accelerator
    #[arg(long, value_enum, value_name = "HOW", help_heading = "Computation")]
    pub residency: Option<Residency>,
    /// What is one allocation to an accelerator
    #[arg(long, value_enum, value_name = "WHAT", help_heading = "Computation")]
    pub slab_allocation: Option<SlabAllocation>,
    /// What proposes tokens ahead
    #[arg(long, value_enum, value_name = "KIND", help_heading = "Computation")]
    pub draft: Option<Draft>,
    /// Positions that a sequence may have; default: 8192, or fewer where the model was made for fewer
    #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = whole::<1, MAX_CONTEXT>, help_heading = "Computation")]
    pub context: Option<usize>,
    /// Threads that compute; default: the physical cores that may be used
    #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = whole::<1, 1024>, help_heading = "Computation")]
    pub threads: Option<usize>,
    /// Keep activations in f32 for expert products too
    #[arg(long, value_parser = on_off, value_name = "ON|OFF", num_args = 0..=1, require_equals = true,
          default_missing_value = "on", help_heading = "Computation")]
    pub exact: Option<bool>,

    /// Compute of each token's experts only the heaviest that have this share of the weight; lossy below
    /// 1, the default
    #[arg(long, allow_negative_numbers = true, value_name = "F", value_parser = probability, help_heading = "Computation")]
    #[serde(serialize_with = "as_shortest")]
    pub expert_top_p: Option<f32>,

    /// Randomness, 0 for the most likely token; default: as the model recommends
    #[arg(long, allow_negative_numbers = true, value_name = "F", value_parser = temperature, help_heading = "Sampling")]
    #[serde(serialize_with = "as_shortest")]
    pub temperature: Option<f32>,
    /// Choose among the likeliest tokens up to this much probability, at most 1
    #[arg(long, allow_negative_numbers = true, value_name = "F", value_parser = probability, help_heading = "Sampling")]
    #[serde(serialize_with = "as_shortest")]
    pub top_p: Option<f32>,
    /// Choose among this many of the likeliest tokens, 0 for all
    #[arg(long, allow_negative_numbers = true, value_name = "N", help_heading = "Sampling")]
    pub top_k: Option<usize>,
    /// Choose among tokens of at least this share of the likeliest one's probability
    #[arg(long, allow_negative_numbers = true, value_name = "F", value_parser = share, help_heading = "Sampling")]
    #[serde(serialize_with = "as_shortest")]
    pub min_p: Option<f32>,
    /// Begins the random sequence: the same seed gives the same text
    #[arg(long, allow_negative_numbers = true, value_name = "N", help_heading = "Sampling")]
    pub seed: Option<u64>,
    /// Tokens to generate at most; default: until the model ends or the context is full
    #[arg(long, allow_negative_numbers = true, value_name = "N", help_heading = "Sampling")]
    pub max_tokens: Option<usize>,
    /// Text that ends the answer; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = clap::builder::NonEmptyStringValueParser::new(),
          help_heading = "Sampling")]
    pub stop: Vec<String>,

    #[command(flatten)]
    #[serde(flatten)]
    #[allow(missing_docs)]
    pub output: OutputFlags,
}

/// Which model.
#[derive(Args, Clone, Debug, Default, Serialize)]
pub struct ModelFlags {
    /// The model: a GGUF file, or the directory of a Hugging Face checkpoint, a colibrì directory or a slab
    /// container; DIR,DIR for several drives with copies or parts of it
    #[arg(long, value_name = "DIR[,DIR]")]
    #[serde(serialize_with = "lossy")]
    pub model: Option<PathBuf>,
}

/// What is printed.
#[derive(Args, Clone, Debug, Default, Serialize)]
pub struct OutputFlags {
    /// Print one JSON object on standard output and nothing else there
    #[arg(long, value_parser = on_off, value_name = "ON|OFF", num_args = 0..=1, require_equals = true,
          default_missing_value = "on")]
    pub json: Option<bool>,
    /// Say more on standard error
    #[arg(short, long, value_parser = on_off, value_name = "ON|OFF", num_args = 0..=1,
          require_equals = true, default_missing_value = "on")]
    pub verbose: Option<bool>,
}

/// Replacement policies of the expert cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// The expert whose last use is the longest ago
    Lru,
    /// The same, experts used once going before those used twice
    Slru,
    /// The oldest expert that was not used for a round
    Sieve,
    /// The oldest newcomer that was not used twice, else the oldest that was not used since
    #[value(name = "s3-fifo")]
    #[serde(rename = "s3-fifo")]
    S3Fifo,
    /// The expert with the fewest uses, a use counting half after 16 tokens
    Lfu,
    /// The expert that the next token is least likely to use, by frequency and recency
    Frecency,
}

/// Ways to read experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Io {
    /// The faster one, measured where the experts do not fit in a quarter of the free memory
    Auto,
    /// One io_uring; an error where the system has none
    Uring,
    /// Loader threads with positioned reads
    Threads,
}

/// When reads go around the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direct {
    /// Where they are faster, measured where the experts do not fit in a quarter of the free memory
    Auto,
    /// Always; an error where the file system cannot
    On,
    /// Never
    Off,
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The processor; a GPU is used only where it is named
    Auto,
    /// The processor
    Cpu,
    /// The GPU of a Mac. Nobody who wrote it had one: docs/residency.md says what that means
    Metal,
    /// A simulated accelerator: real text, and what an accelerator's rules for memory would have cost
    Sim,
}

/// How memory is declared to an accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Residency {
    /// Once, in residency sets
    Set,
    /// Everything, with each submission
    Walk,
}

/// What is one allocation to an accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SlabAllocation {
    /// A chunk of many slots
    Arena,
    /// Each expert's slot
    PerExpert,
}

/// What proposes tokens ahead of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Draft {
    /// Nothing
    Off,
}

/// A path as text, whatever bytes it has.
fn lossy<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
}

/// A number as the flag is written.
fn as_shortest<S: Serializer>(value: &Option<f32>, serializer: S) -> Result<S::Ok, S::Error> {
    value.map(shortest).serialize(serializer)
}

/// `on` or `off`, as the flag is written.
fn as_on_off<S: Serializer>(value: &Option<bool>, serializer: S) -> Result<S::Ok, S::Error> {
    value.map(|on| if on { "on" } else { "off" }).serialize(serializer)
}
