//! What a model asks of a device that holds its dense weights and computes whole layers.
//!
//! An [`Accelerator`] has memory of its own, named by handles, and records operations on it. Nothing runs before
//! [`Accelerator::submit`]; operations see the writes of all earlier ones. The host reads and writes memory only
//! while no operation uses it, so a layer costs as many round trips as it needs answers: one, where its experts are
//! chosen.

mod experts;
mod op;

use metaltail_quant::{MatrixLayout, MatrixRef};

use crate::Activation;
use crate::experts::{ComputeError, ExpertTask, check_shapes};

pub use experts::AcceleratorExperts;
pub use op::{Attend, Combine, Extent, Footprint, Lists, Op, Order, Rope, Route, Rows, Select, View};

/// The most bytes that a device takes for what lies within an attention, unless one row needs more: what budgets charge.
pub const MOST_INTERMEDIATE: usize = 16 << 20;

/// Memory of a device: numbers of four bytes, floats or unsigned integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Buffer(pub u32);

/// A matrix that a device holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldMatrix {
    /// The device's number of it.
    pub id: u32,
    /// Its shape and format.
    pub layout: MatrixLayout,
}

/// The experts of one layer of one step, on activations that lie on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertRows {
    /// Activations: `inputs` rows of `hidden`.
    pub x: View,
    /// Rows of activations.
    pub inputs: usize,
    /// Width of a row.
    pub hidden: usize,
    /// Results: `outputs` rows of `hidden`. Rows that no pair names are left as they are.
    pub out: View,
    /// Rows of results.
    pub outputs: usize,
}

/// A device with memory of its own.
///
/// Implementations give a row the same bits whatever other rows are computed with it; see `docs/design/accelerator.md`.
pub trait Accelerator: Send {
    /// Name for messages and reports.
    fn name(&self) -> &'static str;

    /// Says what is about to be held, matrix by matrix, so that there is memory of that size for all of it.
    fn announce(&mut self, matrices: &[MatrixLayout]);

    /// Takes a copy of a matrix, for as long as the device lives. The memory is declared once.
    ///
    /// # Errors
    /// A format that the device has no kernel for; no memory, or more than may be resident.
    fn hold(&mut self, matrix: MatrixRef<'_>) -> Result<HeldMatrix, ComputeError>;

    /// Memory for `numbers` numbers, all zero.
    ///
    /// # Errors
    /// No memory.
    fn buffer(&mut self, numbers: usize) -> Result<Buffer, ComputeError>;

    /// Gives memory up. It is freed when no operation uses it any more.
    fn release(&mut self, buffer: Buffer);

    /// Copies floats into memory.
    ///
    /// # Errors
    /// Memory that is smaller, or in use by an operation that was recorded and has not ended.
    fn write(&mut self, to: View, numbers: &[f32]) -> Result<(), ComputeError>;

    /// Copies floats from memory.
    ///
    /// # Errors
    /// As [`Accelerator::write`].
    fn read(&mut self, from: View, numbers: &mut [f32]) -> Result<(), ComputeError>;

    /// Copies unsigned integers from memory, such as the experts that [`Op::Route`] chose.
    ///
    /// # Errors
    /// As [`Accelerator::write`].
    fn read_ids(&mut self, from: View, ids: &mut [u32]) -> Result<(), ComputeError>;

    /// Records an operation behind all earlier ones.
    ///
    /// # Errors
    /// One that leaves its memory ([`Op::check`]) or that the device cannot do; nothing is recorded then.
    fn record(&mut self, op: &Op) -> Result<(), ComputeError>;

    /// Records down(silu(gate x) · up x) of some experts behind all earlier operations. Their bytes are kept alive
    /// and as they are by the caller until [`Accelerator::wait`].
    ///
    /// # Errors
    /// Tasks that do not fit ([`ExpertRows::check`]), memory that the device does not reach.
    fn experts(&mut self, rows: &ExpertRows, tasks: &[ExpertTask<'_>]) -> Result<(), ComputeError>;

    /// Hands what was recorded over to the device, which begins with it.
    ///
    /// # Errors
    /// What the device refuses.
    fn submit(&mut self) -> Result<(), ComputeError>;

    /// Hands over what was recorded and waits until all of it has ended. The wait is passive.
    ///
    /// # Errors
    /// What failed on the device. Nothing is in use afterwards, whatever happened.
    fn wait(&mut self) -> Result<(), ComputeError>;
}

/// Refuses what no accelerator computes: an engine leaves such a model to the processor.
fn refuse_processor_only(number: usize, task: &ExpertTask<'_>) -> Result<(), ComputeError> {
    let what = match (&task.biases, task.activation) {
        (None, Activation::SwiGlu) => return Ok(()),
        (Some(_), _) => "biases",
        (None, Activation::ClampedSwiGlu { .. }) => "a clamped activation",
    };
    Err(ComputeError::ProcessorOnly { what, task: number })
}

impl ExpertRows {
    /// Checks tasks: shapes, the usual activation without biases, rows that there are, results that no two pairs share.
    ///
    /// # Errors
    /// The first that does not fit.
    pub fn check(&self, tasks: &[ExpertTask<'_>]) -> Result<(), ComputeError> {
        let mut taken = vec![false; self.outputs];
        for (number, task) in tasks.iter().enumerate() {
            check_shapes(number, &task.weights, self.hidden, task.weights.gate.layout().rows())?;
            refuse_processor_only(number, task)?;
            for &(input, output) in task.pairs {
                let row = |what, row, rows| ComputeError::Row { what, task: number, row, rows };
                if input as usize >= self.inputs {
                    return Err(row("input", input, self.inputs));
                }
                match taken.get_mut(output as usize) {
                    None => return Err(row("output", output, self.outputs)),
                    Some(true) => return Err(ComputeError::OutputTwice { task: number, row: output }),
                    Some(taken) => *taken = true,
                }
            }
        }
        Ok(())
    }

    /// What it reads and writes beside the experts.
    ///
    /// # Errors
    /// Sizes that no memory has.
    pub fn footprint(&self) -> Result<Footprint, ComputeError> {
        let rows = |view: View, rows| Rows { view, stride: self.hidden }.extent(rows, self.hidden);
        let (reads, changes) = (vec![rows(self.x, self.inputs)?], vec![rows(self.out, self.outputs)?]);
        Ok(Footprint { reads, changes, ..Footprint::default() })
    }
}
