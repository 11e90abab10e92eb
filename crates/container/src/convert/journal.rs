//! `convert.json`: what a conversion has finished, so that another run goes on from there.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::Checkpoint;
use crate::slab::{Checksum, JOURNAL, MANIFEST, Manifest, Parameters, parse_manifest};
use crate::slab_writer::file::{PARTIAL, sync_dir, write_atomic};
use crate::slab_writer::{Finished, WriteError};

/// File whose lock keeps two processes from converting into one directory.
const LOCK: &str = ".convert.lock";

/// Which source a conversion reads: enough to tell another one apart without reading it all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SourceIdentity {
    /// Weight files by name, ascending, with their lengths.
    pub files: Vec<(String, u64)>,
    /// XXH3-64 of `config.json`.
    pub config: Checksum,
}

impl SourceIdentity {
    /// Names the files of a checkpoint.
    pub(super) fn of(source: &Checkpoint) -> Result<SourceIdentity, WriteError> {
        let mut files = Vec::new();
        for path in source.files() {
            let meta = fs::metadata(path).map_err(WriteError::io("read the size of", path))?;
            let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
            files.push((name, meta.len()));
        }
        files.sort();
        let config = source.dir().join("config.json");
        let config = fs::read(&config).map_err(WriteError::io("read", &config))?;
        Ok(SourceIdentity { files, config: Checksum(xxh3_64(&config)) })
    }

    /// A phrase for messages.
    pub(super) fn describe(&self) -> String {
        let bytes: u128 = self.files.iter().map(|f| u128::from(f.1)).sum();
        format!("{} files, {bytes} bytes, config.json {}", self.files.len(), self.config)
    }
}

/// Contents of `convert.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Journal {
    /// What was asked for.
    pub parameters: Parameters,
    /// What is read.
    pub source: SourceIdentity,
    /// Files that are whole.
    pub finished: Vec<Finished>,
}

impl Journal {
    /// Writes the journal by rename.
    pub(super) fn save(&self, dir: &Path) -> Result<(), WriteError> {
        write_atomic(dir, JOURNAL, serde_json::json!(self).to_string().as_bytes())
    }

    /// The finished file of this name and length, if it is still there.
    pub(super) fn finished(&self, dir: &Path, name: &str, bytes: u64) -> Option<&Finished> {
        let entry = self.finished.iter().find(|f| f.name == name && f.bytes == bytes)?;
        let there = fs::metadata(dir.join(name)).is_ok_and(|m| m.is_file() && m.len() == bytes);
        there.then_some(entry)
    }
}

/// What a destination holds.
pub(super) enum Destination {
    /// Nothing.
    Empty,
    /// A conversion under way.
    Begun(Journal),
    /// A finished container.
    Complete(Box<Manifest>),
}

/// Looks at a destination; anything of another origin is refused.
pub(super) fn examine(dir: &Path) -> Result<Destination, WriteError> {
    let foreign = || WriteError::Foreign { dir: dir.to_owned() };
    if let Some(text) = read(&dir.join(MANIFEST))? {
        let manifest = parse_manifest(&text).map_err(|_| foreign())?;
        return Ok(Destination::Complete(Box::new(manifest)));
    }
    if let Some(text) = read(&dir.join(JOURNAL))? {
        return serde_json::from_slice(&text).map(Destination::Begun).map_err(|_| foreign());
    }
    // A run that died before its journal was named leaves these two.
    let ours = [LOCK.to_owned(), format!("{JOURNAL}{PARTIAL}")];
    for entry in fs::read_dir(dir).map_err(WriteError::io("list", dir))? {
        let name = entry.map_err(WriteError::io("list", dir))?.file_name();
        if !ours.iter().any(|o| name == o.as_str()) {
            return Err(foreign());
        }
    }
    Ok(Destination::Empty)
}

/// Reads a file; none if it is absent.
fn read(path: &Path) -> Result<Option<Vec<u8>>, WriteError> {
    match fs::read(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(WriteError::io("read", path)(e)),
    }
}

/// Holds the lock of a destination while it lives.
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    /// Locks `dir`, or says that another process has it.
    pub(super) fn take(dir: &Path) -> Result<Lock, WriteError> {
        let path = dir.join(LOCK);
        let file = File::create(&path).map_err(WriteError::io("create", &path))?;
        match file.try_lock() {
            Ok(()) => Ok(Lock { _file: file }),
            Err(TryLockError::WouldBlock) => Err(WriteError::Busy { dir: dir.to_owned() }),
            Err(TryLockError::Error(e)) => Err(WriteError::io("lock", &path)(e)),
        }
    }
}

/// Removes the journal and the lock file of a complete container.
pub(super) fn clean_up(dir: &Path) -> Result<(), WriteError> {
    for name in [JOURNAL, LOCK] {
        let path = dir.join(name);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                return Err(WriteError::io("remove", &path)(e));
            }
            _ => {}
        }
    }
    sync_dir(dir)
}
