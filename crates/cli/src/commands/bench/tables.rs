//! Records as tables for people.

use metaltail_bench::ab::{AbFigure, AbResult};
use metaltail_bench::cap::{CapRow, Claim};
use metaltail_bench::figures::{SPEED, figure};
use metaltail_bench::harness::{Noise, Run};
use metaltail_bench::io::{IoRow, Streaming};
use metaltail_bench::record::Outcome;
use metaltail_bench::{Record, Spread};
use serde_json::Value;

use crate::report::bytes as size;
use crate::words::{count as plural, table, unoptimised};

/// A value of a figure with its unit, as its key says.
fn value(key: &str, value: f64) -> String {
    match key {
        // Counts of bytes are below 2^53.
        _ if key.contains("bytes") => size(value.round() as u64),
        _ if key.ends_with("_share") || key == "hit_rate" => format!("{:.1} %", 100.0 * value),
        _ if value.abs() >= 1000.0 => format!("{value:.0}"),
        _ => format!("{value:.2}"),
    }
}

pub(super) fn spread(key: &str, spread: &Spread) -> String {
    let Spread { median, min, max, .. } = *spread;
    match min == max {
        true => value(key, median),
        false => format!("{} ({}–{})", value(key, median), value(key, min), value(key, max)),
    }
}

fn header(record: &Record) -> String {
    let mut text = unoptimised().map_or(String::new(), |text| format!("note: {text}\n"));
    let model = |key: &str| record.model.get(key).and_then(Value::as_str).unwrap_or("–");
    let job = &record.job;
    let feed = record.runs.iter().find_map(|run| run.record.as_ref()).map_or(job.feed, |record| record.feed);
    text.push_str(&format!(
        "{} ({}, {}); {} + {} a run, {} each, fed {feed}, page cache {}, seed {}\n",
        model("path"),
        model("model_type"),
        model("container"),
        job.warmup,
        plural(job.prompts, "prompt"),
        plural(job.tokens, "token"),
        job.page_cache,
        job.seed,
    ));
    text
}

pub(super) fn noise(noise: &Noise) -> String {
    let controls: Vec<String> = noise.controls.iter().map(|rate| format!("{rate:.2}")).collect();
    let apart = noise.spread.map_or("–".to_owned(), |spread| format!("{:.1} %", 100.0 * spread));
    format!(
        "noise: controls at {} tokens/s, {apart} apart; {:.1} % stated\n",
        controls.join(", "),
        100.0 * noise.stated
    )
}

/// The memory budget of the first run of an arm, term by term.
fn memory(record: &Record, arm: usize) -> String {
    let counted = |run: &&Run| run.arm == arm && run.counted().is_some();
    let Some(arm) = record.runs.iter().find(counted).and_then(Run::counted) else { return String::new() };
    let count = |value: Option<&Value>| value.and_then(Value::as_u64).map_or("–".to_owned(), size);
    let terms = arm.memory.get("terms").and_then(Value::as_object);
    let terms: Vec<String> =
        terms.into_iter().flatten().map(|(name, value)| format!("{name} {}", count(Some(value)))).collect();
    format!(
        "budget {}: {}; peak {} anonymous, {} major faults",
        count(arm.memory.get("budget")),
        terms.join(" + "),
        arm.peak_anonymous.map_or("–".to_owned(), size),
        arm.system.major_faults.map_or("–".to_owned(), |faults| faults.to_string())
    )
}

/// A comparison of two arms that were given as `a` and `b`.
pub fn ab(record: &Record, a: &str, b: &str) -> String {
    let Outcome::Ab { result } = &record.outcome else { return String::new() };
    let mut text = header(record);
    text.push_str(&format!("A: {a}\nB: {b}\n\n"));
    let n = result.figures.iter().find(|row| row.key == SPEED).map_or(0, |row| row.a.n);
    let title = if result.name.is_empty() { "figure" } else { result.name.as_str() };
    let columns = [title, "A", "B", "B / A", "noise", &format!("of {}", plural(n, "pair"))];
    let mut rows = vec![columns.map(str::to_owned).to_vec()];
    rows.extend(result.figures.iter().map(ab_row));
    text.push_str(&table(&rows, &[]));
    text.push('\n');
    text.push_str(&ids(result));
    if let Some(rate) = result.hit_rate_at_cap_1 {
        text.push_str(&format!(
            "a cache of 1 expert a layer answers {:.1} % of the look-ups\n",
            100.0 * rate
        ));
    }
    text.push_str(&noise(&record.noise));
    for (arm, name) in ["A", "B"].iter().enumerate() {
        text.push_str(&format!("memory {name}: {}\n", memory(record, arm)));
    }
    text
}

fn ab_row(row: &AbFigure) -> Vec<String> {
    let name = figure(&row.key).map_or(row.key.as_str(), |figure| figure.name);
    let ratio = row
        .ratio
        .map_or("–".to_owned(), |ratio| format!("{:.3} ({:.3}–{:.3})", ratio.median, ratio.min, ratio.max));
    let noise = row.noise.map_or("–".to_owned(), |noise| format!("{:.1} %", 100.0 * noise));
    vec![
        name.to_owned(),
        spread(&row.key, &row.a),
        spread(&row.key, &row.b),
        ratio,
        noise,
        row.verdict.words().to_owned(),
    ]
}

fn ids(result: &AbResult) -> String {
    let hash = |hash: &Option<String>| hash.clone().unwrap_or_else(|| "–".to_owned());
    let Some(numerics) = &result.numerics else {
        return format!("ids: {}, the same in all runs\n", hash(&result.ids_a));
    };
    let number = |value: Option<f64>| value.map_or("–".to_owned(), |value| format!("{value:.6}"));
    let mut text = format!(
        "ids: A {}, B {}; {:.2} % of the rows have the same most likely id\n",
        hash(&result.ids_a),
        hash(&result.ids_b),
        100.0 * numerics.agreement
    );
    if let Some(at) = &numerics.divergence {
        let margin = at.margin.map_or("–".to_owned(), |margin| format!("{margin:.4}"));
        text.push_str(&format!(
            "first divergence: prompt {}, row {}: {} and {}; A's margin over the next logit {margin}\n",
            at.prompt, at.row, at.a, at.b
        ));
    }
    text.push_str(&format!(
        "NLL of the fed ids, nats: A {}, B {}; two runs of A differ by {}\n",
        number(numerics.nll_a),
        number(numerics.nll_b),
        number(numerics.nll_noise)
    ));
    text.push_str(&format!(
        "KL of B from A, nats: mean {}, largest {}; between two runs of A {}\n",
        number(numerics.kl),
        number(numerics.kl_max),
        number(numerics.kl_noise)
    ));
    text
}

/// Columns of a sweep's table, by key.
const COLUMNS: [(&str, &str); 8] = [
    (SPEED, "tokens/s"),
    ("hit_rate", "hit rate"),
    ("distinct_per_token", "distinct a token"),
    ("bytes_per_token", "read a token"),
    ("drive_bytes_per_token", "from the drive"),
    ("felt_wait_ms_per_token", "felt wait, ms"),
    ("reads_per_token", "calls a token"),
    ("major_faults", "major faults"),
];

/// A sweep.
pub fn cap(record: &Record) -> String {
    let Outcome::Cap { rows, claims } = &record.outcome else { return String::new() };
    let mut text = header(record);
    let n = rows.iter().find_map(|row| row.figures.get(SPEED)).map_or(0, |spread| spread.n);
    text.push_str(&format!("median (minimum–maximum) of {}\n\n", plural(n, "prompt")));
    let mut header = vec!["cap".to_owned()];
    header.extend(COLUMNS.iter().map(|(_, name)| (*name).to_owned()));
    header.extend(["peak anonymous".to_owned(), "ids".to_owned()]);
    let mut lines = vec![header];
    lines.extend(rows.iter().map(cap_row));
    text.push_str(&table(&lines, &[true]));
    text.push('\n');
    text.push_str(&noise(&record.noise));
    text.extend(claims.iter().map(claim_words));
    for (arm, row) in rows.iter().enumerate().filter(|(_, row)| row.excluded.is_none()) {
        let memory = memory(record, arm);
        if !memory.is_empty() {
            text.push_str(&format!("memory at cap {}: {memory}\n", row.cap));
        }
    }
    text
}

fn cap_row(row: &CapRow) -> Vec<String> {
    let cell = |key: &str| row.figures.get(key).map_or("–".to_owned(), |found| spread(key, found));
    let mut cells = vec![row.cap.to_string()];
    cells.extend(COLUMNS.iter().map(|(key, _)| cell(key)));
    cells.push(row.peak_anonymous.map_or("–".to_owned(), size));
    cells.push(row.ids.clone().unwrap_or_else(|| "–".to_owned()));
    cells
}

fn claim_words(claim: &Claim) -> String {
    let answer = match claim.holds {
        Some(true) => "yes",
        Some(false) => "NO",
        None => "–",
    };
    format!("{answer}: {} ({})\n", claim.claim, claim.seen)
}

/// A drive, and decoding beside it.
pub fn io(record: &Record) -> String {
    let Outcome::Io { rows, streaming, .. } = &record.outcome else { return String::new() };
    let mut text = unoptimised().map_or(String::new(), |text| format!("note: {text}\n"));
    let count = |key: &str| record.model.get(key).and_then(Value::as_u64).unwrap_or(0);
    text.push_str(&format!(
        "{}: random reads of {} of at most {} in {}\n\n",
        record.model.get("path").and_then(Value::as_str).unwrap_or("–"),
        plural(count("runs"), "run"),
        size(count("run_bytes")),
        plural(count("files"), "file")
    ));
    let header = ["way", "10⁹ bytes/s", "half took, ms", "99 % took, ms", ""];
    let mut lines = vec![header.map(str::to_owned).to_vec()];
    lines.extend(rows.iter().map(io_row));
    text.push_str(&table(&lines, &[]));
    let controls: Vec<String> = record.noise.controls.iter().map(|rate| format!("{rate:.3}")).collect();
    let apart = record.noise.spread.map_or("–".to_owned(), |spread| format!("{:.1} %", 100.0 * spread));
    text.push_str(&format!("\nnoise: controls at {} · 10⁹ bytes/s, {apart} apart\n", controls.join(", ")));
    if let Some(streaming) = streaming {
        text.push_str(&streaming_words(streaming));
        text.push_str(&format!("memory: {}\n", memory(record, 0)));
    }
    text
}

fn spread_or_dash(spread: Option<&Spread>) -> String {
    spread.map_or("–".to_owned(), |spread| {
        format!("{:.3} ({:.3}–{:.3}, n {})", spread.median, spread.min, spread.max, spread.n)
    })
}

fn io_row(row: &IoRow) -> Vec<String> {
    vec![
        row.way.clone(),
        spread_or_dash(row.gb_per_second.as_ref()),
        spread_or_dash(row.p50_ms.as_ref()),
        spread_or_dash(row.p99_ms.as_ref()),
        row.excluded.clone().unwrap_or_default(),
    ]
}

fn streaming_words(streaming: &Streaming) -> String {
    let row = |name: &str, spread: Option<&Spread>| vec![name.to_owned(), spread_or_dash(spread)];
    let rows = [
        row("decode, tokens/s", streaming.tokens_per_second.as_ref()),
        row("decode reads, 10⁹ bytes/s", streaming.decode_gb_per_second.as_ref()),
        row("raw reads beside it, 10⁹ bytes/s", streaming.raw_gb_per_second.as_ref()),
        row("decode of raw", streaming.of_raw.as_ref()),
        row("decode of raw, while it reads", streaming.busy_of_raw.as_ref()),
        row("mean queue depth", streaming.mean_depth.as_ref()),
    ];
    format!("\ndecode beside raw reads ({})\n{}", streaming.way, table(&rows, &[]))
}
