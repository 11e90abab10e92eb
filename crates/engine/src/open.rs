//! From a directory and settings to an engine.

use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex};

use metaltail_container::{Checkpoint, Drive, Inventory};
use metaltail_kernels::{Accelerator, ExpertCompute, Kernels, Numerics, Pool};
use metaltail_model::{LoadOptions, Model, Plan, expert_places};
use metaltail_store::usage::UsageRecorder;
use metaltail_store::usage::pin::PinRoom;
use metaltail_store::{DriveFiles, ExpertStore, Geometry, LayerExperts, PolicyKind, StoreConfig};

use crate::device::{Device, DeviceKind, Processor};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::memory::{self, Demand, Settled};
use crate::options::{DEFAULT_POLICY, EngineOptions, Resolved};
use crate::pins::{self, Ground, PinMode, Pins};
use crate::telemetry::Telemetry;
use crate::upkeep::Upkeep;
use crate::usage;

/// A model as it lies on drives: checked, and nothing of it loaded.
struct Found {
    checkpoint: Checkpoint,
    plan: Plan,
    inventory: Inventory,
    places: Vec<LayerExperts>,
    geometry: Geometry,
}

impl Found {
    fn open(dir: &Path, options: &EngineOptions, telemetry: &Telemetry) -> Result<Found, EngineError> {
        let mut checkpoint = Checkpoint::open_with(dir, &options.further)?;
        checkpoint.verify_dense(options.checksums.unwrap_or(true));
        let plan = Plan::of(&mut checkpoint)?.with_mla_form(options.mla_form);
        let inventory = plan.inventory();
        checkpoint.check(&inventory)?;
        checkpoint.notices().iter().for_each(|text| telemetry.notice(text));
        let places = expert_places(&checkpoint, &inventory, false)?;
        let geometry = Geometry::new(&places)?;
        Ok(Found { checkpoint, plan, inventory, places, geometry })
    }

    /// What memory is for.
    fn settle(&self, options: &EngineOptions, telemetry: &Telemetry) -> Result<Settled, EngineError> {
        let demand = |context, chunk, threads| {
            Demand::of(&self.checkpoint, &self.plan, &self.inventory, context, chunk, threads)
        };
        let settled = memory::settle(options, &self.plan, &self.geometry, &demand)?;
        if settled.shortened {
            let context = settled.context;
            telemetry.notice(&format!("memory allows a context of {context} tokens; --context decides"));
        }
        Ok(settled)
    }

    /// What earlier runs used, and what of it stays in memory; that is taken from the cache's share.
    fn pin(
        &self,
        options: &EngineOptions,
        settled: &mut Settled,
        (policy, pool): (PolicyKind, bool),
        telemetry: &Telemetry,
    ) -> Result<(Option<Arc<UsageRecorder>>, Pins), EngineError> {
        let Found { checkpoint, plan, places, geometry, .. } = self;
        let usage = usage::open(&options.usage, checkpoint, plan, places, telemetry)?;
        let room = pins::room(&settled.budget, geometry, settled.fit.cap, options.cap.is_some());
        let ground = Ground {
            budget: &settled.budget,
            identity: usage::identity(checkpoint, plan, places).ok(),
            profile: usage.as_ref().map(|usage| usage.base()),
            model: usage::coli_model(plan),
            room: PinRoom { slot_bytes: geometry.slot_bytes(), room, policy, pool },
            all: geometry.cached_bytes(geometry.most_experts()),
        };
        let pins = pins::decide(options, &ground)?;
        let asked = match (&options.pin, options.pin_size) {
            (PinMode::File(path), _) => Some(format!("--pin {}", path.display())),
            (PinMode::Auto, Some(size)) if size > 0 => Some("--pin-size".to_owned()),
            _ => None,
        };
        if let (Some(asked), true) = (asked, pins.plan.pinned.is_empty()) {
            telemetry.notice(&format!("{asked} pins nothing: {}", pins.reason));
        }
        settled.budget.pin(geometry, &mut settled.fit, options.cap.is_some(), pins.plan.bytes);
        Ok((usage, pins))
    }

    fn store(&self, config: StoreConfig, telemetry: Arc<Telemetry>) -> Result<ExpertStore, EngineError> {
        let drive = |drive: &Drive| DriveFiles { dir: drive.dir.clone(), files: drive.files.clone() };
        let drives: Vec<DriveFiles> = self.checkpoint.drives().iter().map(drive).collect();
        Ok(ExpertStore::open_drives(&drives, self.places.clone(), config, telemetry)?)
    }
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
        let found = Found::open(dir, options, &telemetry)?;
        let options = &on_a_device_that_can(options, &found.plan, &telemetry);
        let mut settled = found.settle(options, &telemetry)?;
        let policy = options.policy.unwrap_or(DEFAULT_POLICY);
        // A cap is a demand of each layer; the budget alone is shared by all.
        let pool = options.cap.is_none() && policy.suits_pool();
        let (usage, pins) = found.pin(options, &mut settled, (policy, pool), &telemetry)?;
        let config = store_config(options, &settled, (policy, pool), &pins);
        let store = found.store(config.clone(), telemetry.clone())?;
        let kernels = Kernels::best();
        let threads = Arc::new(Pool::new(settled.threads));
        let loaded = Cell::new(0);
        let numerics = if exact(options) { Numerics::Exact } else { Numerics::QuantizedActivations };
        let processor = Processor { kernels, pool: threads.clone(), numerics };
        let (device, mut compute) = Device::open(&options.device, processor, &store)?;
        let load = LoadOptions {
            kernels,
            pool: threads,
            accelerator: accelerator_for(&found.plan, compute.as_mut(), options, &telemetry),
            draft: false,
            progress: &|bytes| {
                loaded.set(loaded.get() + bytes);
                progress(loaded.get(), settled.demand.dense);
            },
        };
        let Found { checkpoint, plan, places, .. } = found;
        let model = Model::load(&checkpoint, plan, &places, load)?;
        let resolved = Settings {
            options,
            settled: &settled,
            config: &config,
            policy,
            usage: usage.as_deref(),
            pinned: pins.plan.bytes,
        }
        .resolved(dir, &checkpoint, &store, kernels);
        let upkeep =
            Upkeep::new(&settled.budget, &store, grows(options), prefetches(options) && config.staging > 0);
        warn_of_cliff(&model, &store, options, &telemetry);
        warn_of_loss(options, &telemetry);
        warn_of_device(options, &telemetry);
        Ok(Engine {
            upkeep: Mutex::new(upkeep),
            compute: Mutex::new(compute),
            device,
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
}

/// What was asked for and what came of it.
struct Settings<'a> {
    options: &'a EngineOptions,
    settled: &'a Settled,
    config: &'a StoreConfig,
    policy: PolicyKind,
    usage: Option<&'a UsageRecorder>,
    /// Bytes of pinned experts.
    pinned: u64,
}

impl Settings<'_> {
    fn resolved(
        &self,
        dir: &Path,
        checkpoint: &Checkpoint,
        store: &ExpertStore,
        kernels: Kernels,
    ) -> Resolved {
        Resolved {
            model: dir.to_owned(),
            container: checkpoint.kind().to_string(),
            ram: self.settled.budget.limit,
            cap: self.config.cap,
            cap_growth: on_off(grows(self.options)),
            policy: self.policy.name(),
            prefetch: on_off(prefetches(self.options)),
            pool: self.config.pool,
            loaders: self.config.loaders,
            direct: on_off(store.io_mode().direct),
            io: store.io_mode().carrier(),
            checksums: on_off(self.config.checksums),
            mlock: on_off(self.config.mlock),
            prefill_chunk: self.settled.prefill_chunk,
            context: self.settled.context,
            threads: self.settled.threads,
            isa: kernels.isa().to_string(),
            exact: exact(self.options),
            usage: self.usage.map_or("off".into(), |usage| {
                let way = if usage.writes() { "" } else { "read-only:" };
                format!("{way}{}", usage.path().display())
            }),
            pin_size: self.pinned,
            device: self.options.device.kind.name(),
            residency: self.options.device.residency.name(),
            slab_allocation: self.options.device.slabs.name(),
        }
    }
}

/// The options with the processor in place of an accelerator that computes nothing of this model, which is said.
fn on_a_device_that_can(options: &EngineOptions, plan: &Plan, telemetry: &Telemetry) -> EngineOptions {
    let (device, reason) = options.device.for_plan(plan);
    if let Some(reason) = reason {
        let asked = options.device.kind;
        telemetry.notice(&format!(
            "--device {asked} computes nothing of this model, the processor all of it: no device has {reason}"
        ));
    }
    EngineOptions { device, ..options.clone() }
}

/// The accelerator that takes the dense weights; none where it computes the experts alone, which is said.
fn accelerator_for<'a>(
    plan: &Plan,
    compute: &'a mut dyn ExpertCompute,
    options: &EngineOptions,
    telemetry: &Telemetry,
) -> Option<&'a mut dyn Accelerator> {
    let accelerator = compute.accelerator()?;
    match Model::why_not_accelerated(plan) {
        None => Some(accelerator),
        Some(reason) => {
            let device = options.device.kind;
            telemetry.notice(&format!(
                "--device {device} computes the experts, and the processor the rest: the device has no {reason}"
            ));
            None
        }
    }
}

/// Whether activations stay as they are: an accelerator takes them so.
fn exact(options: &EngineOptions) -> bool {
    options.exact || options.device.kind != DeviceKind::Cpu
}

/// Whether the cache may take more memory while running; a cap is a demand.
fn grows(options: &EngineOptions) -> bool {
    options.cap_growth.unwrap_or(options.cap.is_none())
}

fn prefetches(options: &EngineOptions) -> bool {
    options.prefetch.unwrap_or(true)
}

fn on_off(on: bool) -> String {
    if on { "on".to_owned() } else { "off".to_owned() }
}

fn store_config(
    options: &EngineOptions,
    settled: &Settled,
    (policy, pool): (PolicyKind, bool),
    pins: &Pins,
) -> StoreConfig {
    StoreConfig {
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
        checksums: options.checksums.unwrap_or(true),
        mlock: options.mlock.unwrap_or(false),
        ..StoreConfig::default()
    }
}

fn warn_of_loss(options: &EngineOptions, telemetry: &Telemetry) {
    if let Some(share) = options.expert_top_p.filter(|&share| share < 1.0) {
        telemetry.notice(&format!(
            "--expert-top-p {share} is lossy: the lightest experts of every token are left out"
        ));
    }
}

/// Says so where an accelerator takes activations that the processor would have quantised.
fn warn_of_device(options: &EngineOptions, telemetry: &Telemetry) {
    let text = match options.device.kind {
        DeviceKind::Cpu => return,
        DeviceKind::Sim if options.exact => return,
        DeviceKind::Sim => {
            "--device sim computes with f32 activations: ids are those of --exact on the processor".to_owned()
        }
        kind => format!(
            "--device {kind} computes with f32 activations and adds in an order of its own: ids are those of --exact on the processor, but where two tokens are as likely up to roundings"
        ),
    };
    telemetry.notice(&text);
}

/// Says so where the cache is smaller than what one token uses: there, recency alone finds nothing.
fn warn_of_cliff(model: &Model, store: &ExpertStore, options: &EngineOptions, telemetry: &Telemetry) {
    let token: usize = model.plan().layers.iter().filter_map(|l| l.moe()).map(|moe| moe.top_k).sum();
    let slots = store.cached_slots();
    if slots >= token {
        return;
    }
    let policy = options.policy.unwrap_or(DEFAULT_POLICY);
    let what = match (slots, policy.suits_pool()) {
        (0, _) => "each of them is read for each token".to_owned(),
        (_, true) => format!("{policy} keeps the likeliest ones, where recency alone would find nothing"),
        (_, false) => {
            format!(
                "{policy} goes by recency and will find next to nothing; --policy frecency will find more"
            )
        }
    };
    let remedy = if options.cap.is_some() { "A larger --cap" } else { "More --ram" };
    telemetry.notice(&format!(
        "the cache has room for {slots} experts and one token uses {token}: {what}. {remedy} helps most here"
    ));
}
