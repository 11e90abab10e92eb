//! All tensors of a directory by name, whatever prefix the names carry.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::header::{Dtype, Header, TensorInfo};
use crate::place::Extent;

/// Prefix that canonical names of everything but the head carry.
const CANONICAL: &str = "model.";
/// A tensor that every family has and that tells the prefix.
const FIRST_NORM: &str = "layers.0.input_layernorm.weight";
/// The same, for a directory whose first layer is missing.
const EMBEDDING: &str = "embed_tokens.weight";

/// One tensor and the file that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    /// Index into `Checkpoint::files`.
    pub file: u32,
    /// Type, shape and position.
    pub info: TensorInfo,
}

impl Stored {
    /// Its bytes.
    pub fn extent(&self) -> Extent {
        Extent { file: self.file, offset: self.info.offset, len: self.info.len }
    }

    /// Whether the stored shape is `rows × cols`, dimensions of one left out of account.
    pub fn has_shape(&self, rows: usize, cols: usize) -> bool {
        let wanted = [rows as u64, cols as u64];
        let got = self.info.shape.iter().copied().filter(|&dim| dim != 1);
        got.eq(wanted.into_iter().filter(|&dim| dim != 1))
    }
}

/// Every tensor of a directory by its stored name.
#[derive(Debug)]
pub(crate) struct TensorIndex {
    tensors: HashMap<String, Stored>,
    /// What stands in place of `model.` in this directory.
    prefix: String,
    /// What precedes names outside of the model proper, such as the head's.
    outer: String,
    /// The directory, for messages.
    dir: PathBuf,
    /// Files, for messages.
    files: Vec<PathBuf>,
}

impl TensorIndex {
    /// Joins the headers of `files`; `keep` says which names count.
    pub fn new(
        dir: &Path,
        files: &[PathBuf],
        headers: &[Header],
        keep: impl Fn(&str) -> bool,
    ) -> Result<Self, Error> {
        let mut tensors: HashMap<String, Stored> =
            HashMap::with_capacity(headers.iter().map(|h| h.tensors.len()).sum());
        for (file, header) in (0u32..).zip(headers) {
            for (name, info) in header.tensors.iter().filter(|(name, _)| keep(name)) {
                match tensors.entry(name.clone()) {
                    Slot::Vacant(slot) => {
                        slot.insert(Stored { file, info: info.clone() });
                    }
                    Slot::Occupied(slot) => {
                        return Err(Error::DuplicateTensor {
                            tensor: name.clone(),
                            first: files[slot.get().file as usize].clone(),
                            second: files[file as usize].clone(),
                        });
                    }
                }
            }
        }
        let prefix = find_prefix(&tensors);
        let outer = prefix.strip_suffix(CANONICAL).unwrap_or_default().to_owned();
        Ok(TensorIndex { tensors, prefix, outer, dir: dir.to_owned(), files: files.to_vec() })
    }

    /// What this directory has in place of `model.`.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The directory, for messages.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A tensor by its stored name.
    pub fn stored(&self, name: &str) -> Option<&Stored> {
        self.tensors.get(name)
    }

    /// A tensor by its canonical name: the stored name and where it is.
    pub fn find(&self, canonical: &str) -> Option<(&str, &Stored)> {
        if self.prefix == CANONICAL {
            return self.tensors.get_key_value(canonical).map(|(name, t)| (name.as_str(), t));
        }
        if let Some(rest) = canonical.strip_prefix(CANONICAL) {
            return self.get_joined(&self.prefix, rest);
        }
        self.get_joined("", canonical)
            .or_else(|| self.get_joined(&self.outer, canonical))
            .or_else(|| self.get_joined(&self.prefix, canonical))
    }

    /// [`Self::find`], or the refusal that names what is missing.
    pub fn require(&self, canonical: &str) -> Result<(&str, &Stored), Error> {
        self.find(canonical)
            .ok_or_else(|| Error::MissingTensor { dir: self.dir.clone(), tensor: canonical.to_owned() })
    }

    /// [`Self::stored`], or the refusal that names what is missing.
    pub fn require_stored(&self, name: &str) -> Result<(&str, &Stored), Error> {
        match self.tensors.get_key_value(name) {
            Some((name, stored)) => Ok((name, stored)),
            None => Err(Error::MissingTensor { dir: self.dir.clone(), tensor: name.to_owned() }),
        }
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// All tensors, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Stored)> {
        self.tensors.iter().map(|(name, stored)| (name.as_str(), stored))
    }

    /// Path of a stored tensor's file, for messages.
    pub fn path(&self, stored: &Stored) -> PathBuf {
        self.files[stored.file as usize].clone()
    }

    /// Refuses another shape than `rows × cols`.
    pub fn check_shape(&self, name: &str, stored: &Stored, rows: usize, cols: usize) -> Result<(), Error> {
        if stored.has_shape(rows, cols) {
            return Ok(());
        }
        let wanted = if rows == 1 { vec![cols as u64] } else { vec![rows as u64, cols as u64] };
        Err(Error::Shape {
            file: self.path(stored),
            tensor: name.to_owned(),
            wanted,
            got: stored.info.shape.to_vec(),
        })
    }

    /// Refuses another element type than `wanted`.
    pub fn check_dtype(&self, name: &str, stored: &Stored, wanted: Dtype) -> Result<(), Error> {
        if stored.info.dtype == wanted {
            return Ok(());
        }
        Err(Error::Dtype {
            file: self.path(stored),
            tensor: name.to_owned(),
            wanted: wanted.name(),
            got: stored.info.dtype,
        })
    }

    fn get_joined(&self, prefix: &str, rest: &str) -> Option<(&str, &Stored)> {
        let found = if prefix.is_empty() {
            self.tensors.get_key_value(rest)
        } else {
            self.tensors.get_key_value(&format!("{prefix}{rest}"))
        };
        found.map(|(name, stored)| (name.as_str(), stored))
    }
}

/// What precedes `layers.0.…` in the stored names.
///
/// A checkpoint may hold more than one stack of layers (a vision tower, a draft head):
/// `model.` wins, then the stack with the most tensors.
fn find_prefix(tensors: &HashMap<String, Stored>) -> String {
    for marker in [FIRST_NORM, EMBEDDING] {
        let mut candidates: Vec<&str> = tensors
            .keys()
            .filter_map(|name| name.strip_suffix(marker))
            .filter(|prefix| prefix.is_empty() || prefix.ends_with('.'))
            .collect();
        if candidates.contains(&CANONICAL) {
            return CANONICAL.to_owned();
        }
        candidates.sort_unstable();
        // The same number of tensors: the first in alphabetical order.
        let best = candidates.iter().rev().max_by_key(|prefix| {
            let layers = format!("{prefix}layers.");
            tensors.keys().filter(|name| name.starts_with(&layers)).count()
        });
        if let Some(best) = best {
            return (*best).to_owned();
        }
    }
    CANONICAL.to_owned()
}
