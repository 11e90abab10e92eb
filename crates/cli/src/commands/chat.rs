//! `metaltail chat`: a conversation in the terminal.

use std::io::{IsTerminal, Write, stdin, stdout};
use std::path::PathBuf;

use metaltail_engine::sampler::Sampling;
use metaltail_engine::{Finish, GenerateOptions, Session};
use metaltail_model::CancelFlag;
use metaltail_model::text::{ChatTemplate, Tokenizer, message};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Map, Value, json};

use crate::answer::Answer;
use crate::args::ChatArgs;
use crate::exit::{Failure, Kind};
use crate::interrupt;
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
    End,
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
    let cancel = interrupt::install()?;
    let template = runtime.template.as_ref().ok_or_else(|| {
        let reason = "the model has no chat template: use `run --raw`, which needs none";
        Failure::new(Kind::Model, reason)
    })?;
    let mut chat = Chat {
        runtime: &runtime,
        settings,
        tokenizer: runtime.need_tokenizer()?,
        template,
        session: Session::new(&runtime.engine),
        sampling: runtime.sampling,
        system: None,
        turns: Vec::new(),
        drive_before: drive_bytes(),
    };
    eprintln!("{} – /help lists the commands, seed {}", runtime.engine.plan().family, runtime.sampling.seed);
    let mut lines = Lines::new()?;
    loop {
        match lines.next(cancel)? {
            Input::End => return Ok(()),
            Input::Command(name, rest) if name == "quit" || name == "exit" => {
                let _ = rest;
                return Ok(());
            }
            Input::Command(name, rest) => chat.command(&name, rest.trim()),
            Input::Text(text) if text.trim().is_empty() => {}
            Input::Text(text) => chat.turn(text, cancel),
        }
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
    fn next(&mut self, cancel: &CancelFlag) -> Result<Input, Failure> {
        let mut text = String::new();
        loop {
            let prompt = if text.is_empty() { "> " } else { "… " };
            let Some(line) = self.line(prompt)? else {
                return Ok(if text.is_empty() { Input::End } else { Input::Text(text) });
            };
            cancel.reset();
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

    fn line(&mut self, prompt: &str) -> Result<Option<String>, Failure> {
        match self {
            Lines::Pipe => {
                let mut line = String::new();
                let read = stdin().read_line(&mut line);
                let read = read.map_err(|error| Failure::from_error(Kind::Failed, &error))?;
                let line = line.strip_suffix('\n').map(str::to_owned).unwrap_or(line);
                Ok((read > 0).then_some(line))
            }
            Lines::Editor(editor) => match editor.readline(prompt) {
                Ok(line) => Ok(Some(line)),
                Err(ReadlineError::Interrupted) => Ok(Some(String::new())),
                Err(ReadlineError::Eof) => Ok(None),
                Err(error) => Err(Failure::from_error(Kind::Failed, &error)),
            },
        }
    }
}

impl Chat<'_> {
    fn command(&mut self, name: &str, rest: &str) {
        match name {
            "help" => println!("{HELP}"),
            "reset" => {
                self.turns.clear();
                println!("(forgotten)");
            }
            "system" => {
                self.turns.clear();
                self.system = (!rest.is_empty()).then(|| rest.to_owned());
                println!("(system prompt {})", if rest.is_empty() { "removed" } else { "set" });
            }
            "stats" => print!("{}", self.report().block()),
            "save" => match self.save(rest) {
                Ok(path) => println!("(saved to {})", path.display()),
                Err(reason) => println!("(not saved: {reason})"),
            },
            other => println!("(there is no /{other}; /help lists the commands)"),
        }
    }

    fn messages(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| message("system", text));
        system.chain(self.turns.iter().cloned()).collect()
    }

    fn save(&self, path: &str) -> Result<PathBuf, String> {
        if path.is_empty() {
            return Err("name a file behind /save".into());
        }
        let text = json!({"messages": self.messages(), "seed": self.sampling.seed}).to_string();
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
    fn turn(&mut self, text: String, cancel: &CancelFlag) {
        self.turns.push(message("user", &text));
        self.runtime.engine.telemetry().reset();
        self.drive_before = drive_bytes();
        match self.answer(cancel) {
            Ok((answer, Finish::Cancelled)) => {
                println!("\n(stopped)");
                self.turns.push(message("assistant", &answer));
            }
            Ok((answer, _)) => {
                println!();
                self.turns.push(message("assistant", &answer));
            }
            Err(failure) => {
                println!();
                failure.print(false);
                self.turns.pop();
            }
        }
        // The next answer draws on: the same question twice may be answered differently.
        self.sampling.seed = self.sampling.seed.wrapping_add(1);
    }

    fn answer(&mut self, cancel: &CancelFlag) -> Result<(String, Finish), Failure> {
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
        let mut out = stdout().lock();
        let result = self.session.generate(&prompt, &options, cancel, &mut |id| {
            let flow = answer.take(id);
            let _ = out.write_all(answer.fresh().as_bytes()).and_then(|()| out.flush());
            flow
        });
        let generation = result.map_err(|error| failure(&error))?;
        answer.finish()?;
        let _ = out.write_all(answer.fresh().as_bytes()).and_then(|()| out.flush());
        Ok((answer.text().unwrap_or_default().to_owned(), generation.finish))
    }
}
