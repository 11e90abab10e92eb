//! What a model needs besides experts, and the budget that follows.

use metaltail_container::{Checkpoint, ExpertPlace, Inventory, TensorSpec};
use metaltail_model::{AttentionPlan, FfnPlan, KvCache, LayerPlan, Plan};
use metaltail_store::budget::term;
use metaltail_store::{Budget, Geometry, LayerExperts, Machine, StoreConfig, Wanted};

use crate::engine::EngineOptions;
use crate::error::EngineError;

/// Memory of a model apart from its expert slots, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Resident dense weights.
    pub dense: u64,
    /// Key-value cache of one session at the full context.
    pub kv: u64,
    /// Activations of one step.
    pub scratch: u64,
    /// What the process had before the model, with tables of expert places and the tokenizer.
    pub program: u64,
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
        let mut dense = 0u64;
        for spec in inventory.tensors.iter().filter(|spec| !spec.optional) {
            dense = dense.saturating_add(resident_bytes(spec, |spec| {
                Ok::<_, EngineError>(checkpoint.matrix(spec)?.layout.bytes() as u64)
            })?);
        }
        Ok(Demand { dense, ..Demand::beside_weights(plan, inventory, context, chunk, threads) })
    }

    /// All but the dense weights.
    pub fn beside_weights(
        plan: &Plan,
        inventory: &Inventory,
        context: usize,
        chunk: usize,
        threads: usize,
    ) -> Demand {
        let experts: u64 = inventory.experts.iter().map(|layer| u64::from(layer.count)).sum();
        let places = experts.saturating_mul(size_of::<ExpertPlace>() as u64 + 256);
        Demand {
            dense: 0,
            kv: KvCache::bytes_for(plan, context),
            scratch: scratch(plan, context, chunk, threads),
            program: PROGRAM + THREAD * threads as u64 + places,
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
    let widest = plan.layers.iter().map(|layer| row_floats(layer, plan.hidden)).max().unwrap_or(0);
    let row = widest.saturating_add(8 * plan.hidden);
    let rows = (row as u64).saturating_mul(chunk as u64);
    // A selection of positions a row, where an indexer selects.
    let selected = (context as u64).min(1 << 16).saturating_mul(chunk as u64) / 4;
    let scores = (context as u64).saturating_mul(4 * threads as u64);
    // Logits of the few rows that are held at a time.
    let logits = (plan.vocab as u64).saturating_mul(16);
    4u64.saturating_mul(rows.saturating_add(selected).saturating_add(scores).saturating_add(logits))
}

/// Floats that one row of a layer needs at a time, generously.
fn row_floats(layer: &LayerPlan, hidden: usize) -> usize {
    let attention = match &layer.attention {
        AttentionPlan::Mla(mla) => {
            let query = mla.heads * (mla.nope + mla.rope.dim);
            query + mla.heads * mla.value + 2 * mla.q_lora.unwrap_or(0) + 2 * mla.kv_lora
        }
        AttentionPlan::Gqa(gqa) => (2 * gqa.heads + 2 * gqa.kv_heads) * gqa.head_dim,
    };
    let ffn = match &layer.ffn {
        FfnPlan::Dense { width } => 3 * width + hidden,
        FfnPlan::Moe(moe) => {
            moe.top_k * (hidden + 3 * moe.width) + moe.experts + 3 * moe.shared_width.unwrap_or(0)
        }
    };
    attention.max(ffn)
}

/// The budget with every term charged, and the store's settings that fit it.
///
/// # Errors
/// Demands that cannot be met: they are refused with the sum, never clamped.
pub(crate) fn fit(
    options: &EngineOptions,
    demand: &Demand,
    places: &[LayerExperts],
    config: StoreConfig,
) -> Result<(Budget, StoreConfig), EngineError> {
    let machine = Machine::probe()
        .map_err(|error| EngineError::Setting(format!("cannot read the machine's memory: {error}")))?;
    let geometry = Geometry::new(places)?;
    let loaders = options.loaders.unwrap_or_else(StoreConfig::default_loaders);
    if loaders == 0 {
        return Err(EngineError::Setting("--loaders 0 reads nothing: use at least 1".into()));
    }
    let mut budget = budget(&machine, options.ram, demand)?;
    let wanted = Wanted { cap: options.cap, in_flight: None, loaders };
    let fit = budget.fit_cap(&geometry, wanted)?;
    Ok((budget, StoreConfig { cap: fit.cap, in_flight: fit.in_flight, loaders, ..config }))
}

/// A budget with everything but the expert slots charged.
///
/// # Errors
/// An explicit limit above the machine's or a control group's.
pub fn budget(machine: &Machine, ram: Option<u64>, demand: &Demand) -> Result<Budget, EngineError> {
    let mut budget = Budget::new(machine, ram)?;
    budget.charge(term::PROGRAM, demand.program);
    budget.charge(term::DENSE, demand.dense);
    budget.charge(term::KV, demand.kv);
    budget.charge(term::SCRATCH, demand.scratch);
    Ok(budget)
}
