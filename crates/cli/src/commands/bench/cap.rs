//! `metaltail bench cap`: a model at several sizes of the expert cache.

use metaltail_bench::Record;
use metaltail_bench::cap::{CapOptions, sweep};
use metaltail_bench::harness::{Arm, sweep_order};
use metaltail_bench::record::Surroundings;

use super::process::Processes;
use super::{check_plot, finish, given, surroundings, tables};
use crate::args::BenchCapArgs;
use crate::exit::{Failure, Kind};
use crate::progress::Bar;
use crate::settings::Settings;

/// Sweeps.
///
/// # Errors
/// Settings without sense, and all that refuses the sweep.
pub fn execute(args: &BenchCapArgs, settings: &Settings) -> Result<(), Failure> {
    check_plot(args.protocol.plot.as_ref())?;
    let job = given::job(&args.protocol, settings)?;
    if settings.flags().contains_key("cap") {
        return Err(Failure::new(Kind::Usage, "a sweep has many caps: use --caps instead of --cap"));
    }
    let mut caps = args.caps.clone();
    caps.sort_unstable();
    caps.dedup();
    let arm = |cap: &usize| given::arm(&format!("cap {cap}"), &format!("--cap={cap}"), settings);
    let arms = caps.iter().map(arm).collect::<Result<Vec<Arm>, Failure>>()?;
    given::check_models(&arms, settings)?;
    let options = CapOptions { caps, rounds: args.rounds, noise: args.protocol.noise };
    let around = Surroundings { program: surroundings::program(), machine: surroundings::machine() };
    let mut processes = Processes::new(&job)?;
    let bar = Bar::items("runs", sweep_order(arms.len(), args.rounds).len() as u64, settings.json());
    let swept = sweep(&arms, &job, &options, &mut processes, &mut |_| bar.advance(1));
    bar.finish();
    let record = Record::of_sweep(swept, &arms, &job, around);
    finish(&record, "cap", tables::cap, &args.protocol, settings)
}
