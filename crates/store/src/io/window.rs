//! One run, or a page-aligned part of one: which reads bring it, and what short and failed ones mean.

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use metaltail_container::Extent;

use super::ExpertReader;
use crate::arena::PAGE;

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

/// The reads that bring one run into its pages, whoever carries them out.
///
/// The run's first byte comes to lie at `pages[run.offset % 4096]`. Buffered, exactly the run is read;
/// direct, from the granule that it begins in to the end of its last one. A file that ends inside the
/// rounding is fine; one that ends inside the run is a fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    align: usize,
    /// Offset in the file of the first granule.
    start: u64,
    /// Bytes of that granule before the run.
    lead: usize,
    /// Place of the granule in the pages.
    displacement: usize,
    /// Bytes from the first granule to the run's end.
    need: usize,
    /// `need` in whole granules.
    len: usize,
    /// Bytes that arrived so far.
    good: usize,
}

impl Window {
    /// The window of a run for reads that keep `align`, 1 or 4096.
    pub(crate) fn new(run: Extent, align: u64) -> Window {
        let lead = run.offset % align;
        let need = (lead + run.len) as usize;
        Window {
            align: align as usize,
            start: run.offset - lead,
            lead: lead as usize,
            displacement: (run.offset % PAGE - lead) as usize,
            need,
            len: need.next_multiple_of(align as usize),
            good: 0,
        }
    }

    /// The next read: an offset in the file and a range of the pages; `None` when the run is there.
    pub(crate) fn next(&self) -> Option<(u64, Range<usize>)> {
        let from = self.from();
        let pages = self.displacement + from..self.displacement + self.len;
        (self.good < self.need).then(|| (self.start + from as u64, pages))
    }

    /// Continues from the last whole granule.
    fn from(&self) -> usize {
        self.good - self.good % self.align
    }

    /// Takes note of a read of [`Window::next`] that brought `n` bytes.
    ///
    /// # Errors
    /// No progress: the file ends here.
    pub(crate) fn advance(&mut self, n: usize) -> Result<(), RunFault> {
        let end = self.from().saturating_add(n).min(self.len);
        if end <= self.good {
            return Err(self.fault(None));
        }
        self.good = end;
        Ok(())
    }

    /// The fault that the run did not arrive for this reason.
    pub(crate) fn fault(&self, source: Option<io::Error>) -> RunFault {
        RunFault { got: self.good.saturating_sub(self.lead) as u64, source }
    }
}

/// Whether a read that failed so is to be repeated: interrupted, or put off by a kernel that is short of
/// something, which `tries` bounds.
pub(crate) fn retried(e: &io::Error, tries: &mut u32) -> bool {
    const MOST: u32 = 1000;
    match e.kind() {
        io::ErrorKind::Interrupted => true,
        io::ErrorKind::WouldBlock if *tries < MOST => {
            *tries += 1;
            true
        }
        _ => false,
    }
}

/// A run cut into parts of at most `bytes`, rounded down to whole pages and at least one. All cuts lie at
/// pages of the file, so that the parts are read into pages of their own.
pub(crate) fn cut(run: Extent, bytes: u64) -> impl Iterator<Item = Extent> {
    let step = (bytes / PAGE * PAGE).max(PAGE);
    let end = run.offset.saturating_add(run.len);
    let mut from = run.offset;
    std::iter::from_fn(move || {
        let next = (from / PAGE * PAGE).saturating_add(step).min(end);
        let part = Extent { file: run.file, offset: from, len: next - from };
        from = next;
        (part.len > 0).then_some(part)
    })
}

/// Reads `run` into `pages`, which begin on a page and span the run rounded out to pages, as [`Window`]
/// says. Interrupted calls are repeated and short ones continued.
pub(crate) fn read_run(
    reader: &dyn ExpertReader,
    run: Extent,
    pages: &mut [u8],
    traffic: &mut Traffic,
) -> Result<(), RunFault> {
    let mut window = Window::new(run, reader.alignment());
    let mut tries = 0;
    while let Some((offset, range)) = window.next() {
        let began = Instant::now();
        let result = reader.read_at(run.file, offset, &mut pages[range]);
        traffic.service += began.elapsed();
        traffic.calls += 1;
        match result {
            Ok(n) => {
                window.advance(n)?;
                traffic.bytes += n as u64;
            }
            Err(e) if retried(&e, &mut tries) => {}
            Err(e) => return Err(window.fault(Some(e))),
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
        /// Parts follow one another, lie in pages of their own, and are no longer than asked.
        #[test]
        fn parts_are_the_run(offset in 0u64..20_000, len in 1u64..60_000, bytes in 0u64..30_000) {
            let whole = run(offset, len);
            let parts: Vec<Extent> = cut(whole, bytes).collect();
            let mut at = offset;
            for part in &parts {
                prop_assert_eq!(part.offset, at);
                prop_assert!(at == offset || at % PAGE == 0);
                prop_assert!(part.len > 0 && part.len <= bytes.max(PAGE));
                at += part.len;
            }
            prop_assert_eq!(at, offset + len);
        }

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
}
