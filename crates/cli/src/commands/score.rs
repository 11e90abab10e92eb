//! `metaltail score`: how well a model predicts given ids.

use metaltail_engine::score;
use serde_json::{Map, Value, json};

use crate::args::ScoreArgs;
use crate::exit::Failure;
use crate::input::Sequences;
use crate::interrupt;
use crate::output::{notice, print};
use crate::progress::Bar;
use crate::report::{Report, drive_bytes};
use crate::runtime::{Runtime, failure};
use crate::settings::Settings;

/// Runs the command.
///
/// # Errors
/// Whatever refuses or fails.
pub fn execute(args: &ScoreArgs, settings: &Settings) -> Result<(), Failure> {
    let sequences = Sequences::read(&args.ids)?;
    let runtime = Runtime::open(settings, 0)?;
    sequences.check(runtime.engine.context(), runtime.engine.plan().vocab)?;
    let cancel = interrupt::listen();
    let bar = Bar::items("scoring", sequences.rows(), settings.json());
    let before = drive_bytes();
    let mut progress = |rows: usize| bar.advance(rows as u64);
    let scored = score(&runtime.engine, sequences.lists(), &args.logits, &cancel, &mut progress);
    bar.finish();
    let scored = scored.map_err(|error| failure(&error))?;
    // Before the report, which has what went wrong with it.
    runtime.engine.save_usage();
    let report = Report {
        engine: &runtime.engine,
        settings,
        sampling: None,
        figures: runtime.engine.telemetry().figures(),
        cold_bytes: drive_bytes().zip(before).map(|(after, before)| after.saturating_sub(before)),
    };
    if settings.json() {
        let logits: Map<String, Value> =
            scored.logits.iter().map(|(position, row)| (position.to_string(), json!(row))).collect();
        let object = json!({
            "nll": scored.nll, "tokens": scored.tokens, "per_sequence": scored.per_sequence,
            "argmax": scored.argmax, "logits": logits, "stats": report.json(),
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
    for (position, row) in &scored.logits {
        text.push_str(&format!("logits at {position}: {row:?}\n"));
    }
    print(&text)?;
    notice(&format!("\n{}", report.block().trim_end()));
    Ok(())
}
