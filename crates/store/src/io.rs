//! Reading files: one trait of few methods, so that tests can put faults between the store and the drive.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use metaltail_container::Extent;

use crate::arena::{Arena, PAGE};
use crate::error::StoreError;

/// Positional reads from a numbered set of files. One call is one system call: it may be short or
/// interrupted; the store continues.
pub trait ExpertReader: Send + Sync {
    /// Number of files.
    fn files(&self) -> usize;
    /// Path of a file, for messages.
    fn path(&self, file: u32) -> PathBuf;
    /// Length of a file in bytes, as it was when opened.
    fn len(&self, file: u32) -> u64;
    /// Granule that offsets, lengths and buffers must keep: 1 or 4096 bytes.
    fn alignment(&self) -> u64;
    /// Reads at most `buf.len()` bytes at `offset`; 0 at the end of the file.
    fn read_at(&self, file: u32, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
}

/// Whether reads bypass the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// Direct where it works and the experts exceed half the available memory; see [`FileReader::open`].
    #[default]
    Auto,
    /// Direct, or an error.
    On,
    /// Through the page cache.
    Off,
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
}

/// Files of the system.
pub struct FileReader {
    files: Vec<(PathBuf, File, u64)>,
    direct: bool,
}

impl FileReader {
    /// Opens `files` and decides between direct and buffered reads.
    ///
    /// `Auto` takes direct reads when every file opens so and a block of the first few can be read, and
    /// `expert_bytes` exceed half of `available` memory. Models below that live in the page cache anyway,
    /// where a repeated read costs a copy and not the drive. Buffered reads are not timed against direct
    /// ones: that would fill the page cache with what is about to be read again.
    ///
    /// # Errors
    /// [`StoreError::Open`], or [`StoreError::Direct`] when `On` does not work.
    pub fn open(
        files: &[PathBuf],
        direct: Direct,
        expert_bytes: u64,
        available: Option<u64>,
    ) -> Result<(FileReader, IoMode), StoreError> {
        let buffered = |reason: &str, makeshift| {
            let files = files.iter().map(|p| open_file(p, false)).collect::<Result<_, _>>()?;
            let mode = IoMode { direct: false, reason: reason.into(), makeshift };
            Ok((FileReader { files, direct: false }, mode))
        };
        if direct == Direct::Off {
            return buffered("direct reads are switched off", false);
        }
        if direct == Direct::Auto && available.is_some_and(|a| expert_bytes <= a / 2) {
            return buffered(
                "all experts fit in half of the available memory, so the page cache holds them",
                false,
            );
        }
        match (Self::open_direct(files), direct) {
            (Ok(reader), Direct::On) => Ok((
                reader,
                IoMode { direct: true, reason: "direct reads are demanded".into(), makeshift: false },
            )),
            (Ok(reader), _) => {
                let reason = "they work here and the experts exceed half of the available memory";
                Ok((reader, IoMode { direct: true, reason: reason.into(), makeshift: false }))
            }
            (Err(StoreError::Direct { file, source }), Direct::Auto) => {
                buffered(&format!("direct reads of {} do not work: {source}", file.display()), true)
            }
            (Err(e), _) => Err(e),
        }
    }

    fn open_direct(files: &[PathBuf]) -> Result<FileReader, StoreError> {
        let opened = files.iter().map(|p| open_file(p, true)).collect::<Result<_, _>>()?;
        let reader = FileReader { files: opened, direct: true };
        reader.probe()?;
        Ok(reader)
    }

    /// Reads the first block of a few files: opening succeeds on some systems that refuse the read.
    fn probe(&self) -> Result<(), StoreError> {
        const FILES: usize = 8;
        let block = Arc::new(Arena::new(&[(PAGE as usize, 1)])?);
        let mut block =
            block.begin_write(0).ok_or_else(|| StoreError::Internal("probe block is in use".into()))?;
        for (number, (path, _, len)) in (0u32..).zip(self.files.iter().take(FILES)) {
            let extent = Extent { file: number, offset: 0, len: PAGE.min(*len) };
            let mut traffic = Traffic::default();
            read_run(self, extent, &mut block, &mut traffic).map_err(|fault| match fault.source {
                Some(source) => StoreError::Direct { file: path.clone(), source: Arc::new(source) },
                None => {
                    let source = Arc::new(io::Error::from(io::ErrorKind::UnexpectedEof));
                    StoreError::Direct { file: path.clone(), source }
                }
            })?;
        }
        Ok(())
    }
}

fn open_file(path: &Path, direct: bool) -> Result<(PathBuf, File, u64), StoreError> {
    let failed = |e: io::Error| {
        let (file, source) = (path.to_path_buf(), Arc::new(e));
        // Missing files and missing rights are no question of direct reads.
        match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => StoreError::Open { file, source },
            _ if direct => StoreError::Direct { file, source },
            _ => StoreError::Open { file, source },
        }
    };
    let mut options = File::options();
    options.read(true);
    if direct {
        options.custom_flags(direct_flag().map_err(failed)?);
    }
    let file = options.open(path).map_err(failed)?;
    let len = file.metadata().map_err(failed)?.len();
    Ok((path.to_path_buf(), file, len))
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn direct_flag() -> io::Result<i32> {
    Ok(libc::O_DIRECT)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn direct_flag() -> io::Result<i32> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

impl ExpertReader for FileReader {
    fn files(&self) -> usize {
        self.files.len()
    }
    fn path(&self, file: u32) -> PathBuf {
        self.files[file as usize].0.clone()
    }
    fn len(&self, file: u32) -> u64 {
        self.files[file as usize].2
    }
    fn alignment(&self) -> u64 {
        if self.direct { PAGE } else { 1 }
    }
    fn read_at(&self, file: u32, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.files[file as usize].1.read_at(buf, offset)
    }
}

/// What reads cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Bytes delivered by the system.
    pub(crate) bytes: u64,
    /// Read calls.
    pub(crate) calls: u32,
    /// Time in them.
    pub(crate) service: Duration,
}

/// A run that did not arrive.
#[derive(Debug)]
pub(crate) struct RunFault {
    /// Bytes of the run that arrived.
    pub(crate) got: u64,
    /// The system's error; `None` at the end of the file.
    pub(crate) source: Option<io::Error>,
}

/// Reads `run` so that its first byte lies at `pages[run.offset % 4096]`.
///
/// `pages` must begin on a page and span the run rounded out to pages. Interrupted calls are repeated and
/// short ones continued, in direct mode from the last whole granule. A file that ends inside the
/// rounding is fine; one that ends inside the run is a fault.
pub(crate) fn read_run(
    reader: &dyn ExpertReader,
    run: Extent,
    pages: &mut [u8],
    traffic: &mut Traffic,
) -> Result<(), RunFault> {
    let align = reader.alignment();
    // Buffered: exactly the run. Direct: from the granule that it begins in, to the end of the span.
    let lead = run.offset % align;
    let displacement = (run.offset % PAGE - lead) as usize;
    let start = run.offset - lead;
    let need = (lead + run.len) as usize;
    let window = need.next_multiple_of(align as usize);
    let buf = &mut pages[displacement..displacement + window];
    let mut good = 0usize;
    while good < need {
        let from = good - good % align as usize;
        let began = Instant::now();
        let result = reader.read_at(run.file, start + from as u64, &mut buf[from..]);
        traffic.service += began.elapsed();
        traffic.calls += 1;
        let got = (good as u64).saturating_sub(lead);
        match result {
            // No progress: the file ends here.
            Ok(n) if from + n <= good => return Err(RunFault { got, source: None }),
            Ok(n) => {
                traffic.bytes += n as u64;
                good = (from + n).min(window);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => {
                return Err(RunFault { got, source: Some(e) });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Fault, Faulty, MemoryFiles};
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn run(offset: u64, len: u64) -> Extent {
        Extent { file: 0, offset, len }
    }

    fn read(reader: &dyn ExpertReader, run: Extent) -> Result<(Vec<u8>, Traffic), RunFault> {
        let displacement = (run.offset % PAGE) as usize;
        let mut pages = vec![0; (displacement + run.len as usize).next_multiple_of(PAGE as usize)];
        let mut traffic = Traffic::default();
        read_run(reader, run, &mut pages, &mut traffic)?;
        Ok((pages[displacement..displacement + run.len as usize].to_vec(), traffic))
    }

    proptest! {
        /// Short and interrupted calls never change what arrives, aligned or not, up to the file's last byte.
        #[test]
        fn short_and_interrupted_reads_continue(
            len in 1usize..40_000, a in 0usize..40_000, b in 0usize..40_000,
            direct: bool, shorts in prop::collection::vec(1usize..9_000, 1..8),
        ) {
            let (a, b) = (a.min(b) % len, a.max(b) % len);
            let (from, to) = (a.min(b), a.max(b) + 1);
            let bytes: Vec<u8> = (0..len).map(|i| (i * 31 / 8) as u8).collect();
            let files = MemoryFiles::new(vec![bytes.clone()]).with_alignment(if direct { PAGE } else { 1 });
            let call = AtomicU32::new(0);
            let reader = Faulty::new(files, move |_, _, _| {
                let n = call.fetch_add(1, Ordering::Relaxed) as usize;
                match n % 3 {
                    0 => Fault::Error(libc::EINTR),
                    // Direct drives stop at whole blocks, or at the end of the file.
                    1 if direct => Fault::Short(shorts[n % shorts.len()].next_multiple_of(4096)),
                    1 => Fault::Short(shorts[n % shorts.len()]),
                    _ => Fault::None,
                }
            });
            let (got, _) = read(&reader, run(from as u64, (to - from) as u64)).unwrap();
            prop_assert_eq!(got, &bytes[from..to]);
        }
    }

    #[test]
    fn a_file_may_end_inside_the_rounding_but_not_inside_the_run() {
        let files = MemoryFiles::new(vec![vec![9; 5000]]).with_alignment(PAGE);
        let (bytes, traffic) = read(&files, run(4100, 900)).unwrap();
        assert_eq!((bytes.len(), traffic.bytes), (900, 904));
        let fault = read(&files, run(4100, 901)).unwrap_err();
        assert!(fault.got == 900 && fault.source.is_none());
    }

    #[test]
    fn buffered_reads_take_exactly_the_run() {
        let files = MemoryFiles::new(vec![vec![9; 50_000]]);
        assert_eq!(read(&files, run(4100, 9000)).unwrap().1.bytes, 9000);
        let files = files.with_alignment(PAGE);
        assert_eq!(read(&files, run(4100, 9000)).unwrap().1.bytes, 12_288);
    }

    #[test]
    fn a_system_without_direct_reads_falls_back_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("absent");
        let open = |direct| FileReader::open(std::slice::from_ref(&missing), direct, 1 << 40, Some(1));
        assert!(matches!(open(Direct::Auto), Err(StoreError::Open { .. })), "a missing file is no fallback");
        let odd = [PathBuf::from("/proc/self/status")];
        if cfg!(target_os = "linux") {
            let (_, mode) = FileReader::open(&odd, Direct::Auto, 1 << 40, Some(1)).unwrap();
            assert!(!mode.direct && mode.reason.contains("do not work"), "{mode:?}");
            assert!(matches!(FileReader::open(&odd, Direct::On, 0, None), Err(StoreError::Direct { .. })));
        }
    }

    #[test]
    fn a_model_that_fits_the_page_cache_is_read_through_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("experts");
        std::fs::write(&file, [1; 8192]).unwrap();
        let open = |expert_bytes| {
            FileReader::open(std::slice::from_ref(&file), Direct::Auto, expert_bytes, Some(1 << 30)).unwrap()
        };
        let (reader, mode) = open(1 << 29);
        assert!(!mode.direct && reader.alignment() == 1 && reader.len(0) == 8192);
        let (reader, mode) = open((1 << 29) + 1);
        assert_eq!(reader.alignment() == PAGE, mode.direct);
        assert!(mode.direct || mode.reason.contains("do not work"), "{mode:?}");
    }
}
