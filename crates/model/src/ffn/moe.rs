//! Mixture of experts: route, fetch each distinct expert once, compute, add in a fixed order.

use metaltail_container::{ExpertPlace, PartPlace};
use metaltail_kernels::{Completion, ExpertTask, ExpertWeights};
use metaltail_quant::MatrixRef;
use metaltail_store::{ExpertStore, Lease, StoreError};

use crate::error::ModelError;
use crate::ffn::dense::SwiGlu;
use crate::ffn::router::{self, Choice};
use crate::ffn::{Experts, FeedForward, Foresight, top_p};
use crate::linear::Linear;
use crate::load::Loader;
use crate::observer::{ModelEvent, Selected};
use crate::plan::MoePlan;
use crate::step::StepContext;

/// Where gate, up and down lie in the runs of each expert of a layer.
pub(crate) type ExpertParts = Vec<[PartPlace; 3]>;

/// The routed part of a layer; its experts' weights live in the store.
pub(super) struct Moe {
    plan: MoePlan,
    layer: u32,
    hidden: usize,
    router: Linear,
    bias: Option<Vec<f32>>,
    shared: Option<SwiGlu>,
    parts: ExpertParts,
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
        let bias = match plan.router.correction_bias {
            true => Some(loader.floats(&format!("{prefix}mlp.gate.e_score_correction_bias"))?),
            false => None,
        };
        let shared = match plan.shared_width {
            Some(_) => Some(SwiGlu::load(&format!("{prefix}mlp.shared_experts"), loader)?),
            None => None,
        };
        let router = Linear::load_f32(&format!("{prefix}mlp.gate.weight"), plan.experts, loader)?;
        Ok(Moe { plan: plan.clone(), layer, hidden, router, bias, shared, parts })
    }

    /// Experts of every row, and how many rows had scores that are not numbers.
    fn choices(&self, cx: &StepContext<'_, '_>, h: &[f32]) -> (Vec<Choice>, usize) {
        let logits = self.router.forward(cx.kernels, cx.pool, h, cx.rows.len());
        let mut broken_rows = 0;
        let choices = logits
            .chunks(self.plan.experts)
            .map(|logits| {
                let bias = self.bias.as_deref();
                let (choice, broken) = router::choose(&self.plan.router, self.plan.top_k, logits, bias);
                broken_rows += usize::from(broken);
                choice
            })
            .collect();
        (choices, broken_rows)
    }

    /// Experts of every row, and one event that accounts for all of them.
    fn route(&self, cx: &StepContext<'_, '_>, h: &[f32]) -> Vec<Choice> {
        let (choices, rows) = self.choices(cx, h);
        if rows > 0 {
            cx.observer.on_model(&ModelEvent::RouterNotANumber { layer: self.layer, rows });
        }
        choices
    }

    /// The experts that are computed of those that were chosen, and one event for the others.
    fn leave_out(&self, cx: &StepContext<'_, '_>, chosen: &[Choice], share: f32) -> Vec<Choice> {
        let (choices, dropped) = top_p::keep(chosen, share);
        let (layer, selections, weight) = (self.layer, dropped.selections, dropped.weight);
        cx.observer.on_model(&ModelEvent::Dropped { layer, selections, weight });
        choices
    }

    /// The expert's matrices inside a lease.
    fn weights<'l>(&self, expert: u32, lease: &'l Lease) -> Result<ExpertWeights<'l>, ModelError> {
        let [gate, up, down] = &self.parts[expert as usize];
        Ok(ExpertWeights { gate: matrix(gate, lease)?, up: matrix(up, lease)?, down: matrix(down, lease)? })
    }

    /// Computes all distinct experts; hits first, misses as they land. Leases that the device
    /// still computes on are left in `held`: they must outlive the device's `finish`.
    fn compute(
        &self,
        experts: &mut Experts<'_>,
        choices: &[Choice],
        union: &Union,
        held: &mut Vec<Lease>,
        mut between: impl FnMut(&ExpertStore, &mut Foresight, usize),
    ) -> Result<(), ModelError> {
        let mut fetch = experts.store.fetch_rows(self.layer, &union.experts, choices)?;
        let loading = fetch.pending();
        let mut first = true;
        loop {
            let batch = match fetch.next_batch() {
                // The device still reads experts whose slots are needed: let it come to an end.
                Err(StoreError::LeasesExhausted { .. }) if !held.is_empty() => {
                    experts.compute.drain()?;
                    held.clear();
                    continue;
                }
                other => other?,
            };
            let Some(batch) = batch else { return Ok(()) };
            let tasks = batch
                .iter()
                .map(|(index, lease)| {
                    let weights = self.weights(union.experts[*index], lease)?;
                    Ok(ExpertTask { weights, pairs: &union.pairs[*index] })
                })
                .collect::<Result<Vec<_>, ModelError>>()?;
            match experts.compute.submit(&tasks)? {
                Completion::Done => {}
                Completion::InFlight => held.extend(batch.into_iter().map(|(_, lease)| lease)),
            }
            if std::mem::take(&mut first) {
                between(experts.store, &mut experts.foresight, loading);
            }
        }
    }
}

fn matrix<'l>(place: &PartPlace, lease: &'l Lease) -> Result<MatrixRef<'l>, ModelError> {
    let bytes = |at: metaltail_container::RunOffset, len: usize| {
        let run = lease.run(at.run as usize);
        let start = at.offset as usize;
        &run[start..start + len]
    };
    let layout = place.layout;
    let weights = bytes(place.weights, layout.weight_bytes());
    let scales = place.scales.map_or(&[][..], |at| bytes(at, layout.scale_bytes()));
    Ok(MatrixRef::new(layout, weights, scales)?)
}

/// Distinct experts of a step, ascending, each with its (row, output row) pairs.
struct Union {
    experts: Vec<u32>,
    pairs: Vec<Vec<(u32, u32)>>,
}

impl Union {
    /// Output row of the `rank`-th expert of row `r` is `r · top_k + rank`.
    fn of(choices: &[Choice], experts: usize, top_k: usize) -> Union {
        let mut by_expert: Vec<Vec<(u32, u32)>> = vec![Vec::new(); experts];
        for (r, choice) in choices.iter().enumerate() {
            for (rank, (expert, _)) in choice.iter().enumerate() {
                by_expert[*expert as usize].push((r as u32, (r * top_k + rank) as u32));
            }
        }
        let (experts, pairs) = by_expert
            .into_iter()
            .enumerate()
            .filter(|(_, pairs)| !pairs.is_empty())
            .map(|(expert, pairs)| (expert as u32, pairs))
            .unzip();
        Union { experts, pairs }
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
        let chosen = self.route(cx, h);
        cx.observer.on_selected(&Selected { layer: self.layer, rows: &chosen });
        let selections = chosen.iter().map(Vec::len).sum();
        let choices = match experts.top_p {
            Some(share) => self.leave_out(cx, &chosen, share),
            None => chosen,
        };
        let union = Union::of(&choices, self.plan.experts, self.plan.top_k);
        cx.observer.on_model(&ModelEvent::Routed {
            layer: self.layer,
            rows: choices.len(),
            selections,
            distinct: union.experts.len(),
        });
        experts.foresight.compare(self.layer, &union.experts, cx.observer);
        experts.compute.begin(h, self.hidden, choices.len() * self.plan.top_k)?;
        // The shared expert is computed while the misses load.
        let mut shared = None;
        let mut held = Vec::new();
        let submitted = self.compute(experts, &choices, &union, &mut held, |store, foresight, loading| {
            // While this layer loads, a guess made from its output will be better and in time.
            if loading == 0 || foresight.measures() {
                ahead(store, foresight);
            }
            shared = self.shared.as_ref().map(|shared| shared.compute(cx, h));
        });
        // Before leases are given up the device is waited for, after a failed read too.
        let finished = experts.compute.finish();
        drop(held);
        submitted?;
        let products = finished?;
        for (r, (choice, out)) in choices.iter().zip(out.chunks_mut(self.hidden)).enumerate() {
            out.fill(0.0);
            for (rank, (_, weight)) in choice.iter().enumerate() {
                let start = (r * self.plan.top_k + rank) * self.hidden;
                cx.kernels.axpy(*weight, &products[start..start + self.hidden], out);
            }
            if let Some(shared) = &shared {
                cx.kernels.axpy(1.0, &shared[r * self.hidden..(r + 1) * self.hidden], out);
            }
        }
        Ok(())
    }

    fn foresee(&self, cx: &StepContext<'_, '_>, h: &[f32]) -> Option<(u32, Vec<u32>)> {
        let (choices, _) = self.choices(cx, h);
        let mut all: Vec<(u32, f32)> = choices.into_iter().flatten().collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let mut seen = vec![false; self.plan.experts];
        all.retain(|&(expert, _)| !std::mem::replace(&mut seen[expert as usize], true));
        Some((self.layer, all.into_iter().map(|(expert, _)| expert).collect()))
    }
}

/// Parts of every expert of a layer, in the order of their ids.
pub(crate) fn parts_of(places: &[ExpertPlace]) -> ExpertParts {
    places.iter().map(|place| place.parts).collect()
}
