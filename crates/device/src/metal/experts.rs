//! The tables of a submission of experts.

use metaltail_kernels::{Buffer, ComputeError, ExpertRows, ExpertTask, View};
use metaltail_quant::MatrixRef;

use super::accelerator::{MetalAccelerator, Planned};
use super::encode::{self, Experts, tile_of};
use super::launch::{Launch, Launcher};
use super::layout::{matrix, narrow, too_large, words};
use super::scratch::Room;
use crate::residency::{Span, spans_of};

/// Where a part of a table may begin.
const PART: usize = 256;

/// Tables as they are filled. Experts that one row chose come first, then the others: each kind has its tiles, and its
/// intermediates lie together.
#[derive(Default)]
struct Tables {
    experts: Vec<u8>,
    /// Three numbers each: expert, first pair, pairs. Of one pair, and of several.
    tiles: [Vec<u32>; 2],
    /// An input row and an output row each.
    pairs: Vec<u32>,
    /// Numbers of intermediates of each kind.
    inner: [usize; 2],
    widest: u32,
    reached: Vec<Span>,
}

/// Kinds of tiles by the pairs that they take: an expert that one row chose, the usual case in decoding, decodes its
/// weights for one row only.
const KINDS: [u32; 2] = [1, 4];

impl Tables {
    /// Adds an expert whose matrices have these entries.
    fn add(&mut self, kind: usize, task: &ExpertTask<'_>, entries: [Vec<u8>; 3]) -> Result<(), ComputeError> {
        let number = narrow("experts of a submission", self.experts.len() / super::layout::EXPERT_BYTES)?;
        let (rows, pairs) = (task.weights.gate.layout().rows(), task.pairs.len());
        self.widest = self.widest.max(narrow("rows of a projection", rows)?);
        let before = self.inner[0] + self.inner[1];
        self.experts.extend(entries.concat());
        self.experts.extend((before as u64).to_le_bytes());
        self.experts.extend(words(&[narrow("pairs of a submission", self.pairs.len() / 2)?, 0]));
        let numbers = pairs.checked_mul(rows).filter(|numbers| before.checked_add(*numbers).is_some());
        self.inner[kind] += numbers.ok_or_else(|| too_large("intermediates", rows, usize::MAX))?;
        self.pairs.extend(task.pairs.iter().flat_map(|&(input, output)| [input, output]));
        let pairs = narrow("pairs of an expert", pairs)?;
        let firsts = (0..pairs).step_by(KINDS[kind] as usize);
        self.tiles[kind].extend(firsts.flat_map(|first| [number, first, KINDS[kind].min(pairs - first)]));
        self.reached
            .extend([task.weights.gate, task.weights.up, task.weights.down].into_iter().flat_map(spans_of));
        Ok(())
    }

    /// All of it in one string, and where its parts begin.
    fn joined(&self) -> (Vec<u8>, [usize; 5]) {
        let parts = [&self.experts[..], &words(&self.tiles[0]), &words(&self.tiles[1]), &words(&self.pairs)];
        let (mut bytes, mut at) = (Vec::new(), [0; 5]);
        for (number, part) in parts.into_iter().enumerate() {
            bytes.resize(bytes.len().next_multiple_of(PART), 0);
            at[number] = bytes.len();
            bytes.extend(part);
        }
        at[4] = bytes.len();
        (bytes, at)
    }
}

impl<L: Launcher> MetalAccelerator<L> {
    /// The entry of an expert's matrix, which lies where its lease has it.
    fn reach(&self, task: usize, which: &'static str, m: MatrixRef<'_>) -> Result<Vec<u8>, ComputeError> {
        let mut addresses = [0; 2];
        for (address, span) in addresses.iter_mut().zip(spans_of(m)) {
            *address = self.launcher.host_address(span).ok_or_else(|| ComputeError::Device {
                device: self.launcher.name(),
                message: format!(
                    "the {which} projection of task {task}, {span}, is not declared: experts are read where they lie, so their memory is registered first"
                ),
            })?;
        }
        matrix(m.layout(), addresses[0], addresses[1])
    }

    /// Launches of some experts; their number is counted by the caller.
    pub(super) fn plan_experts(
        &mut self,
        rows: &ExpertRows,
        tasks: &[ExpertTask<'_>],
    ) -> Result<Vec<Planned>, ComputeError> {
        let mut tables = Tables::default();
        for (kind, one) in [true, false].into_iter().enumerate() {
            let of_kind = |task: &ExpertTask<'_>| !task.pairs.is_empty() && (task.pairs.len() == 1) == one;
            for (number, task) in tasks.iter().enumerate().filter(|(_, task)| of_kind(task)) {
                let w = &task.weights;
                let entries = [
                    self.reach(number, "gate", w.gate)?,
                    self.reach(number, "up", w.up)?,
                    self.reach(number, "down", w.down)?,
                ];
                tables.add(kind, task, entries)?;
            }
        }
        if tables.pairs.is_empty() {
            return Ok(Vec::new());
        }
        let hidden = narrow("width of an activation", rows.hidden)?;
        let origin = self.room(Room::Inner, [tables.inner[0] + tables.inner[1], 1, 1])?;
        let (bytes, at) = tables.joined();
        let table = self.table(&bytes)?;
        let x = rows.x.extent(rows.inputs * rows.hidden)?;
        let out = rows.out.extent(rows.outputs * rows.hidden)?;
        let experts = Experts { table, at, widest: tables.widest, hidden, x, out };
        let launches = self.expert_launches(&experts, &tables, origin)?;
        let planned = |launch| Planned { launch, reached: tables.reached.clone() };
        Ok(launches.into_iter().map(planned).collect())
    }

    /// Gate and up of both kinds, then down: one barrier lies between.
    fn expert_launches(
        &self,
        experts: &Experts,
        tables: &Tables,
        origin: View,
    ) -> Result<Vec<Launch>, ComputeError> {
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let mut inner = origin;
        for (kind, most) in KINDS.into_iter().enumerate() {
            let tiles = narrow("tiles of a submission", tables.tiles[kind].len() / 3)?;
            if tiles > 0 {
                let extent = inner.extent(tables.inner[kind])?;
                let tiles = (tile_of(most), 1 + kind, tiles);
                let [gate_up, down] = encode::experts(self.grid, experts, tiles, (origin, extent));
                first.push(gate_up);
                second.push(down);
            }
            inner = inner.plus(tables.inner[kind]);
        }
        first.append(&mut second);
        Ok(first)
    }

    fn table(&mut self, bytes: &[u8]) -> Result<Buffer, ComputeError> {
        self.scratch.table(&mut self.launcher, bytes)
    }
}
