//! How fast a drive delivers experts: random reads of whole runs, several at a time, in a given way.
//!
//! Everything is bounded beforehand: the reads are drawn before the clock starts, the memory is that of the
//! reads under way, and time and bytes have limits. A measurement through the page cache first evicts what it
//! is about to read, and tells how much of it stayed.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use metaltail_container::Extent;

use crate::arena::{Arena, PAGE, SlotPiece};
use crate::error::StoreError;
use crate::geometry::LayerExperts;
use crate::io::{ExpertReader, FileReader, RunFault, Traffic, read_run};

pub(crate) mod evict;
#[cfg(target_os = "linux")]
mod uring;

pub use evict::Eviction;

/// What is read: runs in numbered files.
#[derive(Clone, Debug, Default)]
pub struct Target {
    /// The files.
    pub files: Vec<PathBuf>,
    /// The runs; each is one read. [`Extent::file`] counts in `files`.
    pub runs: Vec<Extent>,
}

impl Target {
    /// Every run of every expert of a model: the engine's own pattern.
    pub fn experts(files: &[PathBuf], layers: &[LayerExperts]) -> Target {
        let runs = layers.iter().flat_map(|l| &l.experts).flat_map(|place| &place.runs).copied().collect();
        Target { files: files.to_vec(), runs }
    }

    /// The same bytes in reads of at most `bytes`, cut at pages of the file.
    pub fn in_pieces(&self, bytes: u64) -> Target {
        let runs = self.runs.iter().flat_map(|&run| crate::io::cut(run, bytes)).collect();
        Target { files: self.files.clone(), runs }
    }
}

/// A way to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Whether reads bypass the page cache.
    pub direct: bool,
    /// Whether an io_uring carries them out, and not threads.
    pub uring: bool,
    /// Reads at a time, at least 1.
    pub depth: usize,
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let how = if self.direct { "direct" } else { "buffered" };
        let by = if self.uring { "io_uring" } else { "threads" };
        write!(f, "{how}, {by}, depth {}", self.depth)
    }
}

/// When a measurement ends, whichever comes first. A read under way is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest time.
    pub time: Duration,
    /// Most bytes.
    pub bytes: u64,
    /// Draws the reads: another seed, other runs.
    pub seed: u64,
}

/// Time of single reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// Half of the reads took no longer.
    pub p50: Duration,
    /// Nine of ten took no longer.
    pub p90: Duration,
    /// Ninety-nine of a hundred took no longer.
    pub p99: Duration,
    /// The longest.
    pub max: Duration,
}

/// What a measurement found.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// How it was read.
    pub way: Way,
    /// Bytes that arrived, alignment padding of direct reads included.
    pub bytes: u64,
    /// Runs read.
    pub reads: u64,
    /// Wall time from the first read's beginning to the last one's end.
    pub time: Duration,
    /// Time of single reads.
    pub latency: Latency,
    /// For reads through the page cache: what was evicted before.
    pub evicted: Option<Eviction>,
}

impl Measured {
    /// Bytes a second; 0 where nothing was read.
    pub fn bytes_per_second(&self) -> f64 {
        let seconds = self.time.as_secs_f64();
        if seconds > 0.0 { self.bytes as f64 / seconds } else { 0.0 }
    }
}

/// A measurement that cannot be made.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// There is nothing to read.
    #[error("there is nothing to read: no runs, or all of them are empty")]
    Nothing,
    /// A depth of zero.
    #[error("reads at a time must be at least 1")]
    Depth,
    /// A run names a file that is not there.
    #[error("a run names file {file} of {files}")]
    NoSuchFile {
        /// The file named.
        file: u32,
        /// Files there are.
        files: usize,
    },
    /// Files do not open, or not for direct reads; or no memory.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// This system has no io_uring.
    #[error("io_uring does not work here: {0}")]
    Uring(String),
    /// A read failed.
    #[error("reading {}: at offset {offset} wanted {wanted} bytes, got {got}: {reason}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// First byte wanted.
        offset: u64,
        /// Bytes wanted from there.
        wanted: u64,
        /// Bytes of these that arrived.
        got: u64,
        /// What the operating system said, or that the file ends.
        reason: String,
    },
}

/// Whether an io_uring works on this system.
///
/// # Errors
/// Why not, as a clause.
pub fn uring_works() -> Result<(), String> {
    #[cfg(target_os = "linux")]
    return crate::io::ring::available();
    #[cfg(not(target_os = "linux"))]
    Err("only Linux has it".into())
}

/// Reads random runs of `target` in one way until a limit is reached, at least one for each that is read at
/// a time. No run is read twice through the page cache; direct reads begin anew when all were read.
///
/// # Errors
/// See [`ProbeError`]; the first failed read ends the measurement.
pub fn measure(target: &Target, way: Way, limits: Limits) -> Result<Measured, ProbeError> {
    if way.depth == 0 {
        return Err(ProbeError::Depth);
    }
    let files = target.files.len();
    if let Some(run) = target.runs.iter().find(|run| run.file as usize >= files) {
        return Err(ProbeError::NoSuchFile { file: run.file, files });
    }
    let plan = Plan::draw(target, way, limits)?;
    let evicted = (!way.direct).then(|| evict::evict(target, &plan.runs));
    let reader = FileReader::open(&target.files, way.direct)?;
    let pieces = plan.buffers(way.depth)?;
    let began = Instant::now();
    let ends = began + limits.time;
    let sample = if way.uring {
        by_uring(&reader, &plan, pieces, ends)?
    } else {
        by_threads(&reader, &plan, pieces, ends)?
    };
    let time = began.elapsed();
    let (reads, bytes) = (sample.times.len() as u64, sample.bytes);
    Ok(Measured { way, bytes, reads, time, latency: latency(sample.times), evicted })
}

#[cfg(not(target_os = "linux"))]
fn by_uring(_: &FileReader, _: &Plan, _: Vec<SlotPiece>, _: Instant) -> Result<Sample, ProbeError> {
    uring_works().map_err(ProbeError::Uring).map(|()| Sample::default())
}

#[cfg(target_os = "linux")]
use uring::by_uring;

/// The reads to come, in order.
struct Plan {
    runs: Vec<Extent>,
    /// Bytes of the whole pages that the longest one touches.
    span: usize,
    /// How many may begin in all.
    most: usize,
    next: AtomicUsize,
    depth: usize,
}

impl Plan {
    fn draw(target: &Target, way: Way, limits: Limits) -> Result<Plan, ProbeError> {
        let mut runs: Vec<Extent> = target.runs.iter().copied().filter(|run| run.len > 0).collect();
        shuffle(&mut runs, limits.seed);
        let mean = runs.iter().fold(0u64, |sum, run| sum.saturating_add(run.len)) / runs.len().max(1) as u64;
        let wanted = usize::try_from(limits.bytes / mean.max(1)).unwrap_or(usize::MAX).max(way.depth);
        let most = if way.direct { wanted } else { wanted.min(runs.len()) };
        runs.truncate(wanted);
        let span = |run: &Extent| (run.offset % PAGE).checked_add(run.len)?.checked_next_multiple_of(PAGE);
        let longest = runs.iter().map(span).max().ok_or(ProbeError::Nothing)?;
        let too_long = || StoreError::Config("a run exceeds the address space".into());
        let span = longest.and_then(|bytes| usize::try_from(bytes).ok()).ok_or_else(too_long)?;
        Ok(Plan { runs, span, most, next: AtomicUsize::new(0), depth: way.depth })
    }

    /// Memory for each read at a time.
    fn buffers(&self, depth: usize) -> Result<Vec<SlotPiece>, StoreError> {
        let arena = Arc::new(Arena::new(&[(self.span, depth)])?);
        let whole = |slot: u32| {
            let write = arena.begin_write(slot);
            let mut write = write.ok_or_else(|| StoreError::Internal("a new slot is in use".into()))?;
            // The engine's slots have their pages from an earlier expert: the system's zeroing of new ones
            // is not the drive's time.
            write.fill(1);
            Ok(SlotPiece::whole(write))
        };
        let depth =
            u32::try_from(depth).map_err(|_| StoreError::Config("too many reads at a time".into()))?;
        (0..depth).map(whole).collect()
    }

    /// The next run; `None` when a limit is reached.
    fn take(&self, ends: Instant) -> Option<Extent> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let over = number >= self.most || (number >= self.depth && Instant::now() >= ends);
        (!over).then(|| self.runs[number % self.runs.len()])
    }
}

/// Fisher–Yates by xorshift: good enough to defeat read-ahead.
fn shuffle(runs: &mut [Extent], seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for at in (1..runs.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        runs.swap(at, (state % (at as u64 + 1)) as usize);
    }
}

/// What single reads took and brought.
#[derive(Default)]
struct Sample {
    times: Vec<Duration>,
    bytes: u64,
}

fn by_threads(
    reader: &FileReader,
    plan: &Plan,
    pieces: Vec<SlotPiece>,
    ends: Instant,
) -> Result<Sample, ProbeError> {
    let work = |mut pages: SlotPiece| {
        let mut sample = Sample::default();
        while let Some(run) = plan.take(ends) {
            let (began, mut traffic) = (Instant::now(), Traffic::default());
            read_run(reader, run, &mut pages, &mut traffic).map_err(|fault| failed(reader, run, &fault))?;
            sample.times.push(began.elapsed());
            sample.bytes += traffic.bytes;
        }
        Ok(sample)
    };
    let results: Vec<Result<Sample, ProbeError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = pieces.into_iter().map(|pages| scope.spawn(|| work(pages))).collect();
        let lost = || StoreError::Internal("a reading thread panicked".into()).into();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(lost()))).collect()
    });
    let mut whole = Sample::default();
    for part in results {
        let part = part?;
        whole.times.extend(part.times);
        whole.bytes += part.bytes;
    }
    Ok(whole)
}

fn failed(reader: &FileReader, run: Extent, fault: &RunFault) -> ProbeError {
    let reason = fault.source.as_ref().map_or_else(|| "the file ends".to_owned(), ToString::to_string);
    let (file, offset, wanted, got) = (reader.path(run.file), run.offset, run.len, fault.got);
    ProbeError::Read { file, offset, wanted, got, reason }
}

fn latency(mut times: Vec<Duration>) -> Latency {
    times.sort_unstable();
    let at = |share: f64| {
        let rank = (times.len() as f64 * share).ceil() as usize;
        times.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    };
    Latency { p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(dir: &std::path::Path, files: u32, experts: u64, len: u64) -> Target {
        let mut target = Target::default();
        for file in 0..files {
            let path = dir.join(format!("experts-{file}"));
            std::fs::write(&path, vec![7; (100 + experts * len) as usize]).unwrap();
            target.files.push(path);
            target.runs.extend((0..experts).map(|e| Extent { file, offset: 100 + e * len, len }));
        }
        target
    }

    fn limits(bytes: u64) -> Limits {
        Limits { time: Duration::from_secs(60), bytes, seed: 3 }
    }

    fn ways() -> Vec<Way> {
        let all = |direct| [false, true].map(|uring| Way { direct, uring, depth: 3 });
        [all(false), all(true)].concat()
    }

    #[test]
    fn every_way_reads_until_the_bytes_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let target = model(dir.path(), 2, 6, 9000);
        for way in ways() {
            let measured = match measure(&target, way, limits(5 * 9000)) {
                Ok(measured) => measured,
                Err(ProbeError::Uring(_) | ProbeError::Store(StoreError::Direct { .. })) => {
                    eprintln!("SKIPPED: {way}");
                    continue;
                }
                Err(e) => panic!("{way}: {e}"),
            };
            assert_eq!(measured.reads, 5, "{way}");
            let exact = 5 * 9000;
            assert!(if way.direct { measured.bytes > exact } else { measured.bytes == exact }, "{way}");
            assert!(measured.bytes_per_second() > 0.0);
            let Latency { p50, p90, p99, max } = measured.latency;
            assert!(p50 <= p90 && p90 <= p99 && p99 <= max && max <= measured.time, "{way}");
            assert_eq!(measured.evicted.is_some(), !way.direct);
        }
    }

    #[test]
    fn nothing_is_read_twice_through_the_page_cache() {
        let dir = tempfile::tempdir().unwrap();
        let target = model(dir.path(), 1, 4, 5000);
        let way = Way { direct: false, uring: false, depth: 2 };
        assert_eq!(measure(&target, way, limits(u64::MAX)).unwrap().reads, 4);
        let brief = Limits { time: Duration::ZERO, ..limits(u64::MAX) };
        assert_eq!(measure(&target, way, brief).unwrap().reads, 2, "one for each that is read at a time");
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let target = model(dir.path(), 1, 2, 5000);
        let way = Way { direct: false, uring: false, depth: 1 };
        let refusal = |target: &Target, way| measure(target, way, limits(1 << 20)).unwrap_err();
        assert!(matches!(refusal(&Target::default(), way), ProbeError::Nothing));
        assert!(matches!(refusal(&target, Way { depth: 0, ..way }), ProbeError::Depth));
        let mut cut = target.clone();
        cut.runs[0].len = 50_000;
        cut.runs.truncate(1);
        let text = refusal(&cut, way).to_string();
        assert!(text.contains("experts-0") && text.contains("wanted 50000 bytes, got 10000"), "{text}");
        if uring_works().is_ok() {
            assert_eq!(refusal(&cut, Way { uring: true, ..way }).to_string(), text);
        }
        let mut elsewhere = target;
        elsewhere.runs[0].file = 1;
        assert!(matches!(refusal(&elsewhere, way), ProbeError::NoSuchFile { file: 1, files: 1 }));
    }

    #[test]
    fn pieces_are_the_same_bytes() {
        let run = Extent { file: 0, offset: 100, len: 50_000 };
        let target = Target { files: Vec::new(), runs: vec![run] };
        let pieces = target.in_pieces(16_384).runs;
        assert_eq!(pieces.iter().map(|p| p.len).sum::<u64>(), 50_000);
        assert!(pieces.len() == 4 && pieces[1..].iter().all(|p| p.offset % 4096 == 0));
    }

    #[test]
    fn percentiles_are_those_of_the_sorted_times() {
        let times = (1..=100).rev().map(Duration::from_millis).collect();
        let Latency { p50, p90, p99, max } = latency(times);
        assert_eq!([p50, p90, p99, max].map(|d| d.as_millis()), [50, 90, 99, 100]);
        assert_eq!(latency(Vec::new()), Latency::default());
    }
}
