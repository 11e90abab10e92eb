//! From options to a device.

use std::sync::Arc;

#[cfg(feature = "msl-cpu")]
use metaltail_device::metal::{MetalAccelerator, cpu::CpuLauncher};
use metaltail_device::residency::{
    DeclaredArena, Difference, KeepAlive, Ledger, Mode, Residency, ResidencyDriver, ResidencyError,
    WeightSpans,
};
use metaltail_device::sim::{SimAccelerator, SimDriver};
use metaltail_kernels::{AcceleratorExperts, CpuExperts, ExpertCompute, Kernels, Numerics, Pool};
use metaltail_store::ExpertStore;

#[cfg(target_os = "macos")]
use super::metal::open as open_metal;
use super::{DeviceFigures, DeviceKind, DeviceOptions};
use crate::error::EngineError;

/// What an engine asks of an accelerator beside computing.
pub(super) trait Known: Send + Sync {
    fn give_up(&self, bytes: u64) -> Result<(), ResidencyError>;
    fn difference(&self) -> Difference;
    fn figures(&self) -> DeviceFigures;
}

/// An accelerator with a ledger; `figures` reads what else it says of itself.
pub(super) struct Accelerated<D: ResidencyDriver, F> {
    pub(super) arena: Arc<DeclaredArena<D>>,
    pub(super) weights: WeightSpans,
    pub(super) figures: F,
}

impl<D, F> Known for Accelerated<D, F>
where
    D: ResidencyDriver + 'static,
    F: Fn(&Ledger<D>) -> DeviceFigures + Send + Sync,
{
    fn give_up(&self, bytes: u64) -> Result<(), ResidencyError> {
        self.arena.residency().ledger().give_up(bytes).map(drop)
    }

    fn difference(&self) -> Difference {
        self.arena.difference(&self.weights.all())
    }

    fn figures(&self) -> DeviceFigures {
        (self.figures)(&self.arena.residency().ledger())
    }
}

/// The processor as an engine has it.
pub(crate) struct Processor {
    pub(crate) kernels: Kernels,
    pub(crate) pool: Arc<Pool>,
    pub(crate) numerics: Numerics,
}

/// The device of an engine.
pub(crate) struct Device {
    /// Ends first: it uses the device.
    _keep_alive: Option<KeepAlive>,
    known: Option<Box<dyn Known>>,
}

impl Device {
    /// Opens a device for experts of `store`; `processor` computes where it has no arithmetic of its own. What an
    /// accelerator knows of the store's memory leaves it before it goes.
    ///
    /// # Errors
    /// A device that there is not, or that cannot be used; memory that cannot be kept resident as the options say.
    pub(crate) fn open(
        options: &DeviceOptions,
        processor: Processor,
        store: &ExpertStore,
    ) -> Result<(Device, Box<dyn ExpertCompute>), EngineError> {
        let Processor { kernels, pool, numerics } = processor;
        match options.kind {
            DeviceKind::Cpu => {
                let cpu = CpuExperts::new(pool, kernels, numerics);
                Ok((Device { _keep_alive: None, known: None }, Box::new(cpu)))
            }
            DeviceKind::Sim => {
                let arena = declared(options, SimDriver::new(options.machine()), store);
                let accelerator = SimAccelerator::new(Arc::clone(&arena), kernels, &pool);
                let weights = accelerator.weight_spans();
                let known = Accelerated { arena: Arc::clone(&arena), weights, figures: sim_figures };
                let compute = Box::new(AcceleratorExperts::new(accelerator));
                Ok((Device::keeping(options, &arena, known)?, compute))
            }
            DeviceKind::Metal => open_metal(options, store),
            #[cfg(feature = "msl-cpu")]
            DeviceKind::SimMetal => {
                let arena = declared(options, SimDriver::new(options.machine()), store);
                let launcher = CpuLauncher::new(0, 1).declared_to(Arc::clone(arena.residency()));
                let accelerator = MetalAccelerator::new(launcher).with_arena(Arc::clone(&arena));
                let (weights, counts) = (accelerator.weights().spans(), accelerator.counts());
                let figures = move |ledger: &Ledger<SimDriver>| DeviceFigures {
                    experts: counts.get().experts,
                    ..sim_figures(ledger)
                };
                let known = Accelerated { arena: Arc::clone(&arena), weights, figures };
                let experts = AcceleratorExperts::new(accelerator);
                Ok((Device::keeping(options, &arena, known)?, Box::new(experts)))
            }
        }
    }

    /// An accelerator whose memory is kept resident as the options say.
    pub(super) fn keeping<D: ResidencyDriver + 'static>(
        options: &DeviceOptions,
        arena: &DeclaredArena<D>,
        known: impl Known + 'static,
    ) -> Result<Device, EngineError> {
        // Nothing is to be kept where nothing stays declared.
        let times = options.keep_alive.filter(|_| options.residency == Mode::Set);
        let keep_alive = times.map(|times| KeepAlive::start(arena.residency(), times)).transpose()?;
        Ok(Device { _keep_alive: keep_alive, known: Some(Box::new(known)) })
    }

    /// Lets the least used memory be taken by others, at least so many bytes of it; the next submission asks
    /// for it again.
    pub(crate) fn give_up(&self, bytes: u64) -> Result<(), ResidencyError> {
        self.known.as_ref().map_or(Ok(()), |known| known.give_up(bytes))
    }

    /// What is declared otherwise than it should be; see [`DeclaredArena::difference`].
    pub(crate) fn difference(&self) -> Option<Difference> {
        self.known.as_ref().map(|known| known.difference())
    }

    /// Its figures; none of the processor, which has nothing to declare.
    pub(crate) fn figures(&self) -> Option<DeviceFigures> {
        self.known.as_ref().map(|known| known.figures())
    }
}

#[cfg(not(target_os = "macos"))]
fn open_metal(
    _options: &DeviceOptions,
    _store: &ExpertStore,
) -> Result<(Device, Box<dyn ExpertCompute>), EngineError> {
    Err(super::limits::no_metal())
}

/// The memory of a store, to be declared to a driver.
fn declared<D: ResidencyDriver + 'static>(
    options: &DeviceOptions,
    driver: D,
    store: &ExpertStore,
) -> Arc<DeclaredArena<D>> {
    let residency = Arc::new(Residency::new(Ledger::new(driver, options.residency)));
    let arena = Arc::new(DeclaredArena::new(store.arena(), options.slabs, residency));
    store.set_chunk_listener(Arc::clone(&arena) as _);
    arena
}

fn sim_figures(ledger: &Ledger<SimDriver>) -> DeviceFigures {
    let (driver, times) = (ledger.driver(), ledger.driver().times());
    DeviceFigures {
        machine: driver.profile().name.clone(),
        mode: ledger.mode(),
        experts: driver.experts(),
        gpu_wall_seconds: (times.kernel + times.stall).as_secs_f64(),
        kernel_seconds: times.kernel.as_secs_f64(),
        stall_seconds: times.stall.as_secs_f64(),
        encode_seconds: None,
        schedule_seconds: None,
        coupled_seconds: times.coupled.as_secs_f64(),
        residency: ledger.stats(),
    }
}
