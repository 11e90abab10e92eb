//! What computes, and what it says of itself.

mod limits;
#[cfg(target_os = "macos")]
mod metal;
mod open;

use std::fmt;
use std::str::FromStr;

use metaltail_device::residency::{KeepAliveTimes, Mode, ResidencyStats, SlabAllocation};
use metaltail_device::sim::Profile;
use metaltail_model::{Model, Plan};

pub use limits::{AcceleratorFacts, accelerator_facts};
pub(crate) use open::{Device, Processor};

/// A device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// The processor.
    #[default]
    Cpu,
    /// A simulated accelerator: the processor's arithmetic in `f32`, an accelerator's rules for memory.
    Sim,
    /// The GPU of a Mac.
    Metal,
    /// The simulated one with the arithmetic of the Metal kernels, which run on the processor.
    #[cfg(feature = "msl-cpu")]
    SimMetal,
}

impl DeviceKind {
    /// Name in flags and reports.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Sim => "sim",
            DeviceKind::Metal => "metal",
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
        let all = [DeviceKind::Cpu, DeviceKind::Sim, DeviceKind::Metal];
        all.into_iter().find(|kind| kind.name() == name).ok_or_else(|| format!("no device is called {name}"))
    }
}

/// How a device is set.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceOptions {
    /// Which one.
    pub kind: DeviceKind,
    /// How memory is declared to it.
    pub residency: Mode,
    /// What is one allocation to it.
    pub slabs: SlabAllocation,
    /// How often an accelerator's memory is asked for again between passes, and how long; none for never.
    pub keep_alive: Option<KeepAliveTimes>,
    /// The machine that the simulated accelerator is; none for an M5 Max as others measured it.
    pub profile: Option<Profile>,
}

impl DeviceOptions {
    /// The options for a model: the processor, and why, where no accelerator computes any of it.
    pub fn for_plan(&self, plan: &Plan) -> (DeviceOptions, Option<&'static str>) {
        match Model::experts_need_the_processor(plan) {
            Some(reason) if self.kind != DeviceKind::Cpu => {
                (DeviceOptions { kind: DeviceKind::Cpu, ..self.clone() }, Some(reason))
            }
            _ => (self.clone(), None),
        }
    }

    /// The machine that a simulated accelerator is.
    pub(crate) fn machine(&self) -> Profile {
        self.profile.clone().unwrap_or_else(Profile::m5max)
    }
}

impl Default for DeviceOptions {
    fn default() -> DeviceOptions {
        DeviceOptions {
            kind: DeviceKind::Cpu,
            residency: Mode::Set,
            slabs: SlabAllocation::Arena,
            keep_alive: Some(KeepAliveTimes::default()),
            profile: None,
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
    /// Encoding submissions, on the processor; none where nothing is encoded.
    pub encode_seconds: Option<f64>,
    /// The system's scheduling of submissions; none where it does not tell.
    pub schedule_seconds: Option<f64>,
    /// What else slowed down while memory was wired anew.
    pub coupled_seconds: f64,
    /// The ledger's figures.
    pub residency: ResidencyStats,
}
