//! Hugging Face checkpoints: which files belong to one, and matrices in their stored formats.

pub(crate) mod slices;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use metaltail_quant::{Format, MatrixLayout};
use serde::Deserialize;

use crate::error::{Error, MissingShards};
use crate::header::{Dtype, Header};
use crate::index::{Stored, TensorIndex};
use crate::place::MatrixPlace;

/// Name of the file that says which shard holds which tensor.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Suffix of the tensor with the block scales of an fp8 matrix.
const SCALE_INV: &str = "_scale_inv";
const FETCH_AGAIN: &str = "Fetch them again from the model's source into the same directory.";

/// Which shard holds which tensor.
#[derive(Debug, Deserialize)]
pub(crate) struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl ShardIndex {
    /// Parses the text of [`INDEX`]; `path` is for messages.
    pub fn parse(path: &Path, text: &[u8]) -> Result<Self, Error> {
        let index: ShardIndex =
            serde_json::from_slice(text).map_err(|source| Error::Json { path: path.to_owned(), source })?;
        for (tensor, shard) in &index.weight_map {
            if !is_plain_name(shard) {
                return Err(Error::IndexShardName {
                    path: path.to_owned(),
                    tensor: tensor.clone(),
                    shard: shard.clone(),
                });
            }
        }
        Ok(index)
    }

    /// Names of the shards, ascending.
    pub fn shards(&self) -> BTreeSet<&str> {
        self.weight_map.values().map(String::as_str).collect()
    }

    /// Refuses a directory without some of the shards: `present` are the files it has.
    pub fn check_present(&self, dir: &Path, present: &BTreeSet<String>) -> Result<(), Error> {
        let shards = self.shards();
        let names: Vec<String> =
            shards.iter().filter(|s| !present.contains(**s)).map(|s| (*s).to_owned()).collect();
        if names.is_empty() {
            return Ok(());
        }
        let lost = || self.weight_map.iter().filter(|(_, s)| !present.contains(*s)).map(|(t, _)| t);
        let layers = || lost().filter_map(|t| layer_of(t));
        Err(Error::MissingShards(Box::new(MissingShards {
            dir: dir.to_owned(),
            known_from: INDEX.to_owned(),
            present: shards.len() - names.len(),
            expected: shards.len(),
            names,
            tensors: Some(lost().count()),
            layers: layers().min().zip(layers().max()),
            hint: FETCH_AGAIN,
        })))
    }

    /// Refuses a tensor that is not in the shard that the index names.
    pub fn check_tensors(&self, path: &Path, files: &[PathBuf], headers: &[Header]) -> Result<(), Error> {
        let mut holders: BTreeMap<&str, &str> = BTreeMap::new();
        for (file, header) in files.iter().zip(headers) {
            let name = file.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            holders.extend(header.tensors.iter().map(|(tensor, _)| (tensor.as_str(), name)));
        }
        for (tensor, shard) in &self.weight_map {
            let holder = holders.get(tensor.as_str()).copied();
            if holder != Some(shard.as_str()) {
                return Err(Error::IndexDisagrees {
                    path: path.to_owned(),
                    tensor: tensor.clone(),
                    wanted: shard.clone(),
                    got: holder.unwrap_or("no shard").to_owned(),
                });
            }
        }
        Ok(())
    }
}

/// Refuses a directory whose `NAME-i-of-n` numbering has holes.
pub(crate) fn check_numbering(dir: &Path, present: &BTreeSet<String>) -> Result<(), Error> {
    let mut series: BTreeMap<(&str, &str), BTreeSet<u32>> = BTreeMap::new();
    for name in present {
        if let Some((stem, number, count)) = numbered(name) {
            series.entry((stem, count)).or_default().insert(number);
        }
    }
    for ((stem, count), numbers) in series {
        let width = count.len();
        let expected: u32 = count.parse().unwrap_or(0);
        // The last number tells whether counting begins at 0 or 1.
        let begin = u32::from(!numbers.contains(&0));
        let names: Vec<String> = (begin..begin.saturating_add(expected))
            .filter(|n| !numbers.contains(n))
            .take(crate::listing::FILES_CAP)
            .map(|n| format!("{stem}-{n:0width$}-of-{count}.safetensors"))
            .collect();
        if !names.is_empty() {
            return Err(Error::MissingShards(Box::new(MissingShards {
                dir: dir.to_owned(),
                known_from: "their numbering".to_owned(),
                present: numbers.len(),
                expected: expected as usize,
                names,
                tensors: None,
                layers: None,
                hint: FETCH_AGAIN,
            })));
        }
    }
    Ok(())
}

/// Splits `model-00001-of-00005.safetensors` into `model`, 1 and `00005`.
fn numbered(name: &str) -> Option<(&str, u32, &str)> {
    let (rest, count) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    count.parse::<u32>().ok()?;
    Some((stem, number.parse().ok()?, count))
}

/// Whether a name denotes a file in the directory itself.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

/// Layer number in a tensor's name.
pub(crate) fn layer_of(name: &str) -> Option<u32> {
    let rest = if let Some(rest) = name.strip_prefix("layers.") {
        rest
    } else {
        &name[name.find(".layers.")? + ".layers.".len()..]
    };
    rest.split('.').next()?.parse().ok()
}

/// A matrix of `rows × cols` in its stored format: f32, f16, bf16, or fp8 with block scales.
pub(crate) fn locate(
    index: &TensorIndex,
    name: &str,
    stored: &Stored,
    rows: usize,
    cols: usize,
) -> Result<MatrixPlace, Error> {
    index.check_shape(name, stored, rows, cols)?;
    let format = match stored.info.dtype {
        Dtype::F32 => Format::F32,
        Dtype::F16 => Format::F16,
        Dtype::Bf16 => Format::Bf16,
        Dtype::F8E4M3 => Format::Fp8Block,
        got => {
            return Err(Error::Dtype {
                file: index.path(stored),
                tensor: name.to_owned(),
                wanted: "F32, F16, BF16 or F8_E4M3 with block scales",
                got,
            });
        }
    };
    let layout = layout(name, format, rows, cols)?;
    let scales = if format == Format::Fp8Block {
        let (name, scales) = index.require_stored(&format!("{name}{SCALE_INV}"))?;
        index.check_dtype(name, scales, Dtype::F32)?;
        index.check_shape(name, scales, layout.scale_rows(), layout.scale_cols())?;
        Some(scales.extent())
    } else {
        None
    };
    Ok(MatrixPlace { layout, weights: stored.extent(), scales })
}

/// A layout for a tensor of this name.
pub(crate) fn layout(name: &str, format: Format, rows: usize, cols: usize) -> Result<MatrixLayout, Error> {
    MatrixLayout::new(format, rows, cols).map_err(|source| Error::Layout { tensor: name.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layer_number_is_read_from_any_prefix() {
        assert_eq!(layer_of("model.layers.12.mlp.gate.weight"), Some(12));
        assert_eq!(layer_of("layers.0.input_layernorm.weight"), Some(0));
        assert_eq!(layer_of("language_model.model.layers.3.x"), Some(3));
        assert_eq!(layer_of("model.norm.weight"), None);
        assert_eq!(layer_of("model.layers.x.y"), None);
    }

    #[test]
    fn a_hole_in_the_numbering_is_named() {
        let present = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
        let dir = Path::new("d");
        let whole = present(&["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"]);
        assert!(check_numbering(dir, &whole).is_ok());
        let whole = present(&["m-00000-of-00001.safetensors", "other.safetensors"]);
        assert!(check_numbering(dir, &whole).is_ok());
        let holed = present(&["m-00001-of-00003.safetensors", "m-00002-of-00003.safetensors"]);
        let Err(Error::MissingShards(missing)) = check_numbering(dir, &holed) else {
            panic!("the hole was not seen");
        };
        assert_eq!(missing.names, ["m-00003-of-00003.safetensors"]);
        assert_eq!((missing.present, missing.expected), (2, 3));
    }

    #[test]
    fn only_names_in_the_directory_itself_are_plain() {
        assert!(is_plain_name("model-00001-of-00002.safetensors"));
        for name in ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\0b"] {
            assert!(!is_plain_name(name), "{name:?}");
        }
    }
}
