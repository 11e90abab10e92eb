//! Profiles: counting, fading, files that are damaged, foreign, full or killed, histories, pins.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use proptest::prelude::*;

use super::pin::{PinRoom, SHARES, choose};
use super::*;
use crate::policy::PolicyKind;

/// Layers 1 and 2 of 8 experts, 3 of 4; two chosen of each.
fn identity() -> UsageIdentity {
    UsageIdentity { layers: vec![(1, 8), (2, 8), (3, 4)], top_k: 2, checkpoint: 7 }
}

fn rows(chosen: &[[u32; 2]]) -> Vec<Vec<(u32, f32)>> {
    chosen.iter().map(|row| row.iter().map(|&expert| (expert, 0.5)).collect()).collect()
}

fn recorder(path: &Path) -> UsageRecorder {
    let (recorder, problem) = UsageRecorder::open(path, identity(), true).unwrap();
    assert!(problem.is_none(), "{problem:?}");
    recorder
}

/// One token that chooses experts `e` and `e + 1` in all layers.
fn token(recorder: &UsageRecorder, e: u32) {
    for layer in [1, 2, 3] {
        recorder.record(layer, &rows(&[[e, e + 1]]));
    }
}

fn place() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state/m.usage");
    (dir, path)
}

#[test]
fn counts_sum_to_the_selections() {
    let (_dir, path) = place();
    let recorder = recorder(&path);
    recorder.record(1, &rows(&[[0, 1], [1, 2], [7, 1]]));
    recorder.record(2, &rows(&[[0, 1], [1, 2], [7, 1]]));
    recorder.record(3, &rows(&[[0, 1], [1, 2], [3, 1]]));
    recorder.record(9, &rows(&[[0, 1]]));
    recorder.save(true).unwrap();
    let profile = read_profile(&path).unwrap();
    assert_eq!((profile.selections(), profile.weight()), (18, 18));
    assert_eq!(profile.selections(), 3 * profile.identity().selections_per_token());
    assert_eq!((profile.count(1, 1), profile.count(3, 3), profile.count(3, 4)), (3.0, 1.0, 0.0));
    assert_eq!(profile.sampled(), 3);
    assert_eq!(profile.hottest(&[1, 1, 1])[..3], [(1, 1), (2, 1), (3, 1)]);
    // Twice the bytes for as many uses: last.
    assert_eq!(profile.hottest(&[2, 1, 1])[..2], [(2, 1), (3, 1)]);
}

#[test]
fn old_uses_weigh_half_after_the_half_life() {
    let mut profile = UsageProfile::new(identity());
    let uses = |expert: usize, n: u64| {
        let mut pending = Pending::new(&identity());
        pending.counts[expert] = n;
        pending.selections = n;
        pending
    };
    profile.absorb(&uses(0, 1000));
    profile.absorb(&uses(1, identity().half_life()));
    assert_eq!((profile.count(1, 0), profile.count(1, 1)), (500.0, identity().half_life() as f64));
    // Many small steps fade as one does, within the rounding of the fixed point.
    let (mut once, mut often) = (profile.clone(), profile);
    once.absorb(&uses(2, 2000));
    (0..2000).for_each(|_| often.absorb(&uses(2, 1)));
    assert!((once.count(1, 0) - often.count(1, 0)).abs() < 0.2);
    assert_eq!(once.selections(), often.selections());
}

#[test]
fn the_sample_keeps_the_last_tokens_and_some_of_a_prompt() {
    let (_dir, path) = place();
    let recorder = recorder(&path);
    let prompt: Vec<[u32; 2]> = (0..100).map(|i| [i % 3, 3]).collect();
    for layer in [1, 2, 3] {
        recorder.record(layer, &rows(&prompt));
    }
    assert_eq!(recorder.lock().pending.sample.tokens.len(), STEP_TOKENS);
    // A step that was cut short leaves no token, and its selections count.
    recorder.record(1, &rows(&[[4, 5]]));
    recorder.record(3, &rows(&[[1, 2]]));
    assert_eq!(recorder.lock().pending.sample.tokens.len(), STEP_TOKENS);
    assert_eq!(recorder.unsaved(), 604);
    (0..300).for_each(|_| token(&recorder, 2));
    let last = recorder.lock().pending.sample.tokens.clone();
    assert_eq!(last.len(), SAMPLE_TOKENS);
    assert!(last.iter().all(|token| **token == [2, 3, 2, 3, 2, 3]));
}

#[test]
fn runs_add_up_and_two_at_a_time_lose_nothing() {
    let (_dir, path) = place();
    let (first, second) = (recorder(&path), recorder(&path));
    token(&first, 0);
    token(&second, 2);
    first.save(false).unwrap();
    second.save(false).unwrap();
    token(&first, 0);
    first.save(true).unwrap();
    first.save(true).unwrap();
    let profile = read_profile(&path).unwrap();
    assert_eq!((profile.selections(), profile.sampled()), (18, 3));
    assert!(profile.count(1, 0) > 1.9 && profile.count(1, 2) > 0.9);
}

#[test]
fn read_only_never_writes() {
    let (_dir, path) = place();
    let (recorder, _) = UsageRecorder::open(&path, identity(), false).unwrap();
    token(&recorder, 0);
    recorder.save(true).unwrap();
    assert!(!path.exists() && !path.parent().unwrap().exists());
}

#[test]
fn what_cannot_be_read_is_told_begun_anew_and_set_aside() {
    let (_dir, path) = place();
    let saved = recorder(&path);
    token(&saved, 0);
    saved.save(true).unwrap();
    let whole = fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    let mut newer = whole.clone();
    newer[8] = 2;
    let mut aside = Vec::new();
    for (bytes, word) in [
        (whole[..whole.len() - 9].to_vec(), "ends early"),
        (flipped, "damaged"),
        ([&whole[..], b"x"].concat(), "wanted"),
        (newer, "version 2"),
        (Vec::new(), "it is empty"),
    ] {
        fs::write(&path, &bytes).unwrap();
        let (recorder, problem) = UsageRecorder::open(&path, identity(), true).unwrap();
        let problem = problem.unwrap().to_string();
        assert!(problem.contains(word) && problem.contains("m.usage"), "{problem}");
        assert_eq!(recorder.base().selections(), 0);
        // Nothing new: the file is left alone.
        recorder.save(true).unwrap();
        assert_eq!(fs::read(&path).unwrap(), bytes);
        // Layer 3 has no expert 4: that is neither counted nor sampled.
        token(&recorder, 3);
        recorder.save(true).unwrap();
        assert_eq!(read_profile(&path).unwrap().selections(), 5);
        aside.push(bytes);
        // None of those that were set aside before is touched.
        for (number, bytes) in (1..).zip(&aside) {
            let name = if number == 1 { "m.usage.old".to_owned() } else { format!("m.usage.old.{number}") };
            assert_eq!(fs::read(path.with_file_name(name)).unwrap(), *bytes);
        }
    }
    let other = UsageIdentity { checkpoint: 8, ..identity() };
    let (_, problem) = UsageRecorder::open(&path, other, true).unwrap();
    assert!(problem.unwrap().to_string().contains("another model: wanted checkpoint 0000000000000008"));
    let other = UsageIdentity { top_k: 3, ..identity() };
    let (_, problem) = UsageRecorder::open(&path, other, true).unwrap();
    assert!(problem.unwrap().to_string().contains("20 experts, 3 a token"));
}

#[test]
fn what_is_no_profile_is_never_touched() {
    let (_dir, path) = place();
    let recorder = recorder(&path);
    token(&recorder, 0);
    // Put there after the opening, when it is too late to refuse the run.
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, "my thesis").unwrap();
    assert!(matches!(recorder.save(true), Err(UsageError::Foreign { .. })));
    assert!(matches!(UsageRecorder::open(&path, identity(), true), Err(UsageError::Foreign { .. })));
    assert_eq!((fs::read(&path).unwrap(), recorder.unsaved()), (b"my thesis".to_vec(), 6));
    fs::remove_file(&path).unwrap();
    assert_eq!(recorder.save(true).unwrap(), Saved::Added);
    assert_eq!(read_profile(&path).unwrap().selections(), 6);
}

#[test]
fn many_that_save_at_once_lose_nothing() {
    let (_dir, path) = place();
    let start = std::sync::Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let recorder = recorder(&path);
                start.wait();
                for e in [0, 1, 2, 1] {
                    token(&recorder, e);
                    assert_eq!(recorder.save(false).unwrap(), Saved::Added);
                }
            });
        }
    });
    assert_eq!(read_profile(&path).unwrap().selections(), 8 * 4 * 6);
}

#[test]
fn a_lock_that_is_never_let_go_is_not_waited_for_long() {
    let (_dir, path) = place();
    let held = ProfileLock::take(&path).unwrap();
    assert!(!held.is_late());
    let late = ProfileLock::take_within(&path, Duration::from_millis(30)).unwrap();
    assert!(late.is_late());
    let recorder = recorder(&path);
    token(&recorder, 0);
    assert_eq!(recorder.save(false).unwrap(), Saved::Unlocked);
    drop(held);
    assert!(!ProfileLock::take(&path).unwrap().is_late());
    assert_eq!(read_profile(&path).unwrap().selections(), 6);
}

#[test]
fn a_full_disk_leaves_the_old_file_and_what_is_new_is_saved_later() {
    if !Path::new("/dev/full").exists() {
        return;
    }
    let (_dir, path) = place();
    let recorder = recorder(&path);
    token(&recorder, 0);
    recorder.save(true).unwrap();
    let before = fs::read(&path).unwrap();
    let full = |_: &Path| fs::OpenOptions::new().write(true).open("/dev/full");
    let error = replace::replace_by(&path, b"new", true, full).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    assert_eq!(fs::read(&path).unwrap(), before);
    // A directory where the temporary file should be stands for a disk that refuses.
    let mut blocked = path.clone().into_os_string();
    blocked.push(format!(".tmp-{}", std::process::id()));
    fs::create_dir(&blocked).unwrap();
    token(&recorder, 2);
    let error = recorder.save(true).unwrap_err().to_string();
    assert!(error.contains("m.usage") && error.contains("unchanged"), "{error}");
    assert_eq!((fs::read(&path).unwrap(), recorder.unsaved()), (before, 6));
    fs::remove_dir(&blocked).unwrap();
    recorder.save(true).unwrap();
    let profile = read_profile(&path).unwrap();
    assert_eq!((profile.selections(), profile.sampled()), (12, 2));
}

#[test]
fn temporary_files_of_killed_runs_are_swept_when_they_are_old() {
    let (_dir, path) = place();
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let name = |end: &str| path.with_file_name(format!("m.usage{end}"));
    for end in [".tmp-1", ".tmp-2", ".tmp-notes"] {
        fs::write(name(end), "x").unwrap();
    }
    let old = std::time::SystemTime::now() - Duration::from_secs(7200);
    for end in [".tmp-1", ".tmp-notes"] {
        fs::File::options().write(true).open(name(end)).unwrap().set_modified(old).unwrap();
    }
    write_profile(&path, &UsageProfile::new(identity())).unwrap();
    let left = [".tmp-1", ".tmp-2", ".tmp-notes"].map(|end| name(end).exists());
    assert_eq!(left, [false, true, true]);
}

/// Saves until it is killed; nothing without the variable that the test below sets.
#[test]
fn child_that_saves_for_ever() {
    let Some(path) = std::env::var_os("USAGE_TEST_CHILD") else { return };
    let recorder = UsageRecorder::open(Path::new(&path), identity(), true).unwrap().0;
    for e in (0..3).cycle() {
        token(&recorder, e);
        recorder.save(e == 0).unwrap();
    }
}

#[test]
fn a_kill_at_any_moment_leaves_the_old_or_the_new_file() {
    let (_dir, path) = place();
    let mut last = 0;
    for round in 0..12u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "usage::tests::child_that_saves_for_ever"])
            .env("USAGE_TEST_CHILD", &path)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // It must have saved at least once for the kill to mean something.
        while !path.exists() || read_profile(&path).unwrap().selections() == last {
            assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_micros(round * 977 % 5000));
        child.kill().unwrap();
        child.wait().unwrap();
        let profile = read_profile(&path).unwrap();
        assert!(profile.selections() > last && profile.selections().is_multiple_of(6));
        last = profile.selections();
    }
}

#[test]
fn a_history_goes_in_and_comes_out() {
    let model = ColiModel { layers: 4, experts: 8, family: "glm_moe_dsa" };
    let text = format!("-1 4 8\n-2 1 {}\n1 3 10\n2 0 1\n3 3 4\n", 0xa81e_8a2d_u32);
    let mut usage = ColiUsage::parse(&text).unwrap();
    usage.engine = Some((1, usage.engine.unwrap().1));
    let mut profile = UsageProfile::new(identity());
    assert_eq!(profile.add_coli(&usage, &model).unwrap(), 15);
    assert_eq!(profile.count(1, 3), 10.0);
    let out = profile.to_coli(&model);
    assert!(out.starts_with("-1 4 8\n-2 1 ") && out.ends_with("1 3 10\n2 0 1\n3 3 4\n"), "{out}");
    let again = ColiUsage::parse(&out).unwrap();
    assert_eq!(again.counts, usage.counts);
    assert!(again.other_engine(&model).is_none());
    let other = ColiModel { family: "olmoe", ..model };
    assert!(again.other_engine(&other).unwrap().contains("olmoe"));
    assert_eq!(UsageProfile::new(identity()).to_coli(&model), "");
    // No head, and the draft layer's uses.
    let old = ColiUsage::parse("1 3 10\n\n4 1 7\n").unwrap();
    let mut profile = UsageProfile::new(identity());
    assert_eq!(profile.add_coli(&old, &model).unwrap(), 10);
    // A long history weighs as much as the half-life, its shares kept.
    let long = ColiUsage::parse("1 0 4000000000\n1 1 2000000000\n").unwrap();
    let mut profile = UsageProfile::new(identity());
    assert_eq!(profile.add_coli(&long, &model).unwrap(), identity().half_life());
    assert!((profile.count(1, 0) / profile.count(1, 1) - 2.0).abs() < 1e-3);
}

#[test]
fn a_history_that_does_not_fit_is_refused_with_what_differs() {
    let model = ColiModel { layers: 4, experts: 8, family: "glm_moe_dsa" };
    let mut profile = UsageProfile::new(identity());
    for (text, word) in [
        ("-1 5 8\n1 0 1\n", "5 layers of 8 experts, the model 4 of 8"),
        ("-2 2 0\n1 0 1\n", "version 2, wanted 1"),
        ("0 0 1\n", "layer 0, which has none"),
        ("3 4 1\n", "expert 4 of layer 3, which has 4"),
    ] {
        let usage = ColiUsage::parse(text).unwrap();
        let error = profile.add_coli(&usage, &model).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    assert_eq!(profile.weight(), 0);
    for text in ["1 2\n", "1 2 x\n", "1 2 -3\n", "-3 1 1\n", "1 2 3 4\n"] {
        assert!(ColiUsage::parse(text).unwrap_err().to_string().starts_with("line 1: "), "{text}");
    }
}

#[test]
fn a_pin_file_is_what_it_looks_like() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pins");
    let read = |text: &[u8]| {
        fs::write(&path, text).unwrap();
        PinFile::read(&path)
    };
    let list = read(b"# hot\n1 2\n\n3 0\n1 2\n").unwrap();
    assert_eq!(list, PinFile::Experts(vec![(1, 2), (3, 0)]));
    assert!(matches!(read(b"1 2 3\n").unwrap(), PinFile::History(_)));
    assert!(matches!(read(b"-1 4 8\n").unwrap(), PinFile::History(_)));
    assert!(read(b"1 2\n1 2 3\n").unwrap_err().to_string().contains("line 2"));
    assert!(read(&[0xff, 0]).is_err());
    let profile = UsageProfile::new(identity());
    write_profile(&path, &profile).unwrap();
    assert_eq!(PinFile::read(&path).unwrap(), PinFile::Profile(profile));
}

/// A profile of `tokens` tokens, token `t` choosing `of(t)` in all layers.
fn used(tokens: u32, of: impl Fn(u32) -> u32) -> UsageProfile {
    let (_dir, path) = place();
    let recorder = recorder(&path);
    (0..tokens).for_each(|t| token(&recorder, of(t)));
    recorder.save(false).unwrap();
    read_profile(&path).unwrap()
}

fn room(bytes: u64) -> PinRoom {
    PinRoom { slot_bytes: vec![10; 3], room: bytes, policy: PolicyKind::Lru, pool: true }
}

#[test]
fn pins_are_chosen_where_a_cache_is_swept() {
    // LRU sweeps itself below a token's experts (60 bytes a token): whatever is pinned is found.
    let plan = choose(&used(128, |t| if t % 4 == 3 { 2 } else { 0 }), &room(40));
    assert_eq!(plan.candidates.len(), SHARES.len());
    assert_eq!((plan.candidates[0].experts, plan.candidates[0].hits), (0, 0));
    assert!(plan.bytes >= 30 && plan.pinned.len() as u64 * 10 == plan.bytes, "{plan:?}");
    assert!(plan.pinned.iter().all(|&(_, expert)| expert < 2), "{plan:?}");
    assert_eq!((plan.judged, plan.candidates[0].selections), (64, 64 * 6));
}

#[test]
fn ties_go_to_less_pinned_and_a_short_sample_pins_nothing() {
    // Everything fits, so pinning gains nothing.
    let plan = choose(&used(128, |_| 0), &room(1000));
    assert_eq!((plan.bytes, plan.pinned.len()), (0, 0));
    let plan = choose(&used(40, |_| 0), &room(40));
    assert_eq!((plan.bytes, plan.candidates.len(), plan.judged), (0, 0, 20));
}

#[test]
fn the_judgement_does_not_look_ahead() {
    // The second half, which is judged, uses other experts than all before: pinning what the first half used
    // cannot help, and pinning what the second used is not thought of.
    let plan = choose(&used(128, |t| if t < 64 { 0 } else { 2 }), &room(40));
    assert!(plan.candidates.iter().all(|candidate| candidate.hits == 0), "{plan:?}");
    assert_eq!(plan.bytes, 0);
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_read_back_the_same(bytes in prop::collection::vec(any::<u8>(), 0..400), cut in 0usize..700) {
        let mut whole = file::encode(&used(3, |t| t));
        // Random bytes behind a sound beginning reach deeper than random bytes alone.
        let at = cut.min(whole.len());
        whole.truncate(at);
        whole.extend(&bytes);
        if let Ok(profile) = file::decode(Path::new("f"), &whole) {
            prop_assert_eq!(file::encode(&profile), whole);
        }
        let _ = PinFile::read(Path::new("/nowhere"));
    }

    #[test]
    fn a_file_is_read_as_it_was_written(tokens in prop::collection::vec(0u32..3, 1..300)) {
        let profile = used(tokens.len() as u32, |t| tokens[t as usize]);
        prop_assert_eq!(file::decode(Path::new("f"), &file::encode(&profile)).unwrap(), profile);
    }
}
