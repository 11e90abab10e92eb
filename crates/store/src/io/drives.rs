//! The drives that hold a model's files, and which of them reads a part.
//!
//! A file may lie on several drives. A part goes to the drive that is expected to finish it first: bytes
//! under way there, itself included, over the drive's measured rate. So a slow drive gets what it can
//! carry without anyone waiting for it, and an equal one half.

use std::path::PathBuf;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use metaltail_container::Extent;

use super::{ExpertReader, RunFault};
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// Most drives of a store: sets of them are words of 64 bits.
pub(crate) const MOST: usize = 64;

/// Weight of the newest rate in the moving average.
const NEWEST: f64 = 0.2;
/// What a passed-over drive's rate gains each time, up to what it was at opening (where it was not measured
/// then, up to the fastest): one that was slow for a while is tried again.
const FORGIVING: f64 = 1.002;
/// Failures in succession after which a file's copy is set aside, while another is left.
const COPY_PATIENCE: u32 = 3;
/// The same for a whole drive, over several files: failures of copies that are set aside already count no more.
const DRIVE_PATIENCE: u32 = 2 * COPY_PATIENCE;

/// What one drive carried since the store was opened.
#[derive(Clone, Debug, PartialEq)]
pub struct DriveFigures {
    /// Its directory, or where one file lies.
    pub path: PathBuf,
    /// Bytes that it delivered.
    pub bytes: u64,
    /// Read calls.
    pub reads: u64,
    /// Its rate now, in bytes a second; `None` until something was read.
    pub bytes_per_second: Option<f64>,
    /// Whether nothing is read from it any more while another drive has the file.
    pub set_aside: bool,
}

struct Drive {
    name: PathBuf,
    reader: Box<dyn ExpertReader>,
    bytes: AtomicU64,
    reads: AtomicU64,
}

/// State of a drive, for the choice.
#[derive(Default)]
struct Pace {
    /// Bytes of parts under way.
    outstanding: u64,
    /// Bytes a second; 0 until measured.
    rate: f64,
    /// The rate at opening, where it was measured.
    opening: Option<f64>,
    /// Failures since the last success.
    failures: u32,
    set_aside: bool,
    /// Failures since the last success of each file, and whether its copy is set aside.
    copies: Vec<(u32, bool)>,
}

/// The right to read a part from a drive; to be given back by [`Drives::settle`].
#[derive(Debug)]
pub(crate) struct Turn {
    /// The drive.
    pub(crate) drive: usize,
    file: u32,
    len: u64,
    /// Bytes under way on the drive when it began, its own included.
    ahead: u64,
    began: Instant,
}

#[cfg(target_os = "linux")]
impl Turn {
    /// When it began.
    pub(crate) fn began(&self) -> Instant {
        self.began
    }
}

/// All drives, at least one.
pub(crate) struct Drives {
    drives: Vec<Drive>,
    /// Taken for a moment, without any other lock inside.
    paces: Mutex<Vec<Pace>>,
}

impl Drives {
    /// `drives` are named readers that number the same files; `rates` their bytes a second, where measured.
    pub(crate) fn new(drives: Vec<(PathBuf, Box<dyn ExpertReader>)>, rates: &[Option<f64>]) -> Drives {
        let pace = |(at, (_, reader)): (usize, &(PathBuf, Box<dyn ExpertReader>))| {
            let opening = rates.get(at).copied().flatten();
            Pace {
                rate: opening.unwrap_or(0.0),
                opening,
                copies: vec![(0, false); reader.files()],
                ..Pace::default()
            }
        };
        let paces = Mutex::new(drives.iter().enumerate().map(pace).collect());
        let drive =
            |(name, reader)| Drive { name, reader, bytes: AtomicU64::new(0), reads: AtomicU64::new(0) };
        Drives { drives: drives.into_iter().map(drive).collect(), paces }
    }

    /// Number of drives.
    pub(crate) fn len(&self) -> usize {
        self.drives.len()
    }

    /// A drive's reader.
    pub(crate) fn reader(&self, drive: usize) -> &dyn ExpertReader {
        &*self.drives[drive].reader
    }

    /// Whether a file lies on more than one drive.
    pub(crate) fn has_copies(&self, file: u32) -> bool {
        self.drives.iter().filter(|drive| drive.reader.has(file)).nth(1).is_some()
    }

    /// Path of a file on the first drive that has it.
    pub(crate) fn path(&self, file: u32) -> PathBuf {
        let has = self.drives.iter().find(|drive| drive.reader.has(file));
        has.map_or_else(PathBuf::new, |drive| drive.reader.path(file))
    }

    fn paces(&self) -> MutexGuard<'_, Vec<Pace>> {
        // Plain numbers: usable after a panic elsewhere.
        self.paces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The drive that is expected to finish `part` first among those that have its file and are not in
    /// `tried`; what was set aside comes last. `None` when none is left.
    pub(crate) fn choose(&self, part: Extent, tried: u64) -> Option<Turn> {
        let mut paces = self.paces();
        let file = part.file;
        let untried = |&drive: &usize| tried & (1 << drive) == 0 && self.reader(drive).has(file);
        let fastest = paces.iter().map(|p| p.rate).fold(0.0, f64::max);
        let finish = |pace: &Pace| {
            // A drive that was never measured gets one part at once, to be measured by, and is taken to be
            // as fast as the fastest meanwhile.
            if pace.rate == 0.0 && pace.outstanding == 0 {
                return 0.0;
            }
            let rate = if pace.rate > 0.0 { pace.rate } else { fastest.max(1.0) };
            (pace.outstanding + part.len) as f64 / rate
        };
        let rank = |&drive: &usize| (paces[drive].is_aside(file), finish(&paces[drive]));
        let better = |a: &usize, b: &usize| {
            let (a, b) = (rank(a), rank(b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        };
        let drive = (0..self.drives.len()).filter(untried).min_by(better)?;
        for (other, pace) in paces.iter_mut().enumerate() {
            let most = pace.opening.unwrap_or(fastest);
            if other != drive && pace.rate < most {
                pace.rate = (pace.rate * FORGIVING).min(most);
            }
        }
        paces[drive].outstanding += part.len;
        let ahead = paces[drive].outstanding;
        Some(Turn { drive, file, len: part.len, ahead, began: Instant::now() })
    }

    /// Ends a turn. What the user should read comes back: a copy or a drive that is set aside.
    pub(crate) fn settle(
        &self,
        turn: &Turn,
        bytes: u64,
        calls: u32,
        fault: Option<&RunFault>,
    ) -> Option<String> {
        self.settle_after(turn, turn.began.elapsed(), bytes, calls, fault)
    }

    fn settle_after(
        &self,
        turn: &Turn,
        took: Duration,
        bytes: u64,
        calls: u32,
        fault: Option<&RunFault>,
    ) -> Option<String> {
        let drive = &self.drives[turn.drive];
        drive.bytes.fetch_add(bytes, Ordering::Relaxed);
        drive.reads.fetch_add(u64::from(calls), Ordering::Relaxed);
        let mut paces = self.paces();
        let pace = &mut paces[turn.drive];
        pace.outstanding = pace.outstanding.saturating_sub(turn.len);
        let Some(fault) = fault else {
            pace.went_well(turn, took);
            return None;
        };
        let aside = self.after_failure(&mut paces, turn);
        drop(paces);
        let what = fault.source.as_ref().map_or_else(|| "the file ends early".into(), ToString::to_string);
        let path = drive.reader.path(turn.file);
        aside.map(|whole_drive| match whole_drive {
            true => format!(
                "the drive of {} failed {DRIVE_PATIENCE} times in succession, last at {} ({what}): it is set aside, and other drives read what it holds",
                drive.name.display(),
                path.display(),
            ),
            false => format!(
                "{} failed {COPY_PATIENCE} times in succession ({what}): it is set aside, and copies on other drives are read",
                path.display()
            ),
        })
    }

    /// Counts a failure; whether a copy (false) or a whole drive (true) is set aside for it.
    fn after_failure(&self, paces: &mut [Pace], turn: &Turn) -> Option<bool> {
        let (at, file) = (turn.drive, turn.file);
        let others = |paces: &[Pace], file| {
            (0..paces.len()).any(|o| o != at && self.reader(o).has(file) && !paces[o].is_aside(file))
        };
        let another = others(paces, file);
        let pace = &mut paces[at];
        let copy = pace.copies.get_mut(file as usize).filter(|copy| !copy.1)?;
        copy.0 += 1;
        pace.failures += 1;
        if !another || pace.set_aside {
            return None;
        }
        if pace.failures >= DRIVE_PATIENCE {
            pace.set_aside = true;
            return Some(true);
        }
        copy.1 = copy.0 >= COPY_PATIENCE;
        copy.1.then_some(false)
    }

    /// Reads nothing from a file's copy any more while there is another.
    pub(crate) fn set_aside(&self, drive: usize, file: u32) {
        if let Some(copy) = self.paces()[drive].copies.get_mut(file as usize) {
            copy.1 = true;
        }
    }

    /// What every drive carried so far.
    pub(crate) fn figures(&self) -> Vec<DriveFigures> {
        let paces = self.paces();
        let figures = |(drive, pace): (&Drive, &Pace)| DriveFigures {
            path: drive.name.clone(),
            bytes: drive.bytes.load(Ordering::Relaxed),
            reads: drive.reads.load(Ordering::Relaxed),
            bytes_per_second: (pace.rate > 0.0).then_some(pace.rate),
            set_aside: pace.set_aside,
        };
        self.drives.iter().zip(paces.iter()).map(figures).collect()
    }
}

impl Pace {
    fn is_aside(&self, file: u32) -> bool {
        self.set_aside || self.copies.get(file as usize).is_some_and(|copy| copy.1)
    }

    /// The bytes that were under way when a turn began left in the time that it took.
    fn went_well(&mut self, turn: &Turn, took: Duration) {
        self.failures = 0;
        if let Some(copy) = self.copies.get_mut(turn.file as usize) {
            copy.0 = 0;
        }
        let sample = turn.ahead as f64 / took.as_secs_f64().max(1e-9);
        self.rate = if self.rate > 0.0 { self.rate + NEWEST * (sample - self.rate) } else { sample };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::MemoryFiles;
    use std::collections::BinaryHeap;

    const PART: u64 = 1 << 20;

    fn drives(rates: &[Option<f64>]) -> Drives {
        let drive = |n: usize| {
            let reader: Box<dyn ExpertReader> = Box::new(MemoryFiles::new(vec![vec![0; 16]; 2]));
            (PathBuf::from(format!("drive-{n}")), reader)
        };
        Drives::new((0..rates.len()).map(drive).collect(), rates)
    }

    fn part(file: u32) -> Extent {
        Extent { file, offset: 0, len: PART }
    }

    /// Carries `parts` out, `depth` at a time, on drives that do one after another at `speeds` in bytes a
    /// second; no clock but the simulated one. Returns each drive's bytes and the time of the last end.
    fn simulate(drives: &Drives, speeds: &[f64], parts: usize, depth: usize) -> (Vec<u64>, f64) {
        // Ends, soonest first, in nanoseconds.
        let mut ends: BinaryHeap<std::cmp::Reverse<(u64, usize)>> = BinaryHeap::new();
        let mut turns: Vec<Option<(Turn, f64)>> = Vec::new();
        let mut free_at = vec![0.0f64; speeds.len()];
        let (mut now, mut begun) = (0.0f64, 0);
        loop {
            while begun < parts && ends.len() < depth {
                let turn = drives.choose(part(0), 0).unwrap();
                let end = free_at[turn.drive].max(now) + PART as f64 / speeds[turn.drive];
                free_at[turn.drive] = end;
                ends.push(std::cmp::Reverse(((end * 1e9) as u64, turns.len())));
                turns.push(Some((turn, now)));
                begun += 1;
            }
            let Some(std::cmp::Reverse((end, number))) = ends.pop() else { break };
            now = end as f64 / 1e9;
            let (turn, since) = turns[number].take().unwrap();
            drives.settle_after(&turn, Duration::from_secs_f64(now - since), PART, 1, None);
        }
        (drives.figures().iter().map(|f| f.bytes).collect(), now)
    }

    #[test]
    fn equal_drives_share_equally() {
        let (bytes, _) = simulate(&drives(&[None, None]), &[1e9, 1e9], 400, 4);
        assert!(bytes[0].abs_diff(bytes[1]) <= 40 * PART, "{bytes:?}");
    }

    #[test]
    fn unequal_drives_carry_by_their_rates_and_are_never_slower_than_the_faster_alone() {
        for (slow, measured) in [(4.0, true), (4.0, false), (20.0, true), (100.0, false)] {
            let (fast, slow) = (2e9, 2e9 / slow);
            let rates = if measured { [Some(fast), Some(slow)] } else { [None, None] };
            let (bytes, pair) = simulate(&drives(&rates), &[fast, slow], 1000, 8);
            let (_, alone) = simulate(&drives(&[Some(fast)]), &[fast], 1000, 8);
            let share = bytes[1] as f64 / (bytes[0] + bytes[1]) as f64;
            let fair = slow / (fast + slow);
            assert!(share <= fair * 1.15 + 0.003, "{share} of the slow drive, fair is {fair}");
            // The clock here is simulated; one part on an unknown slow drive may come last.
            assert!(pair <= alone + PART as f64 / slow, "{pair} s, {alone} s alone");
        }
    }

    #[test]
    fn a_drive_that_was_slow_for_a_while_comes_back() {
        let drives = drives(&[Some(1e9), Some(1e9)]);
        simulate(&drives, &[1e9, 1e7], 200, 4);
        let before = drives.figures()[1].bytes;
        simulate(&drives, &[1e9, 1e9], 6000, 4);
        assert!(drives.figures()[1].bytes > before + 500 * PART);
    }

    #[test]
    fn a_copy_that_keeps_failing_is_set_aside_and_used_again_only_as_the_last() {
        let drives = drives(&[Some(2e9), Some(1e9)]);
        let fault = RunFault { got: 0, source: Some(std::io::Error::from_raw_os_error(libc::EIO)) };
        let mut notices = Vec::new();
        for _ in 0..COPY_PATIENCE {
            let turn = drives.choose(part(1), 0).unwrap();
            assert_eq!(turn.drive, 0);
            notices.extend(drives.settle(&turn, 0, 1, Some(&fault)));
        }
        assert!(matches!(&notices[..], [text] if text.contains("memory-1") && text.contains("os error 5")));
        assert_eq!(drives.choose(part(1), 0).unwrap().drive, 1);
        assert_eq!(drives.choose(part(0), 0).unwrap().drive, 0, "its other file is still read");
        assert_eq!(drives.choose(part(1), 0b10).unwrap().drive, 0, "nothing else is left");
        assert!(drives.choose(part(1), 0b11).is_none());
    }

    #[test]
    fn a_drive_that_fails_everywhere_is_set_aside_whole_and_the_last_never() {
        let drives = drives(&[Some(9e9), Some(1e6)]);
        let fault = RunFault { got: 0, source: None };
        let fail = |drive: usize, file| {
            let turn = drives.choose(part(file), !(1u64 << drive)).unwrap();
            drives.settle(&turn, 0, 1, Some(&fault))
        };
        // Reads of one file that were under way when it was set aside say nothing new.
        let notices: Vec<String> = (0..20).filter_map(|_| fail(0, 0)).collect();
        assert!(matches!(&notices[..], [text] if text.contains("memory-0")), "{notices:?}");
        let notices: Vec<String> = (0..20).filter_map(|_| fail(0, 1)).collect();
        assert!(matches!(&notices[..], [text] if text.contains("drive-0")), "{notices:?}");
        assert_eq!((0..20).filter_map(|n| fail(1, n % 2)).count(), 0, "there is no other");
        let aside: Vec<bool> = drives.figures().iter().map(|f| f.set_aside).collect();
        assert_eq!(aside, [true, false]);
    }
}
