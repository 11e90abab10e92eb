//! `metaltail bench`: the harness. What it measures and why so: `docs/design/bench.md`.

pub mod ab;
pub mod arm;
pub mod cap;
mod given;
pub mod io;
pub mod kernels;
pub mod peers;
mod process;
mod record_file;
pub mod residency;
mod surroundings;
mod tables;

use std::fs;
use std::path::{Path, PathBuf};

use metaltail_bench::record::Outcome;
use metaltail_bench::{Record, plot};
use serde_json::json;

use crate::args::{BenchPlotArgs, Protocol};
use crate::exit::{Failure, Kind};
use crate::input;
use crate::output::{self, notice};
use crate::settings::Settings;

/// The largest record that is read, in bytes.
const RECORD_CAP: u64 = 1 << 30;

/// Draws the plot of a record.
///
/// # Errors
/// A file that is no record, or a plot that cannot be written.
pub fn plot(args: &BenchPlotArgs, settings: &Settings) -> Result<(), Failure> {
    check_plot(Some(&args.plot))?;
    let wrong = |reason: String| {
        let text = format!("{} is not a record of bench ab, cap or io: {reason}", args.record.display());
        Failure::new(Kind::Usage, text)
    };
    let bytes = input::regular(&args.record)
        .and_then(|file| input::read_capped(file, RECORD_CAP))
        .map_err(|error| wrong(error.to_string()))?;
    let record: Record = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
    draw(&record, &args.plot)?;
    match settings.json() {
        true => output::print(&format!("{}\n", json!({"plot": args.plot.to_string_lossy()}))),
        false => output::print(&format!("plot: {}\n", args.plot.display())),
    }
}

/// Refuses a plot that could not be drawn after everything was measured.
fn check_plot(path: Option<&PathBuf>) -> Result<(), Failure> {
    match path {
        Some(path) if path.extension().is_none_or(|extension| extension != "svg") => Err(Failure::new(
            Kind::Usage,
            format!("{}: plots are SVG files: give a name that ends in .svg", path.display()),
        )),
        _ => Ok(()),
    }
}

fn draw(record: &Record, path: &Path) -> Result<(), Failure> {
    let svg = plot::svg(record).map_err(|error| Failure::from_error(Kind::Failed, &error))?;
    fs::write(path, svg).map_err(|error| unwritten(path, &error))
}

fn unwritten(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(Kind::Failed, format!("cannot write {}: {error}", path.display()))
}

/// Writes record and plot as asked, prints the table or the record, and ends as the record says: a
/// refused one is a failure that has been told.
fn finish(
    record: &Record,
    kind: &str,
    table: impl Fn(&Record) -> String,
    protocol: &Protocol,
    settings: &Settings,
) -> Result<(), Failure> {
    let object = json!(record);
    let path =
        record_file::write(&format!("{object:#}\n"), protocol.record.as_deref(), kind, settings.json())?;
    if let Some(path) = &protocol.plot {
        match draw(record, path) {
            // Why it was refused is what matters, and comes last.
            Err(failure) if record.refused.is_some() => notice(&format!("note: {}", failure.message)),
            drawn => drawn?,
        }
    }
    if settings.json() {
        output::print(&format!("{object}\n"))?;
    } else {
        let mut text = if came_to_nothing(record) { String::new() } else { table(record) };
        if let Some(path) = &path {
            text.push_str(&format!("record: {}\n", path.display()));
        }
        output::print(&text)?;
    }
    match &record.refused {
        None => Ok(()),
        Some(_) if settings.json() => Err(Failure::silent(Kind::Failed)),
        Some(reason) => Err(Failure::new(Kind::Failed, format!("nothing follows from this run: {reason}"))),
    }
}

/// Whether no run of any arm counts, so that a table would be empty. A drive has rows without any.
fn came_to_nothing(record: &Record) -> bool {
    !matches!(record.outcome, Outcome::Io { .. }) && record.runs.iter().all(|run| run.counted().is_none())
}
