//! What one matrix product reads and where it writes, checked before kernels see it.

use std::marker::PhantomData;
use std::ops::Range;

use metaltail_quant::{MatrixRef, QuantizedRows};

/// Rows of `f32` activations, each as long as the matrix has columns.
#[derive(Clone, Copy)]
pub(crate) struct FloatRows<'a> {
    data: &'a [f32],
    cols: usize,
}

impl<'a> FloatRows<'a> {
    pub fn new(data: &'a [f32], cols: usize) -> Self {
        assert!(
            cols > 0 && data.len().is_multiple_of(cols),
            "{} activations are no whole rows of {cols}",
            data.len()
        );
        FloatRows { data, cols }
    }

    pub fn row(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.cols..][..self.cols]
    }
}

/// Which stored row the i-th row of a product is.
#[derive(Clone, Copy)]
pub(crate) enum RowMap<'a> {
    /// Row i itself.
    Same,
    /// The first number of pair i.
    First(&'a [(u32, u32)]),
    /// The second number of pair i.
    Second(&'a [(u32, u32)]),
}

impl RowMap<'_> {
    #[inline]
    pub fn at(&self, i: usize) -> usize {
        match self {
            RowMap::Same => i,
            RowMap::First(pairs) => pairs[i].0 as usize,
            RowMap::Second(pairs) => pairs[i].1 as usize,
        }
    }
}

/// Rows of outputs that several threads fill at once, each its own columns.
#[derive(Clone, Copy)]
pub(crate) struct OutGrid<'a> {
    start: *mut f32,
    len: usize,
    stride: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: the grid stands for a `&mut [f32]`, which is Send; access from several threads goes
// through unsafe methods whose callers promise disjoint elements.
unsafe impl Send for OutGrid<'_> {}
// SAFETY: as above.
unsafe impl Sync for OutGrid<'_> {}

impl<'a> OutGrid<'a> {
    pub fn new(out: &'a mut [f32], stride: usize) -> Self {
        OutGrid { start: out.as_mut_ptr(), len: out.len(), stride, owner: PhantomData }
    }

    /// `len` numbers of this grid from `offset` on, as a grid with rows of its own.
    pub fn part(&self, offset: usize, len: usize, stride: usize) -> OutGrid<'a> {
        assert!(offset <= self.len && len <= self.len - offset, "part of an output grid");
        // SAFETY: `offset` is within the slice or one past its end.
        let start = unsafe { self.start.add(offset) };
        OutGrid { start, len, stride, owner: PhantomData }
    }

    /// Writes the number at `row`, `col`.
    ///
    /// # Safety
    /// No other thread may access the same element during the product.
    #[inline]
    pub unsafe fn set(&self, row: usize, col: usize, value: f32) {
        let at = row * self.stride + col;
        assert!(at < self.len, "output row {row}, column {col} lies outside {} numbers", self.len);
        // SAFETY: `at` is inside the slice, and the caller promises that nobody else uses it.
        unsafe { *self.start.add(at) = value };
    }

    /// Columns `cols` of `row`.
    ///
    /// # Safety
    /// Nobody else may access these elements while the slice lives.
    #[allow(clippy::mut_from_ref, reason = "the caller promises that slices do not overlap")]
    pub unsafe fn slice(&self, row: usize, cols: Range<usize>) -> &mut [f32] {
        let at = row * self.stride + cols.start;
        assert!(
            at <= self.len && cols.len() <= self.len - at,
            "output row {row} lies outside {} numbers",
            self.len
        );
        // SAFETY: the range is inside the slice, and the caller promises that nobody else uses it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), cols.len()) }
    }
}

/// One matrix product: out[i][r − first] = row r of `m` · input i, for i in 0..n.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a, X> {
    pub m: MatrixRef<'a>,
    /// Matrix row that goes to output column 0.
    pub first: usize,
    pub x: X,
    pub n: usize,
    pub x_rows: RowMap<'a>,
    pub out: OutGrid<'a>,
    pub out_rows: RowMap<'a>,
}

/// Activations of the `f32` path.
pub(crate) type FloatJob<'a> = Job<'a, FloatRows<'a>>;
/// Activations of the integer path.
pub(crate) type Q8Job<'a> = Job<'a, &'a QuantizedRows>;

impl<X> Job<'_, X> {
    /// Stores one result.
    ///
    /// # Safety
    /// Matrix row `row` must belong to the calling task alone.
    #[inline]
    pub unsafe fn store(&self, i: usize, row: usize, value: f32) {
        // SAFETY: passed on to the caller; one output column belongs to one matrix row.
        unsafe { self.out.set(self.out_rows.at(i), row - self.first, value) }
    }
}

/// Matrix rows of one pool task: enough bytes to pay for claiming it, few enough to share out.
pub(crate) fn rows_per_task(row_bytes: usize, rows: usize, n: usize, threads: usize) -> usize {
    /// A batch reads its inputs again for each task, so its tasks are larger.
    const BYTES_ONE: usize = 32 << 10;
    const BYTES_BATCH: usize = 128 << 10;
    let bytes = if n <= 4 { BYTES_ONE } else { BYTES_BATCH };
    // Small batches finish a small matrix before another thread wakes.
    if row_bytes.saturating_mul(rows).saturating_mul(n) <= BYTES_ONE || threads == 1 && n == 1 {
        return rows.max(1);
    }
    let fair = rows.div_ceil(4 * threads);
    (bytes / row_bytes.max(1)).min(fair).max(1).next_multiple_of(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_cover_whole_tiles_and_small_products_stay_in_one() {
        assert_eq!(rows_per_task(64, 64, 1, 8), 64);
        for (row_bytes, rows, n, threads) in [(3072, 2048, 1, 2), (12288, 6144, 512, 32), (1 << 20, 7, 1, 2)]
        {
            let block = rows_per_task(row_bytes, rows, n, threads);
            assert!(block >= 4 && block.is_multiple_of(4), "{block}");
        }
    }

    #[test]
    #[should_panic(expected = "lies outside")]
    fn writing_outside_the_outputs_panics() {
        let mut out = [0.0; 4];
        let grid = OutGrid::new(&mut out, 2);
        // SAFETY: only this thread holds the grid.
        unsafe { grid.set(2, 0, 1.0) };
    }
}
