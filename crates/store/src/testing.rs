//! Doubles for tests of this crate and of those above it: files in memory, faults, recorded events.
//!
//! Nothing here is used by the engine itself.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use metaltail_container::{ExpertPlace, Extent, PartPlace, RunOffset};
use metaltail_quant::{Format, MatrixLayout};

use crate::arena::{Arena, ArenaView};
use crate::event::{Observer, StoreEvent};
use crate::io::ExpertReader;

/// An expert of the given runs whose three matrices are 1 × 1 at the beginning of the first.
///
/// # Panics
/// Never: a 1 × 1 matrix has a layout.
pub fn place(runs: &[Extent]) -> ExpertPlace {
    let layout = MatrixLayout::new(Format::Int8Row, 1, 1).expect("a 1 × 1 matrix has a layout");
    let part = PartPlace { layout, weights: RunOffset { run: 0, offset: 0 }, scales: None };
    ExpertPlace { runs: runs.to_vec(), parts: [part; 3], checksum: None, repack: None }
}

/// An arena without slots.
///
/// # Panics
/// Never: it maps nothing.
pub fn empty_arena() -> ArenaView {
    ArenaView(Arc::new(Arena::new(&[]).expect("no slots need no memory")))
}

/// Files that lie in memory; named `memory-0`, `memory-1`, …
pub struct MemoryFiles {
    files: Vec<Vec<u8>>,
    alignment: u64,
}

impl MemoryFiles {
    /// Buffered files with these bytes.
    pub fn new(files: Vec<Vec<u8>>) -> MemoryFiles {
        MemoryFiles { files, alignment: 1 }
    }

    /// Demands aligned reads, as a direct file does: others fail with `EINVAL`.
    pub fn with_alignment(mut self, alignment: u64) -> MemoryFiles {
        self.alignment = alignment;
        self
    }
}

impl ExpertReader for MemoryFiles {
    fn files(&self) -> usize {
        self.files.len()
    }
    fn path(&self, file: u32) -> PathBuf {
        PathBuf::from(format!("memory-{file}"))
    }
    fn len(&self, file: u32) -> u64 {
        self.files[file as usize].len() as u64
    }
    fn alignment(&self) -> u64 {
        self.alignment
    }
    fn read_at(&self, file: u32, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        if !offset.is_multiple_of(self.alignment) || !(buf.len() as u64).is_multiple_of(self.alignment) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let rest = self.files[file as usize].get(offset as usize..).unwrap_or_default();
        let n = rest.len().min(buf.len());
        buf[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }
}

/// What becomes of one read call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It passes.
    None,
    /// It returns at most this many bytes.
    Short(usize),
    /// It fails with this code of the operating system.
    Error(i32),
}

type Hook = dyn Fn(u32, u64, usize) -> Fault + Send + Sync;

/// A reader with a hook before each call; a hook that blocks makes a slow or stuck drive.
pub struct Faulty<R> {
    inner: R,
    hook: Box<Hook>,
}

impl<R: ExpertReader> Faulty<R> {
    /// `hook(file, offset, bytes)` decides each call's fate.
    pub fn new(inner: R, hook: impl Fn(u32, u64, usize) -> Fault + Send + Sync + 'static) -> Faulty<R> {
        Faulty { inner, hook: Box::new(hook) }
    }
}

impl<R: ExpertReader> ExpertReader for Faulty<R> {
    fn files(&self) -> usize {
        self.inner.files()
    }
    fn has(&self, file: u32) -> bool {
        self.inner.has(file)
    }
    fn path(&self, file: u32) -> PathBuf {
        self.inner.path(file)
    }
    fn len(&self, file: u32) -> u64 {
        self.inner.len(file)
    }
    fn alignment(&self) -> u64 {
        self.inner.alignment()
    }
    fn read_at(&self, file: u32, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        match (self.hook)(file, offset, buf.len()) {
            Fault::None => self.inner.read_at(file, offset, buf),
            // Reading whole and reporting less keeps direct calls aligned.
            Fault::Short(n) => self.inner.read_at(file, offset, buf).map(|got| got.min(n)),
            Fault::Error(code) => Err(io::Error::from_raw_os_error(code)),
        }
    }
    fn handle(&self, file: u32) -> Option<&File> {
        self.inner.handle(file)
    }
    #[cfg(test)]
    fn completed(&self, file: u32, offset: u64, len: usize, result: io::Result<usize>) -> io::Result<usize> {
        match (self.hook)(file, offset, len) {
            Fault::None => result,
            Fault::Short(n) => result.map(|got| got.min(n)),
            Fault::Error(code) => Err(io::Error::from_raw_os_error(code)),
        }
    }
}

/// An observer that keeps every event.
#[derive(Default)]
pub struct Recorder(Mutex<Vec<StoreEvent>>);

impl Recorder {
    /// Takes the events so far.
    pub fn take(&self) -> Vec<StoreEvent> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Observer for Recorder {
    fn on(&self, event: &StoreEvent) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(event.clone());
    }
}

/// As if this thread held the slot table's lock, until what is returned drops; see [`crate::rank`].
pub fn as_if_locked() -> impl Drop {
    crate::rank::Held::new()
}
