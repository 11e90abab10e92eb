//! SwiGLU on resident matrices: leading dense layers and shared experts.

use metaltail_kernels::silu_mul;
use metaltail_store::ExpertStore;

use crate::error::ModelError;
use crate::ffn::{Experts, FeedForward, Foresight};
use crate::linear::Linear;
use crate::load::Loader;
use crate::step::StepContext;

/// `down(silu(gate · x) · up · x)`.
pub(super) struct SwiGlu {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl SwiGlu {
    /// Loads `{name}.gate_proj`, `up_proj`, `down_proj`.
    pub(super) fn load(name: &str, loader: &Loader<'_>) -> Result<Self, ModelError> {
        Ok(SwiGlu {
            gate: Linear::load(&format!("{name}.gate_proj.weight"), loader)?,
            up: Linear::load(&format!("{name}.up_proj.weight"), loader)?,
            down: Linear::load(&format!("{name}.down_proj.weight"), loader)?,
        })
    }

    /// All rows: `rows × hidden` in and out.
    pub(super) fn compute(&self, cx: &StepContext<'_, '_>, h: &[f32]) -> Vec<f32> {
        let n = cx.rows.len();
        let gate = self.gate.forward(cx.kernels, cx.pool, h, n);
        let up = self.up.forward(cx.kernels, cx.pool, h, n);
        let mut inner = vec![0.0; gate.len()];
        let width = self.gate.rows();
        for ((gate, up), out) in gate.chunks(width).zip(up.chunks(width)).zip(inner.chunks_mut(width)) {
            silu_mul(gate, up, out);
        }
        self.down.forward(cx.kernels, cx.pool, &inner, n)
    }
}

impl FeedForward for SwiGlu {
    fn forward(
        &self,
        cx: &StepContext<'_, '_>,
        _experts: &mut Experts<'_>,
        h: &[f32],
        out: &mut [f32],
        _ahead: &mut dyn FnMut(&ExpertStore, &mut Foresight),
    ) -> Result<(), ModelError> {
        out.copy_from_slice(&self.compute(cx, h));
        Ok(())
    }
}
