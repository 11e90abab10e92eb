//! A report of what a directory holds, and verification of its checksums.

use std::path::PathBuf;

use serde::Serialize;
use xxhash_rust::xxh3::Xxh3;

use crate::census::Census;
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::Error;
use crate::inventory::Inventory;
use crate::place::ExpertPlace;
use crate::slab::{Checksum, Parameters};

/// Bytes hashed at a time.
const CHUNK: usize = 8 << 20;

/// What a directory holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The directory.
    pub dir: PathBuf,
    /// What it is.
    pub kind: Kind,
    /// `model_type` of its configuration.
    pub model_type: Option<String>,
    /// What stands in place of `model.` in its tensor names.
    pub prefix: String,
    /// Its safetensors files.
    pub files: Vec<FileReport>,
    /// What a slab container was converted with.
    pub parameters: Option<Parameters>,
    /// Formats, bytes and experts; `layers` has bytes an expert and whether they are checksummed.
    #[serde(flatten)]
    pub census: Census,
    /// What was decided for lack of a stamp.
    pub notices: Vec<String>,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileReport {
    /// Name in the directory.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
}

/// How far a verification has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes read so far.
    pub bytes: u64,
    /// Bytes to read in all.
    pub total: u64,
}

/// What a verification found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verification {
    /// Bytes read.
    pub bytes: u64,
    /// Experts read.
    pub experts: u64,
    /// Experts that were held against a checksum; the others were only read.
    pub checksummed: u64,
    /// Files that were held against a checksum.
    pub files: u64,
    /// What is damaged, in the order of reading.
    pub damage: Vec<Damage>,
}

/// A run or a file that is damaged or cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Layer, for an expert.
    pub layer: Option<u32>,
    /// Expert number, for an expert.
    pub expert: Option<u32>,
    /// The file.
    pub file: PathBuf,
    /// Offset of the first byte that was hashed.
    pub offset: u64,
    /// Bytes that were hashed.
    pub bytes: u64,
    /// What is wrong, in words.
    pub reason: String,
}

/// Reports what a directory holds of a model.
///
/// # Errors
/// As [`Checkpoint::check`].
pub fn inspect(checkpoint: &Checkpoint, inventory: &Inventory) -> Result<Report, Error> {
    let census = checkpoint.check(inventory)?;
    let files = (0u32..).zip(checkpoint.files()).map(|(file, path)| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(FileReport { name: name.unwrap_or_default(), bytes: checkpoint.file_len(file)? })
    });
    Ok(Report {
        dir: checkpoint.dir().to_owned(),
        kind: checkpoint.kind(),
        model_type: checkpoint.model_type().map(str::to_owned),
        prefix: checkpoint.prefix().to_owned(),
        files: files.collect::<Result<_, Error>>()?,
        parameters: checkpoint.manifest().map(|manifest| manifest.parameters.clone()),
        census,
        notices: checkpoint.notices(),
    })
}

/// Reads every expert, and every other file of a slab container, and checks what has a checksum.
///
/// Damage and failed reads are collected, not errors.
///
/// # Errors
/// As [`Checkpoint::check`], before anything is read.
pub fn verify(
    checkpoint: &Checkpoint,
    inventory: &Inventory,
    progress: &mut dyn FnMut(Progress),
) -> Result<Verification, Error> {
    let census = checkpoint.check(inventory)?;
    let files = plain_files(checkpoint)?;
    let total = census.layers.iter().map(|layer| layer.bytes).sum::<u64>()
        + files.iter().map(|file| file.len).sum::<u64>();
    let mut reader =
        Reader { checkpoint, buffer: vec![0; CHUNK], found: Verification::default(), total, progress };
    let used = |layer: u32| census.layers.iter().any(|counted| counted.layer == layer);
    for layer in inventory.experts.iter().filter(|layer| used(layer.layer)) {
        for expert in 0..layer.count {
            reader.expert(layer.layer, expert, &checkpoint.expert(layer, expert)?);
        }
    }
    for file in files {
        reader.file(&file);
    }
    Ok(reader.found)
}

/// A file whose whole content has a checksum.
struct PlainFile {
    file: u32,
    len: u64,
    wanted: Checksum,
}

/// Files of the manifest that hold no experts (those have a checksum each).
fn plain_files(checkpoint: &Checkpoint) -> Result<Vec<PlainFile>, Error> {
    let Some(manifest) = checkpoint.manifest() else {
        return Ok(Vec::new());
    };
    let holds_experts = |name: &str| manifest.experts.iter().any(|experts| experts.file == name);
    let mut files = Vec::new();
    for listed in manifest.files.iter().filter(|listed| !holds_experts(&listed.name)) {
        let named = |path: &PathBuf| path.file_name().is_some_and(|name| name == listed.name.as_str());
        if let Some((file, _)) = (0u32..).zip(checkpoint.files()).find(|(_, path)| named(path)) {
            files.push(PlainFile { file, len: checkpoint.file_len(file)?, wanted: listed.xxh3 });
        }
    }
    Ok(files)
}

struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    buffer: Vec<u8>,
    found: Verification,
    total: u64,
    progress: &'a mut dyn FnMut(Progress),
}

impl Reader<'_> {
    fn expert(&mut self, layer: u32, expert: u32, place: &ExpertPlace) {
        let mut hash = Xxh3::new();
        self.found.experts += 1;
        let read = place.runs.iter().try_for_each(|run| self.hash(run.file, run.offset, run.len, &mut hash));
        let reason = match (read, place.checksum) {
            (Err(error), _) => Some(describe(&error)),
            (Ok(()), Some(wanted)) => {
                self.found.checksummed += 1;
                mismatch(Checksum(wanted), Checksum(hash.digest()))
            }
            (Ok(()), None) => None,
        };
        if let (Some(reason), Some(first)) = (reason, place.runs.first()) {
            self.found.damage.push(Damage {
                layer: Some(layer),
                expert: Some(expert),
                file: self.checkpoint.files()[first.file as usize].clone(),
                offset: first.offset,
                bytes: place.runs.iter().map(|run| run.len).sum(),
                reason,
            });
        }
    }

    fn file(&mut self, file: &PlainFile) {
        let mut hash = Xxh3::new();
        let reason = match self.hash(file.file, 0, file.len, &mut hash) {
            Err(error) => Some(describe(&error)),
            Ok(()) => {
                self.found.files += 1;
                mismatch(file.wanted, Checksum(hash.digest()))
            }
        };
        if let Some(reason) = reason {
            self.found.damage.push(Damage {
                layer: None,
                expert: None,
                file: self.checkpoint.files()[file.file as usize].clone(),
                offset: 0,
                bytes: file.len,
                reason,
            });
        }
    }

    fn hash(&mut self, file: u32, offset: u64, len: u64, hash: &mut Xxh3) -> Result<(), Error> {
        let mut done = 0;
        while done < len {
            let step = (len - done).min(CHUNK as u64);
            let chunk = &mut self.buffer[..step as usize];
            self.checkpoint.read_at(file, offset + done, chunk)?;
            hash.update(chunk);
            done += step;
            self.found.bytes += step;
            (self.progress)(Progress { bytes: self.found.bytes, total: self.total });
        }
        Ok(())
    }
}

fn mismatch(wanted: Checksum, got: Checksum) -> Option<String> {
    (wanted != got).then(|| format!("the bytes have the checksum {got}, wanted {wanted}"))
}

/// An error and its causes in one line.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
