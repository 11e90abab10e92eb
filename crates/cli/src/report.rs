//! Figures of a run: one readable block, or JSON. Both are drawn from the same telemetry.

use std::fmt::Write;

use metaltail_engine::sampler::Sampling;
use metaltail_engine::telemetry::{Figures, PhaseFigures};
use metaltail_engine::{Engine, Resolved};
use serde_json::{Map, Value, json};

use crate::settings::Settings;

/// Bytes that the operating system read from the drive for this process, where it tells.
pub fn drive_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes: "))?;
    line.trim().parse().ok()
}

/// Everything that a report needs.
pub struct Report<'a> {
    /// The engine that ran.
    pub engine: &'a Engine,
    /// The settings it ran with.
    pub settings: &'a Settings,
    /// How tokens were chosen; none when none were.
    pub sampling: Option<&'a Sampling>,
    /// What was gathered.
    pub figures: Figures,
    /// Bytes from the drive while it ran, where the system tells.
    pub cold_bytes: Option<u64>,
}

fn ratio(part: u64, whole: u64) -> Value {
    if whole == 0 { Value::Null } else { json!(part as f64 / whole as f64) }
}

fn per_second(count: u64, seconds: f64) -> Option<f64> {
    (seconds > 0.0 && count > 0).then(|| count as f64 / seconds)
}

fn tiers(cached: u64) -> Value {
    json!({"pinned": 0, "cached": cached, "staged": 0})
}

impl Report<'_> {
    fn totals(&self) -> PhaseFigures {
        let (a, b) = (&self.figures.prefill, &self.figures.decode);
        PhaseFigures {
            rows: a.rows + b.rows,
            seconds: a.seconds + b.seconds,
            selections: a.selections + b.selections,
            lookups: a.lookups + b.lookups,
            cached: a.cached + b.cached,
            misses: a.misses + b.misses,
            felt_wait_seconds: a.felt_wait_seconds + b.felt_wait_seconds,
        }
    }

    fn slots(&self) -> usize {
        let cap = self.engine.resolved().cap;
        let layers = self.engine.plan().layers.iter().filter_map(|layer| layer.moe());
        layers.map(|moe| moe.experts.min(cap)).sum()
    }

    /// Mean reads under way while any was, and the share of time with none.
    fn drive_use(&self) -> (Option<f64>, Option<f64>) {
        let io = &self.figures.io;
        let seconds = self.totals().seconds;
        let depth = (io.busy_seconds > 0.0).then(|| io.depth_seconds / io.busy_seconds);
        let idle = (seconds > 0.0).then(|| (1.0 - io.busy_seconds / seconds).clamp(0.0, 1.0));
        (depth, idle)
    }

    /// The `stats` object of the contract.
    pub fn json(&self) -> Value {
        let (figures, total) = (&self.figures, self.totals());
        let (mean_depth, idle_share) = self.drive_use();
        let decode = &figures.decode;
        json!({
            "prefill": {
                "tokens": figures.prefill.rows,
                "seconds": figures.prefill.seconds,
                "tokens_per_second": per_second(figures.prefill.rows, figures.prefill.seconds),
            },
            "decode": {
                "tokens": decode.rows,
                "seconds": decode.seconds,
                "tokens_per_second": per_second(decode.rows, decode.seconds),
            },
            "experts": {
                "selections": total.selections,
                "distinct_per_token": ratio(total.lookups, total.rows),
                "lookups": total.lookups,
                "hits": tiers(total.cached),
                "misses": total.misses,
                "hit_rate": ratio(total.cached, total.lookups),
                "cap": self.engine.resolved().cap,
                "slots": self.slots(),
                "evictions": figures.evictions,
                "verified": figures.verified,
                "decode": {
                    "selections": decode.selections,
                    "lookups": decode.lookups,
                    "hits": tiers(decode.cached),
                    "misses": decode.misses,
                    "hit_rate": ratio(decode.cached, decode.lookups),
                },
            },
            "io": {
                "bytes": figures.io.bytes,
                "reads": figures.io.reads,
                "cold_bytes": self.cold_bytes,
                "felt_wait_seconds": total.felt_wait_seconds,
                "busy_seconds": figures.io.busy_seconds,
                "mean_depth": mean_depth,
                "idle_share": idle_share,
                "prefetch": {"issued_bytes": null, "useful_bytes": null, "wasted_bytes": null},
            },
            "device": {
                "name": self.engine.device(),
                "experts": total.lookups,
                "submissions": null,
                "fallbacks": null,
                "gpu_wall_seconds": null,
                "kernel_seconds": null,
                "stall_seconds": null,
                "encode_seconds": null,
            },
            "residency": {
                "mode": null, "allocations": self.engine.store().mappings(), "sets": null,
                "declared_per_submit": null, "commits": null, "flush_seconds": null,
                "unregister_seconds": null,
            },
            "draft": {"kind": "off", "proposed": null, "accepted": null},
            "memory": self.memory(),
            "notices": figures.notices,
            "config": self.config(),
        })
    }

    fn memory(&self) -> Value {
        let budget = self.engine.budget();
        let terms: Map<String, Value> =
            budget.terms.iter().map(|term| (term.name.to_owned(), json!(term.bytes))).collect();
        let peak = self.figures.peak_anonymous;
        json!({
            "budget": budget.limit,
            "source": budget.source.to_string(),
            "terms": terms,
            "peak_anonymous": (peak > 0).then_some(peak),
        })
    }

    /// Settings as they were resolved, by flag name with underscores.
    fn config(&self) -> Value {
        let mut config = self.settings.config();
        if let Value::Object(resolved) = resolved_json(self.engine.resolved()) {
            config.extend(resolved);
        }
        if let Some(sampling) = self.sampling {
            config.insert("temperature".into(), json!(sampling.temperature));
            config.insert("top_p".into(), json!(sampling.top_p));
            config.insert("top_k".into(), json!(sampling.top_k));
            config.insert("min_p".into(), json!(sampling.min_p));
            config.insert("seed".into(), json!(sampling.seed));
        }
        config.insert("json".into(), json!(self.settings.json()));
        config.insert("verbose".into(), json!(self.settings.verbose()));
        // What each of these became where nothing was said: there is one of each.
        config.insert("device".into(), json!(self.engine.device()));
        config.insert("draft".into(), json!("off"));
        config.insert("origins".into(), Value::Object(self.settings.origins()));
        Value::Object(config)
    }

    /// The block for people.
    pub fn block(&self) -> String {
        let mut out = String::new();
        let figures = &self.figures;
        for (name, phase) in [("prefill", &figures.prefill), ("decode", &figures.decode)] {
            let rate = per_second(phase.rows, phase.seconds)
                .map_or("–".to_owned(), |rate| format!("{rate:.1} tokens/s"));
            let line = format!("{} tokens in {:.2} s, {rate}", phase.rows, phase.seconds);
            push(&mut out, name, &line);
        }
        self.push_experts(&mut out);
        self.push_drive(&mut out);
        let resolved = self.engine.resolved();
        let activations = if resolved.exact { "f32" } else { "int8" };
        push(
            &mut out,
            "device",
            &format!(
                "{} ({}), {} threads, {activations} activations for quantised experts",
                self.engine.device(),
                resolved.isa,
                resolved.threads
            ),
        );
        self.push_memory(&mut out);
        out
    }

    fn push_experts(&self, out: &mut String) {
        let (total, decode) = (self.totals(), &self.figures.decode);
        let share = |phase: &PhaseFigures| match phase.lookups {
            0 => "–".to_owned(),
            lookups => format!("{:.1} %", 100.0 * phase.cached as f64 / lookups as f64),
        };
        push(
            out,
            "experts",
            &format!(
                "{} of {} look-ups cached ({}; in decode {}), {} read; {}, cap {} a layer{}, {} slots",
                total.cached,
                total.lookups,
                share(&total),
                share(decode),
                total.misses,
                self.engine.resolved().policy,
                self.engine.resolved().cap,
                if self.engine.resolved().pool { " in the mean" } else { "" },
                self.slots()
            ),
        );
    }

    fn push_drive(&self, out: &mut String) {
        let (io, total) = (&self.figures.io, self.totals());
        let (depth, idle) = self.drive_use();
        let mode = self.engine.store().io_mode();
        let way = if mode.direct { "direct" } else { "buffered" };
        let by = if mode.uring { "io_uring" } else { "threads" };
        let mut line = format!("{} in {} {way} reads by {by}", bytes(io.bytes), io.reads);
        if let Some(cold) = self.cold_bytes {
            let _ = write!(line, ", {} from the drive itself", bytes(cold));
        }
        let share = if total.seconds > 0.0 { total.felt_wait_seconds / total.seconds } else { 0.0 };
        let _ = write!(line, "; felt wait {:.3} s ({:.0} %)", total.felt_wait_seconds, 100.0 * share);
        if let (Some(depth), Some(idle)) = (depth, idle) {
            let _ = write!(line, "; depth {depth:.1}, idle {:.0} %", 100.0 * idle);
        }
        push(out, "drive", &line);
    }

    fn push_memory(&self, out: &mut String) {
        let budget = self.engine.budget();
        let terms: Vec<String> =
            budget.terms.iter().map(|term| format!("{} {}", term.name, bytes(term.bytes))).collect();
        push(
            out,
            "memory",
            &format!(
                "budget {} ({}): {}; peak {} anonymous",
                bytes(budget.limit),
                budget.source,
                terms.join(" + "),
                bytes(self.figures.peak_anonymous)
            ),
        );
    }
}

/// Resolved settings as JSON, which is text where a path need not be.
pub fn resolved_json(resolved: &Resolved) -> Value {
    let model = resolved.model.to_string_lossy().into_owned().into();
    json!(Resolved { model, ..resolved.clone() })
}

fn push(out: &mut String, name: &str, line: &str) {
    let _ = writeln!(out, "{name:<9}{line}");
}

/// Bytes in the largest unit that leaves a number above one.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_in_the_largest_fitting_unit() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(5 << 30), "5.0 GiB");
    }
}
