//! `metaltail bench kernels`: how close the kernels, and a resident model, come to the memory's
//! bandwidth.

use std::path::Path;
use std::sync::Arc;

use metaltail_bench::decode::{self, DecodeOptions, DecodeReport};
use metaltail_bench::kernels::{self, KernelOptions, KernelReport};
use metaltail_engine::telemetry::Telemetry;
use metaltail_engine::{DeviceKind, Engine, Resolved};
use metaltail_kernels::default_threads;
use metaltail_model::expert_places;
use metaltail_quant::MatrixLayout;
use metaltail_store::Machine;
use serde_json::{Value, json};

use crate::args::BenchKernelsArgs;
use crate::exit::{Failure, Kind};
use crate::output;
use crate::progress::Bar;
use crate::report::{bytes as size, resolved_json};
use crate::runtime::{engine_options, failure};
use crate::settings::{Origin, Settings};
use crate::token_cost::TokenCost;
use crate::words::{table, unoptimised};

/// Experts a pass where nothing is said.
const TOP_K: usize = 8;

/// Ids of a prompt, and tokens decoded after it, in one round of a model.
const PROMPT: usize = 128;
const TOKENS: usize = 64;

/// Measures kernels, and a model where one is named.
///
/// # Errors
/// Shapes without a layout, too little memory, a model that is refused.
pub fn execute(args: &BenchKernelsArgs, settings: &Settings) -> Result<(), Failure> {
    if crate::runtime::device(settings).kind != DeviceKind::Cpu {
        let text = "bench kernels measures the processor's kernels and a model on them: leave --device out";
        return Err(Failure::new(Kind::Usage, text.to_owned()));
    }
    let options = kernel_options(args, settings)?;
    // The model comes first: whatever refuses it does so before anything was measured, and it is
    // gone from memory when the kernels have their turn.
    let decode = match &settings.input.model {
        Some(dir) => Some(measure_model(dir, args.rounds, settings)?),
        None => None,
    };
    let report = measure_kernels(&options, settings.json())?;
    if settings.json() {
        let object = json!({
            "report": report,
            "decode": decode.as_ref().map(|measured| measured.to_json()),
            "machine": super::surroundings::machine(),
            "config": {
                "hidden": args.hidden,
                "width": args.width,
                "top_k": report.shape[2],
                "rounds": args.rounds,
                "formats": args.formats.iter().map(ToString::to_string).collect::<Vec<_>>(),
                "working_set": args.working_set,
                "threads": report.threads,
            },
        });
        return output::print(&format!("{object}\n"));
    }
    let mut text = unoptimised().map_or(String::new(), |text| format!("note: {text}\n"));
    text.push_str(&kernel_words(&report));
    if let Some(measured) = &decode {
        text.push_str(&measured.to_words());
    }
    output::print(&text)
}

/// What the kernels are measured with, refused here where it cannot be.
fn kernel_options(args: &BenchKernelsArgs, settings: &Settings) -> Result<KernelOptions, Failure> {
    // A top-k that some file or variable sets is for sampling; only the flag is this command's.
    let given = settings.top_k.filter(|_| settings.origin("top_k") == Origin::Flag);
    let top_k = given.unwrap_or(TOP_K);
    if top_k == 0 {
        return Err(Failure::new(Kind::Usage, "--top-k 0 computes nothing: use at least 1"));
    }
    refuse_large(args, top_k)?;
    for format in &args.formats {
        for (rows, cols) in [(args.width, args.hidden), (args.hidden, args.width)] {
            let refuse = |error| Failure::from_error(Kind::Usage, &error);
            MatrixLayout::new(*format, rows, cols).map_err(refuse)?;
        }
    }
    Ok(KernelOptions {
        hidden: args.hidden,
        width: args.width,
        top_k,
        working_set: args.working_set as usize,
        rounds: args.rounds,
        threads: settings.threads.unwrap_or_else(default_threads).max(1),
        formats: args.formats.clone(),
    })
}

fn measure_kernels(options: &KernelOptions, json: bool) -> Result<KernelReport, Failure> {
    let rounds = (options.rounds as u64 + 1).saturating_mul(options.formats.len() as u64);
    let bar = Bar::items("kernels", rounds, json);
    kernels::measure(options, &mut |_| bar.advance(1)).ok_or_else(|| {
        let shape = format!("--hidden {} --width {}", options.hidden, options.width);
        Failure::new(Kind::Usage, format!("{shape} cannot be stored in one of the formats asked for"))
    })
}

/// Refuses working sets that memory cannot hold, before the system ends the process for them.
fn refuse_large(args: &BenchKernelsArgs, top_k: usize) -> Result<(), Failure> {
    let machine = Machine::probe().map_err(|error| Failure::from_error(Kind::Failed, &error))?;
    // Three matrices of at most 4 bytes a weight; the experts and a buffer of the same size.
    let weights = 12u128 * args.hidden as u128 * args.width as u128;
    let experts = weights.saturating_mul(top_k as u128).max(u128::from(args.working_set));
    let wanted = experts.saturating_add(u128::from(args.working_set));
    if args.working_set < 1 << 20 {
        let text = "--working-set must be at least 1M, and more than the processor caches to mean much";
        return Err(Failure::new(Kind::Usage, text));
    }
    if wanted > u128::from(machine.headroom()) {
        return Err(Failure::new(
            Kind::Budget,
            format!(
                "experts and the buffer that they are compared with need {wanted} bytes, and {} are free: lower --working-set, --hidden, --width or --top-k",
                machine.headroom()
            ),
        ));
    }
    Ok(())
}

/// A model that was measured, and how it was set.
struct Measured {
    report: DecodeReport,
    resolved: Resolved,
}

fn measure_model(dir: &Path, rounds: usize, settings: &Settings) -> Result<Measured, Failure> {
    let loading = Bar::bytes("loading", 0, settings.json());
    let progress = |done: u64, total: u64| {
        loading.set_length(total);
        loading.set_position(done);
    };
    let telemetry = Arc::new(Telemetry::new(Vec::new()));
    let engine = Engine::open(dir, &engine_options(settings), telemetry, &progress)
        .map_err(|error| failure(&error))?;
    loading.finish();
    let bytes = bytes_per_token(&engine)?;
    let prompt = PROMPT.min(engine.context() / 2);
    let tokens = TOKENS.min(engine.context() - prompt);
    let options = DecodeOptions { prompt, tokens, rounds, seed: 0 };
    let bar = Bar::items("decode", rounds as u64 + 1, settings.json());
    let report = decode::measure(&engine, &options, bytes, &mut |_| bar.advance(1))
        .map_err(|error| failure(&error))?
        .ok_or_else(|| Failure::new(Kind::Failed, "no round of decoding was measured"))?;
    Ok(Measured { report, resolved: engine.resolved().clone() })
}

fn bytes_per_token(engine: &Engine) -> Result<u64, Failure> {
    let (checkpoint, plan) = (engine.checkpoint(), engine.plan());
    let inventory = plan.inventory();
    let places = expert_places(checkpoint, &inventory, false)
        .map_err(|error| Failure::from_error(Kind::Model, &error))?;
    let cost = TokenCost::of(plan, &inventory, &places, |spec| {
        Ok::<_, metaltail_container::Error>(checkpoint.matrix(spec)?.layout.bytes() as u64)
    });
    Ok(cost.map_err(|error| Failure::from_error(Kind::Model, &error))?.resident())
}

impl Measured {
    /// Whether every look-up of the measured rounds was answered from memory.
    fn resident(&self) -> bool {
        self.report.hit_rate >= 1.0
    }

    fn to_json(&self) -> Value {
        let mut object = json!(self.report);
        object["resident"] = json!(self.resident());
        object["config"] = resolved_json(&self.resolved);
        object
    }

    fn to_words(&self) -> String {
        let report = &self.report;
        let row = |name: &str, value: String| vec![name.to_owned(), value];
        let rows = [
            row("bytes a token", size(report.bytes_per_token)),
            row("decode, tokens/s", report.decode_tokens_per_second.to_string()),
            row("decode, GB/s", report.decode_gb_per_second.to_string()),
            row("plain read, GB/s", report.ceiling_gb_per_second.to_string()),
            row("decode of plain read", report.of_ceiling.to_string()),
            row("prefill, tokens/s", report.prefill_tokens_per_second.to_string()),
        ];
        let model = self.resolved.model.display();
        let mut text = format!("\n{model}, {} threads\n{}", self.resolved.threads, table(&rows, &[]));
        if !self.resident() {
            text.push_str(&format!(
                "note: {:.3} % of the experts looked up were in memory, the rest was read from the drive: this is not the speed of a resident model. More --ram or a larger --cap holds them all\n",
                100.0 * report.hit_rate
            ));
        }
        text
    }
}

fn kernel_words(report: &KernelReport) -> String {
    let [hidden, width, top_k] = report.shape;
    let mut text = format!(
        "{}, {} threads; experts {hidden} × {width}, {top_k} a pass, one row\nplain read: {} GB/s\n\n",
        report.isa, report.threads, report.ceiling_gb_per_second
    );
    let header = ["format", "activations", "an expert", "GB/s", "of plain read"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for row in &report.rows {
        rows.push(vec![
            row.format.clone(),
            row.activations.to_owned(),
            size(row.expert_bytes as u64),
            row.gb_per_second.to_string(),
            row.of_ceiling.to_string(),
        ]);
    }
    text.push_str(&table(&rows, &[false, false, true, false, false]));
    text
}
