//! The trained demo model against an independent implementation (`fixtures/README.md`).
//!
//! An optimised build computes all windows and prompts. Where the code is not optimised a row takes
//! some thirty times as long, so one short piece of each stands for the rest, and mean NLLs, which
//! the oracle has of whole windows only, are not compared.

mod common;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use common::{assert_greedy, exact, floats, greedy, ids, json, open, root, shared};
use metaltail_container::Checkpoint;
use metaltail_container::convert::{ConvertOptions, convert};
use metaltail_engine::{Engine, EngineOptions, Score, score};
use metaltail_kernels::{CpuExperts, Kernels, Numerics, Pool, default_threads};
use metaltail_model::{
    CancelFlag, Experts, Foresight, KvCache, LoadOptions, Model, Phase, Plan, Row, expert_places,
};
use metaltail_store::{ExpertStore, StoreConfig};
use serde_json::Value;
use tempfile::TempDir;

const SOURCE: &str = "models/hummingbird-56m";

/// Whether everything is computed.
const FULL: bool = !cfg!(debug_assertions);

/// Ids of each window where not everything is computed.
const PIECE: usize = 48;

/// The windows that are scored.
fn windows(oracle: &Value) -> Vec<Vec<u32>> {
    let mut windows: Vec<Vec<u32>> = oracle["windows"].as_array().unwrap().iter().map(ids).collect();
    assert!(windows.len() == 8 && windows.iter().all(|window| window.len() == 1025));
    if !FULL {
        windows.truncate(1);
        windows[0].truncate(PIECE);
    }
    windows
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

fn score_windows(engine: &Engine, oracle: &Value, positions: &[usize]) -> Score {
    score(engine, &windows(oracle), positions, &CancelFlag::new(), &mut |_| {}).unwrap()
}

/// Greatest difference of a whole window's NLL; 0 where none is computed.
fn worst_nll(score: &Score, wanted: &Value) -> f64 {
    if !FULL {
        return 0.0;
    }
    let wanted = wanted.as_array().unwrap();
    let pairs = score.per_sequence.iter().zip(wanted);
    pairs.map(|(a, b)| (a.unwrap() - b.as_f64().unwrap()).abs()).fold(0.0, f64::max)
}

#[test]
fn the_checkpoint_agrees_in_f32() {
    let Some(dir) = shared(SOURCE) else { return };
    let oracle = oracle();
    let engine = open(&dir, &options());
    let keys = oracle["logits"].as_object().unwrap().keys();
    let scored = windows(&oracle)[0].len();
    let positions: Vec<usize> =
        keys.map(|key| key.parse().unwrap()).filter(|position| *position < scored).collect();
    assert!(positions.len() >= 2);
    let score = score_windows(&engine, &oracle, &positions);
    let nll = worst_nll(&score, &oracle["nll_f32"]);
    let mut logits = 0.0f32;
    for (position, row) in &score.logits {
        let wanted = floats(&oracle["logits"][position.to_string()]);
        logits = row.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(logits, f32::max);
    }
    let equal = share_equal(&score.argmax[0], &ids(&oracle["argmax600"]));
    println!("NLL differs by {nll:.6} at most, logits by {logits:.5}, argmax equal in {equal:.4}");
    assert!(nll < 0.002, "NLL differs by {nll}");
    assert!(logits < 0.05, "logits differ by {logits}");
    assert!(equal >= 0.995, "argmax equal in {equal}");
}

/// Greedy continuations of the oracle's prompts against `cases`.
fn assert_continues(engine: &Engine, oracle: &Value, cases: &str, threshold: f32) {
    let prompts = oracle["greedy"].as_array().unwrap();
    let cases = oracle[cases].as_array().unwrap();
    assert_eq!((prompts.len(), cases.len()), (8, 8));
    let (prompts_used, steps) = if FULL { (8, usize::MAX) } else { (1, 12) };
    for (prompt, case) in prompts.iter().zip(cases).take(prompts_used) {
        let mut wanted = ids(&case["ids"]);
        wanted.truncate(steps);
        let found = greedy(engine, &ids(&prompt["prompt"]), wanted.len());
        let text = prompt["text"].as_str().unwrap();
        assert_greedy(&found, &wanted, &floats(&case["margin"]), threshold, text);
    }
}

#[test]
fn the_checkpoint_continues_prompts_alike() {
    let Some(dir) = shared(SOURCE) else { return };
    assert_continues(&open(&dir, &options()), &oracle(), "greedy", 2e-3);
}

#[test]
fn the_slab_agrees_with_the_same_rounding() {
    let Some(dir) = slab() else { return };
    let oracle = oracle();
    let engine = open(&dir, &options());
    if FULL {
        let exact = score_windows(&engine, &oracle, &[]);
        let worst = worst_nll(&exact, &oracle["nll_int4g64_experts_int8_rest"]);
        println!("rounded weights: NLL differs by {worst:.6} at most");
        assert!(worst < 0.001, "NLL differs by {worst}");
    }
    assert_continues(&engine, &oracle, "greedy_int4g64", 0.02);
}

#[test]
fn quantised_activations_cost_little() {
    let Some(dir) = slab() else { return };
    let oracle = oracle();
    let nll = |exact| {
        let engine = open(&dir, &EngineOptions { exact, ..options() });
        assert_eq!(engine.resolved().exact, exact);
        score_windows(&engine, &oracle, &[]).nll.unwrap()
    };
    let cost = nll(false) - nll(true);
    println!("quantised activations: NLL {cost:+.5} nats a token");
    // A short piece is noisier than thousands of tokens.
    let most = if FULL { 0.01 } else { 0.05 };
    assert!(cost.abs() <= most && cost != 0.0, "NLL differs by {cost}");
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
        let store = ExpertStore::open(checkpoint.files(), places.clone(), config, silent).unwrap();
        let pool = Arc::new(Pool::new(default_threads()));
        let kernels = Kernels::best();
        let load =
            LoadOptions { kernels, pool: pool.clone(), accelerator: None, draft: true, progress: &|_| {} };
        let model = Model::load(&checkpoint, plan, &places, load).unwrap();
        assert!(model.has_draft());
        let compute = CpuExperts::new(pool, kernels, Numerics::Exact);
        Drafting { model, store, compute }
    }

    /// Final-normed hidden states of the main model, then those of the draft layer, which at
    /// position t is given hidden state t and token t + 1.
    fn hidden(&mut self, ids: &[u32], length: usize) -> (Vec<f32>, Vec<f32>) {
        let rows = |shift: usize| -> Vec<Row> {
            (0..length)
                .map(|t| Row { sequence: 0, position: t as u32, token: ids[t + shift], phase: Phase::Prompt })
                .collect()
        };
        let observer = &metaltail_model::Silent;
        let mut experts = Experts {
            store: &self.store,
            compute: &mut self.compute,
            foresight: Foresight::off(),
            top_p: None,
        };
        let mut kv = KvCache::new(self.model.plan());
        let flag = CancelFlag::new();
        let main = self.model.forward(&rows(0), &mut [&mut kv], &mut experts, observer, &flag).unwrap();
        let mut kv = KvCache::for_draft(self.model.plan());
        let draft =
            self.model.draft_forward(&rows(1), &main, &mut [&mut kv], &mut experts, observer).unwrap();
        assert_eq!(kv.len(), length);
        (main, draft)
    }
}

/// Most likely ids, and the mean NLL of `next`.
fn judge(drafting: &mut Drafting, hidden: &[f32], next: &[u32]) -> (Vec<u32>, f64) {
    let Drafting { model, compute, .. } = drafting;
    let (width, vocab) = (model.plan().hidden, model.plan().vocab);
    let mut argmax = Vec::new();
    let mut nll = 0.0;
    for (hidden, &next) in hidden.chunks(width).zip(next) {
        let logits = model.logits(hidden, compute).unwrap();
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
    let whole = drafts["length"].as_u64().unwrap() as usize;
    let length = if FULL { whole } else { PIECE - 2 };
    let mut drafting = Drafting::load(&dir);
    let wanted = drafts["windows"].as_array().unwrap();
    assert_eq!(wanted.len(), 4);
    for (ids, wanted) in windows(&oracle).iter().zip(wanted) {
        let (main, draft) = drafting.hidden(ids, length);
        let (argmax, nll) = judge(&mut drafting, &draft, &ids[2..]);
        let wanted_argmax = common::ids(&wanted["draft_argmax"]);
        let equal = share_equal(&argmax, &wanted_argmax);
        assert!(equal >= 0.99, "argmax equal in {equal}");
        if !FULL {
            continue;
        }
        let difference = (nll - wanted["draft_nll"].as_f64().unwrap()).abs();
        println!("draft: argmax equal in {equal:.4}, NLL differs by {difference:.6}");
        assert!(difference < 0.005, "NLL differs by {difference}");
        // How often the draft foretells the main model's own choice, as the oracle counted it.
        let (own, _) = judge(&mut drafting, &main, &ids[1..]);
        let agree = share_equal(&argmax[..length - 1], &own[1..]);
        assert!((agree - wanted["agree"].as_f64().unwrap()).abs() < 0.01, "{agree} foretold");
    }
}
