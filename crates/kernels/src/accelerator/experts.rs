//! Experts alone on an accelerator: what it does for a model whose dense weights stay with the processor.

use super::{Accelerator, Buffer, ExpertRows};
use crate::experts::{Completion, ComputeError, ExpertCompute, ExpertTask};

/// A buffer that grows.
#[derive(Clone, Copy, Debug)]
struct Room {
    buffer: Buffer,
    numbers: usize,
}

/// [`ExpertCompute`] on an accelerator: activations go there once a pass, results come back once. Several submits of
/// a pass may be in flight, the experts that were cached before those that had to be loaded.
#[derive(Debug)]
pub struct AcceleratorExperts<A> {
    accelerator: A,
    x: Option<Room>,
    out: Option<Room>,
    zeros: Vec<f32>,
    results: Vec<f32>,
    inputs: usize,
    hidden: usize,
    outputs: usize,
    taken: Vec<bool>,
}

/// A buffer of at least so many numbers in place of `room`.
fn enough<A: Accelerator>(
    accelerator: &mut A,
    room: &mut Option<Room>,
    numbers: usize,
) -> Result<Buffer, ComputeError> {
    match *room {
        Some(room) if room.numbers >= numbers => Ok(room.buffer),
        _ => {
            let buffer = accelerator.buffer(numbers.max(1))?;
            if let Some(old) = room.replace(Room { buffer, numbers: numbers.max(1) }) {
                accelerator.release(old.buffer);
            }
            Ok(buffer)
        }
    }
}

impl<A: Accelerator> AcceleratorExperts<A> {
    /// Experts on `accelerator`.
    pub fn new(accelerator: A) -> AcceleratorExperts<A> {
        AcceleratorExperts {
            accelerator,
            x: None,
            out: None,
            zeros: Vec::new(),
            results: Vec::new(),
            inputs: 0,
            hidden: 1,
            outputs: 0,
            taken: Vec::new(),
        }
    }

    fn rows(&self) -> Option<ExpertRows> {
        Some(ExpertRows {
            x: self.x?.buffer.view(),
            inputs: self.inputs,
            hidden: self.hidden,
            out: self.out?.buffer.view(),
            outputs: self.outputs,
        })
    }
}

impl<A: Accelerator> ExpertCompute for AcceleratorExperts<A> {
    fn name(&self) -> &'static str {
        self.accelerator.name()
    }

    fn accelerator(&mut self) -> Option<&mut dyn Accelerator> {
        Some(&mut self.accelerator)
    }

    fn begin(&mut self, x: &[f32], hidden: usize, outputs: usize) -> Result<(), ComputeError> {
        if hidden == 0 || !x.len().is_multiple_of(hidden) {
            return Err(ComputeError::Activations { numbers: x.len(), hidden });
        }
        let numbers =
            outputs.checked_mul(hidden).ok_or(ComputeError::TooLarge { rows: outputs, width: hidden })?;
        self.accelerator.wait()?;
        let input = enough(&mut self.accelerator, &mut self.x, x.len())?;
        let out = enough(&mut self.accelerator, &mut self.out, numbers)?;
        self.accelerator.write(input.view(), x)?;
        // Rows that no expert names are zeros.
        self.zeros.resize(numbers.max(self.zeros.len()), 0.0);
        self.accelerator.write(out.view(), &self.zeros[..numbers])?;
        (self.inputs, self.hidden, self.outputs) = (x.len() / hidden, hidden, outputs);
        self.results.resize(numbers, 0.0);
        self.taken.clear();
        self.taken.resize(outputs, false);
        Ok(())
    }

    fn submit(&mut self, tasks: &[ExpertTask<'_>]) -> Result<Completion, ComputeError> {
        let Some(rows) = self.rows().filter(|_| !tasks.is_empty()) else { return Ok(Completion::Done) };
        rows.check(tasks)?;
        for (number, task) in tasks.iter().enumerate() {
            if let Some(&(_, row)) = task.pairs.iter().find(|pair| self.taken[pair.1 as usize]) {
                return Err(ComputeError::OutputTwice { task: number, row });
            }
        }
        self.accelerator.experts(&rows, tasks)?;
        let pairs = tasks.iter().flat_map(|task| task.pairs);
        pairs.for_each(|pair| self.taken[pair.1 as usize] = true);
        self.accelerator.submit()?;
        Ok(Completion::InFlight)
    }

    fn drain(&mut self) -> Result<(), ComputeError> {
        self.accelerator.wait()
    }

    fn finish(&mut self) -> Result<&[f32], ComputeError> {
        self.accelerator.wait()?;
        if let Some(out) = self.out {
            self.accelerator.read(out.buffer.view(), &mut self.results)?;
        }
        Ok(&self.results)
    }
}
