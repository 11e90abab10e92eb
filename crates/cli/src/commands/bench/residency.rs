//! `metaltail bench residency`: published runs, replayed.

use std::fs;
use std::path::Path;

use metaltail_bench::residency::{self, Arm, Check, NOTE, Order, Question, ReplayedRow, ResidencyReport};
use metaltail_device::residency::ResidencyError;
use metaltail_device::sim::{Profile, fit, rows};
use serde_json::json;

use super::unwritten;
use crate::args::BenchResidencyArgs;
use crate::exit::{Failure, Kind};
use crate::input;
use crate::output;
use crate::settings::Settings;
use crate::words::table;

/// The largest profile that is read, in bytes.
const PROFILE_CAP: u64 = 1 << 20;

/// Replays everything on a machine, which is fitted before where that is asked for.
///
/// # Errors
/// A file that is no profile, a machine that takes less memory than was published, a file that cannot be written.
pub fn execute(args: &BenchResidencyArgs, settings: &Settings) -> Result<(), Failure> {
    let mut profile = match &args.profile {
        Some(path) => read(path)?,
        None => Profile::m5max(),
    };
    if let Some(path) = &args.fit {
        let fitted = fit::fit(&profile, &rows::published()).map_err(|error| refused(&profile, &error))?;
        let text = serde_json::to_string_pretty(&fitted);
        let text = text.map_err(|error| Failure::from_error(Kind::Failed, &error))?;
        fs::write(path, format!("{text}\n")).map_err(|error| unwritten(path, &error))?;
        profile = fitted;
    }
    let report = residency::measure(&profile).map_err(|error| refused(&profile, &error))?;
    match settings.json() {
        true => output::print(&format!("{}\n", json!({"report": report, "profile": profile})))?,
        false => output::print(&words(&report))?,
    }
    match &report.check {
        Some(check) if !check.holds && settings.json() => Err(Failure::silent(Kind::Failed)),
        Some(check) if !check.holds => {
            let text = format!(
                "nothing follows from this machine: {} does not explain what was published",
                report.profile
            );
            Err(Failure::new(Kind::Failed, text))
        }
        _ => Ok(()),
    }
}

fn refused(profile: &Profile, error: &ResidencyError) -> Failure {
    Failure::new(Kind::Usage, format!("the machine {} refuses what was published: {error}", profile.name))
}

fn read(path: &Path) -> Result<Profile, Failure> {
    let wrong = |reason: String| Failure::new(Kind::Usage, format!("{}: {reason}", path.display()));
    let bytes = input::regular(path)
        .and_then(|file| input::read_capped(file, PROFILE_CAP))
        .map_err(|error| wrong(error.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|_| wrong("it is not UTF-8".into()))?;
    Profile::parse(&text).map_err(|error| wrong(error.to_string()))
}

fn words(report: &ResidencyReport) -> String {
    let mut text = format!("{NOTE}\nmachine {}: {}\n\n", report.profile, report.source);
    text.push_str(&published(&report.rows));
    match &report.check {
        Some(check) => text.push_str(&judged(check)),
        None => text.push_str("published, by other machines / simulated\n"),
    }
    for row in report.rows.iter().filter(|row| row.refused.is_some()) {
        let reason = row.refused.as_deref().unwrap_or_default();
        text.push_str(&format!("not replayed: {} {}: {reason}\n", row.name, row.declared));
    }
    text.push_str("\nnobody published these; all of it is simulated:\n");
    for question in &report.questions {
        text.push_str(&format!("\n{}\n{}", question.question, answers(question)));
        text.push_str(&format!("not known: {}\n", question.caution));
    }
    text
}

fn judged(check: &Check) -> String {
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let of = |order: &Order| format!("{} of {}", order.same, order.comparisons);
    let mut text = format!(
        "published / simulated; error is that of tokens/s, left out that of a fit that has not seen the row nor another of the same run\n\
         comparisons within a session above 5 % in the published order: {} of tokens/s, {} of stalls\n\
         largest error {}, left out {}; {} numbers fitted to {} rows\n",
        of(&check.order),
        of(&check.order_of_stalls),
        percent(check.worst),
        percent(check.worst_left_out),
        check.parameters.len(),
        check.rows,
    );
    for line in &check.order.different {
        text.push_str(&format!("other order of tokens/s: {line}\n"));
    }
    for line in &check.order_of_stalls.different {
        text.push_str(&format!("other order of stalls: {line}\n"));
    }
    text
}

fn published(rows: &[ReplayedRow]) -> String {
    let header =
        ["run", "declared", "tokens/s", "error", "left out", "stall, s", "disk wait, s", "commits, s"];
    let mut cells = vec![header.map(str::to_owned).to_vec()];
    for row in rows {
        let predicted = row.predicted.as_ref();
        let both = |published: Option<f64>, predicted: Option<f64>, digits: usize| {
            let word =
                |value: Option<f64>| value.map_or("–".to_owned(), |value| format!("{value:.digits$}"));
            format!("{} / {}", word(published), word(predicted))
        };
        let share =
            |share: Option<f64>| share.map_or("–".to_owned(), |share| format!("{:+.1} %", 100.0 * share));
        let of = row.published;
        cells.push(vec![
            row.name.clone(),
            row.declared.to_owned(),
            both(of.tokens_per_second, predicted.and_then(|p| p.tokens_per_second), 2),
            share(row.error),
            share(row.error_left_out),
            both(of.stall_seconds, predicted.and_then(|p| p.stall_seconds), 1),
            both(of.disk_wait_seconds, predicted.and_then(|p| p.disk_wait_seconds), 1),
            both(of.flush_seconds, predicted.and_then(|p| p.flush_seconds), 2),
        ]);
    }
    table(&cells, &[false, false, true, true, true, true, true, true])
}

fn answers(question: &Question) -> String {
    let header = [
        "",
        "tokens/s",
        "stall, s",
        "commits, s",
        "removals, s",
        "allocations",
        "sets",
        "commits",
        "declared",
    ];
    let mut cells = vec![header.map(str::to_owned).to_vec()];
    cells.extend(question.arms.iter().map(answer));
    table(&cells, &[false, true, true, true, true, true, true, true, true])
}

fn answer(arm: &Arm) -> Vec<String> {
    vec![
        arm.name.clone(),
        format!("{:.2}", arm.tokens_per_second),
        format!("{:.1}", arm.stall_seconds),
        format!("{:.2}", arm.flush_seconds),
        format!("{:.2}", arm.unregister_seconds),
        arm.allocations.to_string(),
        arm.sets.to_string(),
        arm.commits.to_string(),
        format!("{:.0}", arm.declared_per_submit),
    ]
}
