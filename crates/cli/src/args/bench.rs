//! Arguments of `metaltail bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use metaltail_bench::job;
use metaltail_quant::Format;

use crate::settings::{Flags, OutputFlags, size, whole};

/// `bench`
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub bench: Bench,
}

/// What can be measured.
#[allow(clippy::large_enum_variant, reason = "parsed once")]
#[derive(Subcommand, Debug)]
pub enum Bench {
    /// Compare two sets of settings, each run in a process of its own
    Ab(BenchAbArgs),
    /// Measure a model at several sizes of the expert cache
    Cap(BenchCapArgs),
    /// How fast the drive delivers experts, and how much of that decoding gets
    Io(BenchIoArgs),
    /// How fast the matrix kernels are, by format and instruction set
    Kernels(BenchKernelsArgs),
    /// Compare with another program on the same model: same prompt ids, same threads, in turn
    Peers(BenchPeersArgs),
    /// What declaring memory to an accelerator costs: published runs replayed by a simulation
    Residency(BenchResidencyArgs),
    /// Draw the plot of a record that ab, cap or io wrote
    Plot(BenchPlotArgs),
    /// Run one arm: a job on standard input, its record on standard output
    #[command(hide = true)]
    Arm(BenchArmArgs),
}

/// The largest width of a matrix to measure.
const MAX_WIDTH: u64 = 1 << 20;
/// The most rounds.
const MAX_ROUNDS: u64 = 1 << 20;

/// `bench kernels`
#[derive(Args, Debug)]
#[command(
    mut_arg("model", |arg| arg.help("Measure decode and prefill of this model too, all experts in memory")),
    mut_arg("top_k", |arg| arg.help("Experts that a pass computes, as a sparse layer does; default: 8")
        .help_heading("Measurement")),
)]
pub struct BenchKernelsArgs {
    /// Width of the model
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_WIDTH>, default_value = "2048", help_heading = "Measurement")]
    pub hidden: usize,
    /// Width of an expert
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_WIDTH>, default_value = "1024", help_heading = "Measurement")]
    pub width: usize,
    /// Rounds that count; one more warms up
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_ROUNDS>, default_value = "5", help_heading = "Measurement")]
    pub rounds: usize,
    /// Number formats, such as int4-g64,q4_k,bf16
    #[arg(
        long = "format",
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "int4-g64,int4,int8,fp8,bf16",
        help_heading = "Measurement"
    )]
    pub formats: Vec<Format>,
    /// Bytes of experts to rotate over: more than the processor caches
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "256M", help_heading = "Measurement")]
    pub working_set: u64,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: Flags,
}

/// What decoding is fed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Feed {
    /// Random ids for a synthetic slab container, greedy for any other model
    Auto,
    /// Seeded random ids: random weights route degenerately on their own greedy text
    Random,
    /// The most likely id
    Greedy,
    /// The last ids of each sequence of --ids, as many as are decoded
    Ids,
}

impl From<Feed> for job::Feed {
    fn from(feed: Feed) -> job::Feed {
        match feed {
            Feed::Auto => job::Feed::Auto,
            Feed::Random => job::Feed::Random,
            Feed::Greedy => job::Feed::Greedy,
            Feed::Ids => job::Feed::Ids,
        }
    }
}

/// The page cache before each prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PageCache {
    /// Nothing of the weight files is in it
    Cold,
    /// All of the weight files is in it
    Warm,
}

impl From<PageCache> for job::PageCache {
    fn from(state: PageCache) -> job::PageCache {
        match state {
            PageCache::Cold => job::PageCache::Cold,
            PageCache::Warm => job::PageCache::Warm,
        }
    }
}

/// The most prompts, rounds or pairs.
const MAX_COUNT: u64 = 10_000;
/// More ids than any context holds.
const MAX_PROMPT: u64 = 1 << 28;

/// How arms are measured.
#[derive(Args, Debug)]
pub struct Protocol {
    /// Prompts that count, in rotation in each process
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_COUNT>, default_value = "5", help_heading = "Measurement")]
    pub prompts: usize,
    /// Prompts before them, which fill the expert cache
    #[arg(long, value_name = "N", value_parser = whole::<0, MAX_COUNT>, default_value = "1", help_heading = "Measurement")]
    pub warmup: usize,
    /// Ids of a random prompt
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_PROMPT>, default_value = "32", help_heading = "Measurement")]
    pub prompt_tokens: usize,
    /// Given prompts: a file with {"sequences": [[id, …], …]}
    #[arg(long, value_name = "FILE", help_heading = "Measurement")]
    pub ids: Option<PathBuf>,
    /// What decoding is fed
    #[arg(long, value_enum, value_name = "WHAT", default_value = "auto", help_heading = "Measurement")]
    pub feed: Feed,
    /// State of the page cache, made and verified before each prompt
    #[arg(long, value_enum, value_name = "STATE", default_value = "cold", help_heading = "Measurement")]
    pub page_cache: PageCache,
    /// How far runs of the same settings may lie apart in tokens/s, above 0 and at most 100; beyond it the run
    /// is refused
    #[arg(long, value_name = "PERCENT", value_parser = percent, default_value = "10", help_heading = "Measurement")]
    pub noise: f64,
    /// Where the record goes, or off; default: a new file in bench-records, nowhere with --json
    #[arg(long, value_name = "FILE", help_heading = "Measurement")]
    pub record: Option<PathBuf>,
    /// Draw the record as an SVG file
    #[arg(long, value_name = "FILE", help_heading = "Measurement")]
    pub plot: Option<PathBuf>,
}

/// A share in percent, as a share of one.
fn percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 100.0 => Ok(value / 100.0),
        _ => Err("it must be a percentage above 0 and at most 100".to_owned()),
    }
}

/// A time above zero and below an hour.
fn seconds(text: &str) -> Result<std::time::Duration, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 3600.0 => Ok(std::time::Duration::from_secs_f64(value)),
        _ => Err("it must be a number of seconds above 0 and at most 3600".to_owned()),
    }
}

/// `bench ab`
#[derive(Args, Debug)]
#[command(
    mut_arg("max_tokens", |arg| arg.help("Tokens decoded after each prompt; default: 256")
        .help_heading("Measurement")),
    mut_arg("seed", |arg| arg.help("Begins the random ids; default: 0").help_heading("Measurement")),
    after_help = "A and B run in turn in processes of their own: A A, then A B, B A, A B, …, then A. The \
                  runs of A before and after everything bound the machine's drift: when they lie further \
                  apart than --noise, nothing is concluded (exit code 1). All runs must give the same \
                  ids, unless the setting under test may change numbers. One resolved setting may differ; \
                  with --several, more may.\n\n\
                  Example: metaltail bench ab --model DIR --ram 4G --a '--cap 4' --b '--cap 32'"
)]
pub struct BenchAbArgs {
    /// Settings of arm A, such as '--cap 4'; '' for none
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true, help_heading = "Measurement")]
    pub a: String,
    /// Settings of arm B
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true, help_heading = "Measurement")]
    pub b: String,
    /// Pairs of runs
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_COUNT>, default_value = "5", help_heading = "Measurement")]
    pub pairs: usize,
    /// Allow more than one setting to differ
    #[arg(long, help_heading = "Measurement")]
    pub several: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub protocol: Protocol,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: Flags,
}

/// `bench cap`
#[derive(Args, Debug)]
#[command(
    mut_arg("max_tokens", |arg| arg.help("Tokens decoded after each prompt; default: 256")
        .help_heading("Measurement")),
    mut_arg("seed", |arg| arg.help("Begins the random ids; default: 0").help_heading("Measurement")),
    mut_arg("cap", |arg| arg.hide(true)),
    after_help = "Each run of a cap is a process of its own: the largest cap twice, then all caps up, down, \
                  up, …, then the largest again. Nothing is concluded (exit code 1) when the runs of the \
                  largest cap lie further apart than --noise, when ids differ, or when more than half of \
                  the look-ups hit at a cap of 1.\n\n\
                  Example: metaltail bench cap --model DIR --page-cache cold --direct on --plot cap.svg"
)]
pub struct BenchCapArgs {
    /// Experts kept a layer, each measured
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = whole::<0, { u32::MAX as u64 }>,
          default_value = "1,2,4,8,16,32,64", help_heading = "Measurement")]
    pub caps: Vec<usize>,
    /// Rounds over all caps
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_COUNT>, default_value = "2", help_heading = "Measurement")]
    pub rounds: usize,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub protocol: Protocol,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: Flags,
}

/// `bench io`
#[derive(Args, Debug)]
#[command(
    mut_arg("max_tokens", |arg| arg.help("Tokens decoded after each prompt; default: 256")
        .help_heading("Measurement")),
    mut_arg("seed", |arg| arg.help("Begins the random ids; default: 0").help_heading("Measurement")),
    mut_arg("chunk_size", |arg| arg.help("Read in parts of at most this size, such as 2M; default: whole runs")),
    after_help = "Random experts of the model's own files are read directly and through the page cache (each \
                  evicted before), by threads and by an io_uring. What this system cannot do is left out with \
                  its reason. With --decode, a process that decodes runs between raw reads of the way that \
                  it reads itself, and the ratio is formed round by round. A model that fits in the page \
                  cache is best measured in a control group with less memory.\n\n\
                  Example: metaltail bench io --model DIR --decode --cap 1 --direct on --plot io.svg"
)]
pub struct BenchIoArgs {
    /// Reads at a time, each measured
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = whole::<1, 1024>,
          default_value = "1,2,4,8", help_heading = "Measurement")]
    pub depths: Vec<usize>,
    /// Rounds over all ways to read
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_COUNT>, default_value = "5", help_heading = "Measurement")]
    pub rounds: usize,
    /// Longest time of one measurement
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "1", help_heading = "Measurement")]
    pub seconds: std::time::Duration,
    /// Decode too, and say how much of the raw rate it gets
    #[arg(long, help_heading = "Measurement")]
    pub decode: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub protocol: Protocol,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: Flags,
}

/// `bench peers`
#[derive(Args, Debug)]
#[command(
    mut_arg("max_tokens", |arg| arg.visible_alias("tokens").help("Ids generated after the prompt; default: 64")
        .help_heading("Measurement")),
    mut_arg("seed", |arg| arg.help("Begins the random prompt; default: 0").help_heading("Measurement")),
    after_help = "Each run is a process of its own that loads the model: this program twice, then pairs with \
                  either first, then this program. Its runs before and after everything bound the machine's \
                  drift; when they lie further apart than --noise, nothing is concluded (exit code 1). Ids are \
                  compared and told: two programs round differently, so they decide nothing. The peer is called \
                  with --model FILE --ids FILE --tokens N --threads N and prints one JSON object with prompt_ids, \
                  ids, and tokens and seconds of prefill and decode; tools/peers builds one for llama.cpp.\n\n\
                  Example: metaltail bench peers --peer DIR/llama-peer --model FILE.gguf --memory 2G --busy 1"
)]
pub struct BenchPeersArgs {
    /// The other program
    #[arg(long, value_name = "PROGRAM", help_heading = "Measurement")]
    pub peer: PathBuf,
    /// Further words for it, such as '--repack off'
    #[arg(
        long,
        value_name = "FLAGS",
        default_value = "",
        allow_hyphen_values = true,
        help_heading = "Measurement"
    )]
    pub peer_args: String,
    /// Its file of the model; default: --model, which is a GGUF file then
    #[arg(long, value_name = "FILE", help_heading = "Measurement")]
    pub peer_model: Option<PathBuf>,
    /// A given prompt: a file with {"ids": [id, …]}
    #[arg(long, value_name = "FILE", help_heading = "Measurement")]
    pub ids: Option<PathBuf>,
    /// Ids of a random prompt
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_PROMPT>, default_value = "32", help_heading = "Measurement")]
    pub prompt_tokens: usize,
    /// Pairs of runs
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_COUNT>, default_value = "5", help_heading = "Measurement")]
    pub pairs: usize,
    /// Run each process in a control group with this much memory, such as 2G, pages of files included
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Measurement")]
    pub memory: Option<u64>,
    /// Processes that do nothing but compute beside every run
    #[arg(long, value_name = "N", value_parser = whole::<0, 1024>, default_value = "0", help_heading = "Measurement")]
    pub busy: usize,
    /// State of the page cache, made and verified before each run; default: warm, cold with --memory
    #[arg(long, value_enum, value_name = "STATE", help_heading = "Measurement")]
    pub page_cache: Option<PageCache>,
    /// How far runs of this program may lie apart in tokens/s, above 0 and at most 100
    #[arg(long, value_name = "PERCENT", value_parser = percent, default_value = "10", help_heading = "Measurement")]
    pub noise: f64,
    /// Where the record goes, or off; default: a new file in bench-records, nowhere with --json
    #[arg(long, value_name = "FILE", help_heading = "Measurement")]
    pub record: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: Flags,
}

/// `bench residency`
#[derive(Args, Debug)]
#[command(
    after_help = "Nothing is measured. The engine's own residency ledger and a simulated device replay runs that \
                  others published: each row stands beside what the simulation gives, with and without having \
                  seen it. Then it answers questions that nobody published: arenas or an allocation an expert, \
                  how many sets, freeing what is evicted, keeping idle sets alive. It is no evidence about \
                  hardware. A machine that does not explain the published rows ends with exit code 1; one that \
                  is said to be like another (\"like\" and \"set\" in its file) is not held against them.\n\n\
                  Example: metaltail bench residency"
)]
pub struct BenchResidencyArgs {
    /// A machine's numbers; default: those fitted to the published rows
    #[arg(long, value_name = "FILE", help_heading = "Simulation")]
    pub profile: Option<PathBuf>,
    /// Fit the numbers to the published rows first, and write them to this file
    #[arg(long, value_name = "FILE", help_heading = "Simulation")]
    pub fit: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: OutputFlags,
}

/// `bench plot`
#[derive(Args, Debug)]
pub struct BenchPlotArgs {
    /// The record
    #[arg(value_name = "RECORD")]
    pub record: PathBuf,
    /// The SVG file to write
    #[arg(long, value_name = "FILE")]
    pub plot: PathBuf,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: OutputFlags,
}

/// `bench arm`
#[derive(Args, Debug)]
pub struct BenchArmArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: Flags,
}
