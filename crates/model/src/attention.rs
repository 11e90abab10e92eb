//! Attention parts.

mod delta;
mod gqa;
mod indexer;
mod mla;

pub(crate) use indexer::KEY_NORM_EPS;

use crate::error::ModelError;
use crate::load::Loader;
use crate::plan::AttentionPlan;
use crate::step::StepContext;

/// One layer's attention with its weights.
pub(crate) trait Attention: Send + Sync {
    /// Attends for all rows of a step.
    ///
    /// `slot` is the layer's index in the caches; `h` is rows × hidden, already normed; the result
    /// (rows × hidden) is written to `out`. Keys and values of the rows are written first, so
    /// that rows of one sequence see each other; a recurrent layer goes through them in order.
    fn forward(
        &self,
        cx: &mut StepContext<'_, '_>,
        slot: usize,
        h: &[f32],
        out: &mut [f32],
    ) -> Result<(), ModelError>;
}

/// Loads the attention part of a layer.
pub(crate) fn load(
    plan: &AttentionPlan,
    prefix: &str,
    loader: &Loader<'_>,
) -> Result<Box<dyn Attention>, ModelError> {
    Ok(match plan {
        AttentionPlan::Mla(plan) => Box::new(mla::Mla::load(plan, prefix, loader)?),
        AttentionPlan::Gqa(plan) => Box::new(gqa::Gqa::load(plan, prefix, loader)?),
        AttentionPlan::DeltaNet(plan) => Box::new(delta::DeltaNet::load(plan, prefix, loader)?),
    })
}
