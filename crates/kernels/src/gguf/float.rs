//! The `f32` path: tiles of 4 matrix rows × up to 4 inputs.
#![allow(clippy::needless_range_loop, reason = "a tile indexes several arrays by the same row and input")]

use std::marker::PhantomData;
use std::ops::Range;

use super::integer::half_span;
use super::unpack::{Blocks, Codes, Scales};
use super::{Tile, in_tiles, prefetch};
use crate::job::{FloatJob, FloatRows, Job};
use crate::simd::Codes64;
use crate::tiles::{TILE_ROWS, tile_rows};

/// Does rows `rows` of `job`.
///
/// # Safety
/// The processor has the instruction set of `S`; `rows` lie in the matrix, which is of the format `B`, and
/// belong to this task alone.
#[inline(always)]
pub(crate) unsafe fn matmul<S: Codes64, B: Blocks>(job: &FloatJob<'_>, rows: Range<usize>) {
    // SAFETY: the caller's promise, passed on.
    unsafe { in_tiles::<_, Float<S, B>>(job, rows, job.m.layout().cols() * 4) }
}

/// The tile of this path.
struct Float<S, B>(PhantomData<(S, B)>);

impl<'x, S: Codes64, B: Blocks> Tile<FloatRows<'x>> for Float<S, B> {
    #[inline(always)]
    unsafe fn run<const N: usize>(job: &Job<'_, FloatRows<'x>>, rows: Range<usize>, i: usize) {
        let layout = job.m.layout();
        let (cols, ahead) = (layout.cols(), TILE_ROWS * layout.row_bytes());
        let (weights, _) = tile_rows(job.m, &rows);
        let mut x = [std::ptr::null::<f32>(); N];
        for (n, x) in x.iter_mut().enumerate() {
            *x = job.x.row(job.x_rows.at(i + n)).as_ptr();
        }
        // SAFETY: rows and inputs hold `cols` columns: whole spans lie inside them, and of half a span the weights
        // go through a buffer and 32 columns are taken.
        unsafe {
            let mut sums = [[S::zero(); N]; TILE_ROWS];
            let whole = cols / B::SPAN;
            for index in 0..whole {
                for r in 0..TILE_ROWS {
                    let p = weights[r].add(index * B::BYTES);
                    prefetch::<S>(p.wrapping_add(ahead), B::BYTES);
                    span::<S, B, N>(p, x, index * B::SPAN, B::SPAN, &mut sums[r]);
                }
            }
            if whole * B::SPAN < cols {
                for r in 0..TILE_ROWS {
                    let half = half_span::<B>(weights[r].add(whole * B::BYTES));
                    span::<S, B, N>(half.as_ptr(), x, whole * B::SPAN, B::SPAN / 2, &mut sums[r]);
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

/// The first `columns` of one row's span; they begin with column `first` of the inputs.
///
/// # Safety
/// As [`crate::simd::Simd`]; `p` is readable for a span, the inputs for `columns` from `first` on.
#[inline(always)]
unsafe fn span<S: Codes64, B: Blocks, const N: usize>(
    p: *const u8,
    x: [*const f32; N],
    first: usize,
    columns: usize,
    sums: &mut [S; N],
) {
    let mut scales = Scales::default();
    // SAFETY: the caller's promise; a step has 64 codes.
    unsafe {
        B::scales::<S>(p, &mut scales);
        for step in 0..columns.div_ceil(64) {
            let codes = Codes::unpack::<S, B>(p, step);
            let groups = (columns - step * 64).min(64) / B::GROUP;
            for g in 0..groups {
                let at = B::scale_at(step * (64 / B::GROUP) + g);
                let scale = S::splat(scales.0[at]);
                for n in 0..N {
                    let x = x[n].add(first + step * 64 + g * B::GROUP);
                    let (mut product, mut total) = (S::zero(), S::load_f32(x.cast()));
                    for v in 0..B::GROUP / 16 {
                        let vector = S::load_f32(x.add(16 * v).cast());
                        product = codes.vector::<S>(g * (B::GROUP / 16) + v).fma(vector, product);
                        if v > 0 {
                            total = total.add(vector);
                        }
                    }
                    sums[n] = product.fma(scale, sums[n]);
                    if B::MINIMA {
                        sums[n] = total.fma(S::splat(scales.0[at + B::MINIMUM]), sums[n]);
                    }
                }
            }
        }
    }
}
