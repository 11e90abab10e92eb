//! Layers that keep a state of constant size: what a step, a cut, a failure and going back do to it.

mod common;
#[path = "common/sequences.rs"]
mod sequences;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::path::PathBuf;
use std::sync::Arc;

use metaltail_engine::telemetry::{Listener, Telemetry};
use metaltail_engine::{
    Engine, EngineError, EngineOptions, Flow, GenerateOptions, Session, sampler::Sampling,
};
use metaltail_model::{CancelFlag, KvCache, ModelError, Phase, Row};
use metaltail_store::Direct;
use sequences::Sequences;
use synthetic::{Router, random_ids, settings};

const VOCAB: u32 = 320;

fn dir() -> PathBuf {
    common::root().join("fixtures/oracles/qwen3_5_moe")
}

fn open(options: &EngineOptions) -> Engine {
    common::open(&dir(), options)
}

#[test]
fn no_setting_changes_the_bits_of_recurrent_layers() {
    let ids = random_ids(40, VOCAB, 1);
    let bits = |options: &EngineOptions| {
        let engine = open(options);
        let mut session = Session::new(&engine);
        let mut all = Vec::new();
        let keep = &mut |_, rows: &[f32]| {
            all.extend(rows.iter().map(|x| x.to_bits()));
            Ok(())
        };
        session.extend(&ids, &CancelFlag::new(), keep).unwrap();
        (all, common::greedy(&engine, &ids, 12))
    };
    for exact in [true, false] {
        let base = EngineOptions { exact, ..settings() };
        let wanted = bits(&base);
        for (cap, loaders, threads, chunk) in [(0, 1, 1, 1), (1, 4, 3, 7), (8, 2, 2, 16), (2, 1, 5, 40)] {
            let options = EngineOptions {
                cap: Some(cap),
                loaders: Some(loaders),
                threads: Some(threads),
                prefill_chunk: Some(chunk),
                direct: Direct::Off,
                ..base.clone()
            };
            assert!(bits(&options) == wanted, "exact {exact}: {cap} {loaders} {threads} {chunk}");
        }
    }
}

#[test]
fn a_prompt_may_be_cut_at_every_position() {
    let engine = open(&settings());
    let ids = random_ids(24, VOCAB, 2);
    let whole = Sequences::new(&engine, 1).step(&[(0, &ids)]).concat();
    for cut in 1..ids.len() {
        let mut sequences = Sequences::new(&engine, 1);
        let (first, second) = ids.split_at(cut);
        let pieces = [sequences.step(&[(0, first)]).concat(), sequences.step(&[(0, second)]).concat()];
        assert!(pieces.concat() == whole, "cut at {cut}");
    }
}

/// Rows of two sequences in turn, which no schedule of whole pieces gives.
#[test]
fn rows_of_sequences_may_alternate_within_a_step() {
    let engine = open(&settings());
    let texts = [random_ids(12, VOCAB, 3), random_ids(12, VOCAB, 4)];
    let mut caches = [KvCache::new(engine.plan()), KvCache::new(engine.plan())];
    let row = |sequence: usize, position: usize| Row {
        sequence,
        position: position as u32,
        token: texts[sequence][position],
        phase: Phase::Prompt,
    };
    let mut found = [Vec::new(), Vec::new()];
    for positions in [0..5, 5..12] {
        let rows: Vec<Row> = positions.flat_map(|p| [row(1, p), row(0, p)]).collect();
        let [one, other] = &mut caches;
        let hidden = engine.step(&rows, &mut [one, other], &CancelFlag::new()).unwrap();
        for (row, hidden) in rows.iter().zip(hidden.chunks(engine.plan().hidden)) {
            found[row.sequence].extend(hidden.iter().map(|x| x.to_bits()));
        }
    }
    for (text, found) in texts.iter().zip(&found) {
        assert!(Sequences::new(&engine, 1).step(&[(0, text)]).concat() == *found);
    }
}

#[test]
fn a_step_that_is_cancelled_in_any_layer_leaves_no_trace() {
    let (text, next) = (random_ids(9, VOCAB, 5), random_ids(6, VOCAB, 6));
    let engine = open(&settings());
    let mut sequences = Sequences::new(&engine, 1);
    sequences.step(&[(0, &text)]);
    let wanted = sequences.step(&[(0, &next)]);
    // The prompt's step routes four times; the flag is seen before the layer after.
    for layer in 1..=3 {
        let ear = Router::cancelling_at(4 + layer);
        let telemetry = Arc::new(Telemetry::new(vec![ear.clone() as Arc<dyn Listener>]));
        let engine = Engine::open(&dir(), &settings(), telemetry, &|_, _| {}).unwrap();
        let mut sequences = Sequences::new(&engine, 1);
        sequences.step(&[(0, &text)]);
        // Another text, so that what it left behind would show.
        let error = sequences.try_step(&[(0, &random_ids(6, VOCAB, 7))], &ear.flag).unwrap_err();
        assert!(matches!(error, EngineError::Model(ModelError::Cancelled)), "{error}");
        assert_eq!((ear.routed(), sequences.len(0)), (4 + layer, text.len()));
        assert!(sequences.step(&[(0, &next)]) == wanted, "cancelled after layer {layer}");
    }
}

#[test]
fn a_sequence_that_went_back_goes_on_as_if_it_had_never_been_further() {
    let engine = open(&settings());
    let text = random_ids(30, VOCAB, 8);
    let fresh = Sequences::new(&engine, 1).step(&[(0, &text)]).concat();
    let width = engine.plan().hidden;
    let mut sequences = Sequences::new(&engine, 1);
    sequences.step(&[(0, &text[..10])]);
    sequences.step(&[(0, &text[10..20])]);
    sequences.step(&[(0, &random_ids(1, VOCAB, 9))]);
    for (asked, had) in [(25, 21), (20, 10), (10, 10), (9, 0), (0, 0)] {
        assert_eq!(sequences.truncate(0, asked), had, "asked for {asked}");
        assert_eq!(sequences.len(0), had);
    }
    assert!(sequences.step(&[(0, &text[..10])]).concat() == fresh[..10 * width]);
    // From the kept state the rest is the same, twice.
    sequences.step(&[(0, &text[10..17])]);
    for _ in 0..2 {
        assert_eq!(sequences.truncate(0, 12), 10);
        assert!(sequences.step(&[(0, &text[10..])]).concat() == fresh[10 * width..]);
    }
}

#[test]
fn a_session_answers_another_prompt_as_a_new_one_does() {
    let options = EngineOptions { prefill_chunk: Some(8), ..settings() };
    let engine = open(&options);
    let text = random_ids(40, VOCAB, 10);
    let other = [&text[..21], &random_ids(5, VOCAB, 11)].concat();
    let asked = GenerateOptions { sampling: Sampling::GREEDY, max_tokens: Some(6), stop_ids: Vec::new() };
    let mut session = Session::new(&engine);
    // Longer, the same again, shorter, another end, and on from what was generated.
    for prompt in [&text[..], &text[..], &text[..30], &other[..], &text[..35]] {
        let ids = session.generate(prompt, &asked, &CancelFlag::new(), &mut |_| Flow::Continue).unwrap().ids;
        assert_eq!(ids, common::greedy(&engine, prompt, 6), "a prompt of {}", prompt.len());
        let longer = [session.ids(), &text[..3]].concat();
        let held = session.ids().len();
        assert_eq!(session.rewind_to(&longer), held, "nothing is forgotten that need not be");
        let ids = session.generate(&longer, &asked, &CancelFlag::new(), &mut |_| Flow::Continue).unwrap().ids;
        assert_eq!(ids, common::greedy(&engine, &longer, 6));
    }
}

#[test]
fn a_row_that_is_not_the_next_is_refused_and_changes_nothing() {
    let engine = open(&settings());
    let text = random_ids(8, VOCAB, 12);
    let mut cache = KvCache::new(engine.plan());
    let mut step = |positions: std::ops::Range<usize>| {
        let row = |p: usize| Row { sequence: 0, position: p as u32, token: text[p], phase: Phase::Prompt };
        let rows: Vec<Row> = positions.map(row).collect();
        engine.step(&rows, &mut [&mut cache], &CancelFlag::new())
    };
    step(0..4).unwrap();
    for positions in [3..5, 5..6] {
        let error = step(positions).unwrap_err();
        assert!(matches!(error, EngineError::Model(ModelError::NotNext { wanted: 4, .. })), "{error}");
    }
    let hidden = step(4..8).unwrap();
    let whole = Sequences::new(&engine, 1).step(&[(0, &text)]).concat();
    let bits: Vec<u32> = hidden.iter().map(|x| x.to_bits()).collect();
    assert!(bits[..] == whole[4 * engine.plan().hidden..]);
}

/// The state is charged whatever the context.
#[test]
fn the_budget_charges_the_state_of_a_sequence() {
    let kv = |context| {
        let engine = open(&EngineOptions { context: Some(context), ..settings() });
        engine.budget().terms.iter().find(|term| term.name == "kv").unwrap().bytes
    };
    let plan = open(&settings()).plan().clone();
    let page = 64 * 4 * plan.kv_floats_per_token() as u64;
    assert!(plan.state_bytes() > 0);
    assert_eq!(kv(64), 3 * plan.state_bytes() + page);
    assert_eq!(kv(512) - kv(64), 7 * page);
}
