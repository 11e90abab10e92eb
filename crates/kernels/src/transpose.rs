//! Products with the transpose: out[c] = Σ_r x[r] · w[r][c], vectorised over the columns.

use std::ops::Range;

use metaltail_quant::{Format, MatrixRef};

use crate::simd::{Bf16, F16, F32, Fp8, I4, I8, Simd, Stored};
use crate::tiles::{load_tail, read_scale};

/// Rows that share one load and store of the outputs; they are added in ascending order.
const ROWS: usize = 4;

/// out[c] += Σ x[r] · w[r][c] over `rows`.
///
/// # Safety
/// The processor has the instruction set of `S`; `rows` lie in the matrix, `x` has a number for
/// each and `out` one for each column.
#[inline(always)]
pub(crate) unsafe fn matmul_t<S: Simd>(m: MatrixRef<'_>, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match m.layout().format() {
            Format::F32 => all::<S, F32>(m, rows, x, out),
            Format::F16 => all::<S, F16>(m, rows, x, out),
            Format::Bf16 => all::<S, Bf16>(m, rows, x, out),
            Format::Int8Row => all::<S, I8>(m, rows, x, out),
            Format::Int4Row | Format::Int4Group(_) => all::<S, I4>(m, rows, x, out),
            Format::Fp8Block => all::<S, Fp8>(m, rows, x, out),
            _ => crate::scalar::matmul_t(m, rows, x, out),
        }
    }
}

/// # Safety
/// As [`matmul_t`].
#[inline(always)]
unsafe fn all<S: Simd, W: Stored>(m: MatrixRef<'_>, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
    let mut row = rows.start;
    // SAFETY: the caller's promise; `row + R <= rows.end`.
    unsafe {
        while row + ROWS <= rows.end {
            strip::<S, W, ROWS>(m, row, &x[row - rows.start..], out);
            row += ROWS;
        }
        while row < rows.end {
            strip::<S, W, 1>(m, row, &x[row - rows.start..], out);
            row += 1;
        }
    }
}

/// Adds rows `row..row + R`.
///
/// # Safety
/// As [`matmul_t`].
#[inline(always)]
unsafe fn strip<S: Simd, W: Stored, const R: usize>(
    m: MatrixRef<'_>,
    row: usize,
    x: &[f32],
    out: &mut [f32],
) {
    let cols = m.layout().cols();
    let span = m.scale_span();
    let mut w: [&[u8]; R] = [&[]; R];
    let mut scales = [std::ptr::null(); R];
    for r in 0..R {
        w[r] = m.row_weight_bytes(row + r);
        scales[r] = m.row_scale_bytes(row + r).as_ptr();
    }
    let group = span.unwrap_or(cols);
    let (mut start, mut g) = (0, 0);
    while start < cols {
        let end = cols.min(start + group);
        // SAFETY: rows and outputs hold `cols` columns; whole vectors stay below `end`, the tail goes
        // through buffers.
        unsafe {
            let mut factors = [S::zero(); R];
            for r in 0..R {
                factors[r] = S::splat(if span.is_some() { x[r] * read_scale(scales[r], g) } else { x[r] });
            }
            let mut c = start;
            while c + 16 <= end {
                let o: *mut u8 = out.as_mut_ptr().add(c).cast();
                let mut sum = S::load_f32(o);
                for r in 0..R {
                    sum = W::load::<S>(w[r].as_ptr().add(c / 16 * W::BYTES)).fma(factors[r], sum);
                }
                sum.store(o);
                c += 16;
            }
            if c < end {
                let mut buffer = [0.0f32; 16];
                buffer[..end - c].copy_from_slice(&out[c..end]);
                let mut sum = S::load_f32(buffer.as_ptr().cast());
                for r in 0..R {
                    sum = load_tail::<S, W>(w[r], c).fma(factors[r], sum);
                }
                sum.store(buffer.as_mut_ptr().cast());
                out[c..end].copy_from_slice(&buffer[..end - c]);
            }
        }
        (start, g) = (end, g + 1);
    }
}
