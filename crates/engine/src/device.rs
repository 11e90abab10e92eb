//! What computes experts, and what it says of itself.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

#[cfg(feature = "msl-cpu")]
use metaltail_device::metal::{MetalAccelerator, cpu::CpuLauncher};
use metaltail_device::residency::{
    DeclaredArena, Difference, KeepAlive, KeepAliveError, KeepAliveTimes, Ledger, Mode, Residency,
    ResidencyDriver, ResidencyError, ResidencyStats, SlabAllocation, WeightSpans,
};
use metaltail_device::sim::{Profile, SimAccelerator, SimDriver};
use metaltail_kernels::{AcceleratorExperts, CpuExperts, ExpertCompute, Kernels, Numerics, Pool};
use metaltail_store::ExpertStore;

/// A device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// The processor.
    #[default]
    Cpu,
    /// A simulated accelerator: the processor's arithmetic in `f32`, an accelerator's rules for memory.
    Sim,
    /// The same with the arithmetic of the Metal kernels, which run on the processor.
    #[cfg(feature = "msl-cpu")]
    SimMetal,
}

impl DeviceKind {
    /// Name in flags and reports.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Sim => "sim",
            #[cfg(feature = "msl-cpu")]
            DeviceKind::SimMetal => "sim-metal",
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DeviceKind {
    type Err = String;

    fn from_str(name: &str) -> Result<DeviceKind, String> {
        let all = [DeviceKind::Cpu, DeviceKind::Sim];
        all.into_iter().find(|kind| kind.name() == name).ok_or_else(|| format!("no device is called {name}"))
    }
}

/// How a device is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Which one.
    pub kind: DeviceKind,
    /// How memory is declared to it.
    pub residency: Mode,
    /// What is one allocation to it.
    pub slabs: SlabAllocation,
    /// How often an accelerator's memory is asked for again between passes, and how long; none for never.
    pub keep_alive: Option<KeepAliveTimes>,
}

impl Default for DeviceOptions {
    fn default() -> DeviceOptions {
        DeviceOptions {
            kind: DeviceKind::Cpu,
            residency: Mode::Set,
            slabs: SlabAllocation::Arena,
            keep_alive: Some(KeepAliveTimes::default()),
        }
    }
}

/// Figures of an accelerator since the engine was opened, in its own time.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceFigures {
    /// The machine that it is, or is taken to be.
    pub machine: String,
    /// How memory is declared now.
    pub mode: Mode,
    /// Experts computed on it.
    pub experts: u64,
    /// From handing work over to its end.
    pub gpu_wall_seconds: f64,
    /// Of that, in kernels.
    pub kernel_seconds: f64,
    /// The rest.
    pub stall_seconds: f64,
    /// What else slowed down while memory was wired anew.
    pub coupled_seconds: f64,
    /// The ledger's figures.
    pub residency: ResidencyStats,
}

/// What an engine asks of an accelerator beside computing.
trait Known: Send + Sync {
    fn give_up(&self, bytes: u64) -> Result<(), ResidencyError>;
    fn difference(&self) -> Difference;
    fn figures(&self) -> DeviceFigures;
}

/// An accelerator with a ledger; `figures` reads what else it says of itself.
struct Accelerated<D: ResidencyDriver, F> {
    arena: Arc<DeclaredArena<D>>,
    weights: WeightSpans,
    figures: F,
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
    /// Memory that cannot be kept resident as the options say.
    pub(crate) fn open(
        options: &DeviceOptions,
        processor: Processor,
        store: &ExpertStore,
    ) -> Result<(Device, Box<dyn ExpertCompute>), KeepAliveError> {
        let Processor { kernels, pool, numerics } = processor;
        match options.kind {
            DeviceKind::Cpu => {
                let cpu = CpuExperts::new(pool, kernels, numerics);
                Ok((Device { _keep_alive: None, known: None }, Box::new(cpu)))
            }
            DeviceKind::Sim => {
                let arena = declared(options, SimDriver::new(Profile::m5max()), store);
                let accelerator = SimAccelerator::new(Arc::clone(&arena), kernels, &pool);
                let weights = accelerator.weight_spans();
                let known = Accelerated { arena: Arc::clone(&arena), weights, figures: sim_figures };
                let compute = Box::new(AcceleratorExperts::new(accelerator));
                Ok((Device::keeping(options, &arena, known)?, compute))
            }
            #[cfg(feature = "msl-cpu")]
            DeviceKind::SimMetal => {
                let arena = declared(options, SimDriver::new(Profile::m5max()), store);
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
    fn keeping<D: ResidencyDriver + 'static>(
        options: &DeviceOptions,
        arena: &DeclaredArena<D>,
        known: impl Known + 'static,
    ) -> Result<Device, KeepAliveError> {
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
        coupled_seconds: times.coupled.as_secs_f64(),
        residency: ledger.stats(),
    }
}
