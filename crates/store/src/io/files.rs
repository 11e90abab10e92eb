//! Files of the system.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use metaltail_container::{Extent, is_out_of_handles};

use super::{ExpertReader, Traffic, read_run};
use crate::arena::{Arena, PAGE};
use crate::error::StoreError;

/// One file of a drive, or a gap where the drive has none.
struct Opened {
    path: PathBuf,
    file: Option<File>,
    len: u64,
}

/// Files of one drive, read directly or through the page cache.
pub struct FileReader {
    files: Vec<Opened>,
    direct: bool,
    /// When each file was last written to, as far as it was seen.
    written: Mutex<Vec<Option<SystemTime>>>,
}

/// When an open file was last written to, where the system tells.
fn written(file: &File) -> Option<SystemTime> {
    file.metadata().and_then(|data| data.modified()).ok()
}

impl FileReader {
    /// Opens files for reads through the page cache, or for direct ones, of which it then tries some.
    ///
    /// # Errors
    /// [`StoreError::Open`], or [`StoreError::Direct`] where direct reads do not work.
    pub fn open(files: &[PathBuf], direct: bool) -> Result<FileReader, StoreError> {
        let all: Vec<Option<&Path>> = files.iter().map(|path| Some(path.as_path())).collect();
        FileReader::open_some(&all, direct)
    }

    /// As [`FileReader::open`], with gaps: the numbering is that of the whole model.
    pub(crate) fn open_some(files: &[Option<&Path>], direct: bool) -> Result<FileReader, StoreError> {
        let open = |path: &Option<&Path>| match path {
            Some(path) => open_file(path, direct),
            None => Ok(Opened { path: PathBuf::new(), file: None, len: 0 }),
        };
        let files = files.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let times = files.iter().map(|opened| opened.file.as_ref().and_then(written)).collect();
        let reader = FileReader { files, direct, written: Mutex::new(times) };
        if direct {
            reader.try_direct()?;
        }
        Ok(reader)
    }

    /// Reads the first block of a few files: opening succeeds on some systems that refuse the read.
    fn try_direct(&self) -> Result<(), StoreError> {
        const FILES: usize = 8;
        let block = Arc::new(Arena::new(&[(PAGE as usize, 1)])?);
        let mut block =
            block.begin_write(0).ok_or_else(|| StoreError::Internal("the trial block is in use".into()))?;
        let here = (0u32..).zip(&self.files).filter(|(_, opened)| opened.file.is_some());
        for (number, Opened { path, len, .. }) in here.take(FILES) {
            let extent = Extent { file: number, offset: 0, len: PAGE.min(*len) };
            read_run(self, extent, &mut block, &mut Traffic::default()).map_err(|fault| {
                let source = fault.source.unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into());
                StoreError::Direct { file: path.clone(), source: Arc::new(source) }
            })?;
        }
        Ok(())
    }
}

fn open_file(path: &Path, direct: bool) -> Result<Opened, StoreError> {
    let failed = |e: io::Error| {
        let (file, source) = (path.to_path_buf(), Arc::new(e));
        // Missing files, rights and handles are no question of direct reads.
        match source.kind() {
            _ if is_out_of_handles(&source) => StoreError::OpenFiles { file, source },
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => StoreError::Open { file, source },
            _ if direct => StoreError::Direct { file, source },
            _ => StoreError::Open { file, source },
        }
    };
    let file = if direct { open_direct(path) } else { File::open(path) }.map_err(failed)?;
    let len = file.metadata().map_err(failed)?.len();
    Ok(Opened { path: path.to_path_buf(), file: Some(file), len })
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn open_direct(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    File::options().read(true).custom_flags(libc::O_DIRECT).open(path)
}

/// macOS reads what is in the page cache already from there, and adds nothing to it.
#[cfg(target_os = "macos")]
fn open_direct(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    rustix::fs::fcntl_nocache(&file, true)?;
    Ok(file)
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "macos")))]
fn open_direct(_: &Path) -> io::Result<File> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

impl ExpertReader for FileReader {
    fn files(&self) -> usize {
        self.files.len()
    }
    fn has(&self, file: u32) -> bool {
        self.handle(file).is_some()
    }
    fn path(&self, file: u32) -> PathBuf {
        self.files[file as usize].path.clone()
    }
    fn len(&self, file: u32) -> u64 {
        self.files[file as usize].len
    }
    fn alignment(&self) -> u64 {
        if self.direct { PAGE } else { 1 }
    }
    fn read_at(&self, file: u32, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let file = self.handle(file).ok_or(io::ErrorKind::NotFound)?;
        file.read_at(buf, offset)
    }
    fn changed(&self) -> Vec<u32> {
        let mut times = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.files.iter().map(|opened| opened.file.as_ref().and_then(written));
        let files = (0u32..).zip(times.iter_mut()).zip(now);
        let changed =
            files.filter_map(|((file, seen), now)| (std::mem::replace(seen, now) != now).then_some(file));
        changed.collect()
    }
    fn handle(&self, file: u32) -> Option<&File> {
        self.files.get(file as usize)?.file.as_ref()
    }
}
