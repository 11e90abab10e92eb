//! From `f32` to stored bytes.

use half::{bf16, f16};
use thiserror::Error;

use crate::fp8::{FP8_MAX, fp8_encode};
use crate::{Format, GgufFormat, LayoutError, MatrixLayout, OwnedMatrix};

/// Smallest scale that is ever written, so that a block of zeros divides by something.
const SMALLEST_SCALE: f32 = 1e-8;

/// Why numbers could not be quantised.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum QuantizeError {
    /// A buffer does not fit the layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// NaN or infinity has no place in a scaled format.
    #[error(
        "the number at row {row}, column {col} is {value}: {format} can hold finite numbers only; choose f32, f16 or bf16 for this matrix"
    )]
    NotFinite {
        /// Format asked for.
        format: Format,
        /// Row of the number.
        row: usize,
        /// Column of the number.
        col: usize,
        /// The number.
        value: f32,
    },
    /// A format of GGUF is read and computed; nothing is quantised to it.
    #[error(
        "nothing is quantised to {format}, a format of GGUF files: choose int4-gN, int8, fp8, bf16, f16 or f32"
    )]
    NotATarget {
        /// Format asked for.
        format: GgufFormat,
    },
}

/// Quantises `src` (`rows × cols`, row-major) into exactly the bytes of `layout`.
///
/// s = max(absmax / qmax, 1e-8); q = clip(rint(w / s), −qmax − 1, qmax), ties to even;
/// qmax is 127 for int8, 7 for int4, 448 for fp8 (which rounds to the nearest code instead).
/// f16 and bf16 round to nearest even. The spare nibble of an odd row codes zero.
///
/// # Errors
/// A buffer of another size than the layout's, a number that is not finite in a format with scales, or a
/// format of GGUF.
pub fn quantize(
    layout: MatrixLayout,
    src: &[f32],
    weights: &mut [u8],
    scales: &mut [u8],
) -> Result<(), QuantizeError> {
    check_length(
        layout,
        "numbers (as f32 bytes)",
        layout.rows().saturating_mul(layout.cols()).saturating_mul(4),
        src.len().saturating_mul(4),
    )?;
    check_length(layout, "weights", layout.weight_bytes(), weights.len())?;
    check_length(layout, "scales", layout.scale_bytes(), scales.len())?;
    if layout.scale_rows() > 0
        && let Some(at) = src.iter().position(|v| !v.is_finite())
    {
        let (row, col) = (at / layout.cols(), at % layout.cols());
        return Err(QuantizeError::NotFinite { format: layout.format(), row, col, value: src[at] });
    }
    match layout.format() {
        Format::F32 => {
            for (b, v) in weights.as_chunks_mut::<4>().0.iter_mut().zip(src) {
                *b = v.to_le_bytes();
            }
        }
        Format::F16 => {
            for (b, v) in weights.as_chunks_mut::<2>().0.iter_mut().zip(src) {
                *b = f16::from_f32(*v).to_le_bytes();
            }
        }
        Format::Bf16 => {
            for (b, v) in weights.as_chunks_mut::<2>().0.iter_mut().zip(src) {
                *b = bf16::from_f32(*v).to_le_bytes();
            }
        }
        Format::Int8Row => int8_rows(layout, src, weights, scales),
        Format::Int4Row => int4_rows(layout, layout.cols(), src, weights, scales),
        Format::Int4Group(group) => int4_rows(layout, usize::from(group), src, weights, scales),
        Format::Fp8Block => fp8_blocks(layout, src, weights, scales),
        Format::Gguf(format) => return Err(QuantizeError::NotATarget { format }),
    }
    Ok(())
}

fn check_length(
    layout: MatrixLayout,
    what: &'static str,
    wanted: usize,
    got: usize,
) -> Result<(), LayoutError> {
    if wanted == got {
        return Ok(());
    }
    Err(LayoutError::Length {
        what,
        format: layout.format(),
        rows: layout.rows(),
        cols: layout.cols(),
        wanted,
        got,
    })
}

fn absmax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most, v| most.max(v.abs()))
}

fn round_clip(value: f32, scale: f32, qmax: f32) -> f32 {
    (value / scale).round_ties_even().clamp(-qmax - 1.0, qmax)
}

fn int8_rows(layout: MatrixLayout, src: &[f32], weights: &mut [u8], scales: &mut [u8]) {
    let rows = src.chunks(layout.cols()).zip(weights.chunks_mut(layout.row_bytes()));
    for ((src, out), scale_bytes) in rows.zip(scales.as_chunks_mut::<4>().0) {
        let scale = (absmax(src) / 127.0).max(SMALLEST_SCALE);
        *scale_bytes = scale.to_le_bytes();
        for (o, v) in out.iter_mut().zip(src) {
            *o = (round_clip(*v, scale, 127.0) as i8).cast_unsigned();
        }
    }
}

fn int4_rows(layout: MatrixLayout, group: usize, src: &[f32], weights: &mut [u8], scales: &mut [u8]) {
    let mut scales = scales.as_chunks_mut::<4>().0.iter_mut();
    for (src, out) in src.chunks(layout.cols()).zip(weights.chunks_mut(layout.row_bytes())) {
        out.fill(0x88);
        // `scales` comes second: zip must not draw a scale when the row has run out of groups.
        for (g, (values, scale_bytes)) in src.chunks(group).zip(scales.by_ref()).enumerate() {
            let scale = (absmax(values) / 7.0).max(SMALLEST_SCALE);
            *scale_bytes = scale.to_le_bytes();
            for (i, v) in values.iter().enumerate() {
                let col = g * group + i;
                let nibble = (round_clip(*v, scale, 7.0) + 8.0) as u8;
                let shift = 4 * (col % 2);
                out[col / 2] = out[col / 2] & !(15 << shift) | nibble << shift;
            }
        }
    }
}

fn fp8_blocks(layout: MatrixLayout, src: &[f32], weights: &mut [u8], scales: &mut [u8]) {
    let cols = layout.cols();
    let strip = 128 * cols;
    let strips = src.chunks(strip).zip(weights.chunks_mut(strip));
    for ((src, out), scales) in strips.zip(scales.chunks_mut(layout.scale_cols() * 4)) {
        for (block, scale_bytes) in scales.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let span = block * 128..cols.min(block * 128 + 128);
            let most = src.chunks(cols).fold(0.0f32, |most, row| most.max(absmax(&row[span.clone()])));
            let scale = (most / FP8_MAX).max(SMALLEST_SCALE);
            *scale_bytes = scale.to_le_bytes();
            for (row, out) in src.chunks(cols).zip(out.chunks_mut(cols)) {
                for col in span.clone() {
                    out[col] = fp8_encode(row[col] / scale);
                }
            }
        }
    }
}

impl OwnedMatrix {
    /// Quantises `src` (`rows × cols`, row-major) into a new matrix; see [`quantize`].
    ///
    /// # Errors
    /// As [`quantize`].
    pub fn quantize(layout: MatrixLayout, src: &[f32]) -> Result<OwnedMatrix, QuantizeError> {
        let mut weights = vec![0; layout.weight_bytes()];
        let mut scales = vec![0; layout.scale_bytes()];
        quantize(layout, src, &mut weights, &mut scales)?;
        Ok(OwnedMatrix::new(layout, weights, scales)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GROUP_SIZES, dequantize};
    use proptest::prelude::*;

    fn layout(format: Format, rows: usize, cols: usize) -> MatrixLayout {
        MatrixLayout::new(format, rows, cols).unwrap()
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    #[test]
    fn nothing_is_quantised_to_a_gguf_format() {
        for format in GgufFormat::ALL {
            let refused = OwnedMatrix::quantize(layout(Format::Gguf(format), 1, 256), &[0.0; 256]);
            assert_eq!(refused, Err(QuantizeError::NotATarget { format }));
        }
    }

    #[test]
    fn int8_bytes_are_those_worked_out_by_hand() {
        // absmax 127 → scale 1; 0.5 and 2.5 tie to even, −1.5 → −2.
        let m =
            OwnedMatrix::quantize(layout(Format::Int8Row, 1, 5), &[127.0, 0.5, 2.5, -1.5, -127.0]).unwrap();
        assert_eq!(m.weights(), [127, 0, 2, 0xFE, 0x81]);
        assert_eq!(floats(m.scales()), [1.0]);
    }

    #[test]
    fn int4_bytes_are_those_worked_out_by_hand() {
        // Row 0: scale 1: 7 → F, −7 → 1, 0.5 → 0 → 8. Row 1: scale 2: 14 → F, −3 → −1.5 → −2 → 6, 1 → 0 → 8.
        let m =
            OwnedMatrix::quantize(layout(Format::Int4Row, 2, 3), &[7.0, -7.0, 0.5, 14.0, -3.0, 1.0]).unwrap();
        assert_eq!(m.weights(), [0x1F, 0x88, 0x6F, 0x88]);
        assert_eq!(floats(m.scales()), [1.0, 2.0]);
    }

    #[test]
    fn int4_groups_have_scales_of_their_own_row_by_row() {
        let mut src = vec![7.0; 2 * 17];
        src[16] = 70.0;
        src[33] = -700.0;
        let m = OwnedMatrix::quantize(layout(Format::Int4Group(16), 2, 17), &src).unwrap();
        assert_eq!(floats(m.scales()), [1.0, 10.0, 1.0, 100.0]);
        assert_eq!(m.weights()[8], 0x8F);
        assert_eq!(m.weights()[17], 0x81);
    }

    #[test]
    fn zeros_get_the_smallest_scale() {
        for format in [Format::Int8Row, Format::Int4Row, Format::Int4Group(32), Format::Fp8Block] {
            let m = OwnedMatrix::quantize(layout(format, 3, 5), &[0.0; 15]).unwrap();
            assert!(floats(m.scales()).iter().all(|s| *s == 1e-8));
            let mut back = [1.0; 15];
            dequantize(m.as_ref(), &mut back);
            assert_eq!(back, [0.0; 15]);
        }
    }

    #[test]
    fn fp8_uses_the_largest_number_of_each_block() {
        let mut src = vec![1.0; 2 * 130];
        src[0] = 448.0;
        src[129] = -896.0;
        let m = OwnedMatrix::quantize(layout(Format::Fp8Block, 2, 130), &src).unwrap();
        assert_eq!(floats(m.scales()), [1.0, 2.0]);
        assert_eq!(
            (m.weights()[0], m.weights()[1], m.weights()[128], m.weights()[129]),
            (0x7E, 0x38, 0x30, 0xFE)
        );
    }

    #[test]
    fn numbers_that_are_not_finite_are_refused_in_scaled_formats_only() {
        let src = [1.0, 2.0, f32::INFINITY, 4.0];
        let err = OwnedMatrix::quantize(layout(Format::Int8Row, 2, 2), &src).unwrap_err();
        assert_eq!(
            err,
            QuantizeError::NotFinite { format: Format::Int8Row, row: 1, col: 0, value: f32::INFINITY }
        );
        assert!(OwnedMatrix::quantize(layout(Format::Bf16, 2, 2), &src).is_ok());
    }

    #[test]
    fn a_buffer_of_the_wrong_size_is_refused() {
        let l = layout(Format::Int8Row, 2, 2);
        assert!(quantize(l, &[0.0; 3], &mut [0; 4], &mut [0; 8]).is_err());
        assert!(quantize(l, &[0.0; 4], &mut [0; 5], &mut [0; 8]).is_err());
        assert!(quantize(l, &[0.0; 4], &mut [0; 4], &mut [0; 4]).is_err());
    }

    fn any_format() -> impl Strategy<Value = Format> {
        prop_oneof![
            Just(Format::Int8Row),
            Just(Format::Int4Row),
            prop::sample::select(&GROUP_SIZES[..]).prop_map(Format::Int4Group),
            Just(Format::Fp8Block),
            Just(Format::F32),
            Just(Format::F16),
            Just(Format::Bf16),
        ]
    }

    proptest! {
        #[test]
        fn error_is_at_most_half_a_step(format in any_format(), rows in 1usize..6, cols in 1usize..300, seed in any::<u32>()) {
            let mut state = seed;
            let src: Vec<f32> = (0..rows * cols).map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 22) as f32 - 2.0
            }).collect();
            let m = OwnedMatrix::quantize(layout(format, rows, cols), &src).unwrap();
            let mut back = vec![0.0; src.len()];
            dequantize(m.as_ref(), &mut back);
            for (i, (was, is)) in src.iter().zip(&back).enumerate() {
                let scale = m.as_ref().scale(i / cols, i % cols);
                let step = match format {
                    Format::F32 => 0.0,
                    Format::F16 => (was.abs() / 1024.0).max(1e-7),
                    Format::Bf16 => was.abs() / 128.0,
                    Format::Fp8Block => (was.abs() / 8.0).max(scale / 512.0),
                    _ => scale,
                };
                prop_assert!((was - is).abs() <= step * 0.5001, "{format} {was} {is} {scale}");
            }
        }
    }
}
