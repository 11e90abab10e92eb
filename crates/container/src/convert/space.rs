//! Free space of the drive that a directory is on.

use std::path::Path;

use crate::slab_writer::WriteError;

/// Bytes that this user may still write to the drive that holds `dir` (or its nearest existing
/// parent); none where the system cannot be asked.
pub fn free_bytes(dir: &Path) -> Result<Option<u64>, WriteError> {
    let Some(existing) = dir.ancestors().find(|d| d.exists()) else {
        // A relative path without an existing parent is below the current directory.
        return free(Path::new("."));
    };
    free(existing)
}

#[cfg(unix)]
fn free(dir: &Path) -> Result<Option<u64>, WriteError> {
    let stat = rustix::fs::statvfs(dir)
        .map_err(std::io::Error::from)
        .map_err(WriteError::io("ask the free space of", dir))?;
    Ok(Some(stat.f_bavail.saturating_mul(stat.f_frsize)))
}

#[cfg(not(unix))]
fn free(_: &Path) -> Result<Option<u64>, WriteError> {
    Ok(None)
}
