//! Attention as `model/src/attention` computes it: the absorbed form, and the indexer.

use metaltail_kernels::softmax_in_place;

use super::Reference;
use crate::kernels::{Indexer, LatentAttention, Positions};

impl Reference {
    /// One head of one row: `query` is nope + rope numbers, `out` the head's value.
    pub(super) fn head(
        &self,
        attention: &LatentAttention<'_>,
        positions: &Positions<'_>,
        head: usize,
        query: &[f32],
        out: &mut [f32],
    ) {
        let LatentAttention { nope, rope, value, kv_b, keys, .. } = *attention;
        let (lora, first) = (attention.lora(), head * (nope + value));
        let kept = |i: usize| &keys[positions.at(i) * (lora + rope)..][..lora + rope];
        let mut absorbed = vec![0.0; lora + rope];
        self.kernels.matmul_t(kv_b, first..first + nope, &query[..nope], &mut absorbed[..lora]);
        absorbed[lora..].copy_from_slice(&query[nope..]);
        let score = |i| self.kernels.dot(&absorbed, kept(i)) * attention.scale;
        let mut scores: Vec<f32> = (0..positions.count()).map(score).collect();
        softmax_in_place(&mut scores);
        let mut mixed = vec![0.0; lora];
        for (i, weight) in scores.iter().enumerate() {
            self.kernels.axpy(*weight, &kept(i)[..lora], &mut mixed);
        }
        let values = first + nope..first + nope + value;
        self.kernels.matmul(&self.pool, kv_b, values, &mixed, 1, out, value);
    }

    /// The positions of one row.
    pub(super) fn positions(
        &self,
        indexer: &Indexer<'_>,
        count: usize,
        queries: &[f32],
        weights: &[f32],
    ) -> Vec<u32> {
        let per_head = (indexer.dim as f32).powf(-0.5);
        let over_heads = (indexer.heads as f32).powf(-0.5);
        let score = |key: &[f32]| -> f32 {
            let heads = queries.chunks(indexer.dim).zip(weights);
            heads
                .map(|(query, weight)| {
                    weight * over_heads * (self.kernels.dot(query, key) * per_head).max(0.0)
                })
                .sum()
        };
        let lowest_if_nan = |score: f32| if score.is_nan() { f32::NEG_INFINITY } else { score };
        let scores: Vec<f32> =
            indexer.keys.chunks(indexer.dim).take(count).map(|key| lowest_if_nan(score(key))).collect();
        let mut order: Vec<u32> = (0..scores.len() as u32).collect();
        order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
        order.truncate(indexer.top_k);
        order.sort_unstable();
        order
    }
}
