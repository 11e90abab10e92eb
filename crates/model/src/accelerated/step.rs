//! What a step carries through the layers, and the memory that it uses.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use metaltail_kernels::{Accelerator, Buffer, HeldMatrix, Lists, Op, Order, View};
use metaltail_store::Lease;

use super::DeviceCache;
use super::attention::Mla;
use crate::error::ModelError;
use crate::kv::KvCache;
use crate::observer::{ModelEvent, ModelObserver};
use crate::plan::RopePlan;
use crate::step::{Phase, Row};

/// Buffers by what they hold. They grow and are used again in every layer of every step.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    buffers: BTreeMap<(&'static str, usize), (Buffer, usize)>,
}

impl Scratch {
    /// A buffer of at least so many numbers. What it held before may be in it.
    pub(super) fn numbers(
        &mut self,
        device: &mut dyn Accelerator,
        what: &'static str,
        numbers: usize,
    ) -> Result<Buffer, ModelError> {
        self.one_of(device, (what, 0), numbers)
    }

    /// The same for one of several with a name.
    fn one_of(
        &mut self,
        device: &mut dyn Accelerator,
        what: (&'static str, usize),
        numbers: usize,
    ) -> Result<Buffer, ModelError> {
        match self.buffers.get(&what) {
            Some(&(buffer, size)) if size >= numbers => Ok(buffer),
            _ => {
                let buffer = device.buffer(numbers.max(1))?;
                if let Some((old, _)) = self.buffers.insert(what, (buffer, numbers.max(1))) {
                    device.release(old);
                }
                Ok(buffer)
            }
        }
    }
}

/// A sparse layer whose experts may still be computed.
struct Running {
    layer: u32,
    began: Instant,
}

/// Rows of one sequence at consecutive positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) sequence: usize,
    /// Which rows of the step.
    pub(super) rows: Range<usize>,
    /// Position of the first.
    pub(super) position: usize,
}

impl Run {
    /// Positions up to that of the last row, and itself.
    pub(super) fn end(&self) -> usize {
        self.position + self.rows.len()
    }
}

/// State of one step on its way through the layers.
pub(super) struct Step<'a, 'k, 's> {
    pub(super) rows: &'a [Row],
    pub(super) hidden: usize,
    pub(super) caches: &'a mut [&'k mut KvCache],
    pub(super) scratch: &'s mut Scratch,
    pub(super) observer: &'a dyn ModelObserver,
    pub(super) runs: Vec<Run>,
    /// Rows of one phase each.
    phases: Vec<(Range<usize>, Order)>,
    /// Positions that an indexer chose, for the layers that share its choice.
    pub(super) lists: Option<Lists>,
    /// Experts that the device may be reading.
    pub(super) held: Vec<Lease>,
    /// The layer that uses them.
    running: Option<Running>,
    /// When the last such layer ended.
    ended: Option<Instant>,
    /// Cosines and sines of the rows, by the number of their rotation.
    angles: BTreeMap<usize, (Buffer, Buffer)>,
}

/// Parts of a step that go on from one row to the next while `same` holds between neighbours.
fn parts(rows: &[Row], same: impl Fn(&Row, &Row) -> bool) -> Vec<Range<usize>> {
    let mut parts: Vec<Range<usize>> = Vec::new();
    for (i, row) in rows.iter().enumerate() {
        match parts.last_mut() {
            Some(part) if same(&rows[part.end - 1], row) => part.end = i + 1,
            _ => parts.push(i..i + 1),
        }
    }
    parts
}

impl<'a, 'k, 's> Step<'a, 'k, 's> {
    pub(super) fn new(
        rows: &'a [Row],
        hidden: usize,
        caches: &'a mut [&'k mut KvCache],
        scratch: &'s mut Scratch,
        observer: &'a dyn ModelObserver,
    ) -> Step<'a, 'k, 's> {
        let follows =
            |a: &Row, b: &Row| a.sequence == b.sequence && a.position.checked_add(1) == Some(b.position);
        let run = |part: Range<usize>| {
            let Row { sequence, position, .. } = rows[part.start];
            Run { sequence, rows: part, position: position as usize }
        };
        let order = |part: Range<usize>| match rows[part.start].phase {
            Phase::Prompt => (part, Order::Prefill),
            Phase::Generation => (part, Order::Decode),
        };
        Step {
            rows,
            hidden,
            caches,
            scratch,
            observer,
            runs: parts(rows, follows).into_iter().map(run).collect(),
            phases: parts(rows, |a, b| a.phase == b.phase).into_iter().map(order).collect(),
            lists: None,
            held: Vec::new(),
            running: None,
            ended: None,
            angles: BTreeMap::new(),
        }
    }

    /// Records `matrix` times all rows of `x`, each in the order of its phase.
    pub(super) fn product(
        &mut self,
        device: &mut dyn Accelerator,
        matrix: HeldMatrix,
        x: Buffer,
        what: &'static str,
    ) -> Result<Buffer, ModelError> {
        let (rows, cols) = (matrix.layout.rows(), matrix.layout.cols());
        let out = self.scratch.numbers(device, what, self.rows.len() * rows)?;
        for (part, order) in &self.phases {
            let at = |buffer: Buffer, width: usize| buffer.view().plus(part.start * width);
            let (x, out, inputs, order) = (at(x, cols), at(out, rows), part.len(), *order);
            device.record(&Op::Product { matrix, x, inputs, out, order })?;
        }
        Ok(out)
    }

    /// Cosines and sines of the pairs of all rows, `dim / 2` a row, of the rotation with this number.
    pub(super) fn angles(
        &mut self,
        device: &mut dyn Accelerator,
        (number, rope): (usize, &RopePlan),
    ) -> Result<(View, View), ModelError> {
        if let Some((cosines, sines)) = self.angles.get(&number) {
            return Ok((cosines.view(), sines.view()));
        }
        let (mut cosines, mut sines) = (Vec::new(), Vec::new());
        for row in self.rows {
            let angles = rope.angles(row.position);
            cosines.extend_from_slice(angles.cosines());
            sines.extend_from_slice(angles.sines());
        }
        // Nothing that was recorded in this step uses them yet, and nothing of earlier ones is left.
        let buffers = (
            self.scratch.one_of(device, ("cosines", number), cosines.len())?,
            self.scratch.one_of(device, ("sines", number), sines.len())?,
        );
        device.write(buffers.0.view(), &cosines)?;
        device.write(buffers.1.view(), &sines)?;
        self.angles.insert(number, buffers);
        Ok((buffers.0.view(), buffers.1.view()))
    }

    /// Makes room for the rows in the streams of layer `slot` of each cache.
    pub(super) fn reserve(
        &mut self,
        device: &mut dyn Accelerator,
        slot: usize,
        attention: &Mla,
        dropped: &Arc<Mutex<Vec<Buffer>>>,
    ) -> Result<(), ModelError> {
        let widths = attention.streams();
        for run in &self.runs {
            let cache = &mut *self.caches[run.sequence];
            let (len, most) = (cache.len().max(run.position), cache.most());
            let kept = cache.device().get_or_insert_with(|| DeviceCache::new(Arc::clone(dropped)));
            kept.reserve(device, slot, &widths, (len, run.end(), most))?;
        }
        Ok(())
    }

    /// The stream of a layer in a run's cache.
    pub(super) fn stream(&mut self, run: &Run, slot: usize, stream: usize) -> Result<Buffer, ModelError> {
        let cache = self.caches[run.sequence].device().as_ref();
        cache.and_then(|cache| cache.stream(slot, stream)).ok_or(ModelError::NoAccelerator)
    }

    /// The device has ended with everything. Rows of caches that moved have `arrived`, or are where they were.
    pub(super) fn end_moves(&mut self, device: &mut dyn Accelerator, arrived: bool) {
        for cache in self.caches.iter_mut().filter_map(|cache| cache.device().as_mut()) {
            match arrived {
                true => cache.settle(device),
                false => cache.restore(device),
            }
        }
    }

    /// The device has ended with everything: leases may go, and the layer that used them is told.
    pub(super) fn end_layer(&mut self) {
        self.held.clear();
        if let Some(Running { layer, began }) = self.running.take() {
            self.observer.on_model(&ModelEvent::SparseLayer { layer, took: began.elapsed() });
            self.ended = Some(Instant::now());
        }
    }

    /// A sparse layer's own time begins: what was recorded before the last one ended is counted there.
    pub(super) fn begin_layer(&mut self, layer: u32, began: Instant) {
        let began = self.ended.map_or(began, |ended| ended.max(began));
        self.running = Some(Running { layer, began });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_cut_where_a_sequence_or_a_phase_ends() {
        let row = |sequence, position, phase| Row { sequence, position, token: 0, phase };
        let (p, g) = (Phase::Prompt, Phase::Generation);
        let rows = [row(0, 5, g), row(1, 0, p), row(1, 1, p), row(1, 3, p), row(2, 4, g), row(2, 5, g)];
        let mut scratch = Scratch::default();
        let step = Step::new(&rows, 8, &mut [], &mut scratch, &crate::observer::Silent);
        let runs: Vec<_> = step.runs.iter().map(|run| (run.sequence, run.rows.clone(), run.end())).collect();
        assert_eq!(runs, [(0, 0..1, 6), (1, 1..3, 2), (1, 3..4, 4), (2, 4..6, 6)]);
        let phases: Vec<_> = step.phases.iter().map(|(rows, _)| rows.clone()).collect();
        assert_eq!(phases, [0..1, 1..4, 4..6]);
    }
}
