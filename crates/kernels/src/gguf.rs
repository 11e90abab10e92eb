//! The block formats of GGUF: 64 columns are unpacked at a time, once for all inputs of a tile.
//!
//! `unpack` turns a span of a row into signed codes, scales and minima, one implementation a format for all
//! instruction sets; `float`, `integer` and `transpose` are the loops of the three products. What they must
//! give is defined in `scalar_gguf`.

pub(crate) mod float;
pub(crate) mod integer;
pub(crate) mod transpose;
pub(crate) mod unpack;

use std::ops::Range;

use crate::job::Job;
use crate::simd::Simd;
use crate::tiles::{INPUT_BYTES, TILE_ROWS};

/// The product of a few matrix rows and a few inputs, whose accumulators stay in registers.
trait Tile<X> {
    /// Rows `rows` (at most 4) × inputs `i..i + N`.
    ///
    /// # Safety
    /// The processor has the instruction set of the implementation; the rows lie in the matrix, whose format is
    /// the implementation's, and belong to this task alone; `rows` is not empty and `i + N <= job.n`.
    unsafe fn run<const N: usize>(job: &Job<'_, X>, rows: Range<usize>, i: usize);
}

/// Inputs, of `input_bytes` each, in blocks that stay in cache, rows in tiles, inputs in tiles of 4, 2 and 1.
///
/// # Safety
/// As [`Tile::run`].
#[inline(always)]
unsafe fn in_tiles<X, T: Tile<X>>(job: &Job<'_, X>, rows: Range<usize>, input_bytes: usize) {
    let block = (INPUT_BYTES / input_bytes).max(4);
    for first in (0..job.n).step_by(block) {
        let last = job.n.min(first + block);
        for row in rows.clone().step_by(TILE_ROWS) {
            let end = rows.end.min(row + TILE_ROWS);
            let mut i = first;
            // SAFETY: the caller's promise; `i + N <= last <= n`.
            unsafe {
                while i + 4 <= last {
                    T::run::<4>(job, row..end, i);
                    i += 4;
                }
                if i + 2 <= last {
                    T::run::<2>(job, row..end, i);
                    i += 2;
                }
                if i < last {
                    T::run::<1>(job, row..end, i);
                }
            }
        }
    }
}

/// Asks for the bytes at `p`, which are wanted soon; any address.
///
/// # Safety
/// The processor has the instruction set of `S`.
#[inline(always)]
unsafe fn prefetch<S: Simd>(p: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        // SAFETY: the caller's promise.
        unsafe { S::prefetch_second(p.wrapping_add(line)) };
    }
}

/// Calls a function that is generic over [`unpack::Blocks`] with the implementation of a [`metaltail_quant::GgufFormat`].
macro_rules! for_format {
    ($format:expr, $function:ident($($arg:expr),*)) => {{
        use crate::gguf::unpack as u;
        use metaltail_quant::GgufFormat as F;
        match $format {
            F::Q8_0 => $function::<u::Q8_0>($($arg),*),
            F::Q4_0 => $function::<u::Q4_0>($($arg),*),
            F::Q4_1 => $function::<u::Q4_1>($($arg),*),
            F::Q5_0 => $function::<u::Q5_0>($($arg),*),
            F::Q5_1 => $function::<u::Q5_1>($($arg),*),
            F::Mxfp4 => $function::<u::Mxfp4>($($arg),*),
            F::Iq4Nl => $function::<u::Iq4Nl>($($arg),*),
            F::Q2K => $function::<u::Q2K>($($arg),*),
            F::Q3K => $function::<u::Q3K>($($arg),*),
            F::Q4K => $function::<u::Q4K>($($arg),*),
            F::Q5K => $function::<u::Q5K>($($arg),*),
            F::Q6K => $function::<u::Q6K>($($arg),*),
            F::Iq4Xs => $function::<u::Iq4Xs>($($arg),*),
        }
    }};
}
pub(crate) use for_format;
