//! Metal kernels on the processor, for tests: feature `msl-cpu`.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use metaltail_mslcpu::run::{self, Buffer, RunError, Schedule};

use super::launch::{Argument, Launch, Launcher};
use crate::kernels::KernelError;
use crate::residency::{Ledger, Mode, ResidencyError, ResidencyStats, Span};
use crate::sim::{Profile, SimDriver};

type SharedLedger = Arc<Mutex<Ledger<SimDriver>>>;

fn held(ledger: &SharedLedger) -> MutexGuard<'_, Ledger<SimDriver>> {
    // Every call of the ledger leaves it in a state that is whole.
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

/// [`Launcher`] that runs the kernels on the processor and finds mistakes on the way.
pub struct CpuLauncher {
    schedule: Schedule,
    ledger: Option<SharedLedger>,
}

/// Memory that kernels reach.
pub struct CpuBuffer {
    buffer: Buffer,
    /// Where it is declared, once it is.
    ledger: OnceLock<SharedLedger>,
}

impl CpuBuffer {
    fn span(&self) -> Span {
        Span { base: self.buffer.address() as usize, len: self.buffer.len() }
    }

    /// Declares the buffer, if it is not yet, and lets kernels reach it from now on.
    fn declare(&self, ledger: &SharedLedger) -> Result<(), KernelError> {
        if !self.buffer.is_empty() {
            held(ledger).register(self.span()).map_err(refused)?;
            self.buffer.set_open(true).map_err(failed)?;
            self.ledger.get_or_init(|| Arc::clone(ledger));
        }
        Ok(())
    }
}

impl Drop for CpuBuffer {
    /// What is freed is declared no longer.
    fn drop(&mut self) {
        if let Some(ledger) = self.ledger.get() {
            let removed = held(ledger).unregister(self.span());
            debug_assert!(removed.is_ok(), "{removed:?}");
        }
    }
}

impl CpuLauncher {
    /// `order`: 0 runs threads and threadgroups forward, 1 backward, others shuffle with that seed. `threads` of the
    /// processor share the threadgroups.
    pub fn new(order: u32, threads: u32) -> CpuLauncher {
        CpuLauncher { schedule: Schedule { order, threads, ..Schedule::default() }, ledger: None }
    }

    /// Takes subnormal floats for zeros, as many GPUs do.
    pub fn flushing_subnormals(mut self) -> CpuLauncher {
        self.schedule.flush = true;
        self
    }

    /// Holds kernels to what is declared, through a residency ledger over the simulated device: memory that a launch
    /// neither names among its arguments nor has declared as reached is taken away while it runs.
    pub fn declaring(mut self, mode: Mode) -> CpuLauncher {
        let driver = SimDriver::new(Profile::m5max());
        self.ledger = Some(Arc::new(Mutex::new(Ledger::new(driver, mode))));
        self
    }

    /// The ledger's figures, where there is one.
    pub fn residency(&self) -> Option<ResidencyStats> {
        self.ledger.as_ref().map(|ledger| held(ledger).stats())
    }

    fn dispatch(&self, launch: &Launch<'_, CpuBuffer>) -> Result<(), KernelError> {
        let arguments: Vec<run::Argument<'_>> = launch
            .arguments
            .iter()
            .map(|argument| match argument {
                Argument::Buffer(index, buffer, offset) => {
                    run::Argument::Buffer(*index, &buffer.buffer, *offset)
                }
                Argument::Bytes(index, bytes) => run::Argument::Bytes(*index, bytes),
                Argument::Threadgroup(index, length) => run::Argument::Threadgroup(*index, *length),
            })
            .collect();
        let [x, y] = launch.groups;
        run::dispatch(&launch.kernel, &arguments, [x, y, 1], [launch.threads, 1, 1], self.schedule)
            .map_err(failed)?;
        Ok(())
    }
}

fn failed(error: RunError) -> KernelError {
    KernelError::Device { device: "metal-on-cpu", message: error.to_string() }
}

fn refused(error: ResidencyError) -> KernelError {
    KernelError::Device { device: "metal-on-cpu", message: error.to_string() }
}

/// Buffers among a launch's arguments.
fn bound<'a>(launch: &'a Launch<'_, CpuBuffer>) -> impl Iterator<Item = &'a CpuBuffer> {
    launch.arguments.iter().filter_map(|argument| match argument {
        Argument::Buffer(_, buffer, _) => Some(*buffer),
        Argument::Bytes(..) | Argument::Threadgroup(..) => None,
    })
}

impl Launcher for CpuLauncher {
    type Buffer = CpuBuffer;

    fn name(&self) -> &'static str {
        "metal-on-cpu"
    }

    fn buffer(&mut self, bytes: &[u8]) -> Result<CpuBuffer, KernelError> {
        let buffer = Buffer::of(bytes).map_err(failed)?;
        buffer.set_open(self.ledger.is_none()).map_err(failed)?;
        Ok(CpuBuffer { buffer, ledger: OnceLock::new() })
    }

    fn address(&self, buffer: &CpuBuffer) -> u64 {
        buffer.buffer.address()
    }

    fn host_address(&self, bytes: &[u8]) -> Option<u64> {
        // A process has one address space. What is declared of host memory is its owner's affair.
        Some(bytes.as_ptr() as u64)
    }

    fn read(&mut self, buffer: &CpuBuffer) -> Result<Vec<u8>, KernelError> {
        buffer.buffer.read().map_err(failed)
    }

    fn launch(&mut self, launch: &Launch<'_, CpuBuffer>, reached: &[&CpuBuffer]) -> Result<(), KernelError> {
        let Some(ledger) = &self.ledger else { return self.dispatch(launch) };
        reached.iter().try_for_each(|buffer| buffer.declare(ledger))?;
        let submission = {
            let mut ledger = held(ledger);
            let submission = ledger.submit().map_err(refused)?;
            let weights: Vec<Span> =
                reached.iter().map(|buffer| buffer.span()).filter(|span| span.len > 0).collect();
            let device = ledger.driver_mut();
            device.begin_submission();
            device.dispatch(&weights, &[], &[]).map_err(|error| refused(error.into()))?;
            submission
        };
        for buffer in bound(launch) {
            buffer.buffer.set_open(true).map_err(failed)?;
        }
        let outcome = self.dispatch(launch);
        for buffer in bound(launch).filter(|buffer| buffer.ledger.get().is_none()) {
            buffer.buffer.set_open(false).map_err(failed)?;
        }
        held(ledger).complete(submission).map_err(refused)?;
        outcome
    }
}
