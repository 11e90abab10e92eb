//! Both programs as fresh processes.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use metaltail_bench::job::PageCache;
use metaltail_bench::peers::{Answer, Measured, Phase, Programs, Side};
use metaltail_bench::serve::make_true;
use serde_json::{Value, json};

use super::super::process::told;
use super::group::{ENTER, Group};
use crate::exit::{Failure, Kind};

/// A program and its words.
pub struct Words {
    /// The program.
    pub program: PathBuf,
    /// What it is given.
    pub words: Vec<OsString>,
}

/// What every run needs.
pub struct Processes {
    /// `run --json` of this program.
    pub metaltail: Words,
    /// The other one.
    pub peer: Words,
    /// Bytes of the control group that each process gets.
    pub memory: Option<u64>,
    /// State of the page cache before each run.
    pub page_cache: PageCache,
    /// Files of the model, of both programs.
    pub files: Vec<PathBuf>,
}

impl Programs for Processes {
    fn run(&mut self, side: Side) -> Result<Measured, String> {
        let page_cache = make_true(self.page_cache, &self.files).map_err(|error| error.to_string())?;
        let group = self.memory.map(Group::make).transpose()?;
        let words = if side == Side::Metaltail { &self.metaltail } else { &self.peer };
        let begun = Instant::now();
        let output = command(words, group.as_ref())
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("{} cannot be started: {error}", words.program.display()))?;
        let seconds = begun.elapsed().as_secs_f64();
        if !output.status.success() {
            let killed = group.as_ref().is_some_and(Group::killed);
            return Err(match killed {
                true => {
                    "it needed more memory than its control group has, and the system ended it".to_owned()
                }
                false => told(&output),
            });
        }
        let object: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| format!("what it printed is not one JSON object: {error}"))?;
        let answer = match side {
            Side::Metaltail => own_answer(&object),
            Side::Peer => serde_json::from_value(object).map_err(|error| format!("its answer: {error}"))?,
        };
        Ok(Measured { answer, seconds, peak_bytes: group.and_then(|group| group.peak()), page_cache })
    }
}

/// The process, by way of a shell where it has to enter a group first.
fn command(words: &Words, group: Option<&Group>) -> Command {
    let mut command = match group {
        None => Command::new(&words.program),
        Some(group) => {
            let mut shell = Command::new("sh");
            shell.args(["-c", ENTER]).arg(group.dir()).arg(&words.program);
            shell
        }
    };
    command.args(&words.words);
    command
}

/// What `run --json` says, in a peer's form.
fn own_answer(object: &Value) -> Answer {
    let ids = |key: &str| {
        let items = object[key].as_array().into_iter().flatten();
        items.filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
    };
    let phase = |key: &str| {
        let of = &object["stats"][key];
        Phase { tokens: of["tokens"].as_u64().unwrap_or(0), seconds: of["seconds"].as_f64().unwrap_or(0.0) }
    };
    Answer {
        name: Some("metaltail".to_owned()),
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        prompt_ids: ids("prompt_ids"),
        ids: ids("ids"),
        prefill: phase("prefill"),
        decode: phase("decode"),
    }
}

/// The prompt as a file that both read; it goes with this.
pub struct PromptFile(PathBuf);

impl PromptFile {
    /// Writes it to the directory for temporary files.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(ids: &[u32]) -> Result<PromptFile, Failure> {
        let path = std::env::temp_dir().join(format!("metaltail-prompt-{}.json", std::process::id()));
        fs::write(&path, json!({"ids": ids}).to_string()).map_err(|error| {
            Failure::new(Kind::Failed, format!("cannot write {}: {error}", path.display()))
        })?;
        Ok(PromptFile(path))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for PromptFile {
    fn drop(&mut self) {
        // What lies in the temporary directory harms nobody.
        let _ = fs::remove_file(&self.0);
    }
}
