//! Activations as signed bytes, for the integer path of the kernels.

/// Columns that share one activation scale.
pub const ACTIVATION_BLOCK: usize = 64;

/// Four consecutive columns are one lane of the integer path.
const LANE_COLUMNS: usize = 4;

/// Rows of activations as int8 with one scale for each block of 64 columns.
///
/// scale = absmax / 127 (0 where the block is all zero, or so small that the division underflows);
/// q = rint(x / scale), ties to even, clipped to ±127. Columns past the end are zero.
/// A block that holds NaN or an infinity gets the scale NaN and q = 0, so that every product
/// with it is NaN: such an input shows in the output and never panics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QuantizedRows {
    rows: usize,
    cols: usize,
    values: Vec<i8>,
    scales: Vec<f32>,
    offsets: Vec<i32>,
}

impl QuantizedRows {
    /// Quantises `x`, `rows × cols`.
    ///
    /// # Panics
    /// If `cols` is 0 or `x` is not a whole number of rows.
    pub fn new(x: &[f32], cols: usize) -> Self {
        let mut rows = QuantizedRows::default();
        rows.quantize(x, cols);
        rows
    }

    /// Quantises `x` into this value, keeping its memory.
    ///
    /// # Panics
    /// As [`QuantizedRows::new`].
    pub fn quantize(&mut self, x: &[f32], cols: usize) {
        assert!(cols > 0 && x.len().is_multiple_of(cols), "{} numbers are no whole rows of {cols}", x.len());
        self.resize(x.len() / cols, cols);
        for (row, parts) in x.chunks(cols).zip(self.rows_mut()) {
            parts.quantize(row);
        }
    }

    /// Makes room for `rows × cols`; the contents are unspecified until each row is quantised.
    pub fn resize(&mut self, rows: usize, cols: usize) {
        let blocks = rows * cols.div_ceil(ACTIVATION_BLOCK);
        (self.rows, self.cols) = (rows, cols);
        self.values.resize(blocks * ACTIVATION_BLOCK, 0);
        self.scales.resize(blocks, 0.0);
        self.offsets.resize(blocks * (ACTIVATION_BLOCK / LANE_COLUMNS), 0);
    }

    /// The rows as separate mutable parts, to quantise them on several threads.
    pub fn rows_mut(&mut self) -> impl Iterator<Item = QuantizedRowMut<'_>> {
        let blocks = self.blocks().max(1);
        let values = self.values.chunks_mut(blocks * ACTIVATION_BLOCK);
        let offsets = self.offsets.chunks_mut(blocks * (ACTIVATION_BLOCK / LANE_COLUMNS));
        let cols = self.cols;
        values
            .zip(self.scales.chunks_mut(blocks))
            .zip(offsets)
            .map(move |((values, scales), offsets)| QuantizedRowMut { cols, values, scales, offsets })
    }

    /// Rows held.
    #[inline]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of a row, before padding.
    #[inline]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Blocks of 64 columns in a row.
    #[inline]
    pub fn blocks(&self) -> usize {
        self.cols.div_ceil(ACTIVATION_BLOCK)
    }

    /// One row's bytes, padded with zeros to `blocks · 64`.
    #[inline]
    pub fn values(&self, row: usize) -> &[i8] {
        let len = self.blocks() * ACTIVATION_BLOCK;
        &self.values[row * len..][..len]
    }

    /// One row's scales, one for each block.
    #[inline]
    pub fn scales(&self, row: usize) -> &[f32] {
        &self.scales[row * self.blocks()..][..self.blocks()]
    }

    /// −8 · Σ of each four columns of a row, 16 for each block: what turns a dot product with
    /// offset-binary nibbles (v + 8) into one with v. Times 16 it does the same for bytes v + 128.
    #[inline]
    pub fn offsets(&self, row: usize) -> &[i32] {
        let len = self.blocks() * (ACTIVATION_BLOCK / LANE_COLUMNS);
        &self.offsets[row * len..][..len]
    }

    /// The numbers that the bytes of one row stand for (for tests and measurements of error).
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "output of one row");
        for (col, (o, q)) in out.iter_mut().zip(self.values(row)).enumerate() {
            *o = f32::from(*q) * self.scales(row)[col / ACTIVATION_BLOCK];
        }
    }
}

/// One row of [`QuantizedRows`], mutable.
#[derive(Debug)]
pub struct QuantizedRowMut<'a> {
    cols: usize,
    values: &'a mut [i8],
    scales: &'a mut [f32],
    offsets: &'a mut [i32],
}

impl QuantizedRowMut<'_> {
    /// Quantises one row.
    ///
    /// # Panics
    /// If `x` does not hold one row.
    pub fn quantize(self, x: &[f32]) {
        assert_eq!(x.len(), self.cols, "activations of one row");
        let (values, _) = self.values.as_chunks_mut::<ACTIVATION_BLOCK>();
        let (offsets, _) = self.offsets.as_chunks_mut::<{ ACTIVATION_BLOCK / LANE_COLUMNS }>();
        for (((x, q), scale), offsets) in x.chunks(ACTIVATION_BLOCK).zip(values).zip(self.scales).zip(offsets)
        {
            *scale = quantize_block(x, q);
            for (offset, q) in offsets.iter_mut().zip(q.as_chunks::<LANE_COLUMNS>().0) {
                *offset = -8 * q.iter().map(|q| i32::from(*q)).sum::<i32>();
            }
        }
    }
}

fn quantize_block(x: &[f32], q: &mut [i8; ACTIVATION_BLOCK]) -> f32 {
    /// Adding and subtracting 1.5 · 2²³ rounds |v| < 2²² to the nearest integer, ties to even,
    /// without the library call that `round_ties_even` is on a baseline x86-64.
    const ROUND: f32 = 12_582_912.0;
    q.fill(0);
    // The absolute bits of NaN and infinity are the largest, so one maximum finds them too.
    let most = f32::from_bits(x.iter().fold(0, |most, v| most.max(v.abs().to_bits())));
    if !most.is_finite() {
        return f32::NAN;
    }
    let scale = most / 127.0;
    if scale == 0.0 {
        return 0.0;
    }
    for (q, v) in q.iter_mut().zip(x) {
        // The clip matters only where `scale` is subnormal and has lost bits.
        *q = ((v / scale).clamp(-127.0, 127.0) + ROUND - ROUND) as i8;
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_and_offsets_are_those_worked_out_by_hand() {
        let mut x = vec![0.0; 66];
        x[..5].copy_from_slice(&[254.0, -1.0, 3.0, -254.0, 5.0]); // scale 2: 127, −0.5 → 0, 1.5 → 2, −127, 2.5 → 2
        x[65] = -127.0;
        let rows = QuantizedRows::new(&x, 66);
        assert_eq!((rows.rows(), rows.blocks()), (1, 2));
        assert_eq!(rows.scales(0), [2.0, 1.0]);
        assert_eq!(rows.values(0)[..5], [127, 0, 2, -127, 2]);
        assert_eq!(rows.values(0)[64..68], [0, -127, 0, 0]);
        assert_eq!(rows.offsets(0)[..2], [-16, -16]);
        assert_eq!(rows.offsets(0)[16], 1016);
    }

    #[test]
    fn a_block_that_is_not_finite_becomes_nan_and_leaves_its_neighbours() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = vec![1.0; 128];
            x[70] = bad;
            let rows = QuantizedRows::new(&x, 128);
            assert_eq!(rows.scales(0)[0], 1.0 / 127.0);
            assert!(rows.scales(0)[1].is_nan());
            assert_eq!(rows.values(0)[64..], [0; 64]);
        }
    }

    #[test]
    fn subnormal_blocks_neither_divide_by_zero_nor_wrap() {
        for x in [f32::from_bits(1), f32::from_bits(100), f32::from_bits(190), f32::from_bits(1000)] {
            let rows = QuantizedRows::new(&[x, -x], 2);
            let q = rows.values(0);
            assert_eq!(q[0], -q[1]);
            assert!(q[0] >= 0);
        }
    }

    #[test]
    fn memory_is_reused_and_stale_values_do_not_show() {
        let mut rows = QuantizedRows::new(&[5.0; 200], 100);
        rows.quantize(&[1.0; 3], 3);
        assert_eq!(rows, QuantizedRows::new(&[1.0; 3], 3));
    }

    proptest! {
        #[test]
        fn error_is_at_most_half_a_step(x in prop::collection::vec(-100.0f32..100.0, 1..300)) {
            let rows = QuantizedRows::new(&x, x.len());
            let mut back = vec![0.0; x.len()];
            rows.dequantize_row(0, &mut back);
            for (i, (was, is)) in x.iter().zip(&back).enumerate() {
                prop_assert!((was - is).abs() <= rows.scales(0)[i / 64] * 0.5001);
            }
        }

        #[test]
        fn rounding_is_that_of_rint(x in prop::collection::vec(-100.0f32..100.0, 1..65)) {
            let rows = QuantizedRows::new(&x, x.len());
            for (v, q) in x.iter().zip(rows.values(0)) {
                prop_assert_eq!((v / rows.scales(0)[0]).round_ties_even(), f32::from(*q));
            }
        }
    }
}
