//! Limits of the shell (`ulimit`): what hits one is told as what it is, and nothing dies of it.
#![cfg(target_os = "linux")]

#[path = "support/program.rs"]
mod program;

use std::fs;
use std::path::Path;
use std::process::Command;

use program::{Outcome, contents, run, tiny};

const RUN: &str = "run --model model --ids ids.json --max-tokens 1 --ram 256M --json --usage off";

/// Runs the program below a limit, given as the flag and number of `ulimit`.
fn limited(dir: &Path, limit: &str, line: &str) -> Outcome {
    let script = format!("ulimit {limit} && exec {} {line}", env!("CARGO_BIN_EXE_metaltail"));
    let output = Command::new("sh").args(["-c", &script]).env_clear().current_dir(dir).output().unwrap();
    Outcome {
        // A signal has no code.
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A tiny model with ids to continue.
fn model() -> tempfile::TempDir {
    let dir = tiny("slab");
    fs::write(dir.path().join("ids.json"), "{\"ids\": [1, 2, 3]}").unwrap();
    dir
}

#[test]
fn a_limit_on_file_sizes_is_an_error_and_not_the_end_of_the_process() {
    let dir = model();
    for (line, file) in [
        ("convert model slab --json", "slab"),
        ("synth other --like tiny --json", "other"),
        ("trace synth t.csv --json", "t.csv"),
    ] {
        let failed = limited(dir.path(), "-f 1", line).expect(1);
        let error = failed.error();
        assert!(error.contains(file) && error.contains("File too large"), "{line}: {error}");
    }
    // What was begun goes on.
    run(dir.path(), "convert model slab").expect(0);
    assert!(contents(&dir.path().join("slab")).contains_key("manifest.json"));
}

#[test]
fn too_few_open_files_are_told_as_that_wherever_they_are_noticed() {
    let dir = model();
    let mut refusals = 0;
    for way in ["--direct off --io threads", "--direct on --io threads", "--io uring"] {
        for files in 6..40 {
            let outcome = limited(dir.path(), &format!("-n {files}"), &format!("{RUN} {way}"));
            if outcome.code == 0 {
                continue;
            }
            assert!([1, 2].contains(&outcome.code), "{files}, {way}: {} {}", outcome.code, outcome.stdout);
            let error = outcome.error();
            assert!(error.contains("`ulimit -n`"), "{files}, {way}: {error}");
            refusals += 1;
        }
    }
    assert!(refusals > 10, "{refusals}");
}

#[test]
fn a_template_that_no_one_asks_for_takes_no_memory() {
    let dir = model();
    // Less than the stack on which templates are worked on.
    let few = "-v 480000";
    limited(dir.path(), few, RUN).expect(0);
    let line = RUN.replace("--ids ids.json", "hello");
    limited(dir.path(), few, &format!("{line} --raw")).expect(0);
    let refused = limited(dir.path(), few, &line).expect(1);
    let error = refused.error();
    assert!(error.contains("no memory") && error.contains("`ulimit -v`"), "{error}");
    assert!(!error.contains("parse"), "{error}");
    // A template that is damaged is no one's business either, until it is asked for.
    fs::write(dir.path().join("model/chat_template.jinja"), "{% if %}").unwrap();
    run(dir.path(), RUN).expect(0);
    run(dir.path(), &line).expect(3);
}
