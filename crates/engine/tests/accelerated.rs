//! The forward pass of accelerators, on the simulated one, which computes with the processor's kernels: whatever it
//! does with buffers, caches, rounds and leases, every bit must be the processor's.

mod common;
#[path = "common/sequences.rs"]
mod sequences;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::path::Path;
use std::sync::Arc;

use common::{assert_greedy, floats, ids, json, root};
use metaltail_container::synth::{Like, SynthFormat};
use metaltail_engine::telemetry::{Event, Figures, Listener, PhaseFigures};
use metaltail_engine::{DeviceKind, DeviceOptions, Engine, EngineError, EngineOptions, ResidencyMode, score};
use metaltail_model::{CancelFlag, MlaForm, ModelError, ModelEvent, Predictor};
use proptest::prelude::*;
use sequences::Sequences;
use synthetic::{INDEX_TOPK, Router, Synthetic, random_ids, settings};

/// Families whose whole step an accelerator computes, and those of which it computes the experts.
const WHOLE: [&str; 4] = ["glm_moe_dsa", "glm_moe_dsa_dense_ctx", "deepseek_v3", "deepseek_v3_noqlora"];
const EXPERTS: [&str; 6] = ["glm4_moe", "minimax_m2", "mixtral", "olmoe", "qwen3_5_moe", "qwen3_moe"];

fn exact() -> EngineOptions {
    EngineOptions { exact: true, threads: Some(1), ..settings() }
}

fn on_sim(options: EngineOptions) -> EngineOptions {
    EngineOptions { device: DeviceOptions { kind: DeviceKind::Sim, ..DeviceOptions::default() }, ..options }
}

fn family(name: &str) -> std::path::PathBuf {
    root().join("fixtures/oracles").join(name)
}

/// The same text on both, in the same steps: prompts apart and together, chunks, single rows, a text taken back.
fn assert_same_bits(processor: &Engine, device: &Engine, what: &str) {
    let vocab = processor.plan().vocab.min(256) as u32;
    let texts: Vec<Vec<u32>> = (0..3).map(|s| random_ids(60, vocab, s + 7)).collect();
    let [mut one, mut other] = [Sequences::new(processor, 3), Sequences::new(device, 3)];
    let mut both = |pieces: &[(usize, std::ops::Range<usize>)]| {
        let pieces: Vec<(usize, &[u32])> =
            pieces.iter().map(|(s, part)| (*s, &texts[*s][part.clone()])).collect();
        let (wanted, found) = (one.step(&pieces), other.step(&pieces));
        for ((s, part), (wanted, found)) in pieces.iter().zip(wanted.iter().zip(&found)) {
            assert!(wanted == found, "{what}: sequence {s}, {} rows up to {}", part.len(), one.len(*s));
        }
        if pieces[0].1.len() == 7 {
            // Taken back, and computed once more from there.
            let held = one.truncate(0, 5);
            assert_eq!(other.truncate(0, 5), held);
            // Recurrent layers go back further.
            if held < 5 {
                let again = [(0, &texts[0][held..5])];
                assert!(one.step(&again) == other.step(&again), "{what}: computed again from {held}");
            }
        }
    };
    both(&[(0, 0..7)]);
    both(&[(0, 5..INDEX_TOPK + 9)]);
    both(&[(1, 0..3), (2, 0..1)]);
    both(&[(2, 1..2), (0, INDEX_TOPK + 9..INDEX_TOPK + 10), (1, 3..45)]);
    for at in 46..50 {
        both(&[(1, at - 1..at), (0, at - 12..at - 11)]);
    }
}

#[test]
fn every_bit_is_the_processors_in_every_family() {
    for name in WHOLE.iter().chain(&EXPERTS) {
        let [processor, device] =
            [exact(), on_sim(exact())].map(|options| common::open(&family(name), &options));
        assert_same_bits(&processor, &device, name);
        let figures = device.device_figures().unwrap();
        assert!(figures.experts > 0, "{name}");
        assert!(device.device_difference().unwrap().is_empty(), "{name}");
    }
}

#[test]
fn every_bit_is_the_processors_in_every_container_and_format() {
    for (like, format) in
        [(Like::Tiny, SynthFormat::Slab), (Like::Tiny, SynthFormat::Colibri), (Like::Wide, SynthFormat::Slab)]
    {
        let model = Synthetic::of(like, format);
        assert_same_bits(
            &model.open(&exact()),
            &model.open(&on_sim(exact())),
            &format!("{like:?} {format:?}"),
        );
    }
}

/// Argmax where the oracle is sure, logits within 5e-4, greedy ids: the independent implementation, not the processor.
#[test]
fn families_agree_with_their_oracles() {
    for name in WHOLE {
        let oracle = json(&family(name).join("oracle.json"));
        let engine = common::open(&family(name), &on_sim(exact()));
        let prompt = ids(&oracle["prompt"]);
        let positions: Vec<usize> =
            oracle["logits"].as_object().unwrap().keys().map(|key| key.parse().unwrap()).collect();
        let score = score(&engine, &[prompt], &positions, &CancelFlag::new(), &mut |_| {}).unwrap();
        let (margins, wanted) = (floats(&oracle["margin"]), ids(&oracle["argmax"]));
        for (i, margin) in margins.iter().enumerate().filter(|(_, margin)| **margin > 1e-3) {
            assert_eq!(score.argmax[0][i], wanted[i], "{name}: position {i}, margin {margin}");
        }
        for (position, row) in &score.logits {
            let wanted = floats(&oracle["logits"][position.to_string()]);
            let worst = row.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(row.len() == wanted.len() && worst < 5e-4, "{name}: {worst} at {position}");
        }
        let continuation = &oracle["greedy"];
        let wanted = ids(&continuation["ids"]);
        let found = common::greedy(&engine, &ids(&continuation["prompt"]), wanted.len());
        assert_greedy(&found, &wanted, &floats(&continuation["margin"]), 1e-3, name);
    }
}

/// What of a model a device cannot compute stays with the processor, and that is said.
#[test]
fn a_dense_part_that_the_device_lacks_stays_with_the_processor_and_is_told() {
    let open = |name: &str, form| {
        let heard = Arc::new(Router::default());
        let options = EngineOptions { mla_form: form, ..on_sim(exact()) };
        let telemetry =
            Arc::new(metaltail_engine::telemetry::Telemetry::new(vec![heard.clone() as Arc<dyn Listener>]));
        let engine = Engine::open(&family(name), &options, telemetry, &|_, _| {}).unwrap();
        common::greedy(&engine, &random_ids(8, 200, 1), 4);
        (engine.device_figures().unwrap(), heard.notices())
    };
    for (name, form, reason) in [
        ("olmoe", MlaForm::Absorbed, "grouped-query attention"),
        ("qwen3_5_moe", MlaForm::Absorbed, "linear attention"),
        ("glm_moe_dsa", MlaForm::Reconstructed, "attention with rebuilt keys and values"),
    ] {
        let (figures, notices) = open(name, form);
        assert!(figures.experts > 0, "{name}");
        let told =
            notices.iter().filter(|text| text.contains(reason) && text.contains("--device sim")).count();
        assert_eq!(told, 1, "{name}: {notices:?}");
    }
    let (_, notices) = open("glm_moe_dsa", MlaForm::Absorbed);
    assert!(notices.iter().all(|text| !text.contains("the processor the rest")), "{notices:?}");
}

/// One wait a sparse layer: with everything cached a step hands over one submission for each, and two at its end.
#[test]
fn a_token_takes_one_submission_a_sparse_layer_and_two_at_its_end() {
    let model = Synthetic::tiny();
    for residency in [ResidencyMode::Set, ResidencyMode::Walk] {
        let device = DeviceOptions { kind: DeviceKind::Sim, residency, ..DeviceOptions::default() };
        let options = EngineOptions { device, cap: Some(64), prefetch: Some(false), ..exact() };
        let engine = model.open(&options);
        let prompt = random_ids(20, 256, 1);
        common::greedy(&engine, &prompt, 12);
        let submissions = || engine.device_figures().unwrap().residency.submissions;
        let before = submissions();
        // The same once more, all of it cached now: prompt and last row, then eleven tokens.
        common::greedy(&engine, &prompt, 12);
        let sparse = model.sparse_layers().len() as u64;
        let (steps, logits) = (12, 12);
        assert_eq!(submissions() - before, steps * (sparse + 1) + logits, "{residency:?}");
    }
}

/// A context longer than any buffer begins with: rows move to larger ones as it grows.
#[test]
fn key_value_rows_survive_the_growth_of_their_buffers() {
    let model = Synthetic::tiny();
    let [processor, device] = [exact(), on_sim(exact())]
        .map(|options| model.open(&EngineOptions { context: Some(700), ..options }));
    let text = random_ids(600, 256, 3);
    let [mut one, mut other] = [Sequences::new(&processor, 1), Sequences::new(&device, 1)];
    for part in [0..250, 250..251, 251..300, 300..511, 511..512, 512..513, 513..600] {
        assert!(one.step(&[(0, &text[part.clone()])]) == other.step(&[(0, &text[part.clone()])]), "{part:?}");
    }
}

/// A step that ends in the middle leaves the sequence, the device and the leases as they were.
#[test]
fn a_cancelled_step_can_be_repeated() {
    let model = Synthetic::tiny();
    let text = random_ids(40, 256, 5);
    let plain = model.open(&exact());
    let wanted = Sequences::new(&plain, 1).step(&[(0, &text[..])]);
    for layer in 1..=2 {
        let ear = Router::cancelling_at(layer);
        let engine = model.open_heard(&on_sim(exact()), ear.clone());
        let mut sequences = Sequences::new(&engine, 1);
        let ended = sequences.try_step(&[(0, &text[..])], &ear.flag).unwrap_err();
        assert!(matches!(ended, EngineError::Model(ModelError::Cancelled)), "{ended}");
        assert_eq!(sequences.len(0), 0);
        engine.store().audit().unwrap();
        assert!(sequences.step(&[(0, &text[..])]) == wanted, "cancelled in layer {layer}");
    }
}

/// Collects how good guesses made before a layer's experts were.
#[derive(Default)]
struct Guesses(std::sync::Mutex<Vec<(u32, usize, usize)>>);

impl Listener for Guesses {
    fn on_event(&self, event: &Event<'_>) {
        if let Event::Model(ModelEvent::Foreseen { layer, predictor, expected, right, .. }) = event
            && *predictor == Predictor::BeforeExperts
        {
            self.0.lock().unwrap().push((*layer, *expected, *right));
        }
    }
}

#[test]
fn guesses_are_those_of_the_processor() {
    let model = Synthetic::of(Like::Wide, SynthFormat::Slab);
    let guesses = |options: &EngineOptions| {
        let ear = Arc::new(Guesses::default());
        let engine = model.open_heard(options, ear.clone());
        engine.compare_guesses();
        common::greedy(&engine, &random_ids(6, 256, 2), 8);
        ear.0.lock().unwrap().clone()
    };
    let wanted = guesses(&exact());
    assert!(wanted.len() > 8, "{wanted:?}");
    assert_eq!(guesses(&on_sim(exact())), wanted);
}

/// Case T23: what is chosen, fetched, computed and read counts the same on both ways.
#[test]
fn both_ways_account_for_the_same() {
    let model = Synthetic::tiny();
    let figures = |options: EngineOptions| {
        let engine = model.open(&EngineOptions { prefetch: Some(false), loaders: Some(1), ..options });
        common::greedy(&engine, &random_ids(30, 256, 8), 10);
        engine.telemetry().figures()
    };
    let (processor, device) = (figures(exact()), figures(on_sim(exact())));
    for (wanted, found) in [(&processor.prefill, &device.prefill), (&processor.decode, &device.decode)] {
        let counts = |phase: &PhaseFigures| {
            (
                phase.rows,
                phase.selections,
                phase.lookups,
                phase.pinned,
                phase.cached,
                phase.staged,
                phase.misses,
            )
        };
        assert_eq!(counts(found), counts(wanted));
        assert!(found.lookups > 0 && found.sparse_seconds > 0.0);
        assert!(found.sparse_seconds <= found.seconds, "{found:?}");
    }
    let moved = |figures: &Figures| (figures.evictions, figures.io.bytes, figures.io.reads);
    assert_eq!(moved(&device), moved(&processor));
    assert!(device.evictions > 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 4 } else { 24 }))]

    /// Any cut of any texts into steps.
    #[test]
    fn any_steps_give_the_processors_bits(cuts in prop::collection::vec((0usize..2, 1usize..9), 1..12), cap in 0usize..5) {
        let model = tiny();
        let options = EngineOptions { cap: Some(cap), ..exact() };
        let [processor, device] = [options.clone(), on_sim(options)].map(|options| common::open(model, &options));
        let [mut one, mut other] = [Sequences::new(&processor, 2), Sequences::new(&device, 2)];
        let text = random_ids(200, 256, 9);
        for (sequence, rows) in cuts {
            let at = one.len(sequence);
            let piece = [(sequence, &text[at..at + rows])];
            prop_assert!(one.step(&piece) == other.step(&piece));
        }
    }
}

/// One model for all cases of the property.
fn tiny() -> &'static Path {
    static MODEL: std::sync::OnceLock<Synthetic> = std::sync::OnceLock::new();
    MODEL.get_or_init(Synthetic::tiny).path()
}

/// A model of which a device computes nothing runs on the processor as if no device had been asked for, and that is
/// said once.
#[test]
fn a_model_whose_experts_no_device_computes_stays_with_the_processor_and_is_told() {
    let path = family("gpt_oss");
    let heard = Arc::new(Router::default());
    let telemetry =
        Arc::new(metaltail_engine::telemetry::Telemetry::new(vec![heard.clone() as Arc<dyn Listener>]));
    let device = Engine::open(&path, &on_sim(exact()), telemetry, &|_, _| {}).unwrap();
    assert_same_bits(&common::open(&path, &exact()), &device, "gpt_oss");
    assert_eq!(device.resolved().device, "cpu");
    assert!(device.device_figures().is_none());
    let notices = heard.notices();
    let told =
        notices.iter().filter(|text| text.contains("--device sim") && text.contains("experts with biases"));
    assert_eq!(told.count(), 1, "{notices:?}");
    assert_eq!(notices.iter().filter(|text| text.contains("--device")).count(), 1, "{notices:?}");
}
