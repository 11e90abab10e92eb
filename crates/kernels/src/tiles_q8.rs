//! The integer path: tiles of 4 matrix rows × up to 4 quantised inputs held in registers.
//!
//! One step takes 64 columns: 16 exact integer dot products of four columns each, one a lane, then
//! one fused multiply-add with (weight scale · activation scale).
#![allow(clippy::needless_range_loop, reason = "a tile indexes several arrays by the same row and input")]

use std::ops::Range;

use metaltail_quant::{ACTIVATION_BLOCK, Format};

use crate::job::Q8Job;
use crate::simd::Dot64;
use crate::tiles::{INPUT_BYTES, TILE_ROWS, read_scale, tile_rows};

/// One scale a row, applied at the end.
const PER_ROW: u8 = 0;
/// Groups of whole blocks of 64 columns: one scale a block.
const PER_BLOCK: u8 = 1;
/// Other groups (multiples of 16): a scale for each quarter of a block.
const PER_QUARTER: u8 = 2;

/// Does rows `rows` of `job`, a matrix of int8 or int4.
///
/// # Safety
/// The processor has the instruction set of `S`; `rows` lie in the matrix and belong to this task
/// alone.
#[inline(always)]
pub(crate) unsafe fn matmul<S: Dot64>(job: &Q8Job<'_>, rows: Range<usize>) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match job.m.layout().format() {
            Format::Int8Row => blocks::<S, true, PER_ROW>(job, rows),
            Format::Int4Row => blocks::<S, false, PER_ROW>(job, rows),
            Format::Int4Group(g) if g % 64 == 0 => blocks::<S, false, PER_BLOCK>(job, rows),
            Format::Int4Group(_) => blocks::<S, false, PER_QUARTER>(job, rows),
            _ => crate::scalar::matmul_q8(job, rows),
        }
    }
}

/// Inputs in blocks that stay in cache, rows in tiles, inputs in tiles of 4, 2 and 1.
///
/// # Safety
/// As [`matmul`].
#[inline(always)]
unsafe fn blocks<S: Dot64, const BYTES: bool, const SCALES: u8>(job: &Q8Job<'_>, rows: Range<usize>) {
    let block = (INPUT_BYTES / job.m.layout().cols()).max(4);
    for first in (0..job.n).step_by(block) {
        let last = job.n.min(first + block);
        for row in rows.clone().step_by(TILE_ROWS) {
            let end = rows.end.min(row + TILE_ROWS);
            let mut i = first;
            // SAFETY: the caller's promise; `i + N <= last <= n`.
            unsafe {
                while i + 4 <= last {
                    tile::<S, BYTES, SCALES, 4>(job, row..end, i);
                    i += 4;
                }
                if i + 2 <= last {
                    tile::<S, BYTES, SCALES, 2>(job, row..end, i);
                    i += 2;
                }
                if i < last {
                    tile::<S, BYTES, SCALES, 1>(job, row..end, i);
                }
            }
        }
    }
}

/// The inputs of a tile: where each one's bytes, offsets and scales begin.
#[derive(Clone, Copy)]
pub(crate) struct Input {
    pub values: *const i8,
    pub offsets: *const i32,
    pub scales: *const f32,
}

/// Inputs `i..i + N` of a job.
#[inline(always)]
pub(crate) fn inputs<const N: usize>(job: &Q8Job<'_>, i: usize) -> [Input; N] {
    let mut inputs =
        [Input { values: std::ptr::null(), offsets: std::ptr::null(), scales: std::ptr::null() }; N];
    for (n, input) in inputs.iter_mut().enumerate() {
        let row = job.x_rows.at(i + n);
        *input = Input {
            values: job.x.values(row).as_ptr(),
            offsets: job.x.offsets(row).as_ptr(),
            scales: job.x.scales(row).as_ptr(),
        };
    }
    inputs
}

/// Rows `rows` (at most 4) × inputs `i..i + N`.
///
/// # Safety
/// As [`matmul`]; `rows` is not empty and `i + N <= job.n`.
#[inline(always)]
unsafe fn tile<S: Dot64, const BYTES: bool, const SCALES: u8, const N: usize>(
    job: &Q8Job<'_>,
    rows: Range<usize>,
    i: usize,
) {
    let layout = job.m.layout();
    let (cols, block_bytes) = (layout.cols(), if BYTES { 64 } else { 32 });
    let (weights, scales) = tile_rows(job.m, &rows);
    let inputs = inputs::<N>(job, i);
    let ahead = TILE_ROWS * layout.row_bytes();
    let mut groups = Groups::new(job.m.scale_span().unwrap_or(cols), layout.scale_cols());

    // SAFETY: activations are padded to whole blocks; weights of whole blocks lie inside the row and
    // those of the last, partial block are copied to a buffer of 64 bytes; `groups` stays below the
    // number of scales of a row.
    unsafe {
        let mut sums = [[S::zero(); N]; TILE_ROWS];
        let whole = cols / ACTIVATION_BLOCK;
        for block in 0..whole {
            let at = groups.next::<SCALES>();
            for r in 0..TILE_ROWS {
                let p = weights[r].add(block * block_bytes);
                S::prefetch(p.wrapping_add(ahead));
                step::<S, BYTES, SCALES, N>(load::<S, BYTES>(p), scales[r], at, &inputs, block, &mut sums[r]);
            }
        }
        if whole * ACTIVATION_BLOCK < cols {
            let at = groups.next::<SCALES>();
            let bytes = layout.row_bytes() - whole * block_bytes;
            for r in 0..TILE_ROWS {
                let partial = std::slice::from_raw_parts(weights[r].add(whole * block_bytes), bytes);
                step::<S, BYTES, SCALES, N>(
                    load_partial::<S, BYTES>(partial),
                    scales[r],
                    at,
                    &inputs,
                    whole,
                    &mut sums[r],
                );
            }
        }
        for (r, row) in rows.enumerate() {
            for n in 0..N {
                let value = sums[r][n].reduce();
                job.store(
                    i + n,
                    row,
                    if SCALES == PER_ROW { value * read_scale(scales[r], 0) } else { value },
                );
            }
        }
    }
}

/// One row's 64 columns against every input of the tile.
///
/// # Safety
/// As [`crate::simd::Simd`]; `at` are scales of the row, `block` is a block of the inputs.
#[inline(always)]
unsafe fn step<S: Dot64, const BYTES: bool, const SCALES: u8, const N: usize>(
    weights: S::Bytes,
    scales: *const u8,
    at: [usize; 4],
    inputs: &[Input; N],
    block: usize,
    sums: &mut [S; N],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let scale = match SCALES {
            PER_ROW => S::splat(1.0),
            PER_BLOCK => S::splat(read_scale(scales, at[0])),
            _ => S::quarters([
                read_scale(scales, at[0]),
                read_scale(scales, at[1]),
                read_scale(scales, at[2]),
                read_scale(scales, at[3]),
            ]),
        };
        for n in 0..N {
            let x = inputs[n].values.add(block * ACTIVATION_BLOCK);
            let offsets = inputs[n].offsets.add(block * 16);
            let dots =
                if BYTES { S::dot_bytes(weights, x, offsets) } else { S::dot_nibbles(weights, x, offsets) };
            let x_scale = S::splat(*inputs[n].scales.add(block));
            let factor = if SCALES == PER_ROW { x_scale } else { scale.mul(x_scale) };
            sums[n] = dots.fma(factor, sums[n]);
        }
    }
}

/// Which scale each quarter of the next block takes, found by counting: a division for each block
/// would cost more than its products.
struct Groups {
    /// Quarters (of 16 columns) in a group.
    size: usize,
    /// Scales of a row.
    count: usize,
    group: usize,
    quarter: usize,
}

impl Groups {
    fn new(span: usize, count: usize) -> Groups {
        Groups { size: span / 16, count, group: 0, quarter: 0 }
    }

    /// Quarters past the end of the row take the last scale.
    #[inline(always)]
    fn next<const SCALES: u8>(&mut self) -> [usize; 4] {
        let mut at = [0; 4];
        match SCALES {
            PER_ROW => {}
            PER_BLOCK => {
                at = [self.group; 4];
                self.advance(4);
            }
            _ => {
                for at in &mut at {
                    *at = self.group.min(self.count - 1);
                    self.advance(1);
                }
            }
        }
        at
    }

    #[inline(always)]
    fn advance(&mut self, quarters: usize) {
        self.quarter += quarters;
        if self.quarter == self.size {
            self.quarter = 0;
            self.group += 1;
        }
    }
}

/// 64 weights.
///
/// # Safety
/// As [`crate::simd::Simd`]; `p` is readable for 64 (or, of nibbles, 32) bytes.
#[inline(always)]
unsafe fn load<S: Dot64, const BYTES: bool>(p: *const u8) -> S::Bytes {
    // SAFETY: the caller's promise.
    unsafe { if BYTES { S::load_bytes(p) } else { S::load_nibbles(p) } }
}

/// Fewer than 64 weights, then zero bytes, which meet activations that are zero.
///
/// # Safety
/// As [`crate::simd::Simd`].
#[inline(always)]
unsafe fn load_partial<S: Dot64, const BYTES: bool>(weights: &[u8]) -> S::Bytes {
    let mut buffer = [0u8; 64];
    buffer[..weights.len()].copy_from_slice(weights);
    // SAFETY: the buffer holds 64 bytes.
    unsafe { load::<S, BYTES>(buffer.as_ptr()) }
}
