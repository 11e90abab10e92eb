//! Fixtures and engines for the tests of this crate.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use metaltail_engine::telemetry::Telemetry;
use metaltail_engine::{
    DeviceOptions, Engine, EngineOptions, Flow, GenerateOptions, Session, sampler::Sampling,
};
use metaltail_model::{CancelFlag, MlaForm};
use serde_json::Value;

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A file beside the repository that not every machine has; says so where it is absent.
pub fn shared(path: &str) -> Option<PathBuf> {
    let full = root().join("../shared").join(path);
    if full.exists() {
        return Some(full);
    }
    println!("SKIPPED: ../shared/{path} is absent");
    None
}

pub fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub fn exact() -> EngineOptions {
    EngineOptions { exact: true, threads: Some(2), ram: Some(4 << 30), ..EngineOptions::default() }
}

pub fn open(dir: &Path, options: &EngineOptions) -> Engine {
    let telemetry = Arc::new(Telemetry::new(Vec::new()));
    Engine::open(dir, options, telemetry, &|_, _| {}).unwrap()
}

/// The same with another form of latent attention.
pub fn open_form(dir: &Path, options: &EngineOptions, form: MlaForm) -> Engine {
    open(dir, &EngineOptions { mla_form: form, ..options.clone() })
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

/// Greedy continuation of `prompt` by `count` ids, stop ids ignored.
pub fn greedy(engine: &Engine, prompt: &[u32], count: usize) -> Vec<u32> {
    let options =
        GenerateOptions { sampling: Sampling::GREEDY, max_tokens: Some(count), stop_ids: Vec::new() };
    let mut session = Session::new(engine);
    session.generate(prompt, &options, &CancelFlag::new(), &mut |_| Flow::Continue).unwrap().ids
}

/// Asserts that ids agree up to the first step whose margin is below `threshold`.
pub fn assert_greedy(found: &[u32], wanted: &[u32], margins: &[f32], threshold: f32, what: &str) {
    for (i, ((found, wanted), margin)) in found.iter().zip(wanted).zip(margins).enumerate() {
        if *margin < threshold {
            return;
        }
        assert_eq!(found, wanted, "{what}: step {i}, margin {margin}");
    }
    assert!(found.len() >= wanted.len(), "{what}: {} of {} ids", found.len(), wanted.len());
}

/// The demo model's answers to some of the oracle's prompts, at most so many ids of each, on a device.
pub fn continues_as_the_oracle_says(
    device: DeviceOptions,
    cap: usize,
    (prompts, most): (std::ops::Range<usize>, usize),
) {
    let root = root();
    let oracle = json(&root.join("fixtures/hummingbird/oracle.json"));
    let what = format!("{:?}, {:?}, {:?}, cap {cap}", device.kind, device.residency, device.slabs);
    let options = EngineOptions { device, cap: Some(cap), context: Some(256), ..EngineOptions::default() };
    let engine = open(&root.join("models/hummingbird-56m"), &options);
    let cases = oracle["greedy_int4g64"].as_array().unwrap();
    for (prompt, case) in
        oracle["greedy"].as_array().unwrap().iter().zip(cases).take(prompts.end).skip(prompts.start)
    {
        let mut wanted = ids(&case["ids"]);
        wanted.truncate(most);
        let found = greedy(&engine, &ids(&prompt["prompt"]), wanted.len());
        assert_greedy(&found, &wanted, &floats(&case["margin"]), 1e-3, &what);
    }
    assert!(engine.device_figures().unwrap().experts > 0);
}
