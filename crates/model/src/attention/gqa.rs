//! Grouped-query attention: several query heads share a key-value head.

use std::ops::Range;

use metaltail_kernels::{rms_norm_in_place, sigmoid, softmax_in_place};

use crate::attention::Attention;
use crate::error::ModelError;
use crate::linear::Linear;
use crate::load::Loader;
use crate::plan::{GqaPlan, QkNorm};
use crate::step::StepContext;

/// Grouped-query attention with its weights.
pub(super) struct Gqa {
    plan: GqaPlan,
    query: Projection,
    key: Projection,
    value: Projection,
    output: Projection,
    /// Of queries and of keys.
    norms: Option<(Vec<f32>, Vec<f32>)>,
    /// A score a head that stands for no position.
    sinks: Option<Vec<f32>>,
}

/// A matrix and, where the plan has one, its bias.
struct Projection {
    matrix: Linear,
    bias: Option<Vec<f32>>,
}

impl Projection {
    fn load(name: &str, bias: bool, loader: &Loader<'_>) -> Result<Self, ModelError> {
        let matrix = Linear::load(&format!("{name}.weight"), loader)?;
        let bias = bias.then(|| loader.floats(&format!("{name}.bias"))).transpose()?;
        Ok(Projection { matrix, bias })
    }

    /// `n` rows of activations: `n × rows`.
    fn forward(&self, cx: &StepContext<'_, '_>, x: &[f32], n: usize) -> Vec<f32> {
        let mut out = vec![0.0; n * self.matrix.rows()];
        self.forward_into(cx, x, n, &mut out);
        out
    }

    /// The same into `out`.
    fn forward_into(&self, cx: &StepContext<'_, '_>, x: &[f32], n: usize, out: &mut [f32]) {
        let rows = self.matrix.rows();
        cx.kernels.matmul(cx.pool, self.matrix.view(), 0..rows, x, n, out, rows);
        if let Some(bias) = &self.bias {
            for row in out.chunks_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
            }
        }
    }
}

impl Gqa {
    pub(super) fn load(plan: &GqaPlan, prefix: &str, loader: &Loader<'_>) -> Result<Self, ModelError> {
        let name = |part: &str| format!("{prefix}self_attn.{part}");
        let projection = |part: &str| Projection::load(&name(part), plan.bias, loader);
        let norm = |part: &str| loader.norm(&format!("{}.weight", name(part)));
        Ok(Gqa {
            plan: plan.clone(),
            query: projection("q_proj")?,
            key: projection("k_proj")?,
            value: projection("v_proj")?,
            output: Projection::load(&name("o_proj"), plan.output_bias, loader)?,
            norms: match plan.qk_norm {
                QkNorm::None => None,
                QkNorm::Head | QkNorm::Projection => Some((norm("q_norm")?, norm("k_norm")?)),
            },
            sinks: plan.sinks.then(|| loader.floats(&name("sinks"))).transpose()?,
        })
    }

    /// Queries of `n` rows, and the gates of their heads where the plan has them.
    fn queries(&self, cx: &StepContext<'_, '_>, h: &[f32], n: usize) -> (Vec<f32>, Option<Vec<f32>>) {
        let both = self.query.forward(cx, h, n);
        if !self.plan.gate {
            return (both, None);
        }
        let (mut queries, mut gates) = (Vec::new(), Vec::new());
        for head in both.chunks(2 * self.plan.head_dim) {
            queries.extend_from_slice(&head[..self.plan.head_dim]);
            gates.extend_from_slice(&head[self.plan.head_dim..]);
        }
        (queries, Some(gates))
    }

    /// Norms (over pieces as long as `norm`, where there is one) and rotates all heads of one row.
    fn prepare(&self, norm: Option<&[f32]>, position: u32, row: &mut [f32]) {
        if let Some(norm) = norm {
            for piece in row.chunks_mut(norm.len()) {
                rms_norm_in_place(piece, norm, self.plan.qk_norm_eps);
            }
        }
        let angles = self.plan.rope.angles(position);
        for head in row.chunks_mut(self.plan.head_dim) {
            self.plan.rope.rotate(head, &angles);
        }
    }

    /// Positions that a row attends to.
    fn positions(&self, own: u32) -> Range<usize> {
        let end = own as usize + 1;
        let first = self.plan.window.map_or(0, |window| end.saturating_sub(window));
        first..end
    }

    fn remember(&self, cx: &mut StepContext<'_, '_>, slot: usize, h: &[f32]) {
        let n = cx.rows.len();
        let width = self.plan.kv_heads * self.plan.head_dim;
        let mut keys = self.key.forward(cx, h, n);
        let values = self.value.forward(cx, h, n);
        let norm = self.norms.as_ref().map(|norms| norms.1.as_slice());
        for (i, row) in cx.rows.iter().enumerate() {
            let span = i * width..(i + 1) * width;
            self.prepare(norm, row.position, &mut keys[span.clone()]);
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
        let (mut queries, gates) = self.queries(cx, h, n);
        let norm = self.norms.as_ref().map(|norms| norms.0.as_slice());
        for (row, query) in cx.rows.iter().zip(queries.chunks_mut(heads * dim)) {
            self.prepare(norm, row.position, query);
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
                let positions = self.positions(row.position);
                let mut scores: Vec<f32> = positions
                    .clone()
                    .map(|t| cx.kernels.dot(query, &streams[0].row(t)[span.clone()]) * self.plan.scale)
                    .collect();
                // A sink takes its share of the weights, and nothing is mixed in for it.
                scores.extend(self.sinks.as_ref().map(|sinks| sinks[head]));
                softmax_in_place(&mut scores);
                for (t, &weight) in positions.zip(&scores) {
                    cx.kernels.axpy(weight, &streams[1].row(t)[span.clone()], value);
                }
            });
        }
        for (value, gate) in mixed.iter_mut().zip(gates.iter().flatten()) {
            *value *= sigmoid(*gate);
        }
        self.output.forward_into(cx, &mixed, n, out);
        Ok(())
    }
}
