//! GGUF models, run where they lie (`fixtures/gguf/README.md`).

mod common;
#[path = "common/oracle.rs"]
mod oracle;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use common::{exact, greedy, root};
use metaltail_container::Checkpoint;
use metaltail_container::convert::{ConvertOptions, convert};
use metaltail_engine::{Engine, EngineOptions, score};
use metaltail_model::{CancelFlag, MlaForm, Plan};
use metaltail_store::Direct;

/// Families whose oracle was written to GGUF.
const FAMILIES: [&str; 11] = [
    "deepseek_v3",
    "deepseek_v3_noqlora",
    "glm4_moe",
    "glm_moe_dsa",
    "glm_moe_dsa_dense_ctx",
    "gpt_oss",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen3_5_moe",
    "qwen3_moe",
];

fn file(name: &str) -> PathBuf {
    root().join("fixtures/gguf/oracles").join(name).with_extension("gguf")
}

/// The oracle of a family's checkpoint.
fn checkpoints(family: &str) -> PathBuf {
    root().join("fixtures/oracles").join(family).join("oracle.json")
}

fn prompt() -> Vec<u32> {
    (0..30).map(|i| (i * 37 + 11) % 250).collect()
}

/// Greedy ids and logit bits.
fn answers(engine: &Engine) -> (Vec<u32>, Vec<u32>) {
    let ids = greedy(engine, &prompt(), 8);
    let score = score(engine, &[prompt()], &[0, 15, 29], &CancelFlag::new(), &mut |_| {}).unwrap();
    (ids, score.logits.values().flatten().map(|logit| logit.to_bits()).collect())
}

#[test]
fn every_architecture_agrees_with_the_oracle_of_its_checkpoint() {
    for family in FAMILIES {
        oracle::agrees(&file(family), &checkpoints(family), MlaForm::Absorbed);
    }
}

/// These have no checkpoint in `fixtures/oracles`; llama.cpp is the oracle.
#[test]
fn further_architectures_agree_with_llama_cpp() {
    for name in ["deepseek_v2", "qwen2_moe"] {
        oracle::agrees(&file(name), &file(name).with_extension("json"), MlaForm::Absorbed);
    }
}

#[test]
fn keys_and_values_that_are_stored_apart_are_rebuilt_alike() {
    for family in ["deepseek_v3", "glm_moe_dsa"] {
        oracle::agrees(&file(family), &checkpoints(family), MlaForm::Reconstructed);
    }
}

#[test]
fn a_split_set_gives_the_bits_of_the_whole_from_any_of_its_files() {
    let whole = answers(&common::open(&file("olmoe"), &exact()));
    for part in 1..=3 {
        let set = common::open(&file(&format!("olmoe_split-0000{part}-of-00003")), &exact());
        assert!(answers(&set) == whole, "opened by part {part}");
    }
}

/// An expert of a stacked tensor takes three reads, one of a slab container one.
#[test]
fn a_slab_of_a_file_gives_the_same_bits_with_a_third_of_the_reads() {
    for family in FAMILIES {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let slab = dir.path().join("slab");
        to_slab(&file(family), &slab);
        let options = EngineOptions { cap: Some(0), direct: Direct::Off, ..exact() };
        let [from_file, from_slab] = [file(family), slab].map(|path| {
            let engine = common::open(&path, &options);
            let answers = answers(&engine);
            (answers, engine.resolved().container.clone(), engine.telemetry().figures().io.reads)
        });
        assert!(from_file.0 == from_slab.0, "{family}");
        assert_eq!((from_file.1.as_str(), from_slab.1.as_str()), ("gguf", "slab"));
        assert_eq!(from_file.2, 3 * from_slab.2, "{family}");
    }
}

fn to_slab(from: &Path, to: &Path) {
    let mut source = Checkpoint::open(from).unwrap();
    let inventory = Plan::of(&mut source).unwrap().inventory();
    convert(&source, &inventory, to, &ConvertOptions::keep(), &mut |_| ControlFlow::Continue(())).unwrap();
}

#[test]
fn ids_do_not_depend_on_cap_loaders_threads_or_direct_reads() {
    for family in ["qwen3_moe", "deepseek_v3"] {
        let wanted = answers(&common::open(&file(family), &exact()));
        for (cap, loaders, threads, direct) in
            [(0, 1, 1, Direct::Off), (1, 4, 2, Direct::On), (3, 2, 3, Direct::Off), (8, 1, 2, Direct::On)]
        {
            let options = EngineOptions {
                cap: Some(cap),
                loaders: Some(loaders),
                threads: Some(threads),
                direct,
                ..exact()
            };
            let engine = common::open(&file(family), &options);
            assert!(answers(&engine) == wanted, "{family}: cap {cap}, {loaders} loaders, {threads} threads");
        }
    }
}

#[test]
fn a_directory_with_one_model_is_that_model() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for part in 1..=3 {
        let name = format!("olmoe_split-0000{part}-of-00003.gguf");
        std::fs::copy(file(&name), dir.path().join(&name)).unwrap();
    }
    let engine = common::open(dir.path(), &exact());
    assert!(answers(&engine) == answers(&common::open(&file("olmoe"), &exact())));
}
