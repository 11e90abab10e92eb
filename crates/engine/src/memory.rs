//! What a model needs besides experts, and the budget that follows.

use metaltail_container::{Checkpoint, ExpertPlace, Inventory, Repack, Role, TensorSpec};
use metaltail_kernels::{MOST_INTERMEDIATE, default_threads};
use metaltail_model::{AttentionPlan, FfnPlan, KvCache, LayerPlan, Model, Plan};
use metaltail_store::budget::term;
use metaltail_store::{Budget, BudgetError, DeviceLimit, Fit, Geometry, Machine, StoreConfig, Wanted};

use crate::device::{DeviceKind, accelerator_facts};
use crate::error::EngineError;
use crate::options::{DEFAULT_CONTEXT, DEFAULT_PREFILL_CHUNK, EngineOptions};
use crate::pins::{self, PinMode};

/// Memory of a model apart from its expert slots, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Resident dense weights.
    pub dense: u64,
    /// Of these, an embedding that is the head too: an accelerator with the dense weights holds it once more.
    pub tied: u64,
    /// Key-value cache of one session at the full context, recurrent states included.
    pub kv: u64,
    /// Activations of one step.
    pub scratch: u64,
    /// What the process had before the model, with tables of expert places and the tokenizer.
    pub program: u64,
}

impl std::fmt::Display for Demand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let Demand { program, dense, kv, scratch, .. } = *self;
        let terms = [mib(program), mib(dense), mib(kv), mib(scratch)];
        let [program, dense, kv, scratch] = terms;
        write!(f, "program {program} MiB, dense {dense} MiB, kv {kv} MiB, scratch {scratch} MiB")
    }
}

/// Allowance for code, thread stacks, tokenizer and allocator.
const PROGRAM: u64 = 48 << 20;

/// Stack and scratch of one thread.
const THREAD: u64 = 2 << 20;

impl Demand {
    /// The demand of a checkpoint's stored formats.
    ///
    /// # Errors
    /// Tensors that cannot be located.
    pub fn of(
        checkpoint: &Checkpoint,
        plan: &Plan,
        inventory: &Inventory,
        context: usize,
        chunk: usize,
        threads: usize,
    ) -> Result<Demand, EngineError> {
        let stored = |spec: &TensorSpec| Ok::<_, EngineError>(checkpoint.matrix(spec)?.layout.bytes() as u64);
        let beside = Demand::beside_weights(plan, inventory, context, chunk, threads);
        beside.with_weights(plan, inventory, stored)
    }

    /// With the dense weights; `stored` says what a tensor takes in its stored format.
    ///
    /// # Errors
    /// Those of `stored`.
    pub fn with_weights<E>(
        mut self,
        plan: &Plan,
        inventory: &Inventory,
        stored: impl Fn(&TensorSpec) -> Result<u64, E>,
    ) -> Result<Demand, E> {
        for spec in inventory.tensors.iter().filter(|spec| !spec.optional) {
            let bytes = resident_bytes(spec, &stored)?;
            self.dense = self.dense.saturating_add(bytes);
            if plan.tied_head && spec.role == Role::Embedding {
                self.tied = bytes;
            }
        }
        Ok(self)
    }

    /// The same on a device that takes the dense weights: the processor reads rows of the embedding, and the device
    /// holds it as the head; activations take more memory there.
    fn on(self, device: DeviceKind, plan: &Plan, (context, chunk): (usize, usize)) -> Demand {
        if device == DeviceKind::Cpu || Model::why_not_accelerated(plan).is_some() {
            return self;
        }
        Demand {
            dense: self.dense.saturating_add(self.tied),
            scratch: self.scratch.saturating_add(device_scratch(plan, context, chunk)),
            ..self
        }
    }

    /// All but the dense weights.
    pub fn beside_weights(
        plan: &Plan,
        inventory: &Inventory,
        context: usize,
        chunk: usize,
        threads: usize,
    ) -> Demand {
        let places = inventory.experts.iter().fold(0u64, |sum, layer| {
            let repack = if layer.stacked.is_some() { size_of::<Repack>() } else { 0 };
            let bytes = size_of::<ExpertPlace>() as u64 + 256 + repack as u64;
            sum.saturating_add(bytes.saturating_mul(u64::from(layer.count)))
        });
        Demand {
            dense: 0,
            tied: 0,
            kv: KvCache::bytes_for(plan, context),
            scratch: scratch(plan, context, chunk, threads),
            program: PROGRAM.saturating_add(THREAD.saturating_mul(threads as u64)).saturating_add(places),
        }
    }
}

/// Bytes that a dense tensor takes in memory: widened where it is always computed in f32.
pub fn resident_bytes<E>(
    spec: &TensorSpec,
    stored: impl FnOnce(&TensorSpec) -> Result<u64, E>,
) -> Result<u64, E> {
    if spec.role.keeps_f32() {
        return Ok((spec.rows as u64).saturating_mul(spec.cols as u64).saturating_mul(4));
    }
    stored(spec)
}

/// Activations of the widest layer for `chunk` rows, and attention scores of every thread.
fn scratch(plan: &Plan, context: usize, chunk: usize, threads: usize) -> u64 {
    let floats = |layer| {
        let (attention, ffn) = row_floats(layer, plan.hidden);
        attention.max(ffn)
    };
    let widest = plan.layers.iter().map(floats).max().unwrap_or(0);
    let row = widest.saturating_add(8 * plan.hidden);
    let rows = (row as u64).saturating_mul(chunk as u64);
    // A selection of positions a row, where an indexer selects.
    let selected = (context as u64).min(1 << 16).saturating_mul(chunk as u64) / 4;
    let scores = (context as u64).saturating_mul(4 * threads as u64);
    // Logits of the few rows that are held at a time.
    let logits = (plan.vocab as u64).saturating_mul(16);
    4u64.saturating_mul(rows.saturating_add(selected).saturating_add(scores).saturating_add(logits))
}

/// What loaders take to repack experts: a copy of one for each of them, and one for an io_uring's thread in need.
fn repack_scratch(geometry: &Geometry, loaders: usize) -> u64 {
    geometry.largest_repacked().saturating_mul(loaders as u64 + 1)
}

/// What an accelerator takes beside [`scratch`]: its buffers of attention and feed-forward last side by side, and
/// within an attention it takes blocks of rows of a bounded size, one row at least.
fn device_scratch(plan: &Plan, context: usize, chunk: usize) -> u64 {
    let beside = plan.layers.iter().map(|layer| {
        let (attention, ffn) = row_floats(layer, plan.hidden);
        attention.min(ffn) as u64
    });
    let within = plan.layers.iter().map(|layer| match &layer.attention {
        AttentionPlan::Mla(mla) => {
            let numbers = (context as u64).saturating_add((2 * mla.kv_lora + mla.rope.dim) as u64);
            numbers.saturating_mul(4 * mla.heads as u64)
        }
        AttentionPlan::Gqa(_) | AttentionPlan::DeltaNet(_) => 0,
    });
    let rows = beside.max().unwrap_or(0).saturating_mul(4 * chunk as u64);
    within.max().unwrap_or(0).max(MOST_INTERMEDIATE as u64).saturating_add(rows)
}

/// Floats that one row of a layer needs at a time for attention and for its feed-forward part, generously.
fn row_floats(layer: &LayerPlan, hidden: usize) -> (usize, usize) {
    let attention = match &layer.attention {
        AttentionPlan::Mla(mla) => {
            let query = mla.heads * (mla.nope + mla.rope.dim);
            query + mla.heads * mla.value + 2 * mla.q_lora.unwrap_or(0) + 2 * mla.kv_lora
        }
        AttentionPlan::Gqa(gqa) => {
            let gates = if gqa.gate { 2 * gqa.heads } else { 0 };
            (2 * gqa.heads + gates + 2 * gqa.kv_heads) * gqa.head_dim
        }
        // Inputs before and after the convolution; gates, results by head and by row.
        AttentionPlan::DeltaNet(delta) => {
            3 * (delta.channels() + delta.values()) + 4 * delta.value_heads + 2 * delta.kernel
        }
    };
    let ffn = match &layer.ffn {
        FfnPlan::Dense { width } => 3 * width + hidden,
        FfnPlan::Moe(moe) => {
            moe.top_k * (hidden + 3 * moe.width) + moe.experts + 3 * moe.shared_width.unwrap_or(0)
        }
    };
    (attention, ffn)
}

/// Settings that memory decides, and the budget that they make.
#[derive(Clone, Debug)]
pub struct Settled {
    /// Positions of a session.
    pub context: usize,
    /// Rows of a prefill step.
    pub prefill_chunk: usize,
    /// Compute threads.
    pub threads: usize,
    /// Loader threads.
    pub loaders: usize,
    /// What the model needs besides experts.
    pub demand: Demand,
    /// Every term, the expert slots included.
    pub budget: Budget,
    /// Expert slots.
    pub fit: Fit,
    /// Whether the default context was shortened to fit.
    pub shortened: bool,
}

impl Settled {
    /// Charges pins whose size was demanded, at the cost of a cache that was not. For a plan: an engine knows
    /// which experts they are.
    ///
    /// # Errors
    /// A size that does not fit, with the sum.
    pub fn pin(&mut self, options: &EngineOptions, geometry: &Geometry) -> Result<(), EngineError> {
        let (Some(bytes), asked) = (options.pin_size, options.cap.is_some()) else { return Ok(()) };
        if options.pin == PinMode::Off || bytes == 0 {
            return Ok(());
        }
        let room = pins::room(&self.budget, geometry, self.fit.cap, asked);
        pins::fits(bytes, room, &self.budget)?;
        self.budget.pin(geometry, &mut self.fit, asked, bytes);
        Ok(())
    }
}

/// Shortest context that a default is shortened to.
const SHORTEST_CONTEXT: usize = 512;

/// Settles context, threads and expert slots within memory. `demand` says what a context, a prefill
/// chunk and a number of threads need. A context that was not asked for is halved while nothing fits.
///
/// # Errors
/// Settings that contradict the model; demands that cannot be met, which are refused with the sum,
/// never clamped.
pub fn settle<E: From<EngineError>>(
    options: &EngineOptions,
    plan: &Plan,
    geometry: &Geometry,
    demand: &dyn Fn(usize, usize, usize) -> Result<Demand, E>,
) -> Result<Settled, E> {
    let machine = Machine::probe()
        .map_err(|error| EngineError::Setting(format!("cannot read the machine's memory: {error}")))?;
    let (chosen, _) = options.device.for_plan(plan);
    let device = accelerator_facts(&chosen)?.map(|facts| facts.limit());
    let threads = options.threads.unwrap_or_else(default_threads).max(1);
    let loaders = options.loaders.unwrap_or_else(StoreConfig::default_loaders);
    if loaders == 0 {
        return Err(EngineError::Setting("--loaders 0 reads nothing: use at least 1".into()).into());
    }
    let most = context(options, plan)?;
    let mut context = most;
    loop {
        let prefill_chunk = options.prefill_chunk.unwrap_or(DEFAULT_PREFILL_CHUNK).clamp(1, context);
        let mut demand =
            demand(context, prefill_chunk, threads)?.on(chosen.kind, plan, (context, prefill_chunk));
        demand.scratch = demand.scratch.saturating_add(repack_scratch(geometry, loaders));
        let staging = if options.prefetch.unwrap_or(true) { staging(plan) } else { 0 };
        let wanted = Wanted { cap: options.cap, in_flight: None, loaders, staging };
        let fitted = budget(&machine, options.ram, device, &demand).and_then(|mut budget| {
            let fit = budget.fit_cap(geometry, wanted)?;
            Ok((budget, fit))
        });
        match fitted {
            Ok((budget, fit)) => {
                let shortened = context < most;
                return Ok(Settled {
                    context,
                    prefill_chunk,
                    threads,
                    loaders,
                    demand,
                    budget,
                    fit,
                    shortened,
                });
            }
            Err(EngineError::Budget(BudgetError::TooSmall { .. } | BudgetError::DoesNotFit { .. }))
                if options.context.is_none() && context / 2 >= SHORTEST_CONTEXT =>
            {
                context /= 2;
            }
            Err(EngineError::Budget(
                refusal @ (BudgetError::AboveCgroup { .. }
                | BudgetError::AboveMachine { .. }
                | BudgetError::AboveDevice { .. }),
            )) => return Err(EngineError::Limit { refusal: Box::new(refusal), demand }.into()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Staged slots: as many experts as a token uses in a layer.
fn staging(plan: &Plan) -> usize {
    plan.layers.iter().filter_map(|layer| layer.moe()).map(|moe| moe.top_k).max().unwrap_or(0)
}

/// The context asked for, else what the model allows up to the usual one.
fn context(options: &EngineOptions, plan: &Plan) -> Result<usize, EngineError> {
    let max = plan.max_context;
    match options.context {
        Some(asked) if asked > max => Err(EngineError::ContextTooLong { asked, max }),
        Some(0) => Err(EngineError::Setting("--context 0 holds no token".into())),
        Some(asked) => Ok(asked),
        None => Ok(max.min(DEFAULT_CONTEXT)),
    }
}

/// A budget with everything but the expert slots charged.
///
/// # Errors
/// An explicit limit above the machine's, a control group's or the accelerator's.
fn budget(
    machine: &Machine,
    ram: Option<u64>,
    device: Option<DeviceLimit>,
    demand: &Demand,
) -> Result<Budget, EngineError> {
    let mut budget = Budget::new(machine, ram)?;
    budget.charge(term::PROGRAM, demand.program);
    if let Some(device) = device {
        budget.hold_to(device)?;
    }
    budget.charge(term::DENSE, demand.dense);
    budget.charge(term::KV, demand.kv);
    budget.charge(term::SCRATCH, demand.scratch);
    Ok(budget)
}
