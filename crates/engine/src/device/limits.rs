//! What an accelerator may hold, asked before anything is loaded.

use metaltail_store::DeviceLimit;

use super::{DeviceKind, DeviceOptions};
use crate::error::EngineError;

/// What an accelerator says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceleratorFacts {
    /// Name of its kind, as `--device` has it.
    pub device: &'static str,
    /// The machine that it is, or is taken to be.
    pub machine: String,
    /// Bytes that it keeps resident at most.
    pub working_set: u64,
    /// The system setting that raises them, where there is one.
    pub setting: Option<&'static str>,
    /// The largest allocation in bytes.
    pub allocation: u64,
    /// Residency sets that a queue takes; zero where memory is declared with each submission.
    pub sets: usize,
    /// What else is known of it, for people.
    pub lines: Vec<String>,
}

impl AcceleratorFacts {
    /// What a budget is held to.
    pub(crate) fn limit(&self) -> DeviceLimit {
        DeviceLimit { device: self.device, bytes: self.working_set, setting: self.setting }
    }
}

/// Asks the accelerator that the options name; none for the processor.
///
/// # Errors
/// One that this system does not have, or that cannot be used, with the reason.
pub fn accelerator_facts(options: &DeviceOptions) -> Result<Option<AcceleratorFacts>, EngineError> {
    match options.kind {
        DeviceKind::Cpu => Ok(None),
        DeviceKind::Metal => metal().map(Some),
        kind => {
            let machine = options.machine();
            Ok(Some(AcceleratorFacts {
                device: kind.name(),
                working_set: machine.working_set,
                setting: machine.working_set_setting.is_some().then_some("iogpu.wired_limit_mb"),
                allocation: machine.allocation,
                sets: machine.sets,
                lines: vec!["simulated: its numbers are no evidence about hardware".to_owned()],
                machine: machine.name,
            }))
        }
    }
}

#[cfg(target_os = "macos")]
fn metal() -> Result<AcceleratorFacts, EngineError> {
    super::metal::facts()
}

#[cfg(not(target_os = "macos"))]
fn metal() -> Result<AcceleratorFacts, EngineError> {
    Err(no_metal())
}

/// Why there is no GPU of a Mac here.
#[cfg(not(target_os = "macos"))]
pub(super) fn no_metal() -> EngineError {
    EngineError::NoDevice {
        device: DeviceKind::Metal.name(),
        reason: "Metal is a part of macOS, and this program was built for another system".to_owned(),
    }
}
