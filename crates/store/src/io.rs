//! Reading files: one trait of few methods, so that tests can put faults between the store and the drive.

use std::fs::File;
use std::io;
use std::path::PathBuf;

mod choice;
mod drives;
mod files;
#[cfg(target_os = "linux")]
pub(crate) mod ring;
mod window;

pub use choice::DriveFiles;
pub(crate) use choice::{Chosen, Wish, choose};
pub use drives::DriveFigures;
pub(crate) use drives::{Drives, MOST as MOST_DRIVES, Turn};
pub use files::FileReader;
pub(crate) use window::{RunFault, Traffic, cut, read_run};
#[cfg(target_os = "linux")]
pub(crate) use window::{Window, retried};

/// Positional reads from a numbered set of files. One call is one system call: it may be short or
/// interrupted; the store continues.
pub trait ExpertReader: Send + Sync {
    /// Number of files.
    fn files(&self) -> usize;
    /// Whether a file is here; a drive of several need not have all of them.
    fn has(&self, file: u32) -> bool {
        (file as usize) < self.files()
    }
    /// Path of a file, for messages.
    fn path(&self, file: u32) -> PathBuf;
    /// Length of a file in bytes, as it was when opened.
    fn len(&self, file: u32) -> u64;
    /// Granule that offsets, lengths and buffers must keep: 1 or 4096 bytes.
    fn alignment(&self) -> u64;
    /// Reads at most `buf.len()` bytes at `offset`; 0 at the end of the file.
    fn read_at(&self, file: u32, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
    /// Files that were written to since the last call or, at first, since they were opened.
    fn changed(&self) -> Vec<u32> {
        Vec::new()
    }
    /// The open file, where there is one; without it io_uring cannot read.
    fn handle(&self, _file: u32) -> Option<&File> {
        None
    }
    /// What an io_uring's read of `len` bytes ended with; a double puts its faults here.
    #[cfg(test)]
    fn completed(
        &self,
        _file: u32,
        _offset: u64,
        _len: usize,
        result: io::Result<usize>,
    ) -> io::Result<usize> {
        result
    }
}

/// Whether reads bypass the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// Through the page cache where the experts fit in a quarter of the available memory; else whichever
    /// a short measurement finds faster.
    #[default]
    Auto,
    /// Direct, or an error.
    On,
    /// Through the page cache.
    Off,
}

/// What carries reads out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Io {
    /// Threads where the experts fit in a quarter of the available memory or io_uring does not work;
    /// else whichever a short measurement finds faster.
    #[default]
    Auto,
    /// One thread with an io_uring, or an error.
    Uring,
    /// Threads with positioned reads.
    Threads,
}

/// How the store reads, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoMode {
    /// Whether reads bypass the page cache.
    pub direct: bool,
    /// Why, as a clause.
    pub reason: String,
    /// Whether direct reads were wanted and do not work.
    pub makeshift: bool,
    /// Whether an io_uring carries reads out, and not threads.
    pub uring: bool,
    /// Why, as a clause.
    pub uring_reason: String,
}

impl IoMode {
    /// `uring` or `threads`.
    pub fn carrier(&self) -> &'static str {
        if self.uring { "uring" } else { "threads" }
    }
}
