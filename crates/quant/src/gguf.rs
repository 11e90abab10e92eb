//! Block formats of GGUF files: sizes, and the reference that says what their bytes mean.
//!
//! A block is 32 or 256 values that lie side by side in a row, with scales of its own. Layouts and
//! arithmetic are those that the `gguf` Python package documents in `gguf/quants.py`; its results, on
//! quantised values and on random blocks, are what the tests hold this module against, bit for bit.
//!
//! All of them are read through one view, [`GgufUnit`]: 32 columns as signed codes, a scale for each 16
//! of them and, in some formats, a minimum. Byte by byte: `docs/design/formats.md`.

mod blocks;
mod super_blocks;
#[cfg(test)]
mod tests;

use std::fmt;

pub use blocks::{E8M0_HALF, IQ4_VALUES, MXFP4_VALUES};

/// Values of a unit. A block of any GGUF format is one unit or eight.
pub const GGUF_UNIT: usize = 32;

/// A number format of GGUF.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GgufFormat {
    /// 32 × int8 and a scale: value = d · q. 34 bytes.
    Q8_0,
    /// Four-bit codes and a scale: value = d · (q − 8). 18 bytes.
    Q4_0,
    /// Four-bit codes, a scale and a minimum: value = d · q + m. 20 bytes.
    Q4_1,
    /// Five-bit codes and a scale: value = d · (q − 16). 22 bytes.
    Q5_0,
    /// Five-bit codes, a scale and a minimum: value = d · q + m. 24 bytes.
    Q5_1,
    /// OCP MXFP4: codes E2M1 and a power of two. 17 bytes.
    Mxfp4,
    /// Four-bit codes of a table and a scale. 18 bytes.
    Iq4Nl,
    /// Two-bit codes, 16 scales and minima of four bits for 256 values. 84 bytes.
    Q2K,
    /// Three-bit codes, 16 scales of six bits for 256 values. 110 bytes.
    Q3K,
    /// Four-bit codes, 8 scales and minima of six bits for 256 values. 144 bytes.
    Q4K,
    /// Five-bit codes, 8 scales and minima of six bits for 256 values. 176 bytes.
    Q5K,
    /// Six-bit codes, 16 scales of eight bits for 256 values. 210 bytes.
    Q6K,
    /// Four-bit codes of a table, 8 scales of six bits for 256 values. 136 bytes.
    Iq4Xs,
}

/// 32 columns of a row: the value of column `i` is `scales[i / 16] · codes[i] + minima[i / 16]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GgufUnit {
    /// Signed codes, in column order.
    pub codes: [i8; GGUF_UNIT],
    /// Scales of the first 16 columns and of the others; equal where the format has one for both.
    pub scales: [f32; 2],
    /// Minima, likewise; +0 in formats without.
    pub minima: [f32; 2],
}

impl GgufFormat {
    /// All of them.
    pub const ALL: [GgufFormat; 13] = [
        GgufFormat::Q8_0,
        GgufFormat::Q4_0,
        GgufFormat::Q4_1,
        GgufFormat::Q5_0,
        GgufFormat::Q5_1,
        GgufFormat::Mxfp4,
        GgufFormat::Iq4Nl,
        GgufFormat::Q2K,
        GgufFormat::Q3K,
        GgufFormat::Q4K,
        GgufFormat::Q5K,
        GgufFormat::Q6K,
        GgufFormat::Iq4Xs,
    ];

    /// Name in GGUF.
    pub fn name(self) -> &'static str {
        match self {
            GgufFormat::Q8_0 => "Q8_0",
            GgufFormat::Q4_0 => "Q4_0",
            GgufFormat::Q4_1 => "Q4_1",
            GgufFormat::Q5_0 => "Q5_0",
            GgufFormat::Q5_1 => "Q5_1",
            GgufFormat::Mxfp4 => "MXFP4",
            GgufFormat::Iq4Nl => "IQ4_NL",
            GgufFormat::Q2K => "Q2_K",
            GgufFormat::Q3K => "Q3_K",
            GgufFormat::Q4K => "Q4_K",
            GgufFormat::Q5K => "Q5_K",
            GgufFormat::Q6K => "Q6_K",
            GgufFormat::Iq4Xs => "IQ4_XS",
        }
    }

    /// Values and bytes of a block.
    const fn block(self) -> (usize, usize) {
        match self {
            GgufFormat::Q8_0 => (32, 34),
            GgufFormat::Q4_0 => (32, 18),
            GgufFormat::Q4_1 => (32, 20),
            GgufFormat::Q5_0 => (32, 22),
            GgufFormat::Q5_1 => (32, 24),
            GgufFormat::Mxfp4 => (32, 17),
            GgufFormat::Iq4Nl => (32, 18),
            GgufFormat::Q2K => (256, 84),
            GgufFormat::Q3K => (256, 110),
            GgufFormat::Q4K => (256, 144),
            GgufFormat::Q5K => (256, 176),
            GgufFormat::Q6K => (256, 210),
            GgufFormat::Iq4Xs => (256, 136),
        }
    }

    /// Values of a block: 32 or 256.
    pub const fn block_values(self) -> usize {
        self.block().0
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        self.block().1
    }

    /// Columns that share a scale: 16 or 32.
    pub const fn group(self) -> usize {
        match self {
            GgufFormat::Q2K | GgufFormat::Q3K | GgufFormat::Q6K => 16,
            _ => 32,
        }
    }

    /// Whether groups have a minimum beside their scale.
    pub const fn has_minima(self) -> bool {
        use GgufFormat::{Q2K, Q4_1, Q4K, Q5_1, Q5K};
        matches!(self, Q4_1 | Q5_1 | Q2K | Q4K | Q5K)
    }

    /// Where in a block its `f16` scales stand. MXFP4 has none: its scales are always finite.
    pub const fn halves(self) -> &'static [usize] {
        match self {
            GgufFormat::Q8_0
            | GgufFormat::Q4_0
            | GgufFormat::Q5_0
            | GgufFormat::Iq4Nl
            | GgufFormat::Iq4Xs => &[0],
            GgufFormat::Q4_1 | GgufFormat::Q5_1 | GgufFormat::Q4K | GgufFormat::Q5K => &[0, 2],
            GgufFormat::Mxfp4 => &[],
            GgufFormat::Q2K => &[80, 82],
            GgufFormat::Q3K => &[108],
            GgufFormat::Q6K => &[208],
        }
    }

    /// Bytes of a row of `cols` values; `None` when they are no whole number of blocks.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_values()) {
            return None;
        }
        (cols / self.block_values()).checked_mul(self.block_bytes())
    }

    /// Unit number `index` of a row: columns 32 · `index` and on.
    ///
    /// # Panics
    /// If the row ends before it.
    pub fn unit(self, row: &[u8], index: usize) -> GgufUnit {
        let units = self.block_values() / GGUF_UNIT;
        let block = &row[index / units * self.block_bytes()..][..self.block_bytes()];
        let at = index % units;
        match self {
            GgufFormat::Q8_0 => blocks::q8_0(block),
            GgufFormat::Q4_0 => blocks::q4_0(block),
            GgufFormat::Q4_1 => blocks::q4_1(block),
            GgufFormat::Q5_0 => blocks::q5_0(block),
            GgufFormat::Q5_1 => blocks::q5_1(block),
            GgufFormat::Mxfp4 => blocks::mxfp4(block),
            GgufFormat::Iq4Nl => blocks::iq4_nl(block),
            GgufFormat::Q2K => super_blocks::q2_k(block, at),
            GgufFormat::Q3K => super_blocks::q3_k(block, at),
            GgufFormat::Q4K => super_blocks::q4_k(block, at),
            GgufFormat::Q5K => super_blocks::q5_k(block, at),
            GgufFormat::Q6K => super_blocks::q6_k(block, at),
            GgufFormat::Iq4Xs => super_blocks::iq4_xs(block, at),
        }
    }

    /// Whole blocks as `f32`. A product is rounded, then a sum: nothing is fused.
    ///
    /// # Panics
    /// If `bytes` are not exactly the blocks of `out`.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(Some(bytes.len()), self.row_bytes(out.len()), "bytes of {} values in {self}", out.len());
        for (index, out) in out.as_chunks_mut::<GGUF_UNIT>().0.iter_mut().enumerate() {
            let unit = self.unit(bytes, index);
            for (i, (value, code)) in out.iter_mut().zip(unit.codes).enumerate() {
                let product = unit.scales[i / 16] * f32::from(code);
                // Adding +0 would turn −0 into +0 where there is no minimum.
                *value = if self.has_minima() { product + unit.minima[i / 16] } else { product };
            }
        }
    }
}

impl fmt::Display for GgufFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
