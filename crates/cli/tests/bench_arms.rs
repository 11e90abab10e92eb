//! `metaltail bench ab`, `cap`, `io` and `plot`, from outside: the form of what they say and what they
//! refuse, never a speed.

#[path = "support/models.rs"]
mod models;
#[path = "support/program.rs"]
mod program;

use std::fs;
use std::path::Path;

use models::{call, demo, piped};
use program::{Outcome, run, tiny};
use serde_json::{Value, json};

/// Few tokens, and noise that a busy machine cannot exceed: what is tested is everything else. The page
/// cache is warm, since not every file system lets go of a page.
const SMALL: &str =
    "--ram 512M --threads 1 --page-cache warm --max-tokens 8 --prompts 2 --prompt-tokens 4 --noise 100";

/// As often as a busy machine drifts by more than all noise that can be stated.
fn quiet(mut run: impl FnMut() -> Outcome) -> Outcome {
    let drifted = |outcome: &Outcome| outcome.stdout.contains("the machine drifts");
    let mut outcome = run();
    for _ in 0..20 {
        if !drifted(&outcome) && !outcome.stderr.contains("the machine drifts") {
            break;
        }
        outcome = run();
    }
    outcome
}

fn bench(dir: &Path, command: &str, more: &[&str]) -> Outcome {
    let small = SMALL.split_whitespace();
    let args: Vec<&str> =
        ["bench", command, "--model", "model"].into_iter().chain(small).chain(more.iter().copied()).collect();
    call(dir, &args)
}

fn well_formed(svg: &str) {
    // Every tag that opens closes; plots have no text with `<` in it.
    let mut open = Vec::new();
    for tag in svg.split('<').skip(1) {
        let (tag, text) = tag.split_once('>').expect("a tag ends");
        assert!(!text.contains('>') && !tag.contains('\0'), "{text}");
        let name = |tag: &str| tag.split_whitespace().next().unwrap().trim_end_matches('/').to_owned();
        match tag.as_bytes() {
            [b'/', ..] => assert_eq!(open.pop(), Some(name(&tag[1..]))),
            [.., b'/'] | [b'?' | b'!', ..] => {}
            _ => open.push(name(tag)),
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn two_caps_are_compared_and_recorded() {
    let dir = tiny("slab");
    let more = ["--a", "--cap 1", "--b", "--cap 8", "--pairs", "2", "--json", "--record", "out/ab.json"];
    let outcome = quiet(|| bench(dir.path(), "ab", &more)).expect(0);
    let record = outcome.json();
    assert_eq!((&record["kind"], &record["refused"]), (&json!("ab"), &Value::Null));
    assert_eq!(record["result"]["name"], "cap 1 → 8");
    assert_eq!(record["order"], json!(["A", "A", "A", "B", "A at cap 1", "B", "A", "A"]));
    assert_eq!(record["result"]["ids_a"], record["result"]["ids_b"]);
    let figure = |key: &str| {
        let rows = record["result"]["figures"].as_array().unwrap();
        rows.iter().find(|row| row["key"] == key).unwrap_or_else(|| panic!("no {key}"))
    };
    assert_eq!(figure("tokens_per_second")["ratio"]["n"], 2);
    assert_eq!(
        figure("bytes_per_token")["b"]["max"].as_f64(),
        Some(0.0),
        "all experts fit after the warm-up"
    );
    assert_eq!(figure("hit_rate")["verdict"], "higher");
    let [first, ..] = &record["runs"].as_array().unwrap()[..] else { panic!("no runs") };
    assert_eq!((&first["role"], &first["excluded"]), (&json!("control"), &Value::Null));
    let arm = &first["record"];
    assert_eq!(arm["config"]["cap"], 1);
    assert_eq!(arm["feed"], "random", "its weights are random");
    assert_eq!(arm["rows"].as_array().unwrap().len(), 3, "one more warms up");
    assert_eq!(arm["rows"][1]["stats"]["decode"]["tokens"], 8);
    assert!(arm["memory"]["terms"]["dense"].as_u64().unwrap() > 0);
    assert_eq!(record["job"]["seed"], 0);
    assert!(record["machine"]["memory_bytes"].as_u64().unwrap() > 0);
    assert_eq!(record["model"]["parameters"]["experts"], "int4-g32");

    let file = dir.path().join("out/ab.json");
    assert_eq!(serde_json::from_slice::<Value>(&fs::read(file).unwrap()).unwrap(), record);
    let drawn = call(dir.path(), &["bench", "plot", "out/ab.json", "--plot", "ab.svg", "--json"]).expect(0);
    assert_eq!(drawn.json()["plot"], "ab.svg");
    let svg = fs::read_to_string(dir.path().join("ab.svg")).unwrap();
    well_formed(&svg);
    assert!(svg.contains("cap 1 → 8") && svg.contains("tokens/s"));
}

#[test]
fn a_sweep_has_a_row_a_cap_and_says_what_holds() {
    let dir = tiny("slab");
    let more = [
        "--caps",
        "8,1,2",
        "--rounds",
        "1",
        "--prefetch",
        "off",
        "--plot",
        "cap.svg",
        "--record",
        "cap.json",
    ];
    let text = quiet(|| bench(dir.path(), "cap", &more)).expect(0).stdout;
    for part in [
        "tokens/s",
        "peak anonymous",
        "yes: ids are identical at every cap",
        "noise: controls at",
        "record: cap.json",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let record: Value = serde_json::from_slice(&fs::read(dir.path().join("cap.json")).unwrap()).unwrap();
    let rows = record["rows"].as_array().unwrap();
    let caps: Vec<_> = rows.iter().map(|row| row["cap"].as_u64().unwrap()).collect();
    assert_eq!(caps, [1, 2, 8]);
    for row in rows {
        assert_eq!(row["figures"]["tokens_per_second"]["n"], 2);
        assert_eq!(
            row["figures"]["distinct_per_token"]["median"].as_f64(),
            Some(6.0),
            "3 layers, 2 experts each"
        );
        assert_eq!(row["ids"], rows[0]["ids"]);
    }
    let misses = |row: &Value| row["figures"]["reads_per_token"]["median"].as_f64().unwrap();
    assert!(misses(&rows[0]) > misses(&rows[1]) && misses(&rows[1]) > misses(&rows[2]));
    well_formed(&fs::read_to_string(dir.path().join("cap.svg")).unwrap());
}

#[test]
fn without_a_word_the_record_goes_to_a_directory_of_records() {
    let dir = tiny("slab");
    let text = bench(dir.path(), "cap", &["--caps", "8", "--rounds", "1"]).stdout;
    let files: Vec<_> = fs::read_dir(dir.path().join("bench-records")).unwrap().collect();
    assert_eq!(files.len(), 1, "{text}");
    let off = tiny("slab");
    bench(off.path(), "cap", &["--caps", "8", "--rounds", "1", "--record", "off"]);
    bench(off.path(), "cap", &["--caps", "8", "--rounds", "1", "--json"]);
    assert!(!off.path().join("bench-records").exists());
}

#[test]
fn numbers_that_may_change_are_compared_row_by_row() {
    let dir = tiny("slab");
    let more = ["--a", "", "--b", "--exact", "--cap", "8", "--pairs", "1", "--json"];
    let record = quiet(|| bench(dir.path(), "ab", &more)).expect(0).json();
    assert_eq!(record["result"]["name"], "exact false → true");
    let numerics = &record["result"]["numerics"];
    let agreement = numerics["agreement"].as_f64().unwrap();
    assert!(agreement > 0.5 && agreement <= 1.0, "{numerics}");
    assert_eq!(numerics["nll_noise"].as_f64(), Some(0.0), "two runs of A are the same to the bit");
    assert!(numerics["kl"].as_f64().unwrap() > 0.0, "{numerics}");
    assert_eq!(numerics["kl_noise"].as_f64(), Some(0.0));
    assert!(numerics["nll_a"].as_f64().unwrap() > 0.0 && numerics["nll_a"] != numerics["nll_b"]);
}

#[test]
fn given_ids_are_decoded_in_place_of_random_ones() {
    let dir = tiny("slab");
    let ids: Vec<u32> = (0..20).collect();
    fs::write(dir.path().join("ids.json"), json!({"sequences": [ids, [1, 2]]}).to_string()).unwrap();
    let more = ["--caps", "1,8", "--rounds", "1", "--ids", "ids.json", "--json"];
    let record = quiet(|| bench(dir.path(), "cap", &[&more[..], &["--feed", "greedy"]].concat())).json();
    assert_eq!(record["runs"][0]["record"]["rows"][1]["prompt_tokens"], 20);
    let refused = bench(dir.path(), "cap", &[&more[..], &["--feed", "ids"]].concat()).expect(1).json();
    let reason = refused["refused"].as_str().unwrap();
    assert!(reason.contains("sequence 1 has 2 ids"), "{reason}");
    bench(dir.path(), "cap", &["--feed", "ids"]).expect(2);
}

#[test]
fn greedy_text_of_a_trained_model_is_the_default() {
    let dir = tempfile::tempdir().unwrap();
    let model = demo();
    let line =
        ["bench", "cap", "--model", model.to_str().unwrap(), "--caps", "64", "--rounds", "1", "--json"];
    let record =
        quiet(|| call(dir.path(), &[&line[..], &SMALL.split(' ').collect::<Vec<_>>()].concat())).json();
    assert_eq!(record["runs"][0]["record"]["feed"], "greedy");
}

#[test]
fn what_refuses_an_arm_is_told_and_recorded() {
    let dir = tiny("slab");
    let more = ["--a", "--cap 1", "--b", "--context 100000000", "--pairs", "1", "--json"];
    let record = bench(dir.path(), "ab", &more).expect(1).json();
    let reason = record["refused"].as_str().unwrap();
    assert!(reason.starts_with("arm B failed:") && reason.contains("100000000"), "{reason}");
    assert_eq!(record["runs"][3]["excluded"].as_str().map(|text| reason.ends_with(text)), Some(true));

    // Without a run that counts there is nothing to tabulate or draw, and the reason comes last.
    let more = ["--a", "--context 100000000", "--b", "--cap 2", "--pairs", "1", "--plot", "p.svg"];
    let outcome = bench(dir.path(), "ab", &[&more[..], &["--record", "off"]].concat()).expect(1);
    assert_eq!(outcome.stdout, "");
    let last = outcome.stderr.lines().last().unwrap();
    assert!(last.contains("arm A failed:") && last.contains("100000000"), "{}", outcome.stderr);
}

#[test]
fn what_can_be_known_before_running_is_refused_before_running() {
    let dir = tiny("slab");
    let both = ["--a", "--cap 1", "--b", "--cap 2 --checksums off"];
    let outcome = bench(dir.path(), "ab", &both).expect(2);
    assert!(outcome.stderr.contains("2 resolved settings differ"), "{}", outcome.stderr);
    let outcome = bench(dir.path(), "ab", &["--a", "", "--b", "", "--json"]).expect(2);
    assert!(outcome.error().contains("nothing to compare"), "{}", outcome.stdout);

    let run_says = run(dir.path(), "run x --model absent").expect(3).stderr;
    let ab = ["bench", "ab", "--a", "--cap 4", "--b", "--cap 8", "--model", "absent", "--plot", "p.svg"];
    assert_eq!(call(dir.path(), &ab).expect(3).stderr, run_says);
    assert_eq!(run(dir.path(), "bench cap --model absent").expect(3).stderr, run_says);
    let arm = ["--a", "--cap 4", "--b", "--cap 4 --model absent", "--several"];
    assert_eq!(bench(dir.path(), "ab", &arm).expect(3).stderr, run_says);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no record, no plot");
}

#[test]
fn a_setting_of_an_absent_device_did_not_engage() {
    let dir = tiny("slab");
    let more = ["--a", "--residency set", "--b", "--residency walk", "--pairs", "1", "--json"];
    let record = bench(dir.path(), "ab", &more).expect(1).json();
    let reason = record["refused"].as_str().unwrap();
    assert!(reason.contains("--residency walk did not engage"), "{reason}");
}

#[test]
fn arms_and_measurements_without_sense_are_wrong_usage() {
    let dir = tiny("slab");
    for (command, more) in [
        ("ab", &["--a", "--capp 1", "--b", ""][..]),
        ("ab", &["--a", "--cap 1", "--b", "--json"]),
        ("ab", &["--a", "--cap 1", "--b", "", "--temperature", "0.5"]),
        ("ab", &["--a", "--cap 1", "--b", "", "--plot", "a.png"]),
        ("cap", &["--cap", "4"]),
        ("cap", &["--noise", "0"]),
        ("cap", &["--ids", "nowhere.json"]),
        ("io", &["--model", "nowhere", "--depths", "0"]),
    ] {
        let outcome = bench(dir.path(), command, more).expect(2);
        assert!(outcome.stderr.starts_with("error: "), "{}", outcome.stderr);
    }
    let arm = piped(dir.path(), &["bench", "arm", "--model", "model", "--json"], "{}").expect(2);
    assert!(arm.error().contains("standard input is not a job"));
    fs::write(dir.path().join("x.json"), "{}").unwrap();
    call(dir.path(), &["bench", "plot", "x.json", "--plot", "x.svg"]).expect(2);
}

#[test]
fn a_drive_is_read_in_every_way_and_beside_decoding() {
    let dir = tiny("colibri");
    let line =
        "--depths 1,2 --rounds 2 --seconds 0.02 --decode --cap 1 --direct off --io threads --loaders 2";
    let more: Vec<&str> = line.split(' ').chain(["--plot", "io.svg", "--json"]).collect();
    let record = quiet(|| bench(dir.path(), "io", &more)).json();
    assert_eq!(record["kind"], "io");
    assert_eq!(record["rows"].as_array().unwrap().len(), 8, "direct or not, threads or io_uring, two depths");
    let row = |way: &str| record["rows"].as_array().unwrap().iter().find(|row| row["way"] == way).unwrap();
    for way in ["direct, threads, depth 1", "buffered, threads, depth 2"] {
        let row = row(way);
        // What this file system cannot do has its reason.
        let counted = row["gb_per_second"]["median"].as_f64().is_some_and(|rate| rate > 0.0);
        assert!(counted != row["excluded"].is_string(), "{row}");
    }
    if record["refused"].is_null() {
        assert_eq!(record["streaming"]["way"], "buffered, threads, depth 2");
        assert_eq!(record["streaming"]["of_raw"]["n"], 2);
        well_formed(&fs::read_to_string(dir.path().join("io.svg")).unwrap());
    } else {
        // A file system in memory keeps what it has: reads through the page cache measure nothing.
        println!("SKIPPED: {}", record["refused"]);
    }
}

#[test]
fn help_explains_every_command_and_hides_the_arm() {
    let dir = tempfile::tempdir().unwrap();
    let text = run(dir.path(), "bench --help").expect(0).stdout;
    for command in ["ab", "cap", "io", "kernels", "plot"] {
        assert!(text.lines().any(|line| line.trim_start().starts_with(command)), "{command}: {text}");
    }
    assert!(!text.contains("arm "), "{text}");
    let text = run(dir.path(), "bench ab --help").expect(0).stdout;
    for flag in ["--pairs", "--page-cache", "--noise", "--several", "--max-tokens"] {
        assert!(text.contains(flag), "{flag}");
    }
}
