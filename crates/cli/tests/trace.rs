//! `metaltail trace`, from outside.

#[path = "support/program.rs"]
mod program;

use std::fs;

use program::{contents, program, run, tiny};
use serde_json::{Value, json};

/// A row's figures by policy and cache.
fn rate(rows: &Value, policy: &str, cache: u64) -> f64 {
    let rows = rows["rows"].as_array().unwrap();
    let found = rows.iter().find(|row| row["policy"] == policy && row["cache_bytes"] == cache);
    found.unwrap_or_else(|| panic!("no row of {policy} at {cache}"))["hit_rate"].as_f64().unwrap()
}

fn cut() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../store/tests/fixtures/qwen-cut.route.csv");
    fs::canonicalize(path).unwrap().to_str().unwrap().to_owned()
}

#[test]
fn a_replay_has_a_row_for_every_policy_cache_and_trace() {
    let dir = tempfile::tempdir().unwrap();
    let line = format!("trace replay {0} {0} --policy lru,layer:lfu,frecency --cache 60M,200M --json", cut());
    let rows = run(dir.path(), &line).expect(0).json();
    assert_eq!(rows["rows"].as_array().unwrap().len(), 2 * 4 * 2);
    let first = &rows["rows"][0];
    assert_eq!((&first["policy"], &first["phase"]), (&json!("lru"), &json!("decode")));
    assert_eq!((&first["cache_bytes"], &first["selections"]), (&json!(60 << 20), &json!(1920)));
    assert_eq!(first["trace"], cut());
    let hits = first["hits"].as_u64().unwrap() as f64;
    assert_eq!(first["hit_rate"].as_f64().unwrap(), hits / 1920.0);
    for cache in [60 << 20, 200 << 20] {
        let (lru, frecency, optimum) =
            (rate(&rows, "lru", cache), rate(&rows, "frecency", cache), rate(&rows, "belady", cache));
        assert!(lru < frecency && frecency < optimum, "{lru} {frecency} {optimum}");
    }
    // Less than a token needs: the cliff.
    assert_eq!(rate(&rows, "lru", 60 << 20), 0.0);
}

#[test]
fn people_get_a_table_and_the_cliff_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let text = run(dir.path(), &format!("trace replay {} --phase all", cut())).expect(0).stdout;
    for part in ["belady", "layer:sieve", "(all)", "cannot hold what one token uses: as one pool"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn what_was_recorded_replays_as_the_run_counted() {
    let dir = tiny("slab");
    let ids = json!({"ids": (1..20).collect::<Vec<u32>>()});
    fs::write(dir.path().join("ids.json"), ids.to_string()).unwrap();
    let call = "--model model --ids ids.json --max-tokens 12 --ram 256M --json";
    let recorded = run(dir.path(), &format!("trace record t.csv {call}")).expect(0).json();
    let stats = run(dir.path(), &format!("run {call}")).expect(0).json();
    // One accounting: what the trace holds is what the summary counts.
    assert_eq!(recorded["selections"], stats["stats"]["experts"]["selections"]);
    assert_eq!(recorded["sequences"], 1);
    let rows = run(dir.path(), "trace replay t.csv --cache 1G --policy lru --json").expect(0).json();
    assert_eq!(rows["rows"][0]["selections"], stats["stats"]["experts"]["decode"]["selections"]);
}

#[test]
fn given_ids_can_be_recorded_as_if_generated() {
    let dir = tiny("slab");
    let ids = json!({"sequences": [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10]]});
    fs::write(dir.path().join("ids.json"), ids.to_string()).unwrap();
    let line = "trace record t.csv --model model --ids ids.json --prompt 2 --ram 256M --json";
    let recorded = run(dir.path(), line).expect(0).json();
    assert_eq!((&recorded["rows"], &recorded["sequences"]), (&json!(10), &json!(2)));
    // Six rows came one by one, each after another row of its sequence: three layers of two experts.
    assert_eq!(recorded["guesses"]["last_token"]["chosen"], 6 * 3 * 2);
    for way in ["last_token", "before_experts", "layer_output"] {
        let guess = &recorded["guesses"][way];
        let (recall, chosen) = (guess["recall"].as_f64().unwrap(), guess["chosen"].as_u64().unwrap());
        assert!((0.0..=1.0).contains(&recall) && chosen >= 6 * 2 * 2, "{way}: {guess}");
    }
    let read = program(dir.path()).args(line.trim_end_matches("--json").split_whitespace()).output().unwrap();
    let words = String::from_utf8(read.stdout).unwrap();
    assert!(words.contains("known before: last token"), "{words}");
    let selections = recorded["selections"].as_u64().unwrap();
    let decode = run(dir.path(), "trace replay t.csv --cache 1G --policy lru --json").expect(0).json();
    assert_eq!(decode["rows"][0]["selections"].as_u64().unwrap() * 10, selections * 6);
    let all =
        run(dir.path(), "trace replay t.csv --cache 1G --policy lru --phase all --json").expect(0).json();
    assert_eq!(all["rows"][0]["selections"], selections);
}

#[test]
fn a_recording_that_is_refused_leaves_an_earlier_one() {
    let dir = tiny("slab");
    fs::write(dir.path().join("ids.json"), json!({"ids": [1, 2, 3]}).to_string()).unwrap();
    fs::write(dir.path().join("far.json"), json!({"ids": [1, 99999]}).to_string()).unwrap();
    fs::write(dir.path().join("keep.csv"), "precious").unwrap();
    let files = contents(dir.path());
    for (line, code) in [
        ("--ids absent.json --model model", 2),
        ("--ids ids.json --model absent", 3),
        ("--ids ids.json --model model --ram 4M", 4),
        ("--ids far.json --model model --ram 256M", 2),
    ] {
        run(dir.path(), &format!("trace record keep.csv {line}")).expect(code);
        assert_eq!(contents(dir.path()), files, "{line}");
    }
    let line = "trace record keep.csv --ids ids.json --model model --ram 256M --max-tokens 2";
    run(dir.path(), line).expect(0);
    assert_eq!(contents(dir.path()).len(), files.len(), "nothing is left beside it");
    run(dir.path(), "trace replay keep.csv --cache 1G").expect(0);
    run(dir.path(), &line.replace("keep.csv", "absent/t.csv")).expect(1);
}

#[test]
fn a_prompt_that_leaves_no_decode_is_noted() {
    let dir = tiny("slab");
    fs::write(dir.path().join("ids.json"), json!({"sequences": [[1, 2, 3], [4, 5]]}).to_string()).unwrap();
    let line = "trace record t.csv --model model --ids ids.json --ram 256M --prompt";
    let noted = run(dir.path(), &format!("{line} 3")).expect(0).stderr;
    assert!(noted.contains("no row counts as decode"), "{noted}");
    let quiet = run(dir.path(), &format!("{line} 2")).expect(0).stderr;
    assert!(!quiet.contains("no row counts as decode"), "{quiet}");
}

#[test]
fn damage_is_refused_with_file_and_line() {
    let dir = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(cut()).unwrap().replacen("\n0,0,1,", "\n0,7,1,", 1);
    fs::write(dir.path().join("bad.csv"), text).unwrap();
    let refused = run(dir.path(), "trace replay bad.csv --json").expect(2);
    for part in ["bad.csv", "line ", "phase 7"] {
        assert!(refused.error().contains(part), "{part}: {}", refused.error());
    }
    let missing = run(dir.path(), "trace replay none.csv --json").expect(2);
    assert!(missing.error().contains("none.csv"), "{}", missing.error());
    let unknown = program(dir.path()).args(["trace", "replay", "x", "--policy", "mru"]).output().unwrap();
    assert_eq!(unknown.status.code(), Some(2));
}

#[test]
fn every_policy_gives_the_same_ids() {
    let dir = tiny("slab");
    fs::write(dir.path().join("ids.json"), json!({"ids": [3, 1, 4, 1, 5]}).to_string()).unwrap();
    let ids = |policy: &str| {
        let line = format!(
            "run --model model --ids ids.json --max-tokens 24 --ram 256M --cap 3 --policy {policy} --json"
        );
        let run = run(dir.path(), &line).expect(0).json();
        assert_eq!(run["stats"]["config"]["policy"], policy);
        run["ids"].clone()
    };
    let lru = ids("lru");
    for policy in ["slru", "sieve", "lfu", "frecency"] {
        assert_eq!(ids(policy), lru, "{policy}");
    }
}
