//! Shapes to byte counts, checked once so that kernels need not check again.

use thiserror::Error;

use crate::{Format, GROUP_SIZES, GgufFormat};

/// A shape or a byte count that does not fit its format.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutError {
    /// A dimension is zero.
    #[error("a matrix of {rows} × {cols} has no elements")]
    Empty {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// A group size that no kernel knows.
    #[error("int4 groups of {group} columns are not supported: choose 16, 32, 48, 64, 96, 128, 192 or 256")]
    Group {
        /// Group size asked for.
        group: u16,
    },
    /// Columns that are no whole number of blocks.
    #[error("rows of {cols} columns are no whole number of {format} blocks, {} columns each", .format.block_values())]
    Blocks {
        /// Format asked for.
        format: GgufFormat,
        /// Columns asked for.
        cols: usize,
    },
    /// The byte count does not fit in `usize`.
    #[error("a {format} matrix of {rows} × {cols} is larger than the address space")]
    Overflow {
        /// Format asked for.
        format: Format,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// The bytes given are not as many as the layout needs.
    #[error("{what} of a {format} matrix of {rows} × {cols}: wanted {wanted} bytes, got {got}")]
    Length {
        /// `weights` or `scales`.
        what: &'static str,
        /// Format of the matrix.
        format: Format,
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// Bytes that the layout needs.
        wanted: usize,
        /// Bytes given.
        got: usize,
    },
}

/// A format and a shape whose byte counts are known not to overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixLayout {
    format: Format,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    scale_cols: usize,
    scale_rows: usize,
}

impl MatrixLayout {
    /// Checks that a matrix of `rows × cols` in `format` has a size.
    pub fn new(format: Format, rows: usize, cols: usize) -> Result<Self, LayoutError> {
        if rows == 0 || cols == 0 {
            return Err(LayoutError::Empty { rows, cols });
        }
        if let Format::Int4Group(group) = format
            && !GROUP_SIZES.contains(&group)
        {
            return Err(LayoutError::Group { group });
        }
        let overflow = || LayoutError::Overflow { format, rows, cols };
        let row_bytes = match format {
            Format::F32 => cols.checked_mul(4).ok_or_else(overflow)?,
            Format::F16 | Format::Bf16 => cols.checked_mul(2).ok_or_else(overflow)?,
            Format::Int8Row | Format::Fp8Block => cols,
            Format::Int4Row | Format::Int4Group(_) => cols.div_ceil(2),
            Format::Gguf(format) => format.row_bytes(cols).ok_or_else(|| {
                let whole = cols.is_multiple_of(format.block_values());
                if whole { overflow() } else { LayoutError::Blocks { format, cols } }
            })?,
        };
        let (scale_rows, scale_cols) = match format {
            Format::F32 | Format::F16 | Format::Bf16 | Format::Gguf(_) => (0, 0),
            Format::Int8Row | Format::Int4Row => (rows, 1),
            Format::Int4Group(group) => (rows, cols.div_ceil(usize::from(group))),
            Format::Fp8Block => (rows.div_ceil(128), cols.div_ceil(128)),
        };
        row_bytes.checked_mul(rows).ok_or_else(overflow)?;
        scale_rows.checked_mul(scale_cols).and_then(|n| n.checked_mul(4)).ok_or_else(overflow)?;
        Ok(MatrixLayout { format, rows, cols, row_bytes, scale_cols, scale_rows })
    }

    /// The number format.
    #[inline]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Rows, that is outputs.
    #[inline]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns, that is inputs.
    #[inline]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of one row's weights.
    #[inline]
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes of all weights.
    #[inline]
    pub fn weight_bytes(&self) -> usize {
        self.row_bytes * self.rows
    }

    /// Scales along a row (0 for formats without separate scales).
    #[inline]
    pub fn scale_cols(&self) -> usize {
        self.scale_cols
    }

    /// Rows of scales (0 for formats without separate scales).
    #[inline]
    pub fn scale_rows(&self) -> usize {
        self.scale_rows
    }

    /// Bytes of all scales.
    #[inline]
    pub fn scale_bytes(&self) -> usize {
        self.scale_rows * self.scale_cols * 4
    }

    /// Bytes of weights and scales.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.weight_bytes() + self.scale_bytes()
    }
}

/// A matrix in memory: a layout and exactly the bytes it needs.
///
/// The bytes may lie at any alignment.
#[derive(Clone, Copy, Debug)]
pub struct MatrixRef<'a> {
    layout: MatrixLayout,
    weights: &'a [u8],
    scales: &'a [u8],
}

impl<'a> MatrixRef<'a> {
    /// Joins a layout with its bytes; refuses any other number of bytes.
    pub fn new(layout: MatrixLayout, weights: &'a [u8], scales: &'a [u8]) -> Result<Self, LayoutError> {
        let length = |what, wanted, got| LayoutError::Length {
            what,
            format: layout.format,
            rows: layout.rows,
            cols: layout.cols,
            wanted,
            got,
        };
        if weights.len() != layout.weight_bytes() {
            return Err(length("weights", layout.weight_bytes(), weights.len()));
        }
        if scales.len() != layout.scale_bytes() {
            return Err(length("scales", layout.scale_bytes(), scales.len()));
        }
        Ok(MatrixRef { layout, weights, scales })
    }

    /// As [`MatrixRef::new`], for bytes that were checked when their owner was made.
    pub(crate) fn of_owned(layout: MatrixLayout, weights: &'a [u8], scales: &'a [u8]) -> Self {
        debug_assert!(MatrixRef::new(layout, weights, scales).is_ok());
        MatrixRef { layout, weights, scales }
    }

    /// Format and shape.
    #[inline]
    pub fn layout(&self) -> MatrixLayout {
        self.layout
    }

    /// All weight bytes, row-major.
    #[inline]
    pub fn weights(&self) -> &'a [u8] {
        self.weights
    }

    /// All scale bytes (little-endian `f32`), row-major; empty for formats without separate scales.
    #[inline]
    pub fn scales(&self) -> &'a [u8] {
        self.scales
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_overflow_are_refused() {
        for format in [
            Format::F32,
            Format::F16,
            Format::Int8Row,
            Format::Int4Row,
            Format::Int4Group(16),
            Format::Fp8Block,
        ] {
            for (rows, cols) in
                [(usize::MAX, usize::MAX), (1 << 33, 1 << 33), (usize::MAX, 3), (3, usize::MAX)]
            {
                assert_eq!(
                    MatrixLayout::new(format, rows, cols),
                    Err(LayoutError::Overflow { format, rows, cols }),
                    "{format}"
                );
            }
        }
    }

    #[test]
    fn scales_that_overflow_are_refused_though_the_weights_fit() {
        let (rows, cols) = (usize::MAX / 2, 1);
        for format in [Format::Int8Row, Format::Int4Group(64)] {
            assert_eq!(
                MatrixLayout::new(format, rows, cols),
                Err(LayoutError::Overflow { format, rows, cols })
            );
        }
    }

    #[test]
    fn empty_shapes_and_group_sizes_out_of_the_list_are_refused() {
        assert_eq!(MatrixLayout::new(Format::F32, 0, 4), Err(LayoutError::Empty { rows: 0, cols: 4 }));
        assert_eq!(MatrixLayout::new(Format::F32, 4, 0), Err(LayoutError::Empty { rows: 4, cols: 0 }));
        for group in [0, 8, 17, 512] {
            assert_eq!(MatrixLayout::new(Format::Int4Group(group), 4, 4), Err(LayoutError::Group { group }));
        }
    }

    #[test]
    fn rows_of_blocks_are_whole_and_carry_their_scales() {
        let layout = MatrixLayout::new(Format::Gguf(GgufFormat::Q4K), 3, 512).unwrap();
        assert_eq!((layout.row_bytes(), layout.weight_bytes(), layout.scale_bytes()), (288, 864, 0));
        for format in GgufFormat::ALL {
            for cols in [1, 31, 33, 257] {
                let refused = MatrixLayout::new(Format::Gguf(format), 1, cols);
                assert_eq!(refused, Err(LayoutError::Blocks { format, cols }));
            }
            let (format, rows) = (Format::Gguf(format), usize::MAX / 4);
            assert_eq!(
                MatrixLayout::new(format, rows, 256),
                Err(LayoutError::Overflow { format, rows, cols: 256 })
            );
        }
        let q8 = Format::Gguf(GgufFormat::Q8_0);
        let cols = usize::MAX - 31;
        let overflow = LayoutError::Overflow { format: q8, rows: 1, cols };
        assert_eq!(MatrixLayout::new(q8, 1, cols), Err(overflow));
    }

    #[test]
    fn sizes_are_those_of_the_published_experts() {
        // GLM-5.2 gate projection in int4-g64: 2048 × 6144.
        let layout = MatrixLayout::new(Format::Int4Group(64), 2048, 6144).unwrap();
        assert_eq!((layout.weight_bytes(), layout.scale_bytes()), (6_291_456, 786_432));
    }

    #[test]
    fn any_other_number_of_bytes_is_refused() {
        let layout = MatrixLayout::new(Format::Int4Row, 2, 3).unwrap();
        assert!(MatrixRef::new(layout, &[0; 4], &[0; 8]).is_ok());
        assert!(MatrixRef::new(layout, &[0; 3], &[0; 8]).is_err());
        assert!(MatrixRef::new(layout, &[0; 4], &[0; 9]).is_err());
    }
}
