//! Replacing a file so that at any moment the old or the new one is there, whole.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Age at which a temporary file is taken to be left over from a killed process.
const STALE: Duration = Duration::from_secs(3600);

/// Writes `bytes` to a temporary file in the same directory and renames it to `path`. With `durable` file
/// and directory are on the drive before this returns; without it a loss of power may leave either file
/// or an empty one, a killed process still only the old or the new.
///
/// # Errors
/// What the operating system says; `path` is then as it was.
pub(super) fn replace(path: &Path, bytes: &[u8], durable: bool) -> io::Result<()> {
    replace_by(path, bytes, durable, |temporary| {
        OpenOptions::new().write(true).create_new(true).open(temporary)
    })
}

/// [`replace`] with the temporary file opened by `open`.
pub(super) fn replace_by(
    path: &Path,
    bytes: &[u8],
    durable: bool,
    open: impl FnOnce(&Path) -> io::Result<File>,
) -> io::Result<()> {
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    fs::create_dir_all(directory)?;
    let temporary = temporary(path, std::process::id());
    sweep(path, directory);
    // One process saves one profile at a time, so a file of this name is left from a process of the same
    // number that was killed.
    let _ = fs::remove_file(&temporary);
    let written = open(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        if durable { file.sync_all() } else { Ok(()) }
    });
    let renamed = written.and_then(|()| fs::rename(&temporary, path));
    if let Err(error) = renamed {
        // Nothing more can be done about what cannot even be removed.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    if durable { File::open(directory)?.sync_all() } else { Ok(()) }
}

fn temporary(path: &Path, process: u32) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(format!(".tmp-{process}"));
    name.into()
}

/// Removes temporary files of this profile that killed processes left, if they are old enough that nobody
/// can still be writing them.
fn sweep(path: &Path, directory: &Path) {
    let Some(name) = path.file_name() else { return };
    let prefix = format!("{}.tmp-", name.to_string_lossy());
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let number = entry.file_name().to_string_lossy().strip_prefix(&prefix).map(str::to_owned);
        let ours = number.is_some_and(|number| number.parse::<u32>().is_ok());
        let age = entry.metadata().and_then(|meta| meta.modified()).ok();
        let age = age.and_then(|modified| SystemTime::now().duration_since(modified).ok());
        if ours && age.is_some_and(|age| age > STALE) {
            let _ = fs::remove_file(entry.path());
        }
    }
}
