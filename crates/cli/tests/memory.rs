//! A model larger than the memory that a control group allows.
#![cfg(target_os = "linux")]

#[path = "support/models.rs"]
mod models;
#[path = "support/program.rs"]
mod program;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use models::{count, ids, ids_file, seeded_ids, without_stops};
use serde_json::Value;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// The model has 1 GiB of experts.
const LIMIT: u64 = 700 * MIB;
/// Bytes of one of its experts.
const EXPERT: u64 = 2 * MIB;

/// A control group of this test, removed when dropped.
struct Group {
    dir: PathBuf,
    peak: &'static str,
}

impl Group {
    /// A group with a memory limit; none, with the reason printed, where none can be made.
    fn new(limit: u64) -> Option<Group> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("metaltail-test-{}-{number}", std::process::id());
        let tops = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
            ("/sys/fs/cgroup", "memory.max", "memory.peak"),
            ("/sys/fs/cgroup/unified", "memory.max", "memory.peak"),
        ];
        for (top, limit_file, peak) in tops {
            let dir = Path::new(top).join(&name);
            if fs::create_dir(&dir).is_err() {
                continue;
            }
            let group = Group { dir, peak };
            // Where nothing of the kind is mounted it may be a directory like any other.
            if group.dir.join("cgroup.procs").exists()
                && fs::write(group.dir.join(limit_file), limit.to_string()).is_ok()
            {
                return Some(group);
            }
        }
        println!("SKIPPED: no writable memory cgroup");
        None
    }

    /// Runs the program in the group.
    fn run(&self, dir: &Path, line: &str) -> Output {
        let mut command = self.command("exec \"$@\"");
        command.arg(env!("CARGO_BIN_EXE_metaltail")).args(line.split_whitespace());
        command.env_clear().current_dir(dir).output().unwrap()
    }

    /// A shell in the group.
    fn command(&self, script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("echo $$ > {}/cgroup.procs && {script}", self.dir.display()), "sh"]);
        command
    }

    /// The most memory that the group ever had, where the system tells.
    fn peak(&self) -> io::Result<u64> {
        let text = fs::read_to_string(self.dir.join(self.peak))?;
        text.trim().parse().map_err(io::Error::other)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A group that was just emptied may be busy for a moment.
        for _ in 0..50 {
            if fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// The synthetic model `fat`, in a directory beside the build, with a prompt of seeded ids. Nothing
/// ends an answer early.
fn fat() -> TempDir {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    program::run(dir.path(), "synth model --like fat").expect(0);
    without_stops(&dir.path().join("model"));
    ids_file(dir.path(), &seeded_ids(256, 256));
    dir
}

/// What a run in the group said, and that it kept what it promised.
fn survives(group: &Group, dir: &Path, tokens: usize, more: &str) -> Value {
    let line = "run --json --model model --ids ids.json --temperature 1 --seed 3 --max-tokens";
    let output = group.run(dir, &format!("{line} {tokens} {more}"));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&answer["finish"], ids(&answer["ids"]).len()), (&"length".into(), tokens));
    let stats = &answer["stats"];
    let (budget, peak) = (count(stats, "/memory/budget"), count(stats, "/memory/peak_anonymous"));
    assert!(peak <= budget && budget <= LIMIT, "{}", stats["memory"]);
    let terms = stats["memory"]["terms"].as_object().unwrap();
    let sum: u64 = terms.values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert!(sum <= budget, "{}", stats["memory"]);
    match group.peak() {
        Ok(peak) => assert!(peak <= LIMIT, "the group had {peak} bytes"),
        Err(error) => println!("the group's peak is not told: {error}"),
    }
    let misses = count(stats, "/experts/misses");
    assert!(misses > 0 && count(stats, "/experts/evictions") > 0, "{}", stats["experts"]);
    assert_eq!(count(stats, "/io/bytes"), misses * EXPERT);
    answer
}

#[test]
fn a_model_larger_than_its_control_group_runs_within_it() {
    let Some(group) = Group::new(LIMIT) else { return };
    let dir = fat();
    let answer = survives(&group, dir.path(), 201, "");
    let memory = &answer["stats"]["memory"];
    let source = memory["source"].as_str().unwrap();
    assert!(source.contains(group.dir.to_str().unwrap()), "{source}");
    let cap = count(&answer["stats"], "/experts/cap");
    assert!(cap > 4 && cap < 64, "the cap follows from the group: {cap}");

    // A lower budget of the user's own holds as well, and moves bytes only.
    let less = survives(&group, dir.path(), 64, "--ram 300M --prefill-chunk 64 --context 1024");
    assert_eq!(less["stats"]["memory"]["source"], "demanded");
    assert!(count(&less["stats"], "/experts/cap") < cap);
    assert_eq!(ids(&less["ids"]), ids(&answer["ids"])[..64]);

    // What the group does not allow is refused, and so is a cap that does not fit.
    for (more, part) in [("--ram 800M", "control group"), ("--cap 64", "cap 64 does not fit")] {
        let output = group.run(dir.path(), &format!("run --json --model model --ids ids.json {more}"));
        assert_eq!(output.status.code(), Some(4), "{output:?}");
        let error: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(error["error"]["kind"], "budget");
        assert!(error["error"]["message"].as_str().unwrap().contains(part), "{error}");
    }
}

/// Others in the group take half of it while a prompt is computed and answered: nobody is killed, and the ids
/// stay.
#[test]
fn neighbours_in_the_group_may_take_memory_while_it_runs() {
    let Some(group) = Group::new(LIMIT) else { return };
    let dir = fat();
    let line =
        "run --json --model model --ids ids.json --temperature 1 --seed 3 --max-tokens 300 --context 1024";
    // An explicit budget is the user's word, as long as there is so much. What is locked must not stay, and what an
    // accelerator knows must leave it first.
    for more in ["", "--ram 600M --mlock on", "--device sim"] {
        // tail keeps all that it is given: 100 MB a second, 350 MB in all, for as long as its input lasts.
        let hog = "(for i in $(seq 35); do head -c 10000000 /dev/zero; sleep 0.1; done; cat) | tail -c 400000000 | wc -c";
        let mut hog = group.command(hog);
        let mut hog = hog.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = group.run(dir.path(), &format!("{line} {more}"));
        drop(hog.stdin.take());
        let held = hog.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&held.stdout).trim(), "350000000", "the neighbour was killed");
        assert_eq!(output.status.code(), Some(0), "{more}: {output:?}");
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let notices = answer["stats"]["notices"].to_string();
        assert!(notices.contains("memory is short"), "{notices}");
        assert_eq!(count(&answer["stats"], "/memory/locked_bytes") > 0, more.contains("--mlock"), "{more}");
        let exact = if more == "--device sim" {
            let residency = &answer["stats"]["residency"];
            assert!(count(residency, "/unregistered") > 0, "{residency}");
            assert_eq!(count(residency, "/unregister_refused"), 0, "{residency}");
            "--exact"
        } else {
            ""
        };
        let alone = program::run(dir.path(), &format!("{line} --cap 8 {exact}")).expect(0).json();
        assert_eq!(answer["ids"], alone["ids"], "{more}");
    }
}

#[test]
fn a_group_smaller_than_the_dense_part_is_refused_with_the_sum() {
    let Some(group) = Group::new(96 * MIB) else { return };
    let dir = tempfile::tempdir().unwrap();
    program::run(dir.path(), "synth model --like fat --layers 1 --experts 4").expect(0);
    ids_file(dir.path(), &[1]);
    let output = group.run(dir.path(), "run --json --model model --ids ids.json");
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    let error: Value = serde_json::from_slice(&output.stdout).unwrap();
    let message = error["error"]["message"].as_str().unwrap();
    for part in ["program", "dense", "kv", "scratch", "sum", "limit", "missing", "control group"] {
        assert!(message.contains(part), "{part}: {message}");
    }
}
