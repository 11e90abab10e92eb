//! Settings that are a word or a file.

use std::fmt;
use std::path::PathBuf;

use serde::{Serialize, Serializer};

/// Where the usage profile lies; `None` is the usual place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Usage {
    /// Neither read nor written.
    Off,
    /// Read and never written.
    ReadOnly(Option<PathBuf>),
    /// Read, recorded and saved.
    On(Option<PathBuf>),
}

/// What stays in memory for good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Nothing.
    Off,
    /// What was used most.
    Auto,
    /// What a file says.
    File(PathBuf),
}

impl Usage {
    /// Parses `off`, `on`, `read-only`, `read-only:FILE` or a file.
    pub(super) fn parse(text: &str) -> Result<Usage, String> {
        match (text, text.strip_prefix("read-only:")) {
            ("", _) | (_, Some("")) => Err("it is a file, off, read-only or read-only:FILE".to_owned()),
            ("off", _) => Ok(Usage::Off),
            ("on", _) => Ok(Usage::On(None)),
            ("read-only", _) => Ok(Usage::ReadOnly(None)),
            (_, Some(file)) => Ok(Usage::ReadOnly(Some(file.into()))),
            (file, None) => Ok(Usage::On(Some(file.into()))),
        }
    }
}

impl Pin {
    /// Parses `auto`, `off` or a file.
    pub(super) fn parse(text: &str) -> Result<Pin, String> {
        match text {
            "" => Err("it is auto, off or a file".to_owned()),
            "auto" => Ok(Pin::Auto),
            "off" => Ok(Pin::Off),
            file => Ok(Pin::File(file.into())),
        }
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Usage::Off => f.write_str("off"),
            Usage::ReadOnly(None) => f.write_str("read-only"),
            Usage::ReadOnly(Some(file)) => write!(f, "read-only:{}", file.display()),
            Usage::On(None) => f.write_str("on"),
            Usage::On(Some(file)) => write!(f, "{}", file.display()),
        }
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pin::Off => f.write_str("off"),
            Pin::Auto => f.write_str("auto"),
            Pin::File(file) => write!(f, "{}", file.display()),
        }
    }
}

impl Serialize for Usage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Pin {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
