//! `metaltail doctor`, from outside.

#[path = "support/program.rs"]
mod program;

use program::{run, tiny};
use serde_json::{Value, json};

fn whats(report: &Value) -> String {
    let findings = report["findings"].as_array().unwrap();
    let mut text = String::new();
    for finding in findings {
        for key in ["severity", "what", "why", "action"] {
            assert!(finding[key].as_str().is_some_and(|text| !text.is_empty()), "{finding}");
        }
        let word = |key: &str| finding[key].as_str().unwrap().to_owned();
        text.push_str(&format!("{}: {}\n", word("severity"), word("what")));
    }
    text
}

#[test]
fn a_machine_alone_is_examined() {
    let dir = tempfile::tempdir().unwrap();
    let report = run(dir.path(), "doctor --json").expect(0).json();
    assert!(report["memory"]["budget"].as_u64().unwrap() > 0);
    assert_eq!(
        (&report["memory"]["terms"], &report["bound"], &report["model"]),
        (&json!({}), &Value::Null, &Value::Null)
    );
    assert!(report["machine"]["memory"].as_u64().unwrap() > 0);
    assert!(report["machine"]["isas"].as_array().unwrap().contains(&json!("scalar")));
    assert!(
        report["limits"]["open_files"]["soft"].is_u64() || report["limits"]["open_files"]["soft"].is_null()
    );
    whats(&report);
    let text = run(dir.path(), "doctor").expect(0).stdout;
    for part in ["processor", "memory", "cgroup", "io_uring", "storage", "what to change", "\nlimit  "] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("\nsum "), "nothing is added up: {text}");
}

#[test]
fn a_model_is_examined_as_plan_and_inspect_see_it() {
    let dir = tiny("slab");
    let report = run(dir.path(), "doctor --model model --ram 256M --json").expect(0).json();
    let plan = run(dir.path(), "plan model --ram 256M --json").expect(0).json();
    let inspected = run(dir.path(), "inspect model --json").expect(0).json();
    assert_eq!(report["memory"], plan["memory"]);
    assert_eq!((&report["model"]["experts"], &report["model"]["token"]), (&plan["experts"], &plan["token"]));
    assert!(report["bound"]["tokens_per_second"].as_f64().unwrap() > 0.0);
    assert!(["memory", "drive"].contains(&report["bound"]["resource"].as_str().unwrap()));
    for key in ["roles", "layers", "files", "bytes", "draft"] {
        assert_eq!(report["model"]["census"][key], inspected[key], "{key}");
    }
    let text = run(dir.path(), "doctor --model model --ram 256M").expect(0).stdout;
    for part in ["slots kept", "bound: at most", "an expert", "what to change"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // All experts are in memory: how fast the drive is matters to nobody.
    assert_eq!(report["model"]["token"]["expected_hit_rate"], 1.0);
    let told = whats(&report);
    for part in ["turning disk", "GB/s", "not measured", "file system"] {
        assert!(!told.contains(part), "{part}: {told}");
    }
}

#[test]
fn what_to_change_is_said_with_numbers() {
    let dir = tiny("hf");
    let report = run(dir.path(), "doctor --model model --ram 256M --cap 0 --json").expect(0).json();
    let found = whats(&report);
    assert!(found.contains("experts are stored as bf16"), "{found}");
    assert!(found.contains("0 experts a layer are kept, a token uses"), "{found}");
    // A budget that is refused is what a doctor is asked about.
    let report = run(dir.path(), "doctor --model model --ram 4M --json").expect(0).json();
    assert!(whats(&report).starts_with("error: the model cannot be run like this"), "{report}");
    assert_eq!((&report["memory"], &report["bound"]), (&Value::Null, &Value::Null));
    assert!(
        report["model"]["refusal"].as_str().unwrap().contains("too small"),
        "{}",
        report["model"]["refusal"]
    );
    run(dir.path(), "doctor --model absent --json").expect(3);
}
