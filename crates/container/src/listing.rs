//! What lies in a model directory, and which of its files belong to the model.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::convert::COPIED;
use crate::error::{Error, MissingShards};
use crate::gguf;
use crate::hf::{self, ShardIndex};
use crate::regular::{NotRegular, open_regular};
use crate::slab::{self, Manifest, ManifestError};

/// Longest JSON file (config, index, manifest) that is accepted, in bytes.
pub const JSON_CAP: u64 = 256 << 20;
/// Most safetensors files of a directory; each is kept open.
pub(crate) const FILES_CAP: usize = 512;

/// Names in a directory.
pub(crate) struct Listing {
    /// All of them that are UTF-8 and not hidden.
    pub names: BTreeSet<String>,
    /// Directories of names that the first does not have.
    elsewhere: BTreeMap<String, PathBuf>,
}

impl Listing {
    /// Lists a directory; refuses a path that is none.
    pub fn of(dir: &Path) -> Result<Listing, Error> {
        let io = |action| move |source| Error::io(action, dir, source);
        let meta = match fs::metadata(dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(Error::NotFound { path: dir.to_owned() });
            }
            other => other.map_err(io("look at"))?,
        };
        if !meta.is_dir() {
            return Err(Error::NotDirectory { path: dir.to_owned() });
        }
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(dir).map_err(io("list"))? {
            let name = entry.map_err(io("list"))?.file_name();
            // What is not UTF-8 is none of the names that are looked for.
            if let Ok(name) = name.into_string()
                && !name.starts_with('.')
            {
                names.insert(name);
            }
        }
        Ok(Listing { names, elsewhere: BTreeMap::new() })
    }

    /// Adds the weight files of a further directory that are not listed yet.
    pub fn add(&mut self, dir: &Path) -> Result<(), Error> {
        for name in Listing::of(dir)?.names.into_iter().filter(|name| is_weights(name)) {
            if self.names.insert(name.clone()) {
                self.elsewhere.insert(name, dir.to_owned());
            }
        }
        Ok(())
    }

    /// Path of a listed file; `dir` is the first directory.
    pub fn path(&self, dir: &Path, name: &str) -> PathBuf {
        self.elsewhere.get(name).map_or(dir, PathBuf::as_path).join(name)
    }

    /// Refuses a file that goes with the weights and is a link that leads nowhere: taken for absent,
    /// it would change what the model does.
    pub fn refuse_dangling(&self, dir: &Path) -> Result<(), Error> {
        for name in COPIED.iter().filter(|name| self.names.contains(**name)) {
            let path = dir.join(name);
            if let Err(e) = fs::metadata(&path)
                && e.kind() == io::ErrorKind::NotFound
                && let Ok(target) = fs::read_link(&path)
            {
                return Err(Error::DanglingLink { path, target });
            }
        }
        Ok(())
    }

    /// The manifest of a slab container, or `None` where there is none of that format.
    pub fn manifest(&self, dir: &Path) -> Result<Option<Manifest>, Error> {
        if !self.names.contains(slab::MANIFEST) {
            return Ok(None);
        }
        let path = dir.join(slab::MANIFEST);
        match slab::parse_manifest(&read_capped(&path)?) {
            Ok(manifest) => Ok(Some(manifest)),
            Err(ManifestError::Format { .. }) => Ok(None),
            Err(source) => Err(Error::Manifest { path, source }),
        }
    }

    /// Whether a conversion into this directory has begun.
    pub fn is_journaled(&self) -> bool {
        self.names.contains(slab::JOURNAL)
    }

    /// The GGUF model of a directory that holds nothing else: a file, or the first of a set.
    ///
    /// # Errors
    /// Several of them.
    pub fn only_gguf(&self, dir: &Path) -> Result<Option<PathBuf>, Error> {
        // Some publish the configuration of the original beside.
        let other = |name: &String| is_weights(name);
        if self.is_journaled() || self.names.contains(slab::MANIFEST) || self.names.iter().any(other) {
            return Ok(None);
        }
        let mut models = gguf::models_among(self.names.iter().map(String::as_str));
        match models.len() {
            0 | 1 => Ok(models.pop().map(|name| dir.join(name))),
            _ => Err(Error::SeveralGguf { dir: dir.to_owned(), names: models }),
        }
    }

    /// The safetensors files that belong to the model, and the index that says so.
    pub fn choose(
        &self,
        dir: &Path,
        manifest: Option<&Manifest>,
    ) -> Result<(Vec<String>, Option<ShardIndex>), Error> {
        let found: BTreeSet<String> = self.names.iter().filter(|name| is_weights(name)).cloned().collect();
        if let Some(manifest) = manifest {
            self.check_manifest_files(dir, manifest)?;
            let listed = manifest.names().into_iter().map(str::to_owned);
            return Ok((self.cap(dir, listed.filter(|n| is_weights(n)).collect())?, None));
        }
        if self.names.contains(hf::INDEX) {
            let path = dir.join(hf::INDEX);
            let index = ShardIndex::parse(&path, &read_capped(&path)?)?;
            let shards: Vec<String> = index.shards().into_iter().map(str::to_owned).collect();
            // An index copied along with a converted model names none of its files.
            if found.is_empty() || shards.iter().any(|shard| found.contains(shard)) {
                index.check_present(dir, &self.names)?;
                return Ok((self.cap(dir, shards)?, Some(index)));
            }
        }
        hf::check_numbering(dir, &found)?;
        if found.is_empty() {
            return Err(Error::NoTensors { dir: dir.to_owned() });
        }
        Ok((self.cap(dir, found.into_iter().collect())?, None))
    }

    /// Refuses a container without a file of the manifest, or with one of another length.
    fn check_manifest_files(&self, dir: &Path, manifest: &Manifest) -> Result<(), Error> {
        let listed = manifest.names();
        let absent = |name: &&&str| !self.names.contains(**name);
        let names: Vec<String> = listed.iter().filter(absent).map(|n| (*n).to_owned()).collect();
        if !names.is_empty() {
            let layers = || manifest.experts.iter().filter(|e| names.contains(&e.file)).map(|e| e.layer);
            return Err(Error::MissingShards(Box::new(MissingShards {
                dir: dir.to_owned(),
                known_from: slab::MANIFEST.to_owned(),
                present: listed.len() - names.len(),
                expected: listed.len(),
                layers: layers().min().zip(layers().max()),
                names,
                tensors: None,
                hint: "Copy them again, or remove manifest.json and run the same convert again.",
            })));
        }
        for file in &manifest.files {
            let path = self.path(dir, &file.name);
            let meta = fs::metadata(&path);
            let meta = meta.map_err(|source| Error::Io { action: "look at", path: path.clone(), source })?;
            if meta.len() != file.bytes {
                return Err(Error::FileLength { path, wanted: file.bytes, got: meta.len() });
            }
        }
        Ok(())
    }

    /// Refuses no file at all, and too many.
    fn cap(&self, dir: &Path, names: Vec<String>) -> Result<Vec<String>, Error> {
        match names.len() {
            0 => Err(Error::NoTensors { dir: dir.to_owned() }),
            got if got > FILES_CAP => Err(Error::TooManyFiles { dir: dir.to_owned(), cap: FILES_CAP, got }),
            _ => Ok(names),
        }
    }
}

fn is_weights(name: &str) -> bool {
    name.ends_with(".safetensors")
}

pub(crate) fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case(extension))
}

/// Opens a regular file of the model and tells its length.
pub(crate) fn open_plain(path: &Path) -> Result<(File, u64), Error> {
    let io = |source| match NotRegular::in_error(&source) {
        Some(NotRegular(found)) => Error::NotRegular { path: path.to_owned(), found },
        None => Error::io("open", path, source),
    };
    let file = open_regular(path).map_err(io)?;
    let len = file.metadata().map_err(io)?.len();
    Ok((file, len))
}

/// Reads a whole file of at most [`JSON_CAP`] bytes.
pub(crate) fn read_capped(path: &Path) -> Result<Vec<u8>, Error> {
    let io = |source| Error::io("read", path, source);
    let (file, len) = open_plain(path)?;
    let too_large = |got| Error::JsonTooLarge { path: path.to_owned(), cap: JSON_CAP, got };
    if len > JSON_CAP {
        return Err(too_large(len));
    }
    let mut text = Vec::new();
    // One byte more than the cap, for a file that grows meanwhile.
    file.take(JSON_CAP + 1).read_to_end(&mut text).map_err(io)?;
    if text.len() as u64 > JSON_CAP {
        return Err(too_large(text.len() as u64));
    }
    Ok(text)
}

/// Reads a JSON file whose value must be an object.
pub(crate) fn read_object(path: &Path) -> Result<Value, Error> {
    let value = serde_json::from_slice(&read_capped(path)?)
        .map_err(|source| Error::Json { path: path.to_owned(), source })?;
    let got = match &value {
        Value::Object(_) => return Ok(value),
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
    };
    Err(Error::NotObject { path: path.to_owned(), got })
}
