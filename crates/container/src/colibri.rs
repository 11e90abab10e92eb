//! colibrì directories: formats are inferred from byte counts, since shapes are not stored.
//!
//! A quantised matrix `X` is two tensors, `X` (bytes) and `X.qs` (f32 scales). Which format it
//! is follows from the shape that the configuration gives and the two byte counts, as
//! `docs/design/containers.md` lays out; an optional stamp settles what the counts leave open.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use metaltail_quant::{Format, GROUP_SIZES};

use crate::error::Error;
use crate::header::{Dtype, Header};
use crate::hf;
use crate::index::{Stored, TensorIndex};
use crate::place::MatrixPlace;

/// Suffix of the tensor that holds a matrix's scales.
pub(crate) const SCALES_SUFFIX: &str = ".qs";
/// Metadata key of the optional stamp.
const STAMP: &str = "colibri.fmt";
/// Most entries that a stamp may have.
const STAMP_CAP: usize = 4096;

/// The formats of the interchange registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Registered {
    F32,
    Int8Row,
    Int4Row,
    Int2Row,
    Int4Grouped(u16),
    Int3G64,
    E8,
    Mxfp4,
    Fp8,
    Fp8Ue8m0,
    Rans,
}

impl Registered {
    /// Name in stamps and messages.
    fn name(self) -> &'static str {
        match self {
            Registered::F32 => "f32",
            Registered::Int8Row => "int8-row",
            Registered::Int4Row => "int4-row",
            Registered::Int2Row => "int2-row",
            Registered::Int4Grouped(_) => "int4-grouped",
            Registered::Int3G64 => "int3-g64",
            Registered::E8 => "e8-iq3-lattice",
            Registered::Mxfp4 => "mxfp4",
            Registered::Fp8 => "fp8-e4m3-b128",
            Registered::Fp8Ue8m0 => "fp8-e4m3-b128 with UE8M0 scales",
            Registered::Rans => "int4-rans256-g0",
        }
    }

    /// Every name that a stamp may use.
    const STAMPED: [Registered; 10] = [
        Registered::F32,
        Registered::Int8Row,
        Registered::Int4Row,
        Registered::Int2Row,
        Registered::Int4Grouped(0),
        Registered::Int3G64,
        Registered::E8,
        Registered::Mxfp4,
        Registered::Fp8,
        Registered::Rans,
    ];

    /// Our format, for those that can be computed with.
    fn format(self) -> Option<Format> {
        match self {
            Registered::Int8Row => Some(Format::Int8Row),
            Registered::Int4Row => Some(Format::Int4Row),
            Registered::Int4Grouped(group) => Some(Format::Int4Group(group)),
            Registered::Fp8 => Some(Format::Fp8Block),
            _ => None,
        }
    }
}

/// Format names that the directory's files claim for their tensors.
#[derive(Debug, Default)]
pub(crate) struct Stamps(BTreeMap<String, (Registered, PathBuf)>);

impl Stamps {
    /// Collects the stamps of all headers. Agreeing duplicates are fine, others refused.
    pub fn new(files: &[PathBuf], headers: &[Header]) -> Result<Self, Error> {
        let mut stamps = Stamps::default();
        for (file, header) in files.iter().zip(headers) {
            if let Some(text) = header.metadata.get(STAMP) {
                stamps.add(file, text)?;
            }
        }
        Ok(stamps)
    }

    fn add(&mut self, file: &Path, text: &str) -> Result<(), Error> {
        let refuse = |reason: String| Error::Stamp { file: file.to_owned(), reason };
        let claims: BTreeMap<String, String> =
            serde_json::from_str(text).map_err(|e| refuse(format!("is not a JSON object of names: {e}")))?;
        if claims.len() > STAMP_CAP {
            return Err(refuse(format!("has {} entries, more than the cap of {STAMP_CAP}", claims.len())));
        }
        for (tensor, name) in claims {
            let format = Registered::STAMPED.into_iter().find(|f| f.name() == name);
            let format =
                format.ok_or_else(|| refuse(format!("claims the unknown format {name:?} for {tensor:?}")))?;
            if let Some((earlier, path)) = self.0.insert(tensor.clone(), (format, file.to_owned()))
                && earlier != format
            {
                return Err(refuse(format!(
                    "claims {name} for {tensor:?}, that of {} claims {}",
                    path.display(),
                    earlier.name()
                )));
            }
        }
        Ok(())
    }

    fn get(&self, tensor: &str) -> Option<&(Registered, PathBuf)> {
        self.0.get(tensor)
    }
}

/// Whether the tensors hold a quantised matrix of this layout.
pub(crate) fn is_colibri(index: &TensorIndex) -> bool {
    index.iter().any(|(name, _)| {
        name.strip_suffix(SCALES_SUFFIX)
            .and_then(|weights| index.stored(weights))
            .is_some_and(|stored| matches!(stored.info.dtype, Dtype::U8 | Dtype::I8 | Dtype::F8E4M3))
    })
}

/// Byte counts of a matrix and its scales, and the shape that they are held against.
#[derive(Clone, Copy)]
struct Counts {
    /// Bytes of the weights.
    weights: u128,
    /// Bytes of the scales.
    scales: u128,
    /// Whether the scales are f32 (else one byte each).
    f32_scales: bool,
    rows: u128,
    cols: u128,
}

impl Counts {
    /// Every format that the counts allow, the one to take without a stamp first.
    ///
    /// Products are in 128 bits, so that a hostile configuration cannot overflow them.
    fn candidates(self) -> Vec<Registered> {
        let Counts { weights, scales, f32_scales, rows, cols } = self;
        let blocks = rows.div_ceil(128) * cols.div_ceil(128);
        let nibbles = weights == rows * cols.div_ceil(2);
        let mut found = Vec::new();
        let mut allow = |yes: bool, format| {
            if yes {
                found.push(format);
            }
        };
        if !f32_scales {
            allow(nibbles && scales == rows * cols.div_ceil(32), Registered::Mxfp4);
            allow(weights == rows * cols && scales == blocks, Registered::Fp8Ue8m0);
            return found;
        }
        allow(scales == 4 && weights == rows * cols.div_ceil(256) * 98, Registered::E8);
        if weights == rows * cols {
            allow(scales == rows * 4, Registered::Int8Row);
            allow(scales == blocks * 4, Registered::Fp8);
        } else if nibbles {
            allow(scales == rows * 4, Registered::Int4Row);
            let groups = GROUP_SIZES
                .into_iter()
                .find(|&group| scales == rows * cols.div_ceil(u128::from(group)) * 4 && scales > rows * 4);
            if let Some(group) = groups {
                allow(true, Registered::Int4Grouped(group));
            }
        } else if weights == rows * cols.div_ceil(4) {
            allow(scales == rows * 4, Registered::Int2Row);
        } else if weights == rows * cols.div_ceil(64) * 24 {
            allow(scales == rows * cols.div_ceil(64) * 4, Registered::Int3G64);
        }
        found
    }

    /// Whether the weight bytes fit some format, whatever the scales.
    fn weights_fit(self) -> bool {
        let Counts { weights, rows, cols, .. } = self;
        [
            rows * cols,
            rows * cols.div_ceil(2),
            rows * cols.div_ceil(4),
            rows * cols.div_ceil(64) * 24,
            rows * cols.div_ceil(256) * 98,
        ]
        .contains(&weights)
    }
}

/// A matrix of `rows × cols`, quantised or plain.
///
/// `notice` is told when the counts left the format open and no stamp settled it.
pub(crate) fn locate(
    index: &TensorIndex,
    stamps: &Stamps,
    name: &str,
    stored: &Stored,
    (rows, cols): (usize, usize),
    notice: &dyn Fn(String),
) -> Result<MatrixPlace, Error> {
    let scales_name = format!("{name}{SCALES_SUFFIX}");
    let Some(scales) = index.stored(&scales_name) else {
        return hf::locate(index, name, stored, rows, cols);
    };
    if !matches!(stored.info.dtype, Dtype::U8 | Dtype::I8 | Dtype::F8E4M3) {
        return Err(Error::Dtype {
            file: index.path(stored),
            tensor: name.to_owned(),
            wanted: "U8 or I8, since it has scales",
            got: stored.info.dtype,
        });
    }
    let f32_scales = match scales.info.dtype {
        Dtype::F32 => true,
        Dtype::U8 | Dtype::F8E8M0 => false,
        got => {
            return Err(Error::Dtype { file: index.path(scales), tensor: scales_name, wanted: "F32", got });
        }
    };
    let counts = Counts {
        weights: u128::from(stored.info.len),
        scales: u128::from(scales.info.len),
        f32_scales,
        rows: rows as u128,
        cols: cols as u128,
    };
    let mut candidates = counts.candidates();
    if stored.info.dtype == Dtype::F8E4M3 {
        candidates.retain(|f| matches!(f, Registered::Fp8 | Registered::Fp8Ue8m0));
    }
    let chosen = choose(stamps, name, &candidates, notice)?;
    let Some(chosen) = chosen else {
        return Err(misfit(index, name, stored, scales, counts));
    };
    let Some(format) = chosen.format() else {
        return Err(Error::UnsupportedFormat {
            file: index.path(stored),
            tensor: name.to_owned(),
            format: chosen.name().to_owned(),
        });
    };
    // The candidates matched both byte counts exactly, so the layout's counts are these.
    let layout = hf::layout(name, format, rows, cols)?;
    Ok(MatrixPlace { layout, weights: stored.extent(), scales: Some(scales.extent()) })
}

/// The stamped format among the candidates, else the first.
fn choose(
    stamps: &Stamps,
    name: &str,
    candidates: &[Registered],
    notice: &dyn Fn(String),
) -> Result<Option<Registered>, Error> {
    if let Some((stamp, file)) = stamps.get(name) {
        // A format without inferable counts is refused by its name all the same.
        if matches!(stamp, Registered::Rans | Registered::Mxfp4) {
            return Ok(Some(*stamp));
        }
        let found = candidates.iter().find(|c| c.name().starts_with(stamp.name()));
        return match found {
            Some(format) => Ok(Some(*format)),
            None => Err(Error::Stamp {
                file: file.clone(),
                reason: format!(
                    "claims {} for {name:?}, but the byte counts of that tensor do not fit",
                    stamp.name()
                ),
            }),
        };
    }
    if let [first, second, ..] = candidates {
        notice(format!(
            "tensor {name:?} fits {} and {} by its byte counts and carries no stamp; it is read as {}",
            first.name(),
            second.name(),
            first.name()
        ));
    }
    Ok(candidates.first().copied())
}

/// The refusal for byte counts that fit no format.
fn misfit(index: &TensorIndex, name: &str, stored: &Stored, scales: &Stored, counts: Counts) -> Error {
    let Counts { rows, cols, .. } = counts;
    if counts.weights_fit() {
        return Error::ScaleBytes {
            file: index.path(scales),
            tensor: format!("{name}{SCALES_SUFFIX}"),
            wanted: format!(
                "for {} weight bytes of {rows} × {cols}: {} (f32 for each row), {} (each block of 128 × 128) or one f32 for each group of {GROUP_SIZES:?} columns",
                counts.weights,
                rows * 4,
                rows.div_ceil(128) * cols.div_ceil(128) * 4,
            ),
            got: scales.info.len,
        };
    }
    Error::WeightBytes {
        file: index.path(stored),
        tensor: name.to_owned(),
        wanted: format!(
            "for {rows} × {cols}: {} (int8, fp8) or {} (int4)",
            rows * cols,
            rows * cols.div_ceil(2)
        ),
        got: stored.info.len,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(weights: u64, scales: u64, rows: u64, cols: u64) -> Vec<Registered> {
        Counts {
            weights: weights.into(),
            scales: scales.into(),
            f32_scales: true,
            rows: rows.into(),
            cols: cols.into(),
        }
        .candidates()
    }

    #[test]
    fn published_sizes_give_the_published_formats() {
        // An expert of GLM-5.2: 2048 × 6144.
        assert_eq!(candidates(6_291_456, 786_432, 2048, 6144), [Registered::Int4Grouped(64)]);
        assert_eq!(candidates(6_291_456, 8192, 2048, 6144), [Registered::Int4Row]);
        assert_eq!(candidates(12_582_912, 8192, 2048, 6144), [Registered::Int8Row]);
        assert_eq!(candidates(12_582_912, 16 * 48 * 4, 2048, 6144), [Registered::Fp8]);
        assert_eq!(candidates(3_145_728, 8192, 2048, 6144), [Registered::Int2Row]);
        assert_eq!(candidates(2048 * 96 * 24, 2048 * 96 * 4, 2048, 6144), [Registered::Int3G64]);
        assert_eq!(candidates(2048 * 24 * 98, 4, 2048, 6144), [Registered::E8]);
    }

    #[test]
    fn coinciding_counts_prefer_int8_rows() {
        // o_proj of GLM-5.2: 48 × 128 blocks are as many as its 6144 rows.
        let found = candidates(6144 * 16384, 6144 * 4, 6144, 16384);
        assert_eq!(found, [Registered::Int8Row, Registered::Fp8]);
    }

    #[test]
    fn the_smallest_group_that_fits_wins() {
        // 64 columns: groups of 32 and of 48 both give two scales a row.
        assert_eq!(candidates(64 * 32, 64 * 2 * 4, 64, 64), [Registered::Int4Grouped(32)]);
    }

    #[test]
    fn one_scale_too_few_fits_nothing() {
        assert!(candidates(64 * 64, 63 * 4, 64, 64).is_empty());
        assert!(candidates(64 * 32, 63 * 4, 64, 64).is_empty());
    }

    #[test]
    fn a_dimension_near_the_limit_does_not_overflow() {
        let counts =
            Counts { weights: 1, scales: 1, f32_scales: true, rows: u128::from(u64::MAX), cols: 1 << 50 };
        assert!(counts.candidates().is_empty());
        assert!(!counts.weights_fit());
    }
}
