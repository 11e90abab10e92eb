//! Linear attention: a gated delta net (arXiv 2412.06464) behind a causal convolution.
//!
//! Each value head keeps a matrix `S` (values × keys) instead of keys and values. At each position,
//! with decay `g` and step `β`: `S ← g · S; S ← S + β (v − S·k) kᵀ; result = S·q`. Positions are
//! computed one after another, whatever the step, so that a row's bits do not depend on where a
//! prompt is cut. A row of `S` depends on no other: it is read once, taken through all positions
//! of the step, and written once.

mod convolution;
mod projections;

use metaltail_kernels::{Kernels, rms_norm_in_place, sigmoid, silu};

use crate::attention::Attention;
use crate::error::ModelError;
use crate::kv::{KvCache, State};
use crate::linear::Linear;
use crate::load::Loader;
use crate::plan::{DecayRate, DeltaNetPlan};
use crate::step::{Row, StepContext};

use convolution::Convolution;
use projections::{Projected, Projections};

/// A gated delta net with its weights.
pub(super) struct DeltaNet {
    plan: DeltaNetPlan,
    projections: Projections,
    convolution: Convolution,
    /// `−exp(A_log)` of each value head.
    rate: Vec<f32>,
    /// Added to what a row says of its decay.
    rate_bias: Vec<f32>,
    /// Of each head's result.
    norm: Vec<f32>,
    output: Linear,
}

/// The rows of one sequence in a step, in order of position.
struct Run {
    sequence: usize,
    rows: Vec<usize>,
}

/// The runs of a step, a sequence each.
fn runs(rows: &[Row], sequences: usize) -> Vec<Run> {
    let mut all: Vec<Run> = (0..sequences).map(|sequence| Run { sequence, rows: Vec::new() }).collect();
    rows.iter().enumerate().for_each(|(index, row)| all[row.sequence].rows.push(index));
    all.retain(|run| !run.rows.is_empty());
    all
}

/// One value head of one sequence: its matrix before and after the step, and its results, a row each.
struct Head<'a> {
    head: usize,
    run: &'a Run,
    before: &'a [f32],
    after: &'a mut [f32],
    out: &'a mut [f32],
}

/// What all heads read.
struct Inputs<'a> {
    kernels: Kernels,
    /// Convolved queries, keys and values: rows × channels.
    mixed: &'a [f32],
    projected: &'a Projected,
}

/// `ln(1 + eˣ)`, linear where the two no longer differ, as the reference has it.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// The state of a recurrent layer; a cache has one wherever the plan says so.
fn state(cache: &KvCache, slot: usize) -> Result<&State, ModelError> {
    cache.state(slot).ok_or(ModelError::NoState)
}

impl DeltaNet {
    pub(super) fn load(plan: &DeltaNetPlan, prefix: &str, loader: &Loader<'_>) -> Result<Self, ModelError> {
        let name = |part: &str| format!("{prefix}linear_attn.{part}");
        let stored = loader.floats(&name("A_log"))?;
        Ok(DeltaNet {
            projections: Projections::load(plan, &name, loader)?,
            convolution: Convolution::load(plan, &name("conv1d.weight"), loader)?,
            rate: match plan.rate {
                DecayRate::Logarithm => stored.iter().map(|log| -log.exp()).collect(),
                DecayRate::Plain => stored,
            },
            rate_bias: loader.floats(&name("dt_bias"))?,
            // Stored as it is, whatever the plan says of the other norms.
            norm: loader.floats(&name("norm.weight"))?,
            output: Linear::load(&name("out_proj.weight"), loader)?,
            plan: plan.clone(),
        })
    }

    /// Decay and step of a value head at a row.
    fn gates(&self, projected: &Projected, row: usize, head: usize) -> (f32, f32) {
        let at = row * self.plan.value_heads + head;
        let rate = self.rate[head] * softplus(projected.decay[at] + self.rate_bias[head]);
        (rate.exp(), sigmoid(projected.step[at]))
    }

    /// Takes one head through the positions of its run; results are normed and gated.
    fn recur(&self, inputs: &Inputs<'_>, at: Head<'_>) {
        let DeltaNetPlan { key_dim, value_dim, .. } = self.plan;
        let Inputs { kernels, mixed, projected } = *inputs;
        let channels = self.plan.channels();
        let shared = self.plan.key_head(at.head) * key_dim;
        let own = at.head * value_dim;
        let rows = &at.run.rows;
        let gates: Vec<(f32, f32)> = rows.iter().map(|&r| self.gates(projected, r, at.head)).collect();
        for (i, (before, after)) in at.before.chunks(key_dim).zip(at.after.chunks_mut(key_dim)).enumerate() {
            after.copy_from_slice(before);
            for (t, (&r, &(decay, step))) in rows.iter().zip(&gates).enumerate() {
                let row = &mixed[r * channels..(r + 1) * channels];
                let (queries, rest) = row.split_at(self.plan.keys());
                let (keys, values) = rest.split_at(self.plan.keys());
                let (query, key) = (&queries[shared..shared + key_dim], &keys[shared..shared + key_dim]);
                after.iter_mut().for_each(|number| *number *= decay);
                let missing = values[own + i] - kernels.dot(after, key);
                kernels.axpy(missing * step, key, after);
                at.out[t * value_dim + i] = kernels.dot(after, query);
            }
        }
        for (&r, out) in rows.iter().zip(at.out.chunks_mut(value_dim)) {
            rms_norm_in_place(out, &self.norm, self.plan.norm_eps);
            let start = r * self.plan.values() + own;
            let gates = &projected.z[start..start + value_dim];
            out.iter_mut().zip(gates).for_each(|(value, gate)| *value *= silu(*gate));
        }
    }

    /// Results of all heads, normed and gated: a run, a head, a row after the other.
    fn values(
        &self,
        cx: &mut StepContext<'_, '_>,
        slot: usize,
        runs: &[Run],
        (mixed, projected): (&[f32], &Projected),
    ) -> Result<Vec<f32>, ModelError> {
        let mut values = vec![0.0; cx.rows.len() * self.plan.values()];
        let head_len = self.plan.value_dim * self.plan.key_dim;
        let (mut heads, mut rest) = (Vec::new(), &mut values[..]);
        let mut caches: Vec<Option<&mut KvCache>> = cx.caches.iter_mut().map(|c| Some(&mut **c)).collect();
        for run in runs {
            let cache = caches[run.sequence].take().ok_or(ModelError::NoState)?;
            let (before, after) = cache.step_state(slot).ok_or(ModelError::NoState)?;
            let states = before.matrix.chunks(head_len).zip(after.matrix.chunks_mut(head_len));
            for (head, (before, after)) in states.enumerate() {
                let (out, others) = rest.split_at_mut(run.rows.len() * self.plan.value_dim);
                rest = others;
                heads.push(Head { head, run, before, after, out });
            }
        }
        let inputs = Inputs { kernels: cx.kernels, mixed, projected };
        cx.pool.for_each_chunk(&mut heads, 1, &|_, heads| {
            for Head { head, run, before, after, out } in heads {
                self.recur(&inputs, Head { head: *head, run, before, after, out });
            }
        });
        Ok(values)
    }

    /// The same with a row after the other.
    fn by_rows(&self, runs: &[Run], values: &[f32]) -> Vec<f32> {
        let (width, dim) = (self.plan.values(), self.plan.value_dim);
        let mut sorted = vec![0.0; values.len()];
        let mut pieces = values.chunks(dim);
        for run in runs {
            for head in 0..self.plan.value_heads {
                for (&row, piece) in run.rows.iter().zip(&mut pieces) {
                    let start = row * width + head * dim;
                    sorted[start..start + dim].copy_from_slice(piece);
                }
            }
        }
        sorted
    }
}

impl Attention for DeltaNet {
    fn forward(
        &self,
        cx: &mut StepContext<'_, '_>,
        slot: usize,
        h: &[f32],
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let runs = runs(cx.rows, cx.caches.len());
        let projected = self.projections.forward(&self.plan, cx, h);
        let mixed = self.convolution.forward(&self.plan, cx, slot, &runs, &projected.qkv)?;
        let values = self.values(cx, slot, &runs, (&mixed, &projected))?;
        let values = self.by_rows(&runs, &values);
        let rows = self.output.rows();
        cx.kernels.matmul(cx.pool, self.output.view(), 0..rows, &values, cx.rows.len(), out, rows);
        Ok(())
    }
}
