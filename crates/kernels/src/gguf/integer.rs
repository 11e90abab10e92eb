//! The integer path: tiles of 4 matrix rows × up to 4 quantised inputs.
#![allow(clippy::needless_range_loop, reason = "a tile indexes several arrays by the same row and input")]

use std::marker::PhantomData;
use std::ops::Range;

use metaltail_quant::{ACTIVATION_BLOCK, QuantizedRows};

use super::unpack::{Blocks, Scales};
use super::{Tile, in_tiles, prefetch};
use crate::job::{Job, Q8Job};
use crate::simd::Codes64;
use crate::tiles::{TILE_ROWS, tile_rows};
use crate::tiles_q8::{Input, inputs};

/// Does rows `rows` of `job`.
///
/// # Safety
/// The processor has the instruction set of `S`; `rows` lie in the matrix, which is of the format `B`, and
/// belong to this task alone.
#[inline(always)]
pub(crate) unsafe fn matmul<S: Codes64, B: Blocks>(job: &Q8Job<'_>, rows: Range<usize>) {
    // SAFETY: the caller's promise, passed on.
    unsafe { in_tiles::<_, Integer<S, B>>(job, rows, job.m.layout().cols()) }
}

/// The tile of this path.
struct Integer<S, B>(PhantomData<(S, B)>);

impl<'x, S: Codes64, B: Blocks> Tile<&'x QuantizedRows> for Integer<S, B> {
    #[inline(always)]
    unsafe fn run<const N: usize>(job: &Job<'_, &'x QuantizedRows>, rows: Range<usize>, i: usize) {
        let layout = job.m.layout();
        let (cols, ahead) = (layout.cols(), TILE_ROWS * layout.row_bytes());
        let (weights, _) = tile_rows(job.m, &rows);
        let inputs = inputs::<N>(job, i);
        // SAFETY: rows hold `cols` columns, so whole spans lie inside them and half a span goes through a buffer;
        // inputs are padded to whole blocks of 64 columns.
        unsafe {
            let mut sums = [[S::zero(); N]; TILE_ROWS];
            let whole = cols / B::SPAN;
            for index in 0..whole {
                for r in 0..TILE_ROWS {
                    let p = weights[r].add(index * B::BYTES);
                    prefetch::<S>(p.wrapping_add(ahead), B::BYTES);
                    span::<S, B, N>(p, &inputs, index * (B::SPAN / ACTIVATION_BLOCK), &mut sums[r]);
                }
            }
            if B::SPAN == ACTIVATION_BLOCK && whole * B::SPAN < cols {
                for r in 0..TILE_ROWS {
                    let half = half_span::<B>(weights[r].add(whole * B::BYTES));
                    span::<S, B, N>(half.as_ptr(), &inputs, whole, &mut sums[r]);
                }
            }
            for (r, row) in rows.enumerate() {
                for n in 0..N {
                    job.store(i + n, row, sums[r][n].reduce());
                }
            }
        }
    }
}

/// The block at `p`, the first of two, and a block of zeros.
///
/// # Safety
/// `p` is readable for half of a span of two blocks.
#[inline(always)]
pub(super) unsafe fn half_span<B: Blocks>(p: *const u8) -> [u8; 128] {
    let mut both = [0u8; 128];
    let bytes = B::BYTES / 2;
    // SAFETY: the caller's promise.
    both[..bytes].copy_from_slice(unsafe { std::slice::from_raw_parts(p, bytes) });
    both
}

/// One row's span, whose columns begin with block `first` of the inputs.
///
/// # Safety
/// As [`crate::simd::Simd`]; `p` is readable for a span, the inputs have its blocks.
#[inline(always)]
unsafe fn span<S: Codes64, B: Blocks, const N: usize>(
    p: *const u8,
    inputs: &[Input; N],
    first: usize,
    sums: &mut [S; N],
) {
    let mut scales = Scales::default();
    // SAFETY: the caller's promise.
    unsafe {
        B::scales::<S>(p, &mut scales);
        for step in 0..B::SPAN / ACTIVATION_BLOCK {
            let codes = B::codes::<S>(p, step);
            let scale = lanes::<S, B>(&scales, step, 0);
            for n in 0..N {
                let block = first + step;
                let x = inputs[n].values.add(block * ACTIVATION_BLOCK);
                let offsets = inputs[n].offsets.add(block * 16);
                let x_scale = *inputs[n].scales.add(block);
                let dots = match B::ZERO {
                    Some(zero) => S::dot_codes(codes, i32::from(zero), x, offsets),
                    None => S::dot_signed(codes, x, offsets),
                };
                sums[n] = dots.fma(scale.mul(S::splat(x_scale)), sums[n]);
                if B::MINIMA {
                    let minimum = lanes::<S, B>(&scales, step, B::MINIMUM);
                    let factor = minimum.mul(S::splat(x_scale * -0.125));
                    sums[n] = S::load_i32(offsets).fma(factor, sums[n]);
                }
            }
        }
    }
}

/// The scales of 64 columns, each in the lanes of its group; with an `offset` of [`Blocks::MINIMUM`] the minima.
///
/// # Safety
/// As [`crate::simd::Simd`].
#[inline(always)]
unsafe fn lanes<S: Codes64, B: Blocks>(scales: &Scales, step: usize, offset: usize) -> S {
    let at = B::scale_at(step * (ACTIVATION_BLOCK / B::GROUP)) + offset;
    // SAFETY: the caller's promise.
    unsafe {
        if B::GROUP == 16 {
            S::quarters([scales.0[at], scales.0[at + 1], scales.0[at + 2], scales.0[at + 3]])
        } else {
            S::halves([scales.0[at], scales.0[at + 1]])
        }
    }
}
