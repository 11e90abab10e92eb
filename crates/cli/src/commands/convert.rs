//! `metaltail convert`: a checkpoint becomes a slab container.
//!
//! What will be written is printed to the byte before anything is, so that a conversion that helps
//! nobody is noticed in its first second and not hours later.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use metaltail_container::Draft;
use metaltail_container::convert::{
    ConvertOptions, ConvertPlan, ConvertReport, WriteError, convert, free_bytes,
};
use metaltail_model::gguf::adopt_text;
use serde_json::{Value, json};

use crate::args::ConvertArgs;
use crate::exit::{Failure, Kind};
use crate::interrupt;
use crate::opened::{Opened, write_failure};
use crate::output::{self, notice};
use crate::progress::Bar;
use crate::report::bytes as size;
use crate::settings::Settings;
use crate::words::{count, exact_size, shell_word};

/// What was found before the first byte is written.
struct Prepared {
    opened: Opened,
    options: ConvertOptions,
    plan: ConvertPlan,
    draft: Draft,
    source_bytes: u64,
    free: Option<u64>,
}

/// Converts.
///
/// # Errors
/// A source that is refused, a destination that holds something else, a full drive, Ctrl-C.
pub fn execute(args: &ConvertArgs, settings: &Settings) -> Result<(), Failure> {
    let prepared = prepare(args)?;
    notice(&prepared.to_words(&args.target));
    let report = write(args, &prepared, settings.json())?;
    if settings.json() {
        return output::print(&format!("{}\n", prepared.to_json(args, &report)));
    }
    let target = shell_word(&args.target);
    let mut text = match &report {
        ConvertReport { already_complete: true, .. } => {
            format!("{target} was complete before: nothing was done\n")
        }
        ConvertReport { skipped: 0, .. } => String::new(),
        ConvertReport { skipped, .. } => {
            format!("{} of an earlier run taken over\n", count(*skipped, "weight file"))
        }
    };
    text.push_str(&format!(
        "{target}: {}, {}\nrun it: metaltail run --model {target} {}\n",
        count(report.files, "file"),
        exact_size(report.bytes),
        // Without a tokenizer only ids can be continued.
        if args.target.join("tokenizer.json").exists() { "\"Hello\"" } else { "--ids FILE" }
    ));
    output::print(&text)
}

fn prepare(args: &ConvertArgs) -> Result<Prepared, Failure> {
    let mut opened = Opened::at(&args.source)?;
    // A GGUF file was quantised by whoever made it; another format would round twice.
    let default = match opened.checkpoint.kind() {
        metaltail_container::Kind::Gguf => ConvertOptions::keep(),
        _ => ConvertOptions::default(),
    };
    if let Err(reason) = adopt_text(&mut opened.checkpoint) {
        notice(&format!("note: {} is written without a tokenizer: {reason}", shell_word(&args.target)));
    }
    let options = ConvertOptions {
        experts: args.experts.unwrap_or(default.experts),
        rest: args.rest.unwrap_or(default.rest),
        draft_experts: args.draft_format.unwrap_or(default.draft_experts),
    };
    let refuse = |error: WriteError| write_failure(&error);
    let plan = ConvertPlan::new(&opened.checkpoint, &opened.inventory, &options).map_err(refuse)?;
    let draft = opened.checkpoint.draft(&opened.inventory);
    let mut source_bytes = 0u64;
    for path in opened.checkpoint.files() {
        let meta = fs::metadata(path).map_err(|error| {
            let mut failure = Failure::from_error(Kind::Failed, &error);
            failure.message = format!("cannot look at {}: {error}", path.display());
            failure
        })?;
        source_bytes = source_bytes.saturating_add(meta.len());
    }
    let free = free_bytes(&args.target).map_err(refuse)?;
    Ok(Prepared { opened, options, plan, draft, source_bytes, free })
}

fn write(args: &ConvertArgs, prepared: &Prepared, json: bool) -> Result<ConvertReport, Failure> {
    let interrupted = interrupt::listen();
    let bar = Bar::bytes("convert", prepared.plan.total_bytes(), json);
    let opened = &prepared.opened;
    let report =
        convert(&opened.checkpoint, &opened.inventory, &args.target, &prepared.options, &mut |progress| {
            bar.say(progress.file);
            bar.set_position(progress.written);
            match interrupted.is_cancelled() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
    report.map_err(|error| {
        let mut failure = write_failure(&error);
        if matches!(error, WriteError::Interrupted { .. }) {
            failure.message.push_str(": the same command goes on from the last whole file");
        }
        failure
    })
}

impl Prepared {
    fn to_words(&self, target: &Path) -> String {
        let checkpoint = &self.opened.checkpoint;
        let parameters = self.plan.parameters();
        let bytes = self.plan.total_bytes();
        let mut text = format!(
            "source: {} ({}, {}, {} in {})\n",
            shell_word(checkpoint.dir()),
            self.opened.plan.family,
            checkpoint.kind(),
            size(self.source_bytes),
            count(checkpoint.files().len(), "file"),
        );
        text.push_str(&format!(
            "output: {} (slab; experts {}, rest {}): {} in {}; {} free\n",
            shell_word(target),
            parameters.experts,
            parameters.rest,
            exact_size(bytes),
            count(self.plan.files().count(), "file"),
            self.free.map_or("unknown".to_owned(), size),
        ));
        text.push_str(&match &self.draft {
            Draft::None => "draft layer: the model has none".to_owned(),
            Draft::Absent => "draft layer: left out, the source has none of its tensors".to_owned(),
            Draft::Complete => {
                format!("draft layer: taken over, its experts in {}", parameters.draft_experts)
            }
            Draft::Partial { present, wanted, .. } => {
                format!("draft layer: left out, the source has {present} of its {wanted} tensors")
            }
        });
        if bytes > self.source_bytes {
            text.push_str(
                "\nnote: the output is larger than the source; another --experts or --rest format, \
                 or keep, makes it smaller",
            );
        }
        text
    }

    fn to_json(&self, args: &ConvertArgs, report: &ConvertReport) -> Value {
        let checkpoint = &self.opened.checkpoint;
        let files = self.plan.files().map(|(name, bytes)| json!({"name": name, "bytes": bytes}));
        json!({
            "output": args.target.to_string_lossy(),
            "files": report.files,
            "bytes": report.bytes,
            "skipped": report.skipped,
            "already_complete": report.already_complete,
            "parameters": self.plan.parameters(),
            "plan": {
                "source": {
                    "dir": checkpoint.dir().to_string_lossy(),
                    "kind": checkpoint.kind(),
                    "model_type": self.opened.plan.family,
                    "files": checkpoint.files().len(),
                    "bytes": self.source_bytes,
                },
                "files": files.collect::<Vec<_>>(),
                "bytes": self.plan.total_bytes(),
                "free_bytes": self.free,
                "draft": self.draft,
            },
        })
    }
}
