//! Dispatches kernels that [`crate::build`] compiled into this program.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ops::Range;
use std::{ptr, slice};

use thiserror::Error;

/// Why a dispatch did not go through.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunError {
    /// A kernel's name holds a zero byte.
    #[error("{0:?} is no kernel's name")]
    Name(String),
    /// The system gives no memory.
    #[error("no memory for a buffer of {0} bytes")]
    Memory(usize),
    /// The system does not change who may touch memory.
    #[error("a buffer of {0} bytes could not be opened or closed to kernels")]
    Protection(usize),
    /// A range that leaves its buffer.
    #[error("{length} bytes from byte {offset} on of a buffer of {size}")]
    Range {
        /// Its first byte.
        offset: usize,
        /// Its bytes.
        length: usize,
        /// Bytes of the buffer.
        size: usize,
    },
    /// The runner refused the dispatch, or found a mistake in the kernel. The message names kernel, line and thread.
    #[error("{0}")]
    Kernel(String),
}

#[repr(C)]
struct RawArgument {
    index: u32,
    kind: u32,
    address: *mut c_void,
    length: u64,
}

unsafe extern "C" {
    fn msl_dispatch(
        name: *const c_char,
        arguments: *const RawArgument,
        argument_count: usize,
        threadgroups: *const u32,
        threads_per_threadgroup: *const u32,
        order: u32,
        strict: u32,
        flush: u32,
        threads: u32,
        statistics: *mut u64,
        message: *mut c_char,
        message_length: usize,
    ) -> c_int;
}

/// Memory for a kernel that ends at an unreadable page: one that runs over its end is stopped there, and the dispatch
/// fails.
#[derive(Debug)]
pub struct Buffer {
    map: *mut c_void,
    map_length: usize,
    data: *mut u8,
    length: usize,
    /// Whether kernels reach it.
    open: Cell<bool>,
}

// SAFETY: the mapping belongs to this value alone, and nothing in it is bound to a thread.
unsafe impl Send for Buffer {}

impl Buffer {
    const PAGE: usize = 4096;

    /// `length` bytes of zeros. The last of them is followed by the unreadable page, so the first may lie at any
    /// address; a length that is a multiple of 16 gives one that is, too.
    ///
    /// # Errors
    /// No memory.
    pub fn new(length: usize) -> Result<Buffer, RunError> {
        let refused = || RunError::Memory(length);
        let body = length.checked_next_multiple_of(Self::PAGE).ok_or_else(refused)?;
        let map_length = body.checked_add(Self::PAGE).ok_or_else(refused)?;
        // SAFETY: a fresh private mapping, whose last page is made unreadable; `data` lies `length` bytes before it.
        unsafe {
            let (access, kind) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let map = libc::mmap(ptr::null_mut(), map_length, access, kind, -1, 0);
            if map == libc::MAP_FAILED {
                return Err(refused());
            }
            let buffer = Buffer {
                map,
                map_length,
                data: map.cast::<u8>().add(body - length),
                length,
                open: Cell::new(true),
            };
            if libc::mprotect(map.byte_add(body), Self::PAGE, libc::PROT_NONE) != 0 {
                return Err(refused());
            }
            Ok(buffer)
        }
    }

    /// A buffer that holds `bytes`.
    ///
    /// # Errors
    /// No memory.
    pub fn of(bytes: &[u8]) -> Result<Buffer, RunError> {
        let buffer = Buffer::new(bytes.len())?;
        // SAFETY: a fresh mapping of that many bytes, to which nothing else points.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.data, buffer.length) };
        Ok(buffer)
    }

    /// Bytes that it holds.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The address of the first byte: what a pointer in a table of addresses holds.
    pub fn address(&self) -> u64 {
        self.data as u64
    }

    /// Lets kernels reach the buffer (as they do at first), or not: then one that touches it is stopped.
    ///
    /// # Errors
    /// The system refuses.
    pub fn set_open(&self, open: bool) -> Result<(), RunError> {
        if self.open.get() != open {
            let access = if open { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
            // SAFETY: the pages of `new`'s mapping before the last. No reference to them exists outside `read`, which
            // opens them first.
            if unsafe { libc::mprotect(self.map, self.map_length - Self::PAGE, access) } != 0 {
                return Err(RunError::Protection(self.length));
            }
            self.open.set(open);
        }
        Ok(())
    }

    /// Copies `bytes` into it.
    ///
    /// # Errors
    /// A range that leaves it; a buffer that was not open and cannot be opened.
    pub fn write_at(&mut self, offset: usize, bytes: &[u8]) -> Result<(), RunError> {
        self.within(offset, bytes.len())?;
        let open = self.open.get();
        self.set_open(true)?;
        // SAFETY: the range lies in the buffer, which is open now, and to which no reference is ever given out; as in
        // `read`, no kernel runs on it.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.data.add(offset), bytes.len()) };
        self.set_open(open)
    }

    /// Copies from it into `bytes`.
    ///
    /// # Errors
    /// As [`Buffer::write_at`].
    pub fn read_at(&self, offset: usize, bytes: &mut [u8]) -> Result<(), RunError> {
        self.within(offset, bytes.len())?;
        let open = self.open.get();
        self.set_open(true)?;
        // SAFETY: as in `write_at`.
        unsafe { ptr::copy_nonoverlapping(self.data.add(offset), bytes.as_mut_ptr(), bytes.len()) };
        self.set_open(open)
    }

    fn within(&self, offset: usize, length: usize) -> Result<(), RunError> {
        match offset.checked_add(length).is_some_and(|end| end <= self.length) {
            true => Ok(()),
            false => Err(RunError::Range { offset, length, size: self.length }),
        }
    }

    /// A copy of its bytes. (No reference to them is ever given out, since kernels write them.)
    ///
    /// # Errors
    /// A buffer that was not open and cannot be opened.
    pub fn read(&self) -> Result<Vec<u8>, RunError> {
        let open = self.open.get();
        self.set_open(true)?;
        // SAFETY: `length` readable bytes, open now; a kernel could write them only in `dispatch`, and `Buffer` is not `Sync`,
        // so none runs on it now.
        let bytes = unsafe { slice::from_raw_parts(self.data, self.length) }.to_vec();
        self.set_open(open)?;
        Ok(bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made; nothing borrows it any more.
        unsafe { libc::munmap(self.map, self.map_length) };
    }
}

/// Host memory that kernels do not reach while this lives, but for what is lent to them: one that touches it is
/// stopped.
///
/// Whoever withholds memory has mapped it, whole pages for reading and writing, and no thread touches it meanwhile: it
/// would be stopped too.
#[derive(Debug)]
pub struct Withheld {
    ranges: Vec<Range<usize>>,
}

fn protect(range: &Range<usize>, access: c_int) -> Result<(), RunError> {
    // SAFETY: pages of a mapping of the caller's, by the contract of `Withheld`. No contents change; where access is
    // taken away, whoever touches them is stopped.
    let refused =
        unsafe { libc::mprotect(ptr::with_exposed_provenance_mut(range.start), range.len(), access) } != 0;
    if refused { Err(RunError::Protection(range.len())) } else { Ok(()) }
}

const OPEN: c_int = libc::PROT_READ | libc::PROT_WRITE;

impl Withheld {
    /// Takes ranges of addresses away.
    ///
    /// # Errors
    /// The system refuses; then nothing is taken away.
    pub fn new(mut ranges: Vec<Range<usize>>) -> Result<Withheld, RunError> {
        ranges.sort_unstable_by_key(|range| range.start);
        // Neighbours in one call: there may be thousands.
        let mut withheld = Withheld { ranges: Vec::new() };
        for range in ranges {
            match withheld.ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => withheld.ranges.push(range),
            }
        }
        withheld.ranges.iter().try_for_each(|range| protect(range, libc::PROT_NONE))?;
        Ok(withheld)
    }

    /// Lends some of it to what `run` runs.
    ///
    /// # Errors
    /// The system refuses.
    pub fn lend<T>(&self, ranges: &[Range<usize>], run: impl FnOnce() -> T) -> Result<T, RunError> {
        ranges.iter().try_for_each(|range| protect(range, OPEN))?;
        let done = run();
        ranges.iter().try_for_each(|range| protect(range, libc::PROT_NONE))?;
        Ok(done)
    }
}

impl Drop for Withheld {
    fn drop(&mut self) {
        for range in &self.ranges {
            let opened = protect(range, OPEN);
            debug_assert!(opened.is_ok(), "{opened:?}");
        }
    }
}

/// What a kernel gets at an index.
#[derive(Clone, Copy, Debug)]
pub enum Argument<'a> {
    /// A buffer, from the byte at the offset on.
    Buffer(u32, &'a Buffer, usize),
    /// Constants.
    Bytes(u32, &'a [u8]),
    /// Threadgroup memory of this many bytes.
    Threadgroup(u32, usize),
}

/// In which order things happen that the GPU may do in any order.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// 0 runs threads and threadgroups forward, 1 backward, others shuffle with that seed.
    pub order: u32,
    /// Whether a SIMD operation that only some lanes reach is a mistake.
    pub strict: bool,
    /// Whether subnormal floats count as zeros, as on many GPUs.
    pub flush: bool,
    /// Threads of the processor that share the threadgroups.
    pub threads: u32,
}

impl Default for Schedule {
    fn default() -> Self {
        Schedule { order: 0, strict: true, flush: false, threads: 1 }
    }
}

/// What happened in a dispatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Changes from one GPU thread to another.
    pub switches: u64,
    /// SIMD operations, each counted once a SIMD group.
    pub meetings: u64,
    /// Those that only some lanes reached.
    pub diverged: u64,
}

/// Runs one kernel to its end.
///
/// Kernels also reach buffers whose addresses they find in a table: the caller keeps those alive meanwhile.
///
/// # Errors
/// Anything that the shim finds wrong with the dispatch or with the kernel.
pub fn dispatch(
    kernel: &str,
    arguments: &[Argument<'_>],
    threadgroups: [u32; 3],
    threads_per_threadgroup: [u32; 3],
    schedule: Schedule,
) -> Result<Statistics, RunError> {
    let name = CString::new(kernel).map_err(|_| RunError::Name(kernel.to_owned()))?;
    let raw = arguments.iter().map(|argument| raw(kernel, argument)).collect::<Result<Vec<_>, _>>()?;
    let mut message = [0 as c_char; 512];
    let mut statistics = [0u64; 3];
    // SAFETY: every pointer is to memory that lives for this call, with the lengths given; `message` and
    // `statistics` have the sizes that the function writes at most. The kernel reaches the buffers through raw
    // pointers, and `Buffer` gives out no reference to their bytes.
    // That the kernel stays inside its buffers is what tests are for; the page behind each stops it.
    let refused = unsafe {
        msl_dispatch(
            name.as_ptr(),
            raw.as_ptr(),
            raw.len(),
            threadgroups.as_ptr(),
            threads_per_threadgroup.as_ptr(),
            schedule.order,
            u32::from(schedule.strict),
            u32::from(schedule.flush),
            schedule.threads,
            statistics.as_mut_ptr(),
            message.as_mut_ptr(),
            message.len(),
        )
    };
    if refused != 0 {
        // SAFETY: `msl_dispatch` has ended the message with a zero byte.
        let message = unsafe { CStr::from_ptr(message.as_ptr()) };
        return Err(RunError::Kernel(message.to_string_lossy().into_owned()));
    }
    let [switches, meetings, diverged] = statistics;
    Ok(Statistics { switches, meetings, diverged })
}

fn raw(kernel: &str, argument: &Argument<'_>) -> Result<RawArgument, RunError> {
    let past = |index, offset, length| {
        let text = format!("{kernel}: buffer({index}) has {length} bytes, its offset is {offset}");
        RunError::Kernel(text)
    };
    Ok(match *argument {
        Argument::Buffer(index, buffer, offset) => {
            let Some(length) = buffer.length.checked_sub(offset) else {
                return Err(past(index, offset, buffer.length));
            };
            let address = buffer.data.wrapping_add(offset).cast();
            RawArgument { index, kind: 0, address, length: length as u64 }
        }
        Argument::Bytes(index, bytes) => {
            let address = bytes.as_ptr().cast_mut().cast();
            RawArgument { index, kind: 1, address, length: bytes.len() as u64 }
        }
        Argument::Threadgroup(index, length) => {
            RawArgument { index, kind: 2, address: ptr::null_mut(), length: length as u64 }
        }
    })
}
