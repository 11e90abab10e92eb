//! Ctrl-C, from outside.
#![cfg(target_os = "linux")]

#[path = "support/models.rs"]
mod models;
#[path = "support/program.rs"]
mod program;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use models::{count, demo, ids, ids_file, seeded_ids, without_stops};
use serde_json::Value;
use tempfile::TempDir;

/// Starts the program with piped standard streams.
fn start(dir: &Path, line: &str) -> Child {
    Command::new(env!("CARGO_BIN_EXE_metaltail"))
        .args(line.split_whitespace())
        .env_clear()
        .current_dir(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until the program takes SIGINT itself, which it does before anything else.
fn listens(child: &mut Child) {
    let path = format!("/proc/{}/status", child.id());
    until(child, || {
        let status = fs::read_to_string(&path).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        caught.is_some_and(|mask| mask & (1 << (libc::SIGINT - 1)) != 0)
    });
}

/// Waits until the model of a program that was started with `-v` is loaded and the program has used
/// `ticks` hundredths of a second of processor time since. The result keeps standard error open.
fn works(child: &mut Child, ticks: u64) -> BufReader<ChildStderr> {
    let mut told = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("reads: ") {
        line.clear();
        assert!(told.read_line(&mut line).unwrap() > 0, "it ended before the model was loaded");
    }
    let path = format!("/proc/{}/stat", child.id());
    let used = || {
        let stat = fs::read_to_string(&path).unwrap_or_default();
        // The name may hold blanks; behind its bracket, user time is the twelfth field.
        let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        fields.split_whitespace().nth(11).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0)
    };
    let before = used();
    until(child, || used() >= before + ticks);
    told
}

fn until(child: &mut Child, mut reached: impl FnMut() -> bool) {
    while !reached() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it could be interrupted");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn interrupt(child: &Child) {
    signal(child, libc::SIGINT);
}

fn signal(child: &Child, number: i32) {
    let pid = i32::try_from(child.id()).unwrap();
    // SAFETY: a signal to a child that was not waited for, so the number is still its own.
    assert_eq!(unsafe { libc::kill(pid, number) }, 0);
}

/// The exit code and what was printed.
fn ended(child: Child) -> (Option<i32>, String, String) {
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// A directory with a model that is slow enough to be caught at work.
fn slow() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    program::run(dir.path(), "synth model --like fat --layers 2 --experts 16").expect(0);
    dir
}

#[test]
fn in_the_answer_it_prints_what_it_has() {
    let dir = slow();
    without_stops(&dir.path().join("model"));
    ids_file(dir.path(), &[1, 2, 3]);
    let mut child = start(dir.path(), "run -v --json --model model --ids ids.json --temperature 1");
    let _told = works(&mut child, 60);
    interrupt(&child);
    let (code, stdout, _) = ended(child);
    assert_eq!(code, Some(130), "{stdout}");
    let answer: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(answer["finish"], "cancelled");
    let generated = ids(&answer["ids"]).len() as u64;
    assert!(generated > 1 && generated < 4000, "{generated}");
    let rows = count(&answer["stats"], "/decode/tokens");
    assert!(rows == generated - 1 || rows == generated, "{rows} rows for {generated} ids");
}

#[test]
fn in_the_prompt_it_ends_before_any_token() {
    let dir = tempfile::tempdir().unwrap();
    ids_file(dir.path(), &seeded_ids(4000, 8000));
    let line = format!("run -v --json --model {} --ids ids.json --prefill-chunk 4000", demo().display());
    let mut child = start(dir.path(), &line);
    let _told = works(&mut child, 5);
    interrupt(&child);
    let (code, stdout, _) = ended(child);
    assert_eq!(code, Some(130), "{stdout}");
    let answer: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&answer["finish"], &answer["ids"]), (&"cancelled".into(), &Value::Array(Vec::new())));
    // The one step was given up between layers: fewer were routed than its eight sparse ones.
    assert_eq!(count(&answer["stats"], "/prefill/tokens"), 0);
    assert!(count(&answer["stats"], "/experts/selections") < 4000 * 8 * 6, "{}", answer["stats"]);
}

#[test]
fn people_keep_the_text_so_far() {
    let dir = slow();
    let mut child = start(dir.path(), "run hello --model model --temperature 0 --threads 1");
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut first = [0];
    out.read_exact(&mut first).unwrap();
    interrupt(&child);
    let mut rest = Vec::new();
    out.read_to_end(&mut rest).unwrap();
    let (code, _, stderr) = ended(child);
    assert_eq!(code, Some(130), "{stderr}");
    assert_eq!(rest.last(), Some(&b'\n'), "the line is ended");
    assert!(stderr.contains("decode"), "{stderr}");
}

#[test]
fn a_reader_that_goes_away_ends_the_answer() {
    let dir = slow();
    let mut child = start(dir.path(), "run hello --model model --temperature 0 --threads 1");
    let mut out = child.stdout.take().unwrap();
    let mut first = [0];
    out.read_exact(&mut first).unwrap();
    drop(out);
    let (code, _, stderr) = ended(child);
    // The reader has all that was wanted, so nothing failed and nobody interrupted.
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("decode") && !stderr.contains("error"), "{stderr}");
}

#[test]
fn the_second_one_ends_it_at_once() {
    let dir = tempfile::tempdir().unwrap();
    ids_file(dir.path(), &seeded_ids(4000, 8000));
    let mut child = start(dir.path(), &format!("run -v --json --model {} --ids ids.json", demo().display()));
    let out = child.stdout.as_ref().unwrap().as_raw_fd();
    // SAFETY: the descriptor is open as long as the child's handle; a smaller pipe loses nothing.
    // What the program has to say after the first signal does not fit, so it stands still there.
    assert!(unsafe { libc::fcntl(out, libc::F_SETPIPE_SZ, 4096) } > 0);
    let _told = works(&mut child, 5);
    interrupt(&child);
    until(&mut child, || {
        let mut waiting = 0;
        // SAFETY: the descriptor is open, and the call writes one int.
        assert_eq!(unsafe { libc::ioctl(out, libc::FIONREAD, &raw mut waiting) }, 0);
        waiting > 0
    });
    interrupt(&child);
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(serde_json::from_str::<Value>(&said).is_err(), "it was not cut short: {said}");
}

#[test]
fn a_score_ends_with_an_error_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let sequences = serde_json::json!({"sequences": [seeded_ids(4000, 8000)]});
    fs::write(dir.path().join("s.json"), sequences.to_string()).unwrap();
    let line = format!("score -v --json --model {} --ids s.json", demo().display());
    let mut child = start(dir.path(), &line);
    let _told = works(&mut child, 5);
    interrupt(&child);
    let (code, stdout, _) = ended(child);
    assert_eq!(code, Some(130), "{stdout}");
    let error: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(error["error"]["kind"], "interrupted");
}

/// A measurement that would take days.
const ENDLESS: &str = "bench kernels --hidden 64 --width 64 --working-set 1M --format int8 --rounds 1000000";

#[test]
fn where_no_one_listens_it_ends_at_once_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let model = demo();
    let waiting = format!("run --model {}", model.display());
    for line in [ENDLESS, &waiting] {
        let mut child = start(dir.path(), &format!("{line} --json"));
        let keep_open = child.stdin.take();
        listens(&mut child);
        interrupt(&child);
        let (code, stdout, stderr) = ended(child);
        assert_eq!(code, Some(130), "{line}: {stdout} {stderr}");
        let error: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(error["error"]["kind"], "interrupted", "{line}");

        let mut child = start(dir.path(), line);
        let keep_open = (keep_open, child.stdin.take());
        listens(&mut child);
        interrupt(&child);
        let (code, stdout, stderr) = ended(child);
        assert_eq!((code, stdout.as_str()), (Some(130), ""), "{line}");
        assert!(stderr.contains("error: interrupted"), "{line}: {stderr}");
        drop(keep_open);
    }
}

#[test]
fn a_chat_that_waits_ends() {
    let dir = tempfile::tempdir().unwrap();
    let line = format!("chat -v --model {}", demo().display());
    for (number, code) in [(libc::SIGINT, Some(130)), (libc::SIGTERM, None)] {
        let mut child = start(dir.path(), &line);
        let keep_open = child.stdin.take();
        let told = works(&mut child, 0);
        assert!(told.lines().any(|line| line.unwrap().contains("/help lists the commands")));
        signal(&child, number);
        let status = child.wait().unwrap();
        assert_eq!(status.code(), code);
        assert_eq!(status.signal(), code.is_none().then_some(libc::SIGTERM));
        drop(keep_open);
    }
}

#[test]
fn a_chat_stops_the_answer_and_keeps_the_session() {
    let dir = slow();
    let mut child = start(dir.path(), "chat --model model --temperature 0 --threads 1");
    let mut stdin = child.stdin.take().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    writeln!(stdin, "hello").unwrap();
    let mut first = [0];
    out.read_exact(&mut first).unwrap();
    interrupt(&child);
    let mut told = Vec::new();
    while !told.ends_with(b"(stopped)\n") {
        assert!(out.read_until(b'\n', &mut told).unwrap() > 0, "{}", String::from_utf8_lossy(&told));
    }
    writeln!(stdin, "/nonsense").unwrap();
    drop(stdin);
    let mut rest = Vec::new();
    out.read_to_end(&mut rest).unwrap();
    assert!(String::from_utf8_lossy(&rest).contains("there is no /nonsense"));
    assert_eq!(ended(child).0, Some(0), "the end of input ends it, not the signal");
}
