//! Pipes, devices and directories where a file was meant: refused at once, with a sentence.
#![cfg(target_os = "linux")]

#[path = "support/program.rs"]
mod program;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use program::{Outcome, contents, program, tiny};

/// Runs the program, which must not take long.
fn soon(dir: &Path, line: &str) -> Outcome {
    let mut command = program(dir);
    command.args(line.split_whitespace()).timeout(Duration::from_secs(60));
    let output = command.output().unwrap();
    assert!(output.status.code().is_some(), "`{line}` does not end: {output:?}");
    Outcome {
        code: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn no_input_file_is_waited_for_or_read_without_end() {
    let dir = tiny("slab");
    fs::write(dir.path().join("ids.json"), "{\"ids\": [1, 2]}").unwrap();
    pipe(&dir.path().join("pipe"));
    std::os::unix::fs::symlink("pipe", dir.path().join("link")).unwrap();
    let run = "run --json --model model --ids ids.json --max-tokens 1 --ram 256M";
    for what in ["pipe", "link", "/dev/zero", "."] {
        for line in [
            format!("{run} --usage {what}"),
            format!("{run} --usage read-only:{what}"),
            format!("{run} --usage off --pin {what} --pin-size 64K"),
            format!("run --json --model model --ids {what}"),
            format!("score --json --model model --ids {what}"),
            format!("trace replay --json {what}"),
            format!("usage show --json --model model --usage {what}"),
            format!("usage import --json {what} --model model --usage u"),
            format!("usage export --json {what} --model model --usage u"),
            format!("bench plot --json {what} --plot p.svg"),
        ] {
            let refused = soon(dir.path(), &line).expect(2);
            assert!(refused.error().contains("not a regular file"), "{line}: {}", refused.stdout);
        }
    }
    assert!(!dir.path().join("u").exists());
}

#[test]
fn a_trace_that_no_memory_holds_is_refused_unread() {
    let dir = tempfile::tempdir().unwrap();
    fs::File::create(dir.path().join("t.csv")).unwrap().set_len(1 << 40).unwrap();
    let refused = soon(dir.path(), "trace replay t.csv --json").expect(2);
    assert!(refused.error().contains("longer than"), "{}", refused.stdout);
}

#[test]
fn convert_refuses_what_run_refuses() {
    let dir = tiny("hf");
    let model = dir.path().join("model");
    for name in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        let path = model.join(name);
        let before = fs::read(&path).ok();
        for what in ["pipe", "device", "directory"] {
            let _ = fs::remove_file(&path);
            match what {
                "pipe" => pipe(&path),
                "device" => std::os::unix::fs::symlink("/dev/zero", &path).unwrap(),
                _ => fs::create_dir(&path).unwrap(),
            }
            let refused = soon(dir.path(), "convert model slab --json").expect(3);
            let error = refused.error();
            assert!(error.contains(name) && error.contains("not a regular file"), "{what}: {error}");
            assert!(!dir.path().join("slab").exists());
            if what == "directory" {
                fs::remove_dir(&path).unwrap();
            }
        }
        let _ = fs::remove_file(&path);
        if let Some(before) = before {
            fs::write(&path, before).unwrap();
        }
    }
    // Larger than any: not one byte of it is read.
    fs::File::create(model.join("tokenizer.json")).unwrap().set_len(1 << 40).unwrap();
    let refused = soon(dir.path(), "convert model slab --json").expect(3);
    assert!(refused.error().contains("more than the cap"), "{}", refused.stdout);
    // A pipe among the files of a conversion that was begun.
    fs::remove_file(model.join("tokenizer.json")).unwrap();
    for name in ["manifest.json", "convert.json", "convert.json.partial", ".convert.lock"] {
        fs::create_dir(dir.path().join("slab")).unwrap();
        pipe(&dir.path().join("slab").join(name));
        let refused = soon(dir.path(), "convert model slab --json").expect(1);
        assert!(refused.error().contains("not a regular file"), "{name}: {}", refused.stdout);
        fs::remove_dir_all(dir.path().join("slab")).unwrap();
    }
    soon(dir.path(), "convert model slab --json").expect(0);
    assert!(contents(&dir.path().join("slab")).contains_key("manifest.json"));
}
