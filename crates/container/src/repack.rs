//! Experts whose stored bytes are not those that kernels compute with: how gate, up and down are made of them.
//!
//! The store does this when an expert has been read, `convert` when it writes a container. Both get the same bytes, and
//! nothing further up sees how an expert was stored.

use metaltail_quant::{Format, GgufFormat, MatrixLayout};
use thiserror::Error;

use crate::place::{PartPlace, RunOffset};

/// Alignment of each matrix in the result.
const ALIGN: u64 = 64;
/// Side of the squares in which a matrix is transposed, so that both sides stay in the nearest cache.
const TILE: usize = 32;
/// Columns of an MXFP4 block.
pub(crate) const MX_COLS: usize = 32;
/// Bytes of the codes of a block.
pub(crate) const MX_CODES: usize = MX_COLS / 2;
/// Bytes of a block with its scale in front.
const MX_BLOCK: usize = 1 + MX_CODES;

/// How one matrix is stored: where in the runs it begins, and which of the stored rows or columns are its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Transposed, in the element type of the result: a stored row of `pitch` elements for each column of the matrix.
    Transposed {
        /// The stored matrix.
        at: RunOffset,
        /// Elements of a stored row.
        pitch: usize,
        /// Element of a stored row that is row 0 of the matrix.
        first: usize,
        /// Elements from one row of the matrix to the next.
        step: usize,
    },
    /// MXFP4 with codes and scales apart: a block is 16 bytes of codes, the even column of two in the low nibble, and
    /// a scale of one byte (E8M0).
    Mxfp4 {
        /// The codes, row by row.
        codes: RunOffset,
        /// The scales, row by row.
        scales: RunOffset,
        /// Stored row that is row 0 of the matrix.
        first: usize,
        /// Stored rows from one row of the matrix to the next.
        step: usize,
    },
}

/// Why an expert cannot be made of what was read.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RepackError {
    /// A stored matrix does not lie in the run that it names.
    #[error("{what} of matrix {part} end at byte {end} of run {run}, which has {len}")]
    Outside {
        /// `elements`, `codes` or `scales`.
        what: &'static str,
        /// Gate (0), up (1) or down (2).
        part: usize,
        /// Run named.
        run: u32,
        /// First byte after them; `u64::MAX` where that has no number.
        end: u64,
        /// Bytes of the run; 0 where there is none.
        len: u64,
    },
    /// A matrix whose format cannot come of how it is stored.
    #[error("matrix {part} in {format} cannot be made of {stored}")]
    Format {
        /// Gate (0), up (1) or down (2).
        part: usize,
        /// Format of the matrix.
        format: Format,
        /// How it is stored.
        stored: &'static str,
    },
    /// The memory for the result has another size.
    #[error("an expert of {wanted} bytes was to be made in {got}")]
    Length {
        /// Bytes of the result.
        wanted: u64,
        /// Bytes given.
        got: u64,
    },
    /// The result is larger than the address space.
    #[error("the expert is larger than the address space")]
    Overflow,
}

/// From the runs of an expert to one run with gate, up and down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repack {
    stored: [Stored; 3],
    parts: [PartPlace; 3],
    bytes: u64,
}

impl Repack {
    /// Gate, up and down with these layouts, made of what is stored like this.
    ///
    /// # Errors
    /// Layouts with scales apart or that do not come of `stored`; sizes beyond the address space.
    pub fn new(layouts: [MatrixLayout; 3], stored: [Stored; 3]) -> Result<Repack, RepackError> {
        for (part, (layout, stored)) in layouts.iter().zip(&stored).enumerate() {
            let format = layout.format();
            let (fits, name) = match stored {
                Stored::Transposed { .. } => (element_bytes(format).is_some(), "a transposed matrix"),
                Stored::Mxfp4 { .. } => (is_mxfp4(layout), "MXFP4 codes and scales"),
            };
            if !fits {
                return Err(RepackError::Format { part, format, stored: name });
            }
        }
        let mut bytes = 0u64;
        let mut put = |layout: MatrixLayout| {
            let offset = bytes.checked_next_multiple_of(ALIGN)?;
            bytes = offset.checked_add(layout.weight_bytes() as u64)?;
            Some(PartPlace { layout, weights: RunOffset { run: 0, offset }, scales: None })
        };
        let [gate, up, down] = layouts.map(&mut put);
        let (Some(gate), Some(up), Some(down)) = (gate, up, down) else { return Err(RepackError::Overflow) };
        if usize::try_from(bytes).is_err() {
            return Err(RepackError::Overflow);
        }
        Ok(Repack { stored, parts: [gate, up, down], bytes })
    }

    /// Where gate, up and down lie in the result, which is run 0.
    pub fn parts(&self) -> [PartPlace; 3] {
        self.parts
    }

    /// Bytes of the result.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Holds what is stored against the lengths of the runs.
    ///
    /// # Errors
    /// [`RepackError::Outside`].
    pub fn check(&self, runs: &[u64]) -> Result<(), RepackError> {
        for (part, (stored, place)) in self.stored.iter().zip(&self.parts).enumerate() {
            let inside = |what, at: RunOffset, bytes: Option<u64>| {
                let len = runs.get(at.run as usize).copied().unwrap_or(0);
                let end = bytes.and_then(|bytes| at.offset.checked_add(bytes)).unwrap_or(u64::MAX);
                if end > len {
                    return Err(RepackError::Outside { what, part, run: at.run, end, len });
                }
                Ok(())
            };
            let (rows, cols) = (place.layout.rows(), place.layout.cols());
            match *stored {
                Stored::Transposed { at, pitch, first, step } => {
                    let width = element_bytes(place.layout.format()).unwrap_or(1);
                    inside("elements", at, last(cols, pitch, rows, first, step, width))?;
                }
                Stored::Mxfp4 { codes, scales, first, step } => {
                    let blocks = cols / MX_COLS;
                    let bytes = |size: usize| last(1, 0, rows, first, step, blocks.checked_mul(size)?);
                    inside("codes", codes, bytes(MX_CODES))?;
                    inside("scales", scales, bytes(1))?;
                }
            }
        }
        Ok(())
    }

    /// Makes gate, up and down in `out`, which has [`Self::bytes`], of the bytes of all runs.
    ///
    /// # Errors
    /// As [`Self::check`], and memory of another size; `out` is then as it was.
    pub fn apply(&self, runs: &[&[u8]], out: &mut [u8]) -> Result<(), RepackError> {
        let lens: Vec<u64> = runs.iter().map(|run| run.len() as u64).collect();
        self.check(&lens)?;
        if out.len() as u64 != self.bytes {
            return Err(RepackError::Length { wanted: self.bytes, got: out.len() as u64 });
        }
        let from = |at: RunOffset| &runs[at.run as usize][at.offset as usize..];
        for (stored, place) in self.stored.iter().zip(&self.parts) {
            let layout = place.layout;
            let out = &mut out[place.weights.offset as usize..][..layout.weight_bytes()];
            match *stored {
                Stored::Transposed { at, pitch, first, step } => {
                    let source = Grid { bytes: from(at), pitch, first, step };
                    match element_bytes(layout.format()) {
                        Some(4) => source.transpose::<4>(&layout, out),
                        _ => source.transpose::<2>(&layout, out),
                    }
                }
                Stored::Mxfp4 { codes, scales, first, step } => {
                    join_blocks((from(codes), from(scales)), (first, step), &layout, out);
                }
            }
        }
        Ok(())
    }
}

/// Bytes from the beginning to the end of the last of `rows` × `cols` pieces of `size` bytes, `pitch` pieces from one
/// column to the next and `step` from one row to the next.
fn last(cols: usize, pitch: usize, rows: usize, first: usize, step: usize, size: usize) -> Option<u64> {
    let column = (cols.checked_sub(1)?).checked_mul(pitch)?;
    let row = (rows.checked_sub(1)?).checked_mul(step)?.checked_add(first)?;
    let pieces = column.checked_add(row)?.checked_add(1)?;
    u64::try_from(pieces.checked_mul(size)?).ok()
}

/// Bytes of an element of a format of plain numbers.
fn element_bytes(format: Format) -> Option<usize> {
    match format {
        Format::F32 => Some(4),
        Format::F16 | Format::Bf16 => Some(2),
        _ => None,
    }
}

/// Whether a matrix is made of MXFP4 blocks with their scales in front.
fn is_mxfp4(layout: &MatrixLayout) -> bool {
    layout.format() == Format::Gguf(GgufFormat::Mxfp4)
}

/// A stored matrix in columns.
struct Grid<'a> {
    bytes: &'a [u8],
    pitch: usize,
    first: usize,
    step: usize,
}

impl Grid<'_> {
    /// Writes the matrix row by row; `N` bytes an element.
    fn transpose<const N: usize>(&self, layout: &MatrixLayout, out: &mut [u8]) {
        let (rows, cols) = (layout.rows(), layout.cols());
        let (from, to) = (self.bytes.as_chunks::<N>().0, out.as_chunks_mut::<N>().0);
        for top in (0..rows).step_by(TILE) {
            for left in (0..cols).step_by(TILE) {
                for row in top..rows.min(top + TILE) {
                    let column = self.first + row * self.step;
                    let line = &mut to[row * cols..][left..cols.min(left + TILE)];
                    for (to, col) in line.iter_mut().zip(left..) {
                        *to = from[col * self.pitch + column];
                    }
                }
            }
        }
    }
}

/// Writes the blocks of a matrix, each behind its scale.
fn join_blocks(
    (codes, scales): (&[u8], &[u8]),
    (first, step): (usize, usize),
    layout: &MatrixLayout,
    out: &mut [u8],
) {
    let blocks = layout.cols() / MX_COLS;
    let codes = codes.as_chunks::<MX_CODES>().0;
    for (row, out) in out.chunks_mut(blocks * MX_BLOCK).enumerate() {
        let at = (first + row * step) * blocks;
        let blocks = codes[at..at + blocks].iter().zip(&scales[at..at + blocks]);
        for (out, (codes, scale)) in out.as_chunks_mut::<MX_BLOCK>().0.iter_mut().zip(blocks) {
            out[0] = *scale;
            out[1..].copy_from_slice(&halves(codes));
        }
    }
}

/// From nibbles of neighbouring columns to byte j with column j in its low nibble and column j + 16 in its high one.
fn halves(codes: &[u8; MX_CODES]) -> [u8; MX_CODES] {
    let mut out = [0; MX_CODES];
    let (low, high) = codes.split_at(MX_CODES / 2);
    for ((out, low), high) in out.as_chunks_mut::<2>().0.iter_mut().zip(low).zip(high) {
        *out = [low & 0x0F | high << 4, low >> 4 | high & 0xF0];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layout(format: Format, rows: usize, cols: usize) -> MatrixLayout {
        MatrixLayout::new(format, rows, cols).unwrap()
    }

    fn at(run: u32, offset: u64) -> RunOffset {
        RunOffset { run, offset }
    }

    /// As gpt_oss stores its experts: gate and up alternate in the columns of one transposed matrix, down is another.
    fn alternating(width: usize, hidden: usize, format: Format) -> Repack {
        let layouts =
            [layout(format, width, hidden), layout(format, width, hidden), layout(format, hidden, width)];
        let pair = |first| Stored::Transposed { at: at(0, 0), pitch: 2 * width, first, step: 2 };
        let down = Stored::Transposed { at: at(1, 0), pitch: hidden, first: 0, step: 1 };
        Repack::new(layouts, [pair(0), pair(1), down]).unwrap()
    }

    #[test]
    fn a_small_expert_written_out() {
        let repack = alternating(1, 2, Format::Bf16);
        // One column of gate and up for each of two inputs; down has two outputs.
        let gate_up = [b'a', b'A', b'x', b'X', b'b', b'B', b'y', b'Y'];
        let down = [b'd', b'D', b'e', b'E'];
        let mut out = vec![0; repack.bytes() as usize];
        repack.apply(&[&gate_up, &down], &mut out).unwrap();
        assert_eq!((&out[..4], &out[64..68], &out[128..]), (&b"aAbB"[..], &b"xXyY"[..], &b"dDeE"[..]));
        assert_eq!(repack.parts().map(|part| part.weights.offset), [0, 64, 128]);
    }

    #[test]
    fn nibbles_of_neighbours_become_nibbles_of_halves() {
        // Column c has the code c mod 16, so byte i of the source holds columns 2i and 2i + 1.
        let codes: [u8; 16] = std::array::from_fn(|i| (((2 * i) % 16) | (((2 * i + 1) % 16) << 4)) as u8);
        let wanted: [u8; 16] = std::array::from_fn(|j| (j | j << 4) as u8);
        assert_eq!(halves(&codes), wanted);
    }

    #[test]
    fn what_does_not_fit_is_refused_and_nothing_is_written() {
        let repack = alternating(3, 5, Format::F32);
        let (gate_up, down) = (vec![1; 5 * 6 * 4], vec![1; 3 * 5 * 4]);
        let mut out = vec![0; repack.bytes() as usize];
        repack.apply(&[&gate_up, &down], &mut out).unwrap();
        let mut out = vec![0; repack.bytes() as usize];
        for (runs, run) in [
            (vec![&gate_up[1..], &down[..]], 0),
            (vec![&gate_up[..], &down[1..]], 1),
            (vec![&gate_up[..]], 1),
        ] {
            let error = repack.apply(&runs, &mut out).unwrap_err();
            assert!(matches!(error, RepackError::Outside { run: at, .. } if at == run), "{error}");
        }
        let error = repack.apply(&[&gate_up, &down], &mut out[1..]).unwrap_err();
        assert!(matches!(error, RepackError::Length { .. }), "{error}");
        assert!(out.iter().all(|byte| *byte == 0));
        let int8 = [layout(Format::Int8Row, 3, 5); 3];
        let error = Repack::new(int8, [repack.stored[0]; 3]).unwrap_err();
        assert!(matches!(error, RepackError::Format { part: 0, .. }), "{error}");
        let wild = Stored::Transposed { at: at(0, u64::MAX), pitch: usize::MAX, first: 9, step: usize::MAX };
        let wild = Repack::new([layout(Format::F16, 3, 5); 3], [wild; 3]).unwrap();
        assert!(matches!(wild.check(&[100]), Err(RepackError::Outside { end: u64::MAX, .. })));
    }

    /// As published checkpoints of gpt_oss store them: gate and up in turn in the rows.
    fn alternating_blocks(width: usize, hidden: usize) -> Repack {
        let layout = |rows, cols| layout(Format::Gguf(GgufFormat::Mxfp4), rows, cols);
        let layouts = [layout(width, hidden), layout(width, hidden), layout(hidden, width)];
        let pair = |first| Stored::Mxfp4 { codes: at(0, 0), scales: at(1, 0), first, step: 2 };
        let down = Stored::Mxfp4 { codes: at(2, 0), scales: at(3, 0), first: 0, step: 1 };
        Repack::new(layouts, [pair(0), pair(1), down]).unwrap()
    }

    #[test]
    fn blocks_that_do_not_fit_are_refused() {
        let repack = alternating_blocks(32, 64);
        let runs = [64 * 32u64, 64 * 2, 64 * 16, 64];
        repack.check(&runs).unwrap();
        for (short, what) in [(0, "codes"), (1, "scales"), (2, "codes"), (3, "scales")] {
            let mut runs = runs;
            runs[short] -= 1;
            let error = repack.check(&runs).unwrap_err();
            let RepackError::Outside { what: named, run, .. } = error else { panic!("{error}") };
            assert_eq!((named, run as usize), (what, short));
        }
        let bf16 = [layout(Format::Bf16, 32, 64); 3];
        let error = Repack::new(bf16, [repack.stored[0]; 3]).unwrap_err();
        assert!(error.to_string().contains("bf16 cannot be made of MXFP4"), "{error}");
    }

    proptest! {
        /// Every code and every scale is where the definition of the blocks has it.
        #[test]
        fn every_code_finds_its_place(width in 1usize..4, hidden in 1usize..5, seed: u32) {
            let (width, hidden) = (width * 32, hidden * 32);
            let repack = alternating_blocks(width, hidden);
            let fill = |bytes: usize, salt: u32| -> Vec<u8> {
                (0..bytes as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed ^ salt) >> 13) as u8).collect()
            };
            let runs = [
                fill(2 * width * hidden / 2, 1), fill(2 * width * hidden / 32, 2),
                fill(hidden * width / 2, 3), fill(hidden * width / 32, 4),
            ];
            let mut out = vec![0; repack.bytes() as usize];
            repack.apply(&runs.each_ref().map(Vec::as_slice), &mut out).unwrap();
            // Code and scale of an element, by the definition of each side.
            let stored = |codes: &[u8], scales: &[u8], row: usize, col: usize, cols: usize| {
                let byte = codes[(row * cols + col) / 2];
                (if col.is_multiple_of(2) { byte & 15 } else { byte >> 4 }, scales[row * (cols / 32) + col / 32])
            };
            let made = |part: usize, row: usize, col: usize, cols: usize| {
                let start = repack.parts()[part].weights.offset as usize + (row * (cols / 32) + col / 32) * 17;
                let byte = out[start + 1 + col % 16];
                (if col % 32 < 16 { byte & 15 } else { byte >> 4 }, out[start])
            };
            for row in 0..width {
                for col in 0..hidden {
                    prop_assert_eq!(made(0, row, col, hidden), stored(&runs[0], &runs[1], 2 * row, col, hidden));
                    prop_assert_eq!(made(1, row, col, hidden), stored(&runs[0], &runs[1], 2 * row + 1, col, hidden));
                    prop_assert_eq!(made(2, col, row, width), stored(&runs[2], &runs[3], col, row, width));
                }
            }
        }

        /// Every element is where the definition has it, whatever the tiles do.
        #[test]
        fn every_element_finds_its_place(width in 1usize..80, hidden in 1usize..80, wide: bool) {
            let format = if wide { Format::F32 } else { Format::Bf16 };
            let size = if wide { 4 } else { 2 };
            let repack = alternating(width, hidden, format);
            let fill = |elements: usize, salt: u32| -> Vec<u8> {
                (0..elements as u32).flat_map(|i| (i.wrapping_mul(2_654_435_761) ^ salt).to_le_bytes()[..size].to_vec()).collect()
            };
            let (gate_up, down) = (fill(hidden * 2 * width, 1), fill(width * hidden, 2));
            let mut out = vec![0; repack.bytes() as usize];
            repack.apply(&[&gate_up, &down], &mut out).unwrap();
            let element = |bytes: &[u8], at: usize| bytes[at * size..][..size].to_vec();
            let [gate, up, last] = repack.parts().map(|part| out[part.weights.offset as usize..].to_vec());
            for row in 0..width {
                for col in 0..hidden {
                    prop_assert_eq!(element(&gate, row * hidden + col), element(&gate_up, col * 2 * width + 2 * row));
                    prop_assert_eq!(element(&up, row * hidden + col), element(&gate_up, col * 2 * width + 2 * row + 1));
                    prop_assert_eq!(element(&last, col * width + row), element(&down, row * hidden + col));
                }
            }
        }
    }
}
