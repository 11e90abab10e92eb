//! Feed-forward parts.

pub(crate) mod ahead;
mod biases;
mod dense;
mod moe;
mod routed;
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
    /// What is said of them before they are asked for.
    pub foresight: Foresight,
    /// Where given, below 1: of the experts that a router chose for a row, only the smallest set whose
    /// weights reach this share of their sum is computed. Lossy.
    pub top_p: Option<f32>,
}

/// One layer's feed-forward part with its resident weights.
pub(crate) trait FeedForward: Send + Sync {
    /// Computes all rows of a step: `h` is rows × hidden, already normed; the result is written
    /// to `out`. `ahead` may be called once, when the drive has nothing to do for this layer.
    fn forward(
        &self,
        cx: &StepContext<'_, '_>,
        experts: &mut Experts<'_>,
        h: &[f32],
        out: &mut [f32],
        ahead: &mut dyn FnMut(&ExpertStore, &mut Foresight),
    ) -> Result<(), ModelError>;

    /// The experts that rows with these states (rows × hidden, normed) would choose, likeliest first, and
    /// the number of the layer that has them; none where all weights are resident.
    fn foresee(&self, _cx: &StepContext<'_, '_>, _h: &[f32]) -> Option<(u32, Vec<u32>)> {
        None
    }
}

/// Loads the feed-forward part of layer `layer`.
pub(crate) fn load(
    plan: &FfnPlan,
    layer: u32,
    hidden: usize,
    prefix: &str,
    places: Option<ExpertParts>,
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

pub use ahead::{Foresight, Predictor};
pub(crate) use routed::{ExpertParts, Routed, Union, parts_of};
pub(crate) use router::Choice;
