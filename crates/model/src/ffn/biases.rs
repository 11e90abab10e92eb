//! What experts add to their products: resident, and no part of what is read for an expert.

use metaltail_kernels::ExpertBiases;

use crate::error::ModelError;
use crate::load::Loader;
use crate::plan::MoePlan;

/// The biases of all experts of a layer.
pub(crate) struct LayerBiases {
    /// Experts × width.
    gate: Vec<f32>,
    up: Vec<f32>,
    /// Experts × hidden.
    down: Vec<f32>,
    width: usize,
    hidden: usize,
}

impl LayerBiases {
    /// Loads them, where the plan has any. Stored are two tensors for all experts, of which the first has gate and up
    /// in turn.
    pub(crate) fn load(
        plan: &MoePlan,
        hidden: usize,
        prefix: &str,
        loader: &Loader<'_>,
    ) -> Result<Option<LayerBiases>, ModelError> {
        if !plan.expert_biases {
            return Ok(None);
        }
        let [gate_up, down] = plan.names.expert_biases(prefix);
        let (pairs, down) = (loader.floats(&gate_up)?, loader.floats(&down)?);
        let every_second = |first: usize| pairs.iter().skip(first).step_by(2).copied().collect();
        Ok(Some(LayerBiases { gate: every_second(0), up: every_second(1), down, width: plan.width, hidden }))
    }

    /// Those of one expert.
    pub(crate) fn of(&self, expert: u32) -> ExpertBiases<'_> {
        ExpertBiases {
            gate: row(&self.gate, expert, self.width),
            up: row(&self.up, expert, self.width),
            down: row(&self.down, expert, self.hidden),
        }
    }
}

/// The numbers of one expert among those of all; the tensor was held against its shape when it was loaded.
fn row(all: &[f32], expert: u32, len: usize) -> &[f32] {
    &all[expert as usize * len..][..len]
}
