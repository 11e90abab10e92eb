//! What experts add to their products: resident, and no part of what is read for an expert.

use metaltail_kernels::ExpertBiases;

use crate::error::ModelError;
use crate::load::Loader;
use crate::plan::{ExpertBiasForm, MoePlan};

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
    /// Loads them, where the plan has any.
    pub(crate) fn load(
        plan: &MoePlan,
        hidden: usize,
        prefix: &str,
        loader: &Loader<'_>,
    ) -> Result<Option<LayerBiases>, ModelError> {
        let Some(form) = plan.expert_biases else { return Ok(None) };
        let floats = |part: &str| loader.floats(&plan.names.expert_biases(prefix, part));
        let (gate, up) = match form {
            ExpertBiasForm::Apart => (floats("gate")?, floats("up")?),
            ExpertBiasForm::InTurn => {
                let pairs = floats("gate_up")?;
                pairs.as_chunks::<2>().0.iter().map(|[gate, up]| (*gate, *up)).unzip()
            }
        };
        Ok(Some(LayerBiases { gate, up, down: floats("down")?, width: plan.width, hidden }))
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
