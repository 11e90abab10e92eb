//! What computes experts, and what it says of itself.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

#[cfg(feature = "msl-cpu")]
use metaltail_device::metal::{MetalAccelerator, cpu::CpuLauncher};
use metaltail_device::residency::{
    KeepAlive, KeepAliveError, KeepAliveTimes, Ledger, Mode, Residency, ResidencyError, ResidencyStats,
};
use metaltail_device::sim::{Profile, SimDriver, SimExperts, SlabAllocation};
#[cfg(feature = "msl-cpu")]
use metaltail_kernels::{AcceleratorExperts, Completion, ComputeError, ExpertTask};
use metaltail_kernels::{CpuExperts, ExpertCompute};
use metaltail_store::ArenaView;

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

/// Experts that are done when they were submitted, as the simulated device takes its arithmetic.
#[cfg(feature = "msl-cpu")]
struct AtOnce<E>(E);

#[cfg(feature = "msl-cpu")]
impl<E: ExpertCompute> ExpertCompute for AtOnce<E> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn begin(&mut self, x: &[f32], hidden: usize, outputs: usize) -> Result<(), ComputeError> {
        self.0.begin(x, hidden, outputs)
    }

    fn submit(&mut self, tasks: &[ExpertTask<'_>]) -> Result<Completion, ComputeError> {
        self.0.submit(tasks)?;
        self.0.drain()?;
        Ok(Completion::Done)
    }

    fn finish(&mut self) -> Result<&[f32], ComputeError> {
        self.0.finish()
    }
}

/// The device of an engine.
pub(crate) struct Device {
    /// Ends first: it uses the device.
    _keep_alive: Option<KeepAlive>,
    sim: Option<Arc<Residency<SimDriver>>>,
}

impl Device {
    /// Opens a device for experts in `arena`, whose arithmetic `cpu` does where it has none of its own.
    ///
    /// # Errors
    /// Memory that cannot be kept resident as the options say.
    pub(crate) fn open(
        options: &DeviceOptions,
        cpu: CpuExperts,
        arena: ArenaView,
    ) -> Result<(Device, Box<dyn ExpertCompute>), KeepAliveError> {
        match options.kind {
            DeviceKind::Cpu => Ok((Device { _keep_alive: None, sim: None }, Box::new(cpu))),
            DeviceKind::Sim => Device::sim(options, Box::new(cpu), arena),
            #[cfg(feature = "msl-cpu")]
            DeviceKind::SimMetal => {
                let kernels = MetalAccelerator::new(CpuLauncher::new(0, 1));
                Device::sim(options, Box::new(AtOnce(AcceleratorExperts::new(kernels))), arena)
            }
        }
    }

    fn sim(
        options: &DeviceOptions,
        arithmetic: Box<dyn ExpertCompute>,
        arena: ArenaView,
    ) -> Result<(Device, Box<dyn ExpertCompute>), KeepAliveError> {
        let ledger = Ledger::new(SimDriver::new(Profile::m5max()), options.residency);
        let residency = Arc::new(Residency::new(ledger));
        let experts = SimExperts::new(arithmetic, arena, options.slabs, Arc::clone(&residency));
        // Nothing is to be kept where nothing stays declared.
        let times = options.keep_alive.filter(|_| options.residency == Mode::Set);
        let keep_alive = times.map(|times| KeepAlive::start(&residency, times)).transpose()?;
        Ok((Device { _keep_alive: keep_alive, sim: Some(residency) }, Box::new(experts)))
    }

    /// Lets the least used memory be taken by others, at least so many bytes of it; the next submission asks
    /// for it again.
    pub(crate) fn give_up(&self, bytes: u64) -> Result<(), ResidencyError> {
        match &self.sim {
            Some(residency) => residency.ledger().give_up(bytes).map(drop),
            None => Ok(()),
        }
    }

    /// Its figures; none of the processor, which has nothing to declare.
    pub(crate) fn figures(&self) -> Option<DeviceFigures> {
        let ledger = self.sim.as_ref()?.ledger();
        let (driver, times) = (ledger.driver(), ledger.driver().times());
        Some(DeviceFigures {
            machine: driver.profile().name.clone(),
            mode: ledger.mode(),
            experts: driver.experts(),
            gpu_wall_seconds: (times.kernel + times.stall).as_secs_f64(),
            kernel_seconds: times.kernel.as_secs_f64(),
            stall_seconds: times.stall.as_secs_f64(),
            coupled_seconds: times.coupled.as_secs_f64(),
            residency: ledger.stats(),
        })
    }
}
