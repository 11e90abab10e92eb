//! Which way the store reads: direct or buffered, by threads or by an io_uring. Said by the user, or found by
//! a short measurement with the engine's own pattern where the model is large enough for it to matter.

use std::path::PathBuf;
use std::time::Duration;

use super::{Direct, FileReader, Io, IoMode};
use crate::error::StoreError;
use crate::geometry::LayerExperts;
use crate::probe::{Limits, Measured, Target, Way, measure, uring_works};

/// Longest time of one measurement; at most three decide, and one more for each further drive.
const TIME: Duration = Duration::from_millis(80);
/// Reads of a measurement are cut to this, so that a slow drive ends the few that must be read in time.
const PIECE: u64 = 4 << 20;
/// Most bytes of one measurement.
const BYTES: u64 = 256 << 20;
/// How much faster the other way must be than the one that is preferred: direct reads leave the page cache
/// to others, and threads are the simpler machine.
const CLEARLY: f64 = 1.1;

/// Files of one drive. The numbering is that of the model; a drive need not have all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveFiles {
    /// Directory, for reports.
    pub dir: PathBuf,
    /// The files, or gaps.
    pub files: Vec<Option<PathBuf>>,
}

impl DriveFiles {
    /// A drive that has all files.
    pub fn whole(files: &[PathBuf]) -> DriveFiles {
        let dir = files.first().and_then(|file| file.parent()).map(PathBuf::from).unwrap_or_default();
        DriveFiles { dir, files: files.iter().cloned().map(Some).collect() }
    }

    fn open(&self, direct: bool) -> Result<FileReader, StoreError> {
        let files: Vec<_> = self.files.iter().map(Option::as_deref).collect();
        FileReader::open_some(&files, direct)
    }

    /// The experts that this drive can be measured by: runs in files that it has.
    fn target(&self, layers: &[LayerExperts]) -> Target {
        let files: Vec<PathBuf> = self.files.iter().map(|f| f.clone().unwrap_or_default()).collect();
        let mut target = Target::experts(&files, layers);
        target.runs.retain(|run| matches!(self.files.get(run.file as usize), Some(Some(_))));
        // Gaps have no path to open: only files that are read stay.
        let mut numbers = vec![None; files.len()];
        target.files.clear();
        for run in &mut target.runs {
            let number = numbers[run.file as usize].get_or_insert_with(|| {
                target.files.push(files[run.file as usize].clone());
                target.files.len() as u32 - 1
            });
            run.file = *number;
        }
        target
    }
}

/// What the user said, and what the choice depends on.
pub(crate) struct Wish {
    pub(crate) direct: Direct,
    pub(crate) io: Io,
    /// Reads at a time with threads.
    pub(crate) loaders: usize,
    /// Reads at a time with an io_uring.
    pub(crate) in_flight: usize,
    /// Memory that this process may have, where known.
    pub(crate) available: Option<u64>,
}

/// What was chosen.
pub(crate) struct Chosen {
    /// A reader a drive.
    pub(crate) readers: Vec<FileReader>,
    /// Each drive's bytes a second, where there was reason to measure.
    pub(crate) rates: Vec<Option<f64>>,
    pub(crate) mode: IoMode,
}

/// Opens the drives' files in the way that was asked for or is found best.
pub(crate) fn choose(
    drives: &[DriveFiles],
    layers: &[LayerExperts],
    wish: &Wish,
) -> Result<Chosen, StoreError> {
    let runs = layers.iter().flat_map(|l| &l.experts).flat_map(|e| &e.runs);
    let bytes = runs.fold(0u64, |sum, run| sum.saturating_add(run.len));
    let large = wish.available.is_none_or(|available| bytes > available / 4);
    let target = drives.first().map(|drive| drive.target(layers).in_pieces(PIECE)).unwrap_or_default();
    let gauge = Gauge { target, wish, large };
    let (readers, direct, reason, makeshift) = gauge.direct(drives)?;
    let (uring, uring_reason) = gauge.carrier(direct)?;
    let rates = match drives.len() > 1 && large {
        true => drives.iter().map(|drive| rate(&drive.target(layers), direct, wish)).collect(),
        false => vec![None; drives.len()],
    };
    Ok(Chosen { readers, rates, mode: IoMode { direct, reason, makeshift, uring, uring_reason } })
}

fn open_all(drives: &[DriveFiles], direct: bool) -> Result<Vec<FileReader>, StoreError> {
    drives.iter().map(|drive| drive.open(direct)).collect()
}

/// A drive's rate for the choice between several.
fn rate(target: &Target, direct: bool, wish: &Wish) -> Option<f64> {
    let way = Way { direct, uring: false, depth: wish.loaders };
    let measured = measure(&target.in_pieces(PIECE), way, limits(9)).ok()?;
    Some(measured.bytes_per_second()).filter(|&rate| rate > 0.0)
}

fn limits(seed: u64) -> Limits {
    Limits { time: TIME, bytes: BYTES, seed }
}

struct Gauge<'a> {
    target: Target,
    wish: &'a Wish,
    large: bool,
}

const SMALL: &str = "all experts fit in a quarter of the available memory";

impl Gauge<'_> {
    /// Readers, whether they are direct, why, and whether that is a makeshift.
    fn direct(&self, drives: &[DriveFiles]) -> Result<(Vec<FileReader>, bool, String, bool), StoreError> {
        let buffered = |reason: String, makeshift| Ok((open_all(drives, false)?, false, reason, makeshift));
        match self.wish.direct {
            Direct::Off => return buffered("direct reads are switched off".into(), false),
            Direct::On => {
                return Ok((open_all(drives, true)?, true, "direct reads are demanded".into(), false));
            }
            Direct::Auto if !self.large => {
                return buffered(format!("{SMALL}, so the page cache holds them"), false);
            }
            Direct::Auto => {}
        }
        let readers = match open_all(drives, true) {
            Ok(readers) => readers,
            Err(StoreError::Direct { file, source }) => {
                return buffered(format!("direct reads of {} do not work: {source}", file.display()), true);
            }
            Err(e) => return Err(e),
        };
        let (through, past) = (self.measure(false, false, 1), self.measure(true, false, 2));
        match (through, past) {
            // Reads from memory would not be a measurement of the drive.
            (Ok(through), Ok(past)) if through.evicted.is_some_and(|e| e.is_cold()) => {
                let rates = format!("{} through the page cache, {} past it", words(&through), words(&past));
                match through.bytes_per_second() > past.bytes_per_second() * CLEARLY {
                    true => buffered(format!("measured: {rates}"), false),
                    false => Ok((readers, true, format!("measured: {rates}"), false)),
                }
            }
            _ => {
                let reason = "they work here, and the experts exceed a quarter of the available memory";
                Ok((readers, true, reason.into(), false))
            }
        }
    }

    /// Whether an io_uring carries reads out, and why.
    fn carrier(&self, direct: bool) -> Result<(bool, String), StoreError> {
        match (self.wish.io, uring_works()) {
            (Io::Threads, _) => Ok((false, "threads are demanded".into())),
            (Io::Uring, Ok(())) => Ok((true, "io_uring is demanded".into())),
            (Io::Uring, Err(reason)) => Err(StoreError::Uring { reason }),
            (Io::Auto, _) if !self.large => Ok((false, format!("{SMALL}: threads do as well as io_uring"))),
            (Io::Auto, Err(why)) => Ok((false, format!("io_uring does not work: {why}"))),
            (Io::Auto, Ok(())) => Ok(self.faster(direct)),
        }
    }

    fn faster(&self, direct: bool) -> (bool, String) {
        match (self.measure(direct, false, 3), self.measure(direct, true, 4)) {
            (Ok(threads), Ok(uring)) => {
                let won = uring.bytes_per_second() > threads.bytes_per_second() * CLEARLY;
                (won, format!("measured: {} with threads, {} with io_uring", words(&threads), words(&uring)))
            }
            (Ok(_), Err(e)) => (false, format!("io_uring could not be measured: {e}")),
            (Err(e), _) => (false, format!("the ways to read could not be measured: {e}")),
        }
    }

    fn measure(&self, direct: bool, uring: bool, seed: u64) -> Result<Measured, crate::probe::ProbeError> {
        let depth = if uring { self.wish.in_flight } else { self.wish.loaders };
        measure(&self.target, Way { direct, uring, depth }, limits(seed))
    }
}

fn words(measured: &Measured) -> String {
    format!("{:.2} GB/s", measured.bytes_per_second() / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::ExpertReader;
    use crate::testing::place;
    use metaltail_container::Extent;

    fn wish(direct: Direct, io: Io, available: Option<u64>) -> Wish {
        Wish { direct, io, loaders: 2, in_flight: 3, available }
    }

    /// Eight experts of 5000 bytes in a file.
    fn model(file: &std::path::Path) -> (Vec<DriveFiles>, Vec<LayerExperts>) {
        std::fs::write(file, [1; 40_100]).unwrap();
        let expert = |e: u64| place(&[Extent { file: 0, offset: 100 + e * 5000, len: 5000 }]);
        let layers = vec![LayerExperts { layer: 0, experts: (0..8).map(expert).collect() }];
        (vec![DriveFiles::whole(&[file.to_owned()])], layers)
    }

    #[test]
    fn a_model_that_fits_the_page_cache_is_read_through_it_by_threads_unmeasured() {
        let dir = tempfile::tempdir().unwrap();
        let (drives, layers) = model(&dir.path().join("experts"));
        let chosen = choose(&drives, &layers, &wish(Direct::Auto, Io::Auto, Some(160_000))).unwrap();
        let mode = &chosen.mode;
        assert!(!mode.direct && !mode.makeshift && !mode.uring);
        assert!(mode.reason.contains("page cache") && mode.uring_reason.contains("quarter"), "{mode:?}");
        assert_eq!(chosen.readers[0].alignment(), 1);
    }

    #[test]
    fn a_larger_one_is_measured_or_says_why_not() {
        let dir = tempfile::tempdir().unwrap();
        let (drives, layers) = model(&dir.path().join("experts"));
        for available in [Some(159_999), None] {
            let chosen = choose(&drives, &layers, &wish(Direct::Auto, Io::Auto, available)).unwrap();
            let mode = chosen.mode;
            assert_eq!(chosen.readers[0].alignment() > 1, mode.direct);
            let said = ["measured", "do not work", "they work here"];
            assert!(said.iter().any(|text| mode.reason.contains(text)), "{mode:?}");
            let said = ["GB/s with io_uring", "does not work", "measured"];
            assert!(said.iter().any(|text| mode.uring_reason.contains(text)), "{mode:?}");
        }
    }

    #[test]
    fn what_is_demanded_is_done_or_refused_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let (drives, layers) = model(&dir.path().join("experts"));
        let chosen = choose(&drives, &layers, &wish(Direct::Off, Io::Threads, None)).unwrap();
        assert!(!chosen.mode.direct && !chosen.mode.uring);
        match (choose(&drives, &layers, &wish(Direct::Off, Io::Uring, None)), uring_works()) {
            (Ok(chosen), Ok(())) => assert!(chosen.mode.uring && chosen.mode.carrier() == "uring"),
            (Err(e), Err(why)) => assert!(e.to_string().contains(&why), "{e}"),
            _ => panic!("what works and what is chosen differ"),
        }
    }

    #[test]
    fn a_system_without_direct_reads_falls_back_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let missing = vec![DriveFiles::whole(&[dir.path().join("absent")])];
        let open = |drives: &[DriveFiles], direct| choose(drives, &[], &wish(direct, Io::Auto, None));
        let error = open(&missing, Direct::Auto).err();
        assert!(matches!(error, Some(StoreError::Open { .. })), "a missing file is no fallback");
        if cfg!(target_os = "linux") {
            let odd = vec![DriveFiles::whole(&[PathBuf::from("/proc/self/status")])];
            let mode = open(&odd, Direct::Auto).unwrap().mode;
            assert!(!mode.direct && mode.makeshift && mode.reason.contains("do not work"), "{mode:?}");
            assert!(matches!(open(&odd, Direct::On).err(), Some(StoreError::Direct { .. })));
        }
    }

    #[test]
    fn a_drive_with_gaps_is_measured_by_what_it_has() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("second");
        std::fs::write(&file, [1; 9000]).unwrap();
        let drive = DriveFiles { dir: dir.path().into(), files: vec![None, Some(file.clone())] };
        let run = |file| place(&[Extent { file, offset: 0, len: 9000 }]);
        let target = drive.target(&[LayerExperts { layer: 0, experts: vec![run(0), run(1)] }]);
        assert_eq!((target.files, target.runs.len(), target.runs[0].file), (vec![file], 1, 0));
    }
}
