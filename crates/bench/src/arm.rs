//! One arm as it ran: what a fresh process hands back.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::job::{Feed, PageCache};
use crate::system::SystemCounters;

/// One prompt of an arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptRow {
    /// Whether it only warmed up.
    pub warmup: bool,
    /// Ids of the prompt.
    pub prompt_tokens: usize,
    /// Rows decoded after it.
    pub tokens: usize,
    /// Hash of the most likely ids after the prompt and after each decoded row.
    pub ids_hash: String,
    /// Those ids, until they have been compared.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ids: Vec<u32>,
    /// How far the most likely logit is above the next one, for each of them; in a comparison of numerics.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub margins: Vec<f32>,
    /// All logits of some rows of the first prompt that counts; in a comparison of numerics.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub logits: Vec<Vec<f32>>,
    /// Mean negative log-likelihood of the ids that decoding was fed, in nats; in a comparison of numerics.
    pub nll: Option<f64>,
    /// Share of the weight files in the page cache before the prompt.
    pub page_cache: f64,
    /// Decode alone.
    pub decode: DecodeFigures,
    /// What the system counted over prefill and decode.
    pub system: SystemCounters,
    /// Slots' mappings made while it ran.
    pub mappings_added: i64,
    /// The figures of `run --json`, over prefill and decode.
    pub stats: Value,
}

/// Figures of decode alone. Bytes and calls of reads are those finished in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DecodeFigures {
    /// Wall time.
    pub seconds: f64,
    /// Bytes of expert reads.
    pub bytes: u64,
    /// Bytes that the system read from drives.
    pub drive_bytes: Option<u64>,
    /// Read calls.
    pub reads: u64,
    /// Look-ups of one distinct expert in a layer and row.
    pub lookups: u64,
    /// Look-ups that had to read.
    pub misses: u64,
    /// Time that computing stood still for a load.
    pub felt_wait_seconds: f64,
    /// Time in layers with routed experts, waits included.
    pub sparse_seconds: f64,
    /// Time with at least one read under way.
    pub busy_seconds: f64,
    /// Integral of reads under way over time.
    pub depth_seconds: f64,
}

/// What an arm's process hands back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmRecord {
    /// Settings as they were resolved.
    pub config: Value,
    /// The memory budget with its terms.
    pub memory: Value,
    /// The model.
    pub model: Value,
    /// What decoding was fed.
    pub feed: Feed,
    /// State of the page cache that was made before each prompt.
    pub page_cache: PageCache,
    /// Hash of the usage profile before the arm, where there is one.
    pub usage_hash: Option<String>,
    /// Prompts in order, those that warmed up first.
    pub rows: Vec<PromptRow>,
    /// What the system counted over the whole process.
    pub system: SystemCounters,
    /// Largest anonymous memory at a row's end.
    pub peak_anonymous: Option<u64>,
}

impl ArmRecord {
    /// The rows that count.
    pub fn measured(&self) -> impl Iterator<Item = &PromptRow> {
        self.rows.iter().filter(|row| !row.warmup)
    }

    /// One hash over the ids of all rows that count.
    pub fn ids_hash(&self) -> String {
        let hashes: Vec<&str> = self.measured().map(|row| row.ids_hash.as_str()).collect();
        hash_bytes(hashes.join(" ").as_bytes())
    }

    /// Forgets what only comparisons need, so that a record stays readable.
    pub fn forget_ids(&mut self) {
        for row in &mut self.rows {
            row.ids = Vec::new();
            row.margins = Vec::new();
            row.logits = Vec::new();
        }
    }
}

/// Hash of ids.
pub fn hash_ids(ids: &[u32]) -> String {
    hash_bytes(&ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>())
}

/// Hash of bytes.
pub fn hash_bytes(bytes: &[u8]) -> String {
    format!("{:016x}", xxhash_rust::xxh3::xxh3_64(bytes))
}
