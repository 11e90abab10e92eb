//! A sweep over the size of the expert cache.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Spread;
use crate::arm::{ArmRecord, PromptRow};
use crate::figures::{SPEED, spreads};
use crate::harness::{Arm, Harness, Noise, Role, Run, Runner, cache_hits, degenerate, sweep_order};
use crate::job::Job;

/// How far figures may lie apart that should be the same at every cap, as a share.
const SAME: f64 = 0.01;

/// How to sweep.
#[derive(Clone, Debug)]
pub struct CapOptions {
    /// Caps, each once, the smallest first; one a arm.
    pub caps: Vec<usize>,
    /// Rounds over all of them.
    pub rounds: usize,
    /// How far controls may lie apart, as a share.
    pub noise: f64,
}

/// One cap.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CapRow {
    /// Experts kept a layer.
    pub cap: usize,
    /// Spreads over all prompts of all rounds, by the keys of [`crate::figures::FIGURES`].
    pub figures: BTreeMap<String, Spread>,
    /// Largest anonymous memory at a row's end.
    pub peak_anonymous: Option<u64>,
    /// Major faults of the whole process, the most of all rounds.
    pub major_faults: Option<u64>,
    /// Mappings of the expert store.
    pub mappings: Option<u64>,
    /// Mappings made while prompts were computed.
    pub mappings_added: i64,
    /// Hash of the ids.
    pub ids: Option<String>,
    /// Why the row does not count.
    pub excluded: Option<String>,
}

/// One claim about the sweep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    /// The claim.
    pub claim: String,
    /// Whether it holds; none where nothing tells.
    pub holds: Option<bool>,
    /// What was seen.
    pub seen: String,
}

/// A sweep as it went.
#[derive(Clone, Debug)]
pub struct Sweep {
    /// Every run.
    pub runs: Vec<Run>,
    /// What the controls say.
    pub noise: Noise,
    /// A row a cap.
    pub rows: Vec<CapRow>,
    /// What follows.
    pub claims: Vec<Claim>,
    /// Why nothing follows from it.
    pub refused: Option<String>,
}

/// Sweeps: `arms[i]` has `options.caps[i]`.
pub fn sweep(
    arms: &[Arm],
    job: &Job,
    options: &CapOptions,
    runner: &mut dyn Runner,
    tell: &mut dyn FnMut(&Run),
) -> Sweep {
    let harness = Harness { arms, job, same_ids: true, stop_at_failure: false };
    let order = sweep_order(arms.len(), options.rounds);
    // The controls and the smallest cap come first: what cannot be compared is refused at once.
    let first = order.len().min(3);
    let mut runs = harness.run(&order[..first], runner, tell);
    let mut refused = refusal(&runs, &options.caps);
    if refused.is_none() {
        runs = harness.resume(runs, &order[first..], runner, tell);
    }
    let noise = Noise::of(&runs, options.noise);
    let rows: Vec<CapRow> = options.caps.iter().enumerate().map(|(arm, cap)| row(&runs, arm, *cap)).collect();
    refused = refused.or_else(|| excluded(&rows)).or_else(|| noise.refusal());
    runs.iter_mut().filter_map(|run| run.record.as_mut()).for_each(ArmRecord::forget_ids);
    let claims = claims(&rows, noise.spread.unwrap_or(0.0));
    Sweep { runs, noise, rows, claims, refused }
}

fn refusal(runs: &[Run], caps: &[usize]) -> Option<String> {
    let failed = runs.iter().find(|run| run.excluded.is_some());
    if let Some(run) = failed {
        let reason = run.excluded.as_deref().unwrap_or_default();
        return Some(format!("cap {} failed: {reason}", caps.get(run.arm)?));
    }
    let at_one = runs.iter().find(|run| run.role == Role::Measured && caps.get(run.arm) == Some(&1))?;
    degenerate(cache_hits(at_one))
}

fn excluded(rows: &[CapRow]) -> Option<String> {
    let row = rows.iter().find(|row| row.excluded.is_some())?;
    Some(format!("cap {} failed: {}", row.cap, row.excluded.as_deref().unwrap_or_default()))
}

fn row(runs: &[Run], arm: usize, cap: usize) -> CapRow {
    let own: Vec<&Run> = runs.iter().filter(|run| run.arm == arm).collect();
    let excluded = own.iter().find_map(|run| run.excluded.clone());
    let measured = own.iter().filter(|run| run.role == Role::Measured);
    let records: Vec<&ArmRecord> = measured.filter_map(|run| run.counted()).collect();
    let rows = || records.iter().flat_map(|record| record.measured());
    let allocations = |row: &PromptRow| row.stats.pointer("/residency/allocations")?.as_u64();
    CapRow {
        cap,
        figures: if excluded.is_some() { BTreeMap::new() } else { spreads(rows()) },
        peak_anonymous: records.iter().filter_map(|record| record.peak_anonymous).max(),
        major_faults: records.iter().filter_map(|record| record.system.major_faults).max(),
        mappings: rows().filter_map(allocations).max(),
        mappings_added: rows().map(|row| row.mappings_added).max().unwrap_or(0),
        ids: records.first().map(|record| record.ids_hash()),
        excluded,
    }
}

fn claims(rows: &[CapRow], noise: f64) -> Vec<Claim> {
    let rows: Vec<&CapRow> = rows.iter().filter(|row| row.excluded.is_none()).collect();
    vec![
        identical(&rows),
        monotone(&rows, noise),
        constant(&rows, "bytes_per_read", "a read call brings the same number of bytes at every cap"),
        mappings(&rows),
        constant(&rows, "submissions_per_token", "device submissions a token are the same at every cap"),
    ]
}

fn claim(claim: &str, holds: Option<bool>, seen: String) -> Claim {
    Claim { claim: claim.to_owned(), holds, seen }
}

fn identical(rows: &[&CapRow]) -> Claim {
    let mut hashes: Vec<&str> = rows.iter().filter_map(|row| row.ids.as_deref()).collect();
    hashes.sort_unstable();
    hashes.dedup();
    let holds = (!hashes.is_empty()).then_some(hashes.len() == 1);
    claim("ids are identical at every cap", holds, hashes.join(", "))
}

/// No cap may be slower than a smaller one by more than noise.
fn monotone(rows: &[&CapRow], noise: f64) -> Claim {
    let speed = |row: &CapRow| Some((row.cap, row.figures.get(SPEED)?.median));
    let speeds: Vec<(usize, f64)> = rows.iter().filter_map(|row| speed(row)).collect();
    let mut fastest: Option<(usize, f64)> = None;
    let mut seen = Vec::new();
    for &(cap, rate) in &speeds {
        if let Some((smaller, best)) = fastest.filter(|(_, best)| rate < best / (1.0 + noise)) {
            let less = 100.0 * (1.0 - rate / best);
            seen.push(format!("cap {cap} is {less:.1} % slower than cap {smaller}"));
        }
        if fastest.is_none_or(|(_, best)| rate > best) {
            fastest = Some((cap, rate));
        }
    }
    let text =
        format!("tokens/s do not fall from the smallest to the largest cap, within {:.1} %", 100.0 * noise);
    let holds = (speeds.len() > 1).then_some(seen.is_empty());
    let gain = speeds.first().zip(speeds.last()).map(|(first, last)| last.1 / first.1);
    let gain =
        gain.map_or(String::new(), |gain| format!("the largest cap has {gain:.2} × the smallest one's"));
    claim(&text, holds, if seen.is_empty() { gain } else { seen.join("; ") })
}

fn constant(rows: &[&CapRow], key: &str, text: &str) -> Claim {
    let medians: Vec<f64> = rows.iter().filter_map(|row| Some(row.figures.get(key)?.median)).collect();
    match Spread::of(&medians) {
        Some(Spread { min, max, .. }) => {
            claim(text, Some(max <= min * (1.0 + SAME)), format!("{min:.2}–{max:.2}"))
        }
        None => claim(text, None, "not counted".to_owned()),
    }
}

/// Memory is mapped at the start, in few large pieces, whatever the cap.
fn mappings(rows: &[&CapRow]) -> Claim {
    let added = rows.iter().map(|row| row.mappings_added).max();
    let in_all: Vec<String> = rows.iter().filter_map(|row| row.mappings.map(|n| n.to_string())).collect();
    let seen = format!("{} added; mappings in all: {}", added.unwrap_or(0), in_all.join(", "));
    claim("no token maps memory for experts, at any cap", added.map(|added| added <= 0), seen)
}
