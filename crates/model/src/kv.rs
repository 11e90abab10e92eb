//! What is kept of one sequence.
//!
//! A layer with attention keeps one or two streams of rows (latents and indexer keys, or keys and
//! values), a row a position, in pages so that growth moves nothing. Rows beyond [`KvCache::len`]
//! are not part of the sequence: a cancelled step leaves the length as it was. A recurrent layer
//! keeps a state of constant size, which a step computes anew beside the old one.

mod recurrent;

use crate::accelerated::DeviceCache;
use crate::error::ModelError;
use crate::plan::{LayerPlan, Plan};
use crate::step::{Phase, Row};

use recurrent::Recurrent;
pub(crate) use recurrent::State;

/// Positions a page.
const PAGE: usize = 64;

/// Rows of one width, one a position.
#[derive(Debug, Default)]
pub struct Stream {
    width: usize,
    pages: Vec<Box<[f32]>>,
}

impl Stream {
    /// The row of a position; it must have been written.
    #[inline]
    pub fn row(&self, position: usize) -> &[f32] {
        let start = (position % PAGE) * self.width;
        &self.pages[position / PAGE][start..start + self.width]
    }

    /// The row of a position, for writing; pages are added up to it.
    pub fn row_mut(&mut self, position: usize) -> &mut [f32] {
        while self.pages.len() <= position / PAGE {
            self.pages.push(vec![0.0; PAGE * self.width].into_boxed_slice());
        }
        let start = (position % PAGE) * self.width;
        &mut self.pages[position / PAGE][start..start + self.width]
    }
}

/// What one layer keeps.
#[derive(Debug)]
struct LayerMemory {
    streams: Vec<Stream>,
    state: Option<Recurrent>,
}

impl LayerMemory {
    fn new(plan: &LayerPlan) -> LayerMemory {
        let widths = plan.attention.kv_streams();
        LayerMemory {
            streams: widths.into_iter().map(|width| Stream { width, pages: Vec::new() }).collect(),
            state: plan.attention.state_sizes().map(Recurrent::new),
        }
    }
}

/// Everything that one sequence remembers.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerMemory>,
    len: usize,
    /// Positions that the kept copies of recurrent states know; never more than `len`.
    kept: usize,
    /// Positions that it will hold at most.
    most: usize,
    /// Rows that an accelerator keeps instead of `layers`.
    device: Option<DeviceCache>,
}

impl KvCache {
    /// An empty cache for the main layers of a plan.
    pub fn new(plan: &Plan) -> Self {
        Self::for_layers(plan, plan.layers.iter())
    }

    /// An empty cache for the draft layer of a plan (no layers if there is none).
    pub fn for_draft(plan: &Plan) -> Self {
        Self::for_layers(plan, plan.draft.iter())
    }

    fn for_layers<'a>(plan: &Plan, layers: impl Iterator<Item = &'a LayerPlan>) -> Self {
        let layers = layers.map(LayerMemory::new).collect();
        KvCache { layers, len: 0, kept: 0, most: plan.max_context, device: None }
    }

    /// Makes room for no more than `positions` at a time, where an accelerator keeps the rows.
    #[must_use]
    pub fn with_most(self, positions: usize) -> Self {
        KvCache { most: positions, ..self }
    }

    pub(crate) fn most(&self) -> usize {
        self.most
    }

    pub(crate) fn device(&mut self) -> &mut Option<DeviceCache> {
        &mut self.device
    }

    /// Positions that are part of the sequence.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was computed yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Forgets positions from `len` on; returns how many it has afterwards. Memory is kept for what comes next.
    ///
    /// These are `len` (or as many as there were, if fewer) for layers that keep rows. A recurrent state
    /// cannot be taken back to any position: with such layers they are as many as a kept copy of the states
    /// knows, or none, and what is missing up to `len` must be computed again.
    #[must_use = "recurrent layers may have to forget more than was asked for"]
    pub fn truncate(&mut self, len: usize) -> usize {
        if len >= self.len {
            return self.len;
        }
        if !self.is_recurrent() {
            self.len = len;
            return len;
        }
        let kept = self.kept <= len;
        self.states().for_each(|state| if kept { state.restore() } else { state.clear() });
        self.kept = if kept { self.kept } else { 0 };
        self.len = self.kept;
        self.len
    }

    fn is_recurrent(&self) -> bool {
        self.layers.iter().any(|layer| layer.state.is_some())
    }

    fn states(&mut self) -> impl Iterator<Item = &mut Recurrent> {
        self.layers.iter_mut().filter_map(|layer| layer.state.as_mut())
    }

    /// Refuses rows (`sequence` of a step) that do not follow one another from the end of what is there:
    /// a recurrent state knows one position only. Layers that keep rows may be told any position.
    pub(crate) fn check(&self, sequence: usize, rows: &[Row]) -> Result<(), ModelError> {
        if !self.is_recurrent() {
            return Ok(());
        }
        let own = rows.iter().filter(|row| row.sequence == sequence);
        for (wanted, row) in (self.len..).zip(own) {
            if row.position as usize != wanted {
                return Err(ModelError::NotNext { position: row.position, wanted });
            }
        }
        Ok(())
    }

    /// The rows of a step (this cache is that of `sequence`) are part of the sequence from now on. Where they are
    /// of a prompt, the states from before are kept: a later prompt that goes another way does so near there.
    pub(crate) fn commit(&mut self, sequence: usize, rows: &[Row]) {
        let mut own = rows.iter().filter(|row| row.sequence == sequence).peekable();
        if own.peek().is_none() {
            return;
        }
        let before = self.len;
        let mut prompt = false;
        for row in own {
            self.len = self.len.max(row.position as usize + 1);
            prompt |= row.phase == Phase::Prompt;
        }
        self.states().for_each(|state| state.commit(prompt));
        if prompt {
            self.kept = before;
        }
    }

    pub(crate) fn streams(&self, layer: usize) -> &[Stream] {
        &self.layers[layer].streams
    }

    pub(crate) fn streams_mut(&mut self, layer: usize) -> &mut [Stream] {
        &mut self.layers[layer].streams
    }

    /// The state of a recurrent layer before this step; `None` of a layer that keeps rows.
    pub(crate) fn state(&self, layer: usize) -> Option<&State> {
        self.layers[layer].state.as_ref().map(Recurrent::committed)
    }

    /// The same with the place for the state after this step, whose numbers mean nothing yet.
    pub(crate) fn step_state(&mut self, layer: usize) -> Option<(&State, &mut State)> {
        self.layers[layer].state.as_mut().map(Recurrent::step)
    }

    /// Bytes that a sequence of `positions` positions takes for a plan, whole pages and all copies of recurrent
    /// states counted.
    pub fn bytes_for(plan: &Plan, positions: usize) -> u64 {
        let pages = positions.div_ceil(PAGE) as u64;
        let rows = (plan.kv_floats_per_token() as u64 * 4 * PAGE as u64).saturating_mul(pages);
        rows.saturating_add(plan.state_bytes().saturating_mul(Recurrent::COPIES))
    }
}

#[cfg(test)]
mod tests;
