//! The trained demo model against an independent implementation (`fixtures/README.md`).
//!
//! Where the code is not optimised the windows are fewer and shorter, so that the tests stay
//! short; an optimised build computes all of them.

mod common;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use common::{assert_greedy, exact, floats, greedy, ids, json, open, root, shared};
use metaltail_container::Checkpoint;
use metaltail_container::convert::{ConvertOptions, convert};
use metaltail_engine::{Engine, EngineOptions, score};
use metaltail_kernels::{CpuExperts, Kernels, Numerics, Pool, default_threads};
use metaltail_model::{CancelFlag, Experts, KvCache, LoadOptions, Model, Plan, Row, expert_places};
use metaltail_store::{ExpertStore, StoreConfig};
use serde_json::Value;
use tempfile::TempDir;

const SOURCE: &str = "models/hummingbird-56m";

/// Windows that are scored, each of 1025 ids.
fn windows() -> usize {
    if cfg!(debug_assertions) { 1 } else { 8 }
}

fn oracle() -> Value {
    json(&root().join("fixtures/hummingbird/oracle.json"))
}

fn options() -> EngineOptions {
    EngineOptions { threads: None, cap: Some(64), ..exact() }
}

/// The model in the repository, else converted from the source; none where both are absent.
fn slab() -> Option<PathBuf> {
    static CONVERTED: OnceLock<Option<(PathBuf, Option<TempDir>)>> = OnceLock::new();
    let find = || {
        let here = root().join(SOURCE);
        if here.join("manifest.json").exists() {
            return Some((here, None));
        }
        let source = Checkpoint::open(&shared(SOURCE)?).unwrap();
        let inventory = Plan::from_config(source.config()).unwrap().inventory();
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let to = dir.path().join("slab");
        let go_on = &mut |_: metaltail_container::convert::Progress<'_>| ControlFlow::Continue(());
        convert(&source, &inventory, &to, &ConvertOptions::default(), go_on).unwrap();
        Some((to, Some(dir)))
    };
    CONVERTED.get_or_init(find).as_ref().map(|(path, _)| path.clone())
}

fn score_windows(engine: &Engine, oracle: &Value, positions: &[usize]) -> metaltail_engine::Score {
    let windows: Vec<Vec<u32>> =
        oracle["windows"].as_array().unwrap().iter().take(windows()).map(ids).collect();
    score(engine, &windows, positions, &CancelFlag::new(), &mut |_| {}).unwrap()
}

/// Greatest difference of a window's NLL.
fn worst_nll(score: &metaltail_engine::Score, wanted: &Value) -> f64 {
    let wanted = wanted.as_array().unwrap();
    let pairs = score.per_sequence.iter().zip(wanted);
    pairs.map(|(a, b)| (a.unwrap() - b.as_f64().unwrap()).abs()).fold(0.0, f64::max)
}

#[test]
fn the_checkpoint_agrees_in_f32() {
    let Some(dir) = shared(SOURCE) else { return };
    let oracle = oracle();
    let engine = open(&dir, &options());
    let positions: Vec<usize> =
        oracle["logits"].as_object().unwrap().keys().map(|key| key.parse().unwrap()).collect();
    let score = score_windows(&engine, &oracle, &positions);
    let nll = worst_nll(&score, &oracle["nll_f32"]);
    let mut logits = 0.0f32;
    for (position, row) in &score.logits {
        let wanted = floats(&oracle["logits"][position.to_string()]);
        logits = row.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(logits, f32::max);
    }
    let wanted = ids(&oracle["argmax600"]);
    let equal = score.argmax[0].iter().zip(&wanted).filter(|(a, b)| a == b).count();
    println!("NLL differs by {nll:.6} at most, logits by {logits:.5}, argmax {equal} of 600");
    assert!(nll < 0.002, "NLL differs by {nll}");
    assert!(logits < 0.05, "logits differ by {logits}");
    assert!(equal >= 597, "argmax equal in {equal} of {}", wanted.len());
}

#[test]
fn the_checkpoint_continues_prompts_alike() {
    let Some(dir) = shared(SOURCE) else { return };
    let engine = open(&dir, &options());
    for case in oracle()["greedy"].as_array().unwrap() {
        let wanted = ids(&case["ids"]);
        let found = greedy(&engine, &ids(&case["prompt"]), wanted.len());
        let text = case["text"].as_str().unwrap();
        assert_greedy(&found, &wanted, &floats(&case["margin"]), 2e-3, text);
    }
}

#[test]
fn the_slab_agrees_with_the_same_rounding() {
    let Some(dir) = slab() else { return };
    let oracle = oracle();
    let engine = open(&dir, &options());
    let exact = score_windows(&engine, &oracle, &[]);
    let worst = worst_nll(&exact, &oracle["nll_int4g64_experts_int8_rest"]);
    println!("rounded weights: NLL differs by {worst:.6} at most");
    assert!(worst < 0.001, "NLL differs by {worst}");
    let prompts = oracle["greedy"].as_array().unwrap();
    let cases = oracle["greedy_int4g64"].as_array().unwrap();
    for (prompt, case) in prompts.iter().zip(cases) {
        let wanted = ids(&case["ids"]);
        let found = greedy(&engine, &ids(&prompt["prompt"]), wanted.len());
        let text = prompt["text"].as_str().unwrap();
        assert_greedy(&found, &wanted, &floats(&case["margin"]), 0.02, text);
    }
}

#[test]
fn quantised_activations_cost_little() {
    let Some(dir) = slab() else { return };
    let oracle = oracle();
    let engine = open(&dir, &EngineOptions { exact: false, ..options() });
    assert!(!engine.resolved().exact);
    let score = score_windows(&engine, &oracle, &[]);
    let wanted = floats(&oracle["nll_int4g64_experts_int8_rest"]);
    let wanted = wanted.iter().take(windows()).sum::<f32>() / windows() as f32;
    let cost = score.nll.unwrap() - f64::from(wanted);
    println!("quantised activations: NLL {cost:+.5} nats a token");
    assert!(cost.abs() <= 0.01, "NLL differs by {cost}");
    assert!(cost != 0.0);
}

/// A model with its draft layer, apart from an engine.
struct Drafting {
    model: Model,
    store: ExpertStore,
    compute: CpuExperts,
}

impl Drafting {
    fn load(dir: &Path) -> Drafting {
        let checkpoint = Checkpoint::open(dir).unwrap();
        let plan = Plan::from_config(checkpoint.config()).unwrap();
        let inventory = plan.inventory();
        assert!(checkpoint.draft_complete(&inventory));
        let places = expert_places(&checkpoint, &inventory, true).unwrap();
        let config = StoreConfig { cap: 64, ..StoreConfig::default() };
        let silent = Arc::new(metaltail_store::Silent);
        let store =
            ExpertStore::open(checkpoint.files(), places.clone(), config, silent).unwrap();
        let pool = Arc::new(Pool::new(default_threads()));
        let kernels = Kernels::best();
        let load = LoadOptions { kernels, pool: pool.clone(), draft: true, progress: &|_| {} };
        let model = Model::load(&checkpoint, plan, &places, &load).unwrap();
        assert!(model.has_draft());
        let compute = CpuExperts::new(pool, kernels, Numerics::Exact);
        Drafting { model, store, compute }
    }

    /// Final-normed hidden states of the main model, then those of the draft layer, which at
    /// position t is given hidden state t and token t + 1.
    fn hidden(&mut self, ids: &[u32], length: usize) -> (Vec<f32>, Vec<f32>) {
        let rows = |shift: usize| -> Vec<Row> {
            (0..length)
                .map(|t| Row { sequence: 0, position: t as u32, token: ids[t + shift] })
                .collect()
        };
        let observer = &metaltail_model::Silent;
        let mut experts = Experts { store: &self.store, compute: &mut self.compute };
        let mut kv = KvCache::new(self.model.plan());
        let flag = CancelFlag::new();
        let main =
            self.model.forward(&rows(0), &mut [&mut kv], &mut experts, observer, &flag).unwrap();
        let mut kv = KvCache::for_draft(self.model.plan());
        let draft = self
            .model
            .draft_forward(&rows(1), &main, &mut [&mut kv], &mut experts, observer)
            .unwrap();
        assert_eq!(kv.len(), length);
        (main, draft)
    }
}

/// Most likely ids, and the mean NLL of `next`.
fn judge(model: &Model, hidden: &[f32], next: &[u32]) -> (Vec<u32>, f64) {
    let (width, vocab) = (model.plan().hidden, model.plan().vocab);
    let mut argmax = Vec::new();
    let mut nll = 0.0;
    for (hidden, &next) in hidden.chunks(width).zip(next) {
        let logits = model.logits(hidden);
        assert_eq!(logits.len(), vocab);
        argmax.push(metaltail_engine::sampler::greedy(&logits));
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
        nll += sum.ln() + f64::from(max - logits[next as usize]);
    }
    let mean = nll / argmax.len() as f64;
    (argmax, mean)
}

fn share_equal(a: &[u32], b: &[u32]) -> f64 {
    a.iter().zip(b).filter(|(a, b)| a == b).count() as f64 / a.len().min(b.len()) as f64
}

#[test]
fn the_draft_layer_agrees() {
    let Some(dir) = shared(SOURCE) else { return };
    let oracle = oracle();
    let drafts = json(&root().join("fixtures/hummingbird/draft_oracle.json"));
    let length = drafts["length"].as_u64().unwrap() as usize;
    let mut drafting = Drafting::load(&dir);
    let count = windows().min(4);
    for (window, wanted) in
        oracle["windows"].as_array().unwrap().iter().zip(drafts["windows"].as_array().unwrap()).take(count)
    {
        let ids = ids(window);
        let (main, draft) = drafting.hidden(&ids, length);
        let (argmax, nll) = judge(&drafting.model, &draft, &ids[2..]);
        let wanted_argmax = common::ids(&wanted["draft_argmax"]);
        let equal = share_equal(&argmax, &wanted_argmax);
        let difference = (nll - wanted["draft_nll"].as_f64().unwrap()).abs();
        println!("draft: argmax equal in {equal:.4}, NLL differs by {difference:.6}");
        assert!(equal >= 0.99, "argmax equal in {equal}");
        assert!(difference < 0.005, "NLL differs by {difference}");
        // How often the draft foretells the main model's own choice, as the oracle counted it.
        let (own, _) = judge(&drafting.model, &main, &ids[1..]);
        let agree = share_equal(&argmax[..length - 1], &own[1..]);
        assert!((agree - wanted["agree"].as_f64().unwrap()).abs() < 0.01, "{agree} foretold");
    }
}
