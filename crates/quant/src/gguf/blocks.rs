//! Blocks of 32 values: one unit each.
//!
//! `d` and `m` are little-endian `f16`. Of the 16 bytes of four-bit codes byte `j` has value `j` in its
//! low half and value `j + 16` in its high half. `h` is a little-endian `u32` whose bit `i` is the fifth
//! bit of value `i`.

use half::f16;

use super::{GGUF_UNIT, GgufUnit};

/// Values of the codes of IQ4_NL and IQ4_XS.
pub static IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice the values of the codes of MXFP4 (E2M1), so that they are whole numbers.
pub static MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Half of every scale of MXFP4: 2^(e − 128). The code 255, NaN in the OCP specification, is 2^127 to
/// GGUF's own code, and so here.
pub static E8M0_HALF: [f32; 256] = e8m0_half();

const fn e8m0_half() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0u32;
    while code < 256 {
        // The first two are subnormal.
        values[code as usize] = f32::from_bits(if code < 2 { 0x0020_0000 << code } else { (code - 1) << 23 });
        code += 1;
    }
    values
}

/// The `f16` at byte `at`.
pub(super) fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The four-bit codes of 16 bytes.
pub(super) fn nibbles(bytes: &[u8]) -> [u8; GGUF_UNIT] {
    std::array::from_fn(|i| if i < 16 { bytes[i] & 15 } else { bytes[i - 16] >> 4 })
}

/// Codes that share one scale and one minimum, less `zero`.
fn unit(codes: [u8; GGUF_UNIT], zero: i8, d: f32, m: f32) -> GgufUnit {
    // Codes are below 32, so neither the cast nor the difference overflows.
    GgufUnit { codes: codes.map(|code| code.cast_signed() - zero), scales: [d; 2], minima: [m; 2] }
}

/// `d`, 32 × int8.
pub(super) fn q8_0(block: &[u8]) -> GgufUnit {
    let codes = std::array::from_fn(|i| block[2 + i].cast_signed());
    GgufUnit { codes, scales: [half(block, 0); 2], minima: [0.0; 2] }
}

/// `d`, codes.
pub(super) fn q4_0(block: &[u8]) -> GgufUnit {
    unit(nibbles(&block[2..]), 8, half(block, 0), 0.0)
}

/// `d`, `m`, codes.
pub(super) fn q4_1(block: &[u8]) -> GgufUnit {
    unit(nibbles(&block[4..]), 0, half(block, 0), half(block, 2))
}

/// Codes with the fifth bits of `h`.
fn with_fifth_bits(h: &[u8], codes: [u8; GGUF_UNIT]) -> [u8; GGUF_UNIT] {
    std::array::from_fn(|i| codes[i] | ((h[i / 8] >> (i % 8)) & 1) << 4)
}

/// `d`, `h`, codes.
pub(super) fn q5_0(block: &[u8]) -> GgufUnit {
    unit(with_fifth_bits(&block[2..6], nibbles(&block[6..])), 16, half(block, 0), 0.0)
}

/// `d`, `m`, `h`, codes.
pub(super) fn q5_1(block: &[u8]) -> GgufUnit {
    unit(with_fifth_bits(&block[4..8], nibbles(&block[8..])), 0, half(block, 0), half(block, 2))
}

/// Four-bit codes as the values of a table.
pub(super) fn looked_up(bytes: &[u8], table: &[i8; 16]) -> [i8; GGUF_UNIT] {
    nibbles(bytes).map(|code| table[usize::from(code)])
}

/// A byte E8M0, codes.
pub(super) fn mxfp4(block: &[u8]) -> GgufUnit {
    let scale = E8M0_HALF[usize::from(block[0])];
    GgufUnit { codes: looked_up(&block[1..], &MXFP4_VALUES), scales: [scale; 2], minima: [0.0; 2] }
}

/// `d`, codes.
pub(super) fn iq4_nl(block: &[u8]) -> GgufUnit {
    GgufUnit { codes: looked_up(&block[2..], &IQ4_VALUES), scales: [half(block, 0); 2], minima: [0.0; 2] }
}
