//! One accounting of selections: telemetry, usage profile and what `--expert-top-p` leaves out.

mod common;
#[path = "common/synthetic.rs"]
mod synthetic;

use metaltail_container::synth::{Like, SynthFormat};
use metaltail_engine::{Engine, EngineOptions, PinMode, UsageMode, UsagePlace, score};
use metaltail_model::CancelFlag;
use metaltail_store::usage::read_profile;
use synthetic::{Synthetic, random_ids, settings};

/// Selections of both phases, and of these those left out.
fn selections(engine: &Engine) -> (u64, u64) {
    let figures = engine.telemetry().figures();
    (figures.prefill.selections + figures.decode.selections, figures.prefill.dropped + figures.decode.dropped)
}

#[test]
fn the_profile_counts_tokens_times_layers_times_top_k() {
    let model = Synthetic::of(Like::Tiny, SynthFormat::Hf);
    let dir = tempfile::tempdir().unwrap();
    let usage = UsageMode::On(UsagePlace::Directory(dir.path().into()));
    // Chunked prefill, decode, and experts left out: all count alike.
    for (run, top_p) in [(1, None), (2, Some(0.5))] {
        let options =
            EngineOptions { usage: usage.clone(), prefill_chunk: Some(7), expert_top_p: top_p, ..settings() };
        let engine = model.open(&options);
        common::greedy(&engine, &random_ids(20, 256, 6), 30);
        let rows = engine.telemetry().figures().prefill.rows + engine.telemetry().figures().decode.rows;
        let (counted, dropped) = selections(&engine);
        assert_eq!(counted, rows * model.plan.selections_per_row() as u64);
        assert_eq!(dropped > 0, top_p.is_some());
        assert_eq!(engine.usage().unwrap().unsaved(), counted);
        let path = engine.usage().unwrap().path().to_owned();
        // Saved when the engine goes.
        drop(engine);
        let profile = read_profile(&path).unwrap();
        assert_eq!(profile.selections(), run * counted);
        assert!(profile.sampled() > 0);
        assert_eq!(profile.selections() % profile.identity().selections_per_token(), 0);
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn pins_are_decided_from_the_profile_and_never_change_a_result() {
    let model = Synthetic::tiny();
    let dir = tempfile::tempdir().unwrap();
    let usage = UsageMode::On(UsagePlace::File(dir.path().join("u")));
    let in_memory =
        |ram, pin| EngineOptions { cap: None, ram: Some(ram), usage: usage.clone(), pin, ..settings() };
    let roomy = model.open(&in_memory(80 << 20, PinMode::Auto));
    assert_eq!(roomy.pins().reason, "there is a slot for every expert");
    let cached = roomy.budget().terms.iter().find(|term| term.name == "cached").unwrap().bytes;
    let tight = roomy.budget().total() - cached / 2;
    drop(roomy);
    let options = |pin| in_memory(tight, pin);
    let prompt = random_ids(20, 256, 6);
    let first = model.open(&options(PinMode::Auto));
    assert_eq!(first.pins().reason, "the usage profile is empty as yet");
    let ids = common::greedy(&first, &prompt, 100);
    drop(first);
    let second = model.open(&options(PinMode::Auto));
    assert_eq!(second.pins().plan.candidates.len(), 9, "{:?}", second.pins());
    assert_eq!(common::greedy(&second, &prompt, 100), ids);
    drop(second);
    let sized = EngineOptions { pin_size: Some(64 << 10), ..options(PinMode::Auto) };
    let sized = model.open(&sized);
    let pins = &sized.pins().plan;
    assert!(!pins.pinned.is_empty() && pins.bytes <= 64 << 10, "{pins:?}");
    assert_eq!(common::greedy(&sized, &prompt, 100), ids);
}

#[test]
fn leaving_nothing_out_is_the_same_bits_and_leaving_out_is_counted_apart() {
    let model = Synthetic::tiny();
    let sequences = vec![random_ids(40, 256, 3)];
    let scored = |top_p| {
        let engine = model.open(&EngineOptions { expert_top_p: top_p, ..settings() });
        let scored = score(&engine, &sequences, &[5, 39], &CancelFlag::new(), &mut |_| {}).unwrap();
        (scored.nll, scored.logits, selections(&engine))
    };
    let off = scored(None);
    assert_eq!(scored(Some(1.0)), off);
    let lossy = scored(Some(0.6));
    assert_ne!(lossy.1, off.1);
    assert_eq!((lossy.2.0, off.2.1), (off.2.0, 0));
    assert!(lossy.2.1 > 0 && lossy.2.1 < lossy.2.0, "{:?}", lossy.2);
    // On one loaded model, with and without.
    let engine = model.open(&EngineOptions { expert_top_p: Some(0.6), ..settings() });
    engine.set_expert_top_p(None);
    let without = score(&engine, &sequences, &[5, 39], &CancelFlag::new(), &mut |_| {}).unwrap();
    assert_eq!((without.nll, without.logits), (off.0, off.1));
    let notices = engine.telemetry().figures().notices;
    assert!(notices.iter().any(|notice| notice.contains("lossy")), "{notices:?}");
}
