//! `metaltail bench io`: the drive as the engine uses it.

use metaltail_bench::Record;
use metaltail_bench::harness::{Arm, Runner};
use metaltail_bench::io::{IoOptions, ModelDrive, io};
use metaltail_bench::job::Job;
use metaltail_bench::record::Surroundings;
use metaltail_model::expert_places;
use metaltail_store::probe::{Limits, Target, Way};
use serde_json::{Value, json};

use super::process::Processes;
use super::{check_plot, finish, given, surroundings, tables};
use crate::args::BenchIoArgs;
use crate::exit::{Failure, Kind};
use crate::opened::{Opened, chosen};
use crate::progress::Bar;
use crate::settings::Settings;

/// Measures.
///
/// # Errors
/// A model that is refused, settings without sense, a drive that cannot be read.
pub fn execute(args: &BenchIoArgs, settings: &Settings) -> Result<(), Failure> {
    check_plot(args.protocol.plot.as_ref())?;
    let job = given::job(&args.protocol, settings)?;
    let arm = given::arm("decode", "", settings)?;
    let opened = Opened::at(&chosen(None, settings)?)?;
    let mut drive = ModelDrive {
        target: target(&opened, settings)?,
        limits: Limits { time: args.seconds, bytes: u64::MAX, seed: job.seed },
    };
    let options = IoOptions { ways: ways(&args.depths), rounds: args.rounds, noise: args.protocol.noise };
    let around = Surroundings { program: surroundings::program(), machine: surroundings::machine() };
    let mut processes = Processes::new(&job)?;
    let decode = args.decode.then_some((&arm, &job, &mut processes as &mut dyn Runner));
    let measured = measure(&options, &mut drive, decode, settings.json());
    let record = Record::of_io(measured, arm.clone(), &job, model(&opened, &drive.target), around);
    finish(&record, "io", tables::io, &args.protocol, settings)
}

fn measure(
    options: &IoOptions,
    drive: &mut ModelDrive,
    decode: Option<(&Arm, &Job, &mut dyn Runner)>,
    json: bool,
) -> metaltail_bench::io::Io {
    let beside = if decode.is_some() { options.rounds + 1 } else { 0 };
    let bar = Bar::items("reads", (options.ways.len() * options.rounds + beside + 3) as u64, json);
    io(options, drive, decode, &mut || bar.advance(1))
}

/// Every way at every depth, the deepest direct one by threads last.
fn ways(depths: &[usize]) -> Vec<Way> {
    let mut depths = depths.to_vec();
    depths.sort_unstable();
    depths.dedup();
    let kinds = [(false, true), (false, false), (true, true), (true, false)];
    let way = |(direct, uring)| depths.iter().map(move |&depth| Way { direct, uring, depth });
    kinds.into_iter().flat_map(way).collect()
}

fn target(opened: &Opened, settings: &Settings) -> Result<Target, Failure> {
    let places = expert_places(&opened.checkpoint, &opened.inventory, false)
        .map_err(|error| Failure::from_error(Kind::Model, &error))?;
    let target = Target::experts(opened.checkpoint.files(), &places);
    if target.runs.is_empty() {
        return Err(Failure::new(Kind::Usage, "the model has no routed experts: there is nothing to read"));
    }
    Ok(match settings.chunk_size {
        Some(bytes) => target.in_pieces(bytes),
        None => target,
    })
}

fn model(opened: &Opened, target: &Target) -> Value {
    let checkpoint = &opened.checkpoint;
    json!({
        "path": checkpoint.dir().to_string_lossy(),
        "model_type": checkpoint.model_type(),
        "container": checkpoint.kind().to_string(),
        "parameters": checkpoint.manifest().map(|manifest| &manifest.parameters),
        "files": target.files.len(),
        "runs": target.runs.len(),
        "run_bytes": target.runs.iter().map(|run| run.len).max(),
        "storage": surroundings::storage(checkpoint.dir()),
    })
}
