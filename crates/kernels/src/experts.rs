//! Expert blocks: down(join(gate x, up x)) for the experts of one layer of one step, with biases where there are any.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use metaltail_quant::{MatrixRef, QuantizedRows};
use thiserror::Error;

use crate::accelerator::Accelerator;
use crate::job::{FloatRows, Job, OutGrid, RowMap, rows_per_task};
use crate::{Activation, Kernels, Pool};

/// The three matrices of one expert: gate and up are inner × hidden, down is hidden × inner.
#[derive(Clone, Copy, Debug)]
pub struct ExpertWeights<'a> {
    /// Gate projection.
    pub gate: MatrixRef<'a>,
    /// Up projection.
    pub up: MatrixRef<'a>,
    /// Down projection.
    pub down: MatrixRef<'a>,
}

/// What one expert adds to its three products: a number for each row of the matrix.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBiases<'a> {
    /// Of the gate projection: inner numbers.
    pub gate: &'a [f32],
    /// Of the up projection: inner numbers.
    pub up: &'a [f32],
    /// Of the down projection: hidden numbers.
    pub down: &'a [f32],
}

/// One expert and the rows of the step that chose it.
#[derive(Clone, Copy, Debug)]
pub struct ExpertTask<'a> {
    /// The expert.
    pub weights: ExpertWeights<'a>,
    /// What is added to its products; resident, no part of what the store reads.
    pub biases: Option<ExpertBiases<'a>>,
    /// How gate and up products are joined.
    pub activation: Activation,
    /// (row of the activations, row of the outputs).
    pub pairs: &'a [(u32, u32)],
}

impl<'a> ExpertTask<'a> {
    /// An expert of most models: silu(gate x) · up x between its products, and no biases.
    pub fn new(weights: ExpertWeights<'a>, pairs: &'a [(u32, u32)]) -> ExpertTask<'a> {
        ExpertTask { weights, biases: None, activation: Activation::SwiGlu, pairs }
    }
}

/// Whether the weights of a submit are still in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// They are not.
    Done,
    /// The caller keeps their bytes alive and unchanged until [`ExpertCompute::finish`].
    InFlight,
}

/// Why a device could not compute experts.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ComputeError {
    /// The activations are not whole rows.
    #[error("{numbers} activations are no whole rows of {hidden}")]
    Activations {
        /// Numbers given.
        numbers: usize,
        /// Width of a row.
        hidden: usize,
    },
    /// A matrix has another shape than the pass needs.
    #[error(
        "the {matrix} projection of task {task} is {rows} × {cols}, wanted {wanted_rows} × {wanted_cols}: the checkpoint does not fit its configuration"
    )]
    Shape {
        /// Which of the three.
        matrix: &'static str,
        /// Number of the task in its submit.
        task: usize,
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// Rows that fit.
        wanted_rows: usize,
        /// Columns that fit.
        wanted_cols: usize,
    },
    /// A bias has another length than its matrix has rows.
    #[error("the bias of the {matrix} projection of task {task} has {got} numbers, wanted {wanted}")]
    Bias {
        /// Which of the three.
        matrix: &'static str,
        /// Number of the task in its submit.
        task: usize,
        /// Numbers given.
        got: usize,
        /// Rows of the matrix.
        wanted: usize,
    },
    /// An expert that accelerators do not compute.
    #[error("task {task} asks an accelerator for experts with {what}, which only the processor computes")]
    ProcessorOnly {
        /// `biases` or `a clamped activation`.
        what: &'static str,
        /// Number of the task in its submit.
        task: usize,
    },
    /// A pair names a row that the pass does not have.
    #[error("task {task} names {what} row {row}, but this pass has {rows}")]
    Row {
        /// `input` or `output`.
        what: &'static str,
        /// Number of the task in its submit.
        task: usize,
        /// Row named.
        row: u32,
        /// Rows of the pass.
        rows: usize,
    },
    /// Two pairs of one pass share an output row.
    #[error("output row {row} is computed twice in one pass (task {task})")]
    OutputTwice {
        /// Number of the task in its submit.
        task: usize,
        /// Output row.
        row: u32,
    },
    /// A pass is too large for memory.
    #[error("a pass of {rows} rows × {width} numbers is larger than the address space")]
    TooLarge {
        /// Rows of the pass.
        rows: usize,
        /// Numbers in a row.
        width: usize,
    },
    /// An operation that does not fit its memory: a mistake of who asked for it.
    #[error("an operation does not fit its memory: {what}")]
    Operation {
        /// What does not fit.
        what: String,
    },
    /// A failure of the device itself.
    #[error("the {device} device failed: {message}")]
    Device {
        /// Name of the device.
        device: &'static str,
        /// What it said and what to do.
        message: String,
    },
}

/// A device that computes experts. One pass is one layer of one step.
pub trait ExpertCompute: Send {
    /// Name for messages and reports.
    fn name(&self) -> &'static str;

    /// The device behind it, where that computes more than experts.
    fn accelerator(&mut self) -> Option<&mut dyn Accelerator> {
        None
    }

    /// Starts a pass. `x`: rows × hidden activations; `outputs`: output rows (expert-row pairs).
    ///
    /// # Errors
    /// If the sizes do not fit together.
    fn begin(&mut self, x: &[f32], hidden: usize, outputs: usize) -> Result<(), ComputeError>;

    /// Computes, or queues, experts. Different tasks write different output rows.
    ///
    /// # Errors
    /// If a task does not fit the pass; nothing of this submit is then computed.
    fn submit(&mut self, tasks: &[ExpertTask<'_>]) -> Result<Completion, ComputeError>;

    /// Waits until no bytes of earlier submits are in use any more; the pass goes on. Called when the
    /// caller cannot keep more experts alive. A device that always answers [`Completion::Done`] has
    /// nothing to wait for.
    ///
    /// # Errors
    /// If queued work failed.
    fn drain(&mut self) -> Result<(), ComputeError> {
        Ok(())
    }

    /// Waits for everything; row o of the result, `hidden` wide, is output row o, unweighted
    /// (zeros where no task named it).
    ///
    /// # Errors
    /// If queued work failed.
    fn finish(&mut self) -> Result<&[f32], ComputeError>;
}

/// What may be approximated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Numerics {
    /// Activations stay `f32`.
    Exact,
    /// Products with int4 and int8 experts take activations as int8 with a scale for each 64
    /// columns; other formats stay exact.
    QuantizedActivations,
}

/// [`ExpertCompute`] on the processor. Always [`Completion::Done`].
pub struct CpuExperts {
    pool: Arc<Pool>,
    kernels: Kernels,
    numerics: Numerics,
    hidden: usize,
    x: Vec<f32>,
    x_q8: QuantizedRows,
    /// One number for each output row: whether a task has named it.
    taken: Vec<bool>,
    outputs: Vec<f32>,
    /// Gate products, then those joined with up; task after task, pairs × inner each.
    gates: Vec<f32>,
    ups: Vec<f32>,
    /// Intermediates of each task, quantised.
    inner_q8: Vec<QuantizedRows>,
    pieces: Vec<Piece>,
}

/// Some matrix rows of one task.
struct Piece {
    task: usize,
    rows: Range<usize>,
}

/// A task with the place of its intermediates.
struct Placed<'a> {
    task: &'a ExpertTask<'a>,
    inner: usize,
    offset: usize,
}

impl Placed<'_> {
    fn len(&self) -> usize {
        self.task.pairs.len() * self.inner
    }
}

impl CpuExperts {
    /// Experts on the threads of `pool`.
    pub fn new(pool: Arc<Pool>, kernels: Kernels, numerics: Numerics) -> CpuExperts {
        CpuExperts {
            pool,
            kernels,
            numerics,
            hidden: 0,
            x: Vec::new(),
            x_q8: QuantizedRows::default(),
            taken: Vec::new(),
            outputs: Vec::new(),
            gates: Vec::new(),
            ups: Vec::new(),
            inner_q8: Vec::new(),
            pieces: Vec::new(),
        }
    }

    /// Checks every task before any is computed, and finds the place of each one's intermediates.
    fn place<'a>(&mut self, tasks: &'a [ExpertTask<'a>]) -> Result<Vec<Placed<'a>>, ComputeError> {
        let mut placed = Vec::with_capacity(tasks.len());
        let mut offset = 0usize;
        for (number, task) in tasks.iter().enumerate() {
            let inner = task.weights.gate.layout().rows();
            check_shapes(number, &task.weights, self.hidden, inner)?;
            check_biases(number, task, self.hidden, inner)?;
            let too_large = || ComputeError::TooLarge { rows: task.pairs.len(), width: inner };
            let size = task.pairs.len().checked_mul(inner).ok_or_else(too_large)?;
            placed.push(Placed { task, inner, offset });
            offset = offset.checked_add(size).ok_or_else(too_large)?;
        }
        let named = self.claim_rows(tasks);
        if let Err((error, claimed)) = named {
            // A refused submit leaves the pass as it was.
            for (_, row) in tasks.iter().flat_map(|t| t.pairs).take(claimed) {
                self.taken[*row as usize] = false;
            }
            return Err(error);
        }
        self.gates.resize(offset, 0.0);
        self.ups.resize(offset, 0.0);
        Ok(placed)
    }

    /// Marks the output rows of `tasks`; on failure says how many pairs were marked.
    fn claim_rows(&mut self, tasks: &[ExpertTask<'_>]) -> Result<(), (ComputeError, usize)> {
        let inputs = self.x.len().checked_div(self.hidden).unwrap_or(0);
        let mut claimed = 0;
        for (number, task) in tasks.iter().enumerate() {
            for &(input, output) in task.pairs {
                let row = |what, row, rows| ComputeError::Row { what, task: number, row, rows };
                if input as usize >= inputs {
                    return Err((row("input", input, inputs), claimed));
                }
                match self.taken.get_mut(output as usize) {
                    None => return Err((row("output", output, self.taken.len()), claimed)),
                    Some(true) => {
                        return Err((ComputeError::OutputTwice { task: number, row: output }, claimed));
                    }
                    Some(taken) => *taken = true,
                }
                claimed += 1;
            }
        }
        Ok(())
    }

    fn integer(&self, m: MatrixRef<'_>) -> bool {
        self.numerics == Numerics::QuantizedActivations && Kernels::has_integer_path(m.layout().format())
    }

    /// Cuts the rows that `size` gives for each task into pieces for the pool.
    fn cut(&mut self, placed: &[Placed<'_>], matrix: impl Fn(&ExpertWeights<'_>) -> (usize, usize)) {
        self.pieces.clear();
        for (task, p) in placed.iter().enumerate().filter(|(_, p)| !p.task.pairs.is_empty()) {
            let (rows, row_bytes) = matrix(&p.task.weights);
            let block = rows_per_task(row_bytes, rows, p.task.pairs.len(), self.pool.threads());
            self.pieces.extend(
                (0..rows).step_by(block).map(|start| Piece { task, rows: start..rows.min(start + block) }),
            );
        }
    }

    /// One parallel region: gates = gate x joined with up x.
    fn gate_and_up(&mut self, placed: &[Placed<'_>]) {
        self.cut(placed, |w| {
            (w.gate.layout().rows(), w.gate.layout().row_bytes() + w.up.layout().row_bytes())
        });
        let mut gates = std::mem::take(&mut self.gates);
        let mut ups = std::mem::take(&mut self.ups);
        let (gate_grid, up_grid) = (OutGrid::new(&mut gates, 0), OutGrid::new(&mut ups, 0));
        self.pool.run(self.pieces.len(), &|i| {
            let Piece { task, rows } = &self.pieces[i];
            let p = &placed[*task];
            let gate = gate_grid.part(p.offset, p.len(), p.inner);
            let up = up_grid.part(p.offset, p.len(), p.inner);
            self.rows_of(p.task.weights.gate, &gate, p.task.pairs, rows.clone());
            self.rows_of(p.task.weights.up, &up, p.task.pairs, rows.clone());
            for pair in 0..p.task.pairs.len() {
                // SAFETY: these columns of this task's rows belong to this piece alone.
                let (gate, up) = unsafe { (gate.slice(pair, rows.clone()), up.slice(pair, rows.clone())) };
                if let Some(biases) = &p.task.biases {
                    add(gate, &biases.gate[rows.clone()]);
                    add(up, &biases.up[rows.clone()]);
                }
                p.task.activation.join_in_place(gate, up);
            }
        });
        (self.gates, self.ups) = (gates, ups);
    }

    /// Rows `rows` of `m` times the activations that `pairs` name, pair i to row i of `out`.
    fn rows_of(&self, m: MatrixRef<'_>, out: &OutGrid<'_>, pairs: &[(u32, u32)], rows: Range<usize>) {
        let (n, x_rows, out_rows) = (pairs.len(), RowMap::First(pairs), RowMap::Same);
        if self.integer(m) {
            self.kernels.q8_rows(&Job { m, first: 0, x: &self.x_q8, n, x_rows, out: *out, out_rows }, rows);
        } else {
            let x = FloatRows::new(&self.x, self.hidden);
            self.kernels.float_rows(&Job { m, first: 0, x, n, x_rows, out: *out, out_rows }, rows);
        }
    }

    /// Quantises the intermediates of the tasks whose down projection takes them so.
    fn quantize_inner(&mut self, placed: &[Placed<'_>]) {
        if self.inner_q8.len() < placed.len() {
            self.inner_q8.resize_with(placed.len(), QuantizedRows::default);
        }
        let (numerics, gates) = (self.numerics, &self.gates);
        let chosen = placed.iter().zip(&mut self.inner_q8).filter(|(p, _)| {
            numerics == Numerics::QuantizedActivations
                && Kernels::has_integer_path(p.task.weights.down.layout().format())
        });
        let rows = chosen.flat_map(|(p, q8)| {
            q8.resize(p.task.pairs.len(), p.inner);
            q8.rows_mut().zip(gates[p.offset..p.offset + p.len()].chunks(p.inner))
        });
        let count = placed.iter().map(|p| p.task.pairs.len()).sum();
        share_out(&self.pool, count, rows, |(q8, row)| q8.quantize(row));
    }

    /// One parallel region: the down projections, into the output rows of the pass.
    fn down(&mut self, placed: &[Placed<'_>]) {
        self.cut(placed, |w| (w.down.layout().rows(), w.down.layout().row_bytes()));
        let mut outputs = std::mem::take(&mut self.outputs);
        let out = OutGrid::new(&mut outputs, self.hidden);
        self.pool.run(self.pieces.len(), &|i| {
            let Piece { task, rows } = &self.pieces[i];
            let p = &placed[*task];
            let (m, n) = (p.task.weights.down, p.task.pairs.len());
            let (x_rows, out_rows) = (RowMap::Same, RowMap::Second(p.task.pairs));
            if self.integer(m) {
                let x = &self.inner_q8[*task];
                self.kernels.q8_rows(&Job { m, first: 0, x, n, x_rows, out, out_rows }, rows.clone());
            } else {
                let x = FloatRows::new(&self.gates[p.offset..p.offset + p.len()], p.inner);
                self.kernels.float_rows(&Job { m, first: 0, x, n, x_rows, out, out_rows }, rows.clone());
            }
            if let Some(biases) = &p.task.biases {
                for pair in 0..n {
                    // SAFETY: these columns of this task's output rows belong to this piece alone.
                    let out = unsafe { out.slice(out_rows.at(pair), rows.clone()) };
                    add(out, &biases.down[rows.clone()]);
                }
            }
        });
        self.outputs = outputs;
    }
}

/// Adds a bias to products.
fn add(products: &mut [f32], bias: &[f32]) {
    products.iter_mut().zip(bias).for_each(|(product, bias)| *product += bias);
}

/// Does `work` on `count` items (or as many as there are) of `items` on the pool's threads.
fn share_out<T>(pool: &Pool, count: usize, items: impl Iterator<Item = T> + Send, work: impl Fn(T) + Sync) {
    let items = Mutex::new(items);
    pool.run(count, &|_| {
        let item = items.lock().unwrap_or_else(PoisonError::into_inner).next();
        if let Some(item) = item {
            work(item);
        }
    });
}

pub(crate) fn check_shapes(
    task: usize,
    weights: &ExpertWeights<'_>,
    hidden: usize,
    inner: usize,
) -> Result<(), ComputeError> {
    let all = [
        ("gate", weights.gate, inner, hidden),
        ("up", weights.up, inner, hidden),
        ("down", weights.down, hidden, inner),
    ];
    for (matrix, m, wanted_rows, wanted_cols) in all {
        let (rows, cols) = (m.layout().rows(), m.layout().cols());
        if (rows, cols) != (wanted_rows, wanted_cols) {
            return Err(ComputeError::Shape { matrix, task, rows, cols, wanted_rows, wanted_cols });
        }
    }
    Ok(())
}

fn check_biases(task: usize, of: &ExpertTask<'_>, hidden: usize, inner: usize) -> Result<(), ComputeError> {
    let Some(biases) = &of.biases else { return Ok(()) };
    let all = [("gate", biases.gate, inner), ("up", biases.up, inner), ("down", biases.down, hidden)];
    match all.into_iter().find(|(_, bias, wanted)| bias.len() != *wanted) {
        Some((matrix, bias, wanted)) => Err(ComputeError::Bias { matrix, task, got: bias.len(), wanted }),
        None => Ok(()),
    }
}

impl ExpertCompute for CpuExperts {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn begin(&mut self, x: &[f32], hidden: usize, outputs: usize) -> Result<(), ComputeError> {
        if hidden == 0 || !x.len().is_multiple_of(hidden) {
            return Err(ComputeError::Activations { numbers: x.len(), hidden });
        }
        let size =
            outputs.checked_mul(hidden).ok_or(ComputeError::TooLarge { rows: outputs, width: hidden })?;
        self.hidden = hidden;
        self.x.clear();
        self.x.extend_from_slice(x);
        self.taken.clear();
        self.taken.resize(outputs, false);
        self.outputs.clear();
        self.outputs.resize(size, 0.0);
        if self.numerics == Numerics::QuantizedActivations {
            let rows = x.len() / hidden;
            self.x_q8.resize(rows, hidden);
            share_out(&self.pool, rows, self.x_q8.rows_mut().zip(x.chunks(hidden)), |(q8, row)| {
                q8.quantize(row)
            });
        }
        Ok(())
    }

    fn submit(&mut self, tasks: &[ExpertTask<'_>]) -> Result<Completion, ComputeError> {
        let placed = self.place(tasks)?;
        self.gate_and_up(&placed);
        self.quantize_inner(&placed);
        self.down(&placed);
        Ok(Completion::Done)
    }

    fn finish(&mut self) -> Result<&[f32], ComputeError> {
        Ok(&self.outputs)
    }
}
