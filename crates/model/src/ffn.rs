//! Feed-forward parts.

mod dense;
mod moe;
mod router;
mod top_p;

use metaltail_kernels::ExpertCompute;
use metaltail_store::ExpertStore;

use crate::error::ModelError;
use crate::load::Loader;
use crate::plan::FfnPlan;
use crate::step::StepContext;

/// Where routed experts come from and what computes them.
pub struct Experts<'a> {
    /// Holds and fetches experts.
    pub store: &'a ExpertStore,
    /// Computes them.
    pub compute: &'a mut dyn ExpertCompute,
    /// Where given, below 1: of the experts that a router chose for a row, only the smallest set whose
    /// weights reach this share of their sum is computed. Lossy.
    pub top_p: Option<f32>,
}

/// One layer's feed-forward part with its resident weights.
pub(crate) trait FeedForward: Send + Sync {
    /// Computes all rows of a step: `h` is rows × hidden, already normed; the result is written
    /// to `out`.
    fn forward(
        &self,
        cx: &StepContext<'_, '_>,
        experts: &mut Experts<'_>,
        h: &[f32],
        out: &mut [f32],
    ) -> Result<(), ModelError>;
}

/// Loads the feed-forward part of layer `layer`.
pub(crate) fn load(
    plan: &FfnPlan,
    layer: u32,
    hidden: usize,
    prefix: &str,
    places: Option<moe::ExpertParts>,
    loader: &Loader<'_>,
) -> Result<Box<dyn FeedForward>, ModelError> {
    Ok(match plan {
        FfnPlan::Dense { .. } => Box::new(dense::SwiGlu::load(&format!("{prefix}mlp"), loader)?),
        FfnPlan::Moe(plan) => {
            let places = places.unwrap_or_default();
            Box::new(moe::Moe::load(plan, layer, hidden, prefix, places, loader)?)
        }
    })
}

pub(crate) use moe::parts_of;
