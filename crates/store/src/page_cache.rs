//! What of some files lies in the page cache, and putting it there or out of there.
//!
//! A measurement of reads means little unless this is known.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use metaltail_container::Extent;

use crate::probe::evict::resident as resident_in;

/// Bytes of a file that are looked at through one mapping.
const WINDOW: u64 = 1 << 30;

/// Share of the bytes of files that are in the page cache; 0 for files without bytes.
///
/// Linux tells this of files that the caller owns or may write, and calls all pages of others resident.
///
/// # Errors
/// A file that cannot be opened, or a system that does not tell.
pub fn resident_share<P: AsRef<Path>>(paths: &[P]) -> io::Result<f64> {
    let (mut bytes, mut resident) = (0, 0);
    for path in paths {
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        for offset in (0..len).step_by(WINDOW as usize) {
            let window = Extent { file: 0, offset, len: WINDOW.min(len - offset) };
            let untold =
                || io::Error::new(io::ErrorKind::Unsupported, "the system does not tell what is cached");
            resident += resident_in(&file, window).ok_or_else(untold)?.min(window.len);
        }
        bytes += len;
    }
    Ok(if bytes == 0 { 0.0 } else { resident as f64 / bytes as f64 })
}

/// Asks the system to drop files from the page cache. It need not: ask [`resident_share`] afterwards.
///
/// # Errors
/// A file that cannot be opened, written back or advised.
#[cfg(target_os = "linux")]
pub fn evict<P: AsRef<Path>>(paths: &[P]) -> io::Result<()> {
    for path in paths {
        let file = File::open(path)?;
        // Pages that are not written yet cannot be dropped.
        file.sync_data()?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
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
        std::fs::write(&path, vec![1u8; 20_481]).unwrap();
        warm(&[&path]).unwrap();
        assert_eq!(resident_share(&[&path]).unwrap(), 1.0);
        if cfg!(target_os = "linux") {
            evict(&[&path]).unwrap();
            // A file system in memory keeps what it has; every other one has dropped all of it.
            assert!([0.0, 1.0].contains(&resident_share(&[&path]).unwrap()));
        }
    }

    #[test]
    fn files_without_bytes_have_no_share() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(resident_share(&[file.path()]).unwrap(), 0.0);
        assert!(resident_share(&[Path::new("nowhere")]).is_err());
    }
}
