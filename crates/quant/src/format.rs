//! The formats and their names.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::GgufFormat;

/// How the numbers of a matrix are stored.
///
/// Packing and scale rules are those of the colibrì interchange layout
/// (`docs/design/formats.md`); scales are little-endian `f32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// IEEE binary32, little endian.
    F32,
    /// IEEE binary16, little endian.
    F16,
    /// bfloat16, little endian.
    Bf16,
    /// Signed bytes, one scale a row.
    Int8Row,
    /// Nibbles (offset binary, even column low), one scale a row.
    Int4Row,
    /// Nibbles as in [`Format::Int4Row`], one scale for each group of this many columns.
    Int4Group(u16),
    /// OCP E4M3 bytes, one scale for each block of 128 rows × 128 columns.
    Fp8Block,
    /// Blocks of a GGUF file, with their scales inside. Never a target of quantisation.
    Gguf(GgufFormat),
}

/// Group sizes that [`Format::Int4Group`] may have, ascending.
pub const GROUP_SIZES: [u16; 8] = [16, 32, 48, 64, 96, 128, 192, 256];

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Format::F32 => f.write_str("f32"),
            Format::F16 => f.write_str("f16"),
            Format::Bf16 => f.write_str("bf16"),
            Format::Int8Row => f.write_str("int8"),
            Format::Int4Row => f.write_str("int4"),
            Format::Int4Group(g) => write!(f, "int4-g{g}"),
            Format::Fp8Block => f.write_str("fp8"),
            Format::Gguf(format) => f.write_str(&format.name().to_ascii_lowercase()),
        }
    }
}

/// A format name that is not known.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "unknown number format {0:?}: expected f32, f16, bf16, fp8, int8, int4, int4-gN with N one of 16, 32, 48, 64, 96, 128, 192, 256, or a format of GGUF in small letters (q8_0, q4_k, mxfp4 …)"
)]
pub struct ParseFormatError(pub String);

impl FromStr for Format {
    type Err = ParseFormatError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let unknown = || ParseFormatError(name.to_owned());
        Ok(match name {
            "f32" => Format::F32,
            "f16" => Format::F16,
            "bf16" => Format::Bf16,
            "int8" => Format::Int8Row,
            "int4" => Format::Int4Row,
            "fp8" => Format::Fp8Block,
            _ => {
                let gguf = GgufFormat::ALL.into_iter().map(Format::Gguf);
                if let Some(format) = gguf.into_iter().find(|format| format.to_string() == name) {
                    return Ok(format);
                }
                let group = name.strip_prefix("int4-g").ok_or_else(unknown)?;
                let group: u16 = group.parse().map_err(|_| unknown())?;
                if !GROUP_SIZES.contains(&group) {
                    return Err(unknown());
                }
                Format::Int4Group(group)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_leads_back_to_its_format() {
        let plain =
            [Format::F32, Format::F16, Format::Bf16, Format::Int8Row, Format::Int4Row, Format::Fp8Block];
        let groups = GROUP_SIZES.into_iter().map(Format::Int4Group);
        for format in plain.into_iter().chain(groups).chain(GgufFormat::ALL.map(Format::Gguf)) {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        assert_eq!(Format::Gguf(GgufFormat::Q4K).to_string(), "q4_k");
        for name in ["Q4_K", "q4k", "q8_1", "int4-g40", "int4-g", ""] {
            assert_eq!(name.parse::<Format>(), Err(ParseFormatError(name.to_owned())));
        }
    }
}
