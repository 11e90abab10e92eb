//! `metaltail plan`: memory by tier, bytes a token and the speed that they allow.
//!
//! Works on a model directory, or on a `config.json` alone before any download. Every term of the
//! budget is printed always, so that two runs can be compared even where nothing was refused.

mod bound;
mod drive;
mod model;

pub use bound::{Bound, Reads};
pub use model::Planned;

use metaltail_bench::{Bandwidth, Spread};
use metaltail_engine::memory::{self, Settled};
use metaltail_kernels::Pool;
use metaltail_store::{Budget, Fit, Geometry, Machine};
use serde_json::{Map, Value, json};

use drive::DriveProbe;

use crate::accelerator::Accelerator;
use crate::args::PlanArgs;
use crate::exit::{Failure, Kind};
use crate::opened::chosen;
use crate::output;
use crate::report::bytes as size;
use crate::runtime::{engine_options, failure};
use crate::settings::Settings;
use crate::words::{table, unoptimised};

/// Bytes that the memory probe reads; fewer where memory is scarce.
const PROBE_BYTES: u64 = 256 << 20;

/// Rounds of the memory probe, of which the median counts.
const PROBE_ROUNDS: usize = 3;

/// Everything that is printed.
pub struct Report {
    /// The model.
    pub planned: Planned,
    context: usize,
    shortened: bool,
    threads: usize,
    /// Every term.
    pub budget: Budget,
    /// Expert slots.
    pub fit: Fit,
    /// Sizes of expert slots.
    pub geometry: Geometry,
    /// What a token reads.
    pub reads: Reads,
    memory: Spread,
    /// The drive's rate, or why there is none.
    pub drive: Result<DriveProbe, String>,
    /// How fast decoding can be.
    pub bound: Bound,
    accelerator: Option<Accelerator>,
}

/// Plans.
///
/// # Errors
/// A model that is refused; a budget that is refused, with the sum.
pub fn execute(args: &PlanArgs, settings: &Settings) -> Result<(), Failure> {
    let path = chosen(args.path.as_ref(), settings)?;
    let planned = Planned::at(&path)?;
    let report = Report::new(planned, settings)?;
    match settings.json() {
        true => output::print(&format!("{}\n", report.to_json())),
        false => output::print(&report.to_words()),
    }
}

impl Report {
    /// Settles memory as the engine does and measures memory and drive.
    ///
    /// # Errors
    /// A budget that is refused, with the sum; settings that contradict the model.
    pub fn new(planned: Planned, settings: &Settings) -> Result<Report, Failure> {
        let geometry = Geometry::new(&planned.places).map_err(|error| failure(&error.into()))?;
        let demand = |context, chunk, threads| planned.demand(context, chunk, threads);
        let options = engine_options(settings);
        let mut settled = memory::settle::<Failure>(&options, &planned.plan, &geometry, &demand)?;
        settled.pin(&options, &geometry).map_err(|error| failure(&error))?;
        let Settled { context, threads, loaders, budget, fit, shortened, .. } = settled;
        let machine = Machine::probe().map_err(|error| Failure::from_error(Kind::Failed, &error))?;

        let reads = Reads::new(&planned.cost()?, &planned.places, fit.cap);
        // Nothing of the model is loaded, so a quarter of what is free is safe to take for a moment.
        let probe = PROBE_BYTES.min(machine.headroom() / 4).max(1 << 20);
        let memory = measure_memory(probe, threads)?;
        let drive = drive::probe(&planned, loaders);
        let rate = drive.as_ref().ok().map(|drive| drive.gb_per_second);
        let bound = Bound::new(&reads, memory.median, rate);
        Ok(Report {
            planned,
            context,
            shortened,
            threads,
            budget,
            fit,
            geometry,
            reads,
            memory,
            drive,
            bound,
            accelerator: Accelerator::named(settings),
        })
    }

    /// Expert slots in memory and experts on the drive.
    fn slots(&self) -> (usize, usize) {
        let experts = self.planned.places.iter().map(|layer| layer.experts.len());
        experts.fold((0, 0), |(slots, all), n| (slots + n.min(self.fit.cap), all + n))
    }

    /// What to know about these figures.
    pub fn notices(&self) -> Vec<String> {
        let mut notices = self.planned.notices.clone();
        notices.extend(unoptimised());
        if self.shortened {
            let context = self.context;
            notices.push(format!("memory allows a context of {context} tokens; --context decides"));
        }
        let most = self.planned.plan.layers.iter().filter_map(|layer| layer.moe());
        if let Some(top_k) = most.map(|moe| moe.top_k).max()
            && self.fit.cap < top_k
        {
            notices.push(format!(
                "cap {} is below the {top_k} experts that a token uses a layer: no replacement policy can help, and hits are chance",
                self.fit.cap
            ));
        }
        if self.reads.expected > 0.0 {
            notices.push(
                "expected reads assume that the router chooses every expert equally often; real routing repeats itself and reads less".to_owned(),
            );
        }
        if let (true, Err(reason)) = (self.reads.expected > 0.0, &self.drive) {
            notices.push(format!(
                "the drive was not measured ({reason}): the bound says only what memory allows"
            ));
        }
        notices
    }

    fn to_json(&self) -> Value {
        json!({
            "model": self.planned.path.to_string_lossy(),
            "model_type": self.planned.plan.family,
            "kind": self.planned.kind(),
            "assumed_formats": self.planned.assumed(),
            "memory": budget_json(&self.budget),
            "accelerator": self.accelerator.as_ref().map(Accelerator::to_json),
            "experts": self.experts_json(),
            "token": self.token_json(),
            "bound": self.bound_json(),
            "context": self.context,
            "threads": self.threads,
            "notices": self.notices(),
        })
    }

    /// Expert slots.
    pub fn experts_json(&self) -> Value {
        let (slots, experts) = self.slots();
        json!({
            "cap": self.fit.cap,
            "in_flight": self.fit.in_flight,
            "slots": slots,
            "total": experts,
            "slot_bytes": self.geometry.in_flight_bytes(1),
            "drive_bytes": self.planned.drive_bytes(),
            "selections_per_token": self.planned.plan.selections_per_row(),
        })
    }

    /// What a token reads.
    pub fn token_json(&self) -> Value {
        let cost = &self.reads.cost;
        json!({
            "dense_bytes": cost.dense,
            "routed_bytes": cost.routed,
            "uncached_read_bytes": cost.routed_on_drive,
            "expected_read_bytes": self.reads.expected.round() as u64,
            "expected_hit_rate": self.reads.hit_rate,
            "routing": "uniform",
        })
    }

    /// How fast decoding can be, and the rates that say so.
    pub fn bound_json(&self) -> Value {
        json!({
            "resource": self.bound.resource,
            "tokens_per_second": self.bound.tokens_per_second,
            "memory_seconds": self.bound.memory_seconds,
            "drive_seconds": self.bound.drive_seconds,
            "memory_gb_per_second": self.memory,
            "drive_gb_per_second": self.drive.as_ref().ok().map(|drive| drive.gb_per_second),
            "drive": self.drive.as_ref().ok(),
            "drive_reason": self.drive.as_ref().err(),
        })
    }

    fn to_words(&self) -> String {
        let plan = &self.planned.plan;
        let mut text = format!(
            "{}: {}, {}, {} layers ({} sparse), context {}\n\nmemory\n{}\n\n",
            self.planned.path.display(),
            plan.family,
            self.planned.kind().unwrap_or_else(|| "config.json alone".to_owned()),
            plan.layers.len(),
            plan.sparse_layers(),
            self.context,
            self.budget
        );
        if let Some(accelerator) = &self.accelerator {
            text.push_str(&format!("accelerator {}\n", accelerator.words()));
            text.push_str("the bound below is that of this machine's processor and drive\n");
        }
        text.push_str(&self.bound_words());
        self.notices().iter().for_each(|notice| text.push_str(&format!("note: {notice}\n")));
        text
    }

    /// Slots, bytes a token, rates and the bound, for people.
    pub fn bound_words(&self) -> String {
        let plan = &self.planned.plan;
        let (slots, experts) = self.slots();
        let cost = &self.reads.cost;
        let row = |name: &str, value: String, remark: String| vec![name.to_owned(), value, remark];
        let hits = self.reads.hit_rate.map_or("none used".to_owned(), |rate| {
            format!("hit rate {:.1} % under uniform routing", 100.0 * rate)
        });
        let rows = [
            row(
                "slots kept",
                slots.to_string(),
                format!("of {experts} experts, cap {} a layer", self.fit.cap),
            ),
            row("experts on drive", size(self.planned.drive_bytes()), String::new()),
            row("dense a token", size(cost.dense), "read from memory".to_owned()),
            row("routed a token", size(cost.routed), format!("{} experts", plan.selections_per_row())),
            row("read a token", size(self.reads.expected as u64), format!("expected; {hits}")),
            row("memory", format!("{:.1} GB/s", self.memory.median), format!("measured: {}", self.memory)),
            match &self.drive {
                Ok(drive) => row("drive", format!("{:.2} GB/s", drive.gb_per_second), drive.to_words()),
                Err(reason) => row("drive", "unknown".to_owned(), reason.clone()),
            },
        ];
        format!(
            "{}\nbound: at most {:.2} tokens/s, bound by the {}\n",
            table(&rows, &[false, true, false]),
            self.bound.tokens_per_second,
            self.bound.resource
        )
    }
}

/// A budget with every term.
pub fn budget_json(budget: &Budget) -> Value {
    let terms: Map<String, Value> =
        budget.terms.iter().map(|term| (term.name.to_owned(), json!(term.bytes))).collect();
    json!({
        "budget": budget.limit,
        "source": budget.source.to_string(),
        "terms": terms,
        "sum": budget.total(),
        "left": budget.rest(),
    })
}

fn measure_memory(bytes: u64, threads: usize) -> Result<Spread, Failure> {
    let bandwidth = Bandwidth::new(usize::try_from(bytes).unwrap_or(usize::MAX));
    let pool = Pool::new(threads);
    // The first read settles clocks and threads.
    bandwidth.measure(&pool);
    let rates: Vec<f64> = (0..PROBE_ROUNDS).map(|_| bandwidth.measure(&pool)).collect();
    Spread::of(&rates).ok_or_else(|| Failure::new(Kind::Failed, "the memory could not be measured"))
}
