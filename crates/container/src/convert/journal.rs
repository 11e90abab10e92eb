//! `convert.json`: what a conversion has finished, so that another run goes on from there.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::regular::{create_regular, open_regular, read_regular};
use crate::slab::{Checksum, JOURNAL, MANIFEST, Manifest, Parameters, parse_manifest};
use crate::slab_writer::file::{PARTIAL, sync_dir, write_atomic};
use crate::slab_writer::{Finished, SlabFile, WriteError};
use crate::{Checkpoint, JSON_CAP};

/// File whose lock keeps two processes from converting into one directory.
const LOCK: &str = ".convert.lock";
/// Bytes hashed at a time.
const CHUNK: usize = 4 << 20;

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
        let config = source.companion("config.json")?.unwrap_or_default();
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

    /// The entry of a planned file, if that file is still there with its length.
    pub(super) fn finished(&self, dir: &Path, file: &SlabFile) -> Option<&Finished> {
        let entry = self.finished.iter().find(|entry| file.is_described_by(entry))?;
        let there = fs::metadata(dir.join(&entry.name)).is_ok_and(|m| m.is_file() && m.len() == entry.bytes);
        there.then_some(entry)
    }
}

/// Whether a file has the checksum of its entry; `progress` hears of the bytes read so far.
pub(super) fn is_unharmed(
    dir: &Path,
    entry: &Finished,
    progress: &mut dyn FnMut(u64) -> Result<(), WriteError>,
) -> Result<bool, WriteError> {
    let path = dir.join(&entry.name);
    let mut file = open_regular(&path).map_err(WriteError::io("open", &path))?;
    let (mut hash, mut buffer, mut done) = (Xxh3::new(), vec![0; CHUNK], 0);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(Checksum(hash.digest()) == entry.xxh3),
            Ok(got) => {
                hash.update(&buffer[..got]);
                done += got as u64;
                progress(done)?;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(WriteError::io("read", &path)(e)),
        }
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
    match read_regular(path, JSON_CAP) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(WriteError::io("read", path)(e)),
    }
}

/// Holds the lock of a destination while it lives; its file goes with it.
pub(super) struct Lock {
    path: PathBuf,
    _file: File,
}

impl Lock {
    /// Locks `dir`, or says that another process has it.
    pub(super) fn take(dir: &Path) -> Result<Lock, WriteError> {
        let path = dir.join(LOCK);
        let file = create_regular(&path).map_err(WriteError::io("create", &path))?;
        match file.try_lock() {
            // Opened before its last holder removed it: the lock that counts is another file's.
            Ok(()) if !is_at(&file, &path) => Err(WriteError::Busy { dir: dir.to_owned() }),
            Ok(()) => Ok(Lock { path, _file: file }),
            Err(TryLockError::WouldBlock) => Err(WriteError::Busy { dir: dir.to_owned() }),
            Err(TryLockError::Error(e)) => Err(WriteError::io("lock", &path)(e)),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Removed while it is held, so that no other holder's file is meant. One that stays does no harm.
        let _ = fs::remove_file(&self.path);
    }
}

/// Whether an open file is the one of this path.
fn is_at(file: &File, path: &Path) -> bool {
    let id = |meta: fs::Metadata| (meta.dev(), meta.ino());
    let (Ok(open), Ok(named)) = (file.metadata(), fs::metadata(path)) else {
        return false;
    };
    id(open) == id(named)
}

/// Removes the journal of a complete container.
pub(super) fn clean_up(dir: &Path) -> Result<(), WriteError> {
    let path = dir.join(JOURNAL);
    match fs::remove_file(&path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(WriteError::io("remove", &path)(e)),
        _ => sync_dir(dir),
    }
}
