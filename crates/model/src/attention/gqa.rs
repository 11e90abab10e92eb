//! Grouped-query attention: several query heads share a key-value head.

use metaltail_kernels::{rms_norm_in_place, softmax_in_place};

use crate::attention::Attention;
use crate::error::ModelError;
use crate::linear::Linear;
use crate::load::Loader;
use crate::plan::GqaPlan;
use crate::step::StepContext;

/// Grouped-query attention with its weights.
pub(super) struct Gqa {
    plan: GqaPlan,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norms: (Vec<f32>, Vec<f32>),
}

impl Gqa {
    pub(super) fn load(plan: &GqaPlan, prefix: &str, loader: &Loader<'_>) -> Result<Self, ModelError> {
        let name = |part: &str| format!("{prefix}self_attn.{part}.weight");
        Ok(Gqa {
            plan: plan.clone(),
            query: Linear::load(&name("q_proj"), loader)?,
            key: Linear::load(&name("k_proj"), loader)?,
            value: Linear::load(&name("v_proj"), loader)?,
            output: Linear::load(&name("o_proj"), loader)?,
            norms: (loader.floats(&name("q_norm"))?, loader.floats(&name("k_norm"))?),
        })
    }

    /// Norms (over pieces as long as `norm`) and rotates all heads of one row.
    fn prepare(&self, norm: &[f32], position: u32, row: &mut [f32]) {
        for piece in row.chunks_mut(norm.len()) {
            rms_norm_in_place(piece, norm, self.plan.qk_norm_eps);
        }
        let angles = self.plan.rope.angles(position);
        for head in row.chunks_mut(self.plan.head_dim) {
            self.plan.rope.rotate(head, &angles);
        }
    }

    fn remember(&self, cx: &mut StepContext<'_, '_>, slot: usize, h: &[f32]) {
        let n = cx.rows.len();
        let width = self.plan.kv_heads * self.plan.head_dim;
        let mut keys = self.key.forward(cx.kernels, cx.pool, h, n);
        let values = self.value.forward(cx.kernels, cx.pool, h, n);
        for (i, row) in cx.rows.iter().enumerate() {
            let span = i * width..(i + 1) * width;
            self.prepare(&self.norms.1, row.position, &mut keys[span.clone()]);
            let streams = cx.caches[row.sequence].streams_mut(slot);
            streams[0].row_mut(row.position as usize).copy_from_slice(&keys[span.clone()]);
            streams[1].row_mut(row.position as usize).copy_from_slice(&values[span]);
        }
    }
}

impl Attention for Gqa {
    fn forward(
        &self,
        cx: &mut StepContext<'_, '_>,
        slot: usize,
        h: &[f32],
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let n = cx.rows.len();
        let (heads, dim) = (self.plan.heads, self.plan.head_dim);
        let share = heads / self.plan.kv_heads;
        let mut queries = self.query.forward(cx.kernels, cx.pool, h, n);
        for (row, query) in cx.rows.iter().zip(queries.chunks_mut(heads * dim)) {
            self.prepare(&self.norms.0, row.position, query);
        }
        self.remember(cx, slot, h);
        let mut mixed = vec![0.0; n * heads * dim];
        {
            let cx = &*cx;
            cx.pool.for_each_chunk(&mut mixed, dim, &|index, value| {
                let (r, head) = (index / heads, index % heads);
                let row = cx.rows[r];
                let streams = cx.caches[row.sequence].streams(slot);
                let span = (head / share) * dim..(head / share + 1) * dim;
                let query = &queries[index * dim..(index + 1) * dim];
                let mut scores: Vec<f32> = (0..=row.position as usize)
                    .map(|t| cx.kernels.dot(query, &streams[0].row(t)[span.clone()]) * self.plan.scale)
                    .collect();
                softmax_in_place(&mut scores);
                for (t, &weight) in scores.iter().enumerate() {
                    cx.kernels.axpy(weight, &streams[1].row(t)[span.clone()], value);
                }
            });
        }
        let rows = self.output.rows();
        cx.kernels.matmul(cx.pool, self.output.view(), 0..rows, &mixed, n, out, rows);
        Ok(())
    }
}
