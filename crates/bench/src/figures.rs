//! The figures that rows of a comparison have, drawn from the rows of arms.

use std::collections::BTreeMap;

use serde_json::Value;

use metaltail_engine::telemetry::hidden_share;

use crate::Spread;
use crate::arm::PromptRow;

/// One figure of a prompt.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    /// Key in JSON.
    pub key: &'static str,
    /// Name in tables, with its unit.
    pub name: &'static str,
    /// The figure, where the row has it.
    pub of: fn(&PromptRow) -> Option<f64>,
}

/// Key of the figure that ratios and plots are about.
pub const SPEED: &str = "tokens_per_second";

/// All figures, in the order of tables. Rates and times drift with the machine; bytes, look-ups and
/// waits are what explains them.
pub const FIGURES: [Figure; 25] = [
    Figure { key: SPEED, name: "decode, tokens/s", of: |row| over(row.tokens as f64, row.decode.seconds) },
    Figure {
        key: "hit_rate",
        name: "hit rate",
        of: |row| ratio(row.decode.lookups.saturating_sub(row.decode.misses), row.decode.lookups),
    },
    Figure { key: "pinned_share", name: "hits, pinned", of: |row| tier(row, "pinned") },
    Figure { key: "cached_share", name: "hits, cached", of: |row| tier(row, "cached") },
    Figure { key: "staged_share", name: "hits, staged", of: |row| tier(row, "staged") },
    Figure {
        key: "selections_per_token",
        name: "experts chosen a token",
        of: |row| token(row, stat(row, "/experts/decode/selections")?),
    },
    Figure {
        key: "left_out_share",
        name: "of them left out",
        of: |row| over(stat(row, "/experts/decode/dropped")?, stat(row, "/experts/decode/selections")?),
    },
    Figure {
        key: "used_per_token",
        name: "experts used a token",
        of: |row| {
            let chosen = stat(row, "/experts/decode/selections")?;
            token(row, chosen - stat(row, "/experts/decode/dropped")?)
        },
    },
    Figure {
        key: "distinct_per_token",
        name: "distinct experts a token",
        of: |row| token(row, row.decode.lookups as f64),
    },
    Figure {
        key: "bytes_per_token",
        name: "bytes read a token",
        of: |row| token(row, row.decode.bytes as f64),
    },
    Figure {
        key: "drive_bytes_per_token",
        name: "of them from the drive (cold)",
        of: |row| token(row, row.decode.drive_bytes? as f64),
    },
    Figure {
        key: "warm_bytes_per_token",
        name: "of them from the page cache (warm)",
        of: |row| token(row, row.decode.bytes.saturating_sub(row.decode.drive_bytes?) as f64),
    },
    Figure {
        key: "reads_per_token",
        name: "read calls a token",
        of: |row| token(row, row.decode.reads as f64),
    },
    Figure {
        key: "bytes_per_read",
        name: "bytes a read call",
        of: |row| ratio(row.decode.bytes, row.decode.reads),
    },
    // Where nothing may be read ahead, nothing is.
    Figure {
        key: "ahead_bytes_per_token",
        name: "read ahead a token",
        of: |row| token(row, stat(row, "/io/prefetch/issued_bytes").unwrap_or(0.0)),
    },
    Figure {
        key: "ahead_wasted_bytes_per_token",
        name: "of that never used",
        of: |row| token(row, stat(row, "/io/prefetch/wasted_bytes").unwrap_or(0.0)),
    },
    Figure {
        key: "felt_wait_ms_per_token",
        name: "felt wait a token, ms",
        of: |row| token(row, 1e3 * row.decode.felt_wait_seconds),
    },
    Figure {
        key: "hidden_share",
        name: "computing in sparse layers under reads, share",
        of: |row| {
            let decode = &row.decode;
            hidden_share(decode.busy_seconds, decode.felt_wait_seconds, decode.sparse_seconds)
        },
    },
    Figure {
        key: "device_stall_ms_per_token",
        name: "device stall a token, ms",
        of: |row| token(row, 1e3 * stat(row, "/device/stall_seconds")?),
    },
    Figure {
        key: "submissions_per_token",
        name: "device submissions a token",
        of: |row| token(row, stat(row, "/device/submissions")?),
    },
    Figure {
        key: "busy_ms_per_token",
        name: "drive busy a token, ms",
        of: |row| token(row, 1e3 * row.decode.busy_seconds),
    },
    Figure {
        key: "mean_depth",
        name: "mean queue depth",
        of: |row| over(row.decode.depth_seconds, row.decode.busy_seconds),
    },
    Figure {
        key: "idle_share",
        name: "drive idle, share",
        of: |row| Some((1.0 - over(row.decode.busy_seconds, row.decode.seconds)?).clamp(0.0, 1.0)),
    },
    Figure {
        key: "prefill_tokens_per_second",
        name: "prefill, tokens/s",
        of: |row| stat(row, "/prefill/tokens_per_second"),
    },
    Figure {
        key: "major_faults",
        name: "major faults a prompt",
        of: |row| Some(row.system.major_faults? as f64),
    },
];

/// The figure of a key.
pub fn figure(key: &str) -> Option<&'static Figure> {
    FIGURES.iter().find(|figure| figure.key == key)
}

/// A number in the row's statistics.
pub fn stat(row: &PromptRow, pointer: &str) -> Option<f64> {
    row.stats.pointer(pointer).and_then(Value::as_f64)
}

fn over(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    over(part as f64, whole as f64)
}

fn token(row: &PromptRow, sum: f64) -> Option<f64> {
    over(sum, row.tokens as f64)
}

/// Share of decode's look-ups that a tier answered.
fn tier(row: &PromptRow, tier: &str) -> Option<f64> {
    over(stat(row, &format!("/experts/decode/hits/{tier}"))?, row.decode.lookups as f64)
}

/// The spreads of all figures over some rows; a figure that a row lacks is left out.
pub fn spreads<'a>(rows: impl Iterator<Item = &'a PromptRow>) -> BTreeMap<String, Spread> {
    let rows: Vec<&PromptRow> = rows.collect();
    let spread = |figure: &Figure| {
        let values: Option<Vec<f64>> = rows.iter().map(|row| (figure.of)(row)).collect();
        Some((figure.key.to_owned(), Spread::of(&values?)?))
    };
    FIGURES.iter().filter_map(spread).collect()
}
