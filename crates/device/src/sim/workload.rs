//! What a replayed run computes, and what of it streams from the drive.

use serde::{Deserialize, Serialize};

/// A model that decodes, as far as residency and the drive go.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Name, for reports.
    pub name: String,
    /// Layers with routed experts; each is one submission a token.
    pub layers: usize,
    /// Experts a layer.
    pub experts: usize,
    /// Experts that a token uses in a layer.
    pub top_k: usize,
    /// Bytes of an expert.
    pub expert_bytes: usize,
    /// Tokens decoded.
    pub tokens: usize,
    /// Bytes of the memory budget that hold no experts: dense weights, KV cache, scratch.
    pub rest: u64,
    /// Scale of the curve of hits: see [`Workload::hits`].
    pub hit_slots: f64,
    /// Its power.
    pub hit_power: f64,
}

impl Workload {
    /// Share of the selections that `slots` a layer answer, where nothing was published:
    /// `1 − (1 + slots / hit_slots)^−hit_power`, a popularity with a long tail.
    pub fn hits(&self, slots: f64) -> f64 {
        1.0 - (1.0 + slots.max(0.0) / self.hit_slots).powf(-self.hit_power)
    }

    /// Bytes of all selections of a run.
    pub fn bytes(&self) -> f64 {
        (self.layers * self.top_k * self.tokens) as f64 * self.expert_bytes as f64
    }

    /// Experts that a memory budget of `ram` bytes has room for.
    pub fn room(&self, ram: u64) -> usize {
        let experts = ram.saturating_sub(self.rest) / self.expert_bytes as u64;
        usize::try_from(experts).unwrap_or(usize::MAX).min(self.layers * self.experts)
    }

    /// What makes a replay of it impossible or endless.
    pub(super) fn flaw(&self) -> Option<String> {
        let counts = [
            ("layers", self.layers, 1 << 10),
            ("experts", self.experts, 1 << 12),
            ("top_k", self.top_k, self.experts),
            ("expert_bytes", self.expert_bytes, 1 << 34),
            ("tokens", self.tokens, 1 << 12),
            ("layers × experts", self.layers.saturating_mul(self.experts), 1 << 16),
        ];
        if let Some((name, value, most)) = counts.iter().find(|(_, value, most)| !(1..=*most).contains(value))
        {
            return Some(format!("workload.{name} is {value}, wanted 1 to {most}"));
        }
        let numbers = [("hit_slots", self.hit_slots), ("hit_power", self.hit_power)];
        let wrong = numbers.iter().find(|(_, value)| !(value.is_finite() && *value > 0.0));
        wrong.map(|(name, value)| format!("workload.{name} is {value}, wanted more than zero"))
    }
}

/// What the machine does beside the device while a run streams experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Streaming {
    /// Bytes that the drive delivers a second.
    pub drive_rate: f64,
    /// Bytes a second of a read that the page cache answers.
    pub page_rate: f64,
    /// Seconds of a token that are neither kernels nor waiting: attention, routing, the processor.
    pub host: f64,
    /// Share of the waiting for reads that is left where loaders run beside the computing.
    pub async_wait: f64,
}

impl Streaming {
    pub(super) fn flaw(&self) -> Option<String> {
        let numbers = [
            ("drive_rate", self.drive_rate, self.drive_rate > 0.0),
            ("page_rate", self.page_rate, self.page_rate > 0.0),
            ("host", self.host, self.host >= 0.0),
            ("async_wait", self.async_wait, self.async_wait >= 0.0),
        ];
        let wrong = numbers.iter().find(|(_, value, fits)| !(value.is_finite() && *fits));
        wrong.map(|(name, value, _)| format!("streaming.{name} is {value}"))
    }
}
