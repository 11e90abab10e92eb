//! Formats of 32 columns a block: a span is two blocks.

use metaltail_quant::{E8M0_HALF, IQ4_VALUES, MXFP4_VALUES};

use super::{Blocks, Scales};
use crate::simd::{Codes64, Table};

/// Formats whose blocks begin with an `f16`: name, bytes of a block, zero, whether a minimum follows the scale,
/// how 64 codes are read from the blocks at `a` and `b`; where that is cheaper, how as numbers.
macro_rules! pairs {
    ($($(#[$doc:meta])* $name:ident: $bytes:literal, $zero:expr, $minima:literal, ($a:ident, $b:ident) => $codes:expr $(, vectors $vectors:expr)?;)*) => {$(
        $(#[$doc])*
        #[allow(non_camel_case_types, reason = "the name of the format")]
        pub(crate) struct $name;

        impl Blocks for $name {
            const SPAN: usize = 64;
            const BYTES: usize = 2 * $bytes;
            const GROUP: usize = 32;
            const MINIMA: bool = $minima;
            const ZERO: Option<i8> = $zero;

            #[inline(always)]
            unsafe fn scales<S: Codes64>(p: *const u8, out: &mut Scales) {
                let out = out.0.as_mut_ptr();
                // SAFETY: both blocks begin with an `f16`, and with another where they have minima.
                unsafe {
                    S::widen_halves(p, p.add($bytes), out);
                    if $minima {
                        S::widen_halves(p.add(2), p.add($bytes + 2), out.add(Self::MINIMUM));
                    }
                }
            }

            #[inline(always)]
            unsafe fn codes<S: Codes64>(p: *const u8, _step: usize) -> S::Bytes {
                // SAFETY: two blocks are readable.
                unsafe {
                    let ($a, $b) = (p, p.add($bytes));
                    $codes
                }
            }

            $(
                #[inline(always)]
                unsafe fn vectors<S: Codes64>(p: *const u8, _step: usize) -> [S; 4] {
                    // SAFETY: two blocks are readable.
                    unsafe {
                        let ($a, $b) = (p, p.add($bytes));
                        $vectors
                    }
                }
            )?
        }
    )*};
}

/// Four-bit codes of two blocks as numbers.
///
/// # Safety
/// As [`crate::simd::Simd`]; 16 bytes are readable at both.
#[inline(always)]
pub(super) unsafe fn table_vectors<S: Codes64>(a: *const u8, b: *const u8, table: &Table) -> [S; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        [
            S::table_vector::<0>(a, table),
            S::table_vector::<4>(a, table),
            S::table_vector::<0>(b, table),
            S::table_vector::<4>(b, table),
        ]
    }
}

static LESS_8: Table = Table::plain(4, 8);
pub(super) static NIBBLES: Table = Table::plain(4, 0);
pub(super) static IQ4: Table = Table::new(IQ4_VALUES);
static MXFP4: Table = Table::new(MXFP4_VALUES);

/// Four-bit codes of two blocks, with the fifth bits that stand before them as a `u32`.
///
/// # Safety
/// As [`crate::simd::Simd`]; 20 bytes are readable at both.
#[inline(always)]
unsafe fn five_bits<S: Codes64>(a: *const u8, b: *const u8) -> S::Bytes {
    // SAFETY: the caller's promise.
    unsafe {
        let low = u64::from(a.cast::<u32>().read_unaligned());
        let high = u64::from(b.cast::<u32>().read_unaligned());
        let fifth = S::sixteens(low | high << 32);
        S::or_shifted::<0>(S::nibble_pairs(a.add(4), b.add(4)), fifth)
    }
}

pairs! {
    /// int8.
    Q8_0: 34, None, false, (a, b) => S::join(a.add(2), b.add(2)), vectors
        [S::load_i8(a.add(2)), S::load_i8(a.add(18)), S::load_i8(b.add(2)), S::load_i8(b.add(18))];
    /// Four bits.
    Q4_0: 18, Some(8), false, (a, b) => S::nibble_pairs(a.add(2), b.add(2)), vectors table_vectors(a.add(2), b.add(2), &LESS_8);
    /// Four bits with a minimum.
    Q4_1: 20, Some(0), true, (a, b) => S::nibble_pairs(a.add(4), b.add(4)), vectors table_vectors(a.add(4), b.add(4), &NIBBLES);
    /// Five bits.
    Q5_0: 22, Some(16), false, (a, b) => five_bits::<S>(a.add(2), b.add(2));
    /// Five bits with a minimum.
    Q5_1: 24, Some(0), true, (a, b) => five_bits::<S>(a.add(4), b.add(4));
    /// A table of 16.
    Iq4Nl: 18, None, false, (a, b) => S::look_up(S::nibble_pairs(a.add(2), b.add(2)), &IQ4.codes), vectors table_vectors(a.add(2), b.add(2), &IQ4);
}

/// E2M1 with a power of two.
pub(crate) struct Mxfp4;

/// The values of MXFP4's codes above their zero of 16, so that they are codes of 0..=63.
static MXFP4_CODES: [i8; 16] = {
    let mut codes = MXFP4_VALUES;
    let mut i = 0;
    while i < 16 {
        codes[i] += 16;
        i += 1;
    }
    codes
};

impl Blocks for Mxfp4 {
    const SPAN: usize = 64;
    const BYTES: usize = 2 * 17;
    const GROUP: usize = 32;
    const MINIMA: bool = false;
    const ZERO: Option<i8> = Some(16);

    #[inline(always)]
    unsafe fn scales<S: Codes64>(p: *const u8, out: &mut Scales) {
        // SAFETY: both blocks begin with their scale.
        unsafe {
            out.0[0] = E8M0_HALF[usize::from(*p)];
            out.0[1] = E8M0_HALF[usize::from(*p.add(17))];
        }
    }

    #[inline(always)]
    unsafe fn codes<S: Codes64>(p: *const u8, _step: usize) -> S::Bytes {
        // SAFETY: two blocks are readable.
        unsafe { S::look_up(S::nibble_pairs(p.add(1), p.add(18)), &MXFP4_CODES) }
    }

    #[inline(always)]
    unsafe fn vectors<S: Codes64>(p: *const u8, _step: usize) -> [S; 4] {
        // SAFETY: two blocks are readable.
        unsafe { table_vectors(p.add(1), p.add(18), &MXFP4) }
    }
}
