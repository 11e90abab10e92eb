//! Products with the transpose: out[c] = Σ_r x[r] · w[r][c], vectorised over the columns.
#![allow(clippy::needless_range_loop, reason = "a strip indexes several arrays by the same row")]

use std::ops::Range;

use metaltail_quant::MatrixRef;

use super::integer::half_span;
use super::unpack::{Blocks, Scales};
use crate::simd::Codes64;

/// Rows that share one load and store of the outputs; they are added in ascending order.
const ROWS: usize = 4;

/// out[c] += Σ x[r] · w[r][c] over `rows`.
///
/// # Safety
/// The processor has the instruction set of `S`; `rows` lie in the matrix, which is of the format `B`, `x` has a
/// number for each and `out` one for each column.
#[inline(always)]
pub(crate) unsafe fn matmul_t<S: Codes64, B: Blocks>(
    m: MatrixRef<'_>,
    rows: Range<usize>,
    x: &[f32],
    out: &mut [f32],
) {
    let mut row = rows.start;
    // SAFETY: the caller's promise; `row + R <= rows.end`.
    unsafe {
        while row + ROWS <= rows.end {
            strip::<S, B, ROWS>(m, row, &x[row - rows.start..], out);
            row += ROWS;
        }
        while row < rows.end {
            strip::<S, B, 1>(m, row, &x[row - rows.start..], out);
            row += 1;
        }
    }
}

/// Adds rows `row..row + R`.
///
/// # Safety
/// As [`matmul_t`].
#[inline(always)]
unsafe fn strip<S: Codes64, B: Blocks, const R: usize>(
    m: MatrixRef<'_>,
    row: usize,
    x: &[f32],
    out: &mut [f32],
) {
    let mut rows = [std::ptr::null(); R];
    for (r, p) in rows.iter_mut().enumerate() {
        *p = m.row_weight_bytes(row + r).as_ptr();
    }
    let whole = out.len() / B::SPAN;
    // SAFETY: rows and outputs hold as many columns; of half a span the weights go through a buffer and 32 columns
    // are written.
    unsafe {
        for index in 0..whole {
            let mut spans = rows;
            for p in &mut spans {
                *p = p.add(index * B::BYTES);
            }
            span::<S, B, R>(spans, x, &mut out[index * B::SPAN..][..B::SPAN]);
        }
        if whole * B::SPAN < out.len() {
            let mut halves = [[0u8; 128]; R];
            let mut spans = rows;
            for r in 0..R {
                halves[r] = half_span::<B>(rows[r].add(whole * B::BYTES));
                spans[r] = halves[r].as_ptr();
            }
            span::<S, B, R>(spans, x, &mut out[whole * B::SPAN..]);
        }
    }
}

/// Adds the spans of some rows to the outputs of their columns, a whole span or 32 columns.
///
/// # Safety
/// As [`crate::simd::Simd`]; the rows are readable for a span, `x` has a number for each.
#[inline(always)]
unsafe fn span<S: Codes64, B: Blocks, const R: usize>(rows: [*const u8; R], x: &[f32], out: &mut [f32]) {
    let mut scales = [Scales::default(); R];
    // SAFETY: the caller's promise; a vector of outputs is 16 numbers.
    unsafe {
        for r in 0..R {
            B::scales::<S>(rows[r], &mut scales[r]);
        }
        for (step, out) in out.chunks_mut(64).enumerate() {
            let mut codes = [[S::zero(); 4]; R];
            for r in 0..R {
                codes[r] = B::vectors::<S>(rows[r], step);
            }
            for (v, out) in out.chunks_exact_mut(16).enumerate() {
                let at = B::scale_at(step * (64 / B::GROUP) + v * 16 / B::GROUP);
                let mut sum = S::load_f32(out.as_ptr().cast());
                for r in 0..R {
                    sum = codes[r][v].fma(S::splat(x[r] * scales[r].0[at]), sum);
                    if B::MINIMA {
                        sum = S::splat(x[r]).fma(S::splat(scales[r].0[at + B::MINIMUM]), sum);
                    }
                }
                sum.store(out.as_mut_ptr().cast());
            }
        }
    }
}
