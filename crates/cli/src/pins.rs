//! Usage profile and pins: from settings to options, and in words.

use std::path::PathBuf;

use metaltail_engine::{PinMode, Pins, UsageMode, UsagePlace};
use serde_json::{Value, json};

use crate::report::bytes as size;
use crate::settings::{Pin, Settings, Usage};
use crate::words::{count, table};

/// Experts that are listed one by one.
const LISTED: usize = 16;

/// Where profiles lie unless told otherwise: `$XDG_STATE_HOME/metaltail/usage`, else
/// `~/.local/state/metaltail/usage`. Not beside the model, which may be shared and read-only.
fn state() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    Some(state.join("metaltail/usage"))
}

/// What the settings make of the usage profile. `records` says whether the command records where nothing
/// was said; one that measures only reads. Without a home there is no usual place, and nothing is kept.
pub fn usage_mode(settings: &Settings, records: bool) -> UsageMode {
    let place = |file: &Option<PathBuf>| match file {
        Some(file) => Some(UsagePlace::File(file.clone())),
        None => state().map(UsagePlace::Directory),
    };
    let (place, writes) = match &settings.usage {
        Some(Usage::Off) => (None, false),
        Some(Usage::ReadOnly(file)) => (place(file), false),
        Some(Usage::On(file)) => (place(file), true),
        None => (place(&None), records),
    };
    match place {
        None => UsageMode::Off,
        Some(place) if writes => UsageMode::On(place),
        Some(place) => UsageMode::ReadOnly(place),
    }
}

/// What the settings want pinned.
pub fn pin_mode(settings: &Settings) -> PinMode {
    match &settings.pin {
        Some(Pin::Off) => PinMode::Off,
        Some(Pin::Auto) | None => PinMode::Auto,
        Some(Pin::File(file)) => PinMode::File(file.clone()),
    }
}

/// Pins as JSON.
pub fn to_json(pins: &Pins) -> Value {
    let candidate = |c: &metaltail_store::usage::pin::Candidate| {
        json!({
            "bytes": c.bytes, "experts": c.experts, "selections": c.selections, "hits": c.hits,
            "missed_bytes": c.missed_bytes,
        })
    };
    json!({
        "experts": pins.plan.pinned.len(),
        "bytes": pins.plan.bytes,
        "reason": pins.reason,
        "judged_tokens": pins.plan.judged,
        "candidates": pins.plan.candidates.iter().map(candidate).collect::<Vec<_>>(),
    })
}

/// Pins for people: what was decided, and what was tried.
pub fn to_words(pins: &Pins) -> String {
    let plan = &pins.plan;
    let mut text =
        format!("pinned: {}, {} ({})", count(plan.pinned.len(), "expert"), size(plan.bytes), pins.reason);
    if !plan.pinned.is_empty() {
        let first: Vec<String> =
            plan.pinned.iter().take(LISTED).map(|(layer, expert)| format!("{layer}:{expert}")).collect();
        let more = if plan.pinned.len() > LISTED { " …" } else { "" };
        text.push_str(&format!("\nhottest, layer:expert: {}{more}", first.join(" ")));
    }
    if !plan.candidates.is_empty() {
        let mut rows = vec![["pinned", "experts", "hits %", "read a token"].map(str::to_owned).to_vec()];
        rows.extend(plan.candidates.iter().map(|c| {
            let mark = if c.bytes == plan.bytes { "*" } else { "" };
            vec![
                format!("{mark}{}", size(c.bytes)),
                c.experts.to_string(),
                format!("{:.1}", 100.0 * c.hits as f64 / c.selections.max(1) as f64),
                size(c.missed_bytes / (plan.judged.max(1) as u64)),
            ]
        }));
        text.push('\n');
        text.push_str(table(&rows, &[true, true, true, true]).trim_end());
    }
    text
}
