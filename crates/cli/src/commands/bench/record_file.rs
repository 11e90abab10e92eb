//! Where a record goes.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::unwritten;
use crate::exit::Failure;

/// Where records go when nothing else is said.
const RECORDS: &str = "bench-records";

/// Writes a record where it was asked for, else to a new file of [`RECORDS`]. Returns where it went.
///
/// # Errors
/// A file that cannot be written.
pub fn write(text: &str, record: Option<&Path>, kind: &str, json: bool) -> Result<Option<PathBuf>, Failure> {
    match record {
        Some(path) if path.as_os_str() == "off" => Ok(None),
        Some(path) => {
            if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
                fs::create_dir_all(dir).map_err(|error| unwritten(dir, &error))?;
            }
            fs::write(path, text).map_err(|error| unwritten(path, &error))?;
            Ok(Some(path.to_owned()))
        }
        None if json => Ok(None),
        None => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let path = Path::new(RECORDS).join(format!("{kind}-{}.json", now.as_secs()));
            let written = fs::create_dir_all(RECORDS).and_then(|()| write_new(&path, text));
            written.map(Some).map_err(|error| unwritten(&path, &error))
        }
    }
}

/// Writes a file that was not there: `path`, or where that is taken the first of `path-2`, `path-3`, … (before
/// the extension) that is not.
fn write_new(path: &Path, text: &str) -> io::Result<PathBuf> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let extension = path.extension().unwrap_or_default().to_string_lossy().into_owned();
    let later = (2..).map(|n: u64| path.with_file_name(format!("{stem}-{n}.{extension}")));
    for path in std::iter::once(path.to_owned()).chain(later) {
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            opened => {
                opened?.write_all(text.as_bytes())?;
                return Ok(path);
            }
        }
    }
    Err(io::Error::from(io::ErrorKind::AlreadyExists))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_takes_no_others_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ab-17.json");
        let names: Vec<_> = ["one", "two", "three"].map(|text| write_new(&path, text).unwrap()).into();
        let wanted = ["ab-17.json", "ab-17-2.json", "ab-17-3.json"].map(|name| dir.path().join(name));
        assert_eq!(names, wanted);
        let read = wanted.map(|path| fs::read_to_string(path).unwrap());
        assert_eq!(read, ["one", "two", "three"]);
        assert!(write_new(&dir.path().join("absent/a.json"), "").is_err());
    }
}
