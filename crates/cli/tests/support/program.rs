//! Runs the program as its users do: from outside, with nothing set that a test did not set.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;

/// How a run ended.
pub struct Outcome {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    /// Standard output as exactly one JSON object.
    pub fn json(&self) -> Value {
        let mut values = serde_json::Deserializer::from_str(&self.stdout).into_iter::<Value>();
        let first = values.next().and_then(Result::ok);
        let value = first.unwrap_or_else(|| panic!("no JSON: {:?} {:?}", self.stdout, self.stderr));
        assert!(value.is_object(), "{value}");
        assert!(values.next().is_none(), "more than one object: {}", self.stdout);
        value
    }

    /// The same run, asserted to have ended with `code`.
    pub fn expect(self, code: i32) -> Outcome {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    /// The message and causes of the JSON error, in one text.
    pub fn error(&self) -> String {
        let error = &self.json()["error"];
        format!("{} {}", error["message"], error["causes"])
    }
}

/// The program, without any of the caller's settings.
pub fn program(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_metaltail"));
    command.env_clear().current_dir(dir);
    command
}

/// Runs the program with these arguments in `dir`.
pub fn run(dir: &Path, line: &str) -> Outcome {
    let output = program(dir).args(line.split_whitespace()).output().unwrap();
    Outcome {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A directory with a synthetic `tiny` model of this form at `model`.
pub fn tiny(form: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &format!("synth model --like tiny --format {form}")).expect(0);
    dir
}

/// Names and contents of a directory's files, those of directories in it left out.
pub fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    let named =
        |path: PathBuf| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap());
    entries.map(named).collect()
}

/// Bytes of all files of a directory.
pub fn bytes(dir: &Path) -> u64 {
    contents(dir).values().map(|content| content.len() as u64).sum()
}

/// Changes a JSON file.
pub fn edit_json(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

/// Rewrites every safetensors file of a directory without the tensors that `drop` names.
pub fn drop_tensors(dir: &Path, drop: impl Fn(&str) -> bool) {
    for (name, content) in contents(dir) {
        if !name.ends_with(".safetensors") {
            continue;
        }
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&content).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&content).unwrap();
        let kept: Vec<_> = tensors.tensors().into_iter().filter(|(name, _)| !drop(name)).collect();
        let bytes = safetensors::serialize(kept, metadata.metadata().clone()).unwrap();
        fs::write(dir.join(name), bytes).unwrap();
    }
}

/// Flips one byte of a file.
pub fn flip(path: &Path, offset: usize) {
    let mut content = fs::read(path).unwrap();
    content[offset] ^= 0x40;
    fs::write(path, content).unwrap();
}
