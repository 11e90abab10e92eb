//! What becomes of the file that `--usage` names, whatever it is, and of runs that share it.
#![cfg(target_os = "linux")]

#[path = "support/program.rs"]
mod program;

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use program::{contents, run, tiny};
use serde_json::json;
use tempfile::TempDir;

const RUN: &str = "run --model model --ids ids.json --max-tokens 12 --ram 256M --json --usage";

/// A tiny model with ids to continue.
fn model() -> TempDir {
    let dir = tiny("slab");
    let ids = json!({"ids": (1..20).collect::<Vec<u32>>()});
    fs::write(dir.path().join("ids.json"), ids.to_string()).unwrap();
    dir
}

fn selections(dir: &Path, usage: &str) -> u64 {
    let shown = run(dir, &format!("usage show --model model --json --usage {usage}")).expect(0).json();
    shown["selections"].as_u64().unwrap()
}

#[test]
fn what_is_no_profile_stays_what_it_is() {
    let dir = model();
    let path = dir.path().join("u");
    for text in ["my thesis", "MTUSAG", "\0\0\0\0\0\0\0\0\0\0\0\0"] {
        fs::write(&path, text).unwrap();
        for way in ["u", "read-only:u"] {
            let refused = run(dir.path(), &format!("{RUN} {way}")).expect(2);
            assert!(refused.error().contains("u is no usage profile"), "{}", refused.stdout);
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    run(dir.path(), &format!("{RUN} u")).expect(2);
    fs::remove_dir(&path).unwrap();
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    run(dir.path(), &format!("{RUN} u")).expect(2);
    assert!(fs::metadata(&path).unwrap().file_type().is_fifo());
    fs::remove_file(&path).unwrap();
    // A device of our own, where this process may make one: never the machine's.
    let made = Command::new("mknod").arg(&path).args(["c", "1", "3"]).stderr(Stdio::null()).status();
    if made.is_ok_and(|status| status.success()) {
        for line in [format!("{RUN} u"), "usage export u --model model --usage absent".to_owned()] {
            run(dir.path(), &line).expect(2);
            assert!(fs::metadata(&path).unwrap().file_type().is_char_device(), "{line}");
        }
    }
    let names: Vec<String> = contents_of(dir.path());
    assert!(!names.iter().any(|name| name.contains("old") || name.contains("tmp")), "{names:?}");
}

fn contents_of(dir: &Path) -> Vec<String> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn what_was_set_aside_is_not_overwritten() {
    let dir = model();
    let path = dir.path().join("u");
    run(dir.path(), &format!("{RUN} u")).expect(0);
    let whole = fs::read(&path).unwrap();
    fs::write(dir.path().join("u.old"), "notes").unwrap();
    for length in [whole.len() / 2, whole.len() / 3] {
        fs::write(&path, &whole[..length]).unwrap();
        run(dir.path(), &format!("{RUN} u")).expect(0);
    }
    let there = |name: &str| fs::read(dir.path().join(name)).unwrap();
    assert_eq!(there("u.old"), b"notes");
    assert_eq!(there("u.old.2"), &whole[..whole.len() / 2]);
    assert_eq!(there("u.old.3"), &whole[..whole.len() / 3]);
    assert_eq!(there("u"), whole);
}

#[test]
fn a_link_stays_a_link_and_the_file_behind_it_is_written() {
    let dir = model();
    let (kept, link) = (dir.path().join("kept"), dir.path().join("u"));
    fs::create_dir(&kept).unwrap();
    symlink("kept/first", &link).unwrap();
    // Behind the link there is nothing yet, then a profile, then a damaged one.
    run(dir.path(), &format!("{RUN} u")).expect(0);
    let once = selections(dir.path(), "kept/first");
    assert!(once > 0);
    fs::set_permissions(kept.join("first"), fs::Permissions::from_mode(0o600)).unwrap();
    run(dir.path(), &format!("{RUN} u")).expect(0);
    assert_eq!(selections(dir.path(), "kept/first"), 2 * once);
    assert_eq!(fs::metadata(kept.join("first")).unwrap().permissions().mode() & 0o7777, 0o600);
    let whole = fs::read(kept.join("first")).unwrap();
    fs::write(kept.join("first"), &whole[..40]).unwrap();
    run(dir.path(), &format!("{RUN} u")).expect(0);
    assert_eq!(fs::read_link(&link).unwrap(), Path::new("kept/first"));
    assert_eq!(selections(dir.path(), "u"), once);
    assert_eq!(contents(&kept).into_keys().collect::<Vec<_>>(), ["first", "first.old"]);
    assert_eq!(fs::metadata(kept.join("first.old")).unwrap().permissions().mode() & 0o7777, 0o600);
    // Round and round.
    symlink("b", dir.path().join("a")).unwrap();
    symlink("a", dir.path().join("b")).unwrap();
    run(dir.path(), &format!("{RUN} a")).expect(2);
}

#[test]
fn in_the_usual_place_what_is_no_profile_costs_a_notice() {
    let dir = model();
    let call = || {
        let mut command = program::program(dir.path());
        command.env("XDG_STATE_HOME", dir.path().join("state"));
        let output = command.args(RUN.trim_end_matches(" --usage").split_whitespace()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    call();
    let place = dir.path().join("state/metaltail/usage");
    let file = place.join(&contents_of(&place)[0]);
    fs::write(&file, "my thesis").unwrap();
    let told = call();
    assert!(told.contains("no usage profile") && told.contains("not recorded"), "{told}");
    assert_eq!((fs::read_to_string(&file).unwrap(), contents_of(&place).len()), ("my thesis".into(), 1));
}

#[test]
fn runs_at_the_same_time_lose_nothing_of_each_other() {
    let dir = model();
    run(dir.path(), &format!("{RUN} one")).expect(0);
    let once = selections(dir.path(), "one");
    for round in 1..=3 {
        let runs: Vec<_> = (0..4)
            .map(|_| {
                let mut command = Command::new(env!("CARGO_BIN_EXE_metaltail"));
                command.args(RUN.split_whitespace()).arg("u").env_clear().current_dir(&dir);
                command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
            })
            .collect();
        for mut child in runs {
            assert!(child.wait().unwrap().success());
        }
        assert_eq!(selections(dir.path(), "u"), round * 4 * once);
    }
    let mut names = contents_of(dir.path());
    names.sort();
    assert_eq!(names, ["ids.json", "model", "one", "u"], "nothing is left behind");
}
