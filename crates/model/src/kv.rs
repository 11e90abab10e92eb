//! The key-value cache of one sequence.
//!
//! Each layer keeps one or two streams of rows (latents and indexer keys, or keys and values), a
//! row a position, in pages so that growth moves nothing. Rows beyond [`KvCache::len`] are not
//! part of the sequence: a cancelled step leaves the length as it was.

use crate::accelerated::DeviceCache;
use crate::plan::{LayerPlan, Plan};

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

/// Everything that one sequence remembers.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<Vec<Stream>>,
    len: usize,
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
        let streams = |layer: &LayerPlan| {
            let widths = layer.attention.kv_streams();
            widths.into_iter().map(|width| Stream { width, pages: Vec::new() }).collect()
        };
        let layers = layers.map(streams).collect();
        KvCache { layers, len: 0, most: plan.max_context, device: None }
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

    /// Forgets positions from `len` on. Their memory is kept for what comes next.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    pub(crate) fn commit(&mut self, len: usize) {
        self.len = self.len.max(len);
    }

    pub(crate) fn streams(&self, layer: usize) -> &[Stream] {
        &self.layers[layer]
    }

    pub(crate) fn streams_mut(&mut self, layer: usize) -> &mut [Stream] {
        &mut self.layers[layer]
    }

    /// Bytes that `positions` positions take for a plan, whole pages counted.
    pub fn bytes_for(plan: &Plan, positions: usize) -> u64 {
        let pages = positions.div_ceil(PAGE) as u64;
        (plan.kv_floats_per_token() as u64 * 4 * PAGE as u64).saturating_mul(pages)
    }
}
