//! Blocks of GGUF files: the reference of the formats with 32 values a block.
//!
//! A block is 32 values that lie side by side in a row, with scales of its own in front. Layouts and
//! arithmetic are those that the `gguf` Python package documents in `gguf/quants.py`; its results, on
//! quantised values and on random blocks, are what the tests hold these functions against, bit for bit.
//!
//! In all of them `d` and `m` are little-endian `f16`. Of the 16 bytes of four-bit codes byte `j` has
//! value `j` in its low half and value `j + 16` in its high half. `h` is a little-endian `u32` whose bit
//! `i` is the fifth bit of value `i`.

use std::fmt;

use half::f16;

/// Values of a block.
pub const GGUF_BLOCK: usize = 32;

/// A number format of GGUF with 32 values a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GgufFormat {
    /// `d`, 32 × int8: value = d · q. 34 bytes.
    Q8_0,
    /// `d`, 16 bytes of codes: value = d · (q − 8). 18 bytes.
    Q4_0,
    /// `d`, `m`, 16 bytes of codes: value = d · q + m. 20 bytes.
    Q4_1,
    /// `d`, `h`, 16 bytes of codes: value = d · (q − 16). 22 bytes.
    Q5_0,
    /// `d`, `m`, `h`, 16 bytes of codes: value = d · q + m. 24 bytes.
    Q5_1,
}

impl GgufFormat {
    /// All of them.
    pub const ALL: [GgufFormat; 5] =
        [GgufFormat::Q8_0, GgufFormat::Q4_0, GgufFormat::Q4_1, GgufFormat::Q5_0, GgufFormat::Q5_1];

    /// Name in GGUF.
    pub fn name(self) -> &'static str {
        match self {
            GgufFormat::Q8_0 => "Q8_0",
            GgufFormat::Q4_0 => "Q4_0",
            GgufFormat::Q4_1 => "Q4_1",
            GgufFormat::Q5_0 => "Q5_0",
            GgufFormat::Q5_1 => "Q5_1",
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            GgufFormat::Q8_0 => 34,
            GgufFormat::Q4_0 => 18,
            GgufFormat::Q4_1 => 20,
            GgufFormat::Q5_0 => 22,
            GgufFormat::Q5_1 => 24,
        }
    }

    /// Bytes of a row of `cols` values; `None` when they are no whole number of blocks.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(GGUF_BLOCK) {
            return None;
        }
        (cols / GGUF_BLOCK).checked_mul(self.block_bytes())
    }

    /// Whole blocks as `f32`. A product is rounded, then a sum: nothing is fused.
    ///
    /// # Panics
    /// If `bytes` are not exactly the blocks of `out`.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(Some(bytes.len()), self.row_bytes(out.len()), "bytes of {} values in {self}", out.len());
        let blocks = bytes.chunks_exact(self.block_bytes());
        for (block, out) in blocks.zip(out.as_chunks_mut::<GGUF_BLOCK>().0) {
            match self {
                GgufFormat::Q8_0 => q8(block, out),
                GgufFormat::Q4_0 => coded(half(block, 0), None, 8, &codes(&block[2..]), out),
                GgufFormat::Q4_1 => coded(half(block, 0), Some(half(block, 2)), 0, &codes(&block[4..]), out),
                GgufFormat::Q5_0 => {
                    let codes = with_fifth_bits(&block[2..6], codes(&block[6..]));
                    coded(half(block, 0), None, 16, &codes, out);
                }
                GgufFormat::Q5_1 => {
                    let codes = with_fifth_bits(&block[4..8], codes(&block[8..]));
                    coded(half(block, 0), Some(half(block, 2)), 0, &codes, out);
                }
            }
        }
    }
}

impl fmt::Display for GgufFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The `f16` at byte `at`.
fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn q8(block: &[u8], out: &mut [f32; GGUF_BLOCK]) {
    let d = half(block, 0);
    for (value, code) in out.iter_mut().zip(&block[2..]) {
        *value = d * f32::from(code.cast_signed());
    }
}

/// The four-bit codes of 16 bytes.
fn codes(bytes: &[u8]) -> [u8; GGUF_BLOCK] {
    std::array::from_fn(|i| if i < 16 { bytes[i] & 15 } else { bytes[i - 16] >> 4 })
}

fn with_fifth_bits(bits: &[u8], codes: [u8; GGUF_BLOCK]) -> [u8; GGUF_BLOCK] {
    std::array::from_fn(|i| codes[i] | ((bits[i / 8] >> (i % 8)) & 1) << 4)
}

/// d · (q − zero), plus `m` where the format has one.
fn coded(d: f32, m: Option<f32>, zero: i8, codes: &[u8; GGUF_BLOCK], out: &mut [f32; GGUF_BLOCK]) {
    for (value, code) in out.iter_mut().zip(codes) {
        // At most 31 − 0 and at least 0 − 16.
        let product = d * f32::from(code.cast_signed() - zero);
        *value = m.map_or(product, |m| product + m);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line a format: name, bytes, and the bits of the wanted values, in hexadecimal.
    const VECTORS: &str = include_str!("../../../fixtures/gguf/blocks.txt");

    fn bytes(hex: &str) -> Vec<u8> {
        let pairs = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
        pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
    }

    #[test]
    fn values_are_those_of_the_independent_package_to_the_bit() {
        let mut seen = Vec::new();
        for line in VECTORS.lines() {
            let [name, stored, wanted] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
            let format = GgufFormat::ALL.into_iter().find(|format| format.name() == name).unwrap();
            let (stored, wanted) = (bytes(stored), bytes(wanted));
            let wanted: Vec<u32> = wanted.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
            let mut out = vec![f32::NAN; wanted.len()];
            format.dequantize(&stored, &mut out);
            let bits: Vec<u32> = out.iter().map(|value| value.to_bits()).collect();
            assert_eq!(bits, wanted, "{format}");
            seen.push(format);
        }
        assert_eq!(seen, GgufFormat::ALL);
    }

    #[test]
    fn halves_of_a_byte_are_sixteen_values_apart() {
        // d = 1; byte 0 is 0xF0, all else zero.
        let mut block = [0u8; 18];
        block[..3].copy_from_slice(&[0x00, 0x3C, 0xF0]);
        let mut out = [0.0; 32];
        GgufFormat::Q4_0.dequantize(&block, &mut out);
        assert_eq!((out[0], out[1], out[16]), (-8.0, -8.0, 7.0));
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(GgufFormat::Q5_1.row_bytes(64), Some(48));
        assert_eq!(GgufFormat::Q5_1.row_bytes(33), None);
        assert_eq!(GgufFormat::Q8_0.row_bytes(0), Some(0));
        assert_eq!(GgufFormat::Q8_0.row_bytes(usize::MAX - 31), None);
    }

    #[test]
    #[should_panic(expected = "bytes of 32 values in Q8_0")]
    fn a_block_that_is_cut_is_refused() {
        GgufFormat::Q8_0.dequantize(&[0; 33], &mut [0.0; 32]);
    }
}
