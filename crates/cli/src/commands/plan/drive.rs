//! How fast the drive delivers experts: random ones, whole, several at a time, past the page cache.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use metaltail_container::Extent;
use metaltail_store::{Direct, ExpertReader, FileReader, PAGE};
use serde::Serialize;

use super::model::Planned;

/// How long the drive is read.
const TIME: Duration = Duration::from_millis(400);

/// What a probe found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DriveProbe {
    /// Rate in 10⁹ bytes a second.
    pub gb_per_second: f64,
    /// Bytes read.
    pub bytes: u64,
    /// Whole experts read.
    pub experts: u64,
    /// Bytes of an expert, the first one's.
    pub expert_bytes: u64,
    /// Experts read at a time.
    pub in_flight: usize,
    /// Time taken.
    pub seconds: f64,
}

impl DriveProbe {
    /// A remark for people.
    pub fn to_words(&self) -> String {
        format!(
            "measured: {} direct reads of {}, {} at a time, {:.1} s",
            self.experts,
            crate::report::bytes(self.expert_bytes),
            self.in_flight,
            self.seconds
        )
    }
}

/// Reads random experts of the model's own files with as many threads as the engine would use.
///
/// # Errors
/// Why there is no figure, as a clause: no files, or a file system without direct reads, where
/// the page cache would be measured instead of the drive.
pub fn probe(planned: &Planned, loaders: usize) -> Result<DriveProbe, String> {
    let checkpoint = planned.checkpoint.as_ref().ok_or("there are no weights yet")?;
    let experts: Vec<&[Extent]> = planned
        .places
        .iter()
        .flat_map(|layer| layer.experts.iter().map(|place| place.runs.as_slice()))
        .collect();
    let first = experts.first().ok_or("the model has no routed experts")?;
    let expert_bytes = first.iter().map(|run| run.len).sum();
    let (reader, _) =
        FileReader::open(checkpoint.files(), Direct::On, 0, None).map_err(|error| error.to_string())?;
    let (bytes, count) = (AtomicU64::new(0), AtomicU64::new(0));
    let start = Instant::now();
    let results: Vec<Result<(), String>> = std::thread::scope(|scope| {
        let work = |thread: u64| {
            let (reader, experts, bytes, count) = (&reader, &experts, &bytes, &count);
            move || read_until(start + TIME, thread, reader, experts, bytes, count)
        };
        let threads: Vec<_> = (0..loaders as u64).map(|thread| scope.spawn(work(thread))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<(), String>>| {
            thread.join().unwrap_or_else(|_| Err("a reading thread failed".to_owned()))
        };
        threads.into_iter().map(join).collect()
    });
    let seconds = start.elapsed().as_secs_f64();
    results.into_iter().collect::<Result<(), String>>()?;
    let bytes = bytes.into_inner();
    Ok(DriveProbe {
        gb_per_second: bytes as f64 / seconds / 1e9,
        bytes,
        experts: count.into_inner(),
        expert_bytes,
        in_flight: loaders,
        seconds,
    })
}

/// One thread: random experts until the time is up, at least one.
fn read_until(
    end: Instant,
    thread: u64,
    reader: &FileReader,
    experts: &[&[Extent]],
    bytes: &AtomicU64,
    count: &AtomicU64,
) -> Result<(), String> {
    let mut buffer = Vec::new();
    let mut state = (thread + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    loop {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        for run in experts[(state % experts.len() as u64) as usize] {
            bytes.fetch_add(read_run(reader, *run, &mut buffer)?, Ordering::Relaxed);
        }
        count.fetch_add(1, Ordering::Relaxed);
        if Instant::now() >= end {
            return Ok(());
        }
    }
}

/// Reads one run with the page-sized padding that direct reads need; returns the bytes delivered.
fn read_run(reader: &FileReader, run: Extent, buffer: &mut Vec<u8>) -> Result<u64, String> {
    let first = run.offset / PAGE * PAGE;
    let len = (run.offset - first + run.len).next_multiple_of(PAGE);
    let len = usize::try_from(len).map_err(|_| "an expert exceeds the address space")?;
    let page = PAGE as usize;
    if buffer.len() < len + page {
        buffer.resize(len + page, 0);
    }
    let start = buffer.as_ptr().align_offset(page);
    let aligned = buffer.get_mut(start..start + len).ok_or("memory cannot be aligned")?;
    let mut done = 0;
    while done < len {
        let got = reader
            .read_at(run.file, first + done as u64, &mut aligned[done..])
            .map_err(|error| format!("reading {} failed: {error}", reader.path(run.file).display()))?;
        done += got;
        // The last page of a file may be short, and what follows it is empty.
        if got == 0 || !done.is_multiple_of(page) {
            break;
        }
    }
    Ok(done as u64)
}
