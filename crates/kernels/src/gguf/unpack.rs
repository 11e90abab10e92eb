//! From the bytes of a span to codes, scales and minima.
//!
//! A span is what is unpacked with one look at its scales: a super-block of 256 columns, or two blocks of 32.
//! Where each bit lies: `metaltail_quant::gguf`, which the results are held against.

mod pairs;
mod super_blocks;

use crate::simd::Codes64;

pub(crate) use pairs::{Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
pub(crate) use super_blocks::{Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K};

/// Scales and minima of a span.
#[repr(C, align(64))]
#[derive(Default)]
pub(crate) struct Scales(pub [f32; 32]);

/// Signed codes of 64 columns, in memory.
#[repr(C, align(64))]
pub(crate) struct Codes(pub [i8; 64]);

impl Codes {
    /// Codes of 64 columns, number `step` of the span at `p`.
    ///
    /// # Safety
    /// As [`Blocks::codes`].
    #[inline(always)]
    pub unsafe fn unpack<S: Codes64, B: Blocks>(p: *const u8, step: usize) -> Codes {
        let mut codes = Codes([0; 64]);
        // SAFETY: the caller's promise; room for 64 bytes.
        unsafe {
            let unpacked = B::codes::<S>(p, step);
            let signed = match B::ZERO {
                None | Some(0) => unpacked,
                Some(zero) => S::minus(unpacked, zero),
            };
            S::store_codes(signed, codes.0.as_mut_ptr());
        }
        codes
    }

    /// Columns 16 · v … of the 64.
    ///
    /// # Safety
    /// As [`crate::simd::Simd`]; `v` is below 4.
    #[inline(always)]
    pub unsafe fn vector<S: Codes64>(&self, v: usize) -> S {
        // SAFETY: the caller's promise.
        unsafe { S::load_i8(self.0.as_ptr().add(16 * v).cast()) }
    }
}

/// One format. Codes of 64 columns come as bytes, a `zero` above their signed values.
pub(crate) trait Blocks {
    /// Columns of a span: 64 or 256.
    const SPAN: usize;
    /// Bytes of a span.
    const BYTES: usize;
    /// Columns that share a scale: 16 or 32.
    const GROUP: usize;
    /// Whether groups have minima.
    const MINIMA: bool;
    /// What is taken off codes of 0..=63: 0, 4, 8, 16 or 32; `None` where codes are signed already.
    const ZERO: Option<i8>;
    /// Where in [`Scales`] the scale of a group is; its minimum stands [`Blocks::MINIMUM`] further.
    fn scale_at(group: usize) -> usize {
        group
    }
    /// Distance of a minimum from its scale.
    const MINIMUM: usize = 16;
    /// Scales (and minima) of a span.
    ///
    /// # Safety
    /// As [`crate::simd::Simd`]; `p` is readable for [`Blocks::BYTES`].
    unsafe fn scales<S: Codes64>(p: *const u8, out: &mut Scales);
    /// Codes of 64 columns, number `step` of the span.
    ///
    /// # Safety
    /// As [`Blocks::scales`]; `step` is below `SPAN / 64`.
    unsafe fn codes<S: Codes64>(p: *const u8, step: usize) -> S::Bytes;
}
