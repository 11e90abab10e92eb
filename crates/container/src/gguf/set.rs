//! A model in one file or in a numbered set of them.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use super::error::GgufError;
use super::parse::{GgufHeader, GgufTensor, parse_gguf};
use super::value::Value;
use crate::error::{Error, MissingShards};
use crate::listing::{has_extension, open_plain};
use crate::regular::open_regular;

const SPLIT_NO: &str = "split.no";
const SPLIT_COUNT: &str = "split.count";
const SPLIT_TENSORS: &str = "split.tensors.count";
const ARCHITECTURE: &str = "general.architecture";

/// One file of a model.
#[derive(Clone, Debug)]
pub struct GgufPart {
    /// Where it is.
    pub path: PathBuf,
    /// Its length in bytes.
    pub len: u64,
    /// What its header says.
    pub header: GgufHeader,
}

/// A model in GGUF; headers alone were read.
#[derive(Clone, Debug)]
pub struct Gguf {
    parts: Vec<GgufPart>,
}

/// Whether a path is to be read as GGUF: a regular file that begins so, or is called so.
pub fn is_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    let mut begins = || open_regular(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok();
    !path.is_dir() && (has_extension(path, "gguf") || begins() && &magic == b"GGUF")
}

/// Of the names in a directory those that a GGUF model is opened by, ascending: of a set the part with the lowest
/// number. Projectors of images (`mmproj`) are no models.
pub(crate) fn models_among<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut models: BTreeMap<&str, &str> = BTreeMap::new();
    let files = names.filter(|name| has_extension(Path::new(name), "gguf") && !name.starts_with("mmproj"));
    for name in files {
        let stem = Numbered::of(name).map_or(name, |numbered| numbered.stem);
        let first = models.entry(stem).or_insert(name);
        *first = (*first).min(name);
    }
    models.into_values().map(str::to_owned).collect()
}

impl Gguf {
    /// Opens a file; one that says that it is part of a set brings the others, whichever it is.
    ///
    /// # Errors
    /// A file that cannot be read or whose header is refused; a part that is missing, there twice
    /// or of another set.
    pub fn open(path: &Path) -> Result<Gguf, Error> {
        let given = read_part(path)?;
        let name = path.file_name().and_then(|name| name.to_str()).and_then(Numbered::of);
        let parts = match (given.split_count()?, name) {
            (0 | 1, None) => vec![given],
            (0 | 1, Some(name)) if name.count <= 1 => vec![given],
            (0 | 1, Some(name)) => {
                return Err(given.disagrees(SPLIT_COUNT, name.count, given.header.get(SPLIT_COUNT)));
            }
            (count, None) => return Err(Error::GgufPartName { path: path.to_owned(), count }),
            (count, Some(name)) if name.count != count => {
                return Err(given.disagrees(SPLIT_COUNT, name.count, given.header.get(SPLIT_COUNT)));
            }
            (_, Some(name)) => read_set(path, &name)?,
        };
        let gguf = Gguf { parts };
        gguf.refuse_duplicates()?;
        Ok(gguf)
    }

    /// Its files, in the order of the set.
    pub fn parts(&self) -> &[GgufPart] {
        &self.parts
    }

    /// The value of a key of the model: that of the first part that has it.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.parts.iter().find_map(|part| part.header.get(key))
    }

    /// All tensors, each with the index of its part.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, &GgufTensor)> {
        let parts = self.parts.iter().enumerate();
        parts.flat_map(|(index, part)| part.header.tensors.iter().map(move |tensor| (index, tensor)))
    }

    fn refuse_duplicates(&self) -> Result<(), Error> {
        let mut holders: HashMap<&str, usize> = HashMap::new();
        for (part, tensor) in self.tensors() {
            if let Some(first) = holders.insert(&tensor.name, part) {
                return Err(Error::DuplicateTensor {
                    tensor: tensor.name.clone(),
                    first: self.parts[first].path.clone(),
                    second: self.parts[part].path.clone(),
                });
            }
        }
        Ok(())
    }
}

impl GgufPart {
    /// A count of the set's keys; 0 where there is none.
    fn number(&self, key: &str) -> Result<u64, Error> {
        let Some(value) = self.header.get(key) else { return Ok(0) };
        value.as_u64().ok_or_else(|| Error::GgufFile {
            path: self.path.clone(),
            source: GgufError::value(key, "a whole number", value),
        })
    }

    fn split_count(&self) -> Result<u64, Error> {
        self.number(SPLIT_COUNT)
    }

    /// Refuses a part of another set, or at another place of it than its name says.
    fn check(&self, name: &Numbered<'_>, number: u64, first: &GgufPart) -> Result<(), Error> {
        if self.split_count()? != name.count {
            return Err(self.disagrees(SPLIT_COUNT, name.count, self.header.get(SPLIT_COUNT)));
        }
        // Files count from 1, the key from 0. A part that is there twice says the other's number.
        if self.header.get(SPLIT_NO).is_none() || self.number(SPLIT_NO)? != number - 1 {
            return Err(self.disagrees(SPLIT_NO, number - 1, self.header.get(SPLIT_NO)));
        }
        let wanted = first.number(SPLIT_TENSORS)?;
        if self.number(SPLIT_TENSORS)? != wanted {
            return Err(self.disagrees(SPLIT_TENSORS, wanted, self.header.get(SPLIT_TENSORS)));
        }
        if let (Some(got), Some(wanted)) = (self.header.get(ARCHITECTURE), first.header.get(ARCHITECTURE))
            && got != wanted
        {
            return Err(self.disagrees(ARCHITECTURE, shown(wanted), Some(got)));
        }
        Ok(())
    }

    fn disagrees(&self, key: &'static str, wanted: impl ToString, got: Option<&Value>) -> Error {
        Error::GgufForeign {
            path: self.path.clone(),
            key,
            wanted: wanted.to_string(),
            got: got.map_or_else(|| "absent".to_owned(), shown),
        }
    }
}

fn shown(value: &Value) -> String {
    match (value, value.as_u64()) {
        (_, Some(number)) => number.to_string(),
        (Value::String(text), _) => format!("{:?}", text.to_lossy()),
        _ => format!("of the kind {}", value.kind()),
    }
}

fn read_part(path: &Path) -> Result<GgufPart, Error> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(Error::NotFound { path: path.to_owned() });
        }
        _ => {}
    }
    let (file, len) = open_plain(path)?;
    let header = parse_gguf(BufReader::with_capacity(1 << 16, file), len);
    let header = header.map_err(|source| Error::GgufFile { path: path.to_owned(), source })?;
    Ok(GgufPart { path: path.to_owned(), len, header })
}

/// All parts of the set that `path`, called `name`, belongs to.
fn read_set(path: &Path, name: &Numbered<'_>) -> Result<Vec<GgufPart>, Error> {
    let dir = path.parent().unwrap_or(Path::new(""));
    let paths: BTreeMap<u64, PathBuf> = (1..=name.count).map(|n| (n, dir.join(name.sibling(n)))).collect();
    // A link that leads nowhere is refused by name when it is opened.
    let absent = |n: &u64| fs::symlink_metadata(&paths[n]).is_err();
    let missing: Vec<u64> = paths.keys().copied().filter(absent).collect();
    if !missing.is_empty() {
        return Err(Error::MissingShards(Box::new(MissingShards {
            dir: if dir.as_os_str().is_empty() { ".".into() } else { dir.to_owned() },
            known_from: format!("{SPLIT_COUNT} of {}", name.sibling(name.number)),
            present: paths.len() - missing.len(),
            expected: paths.len(),
            names: missing.into_iter().map(|n| name.sibling(n)).collect(),
            tensors: None,
            layers: None,
            hint: "Fetch them again from the model's source into the same directory.",
        })));
    }
    let mut parts: Vec<GgufPart> = Vec::new();
    for (number, path) in paths {
        let part = read_part(&path)?;
        part.check(name, number, parts.first().unwrap_or(&part))?;
        parts.push(part);
    }
    let got: usize = parts.iter().map(|part| part.header.tensors.len()).sum();
    let wanted = parts[0].number(SPLIT_TENSORS)?;
    // Not every tool writes the count.
    if parts[0].header.get(SPLIT_TENSORS).is_some() && got as u64 != wanted {
        return Err(Error::GgufTensorCount { path: parts[0].path.clone(), wanted, got: got as u64 });
    }
    Ok(parts)
}

/// `STEM-00001-of-00003.gguf`, taken apart.
#[derive(Debug, PartialEq, Eq)]
struct Numbered<'a> {
    stem: &'a str,
    number: u64,
    count: u64,
}

impl<'a> Numbered<'a> {
    fn of(name: &'a str) -> Option<Numbered<'a>> {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| {
            let plain = text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| text.parse().ok()).flatten()
        };
        let (number, count) = (digits(number)?, digits(count)?);
        (1..=count).contains(&number).then_some(Numbered { stem, number, count })
    }

    fn sibling(&self, number: u64) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_five_digits_within_the_count_are_a_number() {
        let whole = Numbered { stem: "a-b", number: 2, count: 3 };
        assert_eq!(Numbered::of("a-b-00002-of-00003.gguf"), Some(whole));
        assert_eq!(Numbered::of("a-00002-of-00003.gguf").unwrap().sibling(1), "a-00001-of-00003.gguf");
        for name in [
            "a.gguf",
            "a-2-of-3.gguf",
            "a-00000-of-00003.gguf",
            "a-00004-of-00003.gguf",
            "a-+0001-of-00003.gguf",
            "a-00001-of-00003.bin",
        ] {
            assert_eq!(Numbered::of(name), None, "{name}");
        }
    }
}
