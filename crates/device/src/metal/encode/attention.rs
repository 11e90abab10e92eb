//! Launches of attention and of the choice of positions.

use metaltail_kernels::{Attend, ComputeError, Extent, Select, View};

use super::{Grid, ROW_SIMDS, SIMD};
use crate::metal::launch::Launch;
use crate::metal::layout::{narrow, words};

/// Heads that read a position together, as the kernels declare it.
const HEADS: u32 = 4;

/// SIMD groups that share the positions of a mix, as the kernels declare it.
const SLICES: u32 = 8;

/// Threads of a softmax and of a choice: the same for any number of positions, since the order of sums depends on it.
const ROW_THREADS: u32 = 256;

/// Of an `AttentionRow`: it has no list.
const NO_LIST: u32 = u32::MAX;

/// Some rows of an attention, and where their intermediates lie.
pub(in crate::metal) struct Attention<'a> {
    /// All of it.
    pub(in crate::metal) whole: &'a Attend,
    /// The first row of this block.
    pub(in crate::metal) first: usize,
    /// The rows' counts.
    pub(in crate::metal) counts: &'a [u32],
    /// The entry of `kv_b`.
    pub(in crate::metal) kv_b: &'a [u8],
    /// Rows × heads × (latent + rope).
    pub(in crate::metal) absorbed: View,
    /// Rows × heads × span.
    pub(in crate::metal) scores: View,
    /// Rows × heads × latent.
    pub(in crate::metal) mixed: View,
}

impl Attention<'_> {
    /// An `AttentionRow` each: how many positions, and where their list begins.
    fn table(&self) -> Result<Vec<u8>, ComputeError> {
        let mut table = Vec::with_capacity(2 * self.counts.len());
        for (row, &count) in self.counts.iter().enumerate() {
            let listed = self.whole.lists.filter(|_| (count as usize) < self.whole.positions);
            let first =
                listed.map(|lists| narrow("positions of all lists", row * lists.top_k)).transpose()?;
            table.extend([count, first.unwrap_or(NO_LIST)]);
        }
        Ok(words(&table))
    }

    /// The lists of these rows.
    fn lists(&self) -> Result<Option<Extent>, ComputeError> {
        let lists = self.whole.lists;
        let of_rows = |top_k| self.counts.len() * top_k;
        lists
            .map(|lists| lists.chosen.plus(self.first * lists.top_k).extent(of_rows(lists.top_k)))
            .transpose()
    }
}

/// A kernel that reads positions, or stands without them.
fn with_lists(launch: Launch, lists: Option<Extent>, stand_in: View) -> Launch {
    match lists {
        Some(lists) => launch.reads(lists),
        None => launch.stand_in(stand_in.buffer),
    }
}

/// The five launches of an attention, one behind the other. What they touch was checked by [`Attend`]'s footprint.
pub(in crate::metal) fn attend(grid: Grid, of: &Attention<'_>) -> Result<[Launch; 5], ComputeError> {
    let size = |number| narrow("a size of an attention", number);
    let Attend { heads, nope, rope, value, scale, queries, keys, positions, out, .. } = *of.whole;
    let (n, lora) = (of.counts.len(), of.whole.lora());
    let (query, width) = (nope + rope, lora + rope);
    let span = of.counts.iter().copied().max().unwrap_or(0);
    let (rows, of_heads) = (size(n)?, size(heads)?);
    let values = size(heads.saturating_mul(value))?;
    // Kernels count rows × heads, and rows of kv_b, in 32 bits.
    let both = size(n.saturating_mul(heads))?;
    size(of.whole.kv_b.layout.rows())?;
    let parameters =
        words(&[rows, of_heads, size(nope)?, size(rope)?, size(value)?, size(lora)?, span, scale.to_bits()]);
    let table = of.table()?;
    let queries = queries.plus(of.first * heads * query).extent(n * heads * query)?;
    let keys = keys.extent(positions * width)?;
    let absorbed = of.absorbed.extent(n * heads * width)?;
    let scores = of.scores.extent((n * heads).saturating_mul(span as usize))?;
    let mixed = of.mixed.extent(n * heads * lora)?;
    let out = out.plus(of.first * heads * value).extent(n * heads * value)?;
    let lists = of.lists()?;
    let tile = if rows == 1 { 1 } else { 4 };
    let head_tiles = grid.cap(rows.saturating_mul(of_heads.div_ceil(HEADS)));
    // A thread takes eight columns of a latent.
    let eights = size(lora)?.div_ceil(8).max(size(rope)?);
    let absorb_groups = [grid.cap(eights.div_ceil(2 * SIMD)), grid.cap(of_heads)];
    let absorb = Launch::new(format!("mla_absorb_{tile}"), absorb_groups, 2 * SIMD);
    let absorb = absorb.given(of.kv_b.to_vec()).reads(queries).writes(absorbed);
    let score_groups = [grid.cap(span.div_ceil(ROW_SIMDS)), head_tiles];
    let score = Launch::new("mla_scores", score_groups, ROW_SIMDS * SIMD);
    let score = score.reads(absorbed).reads(keys).given(table.clone());
    let score = with_lists(score, lists, of.scores).writes(scores);
    let softmax = Launch::new("mla_softmax", [grid.cap(both), 1], ROW_THREADS);
    let softmax = softmax.changes(scores).given(table.clone());
    let mix = Launch::new("mla_mix", [grid.cap(size(lora)?.div_ceil(SIMD)), head_tiles], SLICES * SIMD);
    let mix = with_lists(mix.reads(scores).reads(keys).given(table), lists, of.scores).writes(mixed);
    let value_groups = grid.rows(values, rows.div_ceil(tile));
    let make = Launch::new(format!("mla_values_{tile}"), value_groups, ROW_SIMDS * SIMD);
    let make = make.given(of.kv_b.to_vec()).reads(mixed).writes(out);
    Ok([absorb, score, softmax, mix, make].map(|launch| launch.given(parameters.clone())))
}

/// Scores, then the choice, of the rows from `first` on. `scores` are rows × span.
pub(in crate::metal) fn select(
    grid: Grid,
    select: &Select,
    first: usize,
    counts: &[u32],
    scores: View,
) -> Result<[Launch; 2], ComputeError> {
    let size = |number| narrow("a size of an indexer", number);
    let Select { heads, dim, top_k, queries, weights, keys, chosen, .. } = *select;
    let (n, span) = (counts.len(), counts.iter().copied().max().unwrap_or(0));
    let rows = size(n)?;
    size(n.saturating_mul(heads))?;
    let parameters = words(&[
        rows,
        size(heads)?,
        size(dim)?,
        size(top_k)?,
        span,
        (dim as f32).powf(-0.5).to_bits(),
        (heads as f32).powf(-0.5).to_bits(),
    ]);
    let table = words(counts);
    let of_rows = |view: View, width: usize| view.plus(first * width).extent(n * width);
    let scores = scores.extent(n.saturating_mul(span as usize))?;
    let groups = [grid.cap(span.div_ceil(ROW_SIMDS)), grid.cap(rows)];
    let score = Launch::new("select_scores", groups, ROW_SIMDS * SIMD);
    let score = score.reads(of_rows(queries, heads * dim)?).reads(of_rows(weights, heads)?);
    let score = score.reads(keys.extent(span as usize * dim)?).given(table.clone()).writes(scores);
    let top = Launch::new("select_top", [grid.cap(rows), 1], ROW_THREADS);
    let top = top.reads(scores).given(table).writes(of_rows(chosen, top_k)?);
    Ok([score, top].map(|launch| launch.given(parameters.clone())))
}
