//! `--device`, from outside.

#[path = "support/models.rs"]
mod models;
#[path = "support/program.rs"]
mod program;

use models::ask;
use program::{run, tiny};

const QUESTION: &str = "Define \"hummingbird\".";

/// The answer of the demo model.
fn answer(more: &[&str]) -> serde_json::Value {
    ask(&[&[QUESTION, "--temperature", "0", "--max-tokens", "24"], more].concat())
}

#[test]
fn the_demo_model_answers_the_same_on_the_simulated_device() {
    let cpu = answer(&["--device", "cpu", "--exact"]);
    assert!(cpu["stats"]["residency"]["mode"].is_null() && cpu["stats"]["device"]["stall_seconds"].is_null());
    for (how, slabs, cap) in [("set", "arena", "64"), ("walk", "per-expert", "6"), ("set", "per-expert", "1")]
    {
        let sim = answer(&["--device", "sim", "--residency", how, "--slab-allocation", slabs, "--cap", cap]);
        assert_eq!(sim["ids"], cpu["ids"], "{how} {slabs} cap {cap}");
        let (device, residency) = (&sim["stats"]["device"], &sim["stats"]["residency"]);
        assert_eq!((device["name"].as_str(), residency["mode"].as_str()), (Some("sim"), Some(how)));
        // Every look-up was computed there, none of it by something else.
        assert_eq!(device["experts"], sim["stats"]["experts"]["lookups"]);
        assert_eq!(device["fallbacks"], 0);
        assert!(device["kernel_seconds"].as_f64().unwrap() > 0.0);
        assert!(device["submissions"].as_u64().unwrap() > 0);
        let declared = residency["declared_per_submit"].as_f64().unwrap();
        assert_eq!(declared > 0.0, how == "walk", "{residency}");
        assert_eq!(residency["sets"].as_u64().unwrap() > 0, how == "set", "{residency}");
        let config = &sim["stats"]["config"];
        assert_eq!(
            (&config["device"], &config["residency"], &config["slab_allocation"]),
            (&"sim".into(), &how.into(), &slabs.into())
        );
    }
}

#[test]
fn people_read_what_residency_cost() {
    let dir = tiny("slab");
    std::fs::write(dir.path().join("ids.json"), r#"{"ids": [1, 2, 3]}"#).unwrap();
    let line = "run --model model --ids ids.json --max-tokens 4 --ram 256M";
    let block = run(dir.path(), &format!("{line} --device sim")).expect(0).stderr;
    assert!(block.contains("\nresidency sim (") && block.contains("0 declared with each"), "{block}");
    let block = run(dir.path(), &format!("{line} --threads 1")).expect(0).stderr;
    assert!(!block.contains("\nresidency") && block.contains(" 1 thread, "), "{block}");
}

#[test]
fn experts_are_locked_in_memory_where_that_is_asked_for() {
    let dir = tiny("slab");
    std::fs::write(dir.path().join("ids.json"), r#"{"ids": [1, 2, 3]}"#).unwrap();
    let line = "run --model model --ids ids.json --max-tokens 4 --ram 256M --usage off";
    let json = |more: &str| run(dir.path(), &format!("{line} --json {more}")).expect(0).json();
    let (off, on) = (json(""), json("--mlock on"));
    assert_eq!(on["ids"], off["ids"]);
    let locked = |answer: &serde_json::Value| answer["stats"]["memory"]["locked_bytes"].as_u64().unwrap();
    let slots = |answer: &serde_json::Value| answer["stats"]["experts"]["misses"].as_u64().unwrap();
    // The tiny model's experts have a page at least: what was read lies in locked slots.
    assert!(locked(&off) == 0 && locked(&on) >= slots(&on) * 4096, "{on}");
    assert_eq!(
        (&off["stats"]["config"]["mlock"], &on["stats"]["config"]["mlock"]),
        (&"off".into(), &"on".into())
    );
    let block = run(dir.path(), &format!("{line} --mlock on")).expect(0).stderr;
    assert!(block.contains(" of experts locked"), "{block}");
}

#[test]
fn settings_of_a_device_are_noted_on_the_processor() {
    let dir = tiny("slab");
    std::fs::write(dir.path().join("ids.json"), r#"{"ids": [1, 2, 3]}"#).unwrap();
    let line = "run --model model --ids ids.json --max-tokens 1 --ram 256M";
    let noted = |more: &str| run(dir.path(), &format!("{line} {more}")).expect(0).stderr;
    for (flag, value) in [("--residency", "walk"), ("--slab-allocation", "per-expert")] {
        let text = noted(&format!("{flag} {value}"));
        assert!(text.contains(&format!("note: {flag} has no effect on the processor")), "{text}");
        let text = noted(&format!("{flag} {value} --device sim"));
        assert!(!text.contains("no effect"), "{text}");
    }
    assert!(!noted("").contains("no effect"));
}

#[test]
fn a_device_that_is_not_there_is_wrong_usage() {
    let dir = tiny("slab");
    std::fs::write(dir.path().join("ids.json"), r#"{"ids": [1, 2, 3]}"#).unwrap();
    for device in ["metal", "cuda", "gpu"] {
        let line = format!("run --model model --ids ids.json --device {device} --json");
        let refused = run(dir.path(), &line).expect(2);
        assert!(refused.error().contains("device"), "{}", refused.error());
    }
}

#[test]
fn a_device_that_there_is_not_is_refused_with_the_reason_and_never_replaced() {
    if cfg!(target_os = "macos") {
        return;
    }
    let dir = tiny("slab");
    std::fs::write(dir.path().join("ids.json"), r#"{"ids": [1, 2, 3]}"#).unwrap();
    for line in ["run --model model --ids ids.json", "plan model"] {
        let refused = run(dir.path(), &format!("{line} --device metal")).expect(2).stderr;
        assert!(
            refused.contains("--device metal cannot be had: Metal is a part of macOS"),
            "{line}: {refused}"
        );
    }
    let doctor = run(dir.path(), "doctor --device metal --json").expect(0).json();
    assert_eq!(doctor["accelerator"]["device"], "metal");
    assert!(doctor["accelerator"]["reason"].as_str().unwrap().contains("macOS"), "{doctor}");
    let found = doctor["findings"].as_array().unwrap();
    assert!(found.iter().any(|finding| finding["what"] == "the accelerator cannot be used"), "{found:?}");
    let refused = run(dir.path(), "bench kernels --device sim").expect(2).stderr;
    assert!(refused.contains("leave --device out"), "{refused}");
}

#[test]
fn plan_and_doctor_say_what_an_accelerator_keeps_resident() {
    let dir = tiny("slab");
    for line in ["plan model --json", "doctor --json"] {
        let none = run(dir.path(), line).expect(0).json();
        assert!(none["accelerator"].is_null() || cfg!(target_os = "macos"), "{none}");
        let told = run(dir.path(), &format!("{line} --device sim")).expect(0).json();
        let accelerator = &told["accelerator"];
        assert_eq!((&accelerator["device"], &accelerator["machine"]), (&"sim".into(), &"m5max-128".into()));
        assert!(accelerator["resident_bytes"].as_u64().unwrap() > 100 << 30, "{accelerator}");
        assert_eq!(accelerator["setting"], "iogpu.wired_limit_mb");
        assert!(
            accelerator["reason"].is_null() && accelerator["told"][0].as_str().unwrap().contains("simulated")
        );
    }
    let words = run(dir.path(), "plan model --device sim").expect(0).stdout;
    assert!(
        words.contains("accelerator sim (m5max-128): keeps ") && words.contains("this machine's processor")
    );
}
