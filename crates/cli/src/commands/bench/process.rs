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

/// Starts a process an arm. What the first one found for the memory budget is given to all others
/// that are not told another one, so that free memory that comes and goes makes no difference.
pub struct Processes {
    program: PathBuf,
    job: Vec<u8>,
    ram: Option<u64>,
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
        Ok(Processes { program, job, ram: None })
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
        if let (Some(ram), false) = (self.ram, arm.given.contains_key("ram")) {
            words.push(format!("--ram={ram}").into());
        }
        let output = self.output(&words).map_err(|error| format!("it cannot be started: {error}"))?;
        if !output.status.success() {
            return Err(told(&output));
        }
        let record: ArmRecord = serde_json::from_slice(&output.stdout)
            .map_err(|error| format!("its record is cut short or makes no sense: {error}"))?;
        self.ram = self.ram.or_else(|| record.config.get("ram").and_then(Value::as_u64));
        Ok(record)
    }
}

/// Why a process failed, in its own words.
fn told(output: &Output) -> String {
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
