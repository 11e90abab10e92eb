//! `metaltail run`, from outside: what it prints, and what of it can be checked.

#[path = "support/models.rs"]
mod models;
#[path = "support/program.rs"]
mod program;

use std::fs;

use metaltail_model::text::Tokenizer;
use models::{ask, call, count, demo, ids, ids_file, oracle, piped, seeded_ids};
use program::tiny;
use serde_json::{Value, json};

const QUESTION: &str = "Define \"hummingbird\".";
/// Bytes of one expert of the demo model, padding included.
const EXPERT: u64 = 45056;

/// What may stand at a key.
#[derive(Clone, Copy, Debug)]
enum Form {
    Text,
    Ids,
    Count,
    Number,
    NumberOrNull,
    CountOrNull,
    Null,
    Object,
}

impl Form {
    fn fits(self, value: &Value) -> bool {
        match self {
            Form::Text => value.is_string(),
            Form::Ids => value.as_array().is_some_and(|ids| ids.iter().all(Value::is_u64)),
            Form::Count => value.is_u64(),
            Form::Number => value.is_number(),
            Form::NumberOrNull => value.is_number() || value.is_null(),
            Form::CountOrNull => value.is_u64() || value.is_null(),
            Form::Null => value.is_null(),
            Form::Object => value.is_object(),
        }
    }
}

/// Every key of the contract. A null says that the figure does not apply: there is no prefetching,
/// no accelerator and no draft here, so a number would be an invention.
const CONTRACT: &[(&str, Form)] = &[
    ("/text", Form::Text),
    ("/prompt_ids", Form::Ids),
    ("/ids", Form::Ids),
    ("/finish", Form::Text),
    ("/stats/prefill/tokens", Form::Count),
    ("/stats/prefill/seconds", Form::Number),
    ("/stats/decode/tokens", Form::Count),
    ("/stats/decode/seconds", Form::Number),
    ("/stats/decode/tokens_per_second", Form::Number),
    ("/stats/experts/selections", Form::Count),
    ("/stats/experts/distinct_per_token", Form::Number),
    ("/stats/experts/hits/pinned", Form::Count),
    ("/stats/experts/hits/cached", Form::Count),
    ("/stats/experts/hits/staged", Form::Count),
    ("/stats/experts/misses", Form::Count),
    ("/stats/experts/hit_rate", Form::Number),
    ("/stats/experts/cap", Form::Count),
    ("/stats/experts/slots", Form::Count),
    ("/stats/experts/decode/hits/cached", Form::Count),
    ("/stats/experts/decode/misses", Form::Count),
    ("/stats/experts/decode/hit_rate", Form::Number),
    ("/stats/io/bytes", Form::Count),
    ("/stats/io/reads", Form::Count),
    ("/stats/io/total_bytes", Form::Count),
    ("/stats/io/total_reads", Form::Count),
    ("/stats/io/cold_bytes", Form::CountOrNull),
    ("/stats/io/felt_wait_seconds", Form::Number),
    ("/stats/io/busy_seconds", Form::Number),
    ("/stats/io/mean_depth", Form::NumberOrNull),
    ("/stats/io/idle_share", Form::NumberOrNull),
    ("/stats/io/prefetch/issued_bytes", Form::Count),
    ("/stats/io/prefetch/useful_bytes", Form::Count),
    ("/stats/io/prefetch/wasted_bytes", Form::Count),
    ("/stats/device/name", Form::Text),
    ("/stats/device/experts", Form::Count),
    ("/stats/device/submissions", Form::CountOrNull),
    ("/stats/device/fallbacks", Form::CountOrNull),
    ("/stats/device/gpu_wall_seconds", Form::Null),
    ("/stats/device/kernel_seconds", Form::Null),
    ("/stats/device/stall_seconds", Form::Null),
    ("/stats/device/encode_seconds", Form::Null),
    ("/stats/residency/mode", Form::Null),
    ("/stats/residency/allocations", Form::CountOrNull),
    ("/stats/residency/sets", Form::Null),
    ("/stats/residency/declared_per_submit", Form::Null),
    ("/stats/residency/commits", Form::Null),
    ("/stats/residency/flush_seconds", Form::Null),
    ("/stats/residency/unregister_seconds", Form::Null),
    ("/stats/draft/kind", Form::Text),
    ("/stats/draft/proposed", Form::Null),
    ("/stats/draft/accepted", Form::Null),
    ("/stats/memory/budget", Form::Count),
    ("/stats/memory/terms", Form::Object),
    ("/stats/memory/peak_anonymous", Form::Count),
    ("/stats/config", Form::Object),
];

#[test]
fn json_is_one_object_with_every_key_of_the_contract() {
    let answer = ask(&[QUESTION, "--max-tokens", "8"]);
    for (pointer, form) in CONTRACT {
        let value = answer.pointer(pointer).unwrap_or_else(|| panic!("{pointer} is missing: {answer}"));
        assert!(form.fits(value), "{pointer} is {value}, wanted {form:?}");
    }
    for key in
        ["model", "ram", "cap", "loaders", "direct", "checksums", "prefill_chunk", "context", "threads"]
    {
        let value = &answer["stats"]["config"][key];
        assert!(!value.is_null(), "{key} is not resolved: {}", answer["stats"]["config"]);
    }
}

#[test]
fn the_demo_model_is_found_and_people_get_text_and_figures_apart() {
    let inside = models::repository().join("crates/cli");
    let answer = call(&inside, &["run", QUESTION, "--temperature", "0", "--max-tokens", "6"]).expect(0);
    let same = ask(&[QUESTION, "--temperature", "0", "--max-tokens", "6"]);
    assert_eq!(answer.stdout.trim_end(), same["text"].as_str().unwrap());
    for part in ["prefill", "decode", "experts", "drive", "memory", "budget"] {
        assert!(answer.stderr.contains(part), "{part}: {}", answer.stderr);
        assert!(!answer.stdout.contains(part), "{part}: {}", answer.stdout);
    }
}

#[test]
fn text_is_what_the_ids_decode_to() {
    let tokenizer = Tokenizer::from_dir(&demo()).unwrap();
    for seed in ["1", "2", "3"] {
        let answer = ask(&[QUESTION, "--temperature", "1", "--seed", seed, "--max-tokens", "40"]);
        assert_eq!(answer["text"], tokenizer.decode(&ids(&answer["ids"]), true).unwrap());
    }
}

#[test]
fn counters_agree_with_one_another_and_with_the_model() {
    let answer =
        ask(&[QUESTION, "--temperature", "0", "--max-tokens", "24", "--cap", "12", "--prefill-chunk", "5"]);
    let stats = &answer["stats"];
    let (prompt, generated) = (ids(&answer["prompt_ids"]).len() as u64, ids(&answer["ids"]).len() as u64);
    assert_eq!(count(stats, "/prefill/tokens"), prompt);
    assert_eq!(count(stats, "/decode/tokens"), generated - 1);
    // Eight sparse layers, six experts of 64 a row.
    assert_eq!(count(stats, "/experts/selections"), (prompt + generated - 1) * 8 * 6);
    assert_eq!(count(stats, "/experts/decode/selections"), (generated - 1) * 8 * 6);
    let tiers = ["pinned", "cached", "staged"].map(|tier| count(stats, &format!("/experts/hits/{tier}")));
    let (hits, misses) = (tiers.iter().sum::<u64>(), count(stats, "/experts/misses"));
    assert_eq!(count(stats, "/experts/lookups"), hits + misses);
    assert!(tiers[1] > 0 && misses > 0, "{stats}");
    let rate = stats["experts"]["hit_rate"].as_f64().unwrap();
    assert!((rate - hits as f64 / (hits + misses) as f64).abs() < 1e-12);
    assert_eq!(count(stats, "/io/bytes"), misses * EXPERT);
    assert_eq!(count(stats, "/io/reads"), misses);
    let ahead = count(stats, "/io/prefetch/issued_bytes");
    assert_eq!(count(stats, "/io/total_bytes"), (misses * EXPERT) + ahead + count(stats, "/io/pinned_bytes"));
    assert_eq!((count(stats, "/experts/cap"), count(stats, "/experts/slots")), (12, 8 * 12));
    assert!(count(stats, "/experts/evictions") > 0);
}

#[test]
fn the_least_memory_that_a_refusal_names_is_enough() {
    let dir = tiny("slab");
    let file = ids_file(dir.path(), &[1, 2, 3]);
    let with = |ram: &str| {
        let base =
            ["run", "--model", "model", "--max-tokens", "1", "--ids", file.to_str().unwrap(), "--json"];
        call(dir.path(), &[&base[..], &["--ram", ram]].concat())
    };
    let refused = with("4M").expect(4).error();
    let (_, after) = refused.split_once("Give --ram ").unwrap_or_else(|| panic!("{refused}"));
    let least: u64 = after.split_once("M,").unwrap().0.parse().unwrap();
    with(&format!("{}M", least - 1)).expect(4);
    with(&format!("{least}M")).expect(0);
}

#[test]
fn memory_terms_and_the_peak_stay_within_the_budget() {
    let answer = ask(&[QUESTION, "--max-tokens", "16", "--ram", "160M", "--context", "512"]);
    let memory = &answer["stats"]["memory"];
    assert_eq!(memory["budget"], 160 << 20);
    let terms = memory["terms"].as_object().unwrap();
    for name in ["program", "dense", "kv", "scratch", "in_flight", "cached"] {
        assert!(terms.contains_key(name), "{name}: {memory}");
    }
    let sum: u64 = terms.values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert!(sum <= 160 << 20, "{memory}");
    assert!(count(memory, "/peak_anonymous") <= 160 << 20, "{memory}");
}

#[test]
fn no_setting_that_moves_bytes_changes_the_ids() {
    let base = ["Write a short story about a fox.", "--temperature", "0", "--max-tokens", "20"];
    let wanted = ask(&base)["ids"].clone();
    for cap in ["0", "1", "2", "64"] {
        for [loaders, threads, direct, chunk] in
            [["1", "1", "on", "1"], ["3", "2", "off", "5"], ["1", "2", "off", "256"], ["5", "1", "on", "7"]]
        {
            if direct == "on" && !direct_reads_work() {
                continue;
            }
            let varied = [
                "--cap",
                cap,
                "--loaders",
                loaders,
                "--threads",
                threads,
                "--direct",
                direct,
                "--prefill-chunk",
                chunk,
            ];
            let answer = ask(&[&base[..], &varied[..]].concat());
            assert_eq!(answer["ids"], wanted, "{varied:?}");
            engaged(&answer, cap, loaders, threads, direct, chunk);
        }
    }
}

/// That the settings are not only recorded: counters show what they did.
fn engaged(answer: &Value, cap: &str, loaders: &str, threads: &str, direct: &str, chunk: &str) {
    let (stats, config) = (&answer["stats"], &answer["stats"]["config"]);
    for (key, value) in [("cap", cap), ("loaders", loaders), ("threads", threads), ("prefill_chunk", chunk)] {
        assert_eq!(config[key].to_string(), value, "{key}");
    }
    assert_eq!(config["direct"], direct);
    let cached = count(stats, "/experts/hits/cached");
    match cap {
        "0" => assert_eq!(cached, 0, "nothing is kept, and yet something was found"),
        "64" => {
            assert_eq!(count(stats, "/experts/evictions"), 0);
            assert_eq!(count(stats, "/experts/misses"), count(stats, "/experts/verified"), "read twice");
        }
        _ => assert!(count(stats, "/experts/evictions") > 0, "{stats}"),
    }
    let prefill = |name: &str| {
        count(stats, &format!("/experts/{name}")) - count(stats, &format!("/experts/decode/{name}"))
    };
    // A row alone never shares an expert; rows of one step do.
    assert_eq!(prefill("lookups") == prefill("selections"), chunk == "1", "{stats}");
    if loaders == "1" {
        let depth = stats["io"]["mean_depth"].as_f64().unwrap();
        assert!(depth <= 1.0 + 1e-9, "one loader, {depth} reads at a time");
    }
}

/// Whether the demo model's file system takes direct reads.
fn direct_reads_work() -> bool {
    let model = demo();
    let args = ["run", "x", "--json", "--max-tokens", "1", "--direct", "on"];
    let outcome = call(&model, &[&args[..], &["--model", model.to_str().unwrap()]].concat());
    let works = outcome.code == 0;
    if !works {
        assert!(outcome.error().contains("direct reads of"), "{}", outcome.stdout);
        println!("SKIPPED: the file system takes no direct reads: {}", outcome.error());
    }
    works
}

#[test]
#[cfg(target_os = "linux")]
fn bytes_of_direct_reads_are_what_the_system_counted() {
    if !direct_reads_work() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // What the system counts for the shell includes the child that it waited for.
    let script = "\"$@\" > answer.json && cat /proc/$$/io";
    let output = std::process::Command::new("sh")
        .args(["-c", script, "sh", env!("CARGO_BIN_EXE_metaltail"), "run", QUESTION, "--json"])
        .args(["--direct", "on", "--cap", "4", "--max-tokens", "12", "--model"])
        .arg(demo())
        .current_dir(dir.path())
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    let system: u64 = line.unwrap_or_else(|| panic!("{text}")).parse().unwrap();
    let answer = std::fs::read_to_string(dir.path().join("answer.json")).unwrap();
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let io = &answer["stats"]["io"];
    let (bytes, cold) = (count(io, "/bytes"), count(io, "/cold_bytes"));
    assert!(bytes > 0 && cold >= bytes, "{io}");
    assert!(system >= cold, "the system counted {system}, the program {cold}");
}

#[test]
fn ids_need_no_tokenizer_and_continue_as_the_oracle_does() {
    for family in [
        "glm_moe_dsa",
        "deepseek_v3",
        "olmoe",
        "qwen3_moe",
        "mixtral",
        "glm4_moe",
        "gpt_oss",
        "gpt_oss_mxfp4",
        "minimax_m2",
        "qwen3_5_moe",
    ] {
        let (model, oracle) = oracle(family);
        let greedy = &oracle["greedy"];
        let wanted = ids(&greedy["ids"]);
        let margins = greedy["margin"].as_array().unwrap().iter().map(|margin| margin.as_f64().unwrap());
        // Where the two best ids are nearly equal, rounding may choose either.
        let certain = margins.take_while(|margin| *margin >= 1e-3).count();
        let dir = tempfile::tempdir().unwrap();
        let file = ids_file(dir.path(), &ids(&greedy["prompt"]));
        let (model, file) = (model.to_str().unwrap(), file.to_str().unwrap());
        let tokens = wanted.len().to_string();
        let args = ["run", "--json", "--exact", "--temperature", "0", "--ids", file, "--model", model];
        let answer = call(dir.path(), &[&args[..], &["--max-tokens", &tokens]].concat()).expect(0).json();
        assert_eq!(answer["text"], Value::Null);
        assert_eq!(answer["prompt_ids"], greedy["prompt"]);
        assert!(certain > 0);
        let got = ids(&answer["ids"]);
        assert!(got.len() >= certain, "{family}: {answer}");
        assert_eq!(got[..certain], wanted[..certain], "{family}");
        let words =
            call(dir.path(), &["run", "--max-tokens", "2", "--ids", file, "--model", model]).expect(0);
        assert!(words.stdout.starts_with('['), "ids are shown where there is no text: {}", words.stdout);
    }
}

#[test]
fn a_piped_prompt_is_the_same_prompt() {
    let model = demo();
    let args =
        ["run", "--json", "--temperature", "0", "--max-tokens", "5", "--model", model.to_str().unwrap()];
    let given = ask(&[QUESTION, "--temperature", "0", "--max-tokens", "5"]);
    for input in [QUESTION.to_owned(), format!("{QUESTION}\n")] {
        let answer = piped(&model, &args, &input).expect(0).json();
        assert_eq!((&answer["prompt_ids"], &answer["ids"]), (&given["prompt_ids"], &given["ids"]));
    }
}

#[test]
fn the_template_is_applied_unless_raw_is_asked_for() {
    let tokenizer = Tokenizer::from_dir(&demo()).unwrap();
    let prompt = |args: &[&str]| ids(&ask(&[args, &["--max-tokens", "0"]].concat())["prompt_ids"]);
    let rendered = prompt(&[QUESTION]);
    let text = tokenizer.decode(&rendered, false).unwrap();
    let golden = "[gMASK]<sop><|user|>Define \"hummingbird\".<|assistant|><think></think>";
    assert_eq!(text, golden);
    assert_eq!(prompt(&["--raw", golden]), rendered, "special tokens in raw text are recognised");
    let bare = prompt(&["--raw", QUESTION]);
    assert!(bare.iter().all(|id| !tokenizer.is_special(*id)), "raw adds nothing: {bare:?}");
    assert_eq!(tokenizer.decode(&bare, false).unwrap(), QUESTION);
}

#[test]
fn special_tokens_are_split_off_wherever_they_stand() {
    let tokenizer = Tokenizer::from_dir(&demo()).unwrap();
    let special = tokenizer.token_to_id("<|assistant|>").unwrap();
    for before in ["Hello, world!", "so (it goes).", "tabs\t\t", "blanks   ", "\n\n", "…"] {
        let text = format!("{before}<|assistant|>");
        let answer = ask(&["--raw", &text, "--max-tokens", "0"]);
        let prompt = ids(&answer["prompt_ids"]);
        let (last, rest) = prompt.split_last().unwrap();
        assert_eq!(*last, special, "{text:?}: {prompt:?}");
        let alone = ids(&ask(&["--raw", before, "--max-tokens", "0"])["prompt_ids"]);
        assert_eq!(rest, alone, "{text:?}");
    }
}

#[test]
fn a_stop_text_ends_the_answer_and_is_not_shown() {
    let base = [QUESTION, "--temperature", "0", "--max-tokens", "20"];
    let whole = ask(&base);
    let text = whole["text"].as_str().unwrap();
    let stop = &text[text.len() / 2..text.len() / 2 + 4];
    let answer = ask(&[&base[..], &["--stop", "never to be said", "--stop", stop]].concat());
    assert_eq!(answer["finish"], "stop");
    assert_eq!(answer["text"], text[..text.find(stop).unwrap()]);
    let (short, long) = (ids(&answer["ids"]), ids(&whole["ids"]));
    assert!(short.len() < long.len() && long.starts_with(&short), "{short:?} {long:?}");
}

#[test]
fn a_stop_id_ends_the_answer_and_is_its_last_id() {
    let answer = ask(&["What is the capital of France?", "--temperature", "0", "--max-tokens", "400"]);
    assert_eq!(answer["finish"], "stop");
    let last = *ids(&answer["ids"]).last().unwrap();
    assert!([0, 7, 9].contains(&last), "{answer}");
    assert!(!answer["text"].as_str().unwrap().contains("<|"), "{answer}");
}

#[test]
fn nothing_and_one_token_can_be_asked_for() {
    let none = ask(&[QUESTION, "--max-tokens", "0"]);
    assert_eq!(
        (&none["ids"], &none["text"], &none["finish"]),
        (&Value::Array(vec![]), &"".into(), &"length".into())
    );
    let stats = &none["stats"];
    assert_eq!((count(stats, "/decode/tokens"), &stats["decode"]["tokens_per_second"]), (0, &Value::Null));
    let one = ask(&[QUESTION, "--max-tokens", "1"]);
    assert_eq!(ids(&one["ids"]).len(), 1);
    assert_eq!((count(&one["stats"], "/decode/tokens"), &one["finish"]), (0, &"length".into()));
    assert_eq!(one["stats"]["experts"]["decode"]["hit_rate"], Value::Null, "no look-ups, no rate");
}

#[test]
fn a_full_context_ends_the_answer_with_length() {
    let dir = tiny("slab");
    models::without_stops(&dir.path().join("model"));
    let file = ids_file(dir.path(), &seeded_ids(16, 200));
    let base = ["run", "--json", "--model", "model", "--ids", file.to_str().unwrap()];
    let answer = call(dir.path(), &[&base[..], &["--context", "40"]].concat()).expect(0).json();
    assert_eq!(answer["finish"], "length");
    // Forty positions are computed; the last of them predicts one token more.
    assert_eq!(ids(&answer["ids"]).len(), 40 - 16 + 1);
    assert_eq!(count(&answer["stats"], "/decode/tokens"), 40 - 16);
    assert_eq!(answer["stats"]["config"]["context"], 40);
}

#[test]
fn a_prompt_longer_than_the_context_is_refused_with_both_lengths() {
    let dir = tiny("slab");
    let file = ids_file(dir.path(), &seeded_ids(100, 200));
    let base = ["run", "--json", "--model", "model", "--ids", file.to_str().unwrap(), "--context", "64"];
    let refused = call(dir.path(), &base).expect(2);
    let error = refused.error();
    assert!(error.contains("100") && error.contains("64"), "{error}");
    assert_eq!(refused.json()["error"]["kind"], "usage");
}

#[test]
fn a_seed_decides_the_text() {
    let seeded = |seed: &str| {
        ask(&[QUESTION, "--temperature", "1", "--top-p", "1", "--max-tokens", "24", "--seed", seed])["ids"]
            .clone()
    };
    assert_eq!(seeded("7"), seeded("7"));
    assert_ne!(seeded("7"), seeded("8"));
    // Without a seed it is 0, and without settings it samples as generation_config.json says.
    let unset = ask(&[QUESTION, "--max-tokens", "4"]);
    let config = &unset["stats"]["config"];
    assert_eq!(config["seed"], 0);
    // With the digits that were written, not those of a wider number.
    assert_eq!((&config["temperature"], &config["top_p"]), (&json!(0.7), &json!(0.9)));
    let set = ask(&[QUESTION, "--max-tokens", "3", "--min-p", "0.1", "--expert-top-p", "0.8"]);
    let config = &set["stats"]["config"];
    assert_eq!((&config["min_p"], &config["expert_top_p"]), (&json!(0.1), &json!(0.8)));
    let dropped = |of: &str| count(&set, &format!("/stats/experts/{of}dropped"));
    assert!(dropped("decode/") <= dropped("") && dropped("") > 0, "{}", set["stats"]["experts"]);
    let notices = set["stats"]["notices"].to_string();
    assert!(notices.contains("lossy") && notices.contains("metaltail score says"), "{notices}");
}

#[test]
fn what_a_file_says_wrongly_is_refused_with_its_name() {
    let dir = tiny("slab");
    let file = ids_file(dir.path(), &[]);
    let base = ["run", "--json", "--model", "model", "--max-tokens", "1", "--ids", file.to_str().unwrap()];
    let error = call(dir.path(), &base).expect(2).error();
    assert!(error.contains("ids.json: ") && error.contains("empty"), "{error}");
    ids_file(dir.path(), &[1, 2]);
    let recommended = dir.path().join("model/generation_config.json");
    for (key, value) in [("top_p", 1.5), ("top_p", 0.0), ("temperature", -1.0), ("min_p", 2.0)] {
        fs::write(&recommended, json!({"do_sample": true, key: value}).to_string()).unwrap();
        let error = call(dir.path(), &base).expect(3).error();
        assert!(error.contains("model/generation_config.json"), "{error}");
        let flag = format!("--{}", key.replace('_', "-"));
        call(dir.path(), &[&base[..], &[&flag, "0.5"]].concat()).expect(0);
    }
}

#[test]
fn exact_is_another_computation_and_says_so() {
    let base = [QUESTION, "--max-tokens", "2"];
    let config = |args: &[&str]| ask(&[&base[..], args].concat())["stats"]["config"].clone();
    assert_eq!(config(&[])["exact"], false);
    assert_eq!(config(&["--exact"])["exact"], true);
}
