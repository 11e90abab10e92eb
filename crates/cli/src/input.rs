//! Reading what users give: files of ids, prompts and lines, none of which may be endless.

use std::io::{BufRead, Read};
use std::path::Path;

use metaltail_container::read_regular;
pub use metaltail_container::{open_regular as regular, read_capped};
use serde::Deserialize;

use crate::exit::{Failure, Kind};

/// The longest prompt, or line of a chat, in bytes.
pub const TEXT_CAP: u64 = 16 << 20;

/// The largest file of ids in bytes.
const IDS_CAP: u64 = 256 << 20;

/// Reads a JSON file of ids.
///
/// # Errors
/// A file that cannot be read, is too large or has another form.
pub fn read_ids<T: serde::de::DeserializeOwned>(path: &Path, form: &str) -> Result<T, Failure> {
    let wrong = |reason: String| {
        Failure::new(Kind::Usage, format!("{} is not a file with {form}: {reason}", path.display()))
    };
    let bytes = read_regular(path, IDS_CAP).map_err(|error| wrong(error.to_string()))?;
    serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))
}

/// Reads a prompt to the end of the stream.
///
/// # Errors
/// A failed read, a prompt that is too long or not UTF-8.
pub fn read_prompt(source: impl Read) -> Result<String, Failure> {
    let refuse = |reason: String| {
        Failure::new(Kind::Usage, format!("cannot use the prompt on standard input: {reason}"))
    };
    let bytes = read_capped(source, TEXT_CAP).map_err(|error| refuse(error.to_string()))?;
    String::from_utf8(bytes).map_err(|error| refuse(format!("it is not UTF-8: {}", error.utf8_error())))
}

/// Reads one line without its end; none at the end of the stream.
///
/// # Errors
/// A failed read, or a line that is longer than [`TEXT_CAP`].
pub fn read_line(source: &mut impl BufRead) -> Result<Option<Vec<u8>>, Failure> {
    let mut line = Vec::new();
    let read = source.take(TEXT_CAP + 1).read_until(b'\n', &mut line);
    read.map_err(|error| Failure::new(Kind::Failed, format!("cannot read standard input: {error}")))?;
    if line.is_empty() {
        return Ok(None);
    }
    let ended = line.last() == Some(&b'\n');
    if ended {
        line.pop();
    }
    match !ended && line.len() as u64 > TEXT_CAP {
        true => Err(too_long()),
        false => Ok(Some(line)),
    }
}

/// The refusal of a line, or of lines continued by backslashes.
pub fn too_long() -> Failure {
    Failure::new(Kind::Usage, format!("a line on standard input is longer than {TEXT_CAP} bytes"))
}

/// Sequences of ids to score, none of them empty.
#[derive(Deserialize)]
pub struct Sequences {
    sequences: Vec<Vec<u32>>,
}

impl Sequences {
    /// Reads a file of `{"sequences": [[id, …], …]}`.
    ///
    /// # Errors
    /// A file that cannot be used, no sequence, a sequence without ids.
    pub fn read(path: &Path) -> Result<Sequences, Failure> {
        let file: Sequences = read_ids(path, r#"{"sequences": [[id, …], …]}"#)?;
        let refuse = |what: String| Err(Failure::new(Kind::Usage, format!("{}: {what}", path.display())));
        if file.sequences.is_empty() {
            return refuse("the list of sequences is empty: there is nothing to score".to_owned());
        }
        match file.sequences.iter().position(Vec::is_empty) {
            Some(at) => refuse(format!("sequence {at} has no ids (the first one is sequence 0)")),
            None => Ok(file),
        }
    }

    /// One sequence.
    pub fn of(ids: Vec<u32>) -> Sequences {
        Sequences { sequences: vec![ids] }
    }

    /// Refuses sequences that do not fit in a context or have ids that the vocabulary lacks, by
    /// their number.
    ///
    /// # Errors
    /// The first such sequence.
    pub fn check(&self, context: usize, vocab: usize) -> Result<(), Failure> {
        for (at, ids) in self.sequences.iter().enumerate() {
            if ids.len() > context {
                let len = ids.len();
                let text = format!(
                    "sequence {at} has {len} ids, the context {context} positions: split it or raise --context"
                );
                return Err(Failure::new(Kind::Usage, text));
            }
            if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
                let text = format!("sequence {at} has the id {id}, and the model's ids are below {vocab}");
                return Err(Failure::new(Kind::Usage, text));
            }
        }
        Ok(())
    }

    /// The ids.
    pub fn lists(&self) -> &[Vec<u32>] {
        &self.sequences
    }

    /// Ids in all.
    pub fn rows(&self) -> u64 {
        self.sequences.iter().map(|ids| ids.len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn what_has_no_end_is_refused_at_its_cap() {
        assert!(read_prompt(io::repeat(b'x')).is_err());
        assert!(read_line(&mut io::BufReader::new(io::repeat(b'x'))).is_err());
    }

    #[test]
    fn lines_come_without_their_ends_and_end() {
        let mut source = &b"one\n\nlast"[..];
        let mut next = || read_line(&mut source).unwrap();
        assert_eq!(next(), Some(b"one".to_vec()));
        assert_eq!(next(), Some(Vec::new()));
        assert_eq!(next(), Some(b"last".to_vec()));
        assert_eq!(next(), None);
    }
}
