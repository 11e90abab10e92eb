//! The directory that is written into.

use std::fs;
use std::path::{Path, PathBuf};

use super::WriteError;

/// Directories made for an output; what is still empty when this is dropped is removed again, so
/// that a refusal leaves nothing behind.
pub(crate) struct NewDirs {
    /// Deepest first.
    made: Vec<PathBuf>,
}

impl NewDirs {
    /// Makes `dir` and its absent parents.
    pub(crate) fn make(dir: &Path) -> Result<NewDirs, WriteError> {
        let absent = |d: &&Path| !d.as_os_str().is_empty() && !d.exists();
        let made = dir.ancestors().take_while(absent).map(Path::to_owned).collect();
        let dirs = NewDirs { made };
        fs::create_dir_all(dir).map_err(WriteError::io("create", dir))?;
        Ok(dirs)
    }
}

impl Drop for NewDirs {
    fn drop(&mut self) {
        // A directory with something in it refuses to go, which is what is wanted.
        self.made.iter().take_while(|dir| fs::remove_dir(dir).is_ok()).for_each(drop);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_that_were_made_and_stayed_empty_are_removed() {
        let top = tempfile::tempdir().unwrap();
        drop(NewDirs::make(top.path()).unwrap());
        assert!(top.path().is_dir());
        drop(NewDirs::make(&top.path().join("a/b")).unwrap());
        assert!(!top.path().join("a").exists());
        let dirs = NewDirs::make(&top.path().join("a/b")).unwrap();
        fs::write(top.path().join("a/x"), "").unwrap();
        drop(dirs);
        assert!(top.path().join("a/x").exists() && !top.path().join("a/b").exists());
    }
}
