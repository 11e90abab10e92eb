//! Feed-forward parts on an accelerator.

use std::time::Instant;

use metaltail_kernels::{Accelerator, Buffer, Combine, Completion, ExpertRows, HeldMatrix, Op, Route};

use super::step::Step;
use super::{device_of, hold_floats};
use crate::error::ModelError;
use crate::ffn::{Choice, ExpertParts, Experts, Predictor, Routed};
use crate::load::Loader;
use crate::plan::{FfnPlan, MoePlan, Scoring};

/// A layer's feed-forward part with its dense weights on a device.
pub(super) enum FeedForward {
    Dense(SwiGlu),
    Moe(Box<Moe>),
}

/// `down(silu(gate · x) · up · x)`.
pub(super) struct SwiGlu {
    gate: HeldMatrix,
    up: HeldMatrix,
    down: HeldMatrix,
}

/// The routed part of a layer.
pub(super) struct Moe {
    routed: Routed,
    hidden: usize,
    router: HeldMatrix,
    bias: Option<Buffer>,
    shared: Option<SwiGlu>,
}

/// Buffers of a choice of experts.
#[derive(Clone, Copy)]
struct Chosen {
    ids: Buffer,
    weights: Buffer,
    broken: Buffer,
}

/// What they are called: a layer's own choice, and a guess at the next one's.
struct Names {
    logits: &'static str,
    ids: &'static str,
    weights: &'static str,
    broken: &'static str,
}

const OWN: Names =
    Names { logits: "logits of experts", ids: "experts", weights: "weights", broken: "broken" };
const GUESS: Names =
    Names { logits: "guessed logits", ids: "guess", weights: "guessed", broken: "guess broken" };

impl FeedForward {
    pub(super) fn load(
        plan: &FfnPlan,
        (layer, hidden): (u32, usize),
        prefix: &str,
        parts: ExpertParts,
        loader: &Loader<'_>,
        device: &mut dyn Accelerator,
    ) -> Result<FeedForward, ModelError> {
        Ok(match plan {
            FfnPlan::Dense { .. } => {
                FeedForward::Dense(SwiGlu::load(&format!("{prefix}mlp"), loader, device)?)
            }
            FfnPlan::Moe(plan) => {
                let routed = Routed::new(plan, layer, parts);
                FeedForward::Moe(Box::new(Moe::load(plan, routed, hidden, prefix, loader, device)?))
            }
        })
    }
}

impl SwiGlu {
    fn load(name: &str, loader: &Loader<'_>, device: &mut dyn Accelerator) -> Result<SwiGlu, ModelError> {
        let mut hold = |part: &str| -> Result<HeldMatrix, ModelError> {
            Ok(device.hold(loader.matrix(&format!("{name}.{part}.weight"))?.as_ref())?)
        };
        Ok(SwiGlu { gate: hold("gate_proj")?, up: hold("up_proj")?, down: hold("down_proj")? })
    }

    /// Records all rows of `h`: rows × hidden in and out.
    pub(super) fn record(
        &self,
        step: &mut Step<'_, '_, '_>,
        device: &mut dyn Accelerator,
        h: Buffer,
    ) -> Result<Buffer, ModelError> {
        let gate = step.product(device, self.gate, h, "gate")?;
        let up = step.product(device, self.up, h, "up")?;
        let count = step.rows.len() * self.gate.layout.rows();
        let inner = step.scratch.numbers(device, "inner", count)?;
        let (gate, up, out) = (gate.view(), up.view(), inner.view());
        device.record(&Op::SwiGlu { gate, up, out, count })?;
        step.product(device, self.down, inner, "ffn out")
    }
}

impl Moe {
    fn load(
        plan: &MoePlan,
        routed: Routed,
        hidden: usize,
        prefix: &str,
        loader: &Loader<'_>,
        device: &mut dyn Accelerator,
    ) -> Result<Moe, ModelError> {
        let bias = match plan.router.correction_bias {
            true => {
                let bias = loader.floats(&plan.names.correction_bias(prefix))?;
                Some(hold_floats(device, &bias)?)
            }
            false => None,
        };
        let shared = match plan.shared_width {
            Some(_) => Some(SwiGlu::load(&plan.names.shared(prefix), loader, device)?),
            None => None,
        };
        let router = loader.matrix_f32(&plan.names.router(prefix), plan.experts)?;
        let router = device.hold(router.as_ref())?;
        Ok(Moe { routed, hidden, router, bias, shared })
    }

    /// Records the choice of experts for all rows of `h`.
    fn record_choice(
        &self,
        step: &mut Step<'_, '_, '_>,
        device: &mut dyn Accelerator,
        h: Buffer,
        names: &Names,
    ) -> Result<Chosen, ModelError> {
        let MoePlan { experts, top_k, ref router, .. } = self.routed.plan;
        let rows = step.rows.len();
        let logits = step.product(device, self.router, h, names.logits)?;
        let chosen = Chosen {
            ids: step.scratch.numbers(device, names.ids, rows * top_k)?,
            weights: step.scratch.numbers(device, names.weights, rows * top_k)?,
            broken: step.scratch.numbers(device, names.broken, rows)?,
        };
        device.record(&Op::Route(Route {
            logits: logits.view(),
            rows,
            experts,
            top_k,
            softmax: router.scoring == Scoring::Softmax,
            bias: self.bias.map(Buffer::view),
            groups: router.groups,
            normalise: router.normalise,
            scale: router.scale,
            ids: chosen.ids.view(),
            weights: chosen.weights.view(),
            broken: chosen.broken.view(),
        }))?;
        Ok(chosen)
    }

    /// Records what this layer would choose if it saw `h`.
    pub(super) fn record_guess(
        &self,
        step: &mut Step<'_, '_, '_>,
        device: &mut dyn Accelerator,
        h: Buffer,
    ) -> Result<(), ModelError> {
        self.record_choice(step, device, h, &GUESS).map(drop)
    }

    /// What was chosen, and for how many rows the scores were no numbers.
    fn read(
        &self,
        step: &mut Step<'_, '_, '_>,
        device: &mut dyn Accelerator,
        names: &Names,
    ) -> Result<(Vec<Choice>, usize), ModelError> {
        let (rows, top_k) = (step.rows.len(), self.routed.plan.top_k);
        let mut view =
            |what, numbers| Ok::<_, ModelError>(step.scratch.numbers(device, what, numbers)?.view());
        let (ids_at, weights_at) = (view(names.ids, rows * top_k)?, view(names.weights, rows * top_k)?);
        let broken_at = view(names.broken, rows)?;
        let (mut ids, mut weights, mut broken) =
            (vec![0; rows * top_k], vec![0.0; rows * top_k], vec![0; rows]);
        device.read_ids(ids_at, &mut ids)?;
        device.read(weights_at, &mut weights)?;
        device.read_ids(broken_at, &mut broken)?;
        let choices = ids.chunks(top_k).zip(weights.chunks(top_k)).map(|(ids, weights)| {
            // Where fewer were allowed, the rest has ids that there are not.
            let both = ids.iter().copied().zip(weights.iter().copied());
            both.filter(|(id, _)| (*id as usize) < self.routed.plan.experts).collect()
        });
        Ok((choices.collect(), broken.into_iter().filter(|flag| *flag != 0).count()))
    }

    /// Computes the experts of all rows of `h` and adds them to `x`. What was recorded before is waited for; the end
    /// of what is recorded here is not.
    pub(super) fn record(
        &self,
        step: &mut Step<'_, '_, '_>,
        experts: &mut Experts<'_>,
        began: Instant,
        guess: Option<&Moe>,
        (h, x): (Buffer, Buffer),
    ) -> Result<(), ModelError> {
        let (n, top_k, hidden) = (step.rows.len(), self.routed.plan.top_k, self.hidden);
        let device = device_of(experts)?;
        self.record_choice(step, device, h, &OWN)?;
        device.wait()?;
        step.end_moves(device, true);
        step.end_layer();
        step.begin_layer(self.routed.layer, began);
        let (chosen, broken) = self.read(step, device, &OWN)?;
        let guess = match guess {
            Some(next) => Some(next.routed.likeliest(next.read(step, device, &GUESS)?.0)),
            None => None,
        };
        let shared = match &self.shared {
            Some(shared) => Some(shared.record(step, device, h)?),
            None => None,
        };
        let products = step.scratch.numbers(device, "products", n * top_k * hidden)?;
        let (choices, union) = self.routed.settle(experts, step.observer, chosen, broken);
        self.compute(experts, (&choices, &union), step, (h, products), guess)?;
        let mut weights = vec![0.0; n * top_k];
        for (choice, weights) in choices.iter().zip(weights.chunks_mut(top_k)) {
            choice.iter().zip(weights).for_each(|((_, from), to)| *to = *from);
        }
        let (products, shared, x) = (products.view(), shared.map(Buffer::view), x.view());
        let combine = Combine { products, weights, top_k, shared, x, width: hidden };
        Ok(device_of(experts)?.record(&Op::Combine(combine))?)
    }

    /// Hands all experts to the device: what is cached at once, and then what lands, batch by batch.
    fn compute(
        &self,
        experts: &mut Experts<'_>,
        (choices, union): (&[Choice], &crate::ffn::Union),
        step: &mut Step<'_, '_, '_>,
        (h, products): (Buffer, Buffer),
        mut guess: Option<(u32, Vec<u32>)>,
    ) -> Result<(), ModelError> {
        let (n, hidden) = (step.rows.len(), self.hidden);
        let outputs = n * self.routed.plan.top_k;
        let rows = ExpertRows { x: h.view(), inputs: n, hidden, out: products.view(), outputs };
        self.routed.fetch(experts, choices, union, &mut step.held, |experts, tasks, missing| {
            let device = device_of(experts)?;
            device.experts(&rows, tasks)?;
            if missing.now > 0 {
                device.submit()?;
            } else if let Some((layer, likeliest)) = guess.take() {
                // The drive has nothing to do for this layer any more.
                experts.foresight.expect(experts.store, layer, Predictor::BeforeExperts, likeliest);
            }
            Ok(Completion::InFlight)
        })
    }
}
