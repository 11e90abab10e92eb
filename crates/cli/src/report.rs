//! Figures of a run: one readable block, or JSON. Both are drawn from the same telemetry.

mod device;

use std::fmt::Write;

use metaltail_engine::sampler::Sampling;
use metaltail_engine::telemetry::{Figures, PhaseFigures, hidden_share};
use metaltail_engine::{Engine, Resolved};
use metaltail_store::DriveFigures;
use serde_json::{Map, Value, json};

use crate::settings::Settings;
use crate::words::{count, shortest};

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

/// Seconds of felt wait by layer number.
fn felt_by_layer(figures: &Figures) -> Value {
    let layers = figures.io.felt_wait_by_layer.iter();
    Value::Object(layers.map(|(layer, seconds)| (layer.to_string(), json!(seconds))).collect())
}

/// Mean share of its row's weight that a selection had which was left out.
pub fn dropped_mean(figures: &PhaseFigures) -> Option<f64> {
    (figures.dropped > 0).then(|| figures.dropped_weight / figures.dropped as f64)
}

/// What was left out of the experts that routers chose, in words.
pub fn dropped_words(top_p: f32, figures: &PhaseFigures) -> String {
    format!(
        "expert-top-p {top_p} (lossy) left out {:.1} % of {} selections, their mean weight {:.1} %",
        100.0 * figures.dropped as f64 / figures.selections.max(1) as f64,
        figures.selections,
        100.0 * dropped_mean(figures).unwrap_or(0.0)
    )
}

fn per_second(count: u64, seconds: f64) -> Option<f64> {
    (seconds > 0.0 && count > 0).then(|| count as f64 / seconds)
}

fn tiers(phase: &PhaseFigures) -> Value {
    json!({"pinned": phase.pinned, "cached": phase.cached, "staged": phase.staged})
}

impl Report<'_> {
    /// Prefill and decode together.
    pub fn totals(&self) -> PhaseFigures {
        self.figures.prefill.plus(&self.figures.decode)
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
                "dropped": total.dropped,
                "dropped_mean_weight": dropped_mean(&total),
                "distinct_per_token": ratio(total.lookups, total.rows),
                "lookups": total.lookups,
                "hits": tiers(&total),
                "misses": total.misses,
                "hit_rate": ratio(total.hits(), total.lookups),
                "cap": self.engine.resolved().cap,
                "slots": self.engine.store().cached_slots(),
                "grown_bytes": figures.grown_bytes,
                "given_back_bytes": figures.given_back_bytes,
                "evictions": figures.evictions,
                "verified": figures.verified,
                "decode": {
                    "selections": decode.selections,
                    "dropped": decode.dropped,
                    "lookups": decode.lookups,
                    "hits": tiers(decode),
                    "misses": decode.misses,
                    "hit_rate": ratio(decode.hits(), decode.lookups),
                },
            },
            "io": {
                "bytes": figures.io.demanded_bytes,
                "reads": figures.io.demanded_reads,
                "total_bytes": figures.io.bytes,
                "total_reads": figures.io.reads,
                "cold_bytes": self.cold_bytes,
                "warm_bytes": self.cold_bytes.map(|cold| figures.io.bytes.saturating_sub(cold)),
                "pinned_bytes": figures.io.pinned_bytes,
                "felt_wait_seconds": total.felt_wait_seconds,
                "busy_seconds": figures.io.busy_seconds,
                "mean_depth": mean_depth,
                "idle_share": idle_share,
                "hidden_share": hidden_share(
                    figures.io.busy_seconds, total.felt_wait_seconds, total.sparse_seconds
                ),
                "felt_wait_by_layer": felt_by_layer(figures),
                "drives": self.drives(),
                "prefetch": self.prefetch(),
            },
            "device": device::device(self.engine, total.lookups),
            "residency": device::residency(self.engine, figures.chunks_kept),
            "draft": {"kind": "off", "proposed": null, "accepted": null},
            "memory": self.memory(),
            "pins": crate::pins::to_json(self.engine.pins()),
            "notices": figures.notices,
            "config": self.config(),
        })
    }

    /// What was loaded ahead of demand; null where it was not allowed.
    fn prefetch(&self) -> Value {
        let figures = &self.figures.io.prefetch;
        let allowed = self.engine.resolved().prefetch == "on";
        let counted = |n: u64| allowed.then_some(n);
        json!({
            "steps": counted(figures.steps),
            "issued_bytes": counted(figures.issued_bytes),
            "useful_bytes": counted(figures.useful_bytes),
            "wasted_bytes": counted(figures.issued_bytes.saturating_sub(figures.useful_bytes)),
            "recall": ratio(figures.right, figures.chosen),
        })
    }

    /// What each directory's drive carried since the model was opened.
    fn drives(&self) -> Value {
        let drive = |drive: DriveFigures| {
            json!({
                "path": drive.path.to_string_lossy(),
                "bytes": drive.bytes,
                "reads": drive.reads,
                "bytes_per_second": drive.bytes_per_second,
                "set_aside": drive.set_aside,
            })
        };
        self.engine.store().drives().into_iter().map(drive).collect()
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
            "locked_bytes": self.engine.store().locked_bytes(),
        })
    }

    /// Settings as they were resolved, by flag name with underscores.
    fn config(&self) -> Value {
        let mut config = self.settings.config();
        if let Value::Object(resolved) = resolved_json(self.engine.resolved()) {
            config.extend(resolved);
        }
        let drives = self.engine.checkpoint().drives().iter();
        let model: Vec<_> = drives.map(|drive| drive.dir.to_string_lossy().into_owned()).collect();
        config.insert("model".into(), json!(model.join(",")));
        if let Some(sampling) = self.sampling {
            config.insert("temperature".into(), json!(shortest(sampling.temperature)));
            config.insert("top_p".into(), json!(shortest(sampling.top_p)));
            config.insert("top_k".into(), json!(sampling.top_k));
            config.insert("min_p".into(), json!(shortest(sampling.min_p)));
            config.insert("seed".into(), json!(sampling.seed));
        }
        let pin = self.settings.pin.as_ref().map_or("auto".to_owned(), ToString::to_string);
        config.insert("pin".into(), json!(pin));
        config.insert("expert_top_p".into(), json!(shortest(self.engine.expert_top_p().unwrap_or(1.0))));
        config.insert("json".into(), json!(self.settings.json()));
        config.insert("verbose".into(), json!(self.settings.verbose()));
        // What it became where nothing was said: there is one.
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
        if let Some(top_p) = self.engine.expert_top_p() {
            push(&mut out, "lossy", &dropped_words(top_p, &self.totals()));
        }
        self.push_drive(&mut out);
        let resolved = self.engine.resolved();
        let activations = if resolved.exact { "f32" } else { "int8" };
        push(
            &mut out,
            "device",
            &format!(
                "{} ({}), {}, {activations} activations for quantised experts",
                self.engine.device(),
                resolved.isa,
                count(resolved.threads, "thread")
            ),
        );
        if let Some(line) = device::words(self.engine) {
            push(&mut out, "residency", &line);
        }
        self.push_memory(&mut out);
        out
    }

    fn push_experts(&self, out: &mut String) {
        let (total, decode) = (self.totals(), &self.figures.decode);
        let share = |phase: &PhaseFigures| match phase.lookups {
            0 => "–".to_owned(),
            lookups => format!("{:.1} %", 100.0 * phase.hits() as f64 / lookups as f64),
        };
        let resolved = self.engine.resolved();
        let others = [(total.pinned, "pinned"), (total.staged, "staged")];
        let others: String =
            others.iter().filter(|(n, _)| *n > 0).map(|(n, tier)| format!(", {n} of them {tier}")).collect();
        push(
            out,
            "experts",
            &format!(
                "{} of {} look-ups in memory ({}; in decode {}){others}, {} read; {}, cap {} a layer{}, {} slots",
                total.hits(),
                total.lookups,
                share(&total),
                share(decode),
                total.misses,
                resolved.policy,
                resolved.cap,
                if resolved.pool { " in the mean" } else { "" },
                self.engine.store().cached_slots()
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
        let ahead = &io.prefetch;
        if ahead.issued_bytes > 0 {
            let useful = 100.0 * ahead.useful_bytes as f64 / ahead.issued_bytes as f64;
            let _ = write!(line, "; {} ahead of demand, {useful:.0} % of use", bytes(ahead.issued_bytes));
        }
        push(out, "drive", &line);
        let drives = self.engine.store().drives();
        if drives.len() > 1 {
            let share = |drive: &DriveFigures| {
                let aside = if drive.set_aside { " (set aside)" } else { "" };
                format!("{} from {}{aside}", bytes(drive.bytes), drive.path.display())
            };
            push(out, "drives", &drives.iter().map(share).collect::<Vec<_>>().join(", "));
        }
    }

    fn push_memory(&self, out: &mut String) {
        let budget = self.engine.budget();
        let terms: Vec<String> =
            budget.terms.iter().map(|term| format!("{} {}", term.name, bytes(term.bytes))).collect();
        let given_back = match self.figures.given_back_bytes {
            0 => String::new(),
            given => format!("; {} of experts given back, memory was short", bytes(given)),
        };
        let locked = match self.engine.resolved().mlock.as_str() {
            "on" => format!("; {} of experts locked", bytes(self.engine.store().locked_bytes())),
            _ => String::new(),
        };
        push(
            out,
            "memory",
            &format!(
                "budget {} ({}): {}; peak {} anonymous{locked}{given_back}",
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
    let _ = writeln!(out, "{name:<10}{line}");
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
