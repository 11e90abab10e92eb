//! Structures that kernels read, byte by byte as `kernels/metal` declares them.

use metaltail_kernels::ComputeError;
use metaltail_quant::{Format, MatrixLayout};

/// Bytes of a `Matrix`.
pub const MATRIX_BYTES: usize = 48;

/// Bytes of an `Expert`.
pub const EXPERT_BYTES: usize = 3 * MATRIX_BYTES + 16;

/// A number in a table of 32-bit numbers.
pub(super) fn narrow(what: &'static str, value: usize) -> Result<u32, ComputeError> {
    u32::try_from(value).map_err(|_| too_large(what, value, u32::MAX as usize))
}

/// More of something than kernels take.
pub(super) fn too_large(what: &'static str, value: usize, most: usize) -> ComputeError {
    ComputeError::Operation {
        what: format!("{what} of {value} are too many for Metal's kernels: at most {most}"),
    }
}

/// Little-endian bytes of some numbers.
pub(super) fn words(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Little-endian bytes of some floats.
pub(super) fn floats(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// `Matrix::format`, and the format's part of a kernel's name.
fn format_of(format: Format) -> Result<(u32, &'static str), ComputeError> {
    Ok(match format {
        Format::F32 => (0, "f32"),
        Format::F16 => (1, "f16"),
        Format::Bf16 => (2, "bf16"),
        Format::Int8Row => (3, "int8"),
        Format::Int4Row => (4, "int4"),
        Format::Int4Group(_) => (5, "int4g"),
        Format::Fp8Block => (6, "fp8"),
        other => {
            let message = format!("there is no kernel for {other}");
            return Err(ComputeError::Device { device: "metal", message });
        }
    })
}

/// A format's part of a kernel's name.
pub(super) fn format_name(format: Format) -> Result<&'static str, ComputeError> {
    Ok(format_of(format)?.1)
}

/// A `Matrix` whose bytes lie at these addresses. Formats without scales read none.
pub(super) fn matrix(layout: MatrixLayout, weights: u64, scales: u64) -> Result<Vec<u8>, ComputeError> {
    let span = match layout.format() {
        Format::Int4Group(group) => usize::from(group),
        Format::Fp8Block => 128,
        _ => layout.cols(),
    };
    let words_begin_rows = weights.is_multiple_of(4) && layout.row_bytes().is_multiple_of(4);
    let mut bytes: Vec<u8> = [weights, scales].iter().flat_map(|address| address.to_le_bytes()).collect();
    bytes.extend(words(&[
        format_of(layout.format())?.0,
        narrow("rows of a matrix", layout.rows())?,
        narrow("columns of a matrix", layout.cols())?,
        narrow("bytes of a matrix row", layout.row_bytes())?,
        narrow("scales of a matrix row", layout.scale_cols())?,
        narrow("columns of a group", span)?,
        u32::from(words_begin_rows),
        0,
    ]));
    debug_assert_eq!(bytes.len(), MATRIX_BYTES);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_is_laid_out_as_the_kernels_declare_it() {
        let layout = MatrixLayout::new(Format::Int4Group(64), 3, 130).unwrap();
        let bytes = matrix(layout, 0x1_0000_0004, 0x2_0000_0000).unwrap();
        assert_eq!(bytes[..8], 0x1_0000_0004u64.to_le_bytes());
        let numbers: Vec<u32> =
            bytes[16..].as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        // 65 bytes a row: the second row begins at an odd address, so words are not read.
        assert_eq!(numbers, [5, 3, 130, 65, 3, 64, 0, 0]);
        let even = MatrixLayout::new(Format::Int4Row, 3, 128).unwrap();
        assert_eq!(matrix(even, 4, 0).unwrap()[40..44], [1, 0, 0, 0]);
        assert_eq!(matrix(even, 6, 0).unwrap()[40..44], [0, 0, 0, 0]);
    }

    #[test]
    fn a_format_without_a_kernel_is_refused_by_name() {
        let layout = MatrixLayout::new(Format::Gguf(metaltail_quant::GgufFormat::Q4K), 1, 256).unwrap();
        for refused in [matrix(layout, 0, 0).map(drop), format_name(layout.format()).map(drop)] {
            let message = refused.unwrap_err().to_string();
            assert!(message.contains("no kernel for q4_k"), "{message}");
        }
    }
}
