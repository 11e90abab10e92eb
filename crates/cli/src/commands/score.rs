//! `metaltail score`: how well a model predicts given ids.

use metaltail_engine::telemetry::PhaseFigures;
use metaltail_engine::{Score, score};
use serde_json::{Map, Value, json};

use crate::args::ScoreArgs;
use crate::exit::Failure;
use crate::input::Sequences;
use crate::interrupt;
use crate::output::{notice, print};
use crate::progress::Bar;
use crate::report::{Report, drive_bytes, dropped_mean, dropped_words};
use crate::runtime::{Runtime, failure};
use crate::settings::Settings;
use crate::words::shortest;

/// Runs the command.
///
/// # Errors
/// Whatever refuses or fails.
pub fn execute(args: &ScoreArgs, settings: &Settings) -> Result<(), Failure> {
    let sequences = Sequences::read(&args.ids)?;
    let runtime = Runtime::open_to_measure(settings, None)?;
    sequences.check(runtime.engine.context(), runtime.engine.plan().vocab)?;
    let cancel = interrupt::listen();
    let top_p = runtime.engine.expert_top_p();
    let passes = if top_p.is_some() { 2 } else { 1 };
    let bar = Bar::items("scoring", passes * sequences.rows(), settings.json());
    let mut progress = |rows: usize| bar.advance(rows as u64);
    let mut pass = |positions: &[usize]| {
        score(&runtime.engine, sequences.lists(), positions, &cancel, &mut progress)
            .map_err(|error| failure(&error))
    };
    let without = match top_p {
        Some(_) => {
            runtime.engine.set_expert_top_p(None);
            Some(pass(&[])?)
        }
        None => None,
    };
    // Figures are those of what was asked for.
    runtime.engine.telemetry().reset();
    runtime.engine.set_expert_top_p(top_p);
    let before = drive_bytes();
    let scored = pass(&args.logits)?;
    bar.finish();
    // Before the report, which has what went wrong with it.
    runtime.engine.save_usage();
    let report = Report {
        engine: &runtime.engine,
        settings,
        sampling: None,
        figures: runtime.engine.telemetry().figures(),
        cold_bytes: drive_bytes().zip(before).map(|(after, before)| after.saturating_sub(before)),
    };
    let lossy = top_p.zip(without).map(|(top_p, without)| Lossy::new(top_p, &without, &scored, &report));
    if settings.json() {
        let logits: Map<String, Value> =
            scored.logits.iter().map(|(position, row)| (position.to_string(), json!(row))).collect();
        let object = json!({
            "nll": scored.nll, "tokens": scored.tokens, "per_sequence": scored.per_sequence,
            "argmax": scored.argmax, "logits": logits,
            "expert_top_p": lossy.as_ref().map(Lossy::to_json), "stats": report.json(),
        });
        return print(&format!("{object}\n"));
    }
    let mut text = String::new();
    for (index, nll) in scored.per_sequence.iter().enumerate() {
        let nll = nll.map_or("–".to_owned(), |nll| format!("{nll:.6}"));
        text.push_str(&format!("sequence {index}: {} tokens, NLL {nll}\n", sequences.lists()[index].len()));
    }
    if let Some(nll) = scored.nll {
        text.push_str(&format!(
            "all: {} predicted tokens, NLL {nll:.6} nats, perplexity {:.3}\n",
            scored.tokens,
            nll.exp()
        ));
    }
    if let Some(lossy) = &lossy {
        text.push_str(&lossy.to_words());
    }
    for (position, row) in &scored.logits {
        text.push_str(&format!("logits at {position}: {row:?}\n"));
    }
    print(&text)?;
    notice(&format!("\n{}", report.block().trim_end()));
    Ok(())
}

/// What leaving experts out costs.
struct Lossy {
    top_p: f32,
    nll_without: Option<f64>,
    nll_difference: Option<f64>,
    same_argmax: f64,
    figures: PhaseFigures,
}

impl Lossy {
    fn new(top_p: f32, without: &Score, with: &Score, report: &Report<'_>) -> Lossy {
        let pairs = || without.argmax.iter().flatten().zip(with.argmax.iter().flatten());
        let same = pairs().filter(|(a, b)| a == b).count();
        Lossy {
            top_p,
            nll_without: without.nll,
            nll_difference: with.nll.zip(without.nll).map(|(with, without)| with - without),
            same_argmax: same as f64 / pairs().count().max(1) as f64,
            figures: report.totals(),
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "value": shortest(self.top_p), "nll_without": self.nll_without, "nll_difference": self.nll_difference,
            "same_argmax": self.same_argmax,
            "dropped_share": self.figures.dropped as f64 / self.figures.selections.max(1) as f64,
            "dropped_mean_weight": dropped_mean(&self.figures),
        })
    }

    fn to_words(&self) -> String {
        let nll = self.nll_without.zip(self.nll_difference).map_or(String::new(), |(without, difference)| {
            format!("; NLL without {without:.6} nats, difference {difference:+.6}")
        });
        format!(
            "{}{nll}; {:.1} % the same most likely id\n",
            dropped_words(self.top_p, &self.figures),
            100.0 * self.same_argmax
        )
    }
}
