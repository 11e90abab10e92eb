//! `bench cap` over arms by script, and the record and plot of a sweep.

#[path = "support/fake.rs"]
mod fake;

use fake::{Fake, Script, arm, job};
use metaltail_bench::arm::ArmRecord;
use metaltail_bench::cap::{CapOptions, Claim, Sweep, sweep};
use metaltail_bench::harness::Arm;
use metaltail_bench::plot;
use metaltail_bench::record::{Record, Surroundings};
use serde_json::{Value, json};

const CAPS: [usize; 3] = [1, 4, 16];

fn arms() -> Vec<Arm> {
    CAPS.iter().map(|cap| arm(&cap.to_string(), json!({"cap": cap}))).collect()
}

fn run(script: impl FnMut(&str, usize) -> Result<ArmRecord, String>) -> (Sweep, Vec<String>) {
    let options = CapOptions { caps: CAPS.to_vec(), rounds: 2, noise: 0.1 };
    let mut runner = Fake::new(script);
    let swept = sweep(&arms(), &job(), &options, &mut runner, &mut |_| {});
    (swept, runner.ran)
}

/// A cap that makes things better.
fn good(name: &str) -> Script {
    let cap: usize = name.parse().unwrap();
    let mut script = Script::new(10.0 + cap as f64, json!({"cap": cap}));
    script.hit_rate = 0.1 + cap as f64 / 20.0;
    script
}

fn claim<'a>(swept: &'a Sweep, words: &str) -> &'a Claim {
    swept.claims.iter().find(|claim| claim.claim.contains(words)).unwrap()
}

#[test]
fn a_sweep_goes_up_and_down_between_controls() {
    let (swept, ran) = run(|name, _| Ok(good(name).record()));
    assert_eq!(ran, ["16", "16", "1", "4", "16", "16", "4", "1", "16"]);
    assert_eq!(swept.refused, None);
    assert_eq!(swept.rows.len(), 3);
    // Three prompts in each of two rounds; controls are not among them.
    assert_eq!(swept.rows[2].figures["tokens_per_second"].n, 6);
    for holds in ["identical", "do not fall", "a read call brings", "maps memory"] {
        assert_eq!(claim(&swept, holds).holds, Some(true), "{holds}");
    }
    assert_eq!(claim(&swept, "submissions").holds, None, "no device was used");
}

#[test]
fn a_larger_cap_that_is_slower_is_named() {
    let (swept, _) = run(|name, _| {
        let mut script = good(name);
        script.tokens_per_second = if name == "4" { 9.0 } else { 10.0 };
        Ok(script.record())
    });
    assert_eq!(swept.refused, None);
    let found = claim(&swept, "do not fall");
    assert_eq!(found.holds, Some(false));
    assert_eq!(found.seen, "cap 4 is 10.0 % slower than cap 1");
}

#[test]
fn what_grows_with_the_cap_is_named() {
    let (swept, _) = run(|name, _| {
        let mut script = good(name);
        let large = name == "16";
        script.reads_per_miss = if large { 2 } else { 1 };
        script.mappings_added = i64::from(large);
        Ok(script.record())
    });
    assert_eq!(claim(&swept, "a read call brings").holds, Some(false));
    assert_eq!(claim(&swept, "maps memory").holds, Some(false));
}

#[test]
fn ids_that_hit_at_a_cap_of_1_are_refused_at_once() {
    let (swept, ran) = run(|name, _| {
        let mut script = good(name);
        script.hit_rate = 0.6;
        Ok(script.record())
    });
    assert_eq!(ran, ["16", "16", "1"]);
    assert!(swept.refused.unwrap().contains("60.0 %"));
}

#[test]
fn a_cap_with_other_ids_is_disqualified_and_the_others_are_measured() {
    let (swept, ran) = run(|name, _| {
        let mut script = good(name);
        script.ids[0] = u32::from(name == "4");
        Ok(script.record())
    });
    assert_eq!(ran, ["16", "16", "1", "4", "16", "16", "1", "16"], "it is not run again");
    assert!(swept.rows[1].excluded.as_ref().unwrap().contains("ids"));
    assert!(swept.rows[1].figures.is_empty() && !swept.rows[2].figures.is_empty());
    assert!(swept.refused.unwrap().starts_with("cap 4 failed"));
}

#[test]
fn controls_that_drift_apart_refuse_the_sweep() {
    let (swept, _) = run(|name, at| {
        let mut script = good(name);
        script.tokens_per_second *= if at == 8 { 0.7 } else { 1.0 };
        Ok(script.record())
    });
    assert!(swept.refused.unwrap().contains("drifts"));
}

#[test]
fn a_record_comes_back_from_json_and_draws_the_same_plot() {
    let (swept, _) = run(|name, _| Ok(good(name).record()));
    let around = Surroundings { program: Value::Null, machine: Value::Null };
    let record = Record::of_sweep(swept, &arms(), &job(), around);
    let text = serde_json::to_string(&record).unwrap();
    let again: Record = serde_json::from_str(&text).unwrap();
    assert_eq!(again.outcome, record.outcome);
    let svg = plot::svg(&record).unwrap();
    assert_eq!(svg, plot::svg(&again).unwrap());
    for words in ["Decode by size of the expert cache", "experts kept a layer", "tokens/s", "MiB"] {
        assert!(svg.contains(words), "{words}");
    }
    assert!(!text.contains("\"ids\":["), "ids were compared and are not kept");
}

#[test]
fn a_record_without_rows_draws_nothing() {
    let (swept, _) = run(|_, _| Err("no".to_owned()));
    assert_eq!(swept.refused.as_deref(), Some("cap 16 failed: no"));
    let around = Surroundings { program: Value::Null, machine: Value::Null };
    let record = Record::of_sweep(swept, &arms(), &job(), around);
    assert!(plot::svg(&record).unwrap_err().to_string().contains("nothing to draw"));
}
