//! Copies of a model's files in further directories: found by name, and held against the first by length and
//! by blocks all over the file.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::hf;
use crate::listing::{open_plain, read_capped};
use crate::slab;

/// Blocks of a file that are compared, the first and the last among them, and their length in bytes. What
/// lies between is held by the checksums of a slab container when it is first read.
const BLOCKS: u64 = 12;
const BLOCK: u64 = 16 << 10;

/// Files that say what the weights mean; those of all directories must be equal.
const SAME: [&str; 3] = ["config.json", slab::MANIFEST, hf::INDEX];

/// A file of the model as it was opened first.
pub(crate) struct Original<'a> {
    pub path: &'a Path,
    pub handle: &'a File,
    pub len: u64,
}

/// Paths of the originals in `dir`; gaps where it has none of that name.
///
/// # Errors
/// A file that is no copy, other settings of the model, and a directory without any of the files.
pub(crate) fn find(first: &Path, dir: &Path, originals: &[Original]) -> Result<Vec<Option<PathBuf>>, Error> {
    for name in SAME {
        let (a, b) = (first.join(name), dir.join(name));
        if a.exists() && b.exists() && read_capped(&a)? != read_capped(&b)? {
            return Err(differ(&b, &a, "the texts differ".into()));
        }
    }
    let mut found = Vec::with_capacity(originals.len());
    for original in originals {
        let Some(name) = original.path.file_name() else {
            found.push(None);
            continue;
        };
        let path = dir.join(name);
        if path.as_path() != original.path {
            if !path.exists() {
                found.push(None);
                continue;
            }
            compare(&path, original)?;
        }
        found.push(Some(path));
    }
    if found.iter().all(Option::is_none) {
        return Err(Error::NothingShared { dir: dir.to_owned(), first: first.to_owned() });
    }
    Ok(found)
}

fn differ(path: &Path, first: &Path, what: String) -> Error {
    Error::CopiesDiffer { path: path.to_owned(), first: first.to_owned(), what }
}

fn compare(path: &Path, original: &Original) -> Result<(), Error> {
    let (copy, len) = open_plain(path)?;
    if len != original.len {
        return Err(differ(path, original.path, format!("it has {len} bytes, wanted {}", original.len)));
    }
    let block = BLOCK.min(len);
    let (mut a, mut b) = (vec![0; block as usize], vec![0; block as usize]);
    for number in 0..BLOCKS {
        // From the first block to the last, evenly.
        let at = (u128::from(len - block) * u128::from(number) / u128::from(BLOCKS - 1)) as u64;
        crate::checkpoint::read_chunked(original.handle, original.path, at, &mut a)?;
        crate::checkpoint::read_chunked(&copy, path, at, &mut b)?;
        if let Some(byte) = a.iter().zip(&b).position(|(a, b)| a != b) {
            let (got, wanted) = (b[byte], a[byte]);
            let offset = at + byte as u64;
            let what = format!("the byte at offset {offset} is {got:#04x}, wanted {wanted:#04x}");
            return Err(differ(path, original.path, what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two directories, the second with what `change` makes of the file.
    fn compared(len: usize, change: impl Fn(&mut Vec<u8>)) -> Result<Vec<Option<PathBuf>>, Error> {
        let dirs = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| dirs.path().join(name));
        let mut bytes: Vec<u8> = (0..len).map(|i| (i / 251) as u8).collect();
        for dir in [&a, &b] {
            std::fs::create_dir(dir).unwrap();
            std::fs::write(dir.join("m.safetensors"), &bytes).unwrap();
            change(&mut bytes);
        }
        let path = a.join("m.safetensors");
        let handle = File::open(&path).unwrap();
        find(&a, &b, &[Original { path: &path, handle: &handle, len: len as u64 }])
    }

    #[test]
    fn a_copy_is_known_by_length_and_blocks_from_first_to_last() {
        for len in [0, 1, 5000, 16 << 10, 300_000] {
            assert!(compared(len, |_| {}).unwrap()[0].is_some(), "{len}");
        }
        let text = compared(300_000, |bytes| bytes.truncate(299_999)).unwrap_err().to_string();
        assert!(
            text.contains("it has 299999 bytes, wanted 300000") && text.contains("b/m.safetensors"),
            "{text}"
        );
        for at in [0, 16_383, 299_999] {
            let text = compared(300_000, |bytes| bytes[at] ^= 1).unwrap_err().to_string();
            assert!(text.contains(&format!("offset {at} is")), "{text}");
        }
    }

    #[test]
    fn a_directory_without_any_of_the_files_is_refused() {
        let dirs = tempfile::tempdir().unwrap();
        let path = dirs.path().join("m.safetensors");
        std::fs::write(&path, b"abc").unwrap();
        let (handle, empty) = (File::open(&path).unwrap(), dirs.path().join("empty"));
        std::fs::create_dir(&empty).unwrap();
        let found = find(dirs.path(), &empty, &[Original { path: &path, handle: &handle, len: 3 }]);
        assert!(matches!(found, Err(Error::NothingShared { .. })));
    }
}
