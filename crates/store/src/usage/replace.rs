//! Replacing a file so that at any moment the old or the new one is there, whole.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use metaltail_container::NotRegular;

/// Age at which a temporary file is taken to be left over from a killed process.
const STALE: Duration = Duration::from_secs(3600);

/// Links that are followed at most, as by the system.
const MOST_LINKS: usize = 40;
/// Files that are set aside under one name at most.
const MOST_ASIDE: usize = 1000;

/// Where a path leads: the file behind links, there or not yet, and what is known of it.
///
/// # Errors
/// [`NotRegular`] for what is there and no file: a rename would put a file in its place.
pub(super) fn target(path: &Path) -> io::Result<(PathBuf, Option<Metadata>)> {
    match fs::metadata(path) {
        Ok(meta) => match NotRegular::of(&meta) {
            Some(found) => Err(found.into()),
            None => Ok((fs::canonicalize(path)?, Some(meta))),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok((end_of_links(path)?, None)),
        Err(error) => Err(error),
    }
}

/// The path that links which lead to nothing would lead to.
fn end_of_links(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        match fs::read_link(&path) {
            Ok(to) => path = directory(&path).join(to),
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::other("its links lead round and round"))
}

/// The directory of a file.
pub(super) fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Renames a file to `<file>.old`, or `<file>.old.2` and so on where that is taken.
///
/// # Errors
/// What the operating system says; the file is then where it was.
pub(super) fn set_aside(path: &Path) -> io::Result<()> {
    let (path, _) = target(path)?;
    for number in 1..=MOST_ASIDE {
        let mut old = OsString::from(&path);
        old.push(if number == 1 { ".old".to_owned() } else { format!(".old.{number}") });
        // The name is taken first, so that nobody's file is renamed over.
        match OpenOptions::new().write(true).create_new(true).open(&old) {
            Ok(_) => {
                return fs::rename(&path, &old).inspect_err(|_| {
                    // An empty file is all that stays where even this fails.
                    let _ = fs::remove_file(&old);
                });
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other(format!("{MOST_ASIDE} files are set aside beside it already: remove some")))
}

/// Writes `bytes` to a temporary file in the same directory and renames it to `path`; behind a link it is
/// the file that the link leads to. Mode and, where that is allowed, owner stay as they were. With `durable` file
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
    let (path, there) = &target(path)?;
    let directory = directory(path);
    fs::create_dir_all(directory)?;
    let temporary = temporary(path, std::process::id());
    sweep(path, directory);
    // One process saves one profile at a time, so a file of this name is left from a process of the same
    // number that was killed.
    let _ = fs::remove_file(&temporary);
    let written = open(&temporary).and_then(|mut file| {
        if let Some(meta) = there {
            // Only root may give a file away; the mode is what must not change.
            let _ = fchown(&file, Some(meta.uid()), Some(meta.gid()));
            file.set_permissions(meta.permissions())?;
        }
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
