//! The `f32` path: tiles of 4 matrix rows × up to 4 inputs held in registers.
//!
//! A weight vector is decoded once for all inputs of a tile. Each (row, input) has accumulators of
//! its own and meets its columns in the same order in a tile of any width, so its bits do not
//! depend on the tile.
#![allow(clippy::needless_range_loop, reason = "a tile indexes several arrays by the same row and input")]

use std::ops::Range;

use metaltail_quant::{Format, MatrixRef};

use crate::job::FloatJob;
use crate::simd::{Bf16, F16, F32, Fp8, I4, I8, Simd, Stored};

/// Rows of a tile. A tile that overhangs repeats its last row and drops the results.
pub(crate) const TILE_ROWS: usize = 4;
/// Bytes of inputs that one pass over the rows of a task should find in the second-level cache.
pub(crate) const INPUT_BYTES: usize = 512 << 10;

/// Does rows `rows` of `job`.
///
/// # Safety
/// The processor has the instruction set of `S`; `rows` lie in the matrix and belong to this task
/// alone.
#[inline(always)]
pub(crate) unsafe fn matmul<S: Simd>(job: &FloatJob<'_>, rows: Range<usize>) {
    // SAFETY: the caller's promise, passed on; the format decides the encoding.
    unsafe {
        match job.m.layout().format() {
            Format::F32 => blocks::<S, F32, false>(job, rows),
            Format::F16 => blocks::<S, F16, false>(job, rows),
            Format::Bf16 => blocks::<S, Bf16, false>(job, rows),
            Format::Int8Row => blocks::<S, I8, false>(job, rows),
            Format::Int4Row => blocks::<S, I4, false>(job, rows),
            Format::Int4Group(_) => blocks::<S, I4, true>(job, rows),
            Format::Fp8Block => blocks::<S, Fp8, true>(job, rows),
            _ => crate::scalar::matmul(job, rows),
        }
    }
}

/// Inputs in blocks that stay in cache, rows in tiles, inputs in tiles of 4, 2 and 1.
///
/// # Safety
/// As [`matmul`].
#[inline(always)]
unsafe fn blocks<S: Simd, W: Stored, const GROUPED: bool>(job: &FloatJob<'_>, rows: Range<usize>) {
    let block = (INPUT_BYTES / (job.m.layout().cols() * 4)).max(4);
    for first in (0..job.n).step_by(block) {
        let last = job.n.min(first + block);
        for row in rows.clone().step_by(TILE_ROWS) {
            let end = rows.end.min(row + TILE_ROWS);
            let mut i = first;
            // SAFETY: the caller's promise; `i + N <= last <= n`.
            unsafe {
                while i + 4 <= last {
                    tile::<S, W, GROUPED, 4>(job, row..end, i);
                    i += 4;
                }
                if i + 2 <= last {
                    tile::<S, W, GROUPED, 2>(job, row..end, i);
                    i += 2;
                }
                if i < last {
                    tile::<S, W, GROUPED, 1>(job, row..end, i);
                }
            }
        }
    }
}

/// Rows `rows` (at most 4) × inputs `i..i + N`.
///
/// # Safety
/// As [`matmul`]; `rows` is not empty and `i + N <= job.n`.
#[inline(always)]
unsafe fn tile<S: Simd, W: Stored, const GROUPED: bool, const N: usize>(
    job: &FloatJob<'_>,
    rows: Range<usize>,
    i: usize,
) {
    let layout = job.m.layout();
    let (cols, row_bytes) = (layout.cols(), layout.row_bytes());
    let group = if GROUPED { job.m.scale_span().unwrap_or(cols) } else { cols };
    let (weights, scales) = tile_rows(job.m, &rows);
    let mut x = [std::ptr::null::<f32>(); N];
    for (n, x) in x.iter_mut().enumerate() {
        *x = job.x.row(job.x_rows.at(i + n)).as_ptr();
    }

    // SAFETY: weights and inputs hold `cols` columns and each row has one scale for each group; whole
    // vectors stay below `end`, and the tail is copied to buffers.
    unsafe {
        let mut sums = [[S::zero(); N]; TILE_ROWS];
        let (mut start, mut g) = (0, 0);
        while start < cols {
            let end = cols.min(start + group);
            let mut part = [[S::zero(); N]; TILE_ROWS];
            let mut c = start;
            while c + 16 <= end {
                let mut xs = [S::zero(); N];
                for n in 0..N {
                    xs[n] = S::load_f32(x[n].add(c).cast());
                }
                for r in 0..TILE_ROWS {
                    let p = weights[r].add(c / 16 * W::BYTES);
                    S::prefetch(p.wrapping_add(TILE_ROWS * row_bytes));
                    let w = W::load::<S>(p);
                    for n in 0..N {
                        part[r][n] = w.fma(xs[n], part[r][n]);
                    }
                }
                c += 16;
            }
            if c < end {
                tail::<S, W, N>(weights, x, c..cols, row_bytes, &mut part);
            }
            for r in 0..TILE_ROWS {
                for n in 0..N {
                    sums[r][n] = if GROUPED {
                        part[r][n].fma(S::splat(read_scale(scales[r], g)), sums[r][n])
                    } else {
                        part[r][n]
                    };
                }
            }
            (start, g) = (end, g + 1);
        }
        let per_row = !GROUPED && layout.scale_cols() > 0;
        for (r, row) in rows.enumerate() {
            for n in 0..N {
                let value = sums[r][n].reduce();
                job.store(i + n, row, if per_row { value * read_scale(scales[r], 0) } else { value });
            }
        }
    }
}

/// Where the weights and the scales of a tile's rows begin.
#[inline(always)]
pub(crate) fn tile_rows(
    m: MatrixRef<'_>,
    rows: &Range<usize>,
) -> ([*const u8; TILE_ROWS], [*const u8; TILE_ROWS]) {
    let mut weights = [std::ptr::null(); TILE_ROWS];
    let mut scales = weights;
    for r in 0..TILE_ROWS {
        let row = (rows.start + r).min(rows.end - 1);
        weights[r] = m.row_weight_bytes(row).as_ptr();
        scales[r] = m.row_scale_bytes(row).as_ptr();
    }
    (weights, scales)
}

/// Scale number `i` of a row (scales are little-endian, as are the machines with an implementation).
///
/// # Safety
/// The row has more than `i` scales.
#[inline(always)]
pub(crate) unsafe fn read_scale(scales: *const u8, i: usize) -> f32 {
    // SAFETY: the caller's promise; any alignment.
    unsafe { scales.add(4 * i).cast::<f32>().read_unaligned() }
}

/// The columns `tail`, fewer than 16, to the end of the row; the first is a multiple of 16.
///
/// # Safety
/// As [`Simd`]; weights hold `row_bytes`, inputs `tail.end` numbers.
#[inline(always)]
unsafe fn tail<S: Simd, W: Stored, const N: usize>(
    weights: [*const u8; TILE_ROWS],
    x: [*const f32; N],
    tail: Range<usize>,
    row_bytes: usize,
    part: &mut [[S; N]; TILE_ROWS],
) {
    let mut inputs = [[0.0f32; 16]; N];
    // SAFETY: the caller's promise; buffers hold 16 numbers.
    unsafe {
        for n in 0..N {
            inputs[n][..tail.len()]
                .copy_from_slice(std::slice::from_raw_parts(x[n].add(tail.start), tail.len()));
        }
        for r in 0..TILE_ROWS {
            let w = load_tail::<S, W>(std::slice::from_raw_parts(weights[r], row_bytes), tail.start);
            for n in 0..N {
                part[r][n] = w.fma_first(S::load_f32(inputs[n].as_ptr().cast()), part[r][n], tail.len());
            }
        }
    }
}

/// The last columns of a row, from column `c` (a multiple of 16), with zero bytes after them.
#[inline(always)]
pub(crate) fn load_tail<S: Simd, W: Stored>(row: &[u8], c: usize) -> S {
    let bytes = &row[c / 16 * W::BYTES..];
    let mut buffer = [0u8; 64];
    buffer[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: the buffer holds at least `W::BYTES` bytes; `S` runs here because the caller runs it.
    unsafe { W::load(buffer.as_ptr()) }
}

/// Lane sums of two slices of equal length: the dot product before it is folded.
///
/// # Safety
/// The processor has the instruction set of `S`.
#[inline(always)]
pub(crate) unsafe fn dot<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    let (a_whole, a_tail) = a.as_chunks::<16>();
    let (b_whole, b_tail) = b.as_chunks::<16>();
    // SAFETY: chunks and buffers hold 16 numbers.
    unsafe {
        let mut sum = S::zero();
        for (a, b) in a_whole.iter().zip(b_whole) {
            sum = S::load_f32(a.as_ptr().cast()).fma(S::load_f32(b.as_ptr().cast()), sum);
        }
        if !a_tail.is_empty() {
            let (a, b) = (padded(a_tail), padded(b_tail));
            sum = S::load_f32(a.as_ptr().cast()).fma_first(S::load_f32(b.as_ptr().cast()), sum, a_tail.len());
        }
        sum.reduce()
    }
}

/// out = fma(alpha, x, out).
///
/// # Safety
/// The processor has the instruction set of `S`.
#[inline(always)]
pub(crate) unsafe fn axpy<S: Simd>(alpha: f32, x: &[f32], out: &mut [f32]) {
    let (x_whole, x_tail) = x.as_chunks::<16>();
    let (out_whole, out_tail) = out.as_chunks_mut::<16>();
    // SAFETY: chunks and buffers hold 16 numbers.
    unsafe {
        let factor = S::splat(alpha);
        for (x, o) in x_whole.iter().zip(out_whole) {
            factor
                .fma(S::load_f32(x.as_ptr().cast()), S::load_f32(o.as_ptr().cast()))
                .store(o.as_mut_ptr().cast());
        }
        if !x_tail.is_empty() {
            let (x, mut o) = (padded(x_tail), padded(out_tail));
            factor
                .fma(S::load_f32(x.as_ptr().cast()), S::load_f32(o.as_ptr().cast()))
                .store(o.as_mut_ptr().cast());
            out_tail.copy_from_slice(&o[..out_tail.len()]);
        }
    }
}

/// Fewer than 16 numbers, then zeros.
#[inline(always)]
fn padded(values: &[f32]) -> [f32; 16] {
    let mut buffer = [0.0; 16];
    buffer[..values.len()].copy_from_slice(values);
    buffer
}
