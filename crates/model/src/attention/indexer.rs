//! The DSA lightning indexer: a small attention that selects the positions worth attending to.
//!
//! `score(t) = 1/√heads · Σ_h w_h · relu(q_h · k_t / √head_dim)`; the `top_k` best positions are
//! kept, of equal ones the lowest. With no more than `top_k` positions all are kept.

use metaltail_kernels::layer_norm;

use crate::error::ModelError;
use crate::linear::Linear;
use crate::load::Loader;
use crate::plan::{IndexerPlan, MlaPlan, RopePlan};
use crate::rope::Angles;
use crate::step::{Row, Selection, StepContext};

/// `eps` of the key norm in the reference.
pub(crate) const KEY_NORM_EPS: f32 = 1e-6;

/// An indexer with its weights.
pub(super) struct Indexer {
    plan: IndexerPlan,
    rope: RopePlan,
    query: Linear,
    key: Linear,
    key_norm: (Vec<f32>, Vec<f32>),
    head_weights: Linear,
}

impl Indexer {
    pub(super) fn load(
        plan: &IndexerPlan,
        mla: &MlaPlan,
        prefix: &str,
        loader: &Loader<'_>,
    ) -> Result<Self, ModelError> {
        let name = |part: &str| format!("{prefix}self_attn.indexer.{part}");
        Ok(Indexer {
            plan: plan.clone(),
            rope: mla.rope.clone(),
            query: Linear::load(&name("wq_b.weight"), loader)?,
            key: Linear::load(&name("wk.weight"), loader)?,
            key_norm: (loader.floats(&name("k_norm.weight"))?, loader.floats(&name("k_norm.bias"))?),
            head_weights: Linear::load_f32(&name("weights_proj.weight"), plan.heads, loader)?,
        })
    }

    /// Keeps the rows' keys (stream 1 of the layer) and selects positions for each row.
    pub(super) fn select(
        &self,
        cx: &mut StepContext<'_, '_>,
        slot: usize,
        angles: &[Angles],
        h: &[f32],
        latent: &[f32],
    ) -> Vec<Selection> {
        let n = cx.rows.len();
        let dim = self.plan.head_dim;
        let keys = self.key.forward(cx.kernels, cx.pool, h, n);
        for ((row, key), angles) in cx.rows.iter().zip(keys.chunks(dim)).zip(angles) {
            let cache = &mut *cx.caches[row.sequence];
            let kept = cache.streams_mut(slot)[1].row_mut(row.position as usize);
            let (weight, bias) = &self.key_norm;
            layer_norm(key, weight, bias, KEY_NORM_EPS, kept);
            self.rope.rotate(kept, angles);
        }
        if cx.rows.iter().all(|row| self.keeps_all(row)) {
            return vec![Selection::All; n];
        }
        let mut queries = self.query.forward(cx.kernels, cx.pool, latent, n);
        for (row, angles) in queries.chunks_mut(self.plan.heads * dim).zip(angles) {
            for query in row.chunks_mut(dim) {
                self.rope.rotate(query, angles);
            }
        }
        let weights = self.head_weights.forward(cx.kernels, cx.pool, h, n);
        let mut selections = vec![Selection::All; n];
        let cx = &*cx;
        cx.pool.for_each_chunk(&mut selections, 1, &|r, selection| {
            let row = cx.rows[r];
            if self.keeps_all(&row) {
                return;
            }
            let width = self.plan.heads * dim;
            let queries = &queries[r * width..(r + 1) * width];
            let weights = &weights[r * self.plan.heads..(r + 1) * self.plan.heads];
            let scores = self.scores(cx, slot, row, queries, weights);
            selection[0] = Selection::Some(top_positions(&scores, self.plan.top_k));
        });
        selections
    }

    fn keeps_all(&self, row: &Row) -> bool {
        (row.position as usize) < self.plan.top_k
    }

    fn scores(
        &self,
        cx: &StepContext<'_, '_>,
        slot: usize,
        row: Row,
        queries: &[f32],
        weights: &[f32],
    ) -> Vec<f32> {
        let keys = &cx.caches[row.sequence].streams(slot)[1];
        let per_head = (self.plan.head_dim as f32).powf(-0.5);
        let over_heads = (self.plan.heads as f32).powf(-0.5);
        (0..=row.position as usize)
            .map(|t| {
                let key = keys.row(t);
                let heads = queries.chunks(self.plan.head_dim).zip(weights);
                heads
                    .map(|(query, weight)| {
                        let score = (cx.kernels.dot(query, key) * per_head).max(0.0);
                        weight * over_heads * score
                    })
                    .sum()
            })
            .collect()
    }
}

/// The `k` positions of highest score, ascending; of equal scores the lowest positions.
///
/// A score that is not a number counts as lowest.
fn top_positions(scores: &[f32], k: usize) -> Vec<u32> {
    let ranked = |i: &u32| {
        let score = scores[*i as usize];
        if score.is_nan() { f32::NEG_INFINITY } else { score }
    };
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    if k < order.len() {
        order.select_nth_unstable_by(k, |a, b| ranked(b).total_cmp(&ranked(a)).then(a.cmp(b)));
        order.truncate(k);
    }
    order.sort_unstable();
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn equal_scores_go_to_the_lowest_positions() {
        assert_eq!(top_positions(&[1.0, 3.0, 1.0, 1.0, 3.0], 3), [0, 1, 4]);
        assert_eq!(top_positions(&[f32::NAN, 0.0, f32::NAN], 2), [0, 1]);
    }

    proptest! {
        #[test]
        fn selection_agrees_with_a_stable_sort(scores in prop::collection::vec(-2i8..3, 1..60), k in 1usize..60) {
            let scores: Vec<f32> = scores.into_iter().map(f32::from).collect();
            let mut order: Vec<u32> = (0..scores.len() as u32).collect();
            order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
            order.truncate(k);
            order.sort_unstable();
            prop_assert_eq!(top_positions(&scores, k), order);
        }
    }
}
