//! Launches of attention and of the choice of positions.

use super::{Grid, ROW_SIMDS, SIMD};
use crate::kernels::{Indexer, KernelError, LatentAttention};
use crate::metal::launch::{Argument, Launch};
use crate::metal::layout::{narrow, words};

/// Heads that read a position together, as the kernels declare it.
const HEADS: u32 = 4;

/// SIMD groups that share the positions of a mix, as the kernels declare it.
const SLICES: u32 = 8;

/// Threads of a softmax and of a choice: the same for any number of positions, since the order of sums depends on it.
const ROW_THREADS: u32 = 256;

/// Buffers of an attention.
pub(in crate::metal) struct AttentionBuffers<'a, B> {
    /// A `Matrix`.
    pub(in crate::metal) kv_b: &'a B,
    pub(in crate::metal) queries: &'a B,
    pub(in crate::metal) keys: &'a B,
    /// An `AttentionRow` each.
    pub(in crate::metal) rows: &'a B,
    /// Positions of all rows that have lists.
    pub(in crate::metal) lists: &'a B,
    /// Rows × heads × (latent + rope).
    pub(in crate::metal) absorbed: &'a B,
    /// Rows × heads × span.
    pub(in crate::metal) scores: &'a B,
    /// Rows × heads × latent.
    pub(in crate::metal) mixed: &'a B,
    pub(in crate::metal) out: &'a B,
}

/// A kernel whose parameters come behind its buffers.
fn launch_of<'a, B>(
    kernel: &str,
    buffers: &[&'a B],
    parameters: &[u8],
    groups: [u32; 2],
    threads: u32,
) -> Launch<'a, B> {
    let bound = buffers.iter().zip(0u32..).map(|(buffer, index)| Argument::Buffer(index, *buffer, 0));
    let parameters = Argument::Bytes(buffers.len() as u32, parameters.to_vec());
    Launch { kernel: kernel.into(), arguments: bound.chain([parameters]).collect(), groups, threads }
}

/// The five launches of an attention, one behind the other.
pub(in crate::metal) fn attend<'a, B>(
    grid: Grid,
    attention: &LatentAttention<'_>,
    buffers: &AttentionBuffers<'a, B>,
) -> Result<[Launch<'a, B>; 5], KernelError> {
    let size = |number| narrow("a size of an attention", number);
    let (rows, heads) = (size(attention.rows.len())?, size(attention.heads)?);
    let (lora, span, rope) = (size(attention.lora())?, size(attention.span())?, size(attention.rope)?);
    let values = size(attention.heads.saturating_mul(attention.value))?;
    // Kernels count rows × heads, and rows of kv_b, in 32 bits.
    let both = size(attention.rows.len().saturating_mul(attention.heads))?;
    size(attention.kv_b.layout().rows())?;
    let parameters = words(&[
        rows,
        heads,
        size(attention.nope)?,
        rope,
        size(attention.value)?,
        lora,
        span,
        attention.scale.to_bits(),
    ]);
    let tile = if rows == 1 { 1 } else { 4 };
    let head_tiles = grid.cap(rows.saturating_mul(heads.div_ceil(HEADS)));
    let launch =
        |kernel: &str, from: &[&'a B], groups, threads| launch_of(kernel, from, &parameters, groups, threads);
    let b = buffers;
    // A thread takes eight columns of a latent.
    let eights = lora.div_ceil(8).max(rope);
    Ok([
        launch(
            &format!("mla_absorb_{tile}"),
            &[b.kv_b, b.queries, b.absorbed],
            [grid.cap(eights.div_ceil(2 * SIMD)), grid.cap(heads)],
            2 * SIMD,
        ),
        launch(
            "mla_scores",
            &[b.absorbed, b.keys, b.rows, b.lists, b.scores],
            [grid.cap(span.div_ceil(ROW_SIMDS)), head_tiles],
            ROW_SIMDS * SIMD,
        ),
        launch("mla_softmax", &[b.scores, b.rows], [grid.cap(both), 1], ROW_THREADS),
        launch(
            "mla_mix",
            &[b.scores, b.keys, b.rows, b.lists, b.mixed],
            [grid.cap(lora.div_ceil(SIMD)), head_tiles],
            SLICES * SIMD,
        ),
        launch(
            &format!("mla_values_{tile}"),
            &[b.kv_b, b.mixed, b.out],
            grid.rows(values, rows.div_ceil(tile)),
            ROW_SIMDS * SIMD,
        ),
    ])
}

/// Scores, then the choice. Buffers: queries, weights, keys, counts, scores (rows × span), chosen (rows × top_k).
pub(in crate::metal) fn select<'a, B>(
    grid: Grid,
    indexer: &Indexer<'_>,
    [queries, weights, keys, counts, scores, chosen]: [&'a B; 6],
) -> Result<[Launch<'a, B>; 2], KernelError> {
    let size = |number| narrow("a size of an indexer", number);
    let (rows, span) = (size(indexer.counts.len())?, size(indexer.span())?);
    size(indexer.counts.len().saturating_mul(indexer.heads))?;
    let parameters = words(&[
        rows,
        size(indexer.heads)?,
        size(indexer.dim)?,
        size(indexer.top_k)?,
        span,
        (indexer.dim as f32).powf(-0.5).to_bits(),
        (indexer.heads as f32).powf(-0.5).to_bits(),
    ]);
    let launch =
        |kernel: &str, from: &[&'a B], groups, threads| launch_of(kernel, from, &parameters, groups, threads);
    Ok([
        launch(
            "select_scores",
            &[queries, weights, keys, counts, scores],
            [grid.cap(span.div_ceil(ROW_SIMDS)), grid.cap(rows)],
            ROW_SIMDS * SIMD,
        ),
        launch("select_top", &[scores, counts, chosen], [grid.cap(rows), 1], ROW_THREADS),
    ])
}
