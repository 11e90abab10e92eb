//! `metaltail bench arm`: one arm, as the process that the harness starts for it.

use std::io::stdin;
use std::path::Path;

use metaltail_bench::arm::ArmRecord;
use metaltail_bench::job::{Feed, Job};
use metaltail_bench::serve::{ServeError, serve};
use metaltail_bench::system::SystemCounters;
use metaltail_container::read_regular;
use metaltail_engine::Engine;
use metaltail_engine::telemetry::Figures;
use serde_json::{Map, Value, json};

use super::surroundings;
use crate::exit::{Failure, Kind};
use crate::input::read_capped;
use crate::opened::refused;
use crate::output;
use crate::report::Report;
use crate::runtime::{Runtime, failure};
use crate::settings::Settings;

/// The longest job in bytes.
const JOB_CAP: u64 = 1 << 30;

/// Runs the arm.
///
/// # Errors
/// Whatever refuses or fails.
pub fn execute(settings: &Settings) -> Result<(), Failure> {
    let job = read_job()?;
    let runtime = Runtime::open_to_measure(settings, None)?;
    let engine = &runtime.engine;
    let feed = match job.feed {
        Feed::Auto if has_random_weights(engine) => Feed::Random,
        Feed::Auto => Feed::Greedy,
        feed => feed,
    };
    let draw = |figures: Figures, cold_bytes: Option<u64>| {
        Report { engine, settings, sampling: None, figures, cold_bytes }.json()
    };
    let (mut config, memory) = state(&draw(engine.telemetry().figures(), None));
    let usage_hash = usage_hash(&config);
    let stats = |figures: Figures, cold_bytes: Option<u64>| strip(draw(figures, cold_bytes));
    let rows = serve(engine, &job, feed, &stats).map_err(|error| refusal(&error))?;
    if self::usage_hash(&config) != usage_hash {
        let text =
            "the usage profile changed while it was measured: use --usage off, read-only or read-only:FILE";
        return Err(Failure::new(Kind::Failed, text));
    }
    // Caps may have been lowered by then; what it ended with is what is recorded.
    (config, _) = state(&draw(engine.telemetry().figures(), None));
    let peaks = rows.iter().filter_map(|row| row.stats.pointer("/memory/peak_anonymous")?.as_u64());
    let record = ArmRecord {
        peak_anonymous: peaks.max(),
        config,
        memory,
        model: model(engine)?,
        feed,
        page_cache: job.page_cache,
        usage_hash,
        rows,
        system: SystemCounters::now(),
    };
    output::print(&format!("{}\n", json!(record)))
}

fn read_job() -> Result<Job, Failure> {
    let wrong = |reason: String| {
        let text =
            format!("standard input is not a job: {reason}; `metaltail bench ab` and `bench cap` write them");
        Failure::new(Kind::Usage, text)
    };
    let bytes = read_capped(stdin().lock(), JOB_CAP).map_err(|error| wrong(error.to_string()))?;
    serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))
}

/// A slab container says where its weights came from; of other directories nobody knows.
fn has_random_weights(engine: &Engine) -> bool {
    engine.checkpoint().manifest().is_some_and(|manifest| manifest.parameters.source == "synth")
}

/// Configuration and memory, which are the same in every row of an arm.
fn state(stats: &Value) -> (Value, Value) {
    let part = |key: &str| stats.get(key).cloned().unwrap_or_default();
    (part("config"), part("memory"))
}

/// Statistics without what is told once.
fn strip(mut stats: Value) -> Value {
    if let Some(object) = stats.as_object_mut() {
        object.shift_remove("config");
        if let Some(memory) = object.get_mut("memory").and_then(Value::as_object_mut) {
            memory.retain(|key, _| key == "peak_anonymous");
        }
    }
    stats
}

/// Hash of the usage profile, where the configuration names a file.
fn usage_hash(config: &Value) -> Option<String> {
    let usage = config.get("usage").and_then(Value::as_str)?;
    // No profile has as much; one that cannot be read has been told of at opening.
    let path = Path::new(usage.strip_prefix("read-only:").unwrap_or(usage));
    let bytes = read_regular(path, JOB_CAP).ok()?;
    Some(metaltail_bench::arm::hash_bytes(&bytes))
}

fn model(engine: &Engine) -> Result<Value, Failure> {
    let checkpoint = engine.checkpoint();
    let census = checkpoint.check(&engine.plan().inventory()).map_err(|error| refused(&error))?;
    let formats: Map<String, Value> =
        census.roles.iter().map(|(role, counted)| ((*role).to_owned(), json!(counted.formats))).collect();
    let parameters = checkpoint.manifest().map(|manifest| &manifest.parameters);
    Ok(json!({
        "path": checkpoint.dir().to_string_lossy(),
        "model_type": checkpoint.model_type(),
        "container": checkpoint.kind().to_string(),
        "parameters": parameters,
        "formats": formats,
        "bytes": census.bytes,
        "expert_bytes": census.layers.first().map(|layer| layer.expert_bytes),
        "experts": census.layers.iter().map(|layer| u64::from(layer.experts)).sum::<u64>(),
        "storage": surroundings::storage(checkpoint.dir()),
    }))
}

fn refusal(error: &ServeError) -> Failure {
    match error {
        ServeError::Engine(error) => failure(error),
        ServeError::Job(error) => Failure::from_error(Kind::Usage, error),
        error => Failure::from_error(Kind::Failed, error),
    }
}
