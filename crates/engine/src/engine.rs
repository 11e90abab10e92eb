//! A loaded model with its store, its threads and its settings.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metaltail_container::{Checkpoint, Drive};
use metaltail_kernels::{CpuExperts, ExpertCompute, Kernels, Numerics, Pool};
use metaltail_model::{
    CancelFlag, Experts, Foresight, KvCache, LoadOptions, MlaForm, Model, Plan, Row, expert_places,
};
use metaltail_store::usage::UsageRecorder;
use metaltail_store::usage::pin::PinRoom;
use metaltail_store::{
    Budget, Direct, DriveFiles, ExpertStore, Geometry, Io, Machine, PolicyKind, StoreConfig,
};

use crate::error::EngineError;
use crate::memory::{self, Demand};
use crate::pins::{self, Ground, PinMode, Pins};
use crate::telemetry::Telemetry;
use crate::upkeep::Upkeep;
use crate::usage::{self, UsageMode};

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
    /// Whether the cache grows while running where memory allows. On unless a cap is given.
    pub cap_growth: Option<bool>,
    /// Which kept expert makes room for another.
    /// Frecency unless told otherwise.
    pub policy: Option<PolicyKind>,
    /// Whether experts may be loaded ahead of demand. On unless told otherwise.
    pub prefetch: Option<bool>,
    /// Loader threads.
    pub loaders: Option<usize>,
    /// Direct or buffered reads.
    pub direct: Direct,
    /// Further directories with copies of the model's weight files, or with files that it lacks; on other
    /// drives, as a rule.
    pub further: Vec<PathBuf>,
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
    /// Share of a row's expert weights that is computed; lossy below 1.
    pub expert_top_p: Option<f32>,
    /// The usage profile.
    pub usage: UsageMode,
    /// What stays in memory for good.
    pub pin: PinMode,
    /// Bytes to pin; absent, a replay of the usage profile's sample decides, or the length of a list.
    pub pin_size: Option<u64>,
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
    /// `on` or `off`.
    pub cap_growth: String,
    /// Which kept expert makes room for another.
    pub policy: &'static str,
    /// `on` or `off`: whether experts may be loaded ahead of demand.
    pub prefetch: String,
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
    /// File of the usage profile, with `read-only:` before it where it is not written, or `off`.
    pub usage: String,
    /// Bytes of pinned experts.
    pub pin_size: u64,
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
    upkeep: Mutex<Upkeep>,
    usage: Option<Arc<UsageRecorder>>,
    pins: Pins,
    /// Bits of an f32; 1 leaves nothing out.
    compare_guesses: AtomicBool,
    expert_top_p: AtomicU32,
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
        let mut checkpoint = Checkpoint::open_with(dir, &options.further)?;
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
        let mut settled = memory::settle(options, &plan, &geometry, &demand)?;
        if settled.shortened {
            telemetry
                .notice(&format!("memory allows a context of {} tokens; --context decides", settled.context));
        }
        let policy = options.policy.unwrap_or(DEFAULT_POLICY);
        // A cap is a demand of each layer; the budget alone is shared by all.
        let pool = options.cap.is_none() && policy.suits_pool();
        let usage = usage::open(&options.usage, &checkpoint, &plan, &places, &telemetry);
        let room = pins::room(&settled.budget, &geometry, settled.fit.cap, options.cap.is_some());
        let ground = Ground {
            budget: &settled.budget,
            identity: usage::identity(&checkpoint, &plan, &places).ok(),
            profile: usage.as_ref().map(|usage| usage.base()),
            model: usage::coli_model(&plan),
            room: PinRoom { slot_bytes: geometry.slot_bytes(), room, policy, pool },
        };
        let pins = pins::decide(options, &ground)?;
        settled.budget.pin(&geometry, &mut settled.fit, options.cap.is_some(), pins.plan.bytes);
        if let Some(share) = options.expert_top_p.filter(|&share| share < 1.0) {
            telemetry.notice(&format!(
                "--expert-top-p {share} is lossy: the lightest experts of every token are left out; metaltail score says what that costs"
            ));
        }
        let config = StoreConfig {
            cap: settled.fit.cap,
            policy,
            pool,
            pinned: pins.plan.pinned.clone(),
            in_flight: settled.fit.in_flight,
            staging: settled.fit.staging,
            loaders: settled.loaders,
            direct: options.direct,
            io: options.io,
            chunk_bytes: options.chunk_bytes,
            checksums,
            ..StoreConfig::default()
        };
        let growth = options.cap_growth.unwrap_or(options.cap.is_none());
        let prefetch = options.prefetch.unwrap_or(true);
        let pool = Arc::new(Pool::new(settled.threads));
        let kernels = Kernels::best();
        let drive = |drive: &Drive| DriveFiles { dir: drive.dir.clone(), files: drive.files.clone() };
        let drives: Vec<DriveFiles> = checkpoint.drives().iter().map(drive).collect();
        let store = ExpertStore::open_drives(&drives, places.clone(), config.clone(), telemetry.clone())?;
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
            cap_growth: on_off(growth),
            policy: policy.name(),
            prefetch: on_off(prefetch),
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
            usage: usage.as_ref().map_or("off".into(), |usage| {
                let way = if usage.writes() { "" } else { "read-only:" };
                format!("{way}{}", usage.path().display())
            }),
            pin_size: pins.plan.bytes,
        };
        let upkeep = Upkeep::new(&settled.budget, &store, growth, prefetch && config.staging > 0);
        warn_of_cliff(&model, &store, policy, &telemetry);
        Ok(Engine {
            upkeep: Mutex::new(upkeep),
            compute: Mutex::new(Box::new(CpuExperts::new(pool, kernels, numerics))),
            checkpoint,
            model,
            store,
            telemetry,
            budget: settled.budget,
            resolved,
            usage,
            pins,
            compare_guesses: AtomicBool::new(false),
            expert_top_p: AtomicU32::new(options.expert_top_p.unwrap_or(1.0).to_bits()),
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

    /// The usage profile, unless it is off.
    pub fn usage(&self) -> Option<&UsageRecorder> {
        self.usage.as_deref()
    }

    /// From now on what the next layers will choose is guessed in every way and compared
    /// ([`ModelEvent::Foreseen`](metaltail_model::ModelEvent::Foreseen)), and nothing is loaded ahead.
    pub fn compare_guesses(&self) {
        self.compare_guesses.store(true, Ordering::Relaxed);
    }

    /// Share of a row's expert weights that is computed, where some may be left out.
    pub fn expert_top_p(&self) -> Option<f32> {
        let share = f32::from_bits(self.expert_top_p.load(Ordering::Relaxed));
        (share < 1.0).then_some(share)
    }

    /// Changes that share for the steps to come; `None` leaves nothing out. So one loaded model can be
    /// judged with and without.
    pub fn set_expert_top_p(&self, share: Option<f32>) {
        self.expert_top_p.store(share.unwrap_or(1.0).to_bits(), Ordering::Relaxed);
    }

    /// What is pinned, and why.
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// Saves what is new in the usage profile and waits for the drive; also done when the engine is
    /// dropped. A failure is a notice: the old file is as it was.
    pub fn save_usage(&self) {
        self.save_usage_by(true);
    }

    fn save_usage_by(&self, durable: bool) {
        if let Some(Err(error)) = self.usage.as_ref().map(|usage| usage.save(durable)) {
            self.telemetry.notice(&error.to_string());
        }
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
        let felt = self.telemetry.felt_wait();
        let compare = self.compare_guesses.load(Ordering::Relaxed);
        let ahead = !compare && rows.len() == 1 && self.upkeep().loads_ahead();
        if ahead {
            self.telemetry.prefetching();
        }
        // One pass at a time uses the device; a panic in a pass leaves it usable, since `begin`
        // starts it anew.
        let mut compute = self.compute.lock().unwrap_or_else(PoisonError::into_inner);
        let foresight = match (compare, ahead) {
            (true, _) => Foresight::measure(),
            (false, true) => Foresight::on(),
            (false, false) => Foresight::off(),
        };
        let top_p = self.expert_top_p();
        let mut experts = Experts { store: &self.store, compute: compute.as_mut(), foresight, top_p };
        let hidden = self.model.forward(rows, caches, &mut experts, &*self.telemetry, cancel)?;
        drop(compute);
        let took = start.elapsed();
        if rows.len() == 1 {
            let felt = Duration::from_secs_f64((self.telemetry.felt_wait() - felt).max(0.0));
            self.upkeep().record(took, felt);
        }
        let anonymous = Machine::own_anon_now().ok();
        self.telemetry.step(rows.len(), took, anonymous);
        if let Some(anonymous) = anonymous {
            self.upkeep().keep_budget(&self.store, &self.telemetry, anonymous);
        }
        if self.usage.as_ref().is_some_and(|usage| usage.due()) {
            self.save_usage_by(false);
        }
        Ok(hidden)
    }

    fn upkeep(&self) -> MutexGuard<'_, Upkeep> {
        // What is decided in it is plain numbers, right after a panic elsewhere too.
        self.upkeep.lock().unwrap_or_else(PoisonError::into_inner)
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

impl Drop for Engine {
    fn drop(&mut self) {
        self.save_usage();
    }
}

/// Says so where the cache is smaller than what one token uses: there, recency alone finds nothing.
fn warn_of_cliff(model: &Model, store: &ExpertStore, policy: PolicyKind, telemetry: &Telemetry) {
    let token: usize = model.plan().layers.iter().filter_map(|l| l.moe()).map(|moe| moe.top_k).sum();
    let slots = store.cached_slots();
    if slots == 0 || slots >= token {
        return;
    }
    let what = match policy.suits_pool() {
        true => format!("{policy} keeps the likeliest ones, where recency alone would find nothing"),
        false => format!("{policy} goes by recency and will find next to nothing; --policy frecency will"),
    };
    telemetry.notice(&format!(
        "the cache has room for {slots} experts and one token uses {token}: {what}. More --ram helps most here"
    ));
}
