//! The slab container: its manifest and metadata (shared with the writer) and how it is read.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::path::PathBuf;

use metaltail_quant::Format;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

use crate::error::Error;
use crate::header::{Dtype, Header};
use crate::hf;
use crate::index::{Stored, TensorIndex};
use crate::inventory::{ExpertLayerSpec, Part};
use crate::place::{ExpertPlace, Extent, MatrixPlace, PartPlace, RunOffset};

/// Name of the manifest, the file that is written last.
pub const MANIFEST: &str = "manifest.json";
/// Name of the journal that a conversion keeps while it is under way.
pub const JOURNAL: &str = "convert.json";
/// Value of [`Manifest::format`].
pub const FORMAT_NAME: &str = "metaltail-slab";
/// Version that this program writes and reads.
pub const VERSION: u32 = 1;
/// Metadata key whose value is `"1"` in every file of a slab container.
pub const META_SLAB: &str = "metaltail.slab";
/// Metadata key that holds the JSON text of a [`TensorMetas`].
pub const META_TENSORS: &str = "metaltail.tensors";
/// Suffix of the tensor that holds a matrix's scales.
pub const SCALES_SUFFIX: &str = ".qs";
/// What the names of padding tensors begin with; a number follows, from 0 in each file.
pub const PAD_PREFIX: &str = "__pad.";
/// Alignment of expert runs (offset and length) and of a file's data, in bytes.
pub const RUN_ALIGN: u64 = 4096;
/// Alignment of each blob inside a run, in bytes.
pub const BLOB_ALIGN: u64 = 64;

/// `manifest.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Always [`FORMAT_NAME`].
    pub format: String,
    /// Always [`VERSION`].
    pub version: u32,
    /// `model_type` of the configuration.
    pub model_type: String,
    /// What the conversion was asked for.
    pub parameters: Parameters,
    /// Finished files; expert files may be left out, since each expert has a checksum.
    pub files: Vec<ManifestFile>,
    /// XXH3-64 of every tensor of the dense files by its stored name, scales as entries of their own.
    pub dense: BTreeMap<String, Checksum>,
    /// Layers with routed experts, ascending.
    pub experts: Vec<ManifestExperts>,
}

/// What a conversion was asked for; a resumed one must be asked for the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameters {
    /// Format name of routed experts.
    pub experts: String,
    /// Format name of the remaining matrices.
    pub rest: String,
    /// Format name of the draft layer's experts.
    pub draft_experts: String,
    /// Kind of the source: `hf`, `colibri`, `slab` or `synth`.
    pub source: String,
}

/// A finished file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestFile {
    /// Name in the container's directory.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// XXH3-64 of the whole file.
    pub xxh3: Checksum,
}

/// The experts of one layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestExperts {
    /// Layer index.
    pub layer: u32,
    /// Name of the file that holds them.
    pub file: String,
    /// Formats of gate, up, down.
    #[serde(with = "format_names")]
    pub formats: [Format; 3],
    /// Byte offset of expert 0's run in the file.
    pub first: u64,
    /// Bytes of one expert's run, padding included.
    pub stride: u64,
    /// XXH3-64 of each expert's whole padded run.
    pub xxh3: Vec<Checksum>,
}

/// Value of the metadata key [`META_TENSORS`]: every matrix and vector of one file by name.
pub type TensorMetas = BTreeMap<String, TensorMeta>;

/// Format and shape of one matrix; a vector of `n` has `rows == 1`, `cols == n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorMeta {
    /// Number format.
    #[serde(with = "format_name")]
    pub format: Format,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

/// An XXH3-64 value, written as 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Checksum(pub u64);

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Checksum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text.len() != 16 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(de::Error::custom(format!("checksum {text:?}: wanted 16 hexadecimal digits")));
        }
        u64::from_str_radix(&text, 16).map(Checksum).map_err(de::Error::custom)
    }
}

/// A [`Format`] as its name.
mod format_name {
    use super::*;

    pub fn serialize<S: Serializer>(format: &Format, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(format)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Format, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Three [`Format`]s as their names.
mod format_names {
    use super::*;

    pub fn serialize<S: Serializer>(formats: &[Format; 3], serializer: S) -> Result<S::Ok, S::Error> {
        formats.map(|f| f.to_string()).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[Format; 3], D::Error> {
        let names = <[String; 3]>::deserialize(deserializer)?;
        let [gate, up, down] = names;
        let parse = |name: String| name.parse::<Format>().map_err(de::Error::custom);
        Ok([parse(gate)?, parse(up)?, parse(down)?])
    }
}

/// Why a manifest is refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// Not the JSON of a manifest.
    #[error("the manifest is not the JSON that it should be: {0}")]
    Json(serde_json::Error),
    /// Another program's manifest.
    #[error("the manifest is of the format {got:?}, wanted \"metaltail-slab\"")]
    Format {
        /// Format as written.
        got: String,
    },
    /// A version that this program does not read.
    #[error("the manifest has version {got}, this program reads version {VERSION}: use a newer one")]
    Version {
        /// Version as written.
        got: u32,
    },
    /// A file name with a directory in it.
    #[error("the manifest names {name:?}, which is not a plain file name")]
    FileName {
        /// Name as written.
        name: String,
    },
    /// A file or a layer is listed twice.
    #[error("the manifest lists {what} twice")]
    Duplicate {
        /// File name, or the layer.
        what: String,
    },
    /// Expert runs that are not aligned, or empty.
    #[error("layer {layer} has {what} {got}, wanted a multiple of 4096 above zero")]
    Alignment {
        /// Layer index.
        layer: u32,
        /// `first` or `stride`.
        what: &'static str,
        /// Bytes as written.
        got: u64,
    },
    /// The end of the last run passes 64 bits.
    #[error("layer {layer} has experts past the end of any file")]
    Overflow {
        /// Layer index.
        layer: u32,
    },
}

impl From<serde_json::Error> for ManifestError {
    /// The message holds the parser's words, so they are not its source too.
    fn from(error: serde_json::Error) -> Self {
        ManifestError::Json(error)
    }
}

impl ManifestExperts {
    /// Offset after the last run, or `None` where it passes 64 bits.
    pub fn end(&self) -> Option<u64> {
        self.stride.checked_mul(self.xxh3.len() as u64)?.checked_add(self.first)
    }
}

/// Parses and checks the text of `manifest.json`.
pub fn parse_manifest(bytes: &[u8]) -> Result<Manifest, ManifestError> {
    #[derive(Deserialize)]
    struct Head {
        #[serde(default)]
        format: String,
        #[serde(default)]
        version: u32,
    }
    let head: Head = serde_json::from_slice(bytes)?;
    if head.format != FORMAT_NAME {
        return Err(ManifestError::Format { got: head.format });
    }
    if head.version != VERSION {
        return Err(ManifestError::Version { got: head.version });
    }
    let manifest: Manifest = serde_json::from_slice(bytes)?;
    let mut names = BTreeSet::new();
    for name in manifest.files.iter().map(|f| &f.name) {
        if !names.insert(name) {
            return Err(ManifestError::Duplicate { what: format!("{name:?}") });
        }
    }
    let mut layers = BTreeSet::new();
    for experts in &manifest.experts {
        let layer = experts.layer;
        names.insert(&experts.file);
        if !layers.insert(layer) {
            return Err(ManifestError::Duplicate { what: format!("layer {layer}") });
        }
        for (what, got) in [("first", experts.first), ("stride", experts.stride)] {
            if got == 0 || !got.is_multiple_of(RUN_ALIGN) {
                return Err(ManifestError::Alignment { layer, what, got });
            }
        }
        if experts.end().is_none() {
            return Err(ManifestError::Overflow { layer });
        }
    }
    match names.iter().find(|name| !hf::is_plain_name(name)) {
        Some(name) => Err(ManifestError::FileName { name: name.to_string() }),
        None => Ok(manifest),
    }
}

impl Manifest {
    /// Names of all files that it lists, ascending.
    pub(crate) fn names(&self) -> BTreeSet<&str> {
        let files = self.files.iter().map(|f| f.name.as_str());
        files.chain(self.experts.iter().map(|e| e.file.as_str())).collect()
    }
}

/// What a slab container says about its tensors and experts.
#[derive(Debug)]
pub(crate) struct Slab {
    pub manifest: Manifest,
    metas: HashMap<String, TensorMeta>,
    /// Layer to its file and its place in the manifest.
    layers: HashMap<u32, (u32, usize)>,
}

impl Slab {
    /// Joins the manifest with the metadata of all files, whose lengths are `lens`.
    pub fn new(
        manifest: Manifest,
        files: &[PathBuf],
        headers: &[Header],
        lens: &[u64],
    ) -> Result<Self, Error> {
        let mut metas = HashMap::new();
        for (file, header) in files.iter().zip(headers) {
            let refuse = |what: &str, reason: String| Error::Slab {
                file: file.clone(),
                what: what.to_owned(),
                reason,
            };
            if header.metadata.get(META_SLAB).map(String::as_str) != Some("1") {
                return Err(refuse(META_SLAB, "is not \"1\" in its metadata".to_owned()));
            }
            let text = header.metadata.get(META_TENSORS).map_or("{}", String::as_str);
            let own: TensorMetas = serde_json::from_str(text)
                .map_err(|e| refuse(META_TENSORS, format!("does not parse ({e})")))?;
            metas.extend(own);
        }
        let mut layers = HashMap::new();
        for (position, experts) in manifest.experts.iter().enumerate() {
            let named = |path: &PathBuf| path.file_name().is_some_and(|n| n == experts.file.as_str());
            let found = files.iter().zip(lens).zip(0u32..).find(|((path, _), _)| named(path));
            let Some(((path, &len), file)) = found else {
                continue;
            };
            if experts.end().is_none_or(|end| end > len) {
                return Err(Error::Slab {
                    file: path.clone(),
                    what: format!("layer {}", experts.layer),
                    reason: format!(
                        "has {} experts of {} bytes from offset {} in a file of {len} bytes",
                        experts.xxh3.len(),
                        experts.stride,
                        experts.first
                    ),
                });
            }
            layers.insert(experts.layer, (file, position));
        }
        Ok(Slab { manifest, metas, layers })
    }

    /// Refuses a tensor of a dense file that the manifest has no checksum of.
    pub fn check_dense(&self, index: &TensorIndex) -> Result<(), Error> {
        let expert_files: BTreeSet<u32> = self.layers.values().map(|&(file, _)| file).collect();
        let bare = |(name, stored): &(&str, &Stored)| {
            !expert_files.contains(&stored.file) && !self.manifest.dense.contains_key(*name)
        };
        match index.iter().filter(bare).min_by_key(|(name, _)| *name) {
            Some((name, stored)) => Err(Error::Slab {
                file: index.path(stored),
                what: format!("tensor {name:?}"),
                reason: "has no checksum in the manifest".to_owned(),
            }),
            None => Ok(()),
        }
    }

    /// A matrix whose metadata, shape, type and byte counts agree.
    pub fn locate(
        &self,
        index: &TensorIndex,
        name: &str,
        stored: &Stored,
        (rows, cols): (usize, usize),
    ) -> Result<MatrixPlace, Error> {
        let meta = self.metas.get(name).ok_or_else(|| Error::Slab {
            file: index.path(stored),
            what: format!("tensor {name:?}"),
            reason: "has no entry in the metadata".to_owned(),
        })?;
        if (meta.rows, meta.cols) != (rows, cols) {
            return Err(Error::Shape {
                file: index.path(stored),
                tensor: name.to_owned(),
                wanted: vec![rows as u64, cols as u64],
                got: vec![meta.rows as u64, meta.cols as u64],
            });
        }
        let layout = hf::layout(name, meta.format, rows, cols)?;
        let (dtype, units) = stored_as(meta.format, cols).ok_or_else(|| Error::UnsupportedFormat {
            file: index.path(stored),
            tensor: name.to_owned(),
            format: meta.format.to_string(),
        })?;
        index.check_dtype(name, stored, dtype)?;
        index.check_shape(name, stored, rows, units)?;
        let scales = if layout.scale_bytes() == 0 {
            None
        } else {
            let (name, scales) = index.require_stored(&format!("{name}{SCALES_SUFFIX}"))?;
            index.check_dtype(name, scales, Dtype::F32)?;
            index.check_shape(name, scales, layout.scale_rows(), layout.scale_cols())?;
            Some(scales.extent())
        };
        Ok(MatrixPlace { layout, weights: stored.extent(), scales })
    }

    /// One expert as its whole padded run, from the places of gate, up and down.
    pub fn expert(
        &self,
        index: &TensorIndex,
        spec: &ExpertLayerSpec,
        expert: u32,
        parts: [MatrixPlace; 3],
    ) -> Result<ExpertPlace, Error> {
        let (file, experts) = self.experts_of(index, spec.layer)?;
        let refuse = |reason: String| Error::Slab {
            file: index.dir().join(&experts.file),
            what: format!("layer {}, expert {expert}", spec.layer),
            reason,
        };
        let (wanted, got) = (spec.count as usize, experts.xxh3.len());
        let checksum = experts.xxh3.get(expert as usize).filter(|_| wanted == got);
        let checksum =
            checksum.ok_or_else(|| refuse(format!("is one of {wanted}, the manifest has {got}")))?;
        // Within the file, as `new` has seen for the layer's last run.
        let run =
            Extent { file, offset: experts.first + experts.stride * u64::from(expert), len: experts.stride };
        let place_in_run = |part: Part| {
            let place = parts[part as usize];
            place_within(run, place, experts.formats[part as usize])
                .map_err(|reason| refuse(format!("has its {part:?} matrix {reason}")))
        };
        Ok(ExpertPlace {
            runs: vec![run],
            parts: [place_in_run(Part::Gate)?, place_in_run(Part::Up)?, place_in_run(Part::Down)?],
            checksum: Some(checksum.0),
            repack: None,
        })
    }

    /// A layer's experts in the manifest, and the index of their file.
    fn experts_of(&self, index: &TensorIndex, layer: u32) -> Result<(u32, &ManifestExperts), Error> {
        match self.layers.get(&layer) {
            Some(&(file, position)) => Ok((file, &self.manifest.experts[position])),
            None => Err(Error::Slab {
                file: index.dir().join(MANIFEST),
                what: format!("layer {layer}"),
                reason: "has no experts in the manifest".to_owned(),
            }),
        }
    }
}

/// A matrix in the only run of its expert, or in words why it cannot be there.
fn place_within(run: Extent, place: MatrixPlace, wanted: Format) -> Result<PartPlace, String> {
    let got = place.layout.format();
    if wanted != got {
        return Err(format!("in {got}, the manifest says {wanted}"));
    }
    let within = |extent: Extent| {
        offset_within(run, extent).ok_or_else(|| {
            format!(
                "at offset {} with {} bytes, outside of its run of {} at {}",
                extent.offset, extent.len, run.len, run.offset
            )
        })
    };
    Ok(PartPlace {
        layout: place.layout,
        weights: within(place.weights)?,
        scales: place.scales.map(within).transpose()?,
    })
}

/// Where an extent lies in the only run of an expert, if it does.
fn offset_within(run: Extent, extent: Extent) -> Option<RunOffset> {
    let offset = extent.offset.checked_sub(run.offset)?;
    let end = offset.checked_add(extent.len)?;
    (extent.file == run.file && end <= run.len).then_some(RunOffset { run: 0, offset })
}

/// Element type that a format is stored as, and elements of one row of `cols` columns.
fn stored_as(format: Format, cols: usize) -> Option<(Dtype, usize)> {
    Some(match format {
        Format::F32 => (Dtype::F32, cols),
        Format::F16 => (Dtype::F16, cols),
        Format::Bf16 => (Dtype::Bf16, cols),
        Format::Int8Row => (Dtype::I8, cols),
        Format::Int4Row | Format::Int4Group(_) => (Dtype::U8, cols.div_ceil(2)),
        Format::Fp8Block => (Dtype::F8E4M3, cols),
        Format::Gguf(format) => (Dtype::U8, format.row_bytes(cols)?),
        _ => return None,
    })
}
