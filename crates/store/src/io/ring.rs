//! Reads through an io_uring into parts of slots.
//!
//! The kernel writes into memory while this process does something else. A [`Ring`] therefore owns every
//! part that a read was begun for, gives it back only with the read's completion, and when dropped waits for
//! all of them; if it cannot, it leaks them rather than free what the kernel may still write.
//!
//! Slots are not registered as buffers: why is told in `docs/design/store.md`, "Reading".

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use io_uring::{IoUring, Probe, opcode, types};
use metaltail_container::is_out_of_handles;

use crate::arena::SlotPiece;

/// Longest single read in bytes; the kernel itself stops short of 2 GiB.
const LONGEST: usize = 1 << 30;
/// Marks the completion of a wake-up, which no read has.
const WAKE: u64 = u64::MAX;

/// A finished read: its part, what it was for, and the bytes that came.
pub(crate) type Done<T> = (SlotPiece, T, io::Result<usize>);

/// An io_uring with the reads under way in it.
pub(crate) struct Ring<T> {
    ring: IoUring,
    /// Reads under way; a gap is free.
    flights: Vec<Option<(SlotPiece, T)>>,
    /// Gaps in `flights`.
    free: Vec<u32>,
    files: Vec<Option<RawFd>>,
    registered: bool,
    /// Whether the wake-up descriptor is being watched.
    watching: bool,
}

/// Whether this system has an io_uring that reads.
///
/// # Errors
/// Why not, as a clause.
pub(crate) fn available() -> Result<(), String> {
    // As large as those that read, since limits go by size.
    let ring = IoUring::new(64).map_err(|e| refusal(&e))?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(|e| format!("the kernel is too old for it: {e}"))?;
    if probe.is_supported(opcode::Read::CODE) && probe.is_supported(opcode::PollAdd::CODE) {
        Ok(())
    } else {
        Err("the kernel is too old: its io_uring has no plain reads (Linux 5.6 has)".into())
    }
}

/// Why the kernel gave no ring, with what to look at.
fn refusal(e: &io::Error) -> String {
    match e.raw_os_error() {
        Some(libc::ENOSYS) => "the kernel has no io_uring".into(),
        Some(libc::EPERM) => {
            format!(
                "the kernel refuses it ({e}): kernel.io_uring_disabled, or the container's seccomp profile"
            )
        }
        Some(libc::ENOMEM) => format!("the kernel refuses it ({e}): raise the memlock limit (ulimit -l)"),
        _ if is_out_of_handles(e) => {
            format!("the kernel refuses it ({e}): raise the limit of open files (`ulimit -n`)")
        }
        _ => format!("the kernel refuses it ({e})"),
    }
}

impl<T> Ring<T> {
    /// A ring for `depth` reads at a time from `files`, whose numbers reads name; a gap has no file.
    ///
    /// The caller keeps the descriptors open as long as the ring lives.
    ///
    /// # Errors
    /// Why the kernel gave none, as a clause.
    pub(crate) fn new(depth: usize, files: Vec<Option<RawFd>>) -> Result<Ring<T>, String> {
        let depth = depth.clamp(1, 1024) as u32;
        // One entry more, for the wake-up.
        let ring = IoUring::new((depth + 1).next_power_of_two()).map_err(|e| refusal(&e))?;
        let sparse: Vec<RawFd> = files.iter().map(|fd| fd.unwrap_or(-1)).collect();
        // Without registered files (a limit of the system) plain descriptors do the same a little slower.
        let registered = !sparse.is_empty() && ring.submitter().register_files(&sparse).is_ok();
        let flights = (0..depth).map(|_| None).collect();
        Ok(Ring { ring, flights, free: (0..depth).rev().collect(), files, registered, watching: false })
    }

    /// Whether another read may begin.
    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Reads under way.
    pub(crate) fn under_way(&self) -> usize {
        self.flights.len() - self.free.len()
    }

    /// Begins to read from `offset` of a file into `range` of `piece`; a long range is read in part, which
    /// its completion tells. It goes to the kernel with the next [`Ring::wait`].
    ///
    /// # Errors
    /// What was given comes back where there is no room, no such file, or no such range.
    pub(crate) fn read(
        &mut self,
        file: usize,
        offset: u64,
        mut piece: SlotPiece,
        range: Range<usize>,
        tag: T,
    ) -> Result<(), (SlotPiece, T)> {
        let fd = self.files.get(file).copied().flatten();
        let (Some(fd), true) = (fd, range.start <= range.end && range.end <= piece.len()) else {
            return Err((piece, tag));
        };
        let Some(number) = self.free.pop() else {
            return Err((piece, tag));
        };
        let len = range.len().min(LONGEST) as u32;
        let to = piece.as_mut_ptr().wrapping_add(range.start);
        let read = |fd: types::Fd| opcode::Read::new(fd, to, len).offset(offset).build();
        let fixed = |fd: types::Fixed| opcode::Read::new(fd, to, len).offset(offset).build();
        let entry = if self.registered { fixed(types::Fixed(file as u32)) } else { read(types::Fd(fd)) };
        let entry = entry.user_data(u64::from(number));
        // SAFETY: `to..to + len` lies in `piece`, which `flights` owns from here on; it is neither used nor
        // given up before the completion (`wait`, `drop`). The caller keeps the descriptor open.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.free.push(number);
            return Err((piece, tag));
        }
        self.flights[number as usize] = Some((piece, tag));
        Ok(())
    }

    /// Makes the next [`Ring::wait`] return when `fd` becomes readable, once.
    pub(crate) fn watch(&mut self, fd: BorrowedFd<'_>) {
        if !self.watching {
            let entry = opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), libc::POLLIN as u32).build();
            // SAFETY: a poll has no memory of ours. The ring has one entry more than reads for it.
            self.watching = unsafe { self.ring.submission().push(&entry.user_data(WAKE)) }.is_ok();
        }
    }

    /// Sends begun reads to the kernel and waits until something ends; finished reads go to `done`.
    ///
    /// # Errors
    /// The ring is broken. Reads under way are then not to be waited for; see [`Ring::abandon`].
    pub(crate) fn wait(&mut self, done: &mut Vec<Done<T>>) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // The kernel is short of something, or wants completions taken first.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                    if !self.ring.completion().is_empty() {
                        break;
                    }
                    std::thread::yield_now();
                }
                Err(e) => return Err(e),
            }
        }
        self.reap(done);
        Ok(())
    }

    /// Gives up on reads that cannot be waited for; what they were for. The kernel may still write: the parts,
    /// and with them the arena, stay for ever.
    pub(crate) fn abandon(&mut self) -> Vec<T> {
        let leak = |(piece, tag): (SlotPiece, T)| {
            std::mem::forget(piece);
            tag
        };
        let tags: Vec<T> = self.flights.iter_mut().filter_map(Option::take).map(leak).collect();
        self.free = (0..self.flights.len() as u32).collect();
        tags
    }

    fn reap(&mut self, done: &mut Vec<Done<T>>) {
        for entry in self.ring.completion() {
            if entry.user_data() == WAKE {
                self.watching = false;
                continue;
            }
            let number = entry.user_data() as u32;
            let Some((piece, tag)) = self.flights.get_mut(number as usize).and_then(Option::take) else {
                continue;
            };
            self.free.push(number);
            let n = entry.result();
            let result = usize::try_from(n).map_err(|_| io::Error::from_raw_os_error(-n));
            done.push((piece, tag, result));
        }
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.under_way() > 0 {
            if self.wait(&mut done).is_err() {
                self.abandon();
                return;
            }
            done.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Arena;
    use std::os::fd::AsFd;
    use std::sync::Arc;

    fn piece(arena: &Arc<Arena>, slot: u32) -> SlotPiece {
        SlotPiece::whole(arena.begin_write(slot).unwrap())
    }

    /// A ring over one file of 10 000 bytes, and the file.
    fn ring(depth: usize) -> Option<(Ring<u32>, std::fs::File)> {
        if let Err(why) = available() {
            eprintln!("SKIPPED: no io_uring: {why}");
            return None;
        }
        let bytes: Vec<u8> = (0..10_000u32).map(|i| (i / 7) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &bytes).unwrap();
        Some((Ring::new(depth, vec![Some(file.as_raw_fd()), None]).unwrap(), file))
    }

    #[test]
    fn reads_arrive_whole_short_at_the_end_and_with_the_systems_error() {
        let Some((mut ring, _file)) = ring(4) else { return };
        let arena = Arc::new(Arena::new(&[(8192, 3)]).unwrap());
        ring.read(0, 7000, piece(&arena, 0), 1000..3000, 1).ok().unwrap();
        ring.read(0, 9900, piece(&arena, 1), 0..8192, 2).ok().unwrap();
        ring.read(0, u64::MAX - 5, piece(&arena, 2), 0..8, 3).ok().unwrap();
        let mut done = Vec::new();
        while ring.under_way() > 0 {
            ring.wait(&mut done).unwrap();
        }
        done.sort_by_key(|&(_, tag, _)| tag);
        let results: Vec<_> = done.iter().map(|(_, _, r)| r.as_ref().map_err(|e| e.raw_os_error())).collect();
        assert_eq!(results, [Ok(&2000), Ok(&100), Err(Some(libc::EINVAL))]);
        let bytes = &done[0].0;
        assert!((0..2000).all(|i| bytes[1000 + i] == ((7000 + i) / 7) as u8) && bytes[999] == 0);
    }

    #[test]
    fn what_cannot_begin_comes_back() {
        let Some((mut ring, _file)) = ring(1) else { return };
        let arena = Arc::new(Arena::new(&[(8192, 2)]).unwrap());
        let back = ring.read(1, 0, piece(&arena, 0), 0..8, 7).err().unwrap();
        let back = ring.read(0, 0, back.0, 0..8193, 8).err().unwrap();
        ring.read(0, 0, back.0, 0..8192, 9).ok().unwrap();
        assert_eq!(ring.read(0, 0, piece(&arena, 1), 0..8, 10).err().unwrap().1, 10, "no room");
        assert_eq!(ring.under_way(), 1);
    }

    #[test]
    fn a_dropped_ring_gives_its_slots_up_only_after_the_reads() {
        let Some((mut ring, _file)) = ring(2) else { return };
        let arena = Arc::new(Arena::new(&[(8192, 1)]).unwrap());
        let (end, other_end) = std::io::pipe().unwrap();
        ring.files[1] = Some(end.as_raw_fd());
        ring.registered = false;
        // A pipe keeps its reader waiting until something is written.
        ring.read(1, 0, piece(&arena, 0), 0..3, 1).ok().unwrap();
        let waiting = std::thread::spawn(move || drop(ring));
        assert!(arena.begin_write(0).is_none(), "the kernel may still write");
        rustix::io::write(&other_end, b"abc").unwrap();
        waiting.join().unwrap();
        assert_eq!(&arena.begin_write(0).unwrap()[..3], b"abc");
    }

    #[test]
    fn reads_that_cannot_be_waited_for_keep_their_memory_for_ever() {
        let Some((mut ring, _file)) = ring(2) else { return };
        let arena = Arc::new(Arena::new(&[(8192, 1)]).unwrap());
        let (end, _other_end) = std::io::pipe().unwrap();
        ring.files[1] = Some(end.as_raw_fd());
        ring.registered = false;
        ring.read(1, 0, piece(&arena, 0), 0..3, 7).ok().unwrap();
        ring.ring.submit().unwrap();
        assert_eq!(ring.abandon(), [7]);
        assert_eq!(ring.under_way(), 0);
        drop(ring);
        assert!(arena.begin_write(0).is_none());
    }

    #[test]
    fn a_wake_up_ends_the_wait_without_a_read() {
        let Some((mut ring, _file)) = ring(1) else { return };
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        ring.watch(bell.as_fd());
        rustix::io::write(&bell, &1u64.to_ne_bytes()).unwrap();
        let mut done = Vec::new();
        ring.wait(&mut done).unwrap();
        assert!(done.is_empty() && !ring.watching);
    }
}
