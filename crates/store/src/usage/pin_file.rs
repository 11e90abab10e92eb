//! Files that say what to pin: a list of experts, a usage profile, or a colibrì history.

use std::path::Path;

use metaltail_container::read_regular;

use super::{ColiUsage, UsageError, UsageProfile, file};

/// Experts of a list at most.
const MOST_LINES: usize = 1 << 20;

/// What a file given to `--pin` holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PinFile {
    /// (layer, expert), in the order of the file, each once.
    Experts(Vec<(u32, u32)>),
    /// A usage profile of ours.
    Profile(UsageProfile),
    /// Counts as colibrì writes them, with or without its head.
    History(ColiUsage),
}

impl PinFile {
    /// Reads a file and finds out what it is: binary is a profile; of a text the first line that is neither
    /// empty nor begins with `#` decides, two numbers being an expert of a list, three a count.
    ///
    /// # Errors
    /// A file that cannot be read or is none of these.
    pub fn read(path: &Path) -> Result<PinFile, UsageError> {
        let read = |source| UsageError::ReadPins { file: path.into(), source };
        let bytes = read_regular(path, file::MOST_BYTES).map_err(read)?;
        match std::str::from_utf8(&bytes) {
            Ok(text) if !text.contains('\0') => PinFile::parse(text),
            _ => file::decode(path, &bytes).map(PinFile::Profile),
        }
    }

    fn parse(text: &str) -> Result<PinFile, UsageError> {
        let said = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with('#');
        match text.lines().find(said).map(|line| line.split_whitespace().count()) {
            Some(2) => list(text).map(PinFile::Experts),
            _ => ColiUsage::parse(text).map(PinFile::History),
        }
    }
}

fn list(text: &str) -> Result<Vec<(u32, u32)>, UsageError> {
    let mut experts = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for (line, content) in (1..).zip(text.lines()) {
        let wrong = |reason: String| UsageError::Line { line, reason };
        let words: Vec<&str> = content.split_whitespace().collect();
        match words.as_slice() {
            [] => {}
            [first, ..] if first.starts_with('#') => {}
            [layer, expert] => {
                let number = |text: &str| text.parse().map_err(|_| wrong(format!("{text:?} is no number")));
                let expert = (number(layer)?, number(expert)?);
                if seen.insert(expert) {
                    experts.push(expert);
                }
            }
            other => return Err(wrong(format!("wanted layer and expert, got {} words", other.len()))),
        }
        if experts.len() > MOST_LINES {
            return Err(wrong(format!("a list has at most {MOST_LINES} experts")));
        }
    }
    Ok(experts)
}
