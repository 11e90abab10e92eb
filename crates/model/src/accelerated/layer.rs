//! One decoder layer on an accelerator.

use std::time::Instant;

use metaltail_kernels::{Accelerator, Buffer, Op};
use metaltail_store::LayerExperts;

use super::attention::{Mla, Rotations};
use super::ffn::{FeedForward, Moe};
use super::step::Step;
use super::{device_of, hold_floats};
use crate::error::ModelError;
use crate::ffn::{Experts, parts_of};
use crate::load::Loader;
use crate::plan::{AttentionPlan, LayerPlan};

/// A layer with its dense weights on a device.
pub(super) struct Layer {
    attention_norm: Buffer,
    pub(super) attention: Mla,
    ffn_norm: Buffer,
    ffn: FeedForward,
}

impl Layer {
    pub(super) fn load(
        plan: &LayerPlan,
        (index, hidden): (u32, usize),
        experts: &[LayerExperts],
        loader: &Loader<'_>,
        device: &mut dyn Accelerator,
        rotations: &mut Rotations,
    ) -> Result<Layer, ModelError> {
        let prefix = format!("model.layers.{index}.");
        let AttentionPlan::Mla(attention) = &plan.attention else { return Err(ModelError::NoAccelerator) };
        let places = experts.iter().find(|layer| layer.layer == index);
        let parts = places.map(|layer| parts_of(&layer.experts)).unwrap_or_default();
        let mut norm = |name: &str| {
            let weights = loader.floats(&format!("{prefix}{name}.weight"))?;
            hold_floats(device, &weights)
        };
        let (attention_norm, ffn_norm) = (norm("input_layernorm")?, norm("post_attention_layernorm")?);
        Ok(Layer {
            attention_norm,
            attention: Mla::load(attention, &prefix, loader, device, rotations)?,
            ffn_norm,
            ffn: FeedForward::load(&plan.ffn, (index, hidden), &prefix, parts, loader, device)?,
        })
    }

    /// Records `x ← x + Attn(norm(x)); x ← x + FFN(norm(x))` for all rows. Meanwhile `next`'s experts are guessed.
    pub(super) fn record(
        &self,
        step: &mut Step<'_, '_, '_>,
        experts: &mut Experts<'_>,
        slot: usize,
        (eps, next): (f32, Option<&Layer>),
        x: Buffer,
    ) -> Result<(), ModelError> {
        let (began, device) = (Instant::now(), device_of(experts)?);
        let h = norm(step, device, x, (self.attention_norm, eps), "attention in")?;
        let attended = self.attention.record(step, device, slot, h)?;
        add(step, device, attended, x)?;
        let h = norm(step, device, x, (self.ffn_norm, eps), "ffn in")?;
        match &self.ffn {
            FeedForward::Dense(swiglu) => {
                let out = swiglu.record(step, device, h)?;
                add(step, device, out, x)
            }
            FeedForward::Moe(moe) => {
                let guess = match next {
                    Some(next) if experts.foresight.wants(step.rows.len()) => {
                        next.guess(step, experts, eps, x)?
                    }
                    _ => None,
                };
                moe.record(step, experts, began, guess, (h, x))
            }
        }
    }

    /// Records what this layer would choose from the residual stream as it is now.
    fn guess<'l>(
        &'l self,
        step: &mut Step<'_, '_, '_>,
        experts: &mut Experts<'_>,
        eps: f32,
        x: Buffer,
    ) -> Result<Option<&'l Moe>, ModelError> {
        let FeedForward::Moe(moe) = &self.ffn else { return Ok(None) };
        let device = device_of(experts)?;
        let h = norm(step, device, x, (self.ffn_norm, eps), "guess in")?;
        moe.record_guess(step, device, h)?;
        Ok(Some(moe))
    }
}

fn norm(
    step: &mut Step<'_, '_, '_>,
    device: &mut dyn Accelerator,
    x: Buffer,
    (weight, eps): (Buffer, f32),
    what: &'static str,
) -> Result<Buffer, ModelError> {
    let (rows, width) = (step.rows.len(), step.hidden);
    let out = step.scratch.numbers(device, what, rows * width)?;
    let (from, to) = (x.rows(width), out.rows(width));
    device.record(&Op::RmsNorm { from, to, rows, width, weight: weight.view(), eps })?;
    Ok(out)
}

fn add(
    step: &Step<'_, '_, '_>,
    device: &mut dyn Accelerator,
    from: Buffer,
    to: Buffer,
) -> Result<(), ModelError> {
    let count = step.rows.len() * step.hidden;
    Ok(device.record(&Op::Add { from: from.view(), to: to.view(), count })?)
}
