//! Settings that move bytes or share out work change neither ids nor bits.

mod common;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::sync::Arc;

use metaltail_engine::telemetry::Figures;
use metaltail_engine::{Engine, EngineError, EngineOptions, Session, score};
use metaltail_model::{CancelFlag, ModelError};
use metaltail_store::{Budget, Direct, PolicyKind, StoreError};
use proptest::prelude::*;
use synthetic::{INDEX_TOPK, Router, Synthetic, random_ids, settings};

const PROMPT: usize = 40;
const GENERATED: usize = 12;
const TOP_K: u64 = 2;

/// All that must be the same in every arm.
#[derive(Clone, Debug, PartialEq)]
struct Answer {
    ids: Vec<u32>,
    nll: u64,
    argmax: Vec<u32>,
    logits: Vec<Vec<u32>>,
}

/// Greedy ids after a prompt that is longer than what the indexer keeps, with the figures of that
/// generation, and logits of the whole text.
fn answer(engine: &Engine) -> (Answer, Figures) {
    let prompt = random_ids(PROMPT, 256, 1);
    assert!(prompt.len() > INDEX_TOPK);
    let ids = common::greedy(engine, &prompt, GENERATED);
    let figures = engine.telemetry().figures();
    let text = [prompt, ids.clone()].concat();
    let positions: Vec<usize> = (0..text.len()).step_by(5).collect();
    let score = score(engine, &[text], &positions, &CancelFlag::new(), &mut |_| {}).unwrap();
    let bits = |row: &Vec<f32>| row.iter().map(|x| x.to_bits()).collect();
    let answer = Answer {
        ids,
        nll: score.nll.unwrap().to_bits(),
        argmax: score.argmax[0].clone(),
        logits: score.logits.values().map(bits).collect(),
    };
    (answer, figures)
}

/// An engine with these settings; none where the file system has no direct reads.
fn open(model: &Synthetic, options: &EngineOptions) -> Option<Engine> {
    match model.try_open(options) {
        Err(EngineError::Store(StoreError::Direct { .. })) => {
            println!("SKIPPED: no direct reads on this file system");
            None
        }
        other => Some(other.unwrap()),
    }
}

/// The settings that were asked for are those that ran.
fn assert_engaged(engine: &Engine, options: &EngineOptions, figures: &Figures) {
    let resolved = engine.resolved();
    assert_eq!(Some(resolved.cap), options.cap);
    assert_eq!(Some(resolved.loaders), options.loaders);
    assert_eq!(Some(resolved.threads), options.threads);
    assert_eq!(Some(resolved.prefill_chunk), options.prefill_chunk);
    assert_eq!(resolved.direct, if options.direct == Direct::On { "on" } else { "off" });
    assert_eq!(resolved.exact, options.exact);
    assert_eq!(resolved.prefetch == "on", options.prefetch == Some(true));
    assert_eq!(resolved.cap_growth == "on", options.cap_growth == Some(true));
    assert!(options.prefetch == Some(true) || figures.io.prefetch.steps == 0);
    let cached = figures.prefill.cached + figures.decode.cached;
    match resolved.cap {
        0 if resolved.cap_growth == "off" => assert_eq!(cached, 0, "nothing is kept"),
        // With room for all experts none is read twice.
        64 => assert!(figures.decode.cached > 0 && figures.evictions == 0),
        _ => {}
    }
}

/// The counters agree with one another and with what was asked.
fn assert_accounted(model: &Synthetic, figures: &Figures) {
    let sparse = model.sparse_layers().len() as u64;
    assert_eq!(figures.prefill.rows, PROMPT as u64);
    assert_eq!(figures.decode.rows, GENERATED as u64 - 1);
    for phase in [&figures.prefill, &figures.decode] {
        assert_eq!(phase.selections, phase.rows * sparse * TOP_K);
        assert_eq!(phase.hits() + phase.misses, phase.lookups);
        assert!(phase.lookups <= phase.selections);
    }
    // One row asks for distinct experts only.
    assert_eq!(figures.decode.lookups, figures.decode.selections);
    let misses = figures.prefill.misses + figures.decode.misses;
    let ahead = figures.io.prefetch.issued_bytes;
    assert_eq!(figures.io.bytes, misses * model.expert_bytes(1) + ahead);
    assert_eq!(figures.io.reads, misses + ahead / model.expert_bytes(1), "one read an expert");
}

/// Arms that have every pair of settings; with `all`, every combination.
fn arms(all: bool) -> Vec<EngineOptions> {
    let mut arms = Vec::new();
    for (c, cap) in [0, 1, 2, 6, 64].into_iter().enumerate() {
        for (p, prefill_chunk) in [1, 16, 256].into_iter().enumerate() {
            for (l, loaders) in [1, 2, 4].into_iter().enumerate() {
                for (t, threads) in [1, 2].into_iter().enumerate() {
                    for (d, direct) in [Direct::Off, Direct::On].into_iter().enumerate() {
                        if !all && (l != (c + p) % 3 || d != (c + p + t) % 2) {
                            continue;
                        }
                        arms.push(EngineOptions {
                            direct,
                            cap: Some(cap),
                            loaders: Some(loaders),
                            threads: Some(threads),
                            prefill_chunk: Some(prefill_chunk),
                            prefetch: Some((c + l + t) % 2 == 0),
                            cap_growth: Some(l == 1),
                            ..settings()
                        });
                    }
                }
            }
        }
    }
    arms
}

#[test]
fn no_setting_changes_ids_or_bits() {
    let model = Synthetic::tiny();
    let mut reference: Option<Answer> = None;
    let mut ran = 0;
    // All 180 combinations where the code is optimised, else 30 with every pair among them.
    for options in arms(!cfg!(debug_assertions)) {
        let Some(engine) = open(&model, &options) else { continue };
        let (answer, figures) = answer(&engine);
        assert_engaged(&engine, &options, &figures);
        assert_accounted(&model, &figures);
        assert_eq!(answer.ids.len(), GENERATED);
        let reference = reference.get_or_insert_with(|| answer.clone());
        assert_eq!(answer.ids, reference.ids, "{options:?}");
        assert!(answer == *reference, "bits differ: {options:?}");
        ran += 1;
    }
    assert!(ran >= 15, "{ran} arms ran");
}

#[test]
fn exact_numerics_are_as_invariant_and_differ_from_the_default() {
    let model = Synthetic::tiny();
    let exact = |cap, threads, chunk| {
        let options = EngineOptions {
            exact: true,
            cap: Some(cap),
            threads: Some(threads),
            prefill_chunk: Some(chunk),
            ..settings()
        };
        answer(&model.open(&options)).0
    };
    let reference = exact(0, 1, 1);
    for (cap, threads, chunk) in [(1, 2, 16), (6, 1, 256), (64, 2, 7), (2, 3, 33)] {
        assert_eq!(exact(cap, threads, chunk), reference, "{cap} {threads} {chunk}");
    }
    let rounded = answer(&model.open(&settings())).0;
    assert_ne!(rounded.logits, reference.logits, "activations were not quantised");
}

#[test]
fn a_larger_cache_reads_less() {
    let model = Synthetic::tiny();
    let misses = |cap| {
        let options = EngineOptions { cap: Some(cap), ..settings() };
        let figures = answer(&model.open(&options)).1;
        figures.prefill.misses + figures.decode.misses
    };
    let (none, one, all) = (misses(0), misses(1), misses(64));
    assert!(none > all && one > all && none >= one, "{none}, {one}, {all} misses");
    assert!(all <= 24, "{all} misses of 24 experts");
}

/// Case T51: below one token's experts comparisons of policies by recency mean nothing, and speed is lost.
#[test]
fn a_cache_below_one_tokens_experts_is_named_with_both_numbers() {
    let model = Synthetic::tiny();
    let notices = |cap, policy| {
        let options = EngineOptions { cap: Some(cap), policy: Some(policy), ..settings() };
        model.open(&options).telemetry().figures().notices
    };
    let cliff = |notices: &[String]| notices.iter().find(|n| n.contains("has room for 3 experts")).cloned();
    // Three sparse layers of two experts a token.
    let by_recency = cliff(&notices(1, PolicyKind::Lru)).unwrap();
    assert!(
        by_recency.contains("one token uses 6") && by_recency.contains("--policy frecency"),
        "{by_recency}"
    );
    let frecency = cliff(&notices(1, PolicyKind::Frecency)).unwrap();
    assert!(frecency.contains("one token uses 6"), "{frecency}");
    assert!(!notices(2, PolicyKind::Lru).iter().any(|notice| notice.contains("has room for")));
    // What helps is what was too little.
    assert!(frecency.contains("A larger --cap helps"), "{frecency}");
    let none = notices(0, PolicyKind::Frecency);
    assert!(none.iter().any(|n| n.contains("room for 0 experts and one token uses 6")), "{none:?}");
}

/// What the report sums up is what there is: a cache that grew is charged as it is now.
#[test]
fn the_budgets_terms_follow_a_cache_that_grows() {
    let model = Synthetic::tiny();
    let options = EngineOptions { cap: Some(1), cap_growth: Some(true), ..settings() };
    let engine = model.open(&options);
    let cached = |budget: Budget| budget.terms.iter().find(|t| t.name == "cached").unwrap().bytes;
    let before = cached(engine.budget());
    common::greedy(&engine, &random_ids(4, 256, 4), 4);
    let grown = engine.telemetry().figures().grown_bytes;
    assert!(grown > 0);
    assert_eq!(cached(engine.budget()), before + grown);
    assert!(engine.budget().total() <= engine.budget().limit);
}

#[test]
fn an_expert_is_read_once_a_layer_and_step_for_any_number_of_rows() {
    let model = Synthetic::tiny();
    for chunk in [1, 16, 256] {
        let ear = Router::cancelling_at(0);
        let options =
            EngineOptions { cap: Some(0), prefill_chunk: Some(chunk), prefetch: Some(false), ..settings() };
        let engine = model.open_heard(&options, ear.clone());
        common::greedy(&engine, &random_ids(PROMPT, 256, 2), 1);
        let figures = engine.telemetry().figures();
        assert_eq!(figures.prefill.lookups, ear.distinct() as u64);
        assert_eq!(figures.io.reads, ear.distinct() as u64);
        let steps = PROMPT.div_ceil(chunk) as u64;
        assert_eq!(ear.routed() as u64, steps * 3);
        if chunk > 1 {
            assert!(figures.io.reads < figures.prefill.selections, "rows share experts");
            assert!(figures.io.reads <= steps * 3 * 8);
        }
    }
}

#[test]
fn every_checksum_is_verified_once_or_never() {
    let model = Synthetic::tiny();
    for checksums in [true, false] {
        let options = EngineOptions { cap: Some(0), checksums: Some(checksums), ..settings() };
        let engine = model.open(&options);
        answer(&engine);
        let figures = engine.telemetry().figures();
        assert_eq!(engine.resolved().checksums, if checksums { "on" } else { "off" });
        assert_eq!(figures.verified > 0, checksums);
        assert!(figures.verified <= 24 && figures.io.reads > 24);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn a_text_may_be_cut_anywhere(
        seed in 0u32..1000,
        cuts in prop::collection::vec(1usize..20, 1..8),
        cap in 0usize..9,
        chunk in 1usize..40,
    ) {
        let model = Synthetic::tiny();
        let options = EngineOptions {
            cap: Some(cap),
            prefill_chunk: Some(chunk),
            ..settings()
        };
        let engine = Arc::new(model.open(&options));
        let ids = random_ids(cuts.iter().sum(), 256, seed);
        let hidden = |pieces: &mut dyn Iterator<Item = usize>| {
            let mut session = Session::new(&engine);
            let mut all = Vec::new();
            let mut rest = &ids[..];
            for piece in pieces {
                let (now, later) = rest.split_at(piece);
                let keep = &mut |_, rows: &[f32]| {
                    all.extend(rows.iter().map(|x| x.to_bits()));
                    Ok(())
                };
                session.extend(now, &CancelFlag::new(), keep).unwrap();
                rest = later;
            }
            all
        };
        let whole = hidden(&mut std::iter::once(ids.len()));
        let pieces = hidden(&mut cuts.iter().copied());
        prop_assert!(whole == pieces, "the bits depend on where the text was cut");
    }
}

#[test]
fn the_answer_can_differ() {
    // Another prompt, another answer: the comparisons above have something to compare.
    let model = Synthetic::tiny();
    let engine = model.open(&settings());
    let ids = |seed| common::greedy(&engine, &random_ids(PROMPT, 256, seed), GENERATED);
    assert_ne!(ids(1), ids(7));
    let error = Session::new(&engine).extend(&[9999], &CancelFlag::new(), &mut |_, _| Ok(())).unwrap_err();
    assert!(matches!(error, EngineError::Model(ModelError::TokenOutOfRange { id: 9999, vocab: 272 })));
}
