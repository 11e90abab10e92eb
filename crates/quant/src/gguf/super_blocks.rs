//! Super-blocks of 256 values: eight units that share `d` (and `dmin`), each with small scales of its own.
//!
//! `at` is the unit within its block. `d` and `dmin` are little-endian `f16`.

use super::blocks::{half, looked_up};
use super::{GGUF_UNIT, GgufUnit, IQ4_VALUES};

/// The two-bit codes of a unit. 32 bytes hold four units, the first in their lowest bits.
fn pairs(bytes: &[u8], at: usize) -> [u8; GGUF_UNIT] {
    std::array::from_fn(|i| (bytes[at / 4 * 32 + i] >> (2 * (at % 4))) & 3)
}

/// The four-bit codes of a unit. 32 bytes hold two units, the first in their low halves.
fn halves(bytes: &[u8], at: usize) -> [u8; GGUF_UNIT] {
    std::array::from_fn(|i| (bytes[at / 2 * 32 + i] >> (4 * (at % 2))) & 15)
}

/// 16 bytes of (minimum, scale) in four bits each, 64 bytes of codes, `d`, `dmin`.
pub(super) fn q2_k(block: &[u8], at: usize) -> GgufUnit {
    let (d, least) = (half(block, 80), half(block, 82));
    let both = [block[2 * at], block[2 * at + 1]];
    GgufUnit {
        codes: pairs(&block[16..80], at).map(u8::cast_signed),
        scales: both.map(|both| d * f32::from(both & 15)),
        minima: both.map(|both| -(least * f32::from(both >> 4))),
    }
}

/// 32 bytes of third bits (bit `at` is unit `at`'s), 64 bytes of the lower two, 12 bytes of scales, `d`.
pub(super) fn q3_k(block: &[u8], at: usize) -> GgufUnit {
    let d = half(block, 108);
    let low = pairs(&block[32..96], at);
    let packed = &block[96..108];
    let scale = |i: usize| {
        let low = if i < 8 { packed[i] & 15 } else { packed[i - 8] >> 4 };
        let high = (packed[8 + i % 4] >> (2 * (i / 4))) & 3;
        d * f32::from((low | high << 4).cast_signed() - 32)
    };
    GgufUnit {
        codes: std::array::from_fn(|i| (low[i] | ((block[i] >> at) & 1) << 2).cast_signed() - 4),
        scales: [scale(2 * at), scale(2 * at + 1)],
        minima: [0.0; 2],
    }
}

/// Scale and minimum of a unit, of six bits each, from 12 bytes.
fn six_bits(packed: &[u8], at: usize) -> (u8, u8) {
    match at {
        0..4 => (packed[at] & 63, packed[at + 4] & 63),
        _ => (packed[at + 4] & 15 | packed[at - 4] >> 6 << 4, packed[at + 4] >> 4 | packed[at] >> 6 << 4),
    }
}

/// A unit of a block that begins with `d`, `dmin` and 12 bytes of scales and minima.
fn with_six_bits(block: &[u8], at: usize, codes: [u8; GGUF_UNIT]) -> GgufUnit {
    let (scale, minimum) = six_bits(&block[4..16], at);
    GgufUnit {
        codes: codes.map(u8::cast_signed),
        scales: [half(block, 0) * f32::from(scale); 2],
        minima: [-(half(block, 2) * f32::from(minimum)); 2],
    }
}

/// `d`, `dmin`, 12 bytes of scales and minima, 128 bytes of codes.
pub(super) fn q4_k(block: &[u8], at: usize) -> GgufUnit {
    with_six_bits(block, at, halves(&block[16..], at))
}

/// `d`, `dmin`, 12 bytes of scales and minima, 32 bytes of fifth bits (bit `at` is unit `at`'s), 128 bytes
/// of the lower four.
pub(super) fn q5_k(block: &[u8], at: usize) -> GgufUnit {
    let low = halves(&block[48..], at);
    with_six_bits(block, at, std::array::from_fn(|i| low[i] | ((block[16 + i] >> at) & 1) << 4))
}

/// 128 bytes of the lower four bits, 64 of the upper two, 16 scales (int8), `d`.
pub(super) fn q6_k(block: &[u8], at: usize) -> GgufUnit {
    let d = half(block, 208);
    // 128 columns are 64 bytes of lower bits: two units in the low halves, then two in the high ones.
    let low = &block[at / 4 * 64 + at % 2 * 32..][..32];
    let high = pairs(&block[128..192], at);
    let code = |i: usize| ((low[i] >> (at % 4 / 2 * 4)) & 15 | high[i] << 4).cast_signed() - 32;
    let scale = |i: usize| d * f32::from(block[192 + i].cast_signed());
    GgufUnit {
        codes: std::array::from_fn(code),
        scales: [scale(2 * at), scale(2 * at + 1)],
        minima: [0.0; 2],
    }
}

/// `d`, upper two bits of the scales (a `u16`), lower four (4 bytes), 128 bytes of codes.
pub(super) fn iq4_xs(block: &[u8], at: usize) -> GgufUnit {
    let low = (block[4 + at / 2] >> (4 * (at % 2))) & 15;
    let high = (u16::from_le_bytes([block[2], block[3]]) >> (2 * at)) & 3;
    let scale = half(block, 0) * f32::from((low | (high as u8) << 4).cast_signed() - 32);
    GgufUnit { codes: looked_up(&block[8 + 16 * at..], &IQ4_VALUES), scales: [scale; 2], minima: [0.0; 2] }
}
