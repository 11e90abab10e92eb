//! `metaltail chat`: a conversation in the terminal.

use std::io::{IsTerminal, stdin};
use std::path::PathBuf;

use metaltail_engine::sampler::Sampling;
use metaltail_engine::{Finish, Flow, GenerateOptions, Session};
use metaltail_model::text::{ChatTemplate, Tokenizer, message};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Map, Value, json};

use crate::answer::Answer;
use crate::args::ChatArgs;
use crate::exit::{Failure, Kind};
use crate::input::{TEXT_CAP, read_line, too_long};
use crate::interrupt::{self, Listening};
use crate::output::{Lost, notice, show};
use crate::report::{Report, drive_bytes};
use crate::runtime::{Runtime, drawn_seed, failure, text_failure};
use crate::settings::Settings;

const HELP: &str = "\
/help            this list
/reset           forget the conversation
/system TEXT     set the system prompt and begin anew (without TEXT: none)
/stats           figures since the last question
/save FILE       write the conversation as JSON
/quit            end (so does Ctrl-D)
A line that ends with \\ goes on in the next. Ctrl-C stops an answer and keeps the conversation.";

/// What the user typed.
enum Input {
    Text(String),
    Command(String, String),
    /// A line that is no text.
    Bytes,
    End,
}

/// Why a conversation cannot go on.
enum Ending {
    /// There is nowhere to write to.
    Lost(Lost),
    /// Something failed.
    Failed(Failure),
}

impl From<Lost> for Ending {
    fn from(lost: Lost) -> Ending {
        Ending::Lost(lost)
    }
}

impl From<Failure> for Ending {
    fn from(failure: Failure) -> Ending {
        Ending::Failed(failure)
    }
}

/// One conversation.
struct Chat<'r> {
    runtime: &'r Runtime,
    settings: &'r Settings,
    tokenizer: &'r Tokenizer,
    template: &'r ChatTemplate,
    session: Session<'r>,
    sampling: Sampling,
    system: Option<String>,
    turns: Vec<Value>,
    drive_before: Option<u64>,
}

/// Runs the command.
///
/// # Errors
/// A model that is refused or has no tokenizer or chat template; a failed step ends its answer
/// alone.
pub fn execute(_args: &ChatArgs, settings: &Settings) -> Result<(), Failure> {
    if settings.json() {
        let reason = "chat has no JSON form: use `run --json`";
        return Err(Failure::new(Kind::Usage, reason));
    }
    let runtime = Runtime::open(settings, drawn_seed())?;
    runtime.point_to_score();
    let template = runtime.template()?.ok_or_else(|| {
        let reason = "the model has no chat template: use `run --raw`, which needs none";
        Failure::new(Kind::Model, reason)
    })?;
    let mut chat = Chat {
        runtime: &runtime,
        settings,
        tokenizer: runtime.need_tokenizer()?,
        template: &template,
        session: Session::new(&runtime.engine),
        sampling: runtime.sampling,
        system: None,
        turns: Vec::new(),
        drive_before: drive_bytes(),
    };
    notice(&format!(
        "{} – /help lists the commands, seed {}",
        runtime.engine.plan().family,
        runtime.sampling.seed
    ));
    match chat.converse() {
        Ok(()) => Ok(()),
        Err(Ending::Lost(lost)) => lost.outcome(),
        Err(Ending::Failed(failure)) => Err(failure),
    }
}

/// Lines from an editor with history on a terminal, else from standard input.
enum Lines {
    Editor(Box<DefaultEditor>),
    Pipe,
}

impl Lines {
    fn new() -> Result<Lines, Failure> {
        if !stdin().is_terminal() {
            return Ok(Lines::Pipe);
        }
        let editor = DefaultEditor::new().map_err(|e| Failure::from_error(Kind::Failed, &e))?;
        Ok(Lines::Editor(Box::new(editor)))
    }

    /// The next input, continued lines joined. Ctrl-C on an empty line asks again.
    fn next(&mut self) -> Result<Input, Failure> {
        let mut text = String::new();
        loop {
            let prompt = if text.is_empty() { "> " } else { "… " };
            let Some(line) = self.line(prompt)? else {
                return Ok(if text.is_empty() { Input::End } else { Input::Text(text) });
            };
            let Ok(line) = String::from_utf8(line) else { return Ok(Input::Bytes) };
            if (text.len() + line.len()) as u64 > TEXT_CAP {
                return Err(too_long());
            }
            match line.strip_suffix('\\') {
                Some(part) => {
                    text.push_str(part);
                    text.push('\n');
                }
                None => {
                    text.push_str(&line);
                    break;
                }
            }
        }
        if let Lines::Editor(editor) = self {
            // History is a convenience: a full disk must not end the conversation.
            let _ = editor.add_history_entry(text.as_str());
        }
        Ok(match text.strip_prefix('/') {
            Some(command) => {
                let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
                Input::Command(name.to_owned(), rest.to_owned())
            }
            None => Input::Text(text),
        })
    }

    fn line(&mut self, prompt: &str) -> Result<Option<Vec<u8>>, Failure> {
        match self {
            Lines::Pipe => read_line(&mut stdin().lock()),
            Lines::Editor(editor) => {
                // The editor has the terminal in a state that must not be left behind.
                let listening = interrupt::listen();
                let line = editor.readline(prompt);
                listening.reset();
                match line {
                    Ok(line) => Ok(Some(line.into_bytes())),
                    Err(ReadlineError::Interrupted) => Ok(Some(Vec::new())),
                    Err(ReadlineError::Eof) => Ok(None),
                    Err(error) => Err(Failure::from_error(Kind::Failed, &error)),
                }
            }
        }
    }
}

impl Chat<'_> {
    /// Answers until the end of the input or `/quit`.
    fn converse(&mut self) -> Result<(), Ending> {
        let mut lines = Lines::new()?;
        loop {
            match lines.next()? {
                Input::End => return Ok(()),
                Input::Command(name, _) if name == "quit" || name == "exit" => return Ok(()),
                Input::Command(name, rest) => self.command(&name, rest.trim())?,
                Input::Bytes => show("(that line is not UTF-8, and nothing was made of it)\n")?,
                Input::Text(text) if text.trim().is_empty() => {}
                Input::Text(text) => self.turn(text)?,
            }
        }
    }

    fn command(&mut self, name: &str, rest: &str) -> Result<(), Lost> {
        let reply = match name {
            "help" => HELP.to_owned(),
            "reset" => {
                self.turns.clear();
                "(forgotten)".to_owned()
            }
            "system" => {
                self.turns.clear();
                self.system = (!rest.is_empty()).then(|| rest.to_owned());
                format!("(system prompt {})", if rest.is_empty() { "removed" } else { "set" })
            }
            "stats" => self.report().block().trim_end().to_owned(),
            "save" => match self.save(rest) {
                Ok(path) => format!("(saved to {})", path.display()),
                Err(reason) => format!("(not saved: {reason})"),
            },
            other => format!("(there is no /{other}; /help lists the commands)"),
        };
        show(&format!("{reply}\n"))
    }

    fn messages(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| message("system", text));
        system.chain(self.turns.iter().cloned()).collect()
    }

    fn save(&self, path: &str) -> Result<PathBuf, String> {
        if path.is_empty() {
            return Err("name a file behind /save".into());
        }
        let text = json!({"messages": self.messages(), "seed": self.runtime.sampling.seed}).to_string();
        std::fs::write(path, text).map_err(|error| error.to_string())?;
        Ok(PathBuf::from(path))
    }

    fn report(&self) -> Report<'_> {
        Report {
            engine: &self.runtime.engine,
            settings: self.settings,
            sampling: Some(&self.sampling),
            figures: self.runtime.engine.telemetry().figures(),
            cold_bytes: drive_bytes()
                .zip(self.drive_before)
                .map(|(after, before)| after.saturating_sub(before)),
        }
    }

    /// One question and its answer; whatever fails is told and the question is taken back.
    fn turn(&mut self, text: String) -> Result<(), Lost> {
        self.turns.push(message("user", &text));
        self.runtime.engine.telemetry().reset();
        self.drive_before = drive_bytes();
        let cancel = interrupt::listen();
        match self.answer(&cancel) {
            Ok((answer, finish)) => {
                self.turns.push(message("assistant", &answer));
                show(if finish == Finish::Cancelled { "\n(stopped)\n" } else { "\n" })?;
            }
            Err(Ending::Failed(failure)) => {
                self.turns.pop();
                show("\n")?;
                failure.print(false);
            }
            Err(Ending::Lost(lost)) => return Err(lost),
        }
        // The answer that it was meant for has ended.
        cancel.reset();
        // The next answer draws on: the same question twice may be answered differently.
        self.sampling.seed = self.sampling.seed.wrapping_add(1);
        Ok(())
    }

    fn answer(&mut self, cancel: &Listening) -> Result<(String, Finish), Ending> {
        let rendered = self
            .template
            .render(&self.messages(), true, &Map::new())
            .map_err(|error| text_failure(&error))?;
        let prompt = self.tokenizer.encode(&rendered).map_err(|error| text_failure(&error))?;
        let options = GenerateOptions {
            sampling: self.sampling,
            max_tokens: self.settings.max_tokens,
            stop_ids: self.runtime.stop_ids.as_slice().to_vec(),
        };
        let mut answer = Answer::new(Some(self.tokenizer), self.settings.stop.clone())?;
        let mut shown = Ok(());
        let result = self.session.generate(&prompt, &options, cancel, &mut |id| {
            let flow = answer.take(id);
            shown = show(answer.fresh());
            if shown.is_ok() { flow } else { Flow::Stop }
        });
        shown?;
        let generation = result.map_err(|error| failure(&error))?;
        answer.finish()?;
        show(answer.fresh())?;
        Ok((answer.text().unwrap_or_default().to_owned(), generation.finish))
    }
}
