//! Arms as fresh processes of this same program.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use metaltail_bench::arm::ArmRecord;
use metaltail_bench::harness::{Arm, Runner};
use metaltail_bench::job::Job;
use serde_json::Value;

use crate::exit::{Failure, Kind};

/// Lines of a failed process's standard error that are told.
const TOLD: usize = 5;

/// Settings that are measured where nothing is said of them, and may come out differently each time.
const MEASURED: [&str; 3] = ["ram", "direct", "io"];

/// Starts a process an arm. What the first one measured (the memory budget, the way to read) is given to
/// all others that are not told anything else, so that a machine that drifts changes no settings.
pub struct Processes {
    program: PathBuf,
    job: Vec<u8>,
    measured: Option<Vec<(&'static str, OsString)>>,
}

impl Processes {
    /// Processes that do `job`.
    ///
    /// # Errors
    /// This program cannot be found.
    pub fn new(job: &Job) -> Result<Processes, Failure> {
        let failed = |error: &(dyn std::error::Error + 'static)| Failure::from_error(Kind::Failed, error);
        let program = std::env::current_exe().map_err(|error| failed(&error))?;
        let job = serde_json::to_vec(job).map_err(|error| failed(&error))?;
        Ok(Processes { program, job, measured: None })
    }

    fn output(&self, words: &[OsString]) -> std::io::Result<Output> {
        let mut command = Command::new(&self.program);
        command.args(["bench", "arm", "--json"]).args(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        if let Some(mut input) = child.stdin.take() {
            // An arm that ends before it has read its job says why itself.
            let _ = input.write_all(&self.job);
        }
        child.wait_with_output()
    }
}

impl Runner for Processes {
    fn run(&mut self, arm: &Arm) -> Result<ArmRecord, String> {
        let mut words = arm.words.clone();
        let measured = self.measured.iter().flatten().filter(|(key, _)| !arm.given.contains_key(*key));
        words.extend(measured.map(|(_, word)| word.clone()));
        let output = self.output(&words).map_err(|error| format!("it cannot be started: {error}"))?;
        if !output.status.success() {
            return Err(told(&output));
        }
        let record: ArmRecord = serde_json::from_slice(&output.stdout)
            .map_err(|error| format!("its record is cut short or makes no sense: {error}"))?;
        self.measured.get_or_insert_with(|| found(&record.config));
        Ok(record)
    }
}

/// The words that give what a configuration found by measuring.
fn found(config: &Value) -> Vec<(&'static str, OsString)> {
    let chosen = |key: &&str| config["origins"][*key] == "default";
    let word = |key: &'static str| {
        let value = match &config[key] {
            Value::Number(number) => number.to_string(),
            Value::String(text) => text.clone(),
            _ => return None,
        };
        Some((key, format!("--{key}={value}").into()))
    };
    MEASURED.into_iter().filter(chosen).filter_map(word).collect()
}

/// Why a process failed, in its own words.
pub(super) fn told(output: &Output) -> String {
    let object: Option<Value> = serde_json::from_slice(&output.stdout).ok();
    let error = object.as_ref().and_then(|object| object.get("error"));
    if let Some(error) = error {
        let message = error.get("message").and_then(Value::as_str).unwrap_or_default();
        let causes = error.get("causes").and_then(Value::as_array).into_iter().flatten();
        let causes = causes.filter_map(Value::as_str).map(|cause| format!(": {cause}"));
        return format!("{message}{}", causes.collect::<String>());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let mut lines: Vec<&str> = stderr.lines().rev().take(TOLD).collect();
    lines.reverse();
    format!("it ended with {}: {}", output.status, lines.join(" / "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_was_measured_is_told_to_the_next_arm_and_what_was_given_is_not() {
        let config = json!({"ram": 5, "direct": "on", "io": "threads",
            "origins": {"ram": "default", "direct": "flag", "io": "default"}});
        let wanted = [("ram", OsString::from("--ram=5")), ("io", OsString::from("--io=threads"))];
        assert_eq!(found(&config), wanted);
        assert!(found(&Value::Null).is_empty());
    }
}
