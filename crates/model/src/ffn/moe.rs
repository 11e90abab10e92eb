//! Mixture of experts with its dense weights on the processor: route, fetch each distinct expert once, compute, add in
//! a fixed order.

use metaltail_kernels::sigmoid;
use metaltail_store::ExpertStore;

use crate::error::ModelError;
use crate::ffn::biases::LayerBiases;
use crate::ffn::dense::SwiGlu;
use crate::ffn::routed::{ExpertParts, Routed};
use crate::ffn::router::{self, Choice};
use crate::ffn::{Experts, FeedForward, Foresight};
use crate::linear::Linear;
use crate::load::Loader;
use crate::plan::MoePlan;
use crate::step::StepContext;

/// The routed part of a layer; its experts' weights live in the store.
pub(super) struct Moe {
    routed: Routed,
    hidden: usize,
    router: Linear,
    /// Added to the logits.
    logit_bias: Option<Vec<f32>>,
    /// Added to the scores for the choice alone.
    correction: Option<Vec<f32>>,
    shared: Option<SwiGlu>,
    /// One row, whose product with a row's state decides how much of the shared expert is added.
    shared_gate: Option<Linear>,
}

impl Moe {
    pub(super) fn load(
        plan: &MoePlan,
        layer: u32,
        hidden: usize,
        prefix: &str,
        parts: ExpertParts,
        loader: &Loader<'_>,
    ) -> Result<Self, ModelError> {
        let vector = |has: bool, name: String| has.then(|| loader.floats(&name)).transpose();
        let correction = vector(plan.router.correction_bias, plan.names.correction_bias(prefix))?;
        let logit_bias = vector(plan.router.bias, plan.names.router_bias(prefix))?;
        let shared = match plan.shared_width {
            Some(_) => Some(SwiGlu::load(&plan.names.shared(prefix), loader)?),
            None => None,
        };
        let gate = plan.shared_gate.then(|| Linear::load_f32(&plan.names.shared_gate(prefix), 1, loader));
        let shared_gate = gate.transpose()?;
        let router = Linear::load_f32(&plan.names.router(prefix), plan.experts, loader)?;
        let biases = LayerBiases::load(plan, hidden, prefix, loader)?;
        let routed = Routed::new(plan, layer, parts).with_biases(biases);
        Ok(Moe { routed, hidden, router, logit_bias, correction, shared, shared_gate })
    }

    /// Experts of every row, and how many rows had scores that are not numbers.
    fn choices(&self, cx: &StepContext<'_, '_>, h: &[f32]) -> (Vec<Choice>, usize) {
        let plan = &self.routed.plan;
        let mut logits = self.router.forward(cx.kernels, cx.pool, h, cx.rows.len());
        if let Some(bias) = &self.logit_bias {
            for row in logits.chunks_mut(plan.experts) {
                row.iter_mut().zip(bias).for_each(|(logit, bias)| *logit += bias);
            }
        }
        let mut broken_rows = 0;
        let choices = logits
            .chunks(plan.experts)
            .map(|logits| {
                let correction = self.correction.as_deref();
                let (choice, broken) = router::choose(&plan.router, plan.top_k, logits, correction);
                broken_rows += usize::from(broken);
                choice
            })
            .collect();
        (choices, broken_rows)
    }
}

impl FeedForward for Moe {
    fn forward(
        &self,
        cx: &StepContext<'_, '_>,
        experts: &mut Experts<'_>,
        h: &[f32],
        out: &mut [f32],
        ahead: &mut dyn FnMut(&ExpertStore, &mut Foresight),
    ) -> Result<(), ModelError> {
        let (chosen, broken) = self.choices(cx, h);
        let (choices, union) = self.routed.settle(experts, cx.observer, chosen, broken);
        let top_k = self.routed.plan.top_k;
        experts.compute.begin(h, self.hidden, choices.len() * top_k)?;
        // The shared expert is computed while the misses load.
        let (mut shared, mut first) = (None, true);
        let mut held = Vec::new();
        let submitted = self.routed.fetch(experts, &choices, &union, &mut held, |experts, tasks, missing| {
            let done = experts.compute.submit(tasks)?;
            if std::mem::take(&mut first) {
                // While this layer loads, a guess made from its output will be better and in time.
                if missing.first == 0 || experts.foresight.measures() {
                    ahead(experts.store, &mut experts.foresight);
                }
                shared = self.shared.as_ref().map(|shared| shared.compute(cx, h));
            }
            Ok(done)
        });
        // Before leases are given up the device is waited for, after a failed read too.
        let finished = experts.compute.finish();
        drop(held);
        submitted?;
        let products = finished?;
        let gates = self.shared_gate.as_ref().map(|gate| gate.forward(cx.kernels, cx.pool, h, cx.rows.len()));
        for (r, (choice, out)) in choices.iter().zip(out.chunks_mut(self.hidden)).enumerate() {
            out.fill(0.0);
            for (rank, (_, weight)) in choice.iter().enumerate() {
                let start = (r * top_k + rank) * self.hidden;
                cx.kernels.axpy(*weight, &products[start..start + self.hidden], out);
            }
            if let Some(shared) = &shared {
                let weight = gates.as_ref().map_or(1.0, |gates| sigmoid(gates[r]));
                cx.kernels.axpy(weight, &shared[r * self.hidden..(r + 1) * self.hidden], out);
            }
        }
        Ok(())
    }

    fn foresee(&self, cx: &StepContext<'_, '_>, h: &[f32]) -> Option<(u32, Vec<u32>)> {
        Some(self.routed.likeliest(self.choices(cx, h).0))
    }
}
