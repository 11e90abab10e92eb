//! How requests begin and end: cancellation, limits, refusals, reuse of what was computed.

mod common;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::sync::Arc;

use metaltail_engine::sampler::Sampling;
use metaltail_engine::{
    Engine, EngineError, EngineOptions, Finish, Flow, GenerateOptions, Generation, Session, score,
};
use metaltail_model::{CancelFlag, ModelError};
use proptest::prelude::*;
use synthetic::{Router, Synthetic, random_ids, settings};

fn options(max_tokens: Option<usize>) -> GenerateOptions {
    GenerateOptions { sampling: Sampling::GREEDY, max_tokens, stop_ids: Vec::new() }
}

fn generate(session: &mut Session<'_>, prompt: &[u32], count: usize) -> Generation {
    let each = &mut |_| Flow::Continue;
    session.generate(prompt, &options(Some(count)), &CancelFlag::new(), each).unwrap()
}

fn small_chunks() -> EngineOptions {
    EngineOptions { prefill_chunk: Some(8), ..settings() }
}

/// T63, prefill: whichever layer of whichever chunk the flag is set in is the last that runs.
#[test]
fn a_cancelled_prefill_ends_within_a_layer_and_goes_on_later() {
    let model = Synthetic::tiny();
    let prompt = random_ids(36, 256, 1);
    let wanted = common::greedy(&model.open(&small_chunks()), &prompt, 10);
    // Three sparse layers a chunk, five chunks.
    for cancel_at in [1, 2, 3, 4, 8, 14] {
        let ear = Router::cancelling_at(cancel_at);
        let engine = model.open_heard(&small_chunks(), ear.clone());
        let mut session = Session::new(&engine);
        let each = &mut |_| Flow::Continue;
        let ended = session.generate(&prompt, &options(Some(10)), &ear.flag, each).unwrap();
        assert_eq!(ended, Generation { ids: Vec::new(), finish: Finish::Cancelled });
        assert_eq!(ear.routed(), cancel_at, "layers ran on after the flag was set");
        assert_eq!(session.ids(), &prompt[..cancel_at / 3 * 8], "whole chunks are kept");

        let again = generate(&mut session, &prompt, 10);
        assert_eq!(again.ids, wanted, "cancelled at {cancel_at}");
        assert_eq!(session.ids().len(), 36 + 9);
    }
}

/// T63, decode.
#[test]
fn a_cancelled_decode_keeps_its_tokens_and_goes_on_later() {
    let model = Synthetic::tiny();
    let engine = model.open(&settings());
    let prompt = random_ids(20, 256, 2);
    let wanted = common::greedy(&engine, &prompt, 12);
    let mut session = Session::new(&engine);
    let flag = CancelFlag::new();
    let mut told = Vec::new();
    let ended = session
        .generate(&prompt, &options(Some(12)), &flag, &mut |id| {
            told.push(id);
            if told.len() == 5 {
                flag.cancel();
            }
            Flow::Continue
        })
        .unwrap();
    assert_eq!(ended, Generation { ids: told.clone(), finish: Finish::Cancelled });
    assert_eq!(told, wanted[..5]);
    let rest = generate(&mut session, &[prompt, told].concat(), 7);
    assert_eq!(rest.ids, wanted[5..]);
}

#[test]
fn a_flag_set_before_the_request_computes_nothing() {
    let model = Synthetic::tiny();
    let engine = model.open(&settings());
    let flag = CancelFlag::new();
    flag.cancel();
    let mut session = Session::new(&engine);
    let ended = session.generate(&[1, 2, 3], &options(None), &flag, &mut |_| Flow::Continue).unwrap();
    assert_eq!(ended.finish, Finish::Cancelled);
    assert_eq!(engine.telemetry().figures().prefill.rows, 0);
    assert!(session.ids().is_empty());
    let error = score(&engine, &[vec![1, 2]], &[], &flag, &mut |_| {}).unwrap_err();
    assert!(matches!(error, EngineError::Model(ModelError::Cancelled)));
    flag.reset();
    assert!(score(&engine, &[vec![1, 2]], &[], &flag, &mut |_| {}).is_ok());
}

#[test]
fn a_full_context_ends_with_length() {
    let model = Synthetic::tiny();
    let options32 = EngineOptions { context: Some(32), ..settings() };
    let engine = model.open(&options32);
    let wanted = common::greedy(&model.open(&settings()), &random_ids(25, 256, 3), 8);
    let mut session = Session::new(&engine);
    let prompt = random_ids(25, 256, 3);
    let each = &mut |_| Flow::Continue;
    let ended = session.generate(&prompt, &options(None), &CancelFlag::new(), each).unwrap();
    assert_eq!(ended.finish, Finish::Length);
    // Seven rows fit behind the prompt, and the last of them predicts one more.
    assert_eq!(ended.ids, wanted);
    assert_eq!(session.ids().len(), 32);
    // A prompt that fills the context predicts one token.
    let full = random_ids(32, 256, 3);
    let ended = session.generate(&full, &options(None), &CancelFlag::new(), each).unwrap();
    assert_eq!((ended.ids.len(), ended.finish), (1, Finish::Length));
}

/// T60: refused with both lengths, never cut.
#[test]
fn a_prompt_longer_than_the_context_is_refused_with_both_lengths() {
    let model = Synthetic::tiny();
    let engine = model.open(&EngineOptions { context: Some(64), ..settings() });
    let mut session = Session::new(&engine);
    let each = &mut |_| Flow::Continue;
    let error =
        session.generate(&random_ids(100, 256, 4), &options(Some(1)), &CancelFlag::new(), each).unwrap_err();
    assert!(matches!(error, EngineError::PromptTooLong { prompt: 100, context: 64 }));
    let text = error.to_string();
    assert!(text.contains("100") && text.contains("64"), "{text}");
    assert_eq!(engine.telemetry().figures().prefill.rows, 0);
    assert_eq!(generate(&mut session, &random_ids(20, 256, 4), 2).ids.len(), 2);
}

#[test]
fn bad_requests_are_refused_and_harm_nothing() {
    let model = Synthetic::tiny();
    let engine = model.open(&small_chunks());
    let prompt = random_ids(20, 256, 5);
    let wanted = common::greedy(&engine, &prompt, 6);
    let mut session = Session::new(&engine);
    let mut ask = |prompt: &[u32], options: &GenerateOptions| {
        session.generate(prompt, options, &CancelFlag::new(), &mut |_| Flow::Continue)
    };
    assert!(matches!(ask(&[], &options(None)), Err(EngineError::EmptyPrompt)));
    let mut damaged = prompt.clone();
    damaged[17] = 272;
    let error = ask(&damaged, &options(None)).unwrap_err();
    assert!(matches!(error, EngineError::Model(ModelError::TokenOutOfRange { id: 272, vocab: 272 })));
    let cold =
        GenerateOptions { sampling: Sampling { temperature: -1.0, ..Sampling::GREEDY }, ..options(Some(1)) };
    let rows = engine.telemetry().figures().prefill.rows;
    assert!(matches!(ask(&prompt, &cold), Err(EngineError::Setting(_))));
    assert_eq!(engine.telemetry().figures().prefill.rows, rows, "nothing is computed in vain");
    assert_eq!(ask(&prompt, &options(Some(6))).unwrap().ids, wanted);
    let error = score(&engine, &[prompt], &[20], &CancelFlag::new(), &mut |_| {}).unwrap_err();
    assert!(matches!(error, EngineError::PositionPastEnd { position: 20, len: 20 }));
}

#[test]
fn stop_ids_and_the_listener_end_with_stop() {
    let model = Synthetic::tiny();
    let engine = model.open(&settings());
    let prompt = random_ids(20, 256, 6);
    let wanted = common::greedy(&engine, &prompt, 10);
    let first = |id: u32| wanted.iter().position(|&other| other == id).unwrap();
    let stop = wanted[6];
    let stopping = GenerateOptions { stop_ids: vec![stop], ..options(Some(10)) };
    let mut told = Vec::new();
    let ended = Session::new(&engine)
        .generate(&prompt, &stopping, &CancelFlag::new(), &mut |id| {
            told.push(id);
            Flow::Continue
        })
        .unwrap();
    assert_eq!(ended.finish, Finish::Stop);
    assert_eq!(ended.ids, wanted[..=first(stop)], "the stop id is the last");
    assert_eq!(told, wanted[..first(stop)], "and is not told");
    let ended = Session::new(&engine)
        .generate(&prompt, &options(Some(10)), &CancelFlag::new(), &mut |_| Flow::Stop)
        .unwrap();
    assert_eq!(ended, Generation { ids: wanted[..1].to_vec(), finish: Finish::Stop });
    assert!(generate(&mut Session::new(&engine), &prompt, 0).ids.is_empty());
}

#[test]
fn a_session_computes_only_what_is_new() {
    let model = Synthetic::tiny();
    let engine = model.open(&settings());
    let mut session = Session::new(&engine);
    let prompt = random_ids(30, 256, 7);
    let reply = generate(&mut session, &prompt, 5).ids;
    let turn = [prompt, reply, random_ids(10, 256, 8)].concat();
    engine.telemetry().reset();
    let ids = generate(&mut session, &turn, 5).ids;
    // 34 of 35 rows are there: the last reply id was never a row.
    assert_eq!(engine.telemetry().figures().prefill.rows, 11);
    assert_eq!(ids, common::greedy(&engine, &turn, 5));
    // The same prompt again: its last row is computed again for its logits.
    engine.telemetry().reset();
    assert_eq!(generate(&mut session, &turn, 5).ids, ids);
    assert_eq!(engine.telemetry().figures().prefill.rows, 1);
}

#[test]
fn impossible_settings_are_refused() {
    let model = Synthetic::tiny();
    let refused = |options: EngineOptions| model.try_open(&options).map(|_| ()).unwrap_err();
    assert!(matches!(
        refused(EngineOptions { context: Some(4097), ..settings() }),
        EngineError::ContextTooLong { asked: 4097, max: 4096 }
    ));
    assert!(matches!(refused(EngineOptions { context: Some(0), ..settings() }), EngineError::Setting(_)));
    assert!(matches!(refused(EngineOptions { loaders: Some(0), ..settings() }), EngineError::Setting(_)));
}

fn fresh(engine: &Engine, prompt: &[u32]) -> Vec<u32> {
    common::greedy(engine, prompt, 3)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn a_rewound_session_is_as_a_fresh_one(
        turns in prop::collection::vec((0usize..50, 1usize..30, 0u32..9), 1..5),
    ) {
        let model = Synthetic::tiny();
        let options = EngineOptions { threads: Some(1), ..small_chunks() };
        let engine = Arc::new(model.open(&options));
        let mut session = Session::new(&engine);
        for (keep, new, seed) in turns {
            let held = session.ids();
            let mut prompt = held[..keep.min(held.len())].to_vec();
            prompt.extend(random_ids(new, 256, seed));
            prop_assert_eq!(generate(&mut session, &prompt, 3).ids, fresh(&engine, &prompt));
        }
    }
}

#[test]
fn decoding_by_somebody_else_is_decoding() {
    let model = Synthetic::tiny();
    let engine = model.open(&settings());
    let prompt = random_ids(5, 256, 2);
    let wanted = generate(&mut Session::new(&engine), &prompt, 6).ids;
    engine.telemetry().reset();
    let mut ids = Vec::new();
    let mut greedy = |logits: &[f32]| {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        ids.push(logits.iter().position(|logit| *logit == most).unwrap() as u32);
        (ids.len() < 6).then(|| *ids.last().unwrap())
    };
    Session::new(&engine).follow(&prompt, &CancelFlag::new(), &mut greedy).unwrap();
    assert_eq!(ids, wanted);
    let figures = engine.telemetry().figures();
    assert_eq!((figures.prefill.rows, figures.decode.rows), (5, 5), "phases are told apart");
    let nothing = Session::new(&engine).follow(&[], &CancelFlag::new(), &mut |_| None);
    assert!(matches!(nothing, Err(EngineError::EmptyPrompt)));
}
