//! Settings and refusals, from outside: where a value may come from, and how wrong ones end.

#[path = "support/models.rs"]
mod models;
#[path = "support/program.rs"]
mod program;

use std::fs;
use std::path::Path;

use models::{call, demo, ids_file, oracle};
use program::{Outcome, program, run, tiny};
use serde_json::Value;

/// `run --json` of two tokens on `model`, with variables and flags.
fn with(dir: &Path, variables: &[(&str, &str)], flags: &str) -> Outcome {
    ids_file(dir, &[1, 2, 3]);
    let line = format!("run --json --model model --ids ids.json --max-tokens 2 {flags}");
    let mut command = program(dir);
    let output = command.envs(variables.iter().copied()).args(line.split_whitespace()).output().unwrap();
    Outcome {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn config(outcome: Outcome) -> Value {
    outcome.expect(0).json()["stats"]["config"].clone()
}

#[test]
fn a_flag_beats_the_environment_and_that_the_file() {
    let dir = tiny("slab");
    let resolved = |variables: &[(&str, &str)], flags: &str| {
        let config = config(with(dir.path(), variables, flags));
        (config["cap"].clone(), config["origins"]["cap"].clone())
    };
    assert_eq!(resolved(&[], "").1, "default");
    fs::write(dir.path().join("metaltail.toml"), "cap = 5\nprefill-chunk = 7\n").unwrap();
    assert_eq!(resolved(&[], ""), (5.into(), "file".into()));
    assert_eq!(resolved(&[("METALTAIL_CAP", "3")], ""), (3.into(), "environment".into()));
    assert_eq!(resolved(&[("METALTAIL_CAP", "3")], "--cap 1"), (1.into(), "flag".into()));
    let from_file = config(with(dir.path(), &[], "--cap 1"));
    assert_eq!(
        (&from_file["prefill_chunk"], &from_file["origins"]["prefill_chunk"]),
        (&7.into(), &"file".into())
    );
}

#[test]
fn zero_and_off_are_values_wherever_they_were_given() {
    let dir = tiny("slab");
    let variables = [
        ("METALTAIL_CAP", "0"),
        ("METALTAIL_CHECKSUMS", "off"),
        ("METALTAIL_TEMPERATURE", "0"),
        ("METALTAIL_TOP_K", "0"),
        ("METALTAIL_EXACT", "off"),
    ];
    fs::write(
        dir.path().join("metaltail.toml"),
        "cap = 4\nchecksums = true\ntemperature = 1.5\nexact = true\n",
    )
    .unwrap();
    let answer = with(dir.path(), &variables, "").expect(0).json();
    let (config, experts) = (&answer["stats"]["config"], &answer["stats"]["experts"]);
    assert_eq!((&config["cap"], &experts["hits"]["cached"]), (&0.into(), &0.into()));
    assert_eq!((&config["checksums"], &experts["verified"]), (&"off".into(), &0.into()));
    assert_eq!((&config["temperature"], &config["exact"]), (&0.0.into(), &false.into()));
    let flags = config_of_flags(dir.path());
    assert_eq!(
        (&flags["cap"], &flags["checksums"], &flags["temperature"]),
        (&0.into(), &"off".into(), &0.0.into())
    );
    assert_eq!(flags["exact"], false);
}

fn config_of_flags(dir: &Path) -> Value {
    let against = [("METALTAIL_CAP", "2"), ("METALTAIL_CHECKSUMS", "on"), ("METALTAIL_EXACT", "on")];
    config(with(dir, &against, "--cap 0 --checksums off --temperature 0 --exact=off"))
}

#[test]
fn an_unknown_name_is_wrong_usage_that_suggests_the_near_one() {
    let dir = tiny("slab");
    let refused = with(dir.path(), &[("METALTAIL_TEMPERATUR", "1")], "").expect(2);
    assert!(refused.error().contains("METALTAIL_TEMPERATURE"), "{}", refused.stdout);
    let refused = with(dir.path(), &[], "--temperatur 1").expect(2);
    assert!(refused.error().contains("--temperature"), "{}", refused.stdout);
    fs::write(dir.path().join("metaltail.toml"), "prefil-chunk = 4\n").unwrap();
    let refused = with(dir.path(), &[], "").expect(2);
    let error = refused.error();
    assert!(error.contains("prefill-chunk") && error.contains("metaltail.toml"), "{error}");
}

#[test]
fn a_value_is_parsed_whole_and_an_error_says_where_it_stands() {
    let dir = tiny("slab");
    for flags in [
        "--temperature abc",
        "--temperature 0.7x",
        "--temperature -1",
        "--temperature nan",
        "--top-p 1.5",
        "--min-p 2",
        "--cap -1",
        "--cap 3.5",
        "--ram 24X",
        "--loaders 0",
        "--context 0",
        "--prefill-chunk 0",
        "--direct maybe",
        "--seed x",
        "--max-tokens -1",
        "--policy mru",
        "--threads 1025",
        "--threads 18446744073709551615",
        "--loaders 257",
        "--loaders 1000000000",
        "--prefill-chunk 65537",
        "--context 268435457",
        "--cap 4294967296",
    ] {
        let refused = with(dir.path(), &[], flags).expect(2);
        let flag = flags.split(' ').next().unwrap();
        assert!(refused.error().contains(flag), "{flags}: {}", refused.stdout);
        assert_eq!(refused.json()["error"]["kind"], "usage");
    }
    // What another program may have put there is refused, not read up to the first odd character.
    let refused = with(dir.path(), &[("METALTAIL_TEMPERATURE", "/tmp")], "").expect(2);
    assert!(refused.error().contains("METALTAIL_TEMPERATURE"), "{}", refused.stdout);
}

#[test]
fn the_largest_numbers_of_each_range_work() {
    let dir = tiny("slab");
    // A thread is charged for its stack, and this many are too much for a small machine.
    for flags in ["--threads 64", "--loaders 256", "--prefill-chunk 65536", "--cap 4294967295"] {
        with(dir.path(), &[], flags).expect(0);
    }
    let unlimited = u64::MAX;
    with(dir.path(), &[], &format!("--top-k {unlimited} --seed {unlimited} --temperature 1")).expect(0);
}

#[test]
fn every_command_tells_the_programs_version() {
    let dir = tempfile::tempdir().unwrap();
    let told = |line: &str| run(dir.path(), line).expect(0).stdout;
    let version = told("--version");
    assert!(version.starts_with("metaltail "), "{version}");
    for line in ["run --version", "bench --version", "bench kernels --version"] {
        assert_eq!(told(line), version, "{line}");
    }
}

#[test]
fn json_that_was_asked_for_once_is_what_errors_are() {
    let dir = tempfile::tempdir().unwrap();
    let refused = run(dir.path(), "run hello --json --json=maybe").expect(2);
    assert_eq!(refused.json()["error"]["kind"], "usage");
}

#[test]
fn what_has_no_end_and_what_no_one_writes_is_refused() {
    let dir = tiny("slab");
    let pipe = dir.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for file in ["pipe", "/dev/zero", "."] {
        let refused = run(dir.path(), &format!("run --json --model model --ids {file}")).expect(2);
        assert!(refused.error().contains("regular file"), "{file}: {}", refused.stdout);
        let refused = run(dir.path(), &format!("score --json --model model --ids {file}")).expect(2);
        assert!(refused.error().contains("regular file"), "{file}: {}", refused.stdout);
        let refused = with(dir.path(), &[("METALTAIL_CONFIG", file)], "").expect(2);
        assert!(refused.error().contains("regular file"), "{file}: {}", refused.stdout);
    }
    for (line, part) in [("run --json --model model", "longer than"), ("chat --model model", "longer than")] {
        let endless = fs::File::open("/dev/zero").unwrap();
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_metaltail"))
            .args(line.split(' '))
            .env_clear()
            .current_dir(dir.path())
            .stdin(endless)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{line}: {output:?}");
        let told = [output.stdout, output.stderr].concat();
        assert!(String::from_utf8_lossy(&told).contains(part), "{line}");
    }
    fs::rename(&pipe, dir.path().join("metaltail.toml")).unwrap();
    with(dir.path(), &[], "").expect(2);
}

#[test]
fn variables_of_other_programs_mean_nothing() {
    let dir = tiny("slab");
    let variables = [("TEMPERATURE", "/tmp"), ("TEMP", "/tmp"), ("CAP", "1"), ("RAM", "x")];
    let config = config(with(dir.path(), &variables, ""));
    assert_eq!((&config["origins"]["temperature"], &config["cap"]), (&"default".into(), &8.into()));
}

#[test]
fn without_a_model_the_ways_to_name_one_are_told() {
    let dir = tempfile::tempdir().unwrap();
    // A copy, since the program also looks for the checkout that it was built in.
    let alone = dir.path().join("metaltail");
    fs::copy(env!("CARGO_BIN_EXE_metaltail"), &alone).unwrap();
    let mut command = assert_cmd::Command::new(&alone);
    let output =
        command.args(["run", "hello", "--json"]).env_clear().current_dir(dir.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error: Value = serde_json::from_slice(&output.stdout).unwrap();
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("--model") && message.contains("METALTAIL_MODEL"), "{message}");
}

#[test]
fn a_model_can_be_named_by_the_environment() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = program(dir.path());
    let args = ["run", "hello", "--json", "--max-tokens", "1"];
    let output = command.args(args).env("METALTAIL_MODEL", demo()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["stats"]["config"]["origins"]["model"], "environment");
}

#[test]
fn a_model_that_is_missing_or_damaged_is_refused_by_name() {
    let dir = tiny("slab");
    let refused = run(dir.path(), "run hello --model nowhere --json").expect(3);
    assert!(refused.error().contains("nowhere"), "{}", refused.stdout);
    assert_eq!(refused.json()["error"]["kind"], "model");

    let dense = dir.path().join("model/dense-00000.safetensors");
    let whole = fs::read(&dense).unwrap();
    let damaged = |content: Vec<u8>| {
        fs::write(&dense, content).unwrap();
        let refused = run(dir.path(), "run hello --model model --json").expect(3);
        assert!(refused.error().contains("dense-00000.safetensors"), "{}", refused.stdout);
    };
    // A header longer than the file, a header that is not JSON, and half a file.
    damaged([&u64::MAX.to_le_bytes()[..], &whole[8..]].concat());
    damaged([&whole[..8], b"{metadata", &whole[17..]].concat());
    damaged(whole[..whole.len() / 2].to_vec());
    fs::write(&dense, &whole).unwrap();
    fs::remove_file(dir.path().join("model/experts-00002.safetensors")).unwrap();
    let refused = run(dir.path(), "run hello --model model --json").expect(3);
    assert!(refused.error().contains("experts-00002"), "{}", refused.stdout);
}

#[test]
fn a_damaged_expert_is_refused_when_it_is_read() {
    let dir = tiny("slab");
    let file = dir.path().join("model/experts-00002.safetensors");
    // The last blob of the last expert ends with padding; the middle of the file is inside weights.
    let middle = usize::try_from(fs::metadata(&file).unwrap().len()).unwrap() / 2;
    program::flip(&file, middle);
    let ids = ids_file(dir.path(), &models::seeded_ids(200, 256));
    let base = ["run", "--json", "--model", "model", "--max-tokens", "1", "--ids", ids.to_str().unwrap()];
    let refused = call(dir.path(), &base).expect(3);
    let error = refused.error();
    for part in ["layer 2", "experts-00002.safetensors", "checksum", "offset"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let unchecked = call(dir.path(), &[&base[..], &["--checksums", "off"]].concat()).expect(0).json();
    assert_eq!(unchecked["stats"]["experts"]["verified"], 0);
}

#[test]
fn verbose_tells_the_budget_and_the_way_of_reading_first() {
    let dir = tiny("slab");
    let told = with(dir.path(), &[], "-v --direct off").expect(0);
    for part in ["program", "in_flight", "cached", "sum", "left", "reads: "] {
        assert!(told.stderr.contains(part), "{part}: {}", told.stderr);
    }
    assert_eq!(told.json()["stats"]["config"]["verbose"], true);
    assert_eq!(config(with(dir.path(), &[], ""))["verbose"], false);
}

#[test]
fn a_header_whose_shape_and_bytes_disagree_is_refused() {
    let (model, _) = oracle("glm_moe_dsa");
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(model.join(name), dir.path().join(name)).unwrap();
    }
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let length = usize::try_from(u64::from_le_bytes(whole[..8].try_into().unwrap())).unwrap();
    let header: Value = serde_json::from_slice(&whole[8..8 + length]).unwrap();
    for shape in [vec![320u64, 65], vec![1 << 33, 1 << 33], vec![64]] {
        let mut header = header.clone();
        header["model.embed_tokens.weight"]["shape"] = shape.clone().into();
        let header = header.to_string();
        let mut content = (header.len() as u64).to_le_bytes().to_vec();
        content.extend(header.as_bytes());
        content.extend(&whole[8 + length..]);
        fs::write(&path, content).unwrap();
        let ids = ids_file(dir.path(), &[1, 2]);
        let args = ["run", "--json", "--model", ".", "--ids", ids.to_str().unwrap()];
        let refused = call(dir.path(), &args).expect(3);
        let error = refused.error();
        assert!(error.contains("embed_tokens") && error.contains("model.safetensors"), "{shape:?}: {error}");
    }
}

#[test]
fn a_damaged_config_is_refused_by_name() {
    let dir = tiny("slab");
    let path = dir.path().join("model/config.json");
    let whole = fs::read(&path).unwrap();
    let refused = |what: &str| {
        let refused = run(dir.path(), "run hello --model model --json").expect(3);
        assert!(refused.error().contains(what), "{what}: {}", refused.stdout);
        fs::write(&path, &whole).unwrap();
    };
    fs::write(&path, "{\"model_type\" \"glm\"}").unwrap();
    refused("config.json");
    program::edit_json(&path, |config| config["indexer_types"] = serde_json::json!(["full"]));
    refused("indexer_types");
    program::edit_json(&path, |config| config["num_hidden_layers"] = (-3).into());
    refused("num_hidden_layers");
    program::edit_json(&path, |config| {
        config.as_object_mut().unwrap().remove("hidden_size");
    });
    refused("hidden_size");
}

#[test]
fn a_tokenizer_of_another_model_is_refused_before_it_is_used() {
    let dir = tiny("slab");
    program::edit_json(&dir.path().join("model/tokenizer.json"), |tokenizer| {
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        vocab.values_mut().for_each(|id| *id = (id.as_u64().unwrap() + 1000).into());
    });
    let refused = with(dir.path(), &[], "").expect(3);
    assert_eq!(refused.json()["error"]["kind"], "model", "{}", refused.stdout);
}

#[test]
fn a_budget_too_small_is_refused_with_every_term() {
    let dir = tiny("slab");
    let refused = with(dir.path(), &[], "--ram 1M").expect(4);
    let error = refused.error();
    for part in
        ["program", "dense", "kv", "scratch", "in_flight", "cached", "sum", "limit", "1.0 MiB", "missing"]
    {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(refused.json()["error"]["kind"], "budget");
    let words = run(dir.path(), "run --model model --ids ids.json --ram 1M").expect(4);
    assert!(words.stderr.starts_with("error: ") && words.stderr.contains("missing"), "{}", words.stderr);
    assert_eq!(words.stdout, "");
}

#[test]
fn an_explicit_value_that_cannot_be_met_is_refused() {
    let dir = tiny("slab");
    let refused = with(dir.path(), &[], "--ram 1000000G").expect(4);
    assert!(refused.error().contains("the machine has"), "{}", refused.stdout);
    let refused = with(dir.path(), &[], "--context 100000").expect(2);
    assert!(refused.error().contains("4096"), "{}", refused.stdout);
    // The demo model's dense part and 64 experts a layer need more than this, two a layer do not.
    let model = demo();
    let budget = |cap: &str| {
        let args = ["run", "x", "--json", "--max-tokens", "1", "--context", "256", "--prefill-chunk", "16"];
        let rest = ["--ram", "75M", "--cap", cap, "--threads", "1", "--loaders", "1"];
        call(&model, &[&args[..], &rest[..]].concat())
    };
    let refused = budget("64").expect(4);
    assert!(refused.error().contains("cap 64 does not fit"), "{}", refused.stdout);
    budget("2").expect(0);
}

#[test]
fn a_cap_above_the_experts_of_a_layer_keeps_all_there_are() {
    let dir = tiny("slab");
    let stats = with(dir.path(), &[], "--cap 100000").expect(0).json()["stats"].clone();
    assert_eq!(stats["config"]["cap"], 100_000, "an explicit value is never overwritten");
    assert_eq!(stats["experts"]["slots"], 3 * 8);
    assert_eq!(stats["experts"]["evictions"], 0);
}

#[test]
fn words_and_files_that_make_no_sense_are_wrong_usage() {
    let dir = tiny("slab");
    let ids = |text: &str| fs::write(dir.path().join("ids.json"), text).unwrap();
    let line = "run --json --model model --ids ids.json";
    for text in
        ["", "[1, 2]", "{\"ids\": [1.5]}", "{\"ids\": [-1]}", "{\"ids\": [1], \"more\": 2}", "{\"ids\": []}"]
    {
        ids(text);
        run(dir.path(), line).expect(2);
    }
    ids("{\"ids\": [1, 272]}");
    let refused = run(dir.path(), line).expect(2);
    assert!(refused.error().contains("272"), "{}", refused.stdout);
    for line in [
        "run --json --nonsense",
        "run a b --json",
        "run --json --model model --ids nowhere.json",
        "tune --json",
    ] {
        let refused = run(dir.path(), line).expect(2);
        assert_eq!(refused.json()["error"]["kind"], "usage");
        assert!(!refused.json()["error"]["message"].as_str().unwrap().is_empty());
    }
    ids("{\"ids\": [1]}");
    fs::remove_file(dir.path().join("model/tokenizer.json")).unwrap();
    let refused = run(dir.path(), "run hello --json --model model").expect(3);
    assert!(refused.error().contains("--ids"), "{}", refused.stdout);
    let refused = run(dir.path(), &format!("{line} --stop x")).expect(2);
    assert!(refused.error().contains("tokenizer"), "{}", refused.stdout);
}
