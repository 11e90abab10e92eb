//! The causal convolution of queries, keys and values along a sequence, a channel apart from the others.

use metaltail_kernels::{Kernels, silu};

use crate::error::ModelError;
use crate::load::Loader;
use crate::plan::DeltaNetPlan;
use crate::step::StepContext;

use super::{Run, state};

/// `eps` of the norm of queries and keys; no configuration has it.
const L2_EPS: f32 = 1e-6;

/// Taps of all channels.
pub(super) struct Convolution {
    /// Kernel × channels, the tap of the oldest position first.
    taps: Vec<f32>,
}

impl Convolution {
    pub(super) fn load(plan: &DeltaNetPlan, name: &str, loader: &Loader<'_>) -> Result<Self, ModelError> {
        let stored = loader.floats(name)?;
        let tap = |k: usize| stored.chunks(plan.kernel).map(move |channel| channel[k]);
        Ok(Convolution { taps: (0..plan.kernel).flat_map(tap).collect() })
    }

    /// Convolved and activated inputs (rows × channels), queries and keys of a length that the rule wants. Leaves
    /// the last inputs of each sequence in its state after the step.
    pub(super) fn forward(
        &self,
        plan: &DeltaNetPlan,
        cx: &mut StepContext<'_, '_>,
        slot: usize,
        runs: &[Run],
        qkv: &[f32],
    ) -> Result<Vec<f32>, ModelError> {
        let channels = plan.channels();
        let mut sources = Vec::with_capacity(cx.rows.len());
        sources.resize_with(cx.rows.len(), Vec::new);
        for run in runs {
            let inputs = inputs(&state(cx.caches[run.sequence], slot)?.window, run, qkv, channels);
            for (i, &row) in run.rows.iter().enumerate() {
                sources[row] = inputs[i..i + plan.kernel].to_vec();
            }
        }
        let mut mixed = vec![0.0; qkv.len()];
        cx.pool.for_each_chunk(&mut mixed, channels, &|row, out| {
            self.convolve(&sources[row], out);
            prepare(cx.kernels, plan, out);
        });
        drop(sources);
        for run in runs {
            let state = cx.caches[run.sequence].step_state(slot).ok_or(ModelError::NoState)?;
            let (before, after) = (&state.0.window, &mut state.1.window);
            let inputs = inputs(before, run, qkv, channels);
            let last = &inputs[run.rows.len()..];
            after.chunks_mut(channels).zip(last).for_each(|(kept, input)| kept.copy_from_slice(input));
        }
        Ok(mixed)
    }

    /// One row, its channels side by side: the sum over taps runs from the oldest position to the newest.
    fn convolve(&self, inputs: &[&[f32]], out: &mut [f32]) {
        for (taps, input) in self.taps.chunks(out.len()).zip(inputs) {
            for ((out, tap), input) in out.iter_mut().zip(taps).zip(*input) {
                *out += tap * input;
            }
        }
        out.iter_mut().for_each(|value| *value = silu(*value));
    }
}

/// The inputs of a run, those that came before it first.
fn inputs<'a>(window: &'a [f32], run: &Run, qkv: &'a [f32], channels: usize) -> Vec<&'a [f32]> {
    let own = run.rows.iter().map(|row| &qkv[row * channels..(row + 1) * channels]);
    window.chunks(channels).chain(own).collect()
}

/// Queries and keys to length 1, queries divided by √width.
fn prepare(kernels: Kernels, plan: &DeltaNetPlan, row: &mut [f32]) {
    let scale = (plan.key_dim as f32).sqrt();
    let (queries, rest) = row.split_at_mut(plan.keys());
    for query in queries.chunks_mut(plan.key_dim) {
        let factor = inverse_length(kernels, query);
        query.iter_mut().for_each(|value| *value = *value * factor / scale);
    }
    for key in rest[..plan.keys()].chunks_mut(plan.key_dim) {
        let factor = inverse_length(kernels, key);
        key.iter_mut().for_each(|value| *value *= factor);
    }
}

fn inverse_length(kernels: Kernels, x: &[f32]) -> f32 {
    1.0 / (kernels.dot(x, x) + L2_EPS).sqrt()
}
