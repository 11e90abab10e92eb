//! Arms that never ran: records by script.
#![allow(dead_code, reason = "each test file uses its own part")]

use metaltail_bench::arm::{ArmRecord, DecodeFigures, PromptRow, hash_ids};
use metaltail_bench::harness::{Arm, Runner};
use metaltail_bench::job::{Feed, Job, PageCache};
use metaltail_bench::system::SystemCounters;
use serde_json::{Value, json};

/// Rows decoded after each prompt.
pub const TOKENS: usize = 4;

pub fn job() -> Job {
    Job {
        seed: 0,
        prompts: 3,
        warmup: 1,
        prompt_tokens: 2,
        tokens: TOKENS,
        feed: Feed::Random,
        page_cache: PageCache::Warm,
        numerics: false,
        sequences: None,
    }
}

/// An arm with given settings.
pub fn arm(name: &str, given: Value) -> Arm {
    Arm { name: name.to_owned(), given: given.as_object().cloned().unwrap(), ..Arm::default() }
}

/// What a scripted arm did.
#[derive(Clone)]
pub struct Script {
    pub tokens_per_second: f64,
    pub hit_rate: f64,
    /// Ids of the last prompt; the others are always the same.
    pub ids: Vec<u32>,
    pub config: Value,
    pub nll: Option<f64>,
    pub logits: Vec<f32>,
    pub reads_per_miss: u64,
    pub mappings_added: i64,
    /// Changes the statistics of each row.
    pub stats: Value,
}

impl Script {
    pub fn new(tokens_per_second: f64, config: Value) -> Script {
        Script {
            tokens_per_second,
            hit_rate: 0.25,
            ids: vec![7; TOKENS + 1],
            config,
            nll: None,
            logits: vec![0.0, 0.0],
            reads_per_miss: 1,
            mappings_added: 0,
            stats: json!({}),
        }
    }

    fn row(&self, at: usize) -> PromptRow {
        let seconds = TOKENS as f64 / self.tokens_per_second;
        let misses = (100.0 * (1.0 - self.hit_rate)).round() as u64;
        let ids = if at == 3 { self.ids.clone() } else { vec![at as u32; TOKENS + 1] };
        // Of 100 look-ups.
        let hits = json!({"decode": {"hits": {"cached": 100 - misses}}});
        let mut stats =
            json!({"decode": {"tokens": TOKENS}, "experts": hits, "residency": {"allocations": 3}});
        for (key, value) in self.stats.as_object().unwrap() {
            stats[key] = value.clone();
        }
        PromptRow {
            warmup: at == 0,
            prompt_tokens: 2,
            tokens: TOKENS,
            ids_hash: hash_ids(&ids),
            margins: vec![0.5; ids.len()],
            logits: if at == 1 { vec![self.logits.clone()] } else { Vec::new() },
            ids,
            nll: self.nll,
            page_cache: 1.0,
            decode: DecodeFigures {
                seconds,
                bytes: misses * 1000,
                drive_bytes: Some(0),
                reads: misses * self.reads_per_miss,
                lookups: 100,
                misses,
                felt_wait_seconds: 0.0,
                sparse_seconds: seconds,
                busy_seconds: seconds / 2.0,
                depth_seconds: seconds,
            },
            system: SystemCounters::default(),
            mappings_added: self.mappings_added,
            stats,
        }
    }

    pub fn record(&self) -> ArmRecord {
        ArmRecord {
            config: self.config.clone(),
            memory: Value::Null,
            model: json!({"path": "model", "model_type": "made-up"}),
            feed: Feed::Random,
            page_cache: PageCache::Warm,
            usage_hash: None,
            rows: (0..4).map(|at| self.row(at)).collect(),
            system: SystemCounters::default(),
            peak_anonymous: Some(1 << 20),
        }
    }
}

/// Runs what a function says of the arm's name and of how many runs there were before.
pub struct Fake<F> {
    pub script: F,
    /// Names in the order in which they ran.
    pub ran: Vec<String>,
}

impl<F> Fake<F> {
    pub fn new(script: F) -> Fake<F> {
        Fake { script, ran: Vec::new() }
    }
}

impl<F: FnMut(&str, usize) -> Result<ArmRecord, String>> Runner for Fake<F> {
    fn run(&mut self, arm: &Arm) -> Result<ArmRecord, String> {
        let before = self.ran.len();
        self.ran.push(arm.name.clone());
        (self.script)(&arm.name, before)
    }
}
