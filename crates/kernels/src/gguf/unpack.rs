//! From the bytes of a span to codes, scales and minima.
//!
//! A span is what is unpacked with one look at its scales: a super-block of 256 columns, or two blocks of 32.
//! Where each bit lies: `metaltail_quant::gguf`, which the results are held against.

mod pairs;
mod super_blocks;

use std::arch::asm;

use crate::simd::Codes64;

pub(crate) use pairs::{Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
pub(crate) use super_blocks::{Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K};

/// Scales and minima of a span.
#[repr(C, align(64))]
#[derive(Clone, Copy, Default)]
pub(crate) struct Scales(pub [f32; 32]);

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
    /// Signed codes of the same 64 columns as numbers.
    ///
    /// # Safety
    /// As [`Blocks::codes`].
    #[inline(always)]
    unsafe fn vectors<S: Codes64>(p: *const u8, step: usize) -> [S; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            let codes = Self::codes::<S>(p, step);
            by_way_of_memory(match Self::ZERO {
                None | Some(0) => codes,
                Some(zero) => S::minus(codes, zero),
            })
        }
    }
}

/// 64 signed codes as numbers. A widening load costs less than taking registers apart, which compilers prefer
/// where they see that the bytes were just stored; so they are kept from seeing it.
///
/// # Safety
/// As [`crate::simd::Simd`].
#[inline(always)]
unsafe fn by_way_of_memory<S: Codes64>(codes: S::Bytes) -> [S; 4] {
    let mut bytes = Aligned([0i8; 64]);
    // SAFETY: 64 bytes are written and read.
    unsafe {
        S::store_codes(codes, bytes.0.as_mut_ptr());
        let p: *const u8 = hidden(&mut bytes).0.as_ptr().cast();
        [S::load_i8(p), S::load_i8(p.add(16)), S::load_i8(p.add(32)), S::load_i8(p.add(48))]
    }
}

/// The same reference, of which the compiler no longer knows what was stored there. No instruction comes of it.
#[inline(always)]
pub(crate) fn hidden<T>(value: &mut T) -> &mut T {
    let mut p: *mut T = value;
    // SAFETY: nothing is executed; the pointer comes out as it went in, with the borrow it came from.
    unsafe {
        asm!("/* {0} */", inout(reg) p, options(nostack, preserves_flags));
        &mut *p
    }
}

/// One cache line.
#[repr(align(64))]
struct Aligned([i8; 64]);
