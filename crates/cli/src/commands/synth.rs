//! `metaltail synth`: a seeded synthetic model.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use metaltail_container::convert::WriteError;
use metaltail_container::synth::{self, SynthFormat, SynthOptions, SynthReport};
use metaltail_model::Plan;
use serde_json::{Value, json};

use crate::args::SynthArgs;
use crate::exit::{Failure, Kind};
use crate::interrupt;
use crate::opened::write_failure;
use crate::output;
use crate::progress::Bar;
use crate::settings::Settings;
use crate::words::{count, exact_size, shell_word};

/// Writes the model.
///
/// # Errors
/// Sizes out of range, a target that is not empty, a full drive, Ctrl-C.
pub fn execute(args: &SynthArgs, settings: &Settings) -> Result<(), Failure> {
    let refuse = |error: WriteError| write_failure(&error);
    let config = synth::config(args.like, args.layers, args.experts).map_err(refuse)?;
    let plan = Plan::from_config(&config).map_err(|error| Failure::from_error(Kind::Usage, &error))?;
    let mut options = SynthOptions::new(args.like, args.format);
    options.seed = args.seed;
    check_types(args)?;
    options.blocks = args.blocks.unwrap_or(options.blocks);
    options.experts = args.expert_format.unwrap_or(options.experts);

    let interrupted = interrupt::listen();
    let bar = Bar::bytes("synth", 0, settings.json());
    let mut progress = |progress: metaltail_container::convert::Progress<'_>| {
        bar.say(progress.file);
        bar.set_length(progress.total);
        bar.set_position(progress.written);
        match interrupted.is_cancelled() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    let inventory = plan.inventory();
    let report = synth::synth(&args.target, &config, &inventory, &options, &mut progress)
        .map_err(|error| failure(&error, args))?;
    bar.finish();
    let (files, bytes) = match args.format {
        SynthFormat::Gguf => (report.files, report.bytes),
        _ => contents(&args.target)?,
    };
    if settings.json() {
        let object = json!({
            "output": written_to(args).to_string_lossy(),
            "like": args.like.to_string(),
            "format": args.format.to_string(),
            "seed": args.seed,
            "files": files,
            "bytes": bytes,
            "weights": report,
            "parameters": parameters(&options),
            "stored": (args.format == SynthFormat::Hf).then_some("bf16"),
            "model_type": plan.family,
            "layers": plan.layers.len(),
        });
        return output::print(&format!("{object}\n"));
    }
    output::print(&words(args, &options, files, bytes, &report))
}

/// Each form has its own kind of formats.
fn check_types(args: &SynthArgs) -> Result<(), Failure> {
    let wrong = match args.format {
        SynthFormat::Gguf if args.expert_format.is_some() => "--expert-format: the form gguf takes --type",
        SynthFormat::Gguf => return Ok(()),
        _ if args.blocks.is_some() => {
            "--type: only the form gguf has types; other forms take --expert-format"
        }
        _ => return Ok(()),
    };
    Err(Failure::new(Kind::Usage, wrong))
}

/// What was written: the directory, or the file of the GGUF form.
fn written_to(args: &SynthArgs) -> PathBuf {
    match args.format {
        SynthFormat::Gguf => synth::gguf_file(&args.target),
        _ => args.target.clone(),
    }
}

fn parameters(options: &SynthOptions) -> Value {
    if options.format == SynthFormat::Gguf {
        let kind = options.blocks.name();
        return json!({"experts": kind, "rest": kind, "draft_experts": null});
    }
    json!({
        "experts": options.experts.to_string(),
        "rest": options.rest.to_string(),
        "draft_experts": options.draft_experts.to_string(),
    })
}

fn words(args: &SynthArgs, options: &SynthOptions, files: usize, bytes: u64, report: &SynthReport) -> String {
    let target = shell_word(&written_to(args));
    if args.format == SynthFormat::Gguf {
        return format!(
            "{target}: synthetic {} (gguf, {}, seed {}), {}\n\
             run it: metaltail run --model {target} --max-tokens 16 \"Hello\"\n",
            args.like,
            options.blocks,
            args.seed,
            exact_size(bytes),
        );
    }
    format!(
        "{target}: synthetic {} ({}, experts {}, rest {}{}, seed {}), {} ({} of weights), {}\n\
         run it: metaltail run --model {target} --max-tokens 16 \"Hello\"\n",
        args.like,
        args.format,
        options.experts,
        options.rest,
        if args.format == SynthFormat::Hf { ", their values stored as bf16" } else { "" },
        args.seed,
        count(files, "file"),
        report.files,
        exact_size(bytes),
    )
}

/// A stopped synthetic model cannot be continued, unlike a conversion.
fn failure(error: &WriteError, args: &SynthArgs) -> Failure {
    let mut failure = write_failure(error);
    // Of the GGUF form nothing is left.
    if matches!(error, WriteError::Interrupted { .. }) && args.format != SynthFormat::Gguf {
        failure.message.push_str(&format!(
            ": {} holds an unfinished model; remove it before another run",
            args.target.display()
        ));
    }
    failure
}

/// Number and bytes of the files in a directory.
fn contents(dir: &Path) -> Result<(usize, u64), Failure> {
    let failed = |error: std::io::Error| {
        let mut failure = Failure::new(Kind::Failed, format!("cannot list {}", dir.display()));
        failure.causes.push(error.to_string());
        failure
    };
    let (mut files, mut bytes) = (0, 0u64);
    for entry in fs::read_dir(dir).map_err(failed)? {
        let meta = entry.and_then(|entry| entry.metadata()).map_err(failed)?;
        files += 1;
        bytes = bytes.saturating_add(meta.len());
    }
    Ok((files, bytes))
}
