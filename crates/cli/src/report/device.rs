//! What an accelerator did, and what it cost to keep memory resident for it.

use metaltail_engine::Engine;
use serde_json::{Value, json};

use crate::words::count;

/// `stats.device`. What a processor has none of is null.
pub fn device(engine: &Engine, lookups: u64) -> Value {
    let figures = engine.device_figures();
    let of = figures.as_ref();
    json!({
        "name": engine.device(),
        "machine": of.map(|f| &f.machine),
        "experts": of.map_or(lookups, |f| f.experts),
        "submissions": of.map(|f| f.residency.submissions),
        "fallbacks": of.map(|f| u64::from(f.residency.fallback.is_some())),
        "fallback_reason": of.and_then(|f| f.residency.fallback.as_ref()),
        "gpu_wall_seconds": of.map(|f| f.gpu_wall_seconds),
        "kernel_seconds": of.map(|f| f.kernel_seconds),
        "stall_seconds": of.map(|f| f.stall_seconds),
        "coupled_seconds": of.map(|f| f.coupled_seconds),
        "encode_seconds": of.and_then(|f| f.encode_seconds),
        "schedule_seconds": of.and_then(|f| f.schedule_seconds),
    })
}

/// `stats.residency`. `kept` chunks stayed in the cache that were to go.
pub fn residency(engine: &Engine, kept: u64) -> Value {
    let figures = engine.device_figures();
    let of = figures.as_ref();
    let mappings = engine.store().mappings();
    json!({
        "mode": of.map(|f| f.mode.name()),
        "allocations": of.map_or(mappings, |f| f.residency.allocations),
        "sets": of.map(|f| f.residency.sets),
        "declared_per_submit": of.and_then(|f| f.residency.declared_per_submit()),
        "commits": of.map(|f| f.residency.commits),
        "registered": of.map(|f| f.residency.registered),
        "unregistered": of.map(|f| f.residency.unregistered),
        "unregister_refused": of.map(|_| kept),
        "flush_seconds": of.map(|f| f.residency.flush.as_secs_f64()),
        "unregister_seconds": of.map(|f| f.residency.unregister.as_secs_f64()),
        "kept_alive": of.map(|f| f.residency.kept_alive),
        "keep_alive_refused": of.map(|f| f.residency.keep_alive_refused),
    })
}

/// The same in a line; none for the processor.
pub fn words(engine: &Engine) -> Option<String> {
    let figures = engine.device_figures()?;
    let declared = figures.residency.declared_per_submit().unwrap_or(0.0);
    Some(format!(
        "{} ({}): {} in {}, {declared:.0} declared with each; {} in {}, {}; in its own time kernels {:.3} s, stall {:.3} s",
        engine.device(),
        figures.machine,
        count(figures.experts, "expert"),
        count(figures.residency.submissions, "submission"),
        count(figures.residency.allocations, "allocation"),
        count(figures.residency.sets, "set"),
        count(figures.residency.commits, "commit"),
        figures.kernel_seconds,
        figures.stall_seconds + figures.coupled_seconds,
    ))
}
