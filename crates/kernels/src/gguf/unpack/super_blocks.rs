//! Formats of 256 columns a block: a span is a block. Small scales are spread to a byte each within 64-bit
//! words, and then multiplied by `d` and `dmin`, 16 at a time.

use super::pairs::{IQ4, NIBBLES, table_vectors};
use super::{Blocks, Scales};
use crate::simd::{Codes64, Table};

/// Two-bit codes, whatever stands above them.
static PAIRS: Table = Table::plain(2, 0);

/// Eight bytes.
///
/// # Safety
/// `p` is readable for eight bytes.
#[inline(always)]
unsafe fn word(p: *const u8) -> u64 {
    // SAFETY: the caller's promise; any alignment. Little-endian, as the machines with an implementation.
    unsafe { p.cast::<u64>().read_unaligned() }
}

/// Four bytes.
///
/// # Safety
/// `p` is readable for four bytes.
#[inline(always)]
unsafe fn half_word(p: *const u8) -> u64 {
    // SAFETY: the caller's promise; any alignment.
    unsafe { u64::from(p.cast::<u32>().read_unaligned()) }
}

/// `byte` in each of eight bytes.
const fn each(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

/// Bytes of 0..=63, less 32, as signed bytes: no sum carries into the next byte.
#[inline(always)]
fn less_32(bytes: u64) -> u64 {
    (bytes + each(0x60)) ^ each(0x80)
}

/// Multiplies 16 small signed numbers by `factors` into `out[at..at + 16]`.
///
/// # Safety
/// As [`crate::simd::Simd`].
#[inline(always)]
unsafe fn multiply<S: Codes64>(small: [u64; 2], factors: S, out: &mut Scales, at: usize) {
    let out = out.0[at..at + 16].as_mut_ptr();
    // SAFETY: 16 bytes are read, 16 numbers written.
    unsafe { S::load_i8(small.as_ptr().cast()).mul(factors).store(out.cast()) }
}

/// Two `f16` that lie side by side: `d` and −`dmin`.
///
/// # Safety
/// As [`crate::simd::Simd`]; `p` is readable for four bytes.
#[inline(always)]
unsafe fn two_factors<S: Codes64>(p: *const u8) -> [f32; 2] {
    let mut both = [0.0; 2];
    // SAFETY: the caller's promise; room for two numbers.
    unsafe { S::widen_halves(p, p.add(2), both.as_mut_ptr()) };
    [both[0], -both[1]]
}

/// One `f16`.
///
/// # Safety
/// As [`crate::simd::Simd`]; `p` is readable for two bytes.
#[inline(always)]
unsafe fn factor<S: Codes64>(p: *const u8) -> S {
    let mut both = [0.0; 2];
    // SAFETY: the caller's promise; room for two numbers.
    unsafe {
        S::widen_halves(p, p, both.as_mut_ptr());
        S::splat(both[0])
    }
}

/// Two bits, scales and minima of four.
pub(crate) struct Q2K;

impl Blocks for Q2K {
    const SPAN: usize = 256;
    const BYTES: usize = 84;
    const GROUP: usize = 16;
    const MINIMA: bool = true;
    const ZERO: Option<i8> = Some(0);

    #[inline(always)]
    unsafe fn scales<S: Codes64>(p: *const u8, out: &mut Scales) {
        // SAFETY: a block.
        unsafe {
            let [d, least] = two_factors::<S>(p.add(80));
            let both = [word(p), word(p.add(8))];
            multiply(both.map(|both| both & each(15)), S::splat(d), out, 0);
            multiply(both.map(|both| both >> 4 & each(15)), S::splat(least), out, Self::MINIMUM);
        }
    }

    #[inline(always)]
    unsafe fn codes<S: Codes64>(p: *const u8, step: usize) -> S::Bytes {
        let shift = step as u32 % 2 * 4;
        // SAFETY: 64 bytes of codes from byte 16.
        unsafe { S::twice(p.add(16 + step / 2 * 32), shift, shift + 2, 3) }
    }

    #[inline(always)]
    unsafe fn vectors<S: Codes64>(p: *const u8, step: usize) -> [S; 4] {
        // SAFETY: 64 bytes of codes from byte 16.
        unsafe {
            let a = p.add(16 + step / 2 * 32);
            let b = a.add(16);
            if step.is_multiple_of(2) {
                [
                    S::table_vector::<0>(a, &PAIRS),
                    S::table_vector::<0>(b, &PAIRS),
                    S::table_vector::<2>(a, &PAIRS),
                    S::table_vector::<2>(b, &PAIRS),
                ]
            } else {
                [
                    S::table_vector::<4>(a, &PAIRS),
                    S::table_vector::<4>(b, &PAIRS),
                    S::table_vector::<6>(a, &PAIRS),
                    S::table_vector::<6>(b, &PAIRS),
                ]
            }
        }
    }
}

/// Three bits, scales of six.
pub(crate) struct Q3K;

impl Blocks for Q3K {
    const SPAN: usize = 256;
    const BYTES: usize = 110;
    const GROUP: usize = 16;
    const MINIMA: bool = false;
    const ZERO: Option<i8> = Some(4);

    #[inline(always)]
    unsafe fn scales<S: Codes64>(p: *const u8, out: &mut Scales) {
        // SAFETY: a block.
        unsafe {
            let (low, high) = (word(p.add(96)), half_word(p.add(104)));
            // Bits 0 and 1 of each upper byte belong to scales 0..4, 2 and 3 to 4..8, and so on.
            let first = (high | high >> 2 << 32) & each(3);
            let last = (high >> 4 | high >> 6 << 32) & each(3);
            let scales = [low & each(15) | first << 4, low >> 4 & each(15) | last << 4];
            multiply(scales.map(less_32), factor::<S>(p.add(108)), out, 0);
        }
    }

    #[inline(always)]
    unsafe fn codes<S: Codes64>(p: *const u8, step: usize) -> S::Bytes {
        let (shift, bit) = (step as u32 % 2 * 4, step as u32 * 2);
        // SAFETY: 32 bytes of third bits, 64 of the others.
        unsafe {
            let low = S::twice(p.add(32 + step / 2 * 32), shift, shift + 2, 3);
            S::or_shifted::<2>(low, S::twice(p, bit, bit + 1, 1))
        }
    }
}

/// Eight scales and minima of six bits, at 0..4, 8..12 and at 4..8, 12..16 of `out`.
///
/// # Safety
/// As [`crate::simd::Simd`]; `p` is readable for 16 bytes.
#[inline(always)]
unsafe fn six_bits<S: Codes64>(p: *const u8, out: &mut Scales) {
    // SAFETY: the caller's promise.
    unsafe {
        let [d, least] = two_factors::<S>(p);
        let (first, rest) = (word(p.add(4)), half_word(p.add(12)));
        let last = (rest | rest >> 4 << 32) & each(15) | (first >> 6 & each(3)) << 4;
        multiply([first & each(63), last], S::quarters([d, least, d, least]), out, 0);
    }
}

/// Where [`six_bits`] puts a scale.
const fn six_bits_at(group: usize) -> usize {
    group / 4 * 8 + group % 4
}

/// Four bits, scales and minima of six.
pub(crate) struct Q4K;

impl Blocks for Q4K {
    const SPAN: usize = 256;
    const BYTES: usize = 144;
    const GROUP: usize = 32;
    const MINIMA: bool = true;
    const ZERO: Option<i8> = Some(0);
    const MINIMUM: usize = 4;

    #[inline(always)]
    fn scale_at(group: usize) -> usize {
        six_bits_at(group)
    }

    #[inline(always)]
    unsafe fn scales<S: Codes64>(p: *const u8, out: &mut Scales) {
        // SAFETY: a block.
        unsafe { six_bits::<S>(p, out) }
    }

    #[inline(always)]
    unsafe fn codes<S: Codes64>(p: *const u8, step: usize) -> S::Bytes {
        // SAFETY: 128 bytes of codes from byte 16.
        unsafe { S::twice(p.add(16 + step * 32), 0, 4, 15) }
    }

    #[inline(always)]
    unsafe fn vectors<S: Codes64>(p: *const u8, step: usize) -> [S; 4] {
        // SAFETY: 128 bytes of codes from byte 16.
        unsafe {
            let (a, b) = (p.add(16 + step * 32), p.add(32 + step * 32));
            [
                S::table_vector::<0>(a, &NIBBLES),
                S::table_vector::<0>(b, &NIBBLES),
                S::table_vector::<4>(a, &NIBBLES),
                S::table_vector::<4>(b, &NIBBLES),
            ]
        }
    }
}

/// Five bits, scales and minima of six.
pub(crate) struct Q5K;

impl Blocks for Q5K {
    const SPAN: usize = 256;
    const BYTES: usize = 176;
    const GROUP: usize = 32;
    const MINIMA: bool = true;
    const ZERO: Option<i8> = Some(0);
    const MINIMUM: usize = 4;

    #[inline(always)]
    fn scale_at(group: usize) -> usize {
        six_bits_at(group)
    }

    #[inline(always)]
    unsafe fn scales<S: Codes64>(p: *const u8, out: &mut Scales) {
        // SAFETY: a block.
        unsafe { six_bits::<S>(p, out) }
    }

    #[inline(always)]
    unsafe fn codes<S: Codes64>(p: *const u8, step: usize) -> S::Bytes {
        let bit = step as u32 * 2;
        // SAFETY: 32 bytes of fifth bits from byte 16, 128 of the others.
        unsafe {
            let low = S::twice(p.add(48 + step * 32), 0, 4, 15);
            S::or_shifted::<4>(low, S::twice(p.add(16), bit, bit + 1, 1))
        }
    }
}

/// Six bits, scales of eight.
pub(crate) struct Q6K;

impl Blocks for Q6K {
    const SPAN: usize = 256;
    const BYTES: usize = 210;
    const GROUP: usize = 16;
    const MINIMA: bool = false;
    const ZERO: Option<i8> = Some(32);

    #[inline(always)]
    unsafe fn scales<S: Codes64>(p: *const u8, out: &mut Scales) {
        // SAFETY: 16 scales from byte 192, `d` at 208.
        unsafe {
            multiply([word(p.add(192)), word(p.add(200))], factor::<S>(p.add(208)), out, 0);
        }
    }

    #[inline(always)]
    unsafe fn codes<S: Codes64>(p: *const u8, step: usize) -> S::Bytes {
        let shift = step as u32 % 2 * 4;
        // SAFETY: 128 bytes of lower bits, 64 of upper ones.
        unsafe {
            let low = S::shifted(p.add(step / 2 * 64), shift, 15);
            S::or_shifted::<4>(low, S::twice(p.add(128 + step / 2 * 32), shift, shift + 2, 3))
        }
    }
}

/// A table of 16, scales of six bits.
pub(crate) struct Iq4Xs;

impl Blocks for Iq4Xs {
    const SPAN: usize = 256;
    const BYTES: usize = 136;
    const GROUP: usize = 32;
    const MINIMA: bool = false;
    const ZERO: Option<i8> = None;

    #[inline(always)]
    unsafe fn scales<S: Codes64>(p: *const u8, out: &mut Scales) {
        // SAFETY: a block.
        unsafe {
            // Eight pairs of bits and eight nibbles, spread to a byte each by halving distances.
            let high = u64::from(p.add(2).cast::<u16>().read_unaligned());
            let high = (high | high << 24) & 0x0000_00FF_0000_00FF;
            let high = (high | high << 12) & 0x000F_000F_000F_000F;
            let high = (high | high << 6) & each(3);
            let low = half_word(p.add(4));
            let low = (low | low << 16) & 0x0000_FFFF_0000_FFFF;
            let low = (low | low << 8) & 0x00FF_00FF_00FF_00FF;
            let low = (low | low << 4) & each(15);
            multiply([less_32(low | high << 4), 0], factor::<S>(p), out, 0);
        }
    }

    #[inline(always)]
    unsafe fn codes<S: Codes64>(p: *const u8, step: usize) -> S::Bytes {
        let at = 8 + step * 32;
        // SAFETY: 128 bytes of codes from byte 8.
        unsafe { S::look_up(S::nibble_pairs(p.add(at), p.add(at + 16)), &IQ4.codes) }
    }

    #[inline(always)]
    unsafe fn vectors<S: Codes64>(p: *const u8, step: usize) -> [S; 4] {
        let at = 8 + step * 32;
        // SAFETY: 128 bytes of codes from byte 8.
        unsafe { table_vectors(p.add(at), p.add(at + 16), &IQ4) }
    }
}
