//! A row has the same bits however many rows, of however many sequences, share its step.

mod common;
#[path = "common/sequences.rs"]
mod sequences;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::path::Path;

use metaltail_container::synth::{Like, SynthFormat, SynthOptions};
use metaltail_engine::{Engine, EngineOptions};
use metaltail_model::MlaForm;
use proptest::prelude::*;
use sequences::Sequences;
use synthetic::{Synthetic, random_ids, settings};

/// Bits of one sequence computed alone, a row a step.
fn alone(engine: &Engine, ids: &[u32]) -> Vec<u32> {
    let mut sequences = Sequences::new(engine, 1);
    ids.chunks(1).flat_map(|id| sequences.step(&[(0, id)]).concat()).collect()
}

/// Four prompts of different lengths prefilled apart, then two steps together, then a ragged one.
fn assert_batches_keep_bits(engine: &Engine, what: &str) {
    let vocab = engine.plan().vocab.min(256) as u32;
    let texts: Vec<Vec<u32>> = [4, 17, 29, 36].iter().map(|&n| random_ids(n + 5, vocab, n as u32)).collect();
    let mut sequences = Sequences::new(engine, 4);
    let mut found: Vec<Vec<u32>> = texts
        .iter()
        .enumerate()
        .map(|(s, text)| sequences.step(&[(s, &text[..text.len() - 5])]).remove(0))
        .collect();
    let mut together = |pieces: &[(usize, &[u32])]| {
        for ((s, _), bits) in pieces.iter().zip(sequences.step(pieces)) {
            found[*s].extend(bits);
        }
    };
    let tail = |s: usize, from: usize, to: usize| -> (usize, &[u32]) {
        let at = texts[s].len() - 5;
        (s, &texts[s][at + from..at + to])
    };
    together(&[tail(0, 0, 1), tail(1, 0, 1), tail(2, 0, 1), tail(3, 0, 1)]);
    together(&[tail(3, 1, 2), tail(1, 1, 2), tail(0, 1, 2), tail(2, 1, 2)]);
    together(&[tail(2, 2, 5), tail(0, 2, 3), tail(3, 2, 4), tail(1, 2, 5)]);
    for (s, (text, found)) in texts.iter().zip(&found).enumerate() {
        let wanted = alone(engine, &text[..found.len() / engine.plan().hidden]);
        assert!(*found == wanted, "{what}: bits of sequence {s} depend on its company");
    }
}

/// One thread: thread counts have a test of their own, and many tiny steps are quicker so.
fn options(exact: bool) -> EngineOptions {
    EngineOptions { exact, threads: Some(1), ..settings() }
}

#[test]
fn rows_keep_their_bits_in_every_format_and_numerics() {
    let base = SynthOptions::new(Like::Tiny, SynthFormat::Slab);
    let formats = ["int4", "int4-g32", "int8", "fp8", "bf16", "f16", "f32"];
    for format in formats {
        let synth = SynthOptions { experts: format.parse().unwrap(), ..base };
        let model = Synthetic::new(Like::Tiny, &synth);
        for exact in [true, false] {
            let engine = model.open(&options(exact));
            assert_batches_keep_bits(&engine, &format!("{format}, exact {exact}"));
        }
    }
}

#[test]
fn rows_keep_their_bits_in_every_family() {
    let families = common::root().join("fixtures/oracles");
    let mut seen = 0;
    for entry in std::fs::read_dir(families).unwrap() {
        let path = entry.unwrap().path();
        assert_batches_keep_bits(&common::open(&path, &options(true)), &path.to_string_lossy());
        seen += 1;
    }
    assert!(seen >= 10);
}

#[test]
fn rows_keep_their_bits_in_the_reconstructed_form() {
    let model = Synthetic::tiny();
    let form = MlaForm::Reconstructed;
    let engine = common::open_form(model.path(), &options(false), form);
    assert_batches_keep_bits(&engine, "reconstructed");
}

#[test]
fn rows_keep_their_bits_with_one_more_thread_than_processors() {
    let model = Synthetic::tiny();
    let bits = |threads| {
        let options = EngineOptions { threads: Some(threads), ..settings() };
        alone(&model.open(&options), &random_ids(30, 256, 3))
    };
    let many = std::thread::available_parallelism().map_or(3, |n| n.get() + 1);
    assert_eq!(bits(1), bits(many));
}

/// One chunk against row by row, past the point where an indexer begins to select.
fn assert_prefill_keeps_bits(path: &Path, exact: bool) {
    let engine = common::open(path, &options(exact));
    let vocab = engine.plan().vocab.min(256) as u32;
    let ids = random_ids(60, vocab, 5);
    let chunk = Sequences::new(&engine, 1).step(&[(0, &ids)]).remove(0);
    assert!(chunk == alone(&engine, &ids), "{}, exact {exact}", path.display());
}

#[test]
fn prefill_in_one_chunk_is_prefill_row_by_row_with_sparse_attention_active() {
    let model = Synthetic::tiny();
    for exact in [true, false] {
        assert_prefill_keeps_bits(model.path(), exact);
        let oracle = common::root().join("fixtures/oracles/glm_moe_dsa");
        assert_prefill_keeps_bits(&oracle, exact);
    }
}

#[test]
fn sparse_attention_is_active_where_the_tests_say_so() {
    // The same weights that keep every position answer differently once the context is longer
    // than what the indexer keeps, and not before.
    let sparse = Synthetic::tiny();
    let dense = Synthetic::tiny();
    let config = dense.path().join("config.json");
    let mut json = common::json(&config);
    json["index_topk"] = 4096.into();
    std::fs::write(&config, json.to_string()).unwrap();
    let ids = random_ids(synthetic::INDEX_TOPK + 20, 256, 9);
    let bits = |model: &Synthetic| alone(&model.open(&options(true)), &ids);
    let (sparse, dense) = (bits(&sparse), bits(&dense));
    let same = synthetic::INDEX_TOPK * 64;
    assert!(sparse[..same] == dense[..same], "selection changed a context that it keeps whole");
    assert!(sparse[same..] != dense[same..], "no selection took place");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn any_schedule_of_sequences_gives_the_same_bits(
        schedule in prop::collection::vec(
            prop::collection::btree_map(0usize..4, 1usize..12, 1..5), 1..8),
        exact: bool,
    ) {
        let model = Synthetic::tiny();
        let engine = model.open(&options(exact));
        let texts: Vec<Vec<u32>> = (0..4).map(|s| random_ids(96, 256, 50 + s)).collect();
        let mut sequences = Sequences::new(&engine, 4);
        let mut found = vec![Vec::new(); 4];
        for step in &schedule {
            let pieces: Vec<(usize, &[u32])> = step
                .iter()
                .map(|(&s, &n)| {
                    let at = sequences.len(s);
                    (s, &texts[s][at..at + n])
                })
                .collect();
            for ((s, _), bits) in pieces.iter().zip(sequences.step(&pieces)) {
                found[*s].extend(bits);
            }
        }
        for (text, found) in texts.iter().zip(&found) {
            let rows = found.len() / engine.plan().hidden;
            prop_assert!(*found == alone(&engine, &text[..rows]));
        }
    }
}
