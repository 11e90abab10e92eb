//! `metaltail plan`, from outside.

#[path = "support/program.rs"]
mod program;

use std::fs;

use program::{edit_json, run, tiny};
use serde_json::Value;

const TERMS: [&str; 6] = ["program", "dense", "kv", "scratch", "in_flight", "cached"];

#[test]
fn every_term_is_there_and_they_add_up() {
    let dir = tiny("slab");
    let plan = run(dir.path(), "plan model --ram 256M --json").expect(0).json();
    let terms = plan["memory"]["terms"].as_object().unwrap();
    for name in TERMS {
        assert!(terms.contains_key(name), "{name}: {terms:?}");
    }
    let sum: u64 = terms.values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert_eq!(plan["memory"]["sum"], sum);
    assert_eq!(plan["memory"]["budget"], 256 << 20);
    assert!(sum <= 256 << 20);
    assert_eq!(plan["experts"]["cap"], 8, "all experts fit");
    assert_eq!(plan["experts"]["slots"], 24);
    assert_eq!(plan["token"]["expected_hit_rate"], 1.0);
    assert_eq!(plan["token"]["expected_read_bytes"], 0.0);
    assert_eq!(plan["bound"]["resource"], "memory");
    assert!(plan["bound"]["tokens_per_second"].as_f64().unwrap() > 0.0);
}

#[test]
fn pins_that_are_demanded_come_out_of_what_is_cached() {
    let dir = tiny("slab");
    let terms = |more: &str| {
        let plan = run(dir.path(), &format!("plan model --json {more}")).expect(0).json();
        let bytes = |name: &str| plan["memory"]["terms"][name].as_u64().unwrap_or(0);
        (bytes("pinned"), bytes("cached"), plan["memory"]["sum"].as_u64().unwrap())
    };
    let sum = terms("--ram 256M --context 512").2;
    let (_, cached, _) = terms(&format!("--ram {sum} --context 512"));
    let (pinned, less, whole) = terms(&format!("--ram {sum} --context 512 --pin-size {}", cached / 2));
    assert_eq!(pinned, cached / 2);
    assert!(less <= cached / 2 && whole <= sum, "{less} of {cached}, {whole} of {sum}");
    assert_eq!(terms(&format!("--ram {sum} --context 512 --pin off --pin-size 0")).0, 0);
    run(dir.path(), "plan model --json --ram 256M --pin-size 300M").expect(4);
}

#[test]
fn people_see_every_term_too() {
    let dir = tiny("slab");
    let text = run(dir.path(), "plan --model model --ram 256M").expect(0).stdout;
    for part in TERMS.into_iter().chain(["sum", "limit", "left", "bound: at most"]) {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_budget_that_cannot_hold_the_model_is_refused_with_the_sum() {
    let dir = tiny("slab");
    let refused = run(dir.path(), "plan model --ram 1M --json").expect(4);
    let error = refused.error();
    for part in ["dense", "kv", "scratch", "sum", "limit", "1.0 MiB", "missing"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(refused.json()["error"]["kind"], "budget");
    let refused = run(dir.path(), "plan model --ram 1000000G --json").expect(4);
    assert!(refused.error().contains("dense"), "{}", refused.stdout);
}

#[test]
fn a_smaller_cap_reads_the_share_that_it_lacks() {
    let dir = tiny("slab");
    let plan = run(dir.path(), "plan model --ram 256M --cap 2 --json").expect(0).json();
    assert_eq!(plan["experts"]["slots"], 6);
    assert_eq!(plan["token"]["expected_hit_rate"], 0.25);
    let uncached = plan["token"]["uncached_read_bytes"].as_f64().unwrap();
    assert_eq!(plan["token"]["expected_read_bytes"], 0.75 * uncached);
    let notices = plan["notices"].to_string();
    assert!(notices.contains("equally often"), "{notices}");
    let none = run(dir.path(), "plan model --ram 256M --cap 0 --json").expect(0).json();
    assert_eq!(none["token"]["expected_read_bytes"], uncached);
    assert!(none["notices"].to_string().contains("below the 2 experts"), "{}", none["notices"]);
}

#[test]
fn a_config_alone_is_planned_as_its_conversion_would_be() {
    let dir = tiny("hf");
    run(dir.path(), "convert model slab").expect(0);
    fs::create_dir(dir.path().join("bare")).unwrap();
    fs::copy(dir.path().join("model/config.json"), dir.path().join("bare/config.json")).unwrap();
    let line = |path: &str| format!("plan {path} --ram 256M --threads 1 --json");
    let converted = run(dir.path(), &line("slab")).expect(0).json();
    for path in ["bare/config.json", "bare"] {
        let bare = run(dir.path(), &line(path)).expect(0).json();
        assert_eq!(bare["memory"], converted["memory"], "{path}");
        assert_eq!(bare["experts"], converted["experts"], "{path}");
        assert_eq!(bare["token"], converted["token"], "{path}");
        assert_eq!(bare["assumed_formats"]["experts"], "int4-g64");
        assert_eq!(bare["kind"], Value::Null);
        assert_eq!(bare["bound"]["drive_gb_per_second"], Value::Null);
        assert!(bare["notices"].to_string().contains("int4-g64"), "{}", bare["notices"]);
    }
    assert_eq!(converted["assumed_formats"], Value::Null);
}

#[test]
fn what_cannot_be_planned_is_refused() {
    let dir = tiny("hf");
    run(dir.path(), "plan nowhere --json").expect(3);
    run(dir.path(), "plan model --context 100000000 --json").expect(2);
    edit_json(&dir.path().join("model/config.json"), |config| config["model_type"] = "mamba".into());
    run(dir.path(), "plan model/config.json --json").expect(3);
}
