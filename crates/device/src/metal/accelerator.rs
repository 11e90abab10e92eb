//! [`Accelerator`] over any [`Launcher`]: operations become launches, with barriers where one touches what another
//! wrote.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use metaltail_kernels::{
    Accelerator, Attend, Buffer, ComputeError, ExpertRows, ExpertTask, Footprint, HeldMatrix,
    MOST_INTERMEDIATE, Op, Select, View,
};
use metaltail_quant::{MatrixLayout, MatrixRef};

use super::encode::{self, Attention, Grid, Norm};
use super::launch::{Launch, Launcher, MOST_BYTES};
use super::layout::{floats, format_name, matrix};
use super::scratch::{Room, Scratch};
use crate::hazards::Hazards;
use crate::residency::{DeclaredArena, HeldWeights, Placement, Span, spans_of};

/// The most threadgroups of a launch in a direction. Metal takes more; a bound keeps positions far from 2³².
const MOST_GROUPS: u32 = 65_535;

/// The most bytes of scores and of what lies between them and a result, unless one row has more.
const MOST_SCORES: usize = MOST_INTERMEDIATE;

/// What was done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AcceleratorCounts {
    /// Experts computed, each once a task.
    pub experts: u64,
    /// Kernels launched.
    pub launches: u64,
    /// Barriers between them.
    pub barriers: u64,
    /// Submissions that had something in them.
    pub submissions: u64,
}

/// Counts that others look at while the accelerator works.
#[derive(Clone, Debug, Default)]
pub struct SharedCounts(Arc<Mutex<AcceleratorCounts>>);

impl SharedCounts {
    /// As they are now.
    pub fn get(&self) -> AcceleratorCounts {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut AcceleratorCounts)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// A launch, and the host memory that it reaches through addresses.
pub(super) struct Planned {
    pub(super) launch: Launch,
    pub(super) reached: Vec<Span>,
}

impl From<Launch> for Planned {
    fn from(launch: Launch) -> Planned {
        Planned { launch, reached: Vec::new() }
    }
}

/// A held matrix as kernels find it.
struct Entry {
    /// A `Matrix`.
    bytes: Vec<u8>,
    reached: Vec<Span>,
}

/// An accelerator of Metal kernels.
///
/// Experts are read where the caller has them: their memory must be registered with the launcher's residency before
/// [`Accelerator::experts`], which refuses what is not.
pub struct MetalAccelerator<L: Launcher> {
    pub(super) launcher: L,
    pub(super) grid: Grid,
    pub(super) scratch: Scratch,
    weights: HeldWeights<L::Driver>,
    entries: Vec<Entry>,
    /// Numbers of each buffer.
    sizes: BTreeMap<Buffer, usize>,
    hazards: Hazards,
    /// Whether something was recorded since the last submission.
    recorded: bool,
    most_scores: usize,
    replaced: Vec<[String; 2]>,
    counts: SharedCounts,
    /// The expert store's memory, where experts lie in it.
    arena: Option<Arc<DeclaredArena<L::Driver>>>,
}

impl<L: Launcher> fmt::Debug for MetalAccelerator<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.launcher.name();
        f.debug_struct("MetalAccelerator")
            .field("launcher", &name)
            .field("counts", &self.counts.get())
            .finish_non_exhaustive()
    }
}

impl<L: Launcher> MetalAccelerator<L> {
    /// Kernels that `launcher` runs.
    pub fn new(launcher: L) -> MetalAccelerator<L> {
        let weights = HeldWeights::new(Arc::clone(launcher.residency()));
        MetalAccelerator {
            launcher,
            grid: Grid { most: MOST_GROUPS },
            scratch: Scratch::default(),
            weights,
            entries: Vec::new(),
            sizes: BTreeMap::new(),
            hazards: Hazards::default(),
            recorded: false,
            most_scores: MOST_SCORES,
            replaced: Vec::new(),
            counts: SharedCounts::default(),
            arena: None,
        }
    }

    /// Launches at most this many threadgroups in a direction, so that kernels must loop.
    pub fn with_most_groups(mut self, most: u32) -> Self {
        self.grid = Grid { most };
        self
    }

    /// Takes at most so many bytes of scores at a time (one row's at least).
    pub fn with_most_scores(mut self, bytes: usize) -> Self {
        self.most_scores = bytes;
        self
    }

    /// Places weights in another way.
    pub fn with_placement(mut self, placement: Placement) -> Self {
        self.weights = HeldWeights::new(Arc::clone(self.launcher.residency())).with_placement(placement);
        self
    }

    /// For tests: intermediates and tables are new and as large as needed each time, and begin as NaN, so that what no
    /// thread wrote shows and what is touched behind their end is stopped.
    pub fn with_fresh_scratch(mut self) -> Self {
        self.scratch = Scratch::fresh();
        self
    }

    /// Puts `prefix` before the names of all kernels that begin with `kernels`: how tests see that a mistake in
    /// another version of them is found.
    pub fn with_replaced(mut self, kernels: &str, prefix: &str) -> Self {
        self.replaced.push([kernels, prefix].map(str::to_owned));
        self
    }

    /// The launcher.
    pub fn launcher(&self) -> &L {
        &self.launcher
    }

    /// Experts lie in `arena`, which is declared to the launcher's residency: chunks that come are declared before a
    /// submission reads them.
    pub fn with_arena(mut self, arena: Arc<DeclaredArena<L::Driver>>) -> Self {
        self.arena = Some(arena);
        self
    }

    /// The held weights.
    pub fn weights(&self) -> &HeldWeights<L::Driver> {
        &self.weights
    }

    /// What was done, now and later.
    pub fn counts(&self) -> SharedCounts {
        self.counts.clone()
    }

    fn failed(&self, message: String) -> ComputeError {
        ComputeError::Device { device: self.launcher.name(), message }
    }

    fn entry(&self, held: HeldMatrix) -> Result<&Entry, ComputeError> {
        let known = self.weights.matrix(held).and_then(|_| self.entries.get(held.id as usize));
        known.ok_or_else(|| ComputeError::Operation {
            what: format!("matrix {}, which is not held here", held.id),
        })
    }

    fn place(&self, view: View, numbers: usize) -> Result<usize, ComputeError> {
        let extent = view.extent(numbers)?;
        Footprint { reads: vec![extent], ..Footprint::default() }
            .within(|buffer| self.sizes.get(&buffer).copied())?;
        Ok(extent.start * 4)
    }

    pub(super) fn room(&mut self, room: Room, factors: [usize; 3]) -> Result<View, ComputeError> {
        self.scratch.room(&mut self.launcher, room, factors)
    }

    /// Rows that go at a time where each has `bytes` of scores and `table` bytes of constants.
    fn block(&self, bytes: usize, table: usize) -> usize {
        (self.most_scores / bytes.max(1)).clamp(1, MOST_BYTES / table)
    }

    fn plan(&mut self, op: &Op) -> Result<Vec<Planned>, ComputeError> {
        let grid = self.grid;
        let launch = match *op {
            Op::Product { matrix, x, inputs, out, order } => {
                let entry = self.entry(matrix)?;
                let layout = matrix.layout;
                let of_matrix = (layout, entry.bytes.clone());
                let touched = [x.extent(inputs * layout.cols())?, out.extent(inputs * layout.rows())?];
                let launch = encode::product(grid, order, of_matrix, inputs, touched)?;
                let reached = entry.reached.clone();
                return Ok(if inputs == 0 { Vec::new() } else { vec![Planned { launch, reached }] });
            }
            Op::Add { from, to, count } => encode::add(grid, from, to, count)?,
            Op::Copy { from, to, rows, width } => encode::copy(grid, [from, to], rows, width)?,
            Op::RmsNorm { from, to, rows, width, weight, eps } => {
                encode::norm(grid, &Norm { from, to, rows, width, weight, bias: None, eps })?
            }
            Op::LayerNorm { from, to, rows, width, weight, bias, eps } => {
                encode::norm(grid, &Norm { from, to, rows, width, weight, bias: Some(bias), eps })?
            }
            Op::Rope(ref rope) => encode::rope(grid, rope)?,
            Op::SwiGlu { gate, up, out, count } => encode::swiglu(grid, [gate, up, out], count)?,
            Op::Route(ref route) => encode::route(grid, route)?,
            Op::Combine(ref combine) => {
                return Ok(encode::combine(grid, combine)?.into_iter().map(Planned::from).collect());
            }
            Op::Select(ref select) => return self.plan_select(select),
            Op::Attend(ref attend) => return self.plan_attend(attend),
        };
        Ok(vec![launch.into()])
    }

    /// Blocks of rows, so that their scores stay small: whatever the block, a row's bits are the same.
    fn plan_select(&mut self, select: &Select) -> Result<Vec<Planned>, ComputeError> {
        if select.span() == 0 {
            return Ok(Vec::new());
        }
        let block = self.block(select.span().saturating_mul(4), 4);
        let rows = block.min(select.counts.len());
        let scores = self.room(Room::Scores, [rows, select.span(), 1])?;
        let mut planned = Vec::new();
        for (number, counts) in select.counts.chunks(block).enumerate() {
            let launches = encode::select(self.grid, select, number * block, counts, scores)?;
            planned.extend(launches.map(Planned::from));
        }
        Ok(planned)
    }

    fn plan_attend(&mut self, attend: &Attend) -> Result<Vec<Planned>, ComputeError> {
        if let Some(lists) = attend.lists {
            let short =
                |count: &&u32| (**count as usize) < attend.positions && **count as usize > lists.top_k;
            if let Some(count) = attend.counts.iter().find(short) {
                let what = format!("a row attends to {count} positions of a list of {}", lists.top_k);
                return Err(ComputeError::Operation { what });
            }
        }
        let (heads, lora, rope) = (attend.heads, attend.lora(), attend.rope);
        let numbers = attend.span().saturating_add(2 * lora).saturating_add(rope);
        let block = self.block(heads.saturating_mul(numbers).saturating_mul(4), 8);
        let rows = block.min(attend.counts.len());
        let absorbed = self.room(Room::Absorbed, [rows, heads, lora + rope])?;
        let scores = self.room(Room::Scores, [rows, heads, attend.span()])?;
        let mixed = self.room(Room::Mixed, [rows, heads, lora])?;
        let entry = self.entry(attend.kv_b)?;
        let mut planned = Vec::new();
        for (number, counts) in attend.counts.chunks(block).enumerate() {
            let (first, kv_b) = (number * block, &entry.bytes[..]);
            let of_block = Attention { whole: attend, first, counts, kv_b, absorbed, scores, mixed };
            let launches = encode::attend(self.grid, &of_block)?;
            planned.extend(launches.map(|launch| Planned { launch, reached: entry.reached.clone() }));
        }
        Ok(planned)
    }

    fn launch_all(&mut self, planned: Vec<Planned>) -> Result<(), ComputeError> {
        for Planned { mut launch, reached } in planned {
            let other = self.replaced.iter().find(|[kernels, _]| launch.kernel.starts_with(kernels));
            if let Some([_, prefix]) = other {
                launch.kernel.insert_str(0, prefix);
            }
            if self.hazards.needs_barrier(&launch.footprint) {
                self.launcher.barrier();
                self.counts.change(|counts| counts.barriers += 1);
            }
            self.recorded = true;
            self.launcher.launch(launch, &reached)?;
            self.counts.change(|counts| counts.launches += 1);
        }
        Ok(())
    }
}

/// Whether an operation has nothing to do.
fn is_empty(footprint: &Footprint) -> bool {
    footprint.written().all(|extent| extent.start == extent.end)
}

impl<L: Launcher> Accelerator for MetalAccelerator<L> {
    fn name(&self) -> &'static str {
        self.launcher.name()
    }

    fn announce(&mut self, matrices: &[MatrixLayout]) {
        self.weights.announce(matrices);
    }

    fn hold(&mut self, m: MatrixRef<'_>) -> Result<HeldMatrix, ComputeError> {
        format_name(m.layout().format())?;
        let held = self.weights.hold(m).map_err(|error| self.failed(error.to_string()))?;
        let mut addresses = [0; 2];
        let reached: Vec<Span> = self.weights.matrix(held).into_iter().flat_map(spans_of).collect();
        for (address, span) in addresses.iter_mut().zip(&reached) {
            let found = self.launcher.host_address(*span);
            *address = found.ok_or_else(|| self.failed(format!("{span} was declared and is not known")))?;
        }
        self.entries.push(Entry { bytes: matrix(m.layout(), addresses[0], addresses[1])?, reached });
        Ok(held)
    }

    fn buffer(&mut self, numbers: usize) -> Result<Buffer, ComputeError> {
        let bytes = numbers.max(1).checked_mul(4);
        let bytes = bytes.ok_or_else(|| self.failed(format!("no memory for {numbers} numbers")))?;
        let buffer = self.launcher.allocate(bytes)?;
        self.sizes.insert(buffer, numbers);
        Ok(buffer)
    }

    fn release(&mut self, buffer: Buffer) {
        if self.sizes.remove(&buffer).is_some() {
            self.launcher.free(buffer);
        }
    }

    fn write(&mut self, to: View, numbers: &[f32]) -> Result<(), ComputeError> {
        let offset = self.place(to, numbers.len())?;
        self.launcher.write(to.buffer, offset, &floats(numbers))
    }

    fn read(&mut self, from: View, numbers: &mut [f32]) -> Result<(), ComputeError> {
        let mut bytes = vec![0; numbers.len() * 4];
        let offset = self.place(from, numbers.len())?;
        self.launcher.read(from.buffer, offset, &mut bytes)?;
        for (number, bytes) in numbers.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *number = f32::from_le_bytes(*bytes);
        }
        Ok(())
    }

    fn read_ids(&mut self, from: View, ids: &mut [u32]) -> Result<(), ComputeError> {
        let mut bytes = vec![0; ids.len() * 4];
        let offset = self.place(from, ids.len())?;
        self.launcher.read(from.buffer, offset, &mut bytes)?;
        for (id, bytes) in ids.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *id = u32::from_le_bytes(*bytes);
        }
        Ok(())
    }

    fn record(&mut self, op: &Op) -> Result<(), ComputeError> {
        let footprint = op.check(|buffer| self.sizes.get(&buffer).copied())?;
        if is_empty(&footprint) {
            return Ok(());
        }
        let planned = self.plan(op)?;
        self.launch_all(planned)
    }

    fn experts(&mut self, rows: &ExpertRows, tasks: &[ExpertTask<'_>]) -> Result<(), ComputeError> {
        rows.check(tasks)?;
        let footprint = rows.footprint()?;
        footprint.within(|buffer| self.sizes.get(&buffer).copied())?;
        if footprint.reads.iter().any(|read| footprint.written().any(|write| read.overlaps(*write))) {
            return Err(ComputeError::Operation { what: "experts whose results lie on their inputs".into() });
        }
        if let Some(arena) = &self.arena {
            arena.declare_new().map_err(|error| self.failed(error.to_string()))?;
        }
        let planned = self.plan_experts(rows, tasks)?;
        self.launch_all(planned)?;
        let experts = tasks.iter().filter(|task| !task.pairs.is_empty()).count() as u64;
        self.counts.change(|counts| counts.experts += experts);
        Ok(())
    }

    fn submit(&mut self) -> Result<(), ComputeError> {
        // Submissions keep their order: nothing of before has to be waited for.
        self.hazards.clear();
        let submissions = u64::from(std::mem::take(&mut self.recorded));
        self.launcher.submit()?;
        self.counts.change(|counts| counts.submissions += submissions);
        Ok(())
    }

    fn wait(&mut self) -> Result<(), ComputeError> {
        let handed = self.submit();
        let ended = self.launcher.wait();
        self.scratch.end_all(&mut self.launcher);
        // What was handed over before failed first.
        ended.and(handed)
    }
}

impl<L: Launcher> Drop for MetalAccelerator<L> {
    /// Weights and the arena's memory go behind this: nothing may read them any more, and the device forgets them
    /// first.
    fn drop(&mut self) {
        let _ = self.launcher.wait();
        // Where it cannot, whoever drops the arena keeps the memory.
        let _ = self.arena.take().map(|arena| arena.forget());
    }
}
