//! `metaltail bench`: the harness. What it measures and why so: `docs/design/bench.md`.

pub mod ab;
pub mod arm;
pub mod cap;
mod given;
pub mod io;
pub mod kernels;
mod process;
pub mod residency;
mod surroundings;
mod tables;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use metaltail_bench::{Record, plot};
use serde_json::json;

use crate::args::{BenchPlotArgs, Protocol};
use crate::exit::{Failure, Kind};
use crate::input;
use crate::output;
use crate::settings::Settings;

/// Where records go when nothing else is said.
const RECORDS: &str = "bench-records";
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
    let path = record_path(protocol, kind, settings.json());
    if let Some(path) = &path {
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            fs::create_dir_all(dir).map_err(|error| unwritten(dir, &error))?;
        }
        fs::write(path, format!("{object:#}\n")).map_err(|error| unwritten(path, &error))?;
    }
    if let Some(path) = &protocol.plot {
        draw(record, path)?;
    }
    if settings.json() {
        output::print(&format!("{object}\n"))?;
    } else {
        let mut text = table(record);
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

fn record_path(protocol: &Protocol, kind: &str, json: bool) -> Option<PathBuf> {
    match &protocol.record {
        Some(path) if path.as_os_str() == "off" => None,
        Some(path) => Some(path.clone()),
        None if json => None,
        None => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            Some(Path::new(RECORDS).join(format!("{kind}-{}.json", now.as_secs())))
        }
    }
}
