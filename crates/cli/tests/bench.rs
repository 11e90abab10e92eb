//! `metaltail bench kernels`, from outside: the form of what it says, never a speed.

#[path = "support/program.rs"]
mod program;

use program::{run, tiny};
use serde_json::Value;

const SMALL: &str = "bench kernels --hidden 128 --width 64 --top-k 4 --rounds 3 --working-set 1M --threads 1";

#[test]
fn every_format_has_a_row_with_its_spread_and_share() {
    let dir = tempfile::tempdir().unwrap();
    let line = format!("{SMALL} --format int4-g32,bf16,q8_0,mxfp4 --json");
    let report = run(dir.path(), &line).expect(0).json();
    assert_eq!(report["decode"], Value::Null);
    assert_eq!(report["report"]["shape"], serde_json::json!([128, 64, 4]));
    let rows = report["report"]["rows"].as_array().unwrap();
    let arm = |row: &Value| (row["format"].clone(), row["activations"].clone());
    let arms: Vec<_> = rows.iter().map(arm).collect();
    let wanted = [
        ("int4-g32", "int8"),
        ("int4-g32", "exact"),
        ("bf16", "exact"),
        ("q8_0", "int8"),
        ("q8_0", "exact"),
        ("mxfp4", "int8"),
        ("mxfp4", "exact"),
    ];
    assert_eq!(arms, wanted.map(|(format, activations)| (format.into(), activations.into())));
    for row in rows {
        let spread = &row["gb_per_second"];
        let value = |key: &str| spread[key].as_f64().unwrap();
        assert_eq!(spread["n"], 3);
        assert!(value("min") <= value("median") && value("median") <= value("max"));
        assert!(row["of_ceiling"]["median"].as_f64().unwrap() > 0.0);
    }
    assert!(report["machine"]["memory_bytes"].as_u64().unwrap() > 0);
}

#[test]
fn people_get_a_table() {
    let dir = tempfile::tempdir().unwrap();
    let text = run(dir.path(), &format!("{SMALL} --format int8")).expect(0).stdout;
    for part in ["plain read", "int8", "exact", "n 3"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_model_is_charged_what_plan_says_a_token_reads() {
    let dir = tiny("slab");
    let line = format!("{SMALL} --format int8 --model model --ram 512M --json");
    let decode = run(dir.path(), &line).expect(0).json()["decode"].clone();
    let plan = run(dir.path(), "plan model --json").expect(0).json();
    let token = |key: &str| plan["token"][key].as_u64().unwrap();
    assert_eq!(decode["bytes_per_token"], token("dense_bytes") + token("routed_bytes"));
    assert_eq!(decode["resident"], true);
    assert_eq!(decode["hit_rate"], 1.0);
    assert_eq!(decode["decode_tokens_per_second"]["n"], 3);
}

#[test]
fn a_model_that_is_not_resident_is_said_not_to_be() {
    let dir = tiny("slab");
    let line = "bench kernels --hidden 64 --width 64 --rounds 1 --working-set 1M --format int8 --model model --ram 512M --cap 1";
    let decode = run(dir.path(), &format!("{line} --json")).expect(0).json()["decode"].clone();
    assert_eq!(decode["resident"], false);
    let text = run(dir.path(), line).expect(0).stdout;
    assert!(text.contains("not the speed of a resident model"), "{text}");
}

#[test]
fn a_setting_for_sampling_is_none_of_its_business() {
    let dir = tempfile::tempdir().unwrap();
    let line = "bench kernels --hidden 64 --width 64 --rounds 1 --working-set 1M --format int8 --json";
    let mut command = program::program(dir.path());
    let output = command.args(line.split(' ')).env("METALTAIL_TOP_K", "40").output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["report"]["shape"][2], 8);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), "bench kernels --working-set 1000 --json").expect(2);
    run(dir.path(), "bench kernels --top-k 0 --json").expect(2);
    run(dir.path(), "bench kernels --format int3 --json").expect(2);
    let refused = run(dir.path(), "bench kernels --hidden 384 --format q4_k").expect(2);
    let message = refused.stderr;
    assert!(message.contains("384") && message.contains("Q4_K") && message.contains("256"), "{message}");
    run(dir.path(), "bench kernels --working-set 100000G --json").expect(4);
    run(dir.path(), "bench kernels --threads 100000 --json").expect(2);
    run(dir.path(), "bench kernels --hidden 4294967296 --width 4294967296 --json").expect(2);
    // So many rounds would never end: the model is looked at before them.
    run(dir.path(), "bench kernels --rounds 1000000 --model nowhere --json").expect(3);
}
