//! The `metaltail` program.
//!
//! It parses the command line, resolves the settings once, and hands both to a command; whatever
//! goes wrong comes back here as one [`exit::Failure`].
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

mod accelerator;
mod answer;
mod args;
mod commands;
mod exit;
mod input;
mod interrupt;
mod opened;
mod output;
mod pins;
mod progress;
mod report;
mod runtime;
mod settings;
mod token_cost;
mod whole_file;
mod words;

use args::{Bench, Command, TraceCommand};
use exit::{Failure, Kind};
use settings::{ConfigFile, Environment, Settings, SettingsError};

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let environment = Environment::of_process();
    let mut json =
        exit::json_wanted(words.iter().skip(1).map(OsString::as_os_str), environment.get("METALTAIL_JSON"));
    match interrupt::install(json).and_then(|()| start(words, &environment, &mut json)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.print(json);
            ExitCode::from(failure.kind.code())
        }
    }
}

/// Parses, resolves and runs; `json` becomes what the settings say as soon as they are known.
fn start(words: Vec<OsString>, environment: &Environment, json: &mut bool) -> Result<(), Failure> {
    let (command, matches) = match args::parse(words) {
        Ok(parsed) => parsed,
        Err(error) => return exit::clap_outcome(&error),
    };
    let usage = |error: SettingsError| Failure::from_error(Kind::Usage, &error);
    // These two are about the program alone: a mistake in the settings should not hide the manual.
    match &command {
        Command::Completions(args) => return commands::completions::execute(args),
        Command::Man => return commands::man::execute(),
        _ => {}
    }
    let file = ConfigFile::find(environment, Path::new("")).map_err(usage)?;
    let settings = Settings::resolve(&matches, environment, file.as_ref()).map_err(usage)?;
    *json = settings.json();
    interrupt::tell_as_json(*json);
    dispatch(&command, &settings)
}

/// Runs a command that has settings.
fn dispatch(command: &Command, settings: &Settings) -> Result<(), Failure> {
    match command {
        Command::Completions(args) => commands::completions::execute(args),
        Command::Man => commands::man::execute(),
        Command::Run(args) => commands::run::execute(args, settings),
        Command::Chat(args) => commands::chat::execute(args, settings),
        Command::Score(args) => commands::score::execute(args, settings),
        Command::Plan(args) => commands::plan::execute(args, settings),
        Command::Convert(args) => commands::convert::execute(args, settings),
        Command::Synth(args) => commands::synth::execute(args, settings),
        Command::Inspect(args) => commands::inspect::execute(args, settings),
        Command::Bench(args) => match &args.bench {
            Bench::Ab(args) => commands::bench::ab::execute(args, settings),
            Bench::Cap(args) => commands::bench::cap::execute(args, settings),
            Bench::Io(args) => commands::bench::io::execute(args, settings),
            Bench::Kernels(args) => commands::bench::kernels::execute(args, settings),
            Bench::Peers(args) => commands::bench::peers::execute(args, settings),
            Bench::Residency(args) => commands::bench::residency::execute(args, settings),
            Bench::Plot(args) => commands::bench::plot(args, settings),
            Bench::Arm(_) => commands::bench::arm::execute(settings),
        },
        Command::Doctor(_) => commands::doctor::execute(settings),
        Command::Usage(args) => commands::usage::execute(&args.usage, settings),
        Command::Trace(args) => match &args.trace {
            TraceCommand::Record(args) => commands::trace::record(args, settings),
            TraceCommand::Replay(args) => commands::trace::replay(args, settings),
            TraceCommand::Synth(args) => commands::trace::synth(args, settings),
        },
    }
}
