//! From stored bytes to `f32`: the exact reference that every kernel is held against.

use half::{bf16, f16};

use crate::fp8::FP8_TABLE;
use crate::{Format, GGUF_UNIT, MatrixRef};

impl<'a> MatrixRef<'a> {
    /// Columns that share one scale along a row: the group size, 128 for fp8 blocks,
    /// the whole row for per-row scales, `None` for formats without separate scales.
    #[inline]
    pub fn scale_span(&self) -> Option<usize> {
        match self.layout().format() {
            Format::F32 | Format::F16 | Format::Bf16 | Format::Gguf(_) => None,
            Format::Int8Row | Format::Int4Row => Some(self.layout().cols()),
            Format::Int4Group(group) => Some(usize::from(group)),
            Format::Fp8Block => Some(128),
        }
    }

    /// Scale bytes that apply to `row`: `scale_cols` little-endian `f32`, in column order.
    ///
    /// # Panics
    /// If `row` is not a row of the matrix.
    #[inline]
    pub fn row_scale_bytes(&self, row: usize) -> &'a [u8] {
        let layout = self.layout();
        assert!(row < layout.rows(), "row {row} of a matrix of {} rows", layout.rows());
        let scale_row = if layout.format() == Format::Fp8Block { row / 128 } else { row };
        let bytes = layout.scale_cols() * 4;
        if bytes == 0 { &[] } else { &self.scales()[scale_row * bytes..][..bytes] }
    }

    /// The scale of the element at `row`, `col` (1.0 for formats without separate scales).
    ///
    /// # Panics
    /// If `row` or `col` lies outside the matrix.
    #[inline]
    pub fn scale(&self, row: usize, col: usize) -> f32 {
        assert!(col < self.layout().cols(), "column {col} of a matrix of {} columns", self.layout().cols());
        match self.scale_span() {
            None => 1.0,
            Some(span) => {
                let at = col / span * 4;
                let bytes = &self.row_scale_bytes(row)[at..at + 4];
                f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
            }
        }
    }

    /// Weight bytes of one row.
    ///
    /// # Panics
    /// If `row` is not a row of the matrix.
    #[inline]
    pub fn row_weight_bytes(&self, row: usize) -> &'a [u8] {
        let bytes = self.layout().row_bytes();
        &self.weights()[row * bytes..][..bytes]
    }
}

/// The stored numbers of one row, before any scale: `out[c]` for every column. Of a GGUF format: its
/// signed codes, before scales and minima.
///
/// # Panics
/// If `row` is not a row of `m` or `out` does not hold exactly one row.
pub fn stored_row(m: MatrixRef<'_>, row: usize, out: &mut [f32]) {
    let layout = m.layout();
    assert_eq!(out.len(), layout.cols(), "output of one row");
    let bytes = m.row_weight_bytes(row);
    match layout.format() {
        Format::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        Format::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = f16::from_le_bytes(*b).to_f32();
            }
        }
        Format::Bf16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = bf16::from_le_bytes(*b).to_f32();
            }
        }
        Format::Int8Row => {
            for (o, b) in out.iter_mut().zip(bytes) {
                *o = f32::from(b.cast_signed());
            }
        }
        Format::Int4Row | Format::Int4Group(_) => {
            for (pair, b) in out.chunks_mut(2).zip(bytes) {
                // Offset binary: the even column in the low nibble, value + 8.
                for (o, nibble) in pair.iter_mut().zip([b & 15, b >> 4]) {
                    *o = f32::from(nibble) - 8.0;
                }
            }
        }
        Format::Fp8Block => {
            for (o, b) in out.iter_mut().zip(bytes) {
                *o = FP8_TABLE[usize::from(*b)];
            }
        }
        Format::Gguf(format) => {
            for (index, out) in out.as_chunks_mut::<GGUF_UNIT>().0.iter_mut().enumerate() {
                *out = format.unit(bytes, index).codes.map(f32::from);
            }
        }
    }
}

/// One row as `f32`: stored value times scale, one rounding (and a second, where a GGUF format adds a minimum).
///
/// # Panics
/// If `row` is not a row of `m` or `out` does not hold exactly one row.
pub fn dequantize_row(m: MatrixRef<'_>, row: usize, out: &mut [f32]) {
    if let Format::Gguf(format) = m.layout().format() {
        return format.dequantize(m.row_weight_bytes(row), out);
    }
    stored_row(m, row, out);
    let Some(span) = m.scale_span() else { return };
    let scales = m.row_scale_bytes(row).as_chunks::<4>().0;
    for (group, bytes) in out.chunks_mut(span).zip(scales) {
        let scale = f32::from_le_bytes(*bytes);
        for value in group {
            *value *= scale;
        }
    }
}

/// The whole matrix as `f32`, row-major.
///
/// # Panics
/// If `out` does not hold exactly `rows × cols` numbers.
pub fn dequantize(m: MatrixRef<'_>, out: &mut [f32]) {
    let layout = m.layout();
    assert_eq!(Some(out.len()), layout.rows().checked_mul(layout.cols()), "output of the whole matrix");
    for (row, out) in out.chunks_mut(layout.cols()).enumerate() {
        dequantize_row(m, row, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MatrixLayout;

    fn whole(format: Format, rows: usize, cols: usize, weights: &[u8], scales: &[f32]) -> Vec<f32> {
        let layout = MatrixLayout::new(format, rows, cols).unwrap();
        let scales: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        let m = MatrixRef::new(layout, weights, &scales).unwrap();
        let mut out = vec![f32::NAN; rows * cols];
        dequantize(m, &mut out);
        out
    }

    #[test]
    fn int4_rows_start_on_a_byte_and_the_even_column_is_the_low_nibble() {
        // 3 columns: 2 bytes a row, the last high nibble (here 0xF) belongs to no column.
        let got = whole(Format::Int4Row, 2, 3, &[0x90, 0xF7, 0x8F, 0x0A], &[2.0, 0.5]);
        assert_eq!(got, [-16.0, 2.0, -2.0, 3.5, 0.0, 1.0]);
    }

    #[test]
    fn int4_group_scale_is_that_of_the_columns_group_and_the_last_group_may_be_short() {
        // 18 columns in groups of 16: groups of 16 and 2 columns; value 1 everywhere (nibble 9).
        let got = whole(Format::Int4Group(16), 1, 18, &[0x99; 9], &[10.0, 20.0]);
        assert_eq!(got[..16], [10.0; 16]);
        assert_eq!(got[16..], [20.0; 2]);
    }

    #[test]
    fn int8_is_signed() {
        assert_eq!(whole(Format::Int8Row, 1, 3, &[0x80, 0xFF, 0x7F], &[0.5]), [-64.0, -0.5, 63.5]);
    }

    #[test]
    fn halves_are_little_endian() {
        assert_eq!(whole(Format::F16, 1, 2, &[0x00, 0x3C, 0x00, 0xC0], &[]), [1.0, -2.0]);
        assert_eq!(whole(Format::Bf16, 1, 2, &[0x80, 0x3F, 0x00, 0xC0], &[]), [1.0, -2.0]);
        assert_eq!(whole(Format::F32, 1, 1, &[0x00, 0x00, 0x80, 0x3F], &[]), [1.0]);
    }

    #[test]
    fn fp8_scales_lie_by_blocks_of_128_in_both_directions() {
        // 129 × 130: 2 × 2 blocks; 0x38 is 1.0.
        let got = whole(Format::Fp8Block, 129, 130, &[0x38; 129 * 130], &[1.0, 2.0, 3.0, 4.0]);
        assert_eq!((got[0], got[127], got[128], got[129]), (1.0, 1.0, 2.0, 2.0));
        assert_eq!((got[127 * 130], got[128 * 130], got[128 * 130 + 128]), (1.0, 3.0, 4.0));
    }

    #[test]
    fn scale_of_an_element_matches_the_dequantised_row() {
        let layout = MatrixLayout::new(Format::Int4Group(48), 2, 100).unwrap();
        let scales: Vec<u8> = (0..6).flat_map(|i| (i as f32 + 1.0).to_le_bytes()).collect();
        let m = MatrixRef::new(layout, &[0x99; 100], &scales).unwrap();
        let mut row = [0.0; 100];
        dequantize_row(m, 1, &mut row);
        for (col, value) in row.iter().enumerate() {
            assert_eq!(*value, m.scale(1, col));
        }
    }
}
