//! The same model in every container form.

mod common;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::ops::ControlFlow;

use metaltail_container::Checkpoint;
use metaltail_container::convert::{ConvertOptions, Target, convert};
use metaltail_container::synth::{Like, SynthFormat, SynthOptions};
use metaltail_engine::telemetry::Figures;
use metaltail_engine::{EngineOptions, score};
use metaltail_model::{CancelFlag, Plan};
use metaltail_quant::Format;
use metaltail_store::Direct;
use synthetic::{Synthetic, random_ids, settings};

/// Ids, logit bits, and the figures of reading with nothing kept.
fn run(model: &Synthetic, direct: Direct) -> (Vec<u32>, Vec<Vec<u32>>, Figures) {
    let options = EngineOptions { cap: Some(0), direct, ..settings() };
    let engine = model.open(&options);
    let prompt = random_ids(30, 256, 4);
    let ids = common::greedy(&engine, &prompt, 8);
    let figures = engine.telemetry().figures();
    let score = score(&engine, &[prompt], &[0, 15, 29], &CancelFlag::new(), &mut |_| {}).unwrap();
    let bits = |row: &Vec<f32>| row.iter().map(|x| x.to_bits()).collect();
    (ids, score.logits.values().map(bits).collect(), figures)
}

fn misses(figures: &Figures) -> u64 {
    figures.prefill.misses + figures.decode.misses
}

#[test]
fn slab_and_colibri_give_the_same_bits_with_one_and_two_reads_an_expert() {
    for (experts, mixed) in [(Format::Int4Row, false), (Format::Int4Group(32), true)] {
        let form = |format| {
            let base = SynthOptions::new(Like::Tiny, format);
            Synthetic::new(Like::Tiny, &SynthOptions { experts, mixed, ..base })
        };
        let (slab, colibri) = (form(SynthFormat::Slab), form(SynthFormat::Colibri));
        let (ids, bits, from_slab) = run(&slab, Direct::Off);
        let (other_ids, other_bits, from_colibri) = run(&colibri, Direct::Off);
        assert_eq!(ids, other_ids);
        assert!(bits == other_bits, "logits differ");
        assert_eq!(misses(&from_slab), misses(&from_colibri));
        assert_eq!(from_slab.io.reads, misses(&from_slab));
        assert_eq!(from_colibri.io.reads, 2 * misses(&from_colibri));
        if !mixed {
            // Buffered reads fetch the runs and nothing beside them.
            for (model, figures) in [(&slab, &from_slab), (&colibri, &from_colibri)] {
                assert_eq!(figures.io.bytes, misses(figures) * model.expert_bytes(1));
            }
        }
    }
}

#[test]
fn the_checkpoint_form_runs_on_its_rounded_weights() {
    let hf = Synthetic::of(Like::Tiny, SynthFormat::Hf);
    let engine = hf.open(&settings());
    assert_eq!(engine.resolved().container, "hf");
    let prompt = random_ids(30, 256, 4);
    let score = |engine| {
        let texts = [prompt.clone()];
        score(engine, &texts, &[], &CancelFlag::new(), &mut |_| {}).unwrap().nll.unwrap()
    };
    let slab = Synthetic::tiny();
    let (rounded, stored) = (score(&engine), score(&slab.open(&settings())));
    assert!((rounded - stored).abs() < 0.1, "NLL {rounded} in bf16, {stored} as stored");
}

/// Whatever a family calls its tensors, a container has them under the same names.
#[test]
fn a_checkpoint_of_every_family_and_its_slab_give_the_same_bits() {
    let mut seen = 0;
    for entry in std::fs::read_dir(common::root().join("fixtures/oracles")).unwrap() {
        let path = entry.unwrap().path();
        let source = Checkpoint::open(&path).unwrap();
        let inventory = Plan::from_config(source.config()).unwrap().inventory();
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let slab = dir.path().join("slab");
        let keep = ConvertOptions { experts: Target::Keep, rest: Target::Keep, draft_experts: Target::Keep };
        convert(&source, &inventory, &slab, &keep, &mut |_| ControlFlow::Continue(())).unwrap();
        let [checkpoint, slab] = [&path, &slab].map(|path| {
            let engine = common::open(path, &common::exact());
            let prompt = random_ids(30, 256, 4);
            let ids = common::greedy(&engine, &prompt, 8);
            let score = score(&engine, &[prompt], &[0, 15, 29], &CancelFlag::new(), &mut |_| {}).unwrap();
            let bits: Vec<u32> = score.logits.values().flatten().map(|logit| logit.to_bits()).collect();
            (engine.resolved().container.clone(), ids, bits)
        });
        assert_eq!((checkpoint.0.as_str(), slab.0.as_str()), ("hf", "slab"));
        assert_eq!(checkpoint.1, slab.1, "{}", path.display());
        assert!(checkpoint.2 == slab.2, "{}: logits differ", path.display());
        seen += 1;
    }
    assert!(seen >= 12);
}

/// T17.
#[test]
fn layers_of_different_formats_run_in_one_model() {
    let base = SynthOptions::new(Like::Tiny, SynthFormat::Slab);
    let mixed = Synthetic::new(Like::Tiny, &SynthOptions { mixed: true, ..base });
    assert_ne!(mixed.expert_bytes(1), mixed.expert_bytes(2), "the second layer is int8");
    let (ids, bits, figures) = run(&mixed, Direct::Off);
    let (_, plain, _) = run(&Synthetic::tiny(), Direct::Off);
    assert_eq!(ids.len(), 8);
    assert!(bits != plain, "the other format is in use");
    // The cache does not confuse slots of different sizes.
    for cap in [1, 3, 8] {
        let options = EngineOptions { cap: Some(cap), ..settings() };
        assert_eq!(common::greedy(&mixed.open(&options), &random_ids(30, 256, 4), 8), ids);
    }
    assert!(figures.io.bytes > misses(&figures) * mixed.expert_bytes(1));
    assert!(figures.io.bytes < misses(&figures) * mixed.expert_bytes(2));
}
