//! Opening what a user or a model names as a file: it must be one, and it must end.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

/// What a path leads to that is no regular file. It is the inner error of the [`io::Error`]s here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is {0}, not a regular file")]
pub struct NotRegular(pub &'static str);

impl NotRegular {
    /// What the metadata of a path, links followed, say against reading it as a file.
    pub fn of(meta: &Metadata) -> Option<NotRegular> {
        match meta.is_file() {
            true => None,
            false if meta.is_dir() => Some(NotRegular("a directory")),
            false => Some(NotRegular("a pipe, socket or device")),
        }
    }

    /// The one inside an error of [`open_regular`].
    pub fn in_error(error: &io::Error) -> Option<NotRegular> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl From<NotRegular> for io::Error {
    fn from(found: NotRegular) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidInput, found)
    }
}

/// Opens a regular file for reading; links are followed. Whatever else is there is refused without
/// being opened: a pipe would wait for a writer, and opening a device may do something.
///
/// # Errors
/// [`NotRegular`], or what the operating system says.
pub fn open_regular(path: &Path) -> io::Result<File> {
    refuse(&std::fs::metadata(path)?)?;
    // It may be another one by now: a pipe is not waited for, and what was opened is looked at again.
    let file = options().read(true).open(path)?;
    refuse(&file.metadata()?)?;
    Ok(file)
}

fn refuse(meta: &Metadata) -> io::Result<()> {
    NotRegular::of(meta).map_or(Ok(()), |found| Err(found.into()))
}

/// Creates a file for writing, or empties the one that is there, which must be a regular one.
pub(crate) fn create_regular(path: &Path) -> io::Result<File> {
    match std::fs::metadata(path) {
        Ok(meta) => refuse(&meta)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    options().write(true).create(true).truncate(true).open(path)
}

#[cfg(unix)]
fn options() -> OpenOptions {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = OpenOptions::new();
    // The flag is one bit of an int; regular files know no difference.
    options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
    options
}

#[cfg(not(unix))]
fn options() -> OpenOptions {
    OpenOptions::new()
}

/// Reads to the end, which must come after at most `cap` bytes.
///
/// # Errors
/// A failed read, or more bytes.
pub fn read_capped(source: impl Read, cap: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(cap.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > cap {
        true => Err(too_long(cap)),
        false => Ok(bytes),
    }
}

/// Reads a whole regular file of at most `cap` bytes. A longer one is refused unread.
///
/// # Errors
/// As [`open_regular`] and [`read_capped`].
pub fn read_regular(path: &Path, cap: u64) -> io::Result<Vec<u8>> {
    let file = open_regular(path)?;
    match file.metadata()?.len() > cap {
        true => Err(too_long(cap)),
        false => read_capped(file, cap),
    }
}

fn too_long(cap: u64) -> io::Error {
    io::Error::other(format!("it is longer than {cap} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_end_is_refused_at_its_cap() {
        assert_eq!(read_capped(&b"abc"[..], 3).unwrap(), b"abc");
        assert!(read_capped(&b"abcd"[..], 3).is_err());
        assert!(read_capped(io::repeat(0), 1 << 20).is_err());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sparse");
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(read_regular(&path, 1 << 39).unwrap_err().to_string().contains("longer than"));
        std::fs::write(&path, "abc").unwrap();
        assert_eq!(read_regular(&path, 3).unwrap(), b"abc");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_no_file_is_said_to_be_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let found = |path: &Path| {
            let path = path.to_owned();
            // What is refused is not waited for.
            let (sender, receiver) = std::sync::mpsc::channel();
            std::thread::spawn(move || sender.send(open_regular(&path)));
            let error =
                receiver.recv_timeout(std::time::Duration::from_secs(20)).expect("it waits").unwrap_err();
            NotRegular::in_error(&error).unwrap_or_else(|| panic!("{error}")).0
        };
        let fifo = dir.path().join("fifo");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, mode).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&fifo, &link).unwrap();
        for path in [&fifo, &link, Path::new("/dev/zero")] {
            assert_eq!(found(path), "a pipe, socket or device", "{}", path.display());
        }
        assert_eq!(found(dir.path()), "a directory");
        let absent = open_regular(&dir.path().join("absent")).unwrap_err();
        assert_eq!(absent.kind(), io::ErrorKind::NotFound);
    }
}
