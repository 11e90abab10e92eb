//! Models, prompts and calls that several test files share.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::program::{Outcome, edit_json, program};

/// The checkout.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The demo model.
pub fn demo() -> PathBuf {
    repository().join("models/hummingbird-56m")
}

/// A tiny checkpoint of a family, and what the independent implementation says of it.
pub fn oracle(family: &str) -> (PathBuf, Value) {
    let dir = repository().join("fixtures/oracles").join(family);
    let text = fs::read_to_string(dir.join("oracle.json")).unwrap();
    (dir, serde_json::from_str(&text).unwrap())
}

/// A JSON list of ids.
pub fn ids(value: &Value) -> Vec<u32> {
    let list = value.as_array().unwrap_or_else(|| panic!("no ids: {value}"));
    list.iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

/// A count in a JSON object.
pub fn count(value: &Value, pointer: &str) -> u64 {
    let found = value.pointer(pointer).and_then(Value::as_u64);
    found.unwrap_or_else(|| panic!("no count at {pointer}: {value}"))
}

/// Writes a file for `run --ids` and returns its path.
pub fn ids_file(dir: &Path, ids: &[u32]) -> PathBuf {
    let path = dir.join("ids.json");
    fs::write(&path, json!({"ids": ids}).to_string()).unwrap();
    path
}

/// Ids below `below` that look random and are the same every time.
pub fn seeded_ids(count: usize, below: u32) -> Vec<u32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % below
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// Runs the program with arguments that may hold blanks, and with `input` piped in.
pub fn piped(dir: &Path, args: &[&str], input: &str) -> Outcome {
    let output = program(dir).args(args).write_stdin(input).output().unwrap();
    Outcome {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Runs the program with arguments that may hold blanks.
pub fn call(dir: &Path, args: &[&str]) -> Outcome {
    piped(dir, args, "")
}

/// `run --json` on the demo model.
pub fn ask(args: &[&str]) -> Value {
    let model = demo();
    let fixed = ["run", "--json", "--model", model.to_str().unwrap()];
    call(&model, &[&fixed, args].concat()).expect(0).json()
}

/// Takes away all that could end an answer: stop ids and the tokenizer that names some.
pub fn without_stops(model: &Path) {
    for file in ["config.json", "generation_config.json"] {
        edit_json(&model.join(file), |config| config["eos_token_id"] = Value::Null);
    }
    fs::remove_file(model.join("tokenizer.json")).unwrap();
}
