//! Experts on the simulated device.

use std::fmt;
use std::sync::Arc;

use metaltail_kernels::{Completion, ComputeError, ExpertCompute, ExpertTask};
use metaltail_quant::MatrixRef;

use super::driver::SimDriver;
use crate::residency::{DeclaredArena, Residency, ResidencyError, Span, Submission};

/// Where activations and results lie, as far as barriers go: behind all memory that there is.
const SCRATCH: usize = 1 << 62;

/// [`ExpertCompute`] on a simulated device: arithmetic by another one, which is done when its `submit` returns (the
/// processor's in `f32`, or Metal kernels on the processor), memory by the device's rules.
pub struct SimExperts {
    inner: Box<dyn ExpertCompute>,
    arena: Arc<DeclaredArena<SimDriver>>,
    hidden: usize,
    in_flight: Vec<Submission>,
}

impl fmt::Debug for SimExperts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimExperts").field("arena", &self.arena).finish_non_exhaustive()
    }
}

impl SimExperts {
    /// Experts of `arena`, computed by `inner`, on the device to which it is declared.
    pub fn new(inner: Box<dyn ExpertCompute>, arena: Arc<DeclaredArena<SimDriver>>) -> SimExperts {
        SimExperts { inner, arena, hidden: 0, in_flight: Vec::new() }
    }

    fn residency(&self) -> &Residency<SimDriver> {
        self.arena.residency()
    }

    fn failed(&self, error: &dyn fmt::Display) -> ComputeError {
        ComputeError::Device { device: self.name(), message: error.to_string() }
    }

    /// Hands the tasks over as a real device's encoder would: gate and up, a barrier, down.
    fn encode(&mut self, tasks: &[ExpertTask<'_>]) -> Result<Submission, ResidencyError> {
        self.arena.declare_new()?;
        let mut ledger = self.residency().ledger();
        let submission = ledger.submit()?;
        let device = ledger.driver_mut();
        device.begin_submission();
        let encoded = dispatch(device, tasks, self.hidden);
        if let Err(error) = encoded {
            ledger.complete(submission)?;
            return Err(error);
        }
        Ok(submission)
    }

    fn complete_all(&mut self) -> Result<(), ComputeError> {
        for submission in std::mem::take(&mut self.in_flight) {
            self.residency().complete(submission).map_err(|error| self.failed(&error))?;
        }
        Ok(())
    }
}

fn dispatch(device: &mut SimDriver, tasks: &[ExpertTask<'_>], hidden: usize) -> Result<(), ResidencyError> {
    let span = |bytes: &[u8]| Span { base: bytes.as_ptr() as usize, len: bytes.len() };
    let matrix = |m: MatrixRef<'_>| {
        [m.weights(), m.scales()].into_iter().filter(|bytes| !bytes.is_empty()).map(span).collect::<Vec<_>>()
    };
    let activations = Span { base: SCRATCH, len: hidden * 4 };
    let inner = |task: usize| Span { base: SCRATCH + ((2 * task + 1) << 32), len: 1 << 20 };
    let outer = |task: usize| Span { base: SCRATCH + ((2 * task + 2) << 32), len: 1 << 20 };
    for (number, task) in tasks.iter().enumerate() {
        let weights = [matrix(task.weights.gate), matrix(task.weights.up)].concat();
        device.dispatch(&weights, &[activations], &[inner(number)])?;
    }
    device.barrier();
    for (number, task) in tasks.iter().enumerate() {
        device.dispatch(&matrix(task.weights.down), &[inner(number)], &[outer(number)])?;
    }
    Ok(())
}

impl ExpertCompute for SimExperts {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn begin(&mut self, x: &[f32], hidden: usize, outputs: usize) -> Result<(), ComputeError> {
        self.complete_all()?;
        self.hidden = hidden;
        self.inner.begin(x, hidden, outputs)
    }

    fn submit(&mut self, tasks: &[ExpertTask<'_>]) -> Result<Completion, ComputeError> {
        if tasks.is_empty() {
            return Ok(Completion::Done);
        }
        let submission = self.encode(tasks).map_err(|error| self.failed(&error))?;
        self.in_flight.push(submission);
        self.inner.submit(tasks)?;
        self.residency().ledger().driver_mut().computed(tasks.len());
        Ok(Completion::InFlight)
    }

    fn drain(&mut self) -> Result<(), ComputeError> {
        self.complete_all()
    }

    fn finish(&mut self) -> Result<&[f32], ComputeError> {
        self.complete_all()?;
        self.inner.finish()
    }
}

impl Drop for SimExperts {
    /// The arena's memory is about to go: the device forgets it first.
    fn drop(&mut self) {
        let _ = self.complete_all();
        // Where it cannot, whoever drops the arena keeps the memory.
        let _ = self.arena.forget();
    }
}
