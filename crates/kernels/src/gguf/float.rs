//! The `f32` path: tiles of 4 matrix rows × up to 4 inputs.
#![allow(clippy::needless_range_loop, reason = "a tile indexes several arrays by the same row and input")]

use std::marker::PhantomData;
use std::ops::Range;

use super::integer::half_span;
use super::unpack::{Blocks, Scales, hidden};
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
        let mut scales = [Scales::default(); TILE_ROWS];
        // SAFETY: rows and inputs hold `cols` columns: whole spans lie inside them, and of half a span the weights
        // go through a buffer and 32 columns are taken.
        unsafe {
            let mut sums = [[S::zero(); N]; TILE_ROWS];
            let whole = cols / B::SPAN;
            for index in 0..whole {
                let mut spans = weights;
                for p in &mut spans {
                    *p = p.add(index * B::BYTES);
                    prefetch::<S>(p.wrapping_add(ahead), B::BYTES);
                }
                span::<S, B, N>(spans, at(x, index * B::SPAN), B::SPAN, &mut scales, &mut sums);
            }
            if whole * B::SPAN < cols {
                let mut halves = [[0u8; 128]; TILE_ROWS];
                let mut spans = weights;
                for r in 0..TILE_ROWS {
                    halves[r] = half_span::<B>(weights[r].add(whole * B::BYTES));
                    spans[r] = halves[r].as_ptr();
                }
                span::<S, B, N>(spans, at(x, whole * B::SPAN), B::SPAN / 2, &mut scales, &mut sums);
            }
            for (r, row) in rows.enumerate() {
                for n in 0..N {
                    job.store(i + n, row, sums[r][n].reduce());
                }
            }
        }
    }
}

/// The inputs from column `first` on.
///
/// # Safety
/// The inputs have that column.
#[inline(always)]
unsafe fn at<const N: usize>(mut x: [*const f32; N], first: usize) -> [*const f32; N] {
    for x in &mut x {
        // SAFETY: the caller's promise.
        *x = unsafe { x.add(first) };
    }
    x
}

/// The first `columns` of the rows' spans, and as many of the inputs.
///
/// # Safety
/// As [`crate::simd::Simd`]; rows are readable for a span, inputs for `columns`.
#[inline(always)]
unsafe fn span<S: Codes64, B: Blocks, const N: usize>(
    rows: [*const u8; TILE_ROWS],
    x: [*const f32; N],
    columns: usize,
    scales: &mut [Scales; TILE_ROWS],
    sums: &mut [[S; N]; TILE_ROWS],
) {
    // SAFETY: the caller's promise.
    unsafe {
        for r in 0..TILE_ROWS {
            B::scales::<S>(rows[r], &mut scales[r]);
        }
        // A scale that is loaded into all lanes costs less than one that is spread from a register.
        let scales = hidden(scales);
        // Written out, so that each step's shifts are constants.
        step::<S, B, N>(rows, x, 0, columns.min(64), scales, sums);
        if B::SPAN == 256 {
            step::<S, B, N>(rows, x, 1, 64, scales, sums);
            step::<S, B, N>(rows, x, 2, 64, scales, sums);
            step::<S, B, N>(rows, x, 3, 64, scales, sums);
        }
    }
}

/// The first `columns` of 64, number `step` of the span.
///
/// # Safety
/// As [`span`].
#[inline(always)]
unsafe fn step<S: Codes64, B: Blocks, const N: usize>(
    rows: [*const u8; TILE_ROWS],
    x: [*const f32; N],
    step: usize,
    columns: usize,
    scales: &[Scales; TILE_ROWS],
    sums: &mut [[S; N]; TILE_ROWS],
) {
    let (vectors, groups) = (B::GROUP / 16, columns / B::GROUP);
    // SAFETY: the caller's promise; a step has 4 vectors.
    unsafe {
        let x = at(x, step * 64);
        let totals = if B::MINIMA { totals::<S, N>(x, groups, vectors) } else { [[S::zero(); 4]; N] };
        for r in 0..TILE_ROWS {
            let codes = B::vectors::<S>(rows[r], step);
            for g in 0..groups {
                let at = B::scale_at(step * (64 / B::GROUP) + g);
                let scale = S::splat(scales[r].0[at]);
                for n in 0..N {
                    let mut product = S::zero();
                    for v in g * vectors..(g + 1) * vectors {
                        product = codes[v].fma(S::load_f32(x[n].add(v * 16).cast()), product);
                    }
                    sums[r][n] = product.fma(scale, sums[r][n]);
                    if B::MINIMA {
                        let minimum = S::splat(scales[r].0[at + B::MINIMUM]);
                        sums[r][n] = totals[n][g].fma(minimum, sums[r][n]);
                    }
                }
            }
        }
    }
}

/// Sums of each input's 64 columns by group, lane by lane.
///
/// # Safety
/// As [`crate::simd::Simd`]; the inputs have the groups.
#[inline(always)]
unsafe fn totals<S: Codes64, const N: usize>(
    x: [*const f32; N],
    groups: usize,
    vectors: usize,
) -> [[S; 4]; N] {
    // SAFETY: the caller's promise; a step has at most four groups.
    unsafe {
        let mut totals = [[S::zero(); 4]; N];
        for n in 0..N {
            for g in 0..groups {
                let x = x[n].add(g * vectors * 16);
                totals[n][g] = S::load_f32(x.cast());
                for v in 1..vectors {
                    totals[n][g] = totals[n][g].add(S::load_f32(x.add(v * 16).cast()));
                }
            }
        }
        totals
    }
}
