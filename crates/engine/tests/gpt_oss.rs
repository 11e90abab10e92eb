//! gpt_oss, whose experts are repacked when they have been read: bits are the same whatever reads, keeps and computes.

mod common;
#[path = "common/sequences.rs"]
mod sequences;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::path::{Path, PathBuf};

use metaltail_engine::EngineOptions;
use metaltail_store::{Direct, Io};
use sequences::Sequences;
use synthetic::{random_ids, settings};

/// The form of transformers, and that of the published checkpoints.
const FORMS: [&str; 2] = ["gpt_oss", "gpt_oss_mxfp4"];

fn form(name: &str) -> PathBuf {
    common::root().join("fixtures/oracles").join(name)
}

fn oracle() -> PathBuf {
    form(FORMS[0])
}

/// Longer than three windows.
fn text() -> Vec<u32> {
    random_ids(60, 320, 11)
}

/// Bits of all hidden states, the text cut into pieces of these lengths, the last one as long as it takes.
fn bits(path: &Path, options: &EngineOptions, pieces: &[usize]) -> Vec<u32> {
    let engine = common::open(path, options);
    let mut sequence = Sequences::new(&engine, 1);
    let (text, mut all) = (text(), Vec::new());
    let (mut rest, mut pieces) = (&text[..], pieces.iter());
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(pieces.next().copied().unwrap_or(rest.len()).min(rest.len()));
        all.extend(sequence.step(&[(0, piece)]).concat());
        rest = after;
    }
    engine.store().audit().unwrap();
    all
}

fn io_ways() -> Vec<Io> {
    let uring = EngineOptions { io: Io::Uring, ..settings() };
    let telemetry = std::sync::Arc::new(metaltail_engine::telemetry::Telemetry::new(Vec::new()));
    match metaltail_engine::Engine::open(&oracle(), &uring, telemetry, &|_, _| {}) {
        Ok(_) => vec![Io::Threads, Io::Uring],
        Err(error) => {
            println!("SKIPPED: no io_uring: {error}");
            vec![Io::Threads]
        }
    }
}

#[test]
fn caps_loaders_threads_and_ways_to_read_change_no_bit() {
    for (path, io) in FORMS.iter().flat_map(|name| io_ways().into_iter().map(|io| (form(name), io))) {
        let whole = bits(&path, &settings(), &[]);
        for (cap, loaders, threads, chunk, prefetch) in [
            (0, 1, 1, None, false),
            (1, 4, 2, Some(4096), false),
            (3, 2, 1, None, true),
            (8, 3, 2, Some(8192), true),
        ] {
            let options = EngineOptions {
                io,
                cap: Some(cap),
                loaders: Some(loaders),
                threads: Some(threads),
                chunk_bytes: chunk,
                prefetch: Some(prefetch),
                direct: Direct::Off,
                ..settings()
            };
            let same = bits(&path, &options, &[]) == whole;
            assert!(same, "{}, {io:?}, cap {cap}, {loaders} loaders", path.display());
        }
    }
}

#[test]
fn a_prompt_in_pieces_gives_the_bits_of_the_whole() {
    for exact in [false, true] {
        let options = EngineOptions { exact, ..settings() };
        let whole = bits(&oracle(), &options, &[]);
        // Pieces that end inside a window, at its edge, and row by row across it.
        for pieces in [&[16, 16, 16][..], &[15, 1, 1, 30], &[1; 60], &[40, 1, 1, 1, 1, 7]] {
            assert!(bits(&oracle(), &options, pieces) == whole, "{pieces:?}");
        }
    }
}

/// Rows of another sequence beside it, and a text taken back to a position inside the window.
#[test]
fn neighbours_and_a_text_taken_back_change_no_bit() {
    let engine = common::open(&oracle(), &settings());
    let text = text();
    let whole = Sequences::new(&engine, 1).step(&[(0, &text[..])]).concat();
    let mut sequences = Sequences::new(&engine, 2);
    let other = random_ids(25, 320, 5);
    let first = sequences.step(&[(1, &other[..9]), (0, &text[..37])]);
    sequences.truncate(0, 21);
    let second = sequences.step(&[(0, &text[21..]), (1, &other[9..])]);
    let width = engine.plan().hidden;
    assert!(first[1][..] == whole[..37 * width]);
    assert!(second[0][..] == whole[21 * width..]);
}

/// A window is a limit: what lies before it must not be seen, and what lies in it must.
#[test]
fn a_layer_with_a_window_sees_the_window_and_nothing_before_it() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // One layer, and that with a window of four: the last state depends on four ids alone.
    let mut config = common::json(&oracle().join("config.json"));
    config["num_hidden_layers"] = 1.into();
    config["layer_types"] = serde_json::json!(["sliding_attention"]);
    config["sliding_window"] = 4.into();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    std::fs::copy(oracle().join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let engine = common::open(dir.path(), &settings());
    let width = engine.plan().hidden;
    let last = |changed: Option<usize>| {
        let mut ids = random_ids(12, 320, 3);
        if let Some(at) = changed {
            ids[at] = (ids[at] + 1) % 320;
        }
        let bits = Sequences::new(&engine, 1).step(&[(0, &ids)]).concat();
        bits[bits.len() - width..].to_vec()
    };
    let wanted = last(None);
    for at in 0..12 {
        assert_eq!(last(Some(at)) == wanted, at < 8, "position {at}");
    }
}

/// Copies for the repack are charged: a copy of an expert for each loader and one more.
#[test]
fn the_memory_of_the_repack_is_charged() {
    let scratch = |name: &str, loaders| {
        let engine = common::open(&form(name), &EngineOptions { loaders: Some(loaders), ..settings() });
        let terms = &engine.budget().terms;
        terms.iter().find(|term| term.name == "scratch").unwrap().bytes
    };
    // Gate, up and down of 64 × 64 numbers: in bf16, and in blocks of 32 that take 17 bytes.
    for (name, number) in FORMS.into_iter().zip([2.0, 17.0 / 32.0]) {
        let expert = (3.0 * 64.0 * 64.0 * number) as u64;
        assert_eq!(scratch(name, 5) - scratch(name, 2), 3 * expert, "{name}");
    }
}
