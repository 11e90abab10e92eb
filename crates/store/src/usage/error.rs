//! Why a usage profile cannot be used or written.

use std::io;
use std::path::PathBuf;

/// Errors of usage profiles. A profile that cannot be used is begun anew; what is none is left alone.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UsageError {
    /// The model has a shape that profiles do not take.
    #[error("there is no usage profile of this model: {reason}")]
    Shape {
        /// What is too large, with the numbers.
        reason: String,
    },
    /// The file cannot be read.
    #[error("cannot read the usage profile {}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// A file of pins, or a history, cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    ReadPins {
        /// The file.
        file: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The file is something else.
    #[error("{} is no usage profile: it begins with {got:02x?}", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
        /// Its first bytes.
        got: Vec<u8>,
    },
    /// A newer program wrote it.
    #[error(
        "the usage profile {} has version {got}; this program reads version {wanted}. Use the program that wrote it, or another file",
        file.display()
    )]
    Version {
        /// The file.
        file: PathBuf,
        /// The version here.
        wanted: u32,
        /// The version there.
        got: u32,
    },
    /// The file is damaged or cut short.
    #[error("the usage profile {} is damaged: {reason}", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong, with offsets.
        reason: String,
    },
    /// It belongs to another model.
    #[error("{} is the usage profile of another model: {reason}", file.display())]
    Identity {
        /// The file.
        file: PathBuf,
        /// What differs.
        reason: String,
    },
    /// A line of a text is not what it should be.
    #[error("line {line}: {reason}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What was wanted and got.
        reason: String,
    },
    /// A history of another model or version.
    #[error("the usage history does not fit this model: {reason}")]
    History {
        /// What differs.
        reason: String,
    },
    /// It cannot be written; the old file is as it was.
    #[error("cannot save the usage profile {}: {source}. What was there is unchanged", file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
}

impl UsageError {
    /// Whether it is about a profile of this program that cannot be used, not about something else.
    pub fn is_profile(&self) -> bool {
        matches!(self, UsageError::Damaged { .. } | UsageError::Version { .. } | UsageError::Identity { .. })
    }
}
