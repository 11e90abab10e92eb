//! Matrix products on the best instruction set.

use std::ops::Range;

use metaltail_quant::{Format, MatrixRef, QuantizedRows};

use crate::job::{FloatJob, FloatRows, Job, OutGrid, Q8Job, RowMap, rows_per_task};
use crate::{Isa, Pool, UnsupportedIsa, scalar};

/// The kernels of one instruction set. Every instruction set gives the same bits
/// (`docs/design/formats.md`), so the choice is one of speed alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels {
    isa: Isa,
}

/// Calls the function of the same name in the module of the chosen instruction set.
macro_rules! dispatch {
    ($isa:expr, $name:ident($($arg:expr),*)) => {
        match $isa {
            // SAFETY: `Kernels` exists only for an instruction set that this processor has; what
            // the arguments must hold is checked by the callers of this macro.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { crate::avx2::$name($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { crate::avx512::$name($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => unsafe { crate::avx512::vnni::$name($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => unsafe { crate::neon::$name($($arg),*) },
            _ => scalar::$name($($arg),*),
        }
    };
}

impl Kernels {
    /// Kernels of a given instruction set.
    ///
    /// # Errors
    /// If this processor lacks it.
    pub fn new(isa: Isa) -> Result<Kernels, UnsupportedIsa> {
        if isa.is_supported() { Ok(Kernels { isa }) } else { Err(UnsupportedIsa { isa }) }
    }

    /// Kernels of the best instruction set that this processor has.
    pub fn best() -> Kernels {
        Kernels { isa: Isa::detect() }
    }

    /// The instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Whether [`Kernels::matmul_q8`] takes matrices of `format`.
    pub fn has_integer_path(format: Format) -> bool {
        matches!(format, Format::Int8Row | Format::Int4Row | Format::Int4Group(_) | Format::Gguf(_))
    }

    /// `out[i · out_stride + (r − rows.start)]` = row r of `m` · input i, for r in `rows`, i in 0..n.
    ///
    /// `x` is n × cols. The bits of a result depend on its row and its input alone.
    ///
    /// # Panics
    /// If `rows` lie outside `m`, `x` is not n × cols or the results do not fit in `out`.
    #[allow(clippy::too_many_arguments, reason = "a matrix product has that many parts")]
    pub fn matmul(
        &self,
        pool: &Pool,
        m: MatrixRef<'_>,
        rows: Range<usize>,
        x: &[f32],
        n: usize,
        out: &mut [f32],
        out_stride: usize,
    ) {
        assert_eq!(Some(x.len()), n.checked_mul(m.layout().cols()), "activations of {n} inputs");
        let x = FloatRows::new(x, m.layout().cols());
        let job = whole_job(m, &rows, x, n, out, out_stride);
        self.parallel(pool, &rows, &job, |rows| self.float_rows(&job, rows));
    }

    /// The integer path: as [`Kernels::matmul`] with quantised activations, one output row for each of theirs.
    ///
    /// # Panics
    /// As [`Kernels::matmul`], and if the format has no integer path ([`Kernels::has_integer_path`]).
    pub fn matmul_q8(
        &self,
        pool: &Pool,
        m: MatrixRef<'_>,
        rows: Range<usize>,
        x: &QuantizedRows,
        out: &mut [f32],
        out_stride: usize,
    ) {
        let format = m.layout().format();
        assert!(Self::has_integer_path(format), "{format} has no integer path");
        assert!(
            x.rows() == 0 || x.cols() == m.layout().cols(),
            "activations of {} columns for a matrix of {}",
            x.cols(),
            m.layout().cols()
        );
        let job = whole_job(m, &rows, x, x.rows(), out, out_stride);
        self.parallel(pool, &rows, &job, |rows| self.q8_rows(&job, rows));
    }

    /// `out[c] = Σ x[r − rows.start] · w[r][c]` over r in `rows`, ascending, from +0: each term is
    /// fma(stored value, x · scale, out). On the calling thread.
    ///
    /// # Panics
    /// If `rows` lie outside `m`, `x` has not one number a row or `out` not one a column.
    pub fn matmul_t(&self, m: MatrixRef<'_>, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
        assert!(
            rows.start <= rows.end && rows.end <= m.layout().rows(),
            "rows {rows:?} of a matrix of {}",
            m.layout().rows()
        );
        assert_eq!(x.len(), rows.len(), "one factor for each row");
        assert_eq!(out.len(), m.layout().cols(), "one output for each column");
        out.fill(0.0);
        dispatch!(self.isa, matmul_t(m, rows, x, out));
    }

    /// Dot product in the canonical order.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn dot(&self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len(), "lengths of a dot product");
        dispatch!(self.isa, dot(a, b))
    }

    /// out = fma(alpha, x, out).
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn axpy(&self, alpha: f32, x: &[f32], out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "lengths of a sum");
        dispatch!(self.isa, axpy(alpha, x, out));
    }

    /// Rows of the `f32` path, on the calling thread. `rows` must lie in the job's matrix and
    /// belong to this task alone.
    pub(crate) fn float_rows(&self, job: &FloatJob<'_>, rows: Range<usize>) {
        debug_assert!(rows.end <= job.m.layout().rows());
        dispatch!(self.isa, matmul(job, rows));
    }

    /// Rows of the integer path; as [`Kernels::float_rows`].
    pub(crate) fn q8_rows(&self, job: &Q8Job<'_>, rows: Range<usize>) {
        debug_assert!(rows.end <= job.m.layout().rows());
        dispatch!(self.isa, matmul_q8(job, rows));
    }

    fn parallel<X>(
        &self,
        pool: &Pool,
        rows: &Range<usize>,
        job: &Job<'_, X>,
        work: impl Fn(Range<usize>) + Sync,
    ) {
        let block = rows_per_task(job.m.layout().row_bytes(), rows.len(), job.n, pool.threads());
        pool.run(rows.len().div_ceil(block), &|task| {
            let start = rows.start + task * block;
            work(start..rows.end.min(start + block));
        });
    }
}

/// The job of a public product, its arguments checked.
fn whole_job<'a, X>(
    m: MatrixRef<'a>,
    rows: &Range<usize>,
    x: X,
    n: usize,
    out: &'a mut [f32],
    stride: usize,
) -> Job<'a, X> {
    assert!(
        rows.start <= rows.end && rows.end <= m.layout().rows(),
        "rows {rows:?} of a matrix of {}",
        m.layout().rows()
    );
    assert!(n <= 1 || stride >= rows.len(), "output stride {stride} for {} rows", rows.len());
    Job {
        m,
        first: rows.start,
        x,
        n,
        x_rows: RowMap::Same,
        out: OutGrid::new(out, stride),
        out_rows: RowMap::Same,
    }
}
