//! The routed part of a layer but for its dense weights: from choices to experts in the store, wherever they are
//! computed.

use metaltail_container::{ExpertPlace, PartPlace};
use metaltail_kernels::{Completion, ExpertTask, ExpertWeights};
use metaltail_quant::MatrixRef;
use metaltail_store::{Lease, StoreError};

use crate::error::ModelError;
use crate::ffn::biases::LayerBiases;
use crate::ffn::router::Choice;
use crate::ffn::{Experts, top_p};
use crate::observer::{ModelEvent, ModelObserver, Selected};
use crate::plan::MoePlan;

/// Where gate, up and down lie in the runs of each expert of a layer.
pub(crate) type ExpertParts = Vec<[PartPlace; 3]>;

/// The experts of a layer; their weights live in the store.
pub(crate) struct Routed {
    pub(crate) plan: MoePlan,
    pub(crate) layer: u32,
    parts: ExpertParts,
    biases: Option<LayerBiases>,
}

impl Routed {
    pub(crate) fn new(plan: &MoePlan, layer: u32, parts: ExpertParts) -> Routed {
        Routed { plan: plan.clone(), layer, parts, biases: None }
    }

    /// With what its experts add to their products.
    pub(crate) fn with_biases(self, biases: Option<LayerBiases>) -> Routed {
        Routed { biases, ..self }
    }

    /// Tells what was chosen for the rows of a step, and how many of them had scores that are no numbers; what is
    /// computed of it, and of which experts.
    pub(crate) fn settle(
        &self,
        experts: &mut Experts<'_>,
        observer: &dyn ModelObserver,
        chosen: Vec<Choice>,
        broken: usize,
    ) -> (Vec<Choice>, Union) {
        if broken > 0 {
            observer.on_model(&ModelEvent::RouterNotANumber { layer: self.layer, rows: broken });
        }
        observer.on_selected(&Selected { layer: self.layer, rows: &chosen });
        let selections = chosen.iter().map(Vec::len).sum();
        let choices = match experts.top_p {
            Some(share) => self.leave_out(observer, &chosen, share),
            None => chosen,
        };
        let union = Union::of(&choices, self.plan.experts, self.plan.top_k);
        observer.on_model(&ModelEvent::Routed {
            layer: self.layer,
            rows: choices.len(),
            selections,
            distinct: union.experts.len(),
        });
        experts.foresight.compare(self.layer, &union.experts, observer);
        (choices, union)
    }

    /// The experts that are computed of those that were chosen, and one event for the others.
    fn leave_out(&self, observer: &dyn ModelObserver, chosen: &[Choice], share: f32) -> Vec<Choice> {
        let (choices, dropped) = top_p::keep(chosen, share);
        let (layer, selections, weight) = (self.layer, dropped.selections, dropped.weight);
        observer.on_model(&ModelEvent::Dropped { layer, selections, weight });
        choices
    }

    /// The expert's matrices inside a lease.
    fn weights<'l>(&self, expert: u32, lease: &'l Lease) -> Result<ExpertWeights<'l>, ModelError> {
        let [gate, up, down] = &self.parts[expert as usize];
        Ok(ExpertWeights { gate: matrix(gate, lease)?, up: matrix(up, lease)?, down: matrix(down, lease)? })
    }

    /// Fetches all distinct experts and hands them to `submit`, hits first, misses as they land, with the number of
    /// those that were missing at the beginning and of those that are still. Leases that the device still computes
    /// on are left in `held`: they must outlive its work.
    pub(crate) fn fetch(
        &self,
        experts: &mut Experts<'_>,
        choices: &[Choice],
        union: &Union,
        held: &mut Vec<Lease>,
        mut submit: impl FnMut(&mut Experts<'_>, &[ExpertTask<'_>], Missing) -> Result<Completion, ModelError>,
    ) -> Result<(), ModelError> {
        let store = experts.store;
        let mut fetch = store.fetch_rows(self.layer, &union.experts, choices)?;
        let first = fetch.pending();
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
                    let expert = union.experts[*index];
                    let biases = self.biases.as_ref().map(|biases| biases.of(expert));
                    let (weights, pairs) = (self.weights(expert, lease)?, &union.pairs[*index][..]);
                    Ok(ExpertTask { weights, biases, activation: self.plan.activation, pairs })
                })
                .collect::<Result<Vec<_>, ModelError>>()?;
            let submitted = submit(experts, &tasks, Missing { first, now: fetch.pending() });
            // After a failure the device may have taken some of them.
            if !matches!(submitted, Ok(Completion::Done)) {
                held.extend(batch.into_iter().map(|(_, lease)| lease));
            }
            submitted?;
        }
    }

    /// Of what rows would choose, each expert once, the one of greatest weight first.
    pub(crate) fn likeliest(&self, choices: Vec<Choice>) -> (u32, Vec<u32>) {
        let mut all: Vec<(u32, f32)> = choices.into_iter().flatten().collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let mut seen = vec![false; self.plan.experts];
        all.retain(|&(expert, _)| !std::mem::replace(&mut seen[expert as usize], true));
        (self.layer, all.into_iter().map(|(expert, _)| expert).collect())
    }
}

/// Experts of a fetch that are not in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Missing {
    /// When it began.
    pub(crate) first: usize,
    /// Now.
    pub(crate) now: usize,
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
pub(crate) struct Union {
    pub(crate) experts: Vec<u32>,
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

/// Parts of every expert of a layer, in the order of their ids.
pub(crate) fn parts_of(places: &[ExpertPlace]) -> ExpertParts {
    places.iter().map(|place| place.parts).collect()
}
