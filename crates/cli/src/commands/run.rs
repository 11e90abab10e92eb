//! `metaltail run`: one prompt, one answer, figures after it.

use std::io::{IsTerminal, stdin};

use metaltail_engine::{Finish, GenerateOptions, Session};
use metaltail_model::text::message;
use serde::Deserialize;
use serde_json::{Map, json};

use crate::answer::Answer;
use crate::args::RunArgs;
use crate::exit::{Failure, Kind};
use crate::input::{read_ids, read_prompt};
use crate::interrupt;
use crate::output::{Lost, notice, print, show};
use crate::report::{Report, drive_bytes};
use crate::runtime::{Runtime, failure, text_failure};
use crate::settings::Settings;

/// Form of an `--ids` file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IdsFile {
    /// The ids.
    pub ids: Vec<u32>,
}

/// What is to be continued.
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// Runs the command.
///
/// # Errors
/// Whatever refuses or fails; an interrupted run prints what it has and ends with 130.
pub fn execute(args: &RunArgs, settings: &Settings) -> Result<(), Failure> {
    let prompt = prompt(args)?;
    let runtime = Runtime::open(settings, 0)?;
    runtime.point_to_score();
    let prompt_ids = prompt_ids(&runtime, prompt, args.raw)?;
    let json = settings.json();
    let mut answer = Answer::new(runtime.tokenizer.as_ref(), settings.stop.clone())?;
    let options = GenerateOptions {
        sampling: runtime.sampling,
        max_tokens: settings.max_tokens,
        stop_ids: runtime.stop_ids.as_slice().to_vec(),
    };
    let before = drive_bytes();
    let mut session = Session::new(&runtime.engine);
    let cancel = interrupt::listen();
    let mut shown = Ok(());
    let result = session.generate(&prompt_ids, &options, &cancel, &mut |id| {
        let flow = answer.take(id);
        if !json && shown.is_ok() {
            shown = show(answer.fresh());
            if shown.is_err() {
                // Nobody reads on, as behind `| head`: what is still to come would be for nothing.
                cancel.cancel();
            }
        }
        flow
    });
    if let Err(Lost::Failed(error)) = shown {
        return Lost::Failed(error).outcome();
    }
    let generation = result.map_err(|error| failure(&error))?;
    answer.finish()?;
    if !json {
        let ids = if answer.has_text() { String::new() } else { format!("{:?}", generation.ids) };
        // A reader that went away has been noticed above, or has all the text that it wanted.
        print(&format!("{}{ids}\n", answer.fresh()))?;
    }
    // Before the report, which has what went wrong with it.
    runtime.engine.save_usage();
    let report = Report {
        engine: &runtime.engine,
        settings,
        sampling: Some(&runtime.sampling),
        figures: runtime.engine.telemetry().figures(),
        cold_bytes: drive_bytes().zip(before).map(|(after, before)| after.saturating_sub(before)),
    };
    if json {
        let object = json!({
            "text": answer.text(), "prompt_ids": prompt_ids, "ids": generation.ids,
            "finish": generation.finish, "stats": report.json(),
        });
        print(&format!("{object}\n"))?;
    } else {
        notice(&format!("\n{}", report.block().trim_end()));
    }
    match generation.finish {
        // It was ended for want of a reader, who has all that was wanted.
        Finish::Cancelled if shown.is_err() => Ok(()),
        Finish::Cancelled => Err(Failure::silent(Kind::Interrupted)),
        Finish::Stop | Finish::Length => Ok(()),
    }
}

fn prompt(args: &RunArgs) -> Result<Prompt, Failure> {
    if let Some(path) = &args.ids {
        let file: IdsFile = read_ids(path, "{\"ids\": [id, …]}")?;
        if file.ids.is_empty() {
            let reason = "the list of ids is empty: there is nothing to continue";
            return Err(Failure::new(Kind::Usage, format!("{}: {reason}", path.display())));
        }
        return Ok(Prompt::Ids(file.ids));
    }
    if let Some(text) = &args.prompt {
        return written(text);
    }
    if stdin().is_terminal() {
        let hint = "no prompt: write it behind `run`, or pipe it in";
        return Err(Failure::new(Kind::Usage, hint));
    }
    let text = read_prompt(stdin().lock())?;
    // The line end is the shell's, not the user's.
    written(text.strip_suffix('\n').unwrap_or(&text))
}

/// A prompt of text, which there must be some of.
fn written(text: &str) -> Result<Prompt, Failure> {
    if text.is_empty() {
        return Err(Failure::new(Kind::Usage, "the prompt is empty: write it behind `run`, or pipe it in"));
    }
    Ok(Prompt::Text(text.to_owned()))
}

fn prompt_ids(runtime: &Runtime, prompt: Prompt, raw: bool) -> Result<Vec<u32>, Failure> {
    let text = match prompt {
        Prompt::Ids(ids) => return Ok(ids),
        Prompt::Text(text) => text,
    };
    let tokenizer = runtime.need_tokenizer()?;
    let rendered = match if raw { None } else { runtime.template()? } {
        Some(template) => template
            .render(&[message("user", &text)], true, &Map::new())
            .map_err(|error| text_failure(&error))?,
        None => {
            if !raw {
                let notice = "the model has no chat template: the prompt is continued as it stands";
                runtime.engine.telemetry().notice(notice);
            }
            text
        }
    };
    tokenizer.encode(&rendered).map_err(|error| text_failure(&error))
}
