//! The forward pass on an accelerator: dense weights and key-value rows lie there, and a layer is recorded as
//! operations (`docs/design/accelerator.md`). The host waits where experts are chosen, since it fetches them.

mod attention;
mod cache;
mod ffn;
mod layer;
mod step;

use std::sync::{Arc, Mutex, PoisonError};

use metaltail_kernels::{Accelerator, Activation, Buffer, ExpertCompute, HeldMatrix, Op, Order};
use metaltail_store::LayerExperts;

use crate::error::ModelError;
use crate::ffn::Experts;
use crate::kv::KvCache;
use crate::load::Loader;
use crate::observer::ModelObserver;
use crate::plan::{AttentionPlan, KvExpansion, LayerPlan, MlaForm, NormWeights, Plan};
use crate::step::{CancelFlag, Row};

use attention::Rotations;
pub(crate) use cache::DeviceCache;
use layer::Layer;
use step::{Scratch, Step};

/// All layers of a model with their weights on an accelerator.
pub(crate) struct Body {
    layers: Vec<Layer>,
    final_norm: Buffer,
    head: HeldMatrix,
    hidden: usize,
    eps: f32,
    /// Memory for activations, reused from step to step.
    scratch: Mutex<Scratch>,
    /// What dropped caches left behind.
    dropped: Arc<Mutex<Vec<Buffer>>>,
}

/// Why a plan's dense part cannot be computed on an accelerator; `None` where it can.
pub(crate) fn unsupported(plan: &Plan) -> Option<&'static str> {
    let router_bias = |layer: &LayerPlan| layer.moe().is_some_and(|moe| moe.router.bias);
    let attention = plan.layers.iter().find_map(|layer| match &layer.attention {
        AttentionPlan::Mla(_) if router_bias(layer) => Some("router with a bias of its logits"),
        AttentionPlan::Mla(mla) if mla.form == MlaForm::Absorbed && mla.expansion == KvExpansion::Joint => {
            None
        }
        AttentionPlan::Mla(mla) if mla.expansion == KvExpansion::Split => {
            Some("latent attention whose keys and values are stored apart")
        }
        AttentionPlan::Mla(_) => Some("attention with rebuilt keys and values"),
        AttentionPlan::Gqa(_) => Some("grouped-query attention"),
        AttentionPlan::DeltaNet(_) => Some("linear attention"),
    });
    let gated = || plan.layers.iter().filter_map(LayerPlan::moe).any(|moe| moe.shared_gate);
    attention
        .or_else(|| (plan.norms == NormWeights::OnePlus).then_some("norms whose factors are stored less 1"))
        .or_else(|| gated().then_some("a gated shared expert"))
}

/// Why a plan's experts cannot be computed on an accelerator; `None` where they can.
pub(crate) fn unsupported_experts(plan: &Plan) -> Option<&'static str> {
    plan.layers.iter().filter_map(LayerPlan::moe).find_map(|moe| match moe.activation {
        _ if moe.expert_biases.is_some() => Some("experts with biases"),
        Activation::SwiGlu => None,
        Activation::ClampedSwiGlu { .. } => Some("experts with a clamped activation"),
    })
}

/// A vector of weights on the device.
fn hold_floats(device: &mut dyn Accelerator, numbers: &[f32]) -> Result<Buffer, ModelError> {
    let buffer = device.buffer(numbers.len())?;
    device.write(buffer.view(), numbers)?;
    Ok(buffer)
}

impl Body {
    /// Loads the layers of a plan, tensor by tensor, to the device.
    pub(crate) fn load(
        plan: &Plan,
        experts: &[LayerExperts],
        loader: &Loader<'_>,
        device: &mut dyn Accelerator,
    ) -> Result<Body, ModelError> {
        device.announce(&loader.matrices(plan.tied_head)?);
        let mut rotations = Rotations::default();
        let mut layers = Vec::with_capacity(plan.layers.len());
        for (index, layer) in plan.layers.iter().enumerate() {
            let at = (index as u32, plan.hidden);
            layers.push(Layer::load(layer, at, experts, loader, device, &mut rotations)?);
        }
        let head = match plan.tied_head {
            true => "model.embed_tokens.weight",
            false => "lm_head.weight",
        };
        Ok(Body {
            layers,
            final_norm: hold_floats(device, &loader.floats("model.norm.weight")?)?,
            head: device.hold(loader.matrix(head)?.as_ref())?,
            hidden: plan.hidden,
            eps: plan.norm_eps,
            scratch: Mutex::default(),
            dropped: Arc::default(),
        })
    }

    /// One step: `x` is rows × hidden embeddings; the result are hidden states after the final norm.
    pub(crate) fn forward(
        &self,
        (rows, x): (&[Row], &[f32]),
        caches: &mut [&mut KvCache],
        experts: &mut Experts<'_>,
        observer: &dyn ModelObserver,
        cancel: &CancelFlag,
    ) -> Result<Vec<f32>, ModelError> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        // A step before may have ended in the middle.
        device_of(experts)?.wait()?;
        for buffer in self.dropped.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            device_of(experts)?.release(buffer);
        }
        let mut step = Step::new(rows, self.hidden, caches, &mut scratch, observer);
        let result = self.layers(&mut step, x, experts, cancel);
        // Leases are given up when the device has ended, after a failure too.
        let device = device_of(experts)?;
        let waited = device.wait();
        step.end_moves(device, result.is_ok() && waited.is_ok());
        step.end_layer();
        let hidden = result?;
        waited?;
        let mut out = vec![0.0; rows.len() * self.hidden];
        device_of(experts)?.read(hidden.view(), &mut out)?;
        Ok(out)
    }

    fn layers(
        &self,
        step: &mut Step<'_, '_, '_>,
        embedded: &[f32],
        experts: &mut Experts<'_>,
        cancel: &CancelFlag,
    ) -> Result<Buffer, ModelError> {
        let (n, width, device) = (step.rows.len(), self.hidden, device_of(experts)?);
        let x = step.scratch.numbers(device, "x", n * width)?;
        device.write(x.view(), embedded)?;
        for (slot, layer) in self.layers.iter().enumerate() {
            cancel.check()?;
            step.reserve(device_of(experts)?, slot, &layer.attention, &self.dropped)?;
            layer.record(step, experts, slot, (self.eps, self.layers.get(slot + 1)), x)?;
        }
        let device = device_of(experts)?;
        let hidden = step.scratch.numbers(device, "hidden", n * width)?;
        let (from, to, weight) = (x.rows(width), hidden.rows(width), self.final_norm.view());
        device.record(&Op::RmsNorm { from, to, rows: n, width, weight, eps: self.eps })?;
        Ok(hidden)
    }

    /// Logits of hidden states: `n × vocabulary`.
    pub(crate) fn logits(
        &self,
        hidden: &[f32],
        compute: &mut dyn ExpertCompute,
    ) -> Result<Vec<f32>, ModelError> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let device = compute.accelerator().ok_or(ModelError::NoAccelerator)?;
        let matrix = self.head;
        let (inputs, vocabulary) = (hidden.len() / self.hidden, matrix.layout.rows());
        let x = scratch.numbers(device, "head in", hidden.len())?;
        let out = scratch.numbers(device, "logits", inputs * vocabulary)?;
        device.write(x.view(), hidden)?;
        let order = Order::Decode;
        let recorded = device.record(&Op::Product { matrix, x: x.view(), inputs, out: out.view(), order });
        // What was recorded before a failure is not left behind: between steps nothing is in flight.
        let waited = device.wait();
        recorded?;
        waited?;
        let mut logits = vec![0.0; inputs * vocabulary];
        device.read(out.view(), &mut logits)?;
        Ok(logits)
    }
}

/// The accelerator that computes the experts, which holds the dense weights too.
fn device_of<'a>(experts: &'a mut Experts<'_>) -> Result<&'a mut dyn Accelerator, ModelError> {
    experts.compute.accelerator().ok_or(ModelError::NoAccelerator)
}
