//! Whole layers on the simulated device: the processor's arithmetic, the device's rules.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use metaltail_kernels::{
    Accelerator, Attend, Buffer, Combine, ComputeError, CpuExperts, ExpertCompute, ExpertRows, ExpertTask,
    Extent, Footprint, HeldMatrix, Kernels, Numerics, Op, Pool, Rope, Route, Rows, Select, View, layer_norm,
    rms_norm,
};
use metaltail_quant::{MatrixLayout, MatrixRef};

use super::driver::SimDriver;
use crate::hazards::Hazards;
use crate::kernels::{
    self, Indexer, KernelDevice, KernelError, LatentAttention, Positions, Reference, Router,
};
use crate::residency::{
    DeclaredArena, HeldWeights, Residency, ResidencyError, Span, Submission, WeightSpans, spans_of,
};

/// [`Accelerator`] on a simulated device. Operations are computed when they are recorded, each as `model` computes it
/// on the processor without quantised activations: the same bits. What would go wrong on a device is refused: memory
/// that is not resident or is being overwritten, results that are read before the wait.
pub struct SimAccelerator {
    reference: Reference,
    kernels: Kernels,
    experts: CpuExperts,
    weights: HeldWeights<SimDriver>,
    arena: Arc<DeclaredArena<SimDriver>>,
    residency: Arc<Residency<SimDriver>>,
    buffers: BTreeMap<Buffer, Vec<f32>>,
    next: u32,
    /// The submission that is being recorded.
    open: Option<Submission>,
    in_flight: Vec<Submission>,
    hazards: Hazards,
    /// Buffers that something recorded uses.
    used: BTreeSet<Buffer>,
    /// Of these, what was given up.
    leaving: BTreeSet<Buffer>,
}

impl fmt::Debug for SimAccelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimAccelerator").field("buffers", &self.buffers.len()).finish_non_exhaustive()
    }
}

const NAME: &str = "sim";

fn failed(error: impl fmt::Display) -> ComputeError {
    ComputeError::Device { device: NAME, message: error.to_string() }
}

/// Where a buffer's numbers would lie, as far as barriers go: behind all memory that there is.
fn scratch(extent: &Extent) -> Span {
    let base = (1 << 62) + ((extent.buffer.0 as usize) << 38) + extent.start * 4;
    Span { base, len: (extent.end - extent.start) * 4 }
}

fn held(weights: &HeldWeights<SimDriver>, held: HeldMatrix) -> Result<MatrixRef<'_>, ComputeError> {
    let unknown = || ComputeError::Operation { what: format!("matrix {}, which is not held", held.id) };
    weights.matrix(held).ok_or_else(unknown)
}

impl SimAccelerator {
    /// The device to which `arena` is declared, computing with the threads of `pool`.
    pub fn new(arena: Arc<DeclaredArena<SimDriver>>, kernels: Kernels, pool: &Arc<Pool>) -> SimAccelerator {
        let residency = Arc::clone(arena.residency());
        SimAccelerator {
            reference: Reference::with(kernels, Arc::clone(pool)),
            kernels,
            experts: CpuExperts::new(Arc::clone(pool), kernels, Numerics::Exact),
            weights: HeldWeights::new(Arc::clone(&residency)),
            arena,
            residency,
            buffers: BTreeMap::new(),
            next: 0,
            open: None,
            in_flight: Vec::new(),
            hazards: Hazards::default(),
            used: BTreeSet::new(),
            leaving: BTreeSet::new(),
        }
    }

    /// What is declared beside the arena.
    pub fn weight_spans(&self) -> WeightSpans {
        self.weights.spans()
    }

    /// Of a buffer that was not given up.
    fn numbers(&self, buffer: Buffer) -> Option<usize> {
        self.buffers.get(&buffer).filter(|_| !self.leaving.contains(&buffer)).map(Vec::len)
    }

    fn slice(&self, extent: Extent) -> Result<&[f32], ComputeError> {
        let buffer = self.buffers.get(&extent.buffer);
        let numbers = buffer.and_then(|buffer| buffer.get(extent.start..extent.end));
        numbers.ok_or_else(|| ComputeError::Operation { what: format!("{extent:?}, which there is not") })
    }

    fn slice_mut(&mut self, extent: Extent) -> Result<&mut [f32], ComputeError> {
        let buffer = self.buffers.get_mut(&extent.buffer);
        let numbers = buffer.and_then(|buffer| buffer.get_mut(extent.start..extent.end));
        numbers.ok_or_else(|| ComputeError::Operation { what: format!("{extent:?}, which there is not") })
    }

    fn at(&self, view: View, numbers: usize) -> Result<&[f32], ComputeError> {
        self.slice(view.extent(numbers)?)
    }

    fn put(&mut self, view: View, numbers: &[f32]) -> Result<(), ComputeError> {
        self.slice_mut(view.extent(numbers.len())?)?.copy_from_slice(numbers);
        Ok(())
    }

    /// For the host: the numbers, unless something uses them.
    fn idle(&self, view: View, numbers: usize) -> Result<Extent, ComputeError> {
        if self.used.contains(&view.buffer) {
            return Err(failed(format!("{:?} is in use until the device was waited for", view.buffer)));
        }
        let extent = view.extent(numbers)?;
        self.slice(extent).map(|_| extent)
    }

    /// Tells the device that a kernel reads `weights` and touches `footprint`.
    fn dispatch(&mut self, weights: &[Span], footprint: Footprint) -> Result<(), ComputeError> {
        if self.open.is_none() {
            self.arena.declare_new().map_err(failed)?;
        }
        let mut ledger = self.residency.ledger();
        if self.open.is_none() {
            self.open = Some(ledger.submit().map_err(failed)?);
            ledger.driver_mut().begin_submission();
            self.hazards.clear();
        }
        let device = ledger.driver_mut();
        if self.hazards.needs_barrier(&footprint) {
            device.barrier();
        }
        let bound: Vec<Span> = footprint.reads.iter().chain(&footprint.changes).map(scratch).collect();
        let writes: Vec<Span> = footprint.written().map(scratch).collect();
        device.dispatch(weights, &bound, &writes).map_err(|error| failed(ResidencyError::from(error)))?;
        self.used.extend(footprint.touched().map(|extent| extent.buffer));
        Ok(())
    }

    /// Rows, results of `row` in the place of others.
    fn each_row(
        &mut self,
        (from, to): (Rows, Rows),
        (rows, width): (usize, usize),
        mut row: impl FnMut(&SimAccelerator, &[f32], &mut [f32]) -> Result<(), ComputeError>,
    ) -> Result<(), ComputeError> {
        let mut result = vec![0.0; width];
        for i in 0..rows {
            row(self, self.at(from.view.plus(i * from.stride), width)?, &mut result)?;
            self.put(to.view.plus(i * to.stride), &result)?;
        }
        Ok(())
    }

    fn compute(&mut self, op: &Op) -> Result<(), ComputeError> {
        match *op {
            Op::Product { matrix, x, inputs, out, .. } => {
                let m = held(&self.weights, matrix)?;
                let mut result = vec![0.0; inputs * matrix.layout.rows()];
                let x = self.at(x, inputs * matrix.layout.cols())?.to_vec();
                self.reference.matmul(m, &x, &mut result).map_err(of_kernel)?;
                self.put(out, &result)
            }
            Op::Add { from, to, count } => {
                let from = self.at(from, count)?.to_vec();
                let to = self.slice_mut(to.extent(count)?)?;
                to.iter_mut().zip(&from).for_each(|(to, from)| *to += from);
                Ok(())
            }
            Op::Copy { from, to, rows, width } => self.each_row((from, to), (rows, width), |_, from, to| {
                to.copy_from_slice(from);
                Ok(())
            }),
            Op::RmsNorm { from, to, rows, width, weight, eps } => {
                self.each_row((from, to), (rows, width), |sim, from, to| {
                    rms_norm(from, sim.at(weight, width)?, eps, to);
                    Ok(())
                })
            }
            Op::LayerNorm { from, to, rows, width, weight, bias, eps } => {
                self.each_row((from, to), (rows, width), |sim, from, to| {
                    layer_norm(from, sim.at(weight, width)?, sim.at(bias, width)?, eps, to);
                    Ok(())
                })
            }
            Op::Rope(ref rope) => self.rope(rope),
            Op::SwiGlu { gate, up, out, count } => {
                let (gate, up) = (self.at(gate, count)?.to_vec(), self.at(up, count)?.to_vec());
                let mut result = vec![0.0; count];
                self.reference.swiglu(&gate, &up, &mut result).map_err(of_kernel)?;
                self.put(out, &result)
            }
            Op::Route(ref route) => self.route(route),
            Op::Select(ref select) => self.select(select),
            Op::Attend(ref attend) => self.attend(attend),
            Op::Combine(ref combine) => self.combine(combine),
        }
    }

    fn rope(&mut self, rope: &Rope) -> Result<(), ComputeError> {
        let angles = rope.rows * (rope.dim / 2);
        let (cosines, sines) =
            (self.at(rope.cosines, angles)?.to_vec(), self.at(rope.sines, angles)?.to_vec());
        let mut x = self.at(rope.x, rope.rows * rope.heads * rope.head)?.to_vec();
        let Rope { heads, head, offset, dim, interleaved, .. } = *rope;
        let rotation =
            kernels::Rope { heads, head, offset, cosines: &cosines, sines: &sines, dim, interleaved };
        self.reference.rope(&rotation, &mut x).map_err(of_kernel)?;
        self.put(rope.x, &x)
    }

    fn route(&mut self, route: &Route) -> Result<(), ComputeError> {
        let Route { experts, top_k, softmax, groups, normalise, scale, .. } = *route;
        let bias = route.bias.map(|bias| self.at(bias, experts)).transpose()?.map(<[f32]>::to_vec);
        let logits = self.at(route.logits, route.rows * experts)?.to_vec();
        let bias = bias.as_deref();
        let router = Router { experts, top_k, softmax, bias, groups, normalise, scale };
        let routes = self.reference.route(&router, &logits).map_err(of_kernel)?;
        self.put(route.ids, &bits(routes.ids))?;
        self.put(route.weights, &routes.weights)?;
        self.put(route.broken, &bits(routes.broken.into_iter().map(u32::from)))
    }

    fn select(&mut self, select: &Select) -> Result<(), ComputeError> {
        let Select { heads, dim, top_k, .. } = *select;
        let rows = select.counts.len();
        let counts: Vec<usize> = select.counts.iter().map(|count| *count as usize).collect();
        let chosen = {
            let keys = self.at(select.keys, select.span() * dim)?.to_vec();
            let queries = self.at(select.queries, rows * heads * dim)?.to_vec();
            let weights = self.at(select.weights, rows * heads)?.to_vec();
            let indexer = Indexer { heads, dim, top_k, keys: &keys, counts: &counts };
            self.reference.select(&indexer, &queries, &weights).map_err(of_kernel)?
        };
        for (row, list) in chosen.into_iter().enumerate() {
            self.put(select.chosen.plus(row * top_k), &bits(list))?;
        }
        Ok(())
    }

    fn attend(&mut self, attend: &Attend) -> Result<(), ComputeError> {
        let Attend { heads, nope, rope, value, scale, ref counts, .. } = *attend;
        let lists = match attend.lists {
            Some(lists) => {
                let list = |(row, count): (usize, &u32)| {
                    let list = self.at(lists.chosen.plus(row * lists.top_k), *count as usize)?;
                    Ok(list.iter().map(|position| position.to_bits()).collect::<Vec<u32>>())
                };
                counts.iter().enumerate().map(list).collect::<Result<Vec<_>, ComputeError>>()?
            }
            None => Vec::new(),
        };
        let rows: Vec<Positions<'_>> = match attend.lists {
            Some(_) => lists.iter().map(|list| Positions::Listed(list)).collect(),
            None => counts.iter().map(|count| Positions::Below(*count as usize)).collect(),
        };
        let mut out = vec![0.0; rows.len() * heads * value];
        let queries = self.at(attend.queries, rows.len() * heads * (nope + rope))?.to_vec();
        let keys = self.at(attend.keys, attend.positions * (attend.lora() + rope))?.to_vec();
        let kv_b = held(&self.weights, attend.kv_b)?;
        let attention = LatentAttention { heads, nope, rope, value, kv_b, scale, keys: &keys, rows: &rows };
        self.reference.attend(&attention, &queries, &mut out).map_err(of_kernel)?;
        self.put(attend.out, &out)
    }

    fn combine(&mut self, combine: &Combine) -> Result<(), ComputeError> {
        let Combine { ref weights, top_k, width, .. } = *combine;
        for (r, weights) in weights.chunks(top_k).enumerate() {
            let mut sum = vec![0.0; width];
            for (k, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight != 0.0) {
                let product = self.at(combine.products.plus((r * top_k + k) * width), width)?;
                self.kernels.axpy(*weight, product, &mut sum);
            }
            if let Some(shared) = combine.shared {
                self.kernels.axpy(1.0, self.at(shared.plus(r * width), width)?, &mut sum);
            }
            let x = self.slice_mut(combine.x.plus(r * width).extent(width)?)?;
            x.iter_mut().zip(&sum).for_each(|(x, sum)| *x += sum);
        }
        Ok(())
    }

    /// Ends everything that was recorded or handed over.
    fn end(&mut self) -> Result<(), ComputeError> {
        self.in_flight.extend(self.open.take());
        let mut first = Ok(());
        for submission in std::mem::take(&mut self.in_flight) {
            first = first.and(self.residency.complete(submission).map_err(failed));
        }
        self.used.clear();
        self.hazards.clear();
        for buffer in std::mem::take(&mut self.leaving) {
            self.buffers.remove(&buffer);
        }
        first
    }
}

/// Unsigned integers as numbers of a buffer.
fn bits(ids: impl IntoIterator<Item = u32>) -> Vec<f32> {
    ids.into_iter().map(f32::from_bits).collect()
}

fn of_kernel(error: KernelError) -> ComputeError {
    ComputeError::Operation { what: error.to_string() }
}

impl Accelerator for SimAccelerator {
    fn name(&self) -> &'static str {
        NAME
    }

    fn announce(&mut self, matrices: &[MatrixLayout]) {
        self.weights.announce(matrices);
    }

    fn hold(&mut self, matrix: MatrixRef<'_>) -> Result<HeldMatrix, ComputeError> {
        self.weights.hold(matrix).map_err(failed)
    }

    fn buffer(&mut self, numbers: usize) -> Result<Buffer, ComputeError> {
        let buffer = Buffer(self.next);
        self.next = self.next.checked_add(1).ok_or_else(|| failed("more buffers than numbers for them"))?;
        self.buffers.insert(buffer, vec![0.0; numbers]);
        Ok(buffer)
    }

    fn release(&mut self, buffer: Buffer) {
        match self.used.contains(&buffer) {
            true => drop(self.leaving.insert(buffer)),
            false => drop(self.buffers.remove(&buffer)),
        }
    }

    fn write(&mut self, to: View, numbers: &[f32]) -> Result<(), ComputeError> {
        let extent = self.idle(to, numbers.len())?;
        self.slice_mut(extent)?.copy_from_slice(numbers);
        Ok(())
    }

    fn read(&mut self, from: View, numbers: &mut [f32]) -> Result<(), ComputeError> {
        let extent = self.idle(from, numbers.len())?;
        numbers.copy_from_slice(self.slice(extent)?);
        Ok(())
    }

    fn read_ids(&mut self, from: View, ids: &mut [u32]) -> Result<(), ComputeError> {
        let extent = self.idle(from, ids.len())?;
        ids.iter_mut().zip(self.slice(extent)?).for_each(|(id, bits)| *id = bits.to_bits());
        Ok(())
    }

    fn record(&mut self, op: &Op) -> Result<(), ComputeError> {
        let footprint = op.check(|buffer| self.numbers(buffer))?;
        let matrix = match op {
            Op::Product { matrix, .. } => Some(*matrix),
            Op::Attend(attend) => Some(attend.kv_b),
            _ => None,
        };
        let weights: Vec<Span> = match matrix {
            Some(matrix) => spans_of(held(&self.weights, matrix)?).collect(),
            None => Vec::new(),
        };
        self.dispatch(&weights, footprint)?;
        self.compute(op)
    }

    fn experts(&mut self, rows: &ExpertRows, tasks: &[ExpertTask<'_>]) -> Result<(), ComputeError> {
        rows.check(tasks)?;
        let footprint = rows.footprint()?;
        footprint.within(|buffer| self.numbers(buffer))?;
        let known = self.residency.stats().registered;
        self.arena.declare_new().map_err(failed)?;
        if self.residency.stats().registered > known {
            // What is new is resident from the next submission on.
            self.submit()?;
        }
        let weights = tasks.iter().flat_map(|task| {
            [task.weights.gate, task.weights.up, task.weights.down].into_iter().flat_map(spans_of)
        });
        let weights: Vec<Span> = weights.collect();
        self.dispatch(&weights, footprint)?;
        let x = self.at(rows.x, rows.inputs * rows.hidden)?.to_vec();
        self.experts.begin(&x, rows.hidden, rows.outputs)?;
        self.experts.submit(tasks)?;
        let results = self.experts.finish()?.to_vec();
        for &(_, output) in tasks.iter().flat_map(|task| task.pairs) {
            let at = output as usize * rows.hidden;
            self.put(rows.out.plus(at), &results[at..at + rows.hidden])?;
        }
        self.residency.ledger().driver_mut().computed(tasks.len());
        Ok(())
    }

    fn submit(&mut self) -> Result<(), ComputeError> {
        self.in_flight.extend(self.open.take());
        Ok(())
    }

    fn wait(&mut self) -> Result<(), ComputeError> {
        self.end()
    }
}

impl Drop for SimAccelerator {
    /// The arena's memory is about to go: the device forgets it first.
    fn drop(&mut self) {
        let _ = self.end();
        // Where it cannot, whoever drops the arena keeps the memory.
        let _ = self.arena.forget();
    }
}
