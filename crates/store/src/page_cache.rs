//! What of some files lies in the page cache, and putting it there or out of there.
//!
//! A measurement of reads means little unless this is known: the system's word for it is `mincore`.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::arena::PAGE;

/// Bytes of a file that are looked at through one mapping.
const WINDOW: u64 = 1 << 30;

/// Pages of files, and how many of them are in the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// Pages that the files have.
    pub pages: u64,
    /// Pages in the page cache.
    pub resident: u64,
}

impl Resident {
    /// Share of the pages that are in the page cache; 0 for files without a page.
    pub fn share(&self) -> f64 {
        if self.pages == 0 { 0.0 } else { self.resident as f64 / self.pages as f64 }
    }

    fn add(&mut self, other: Resident) {
        self.pages += other.pages;
        self.resident += other.resident;
    }
}

/// Counts the pages of regular files that are in the page cache.
///
/// Linux tells this of files that the caller owns or may write, and calls all pages of others resident.
///
/// # Errors
/// A file that cannot be opened or mapped.
pub fn resident<P: AsRef<Path>>(paths: &[P]) -> io::Result<Resident> {
    let mut sum = Resident::default();
    for path in paths {
        sum.add(resident_of(&File::open(path)?)?);
    }
    Ok(sum)
}

fn resident_of(file: &File) -> io::Result<Resident> {
    let len = file.metadata()?.len();
    let mut sum = Resident::default();
    let mut offset = 0;
    while offset < len {
        let window = WINDOW.min(len - offset);
        sum.add(resident_in(file, offset, window)?);
        offset += window;
    }
    Ok(sum)
}

/// One window; `offset` is a multiple of the page size.
fn resident_in(file: &File, offset: u64, len: u64) -> io::Result<Resident> {
    let bytes = usize::try_from(len).map_err(io::Error::other)?;
    // SAFETY: the bytes of the mapping are never looked at, so it does not matter who changes the file.
    let map = unsafe { memmap2::MmapOptions::new().offset(offset).len(bytes).map(file)? };
    let pages = len.div_ceil(PAGE);
    let mut states = vec![0u8; usize::try_from(pages).map_err(io::Error::other)?];
    // SAFETY: the range is the mapping's own, and there is one byte for each of its pages; a system
    // with larger pages writes fewer.
    let code = unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), bytes, states.as_mut_ptr().cast()) };
    if code != 0 {
        return Err(io::Error::last_os_error());
    }
    let resident = states.iter().filter(|state| *state & 1 == 1).count() as u64;
    Ok(Resident { pages, resident })
}

/// Asks the system to drop files from the page cache. It need not: ask [`resident`] afterwards.
///
/// # Errors
/// A file that cannot be opened, written back or advised.
#[cfg(target_os = "linux")]
pub fn evict<P: AsRef<Path>>(paths: &[P]) -> io::Result<()> {
    for path in paths {
        let file = File::open(path)?;
        // Pages that are not written yet cannot be dropped.
        file.sync_data()?;
        // SAFETY: a call on a descriptor that is open; it touches no memory of this process.
        let code = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        if code != 0 {
            return Err(io::Error::from_raw_os_error(code));
        }
    }
    Ok(())
}

/// Not on this system.
///
/// # Errors
/// Always.
#[cfg(not(target_os = "linux"))]
pub fn evict<P: AsRef<Path>>(_paths: &[P]) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "this system drops no single file from its page cache"))
}

/// Reads files once, so that they are in the page cache as far as memory has room.
///
/// # Errors
/// A file that cannot be read.
pub fn warm<P: AsRef<Path>>(paths: &[P]) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    for path in paths {
        let mut file = File::open(path)?;
        while file.read(&mut buffer)? > 0 {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_is_resident_and_what_was_dropped_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![1u8; 5 * PAGE as usize + 1]).unwrap();
        warm(&[&path]).unwrap();
        assert_eq!(resident(&[&path]).unwrap(), Resident { pages: 6, resident: 6 });
        if cfg!(target_os = "linux") {
            evict(&[&path]).unwrap();
            // A file system in memory keeps what it has; every other one has dropped all of it.
            assert!([0, 6].contains(&resident(&[&path]).unwrap().resident));
        }
    }

    #[test]
    fn files_without_bytes_have_no_pages() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(resident(&[file.path()]).unwrap().share(), 0.0);
        assert!(resident(&[Path::new("nowhere")]).is_err());
    }
}
