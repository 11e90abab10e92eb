//! Ways to read, parts and drives: other bytes move, the same ids and bits come.

mod common;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::path::{Path, PathBuf};

use metaltail_engine::telemetry::Figures;
use metaltail_engine::{Engine, EngineOptions, score};
use metaltail_model::CancelFlag;
use metaltail_store::probe::uring_works;
use metaltail_store::{Direct, Io};
use synthetic::{Synthetic, random_ids, settings};

/// Greedy ids and the bits of some logits, with the figures of the generation.
fn answer(engine: &Engine) -> (Vec<u32>, Vec<Vec<u32>>, Figures) {
    let ids = common::greedy(engine, &random_ids(24, 256, 5), 10);
    let figures = engine.telemetry().figures();
    let score =
        score(engine, std::slice::from_ref(&ids), &[0, 4, 9], &CancelFlag::new(), &mut |_| {}).unwrap();
    let bits = score.logits.values().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect();
    (ids, bits, figures)
}

/// A directory beside the model with those of its files that `takes` names; the others stay where they are,
/// or, where `moves`, only there.
fn beside(model: &Synthetic, name: &str, takes: impl Fn(&str) -> bool, moves: bool) -> PathBuf {
    let dir = model.path().join(name);
    std::fs::create_dir(&dir).unwrap();
    for entry in std::fs::read_dir(model.path()).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_file() && takes(&file) {
            std::fs::copy(&path, dir.join(&file)).unwrap();
            if moves {
                std::fs::remove_file(&path).unwrap();
            }
        }
    }
    dir
}

fn options(io: Io, chunk_bytes: Option<u64>, further: &[&Path]) -> EngineOptions {
    let further = further.iter().map(|path| path.to_path_buf()).collect();
    EngineOptions { io, chunk_bytes, further, cap: Some(2), direct: Direct::Off, ..settings() }
}

fn carriers() -> Vec<Io> {
    match uring_works() {
        Ok(()) => vec![Io::Threads, Io::Uring],
        Err(why) => {
            println!("SKIPPED: no io_uring: {why}");
            vec![Io::Threads]
        }
    }
}

#[test]
fn ways_to_read_and_parts_change_neither_ids_nor_bits() {
    let model = Synthetic::tiny();
    let mirror = beside(&model, "mirror", |_| true, false);
    let (ids, bits, figures) = answer(&model.open(&options(Io::Threads, None, &[])));
    let misses = figures.prefill.misses + figures.decode.misses;
    assert_eq!(figures.io.reads, misses, "one read an expert from one drive");
    for io in carriers() {
        for chunk in [None, Some(4096), Some(1 << 30)] {
            for further in [&[][..], &[mirror.as_path()]] {
                let engine = model.open(&options(io, chunk, further));
                let (got, got_bits, figures) = answer(&engine);
                assert_eq!(got, ids, "{io:?} {chunk:?} {further:?}");
                assert!(got_bits == bits, "bits differ: {io:?} {chunk:?} {further:?}");
                assert_eq!(engine.resolved().io, if io == Io::Uring { "uring" } else { "threads" });
                let again = figures.prefill.misses + figures.decode.misses;
                assert_eq!(again, misses);
                // An expert of a tiny model is several pages, and less than a gibibyte.
                let cut = chunk == Some(4096);
                assert_eq!(figures.io.reads > again, cut, "{} reads of {again} misses", figures.io.reads);
                let drives = engine.store().drives();
                assert_eq!(drives.len(), 1 + further.len());
                assert!(drives.iter().all(|drive| drive.bytes > 0), "{drives:?}");
            }
        }
    }
}

#[test]
fn a_model_split_over_directories_is_the_same_model() {
    let model = Synthetic::tiny();
    let (ids, bits, _) = answer(&model.open(&options(Io::Threads, None, &[])));
    // Half of the expert files go elsewhere.
    let odd = |name: &str| name.starts_with("experts-") && name.ends_with("1.safetensors");
    let part = beside(&model, "part", odd, true);
    assert!(model.try_open(&options(Io::Threads, None, &[])).is_err(), "half of it is no model");
    for io in carriers() {
        let engine = model.open(&options(io, None, &[&part]));
        let (got, got_bits, _) = answer(&engine);
        assert!(got == ids && got_bits == bits);
        assert!(engine.store().drives().iter().all(|drive| drive.bytes > 0), "both are read");
    }
}

#[test]
fn a_mirror_that_differs_is_refused_with_what_differs() {
    let model = Synthetic::tiny();
    let mirror = beside(&model, "mirror", |_| true, false);
    let mut files = std::fs::read_dir(&mirror).unwrap().map(|entry| entry.unwrap().path());
    let file = files.find(|path| path.to_string_lossy().contains("experts-")).unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let refusal = || model.try_open(&options(Io::Threads, None, &[&mirror])).err().unwrap().to_string();
    let text = refusal();
    assert!(text.contains(&file.display().to_string()) && text.contains("offset"), "{text}");
    bytes.pop();
    std::fs::write(&file, &bytes).unwrap();
    let text = refusal();
    assert!(text.contains(&format!("it has {} bytes, wanted {}", bytes.len(), bytes.len() + 1)), "{text}");
}
