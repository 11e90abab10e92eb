//! The command line: what there is to do, and each command's own arguments.
//!
//! Shared flags are declared in [`crate::settings::Flags`]; the copies that clap fills here are not
//! read, since a value may also come from the environment or the file. Use
//! [`crate::settings::Settings`].

use std::ffi::OsString;
use std::path::PathBuf;

mod bench;

pub use bench::{
    Bench, BenchAbArgs, BenchArgs, BenchCapArgs, BenchIoArgs, BenchKernelsArgs, BenchPeersArgs,
    BenchPlotArgs, BenchResidencyArgs, Protocol,
};

use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use metaltail_container::convert::Target;
use metaltail_container::gguf::{Support, TensorType};
use metaltail_container::synth::{Like, SynthFormat};
use metaltail_quant::Format;

use crate::commands::trace::{Contestant, CountedPhase};
use crate::settings::{Flags, ModelFlags, OutputFlags, share, size, whole};

/// Runs mixture-of-experts language models that are larger than memory.
#[derive(Parser, Debug)]
#[command(
    name = "metaltail",
    version,
    propagate_version = true,
    arg_required_else_help = true,
    after_help = "Every flag that run, chat, score, plan and bench share is also an environment variable \
                  (METALTAIL_PREFILL_CHUNK for --prefill-chunk) and a key of metaltail.toml \
                  (prefill-chunk). A flag wins over the environment, that over the file."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Generate text from a prompt, or from ids
    Run(RunArgs),
    /// Talk with a model in the terminal
    Chat(ChatArgs),
    /// Evaluate a model on given ids
    Score(ScoreArgs),
    /// Say what memory and speed to expect of a model
    Plan(PlanArgs),
    /// Write a model as a slab container
    Convert(ConvertArgs),
    /// Write a synthetic model
    Synth(SynthArgs),
    /// Say what a model directory or a GGUF file holds
    Inspect(InspectArgs),
    /// Examine the machine, with --model a model on it, and say what to change and why
    Doctor(DoctorArgs),
    /// Measure
    Bench(BenchArgs),
    /// Record which experts a model chooses, and replay that on replacement policies
    Trace(TraceArgs),
    /// Which experts a model used: show it, or exchange it with colibrì
    Usage(UsageArgs),
    /// Print the completion script of a shell
    Completions(CompletionsArgs),
    /// Print the manual page
    Man,
}

/// `run`
#[derive(Args, Debug)]
pub struct RunArgs {
    /// The prompt; without it, standard input where that is a pipe
    pub prompt: Option<String>,
    /// Continue these ids instead of a text: a file with {"ids": [id, …]}
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "raw"])]
    pub ids: Option<PathBuf>,
    /// Take the prompt exactly as given, without the chat template
    #[arg(long)]
    pub raw: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: Flags,
}

/// `chat`
#[derive(Args, Debug)]
pub struct ChatArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: Flags,
}

/// `score`
#[derive(Args, Debug)]
pub struct ScoreArgs {
    /// The ids: a file with {"sequences": [[id, …], …]}
    #[arg(long, value_name = "FILE")]
    pub ids: PathBuf,
    /// Add the full logits at these positions of the first sequence, such as 0,10,255
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub logits: Vec<usize>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: Flags,
}

/// `plan`
#[derive(Args, Debug)]
pub struct PlanArgs {
    /// The model: a directory, or a config.json alone before any download
    #[arg(value_name = "PATH", conflicts_with = "model")]
    pub path: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: Flags,
}

/// `convert`
#[derive(Args, Debug)]
pub struct ConvertArgs {
    /// The model to convert
    #[arg(value_name = "SRC")]
    pub source: PathBuf,
    /// The directory to write
    #[arg(value_name = "DST")]
    pub target: PathBuf,
    /// Format of the routed experts, or keep; default: int4-g64
    #[arg(long, value_name = "FORMAT")]
    pub experts: Option<Target>,
    /// Format of the other matrices, or keep; default: int8
    #[arg(long, value_name = "FORMAT")]
    pub rest: Option<Target>,
    /// Format of the draft layer's experts, or keep; default: int8
    #[arg(long, value_name = "FORMAT")]
    pub draft_format: Option<Target>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: OutputFlags,
}

/// `synth`
#[derive(Args, Debug)]
pub struct SynthArgs {
    /// The directory to write; of the form gguf, the file where the name ends in .gguf
    #[arg(value_name = "OUT")]
    pub target: PathBuf,
    /// The model to resemble: tiny, wide, fat, glm-5.2, olmoe, qwen3-moe, deepseek-v3, gpt-oss or qwen3.5-moe
    #[arg(long, value_name = "MODEL")]
    pub like: Like,
    /// Layers; default: as the model
    #[arg(long, value_name = "N")]
    pub layers: Option<u32>,
    /// Experts a layer; default: as the model
    #[arg(long, value_name = "N")]
    pub experts: Option<u32>,
    /// Form of the container: slab, colibri, hf or gguf (gguf: like olmoe or qwen3-moe)
    #[arg(long, value_name = "FORM", default_value = "slab")]
    pub format: SynthFormat,
    /// Format of the routed experts (not of the form gguf); default: as suits the model
    #[arg(long, value_name = "FORMAT")]
    pub expert_format: Option<Format>,
    /// Type of all matrices of the form gguf, such as q8_0 or q4_k; default: q4_0
    #[arg(long = "type", value_name = "TYPE", value_parser = gguf_type)]
    pub blocks: Option<TensorType>,
    /// Begins the random numbers: the same seed writes the same model
    #[arg(id = "synth_seed", long = "seed", value_name = "N", default_value_t = 0)]
    pub seed: u64,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: OutputFlags,
}

/// A type of GGUF that models can be made in, in any case.
fn gguf_type(name: &str) -> Result<TensorType, String> {
    let computed = |kind: &TensorType| kind.support() == Support::Computed;
    TensorType::from_name(name).filter(computed).ok_or_else(|| {
        let names: Vec<String> =
            TensorType::all().filter(computed).map(|kind| kind.name().to_lowercase()).collect();
        format!("expected one of {}", names.join(", "))
    })
}

/// `inspect`
#[derive(Args, Debug)]
pub struct InspectArgs {
    /// The model's directory, or a GGUF file
    #[arg(value_name = "DIR", conflicts_with = "model")]
    pub dir: Option<PathBuf>,
    /// Read everything and compare checksums
    #[arg(long)]
    pub verify: bool,
    /// Load the model twice and measure what quantised activations cost (nats a token)
    #[arg(long)]
    pub numerics: bool,
    /// Measure on these ids: a file with {"sequences": [[id, …], …]}; default: what the model
    /// itself generates
    #[arg(long, value_name = "FILE", requires = "numerics")]
    pub ids: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub model: ModelFlags,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: OutputFlags,
}

/// `doctor`
#[derive(Args, Debug)]
pub struct DoctorArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: Flags,
}

/// `trace`
#[derive(Args, Debug)]
pub struct TraceArgs {
    /// What to do with traces.
    #[command(subcommand)]
    pub trace: TraceCommand,
}

/// What can be done with traces.
#[allow(clippy::large_enum_variant, reason = "parsed once")]
#[derive(Subcommand, Debug)]
pub enum TraceCommand {
    /// Write the experts that a model chooses, token by token: of given ids, and of the text that continues
    /// them unless --prompt is given
    Record(TraceRecordArgs),
    /// Say how often caches of given sizes would have had them
    Replay(TraceReplayArgs),
    /// Write a synthetic trace whose popular experts change
    Synth(TraceSynthArgs),
}

/// More ids than any context holds.
const MAX_PROMPT: u64 = 1 << 28;

/// `trace record`
#[derive(Args, Debug)]
pub struct TraceRecordArgs {
    /// The file to write
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// The ids: a file with {"ids": [id, …]} or {"sequences": [[id, …], …]}
    #[arg(long, value_name = "FILE")]
    pub ids: PathBuf,
    /// Compute all but the first N ids of a sequence one by one, as if they were generated, and generate
    /// nothing; without it, each sequence is the prompt of an answer that is generated and recorded too
    /// (--max-tokens)
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_PROMPT>)]
    pub prompt: Option<usize>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: Flags,
}

/// `trace replay`
#[derive(Args, Debug)]
pub struct TraceReplayArgs {
    /// Traces
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Policies, such as lru,frecency; layer:lfu gives each layer an equal part. Default: all
    #[arg(id = "replay_policy", long = "policy", value_name = "LIST", value_delimiter = ',')]
    pub policies: Vec<Contestant>,
    /// Bytes to keep, such as 500M,2G; default: half, once, twice, … what one token uses
    #[arg(id = "replay_cache", long = "cache", value_name = "LIST", value_delimiter = ',', value_parser = size)]
    pub caches: Vec<u64>,
    /// What is counted; the rest warms
    #[arg(id = "replay_phase", long = "phase", value_enum, default_value = "decode")]
    pub phase: CountedPhase,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: OutputFlags,
}

/// The most layers, experts or tokens of a synthetic trace.
const MAX_SYNTH: u64 = 1 << 20;

/// `trace synth`
#[derive(Args, Debug)]
pub struct TraceSynthArgs {
    /// The file to write
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// Layers
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_SYNTH>, default_value = "16")]
    pub layers: usize,
    /// Experts of a layer
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_SYNTH>, default_value = "64")]
    pub experts: usize,
    /// Experts that a token uses of a layer
    #[arg(id = "synth_top_k", long = "top-k", value_name = "N", value_parser = whole::<1, MAX_SYNTH>, default_value = "8")]
    pub top_k: usize,
    /// Tokens
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_SYNTH>, default_value = "4096")]
    pub tokens: usize,
    /// Tokens after which other experts become popular
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_SYNTH>, default_value = "256")]
    pub phase_tokens: usize,
    /// Exponent of popularity, 0 for none
    #[arg(long, value_name = "F", default_value = "1")]
    pub zipf: f64,
    /// Probability that a use repeats one of the token before
    #[arg(long, value_name = "F", value_parser = share, default_value = "0.3")]
    pub repeat: f32,
    /// Count only so many tokens after each change; the others warm
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_SYNTH>)]
    pub after: Option<usize>,
    /// Bytes of an expert
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "1M")]
    pub expert_bytes: u64,
    /// Begins the random numbers: the same seed writes the same trace
    #[arg(id = "synth_seed", long = "seed", value_name = "N", default_value_t = 0)]
    pub seed: u64,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: OutputFlags,
}

/// `usage`
#[derive(Args, Debug)]
pub struct UsageArgs {
    /// What to do with the usage profile.
    #[command(subcommand)]
    pub usage: UsageCommand,
}

/// What can be done with a usage profile.
#[derive(Subcommand, Debug)]
pub enum UsageCommand {
    /// Say what was used
    Show(UsageShowArgs),
    /// Add a .coli_usage, or another profile of a model of this shape
    Import(UsageFileArgs),
    /// Write it as a .coli_usage
    Export(UsageFileArgs),
}

/// `usage show`
#[derive(Args, Debug)]
pub struct UsageShowArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: Flags,
}

/// `usage import` and `usage export`
#[derive(Args, Debug)]
pub struct UsageFileArgs {
    /// The file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub unresolved: Flags,
}

/// `completions`
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// Parses a command line into the command and the matches of its innermost subcommand, which say
/// what shared flags were given.
///
/// # Errors
/// Wrong usage; also `--help` and `--version`, which clap gives as errors.
pub fn parse(words: impl IntoIterator<Item = OsString>) -> Result<(Command, ArgMatches), clap::Error> {
    let matches = under_one_name(Cli::command()).try_get_matches_from(words)?;
    let cli = Cli::from_arg_matches(&matches)?;
    let mut innermost = &matches;
    while let Some((_, inner)) = innermost.subcommand() {
        innermost = inner;
    }
    Ok((cli.command, innermost.clone()))
}

/// `metaltail run --version` tells the program's version, not that of some `metaltail-run`.
fn under_one_name(command: clap::Command) -> clap::Command {
    command.display_name("metaltail").mut_subcommands(under_one_name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Environment, Origin, Settings};

    fn parsed(line: &str) -> Result<(Command, ArgMatches), clap::Error> {
        parse(std::iter::once("metaltail").chain(line.split_whitespace()).map(OsString::from))
    }

    #[test]
    fn the_declaration_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_takes_its_arguments() {
        for line in [
            "run",
            "run hello --raw --cap 0 --json",
            "run --ids f.json --model m --temperature 0",
            "chat --top-p 0.9",
            "score --ids f.json --logits 0,10,255 --exact",
            "plan --model m --ram 24G",
            "convert a b --experts int4-g64 --rest int8 --draft-format keep --json",
            "synth o --like tiny --layers 2 --experts 8 --format colibri --seed 3 --expert-format int8",
            "inspect --model m --verify",
            "inspect m --numerics --ids f.json",
            "plan config.json",
            "bench kernels --threads 2",
            "bench ab --a --prefill-chunk=8 --b= --model m --pairs 3 --noise 5 --page-cache warm",
            "bench cap --caps 1,8,4 --rounds 1 --prompts 2 --warmup 0 --feed greedy --max-tokens 8",
            "bench plot record.json --plot out.svg",
            "bench io --depths 1,8 --rounds 2 --seconds 0.5 --decode --cap 0 --model m",
            "bench residency --profile p.json --json",
            "bench residency --fit out.json",
            "bench arm --cap 4",
            "bench kernels --hidden 256 --width 128 --top-k 4 --rounds 2 --format int4,int8 --working-set 8M",
            "completions bash",
            "trace replay a b --policy lru,layer:lfu,belady --cache 500M,2G --phase all --json",
            "trace record out --ids f --prompt 8 --policy lfu",
            "doctor --model m --json",
            "trace synth o --layers 4 --top-k 2 --phase-tokens 64 --zipf 0.8 --repeat 0 --after 8 --seed 1",
            "usage show --model m --usage f --json",
            "usage import f --model m",
            "usage export f",
            "run a --pin off --pin-size 2G --usage read-only",
            "man",
        ] {
            assert!(parsed(line).is_ok(), "{line}: {:?}", parsed(line).err());
        }
    }

    #[test]
    fn what_is_not_there_is_wrong_usage() {
        for line in [
            "serve",
            "tune",
            "pull x",
            "run --expert-top-p 0",
            "run --expert-top-p 1.5",
            "run --draft mtp",
            "run --io pigeons",
            "run --temperature x",
            "run --top-p 0",
            "run a b",
            "run a --ids f",
            "score",
            "score --ids f --logits 1,x",
            "synth o",
            "synth o --like nothing",
            "convert a",
            "bench",
            "bench kernels --rounds 0",
            "bench ab --a x",
            "bench ab --a x --b y --pairs 0",
            "bench cap --caps 1,x",
            "bench cap --noise 0x",
            "bench io --depths 0",
            "bench io --seconds 0",
            "bench plot record.json",
            "bench residency p.json",
            "bench residency --model m",
            "bench kernels --format int4,int3",
            "inspect a --model b",
            "inspect a --ids f.json",
            "plan a --model b",
            "synth o --like tiny --format pickle",
            "synth o --like tiny --format gguf --type q9",
            "completions tcl",
            "trace replay",
            "trace replay a --policy mru",
            "trace replay a --cache x",
            "trace record out",
            "usage",
            "usage import",
            "run a --usage read-only:",
        ] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }

    #[test]
    fn the_innermost_command_says_what_was_given() {
        let (_, matches) = parsed("bench kernels --threads 3").unwrap();
        let settings = Settings::resolve(&matches, &Environment::default(), None).unwrap();
        assert_eq!((settings.threads, settings.origin("threads")), (Some(3), Origin::Flag));
    }

    #[test]
    fn a_commands_own_seed_is_no_setting() {
        let (command, matches) = parsed("synth o --like tiny --seed 9").unwrap();
        assert!(matches!(command, Command::Synth(SynthArgs { seed: 9, .. })));
        let settings = Settings::resolve(&matches, &Environment::default(), None).unwrap();
        assert_eq!((settings.seed, settings.origin("seed")), (None, Origin::Default));
    }
}
