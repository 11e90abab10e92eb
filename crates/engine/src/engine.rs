//! A loaded model with its store, its threads and its settings.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use metaltail_container::Checkpoint;
use metaltail_kernels::{CpuExperts, ExpertCompute, Kernels, Numerics, Pool};
use metaltail_model::{CancelFlag, Experts, KvCache, LoadOptions, MlaForm, Model, Plan, Row, expert_places};
use metaltail_store::{Budget, Direct, ExpertStore, Geometry, Io, Machine, PolicyKind, StoreConfig};

use crate::error::EngineError;
use crate::memory::{self, Demand};
use crate::telemetry::Telemetry;

/// Rows of a prefill step where nothing is said: enough that most experts of a layer are shared
/// by several rows, little enough that scratch stays small.
pub const DEFAULT_PREFILL_CHUNK: usize = 256;

/// Context where nothing is said and the model allows more.
pub const DEFAULT_CONTEXT: usize = 8192;

/// Replacement policy where nothing is said: it finds most on traces of real models.
pub const DEFAULT_POLICY: PolicyKind = PolicyKind::Frecency;

/// Settings of an engine; what is absent is measured or derived.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// Memory budget in bytes.
    pub ram: Option<u64>,
    /// Experts kept a layer.
    pub cap: Option<usize>,
    /// Which kept expert makes room for another.
    /// Frecency unless told otherwise.
    pub policy: Option<PolicyKind>,
    /// Loader threads.
    pub loaders: Option<usize>,
    /// Direct or buffered reads.
    pub direct: Direct,
    /// What carries reads of experts out.
    pub io: Io,
    /// Longest part of an expert that is read at once, in bytes.
    pub chunk_bytes: Option<u64>,
    /// Whether the checksum of an expert is verified when it is first read.
    pub checksums: Option<bool>,
    /// Rows of a prefill step.
    pub prefill_chunk: Option<usize>,
    /// Positions of a session.
    pub context: Option<usize>,
    /// Compute threads.
    pub threads: Option<usize>,
    /// Whether activations stay in f32 for expert products too.
    pub exact: bool,
    /// Form of latent attention, for the whole engine.
    pub mla_form: MlaForm,
}

/// What the settings became.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Resolved {
    /// Model directory.
    pub model: PathBuf,
    /// `hf`, `colibri` or `slab`.
    pub container: String,
    /// Memory budget in bytes.
    pub ram: u64,
    /// Experts kept a layer; the mean where layers share their slots.
    pub cap: usize,
    /// Which kept expert makes room for another.
    pub policy: &'static str,
    /// Whether layers share their slots.
    pub pool: bool,
    /// Loader threads.
    pub loaders: usize,
    /// `on` or `off`.
    pub direct: String,
    /// `uring` or `threads`.
    pub io: &'static str,
    /// `on` or `off`.
    pub checksums: String,
    /// Rows of a prefill step.
    pub prefill_chunk: usize,
    /// Positions of a session.
    pub context: usize,
    /// Compute threads.
    pub threads: usize,
    /// Instruction set.
    pub isa: String,
    /// Whether activations stay in f32 for expert products too.
    pub exact: bool,
}

/// A loaded model; sessions run on it.
pub struct Engine {
    checkpoint: Checkpoint,
    model: Model,
    store: ExpertStore,
    compute: Mutex<Box<dyn ExpertCompute>>,
    telemetry: Arc<Telemetry>,
    budget: Budget,
    resolved: Resolved,
}

impl Engine {
    /// Opens and loads a model directory. `progress` is told the bytes of dense weights loaded so
    /// far and their total.
    ///
    /// # Errors
    /// A model that is missing, damaged or unsupported; a budget that cannot be met; settings that
    /// contradict the model.
    pub fn open(
        dir: &Path,
        options: &EngineOptions,
        telemetry: Arc<Telemetry>,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Engine, EngineError> {
        let mut checkpoint = Checkpoint::open(dir)?;
        let checksums = options.checksums.unwrap_or(true);
        checkpoint.verify_dense(checksums);
        let plan = Plan::from_config(checkpoint.config())?.with_mla_form(options.mla_form);
        let inventory = plan.inventory();
        checkpoint.check(&inventory)?;
        checkpoint.notices().iter().for_each(|text| telemetry.notice(text));
        let places = expert_places(&checkpoint, &inventory, false)?;
        let geometry = Geometry::new(&places)?;
        let demand =
            |context, chunk, threads| Demand::of(&checkpoint, &plan, &inventory, context, chunk, threads);
        let settled = memory::settle(options, &plan, &geometry, &demand)?;
        if settled.shortened {
            telemetry
                .notice(&format!("memory allows a context of {} tokens; --context decides", settled.context));
        }
        let policy = options.policy.unwrap_or(DEFAULT_POLICY);
        let config = StoreConfig {
            cap: settled.fit.cap,
            policy,
            // A cap is a demand of each layer; the budget alone is shared by all.
            pool: options.cap.is_none() && policy.suits_pool(),
            in_flight: settled.fit.in_flight,
            loaders: settled.loaders,
            direct: options.direct,
            io: options.io,
            chunk_bytes: options.chunk_bytes,
            checksums,
            ..StoreConfig::default()
        };
        let pool = Arc::new(Pool::new(settled.threads));
        let kernels = Kernels::best();
        let store = ExpertStore::open(checkpoint.files(), places.clone(), config.clone(), telemetry.clone())?;
        let loaded = std::cell::Cell::new(0);
        let load = LoadOptions {
            kernels,
            pool: pool.clone(),
            draft: false,
            progress: &|bytes| {
                loaded.set(loaded.get() + bytes);
                progress(loaded.get(), settled.demand.dense);
            },
        };
        let model = Model::load(&checkpoint, plan, &places, &load)?;
        let numerics = if options.exact { Numerics::Exact } else { Numerics::QuantizedActivations };
        let on_off = |on| if on { "on".to_owned() } else { "off".to_owned() };
        let resolved = Resolved {
            model: dir.to_owned(),
            container: checkpoint.kind().to_string(),
            ram: settled.budget.limit,
            cap: config.cap,
            policy: policy.name(),
            pool: config.pool,
            loaders: config.loaders,
            direct: on_off(store.io_mode().direct),
            io: store.io_mode().carrier(),
            checksums: on_off(config.checksums),
            prefill_chunk: settled.prefill_chunk,
            context: settled.context,
            threads: settled.threads,
            isa: kernels.isa().to_string(),
            exact: options.exact,
        };
        Ok(Engine {
            compute: Mutex::new(Box::new(CpuExperts::new(pool, kernels, numerics))),
            checkpoint,
            model,
            store,
            telemetry,
            budget: settled.budget,
            resolved,
        })
    }

    /// The files it was loaded from.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// What the model computes.
    pub fn plan(&self) -> &Plan {
        self.model.plan()
    }

    /// Positions that a session may hold.
    pub fn context(&self) -> usize {
        self.resolved.context
    }

    /// Rows of a prefill step.
    pub fn prefill_chunk(&self) -> usize {
        self.resolved.prefill_chunk
    }

    /// Settings as they were resolved.
    pub fn resolved(&self) -> &Resolved {
        &self.resolved
    }

    /// The memory budget and its terms.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// The expert store.
    pub fn store(&self) -> &ExpertStore {
        &self.store
    }

    /// Figures and notices.
    pub fn telemetry(&self) -> &Telemetry {
        &self.telemetry
    }

    /// Name of what computes experts.
    pub fn device(&self) -> &'static str {
        self.compute.lock().unwrap_or_else(PoisonError::into_inner).name()
    }

    /// Computes one step of any number of sequences and, after it, keeps memory within the budget.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn step(
        &self,
        rows: &[Row],
        caches: &mut [&mut KvCache],
        cancel: &CancelFlag,
    ) -> Result<Vec<f32>, EngineError> {
        let start = Instant::now();
        // One pass at a time uses the device; a panic in a pass leaves it usable, since `begin`
        // starts it anew.
        let mut compute = self.compute.lock().unwrap_or_else(PoisonError::into_inner);
        let mut experts = Experts { store: &self.store, compute: compute.as_mut() };
        let hidden = self.model.forward(rows, caches, &mut experts, &*self.telemetry, cancel)?;
        drop(compute);
        let anonymous = Machine::own_anon_now().ok();
        self.telemetry.step(rows.len(), start.elapsed(), anonymous);
        if let Some(anonymous) = anonymous {
            self.store.enforce(self.budget.limit, anonymous);
        }
        Ok(hidden)
    }

    /// Logits of hidden states: n × vocabulary.
    ///
    /// # Errors
    /// [`EngineError::NotFinite`] if any is not a number or infinite: nothing can be chosen by them.
    pub fn logits(&self, hidden: &[f32]) -> Result<Vec<f32>, EngineError> {
        let logits = self.model.logits(hidden);
        match logits.iter().position(|logit| !logit.is_finite()) {
            None => Ok(logits),
            Some(at) => Err(EngineError::NotFinite { id: at % self.plan().vocab, value: logits[at] }),
        }
    }
}
