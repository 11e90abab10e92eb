//! Standard streams that are full or closed, from outside.
#![cfg(target_os = "linux")]

#[path = "support/models.rs"]
mod models;
#[path = "support/program.rs"]
mod program;

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};

use models::{demo, ids_file};
use program::tiny;

/// The program, to be started on the demo model.
fn command(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_metaltail"));
    command.env_clear().env("METALTAIL_MODEL", demo()).current_dir(demo());
    command.args(line.split_whitespace()).stdin(Stdio::piped());
    command
}

/// A file that takes nothing.
fn full() -> File {
    OpenOptions::new().write(true).open("/dev/full").unwrap()
}

/// The exit code and standard error, `input` having been piped in.
fn ended(mut child: Child, input: &str) -> (Option<i32>, String) {
    // Whoever reads no input leaves it in the pipe, or has ended.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn text_that_cannot_be_written_is_a_failure() {
    let dir = tiny("slab");
    let ids = ids_file(dir.path(), &[1, 2]);
    let score = dir.path().join("s.json");
    std::fs::write(&score, "{\"sequences\": [[1, 2]]}").unwrap();
    for line in [
        "run hello --max-tokens 2",
        "run hello --max-tokens 2 --json",
        &format!("run --max-tokens 2 --ids {}", ids.display()),
        "run hello --max-tokens -1 --json",
        "chat",
        &format!("score --ids {}", score.display()),
        "plan",
        "inspect",
        "man",
        "--help",
    ] {
        let child = command(line).stdout(full()).stderr(Stdio::piped()).spawn().unwrap();
        let (code, stderr) = ended(child, "hello\n");
        let (wanted, part) = match line.contains("-1") {
            true => (2, "--max-tokens"),
            false => (1, "cannot write to standard output: No space left"),
        };
        assert_eq!(code, Some(wanted), "{line}: {stderr}");
        assert!(stderr.contains(part), "{line}: {stderr}");
    }
}

#[test]
fn a_full_standard_error_changes_nothing() {
    for line in ["run hello -v --max-tokens 2", "run hello --max-tokens 2 --json", "chat --max-tokens 2"] {
        let child = command(line).stdout(Stdio::piped()).stderr(full()).spawn().unwrap();
        assert_eq!(ended(child, "hello\n").0, Some(0), "{line}");
    }
}

#[test]
fn a_chat_ends_quietly_when_its_reader_goes_away() {
    let mut child =
        command("chat --temperature 0").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The questions go on, so only the reader can be what ends it.
    let mut stdin = child.stdin.take().unwrap();
    let mut out = child.stdout.take().unwrap();
    writeln!(stdin, "hello").unwrap();
    out.read_exact(&mut [0]).unwrap();
    drop(out);
    let endless = std::thread::spawn(move || while writeln!(stdin, "/help").is_ok() {});
    let output = child.wait_with_output().unwrap();
    endless.join().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(!stderr.contains("error") && !stderr.contains("panicked"), "{stderr}");
}
