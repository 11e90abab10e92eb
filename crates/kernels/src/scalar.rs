//! The reference: plain Rust that says what every other instruction set must give, bit for bit.
//!
//! 16 lanes. Column i belongs to lane i mod 16; columns are taken in ascending order, each by a
//! fused multiply-add into its lane; [`reduce`] folds the lanes. Where a row ends inside 16
//! columns, the lanes past the end are left as they are. Nothing depends on how many inputs or
//! threads there are.

use std::ops::Range;

use metaltail_quant::{ACTIVATION_BLOCK, Format, MatrixRef, stored_row};

use crate::job::{FloatJob, Q8Job};
use crate::scalar_gguf;

/// Lanes of the canonical order.
pub(crate) const LANES: usize = 16;

/// Folds the lanes: l += l + 8, then + 4, + 2, + 1.
pub(crate) fn reduce(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
    }
    lanes[0]
}

/// Lane sums of `a · b`, from +0.
fn products(a: &[f32], b: &[f32]) -> [f32; LANES] {
    let mut lanes = [0.0f32; LANES];
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        lanes[i % LANES] = a.mul_add(*b, lanes[i % LANES]);
    }
    lanes
}

/// Dot product in the canonical order.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    reduce(products(a, b))
}

/// out = fma(alpha, x, out).
pub(crate) fn axpy(alpha: f32, x: &[f32], out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o = alpha.mul_add(*x, *o);
    }
}

/// Whether the scale of a row is applied once, after the lanes are folded.
pub(crate) fn scale_is_per_row(format: Format) -> bool {
    matches!(format, Format::Int8Row | Format::Int4Row)
}

/// Row `row` of `m`, whose stored numbers are `stored`, times `x`.
fn float_row(m: MatrixRef<'_>, row: usize, stored: &[f32], x: &[f32]) -> f32 {
    let Some(span) = m.scale_span() else {
        return dot(stored, x);
    };
    if scale_is_per_row(m.layout().format()) {
        return dot(stored, x) * m.scale(row, 0);
    }
    let mut lanes = [0.0f32; LANES];
    // Groups are multiples of 16 columns, so each begins at lane 0.
    for (g, (w, x)) in stored.chunks(span).zip(x.chunks(span)).enumerate() {
        let scale = m.scale(row, g * span);
        for (lane, p) in lanes.iter_mut().zip(products(w, x)) {
            *lane = p.mul_add(scale, *lane);
        }
    }
    reduce(lanes)
}

/// The `f32` path for some rows of a product.
pub(crate) fn matmul(job: &FloatJob<'_>, rows: Range<usize>) {
    if let Format::Gguf(format) = job.m.layout().format() {
        return scalar_gguf::matmul(format, job, rows);
    }
    let mut stored = vec![0.0; job.m.layout().cols()];
    for row in rows {
        stored_row(job.m, row, &mut stored);
        for i in 0..job.n {
            let value = float_row(job.m, row, &stored, job.x.row(job.x_rows.at(i)));
            // SAFETY: this task alone has `rows`.
            unsafe { job.store(i, row, value) };
        }
    }
}

/// Row `row` of `m` times one row of quantised activations.
///
/// Lane l of block b is the integer dot product of columns 64b + 4l .. 64b + 4l + 4 (columns past
/// the end count 0), scaled by the activation block and by the group that holds the first of them
/// (or the last group, where the lane lies past the end).
fn q8_row(m: MatrixRef<'_>, row: usize, stored: &[f32], q: &[i8], scales: &[f32]) -> f32 {
    let per_row = scale_is_per_row(m.layout().format());
    let mut lanes = [0.0f32; LANES];
    for (block, scale) in scales.iter().enumerate() {
        for (l, lane) in lanes.iter_mut().enumerate() {
            let first = block * ACTIVATION_BLOCK + 4 * l;
            let columns = first..stored.len().min(first + 4);
            let sum: i32 = columns.map(|c| stored[c] as i32 * i32::from(q[c])).sum();
            let weight_scale = if per_row { 1.0 } else { m.scale(row, first.min(stored.len() - 1)) };
            *lane = (sum as f32).mul_add(weight_scale * scale, *lane);
        }
    }
    if per_row { reduce(lanes) * m.scale(row, 0) } else { reduce(lanes) }
}

/// The integer path for some rows of a product.
pub(crate) fn matmul_q8(job: &Q8Job<'_>, rows: Range<usize>) {
    if let Format::Gguf(format) = job.m.layout().format() {
        return scalar_gguf::matmul_q8(format, job, rows);
    }
    let mut stored = vec![0.0; job.m.layout().cols()];
    for row in rows {
        stored_row(job.m, row, &mut stored);
        for i in 0..job.n {
            let x = job.x_rows.at(i);
            let value = q8_row(job.m, row, &stored, job.x.values(x), job.x.scales(x));
            // SAFETY: this task alone has `rows`.
            unsafe { job.store(i, row, value) };
        }
    }
}

/// out[c] += Σ x[r] · w[r][c] over `rows`, ascending: each term fma(stored, x · scale, out).
pub(crate) fn matmul_t(m: MatrixRef<'_>, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
    if let Format::Gguf(format) = m.layout().format() {
        return scalar_gguf::matmul_t(format, m, rows, x, out);
    }
    let mut stored = vec![0.0; m.layout().cols()];
    let span = m.scale_span();
    for (row, x) in rows.zip(x) {
        stored_row(m, row, &mut stored);
        for (g, (w, out)) in stored
            .chunks(span.unwrap_or(usize::MAX))
            .zip(out.chunks_mut(span.unwrap_or(usize::MAX)))
            .enumerate()
        {
            let factor = span.map_or(*x, |span| x * m.scale(row, g * span));
            axpy(factor, w, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_fold_in_halves() {
        let lanes = std::array::from_fn(|l| {
            if l == 8 {
                1e8
            } else if l == 0 {
                -1e8
            } else {
                1.0
            }
        });
        // Lane 0 becomes exactly 0 first, so no 1 is lost.
        assert_eq!(reduce(lanes), 14.0);
    }

    #[test]
    fn column_sixteen_joins_lane_zero() {
        let mut a = [0.0; 17];
        (a[0], a[1], a[16]) = (1e8, 1.0, -1e8);
        // In plain order the 1 would be lost.
        assert_eq!(dot(&a, &[1.0; 17]), 1.0);
    }
}
