//! From hidden states to queries, keys, values and gates, in either of the two ways that they are stored.

use crate::error::ModelError;
use crate::linear::Linear;
use crate::load::Loader;
use crate::plan::{DeltaNetPlan, DeltaProjections};
use crate::step::StepContext;

/// The matrices.
pub(super) enum Projections {
    Apart { qkv: Linear, z: Linear, decay: Linear, step: Linear },
    ByKeyHead { qkvz: Linear, gates: Linear },
}

/// Their products with the rows of a step.
pub(super) struct Projected {
    /// All queries, all keys, all values: rows × channels.
    pub qkv: Vec<f32>,
    /// Gates of the results: rows × values.
    pub z: Vec<f32>,
    /// What a row says of each value head's decay: rows × value heads.
    pub decay: Vec<f32>,
    /// What it says of the size of its step.
    pub step: Vec<f32>,
}

impl Projections {
    pub(super) fn load(
        plan: &DeltaNetPlan,
        name: &dyn Fn(&str) -> String,
        loader: &Loader<'_>,
    ) -> Result<Self, ModelError> {
        let heads = plan.value_heads;
        Ok(match plan.projections {
            DeltaProjections::Apart => Projections::Apart {
                qkv: Linear::load(&name("in_proj_qkv.weight"), loader)?,
                z: Linear::load(&name("in_proj_z.weight"), loader)?,
                decay: Linear::load_f32(&name("in_proj_a.weight"), heads, loader)?,
                step: Linear::load_f32(&name("in_proj_b.weight"), heads, loader)?,
            },
            DeltaProjections::ByKeyHead => Projections::ByKeyHead {
                qkvz: Linear::load(&name("in_proj_qkvz.weight"), loader)?,
                gates: Linear::load_f32(&name("in_proj_ba.weight"), 2 * heads, loader)?,
            },
        })
    }

    pub(super) fn forward(&self, plan: &DeltaNetPlan, cx: &StepContext<'_, '_>, h: &[f32]) -> Projected {
        let product = |matrix: &Linear| matrix.forward(cx.kernels, cx.pool, h, cx.rows.len());
        match self {
            Projections::Apart { qkv, z, decay, step } => {
                Projected { qkv: product(qkv), z: product(z), decay: product(decay), step: product(step) }
            }
            Projections::ByKeyHead { qkvz, gates } => sorted(plan, &product(qkvz), &product(gates)),
        }
    }
}

/// The results of [`DeltaProjections::ByKeyHead`] as those of [`DeltaProjections::Apart`]. A key head has its
/// query, its key, its values and their gates in one product, and steps before decays in the other.
fn sorted(plan: &DeltaNetPlan, qkvz: &[f32], gates: &[f32]) -> Projected {
    let share = plan.value_heads / plan.key_heads;
    let values = share * plan.value_dim;
    let (mut qkv, mut z, mut decay, mut step) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for row in qkvz.chunks(plan.channels() + plan.values()) {
        let heads = || row.chunks(2 * (plan.key_dim + values));
        heads().for_each(|head| qkv.extend_from_slice(&head[..plan.key_dim]));
        heads().for_each(|head| qkv.extend_from_slice(&head[plan.key_dim..2 * plan.key_dim]));
        heads().for_each(|head| qkv.extend_from_slice(&head[2 * plan.key_dim..2 * plan.key_dim + values]));
        heads().for_each(|head| z.extend_from_slice(&head[2 * plan.key_dim + values..]));
    }
    for head in gates.chunks(2 * share) {
        step.extend_from_slice(&head[..share]);
        decay.extend_from_slice(&head[share..]);
    }
    Projected { qkv, z, decay, step }
}
