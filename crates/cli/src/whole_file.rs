//! An output file that appears whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// A file under way to its name. What was there stays until [`WholeFile::keep`]; dropped before that, nothing
/// is left behind.
#[derive(Debug)]
pub struct WholeFile {
    /// Where it is written, and its name in the end; none for a pipe or a device, which is written as it is.
    moves: Option<(PathBuf, PathBuf)>,
}

impl WholeFile {
    /// Begins a file at `out`; its directory must be there.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn create(out: &Path) -> io::Result<(WholeFile, File)> {
        // Behind a link the file that it names is replaced, not the link.
        let out = match fs::metadata(out) {
            Ok(there) if !there.is_file() => {
                return Ok((WholeFile { moves: None }, OpenOptions::new().write(true).open(out)?));
            }
            Ok(_) => out.canonicalize()?,
            Err(_) => out.to_owned(),
        };
        let mut temporary = OsString::from(&out);
        temporary.push(format!(".tmp-{}", std::process::id()));
        let temporary = PathBuf::from(temporary);
        let file = File::create(&temporary)?;
        Ok((WholeFile { moves: Some((temporary, out)) }, file))
    }

    /// Puts what was written in the place of what was there.
    ///
    /// # Errors
    /// What the operating system says; what was there is unchanged.
    pub fn keep(mut self) -> io::Result<()> {
        let Some((temporary, out)) = &self.moves else { return Ok(()) };
        fs::rename(temporary, out)?;
        self.moves = None;
        Ok(())
    }
}

impl Drop for WholeFile {
    fn drop(&mut self) {
        if let Some((temporary, _)) = &self.moves {
            // Nothing more can be done about what cannot even be removed.
            let _ = fs::remove_file(temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn names(dir: &Path) -> usize {
        fs::read_dir(dir).unwrap().count()
    }

    #[test]
    fn what_was_there_stays_until_all_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        fs::write(&out, "old").unwrap();
        let (whole, mut file) = WholeFile::create(&out).unwrap();
        file.write_all(b"new").unwrap();
        assert_eq!(fs::read(&out).unwrap(), b"old");
        drop(whole);
        assert_eq!((fs::read(&out).unwrap(), names(dir.path())), (b"old".to_vec(), 1));
        let (whole, mut file) = WholeFile::create(&out).unwrap();
        file.write_all(b"new").unwrap();
        whole.keep().unwrap();
        assert_eq!((fs::read(&out).unwrap(), names(dir.path())), (b"new".to_vec(), 1));
    }

    #[test]
    fn links_and_devices_stay_what_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let (out, link) = (dir.path().join("out"), dir.path().join("link"));
        fs::write(&out, "old").unwrap();
        std::os::unix::fs::symlink(&out, &link).unwrap();
        let (whole, mut file) = WholeFile::create(&link).unwrap();
        file.write_all(b"new").unwrap();
        whole.keep().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&out).unwrap(), b"new");
        let (whole, _) = WholeFile::create(Path::new("/dev/null")).unwrap();
        whole.keep().unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        assert!(WholeFile::create(&dir.path().join("absent/out")).is_err());
        assert!(WholeFile::create(dir.path()).is_err(), "a directory is no file");
    }
}
