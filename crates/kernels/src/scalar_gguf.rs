//! The reference for the block formats of GGUF: what every other instruction set must give, bit for bit.
//!
//! Sums are those of `scalar`, 16 lanes wide, over groups of 16 or 32 columns that share a scale; in
//! formats with minima each group adds a second term, of the activations alone.

use std::ops::Range;

use metaltail_quant::{ACTIVATION_BLOCK, GGUF_UNIT, GgufFormat, GgufUnit, MatrixRef};

use crate::job::{FloatJob, Q8Job};
use crate::scalar::{LANES, reduce};

/// The units of one row.
fn units(format: GgufFormat, m: MatrixRef<'_>, row: usize) -> Vec<GgufUnit> {
    let bytes = m.row_weight_bytes(row);
    (0..m.layout().cols() / GGUF_UNIT).map(|index| format.unit(bytes, index)).collect()
}

/// A row times `x`: for each group p = fma(code, x, p) from +0, then acc = fma(p, scale, acc); with minima
/// t = Σ x of the group's columns in each lane, ascending, then acc = fma(t, minimum, acc).
fn float_row(format: GgufFormat, units: &[GgufUnit], x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (unit, x) in units.iter().zip(x.as_chunks::<GGUF_UNIT>().0) {
        let groups = unit.codes.chunks(format.group()).zip(x.chunks(format.group()));
        for (g, (codes, x)) in groups.enumerate() {
            for (l, lane) in lanes.iter_mut().enumerate() {
                let (mut product, mut total) = (0.0f32, x[l]);
                for i in (l..codes.len()).step_by(LANES) {
                    product = f32::from(codes[i]).mul_add(x[i], product);
                    total = if i == l { total } else { total + x[i] };
                }
                *lane = product.mul_add(unit.scales[g], *lane);
                if format.has_minima() {
                    *lane = total.mul_add(unit.minima[g], *lane);
                }
            }
        }
    }
    reduce(lanes)
}

/// The `f32` path for some rows of a product.
pub(crate) fn matmul(format: GgufFormat, job: &FloatJob<'_>, rows: Range<usize>) {
    for row in rows {
        let units = units(format, job.m, row);
        for i in 0..job.n {
            let value = float_row(format, &units, job.x.row(job.x_rows.at(i)));
            // SAFETY: this task alone has `rows`.
            unsafe { job.store(i, row, value) };
        }
    }
}

/// A row times one row of quantised activations.
///
/// Lane l of a step of 64 columns is the integer dot product of four columns; acc = fma(dot, scale · sx,
/// acc). With minima: acc = fma(−8 · Σ of the four activations, −minimum / 8 · sx, acc). Columns past the
/// end count 0, and so do their scales and minima.
fn q8_row(format: GgufFormat, units: &[GgufUnit], q: &[i8], offsets: &[i32], scales: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (step, sx) in scales.iter().enumerate() {
        for (l, lane) in lanes.iter_mut().enumerate() {
            let first = step * ACTIVATION_BLOCK + 4 * l;
            let (mut dot, mut scale, mut minimum) = (0, 0.0, 0.0);
            if let Some(unit) = units.get(first / GGUF_UNIT) {
                let at = first % GGUF_UNIT;
                let products = (0..4).map(|c| i32::from(unit.codes[at + c]) * i32::from(q[first + c]));
                (dot, scale, minimum) = (products.sum(), unit.scales[at / 16], unit.minima[at / 16]);
            }
            *lane = (dot as f32).mul_add(scale * sx, *lane);
            if format.has_minima() {
                *lane = (offsets[first / 4] as f32).mul_add(minimum * -0.125 * sx, *lane);
            }
        }
    }
    reduce(lanes)
}

/// The integer path for some rows of a product.
pub(crate) fn matmul_q8(format: GgufFormat, job: &Q8Job<'_>, rows: Range<usize>) {
    for row in rows {
        let units = units(format, job.m, row);
        for i in 0..job.n {
            let x = job.x_rows.at(i);
            let value = q8_row(format, &units, job.x.values(x), job.x.offsets(x), job.x.scales(x));
            // SAFETY: this task alone has `rows`.
            unsafe { job.store(i, row, value) };
        }
    }
}

/// out[c] += Σ x[r] · w[r][c] over `rows`, ascending: each term fma(code, x · scale, out), with minima then
/// fma(x, minimum, out).
pub(crate) fn matmul_t(format: GgufFormat, m: MatrixRef<'_>, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
    for (row, x) in rows.zip(x) {
        for (unit, out) in units(format, m, row).iter().zip(out.as_chunks_mut::<GGUF_UNIT>().0) {
            for (i, out) in out.iter_mut().enumerate() {
                *out = f32::from(unit.codes[i]).mul_add(x * unit.scales[i / 16], *out);
                if format.has_minima() {
                    *out = x.mul_add(unit.minima[i / 16], *out);
                }
            }
        }
    }
}
