//! Putting runs out of the page cache, and looking whether they went.

use std::fs::File;
use std::path::PathBuf;

use memmap2::MmapOptions;
use metaltail_container::Extent;

use super::Target;
use crate::arena::PAGE;

/// Largest unit in which the page cache keeps file bytes.
const FOLIO: u64 = 2 << 20;

/// What became of runs that were to leave the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Eviction {
    /// Bytes of the pages that were to leave.
    pub wanted: u64,
    /// Bytes of these that stayed: others use them, or the system kept them. `None` where the system does
    /// not tell.
    pub stayed: Option<u64>,
}

impl Eviction {
    /// Whether at most a fiftieth stayed, so that reads measure the drive and not memory.
    pub fn is_cold(&self) -> bool {
        self.stayed.is_some_and(|stayed| stayed <= self.wanted / 50)
    }
}

/// Puts `runs` out of the page cache as far as the system follows.
pub(super) fn evict(target: &Target, runs: &[Extent]) -> Eviction {
    let mut sum = Eviction { wanted: 0, stayed: Some(0) };
    let mut open: Vec<Option<File>> = target.files.iter().map(|_| None).collect();
    for run in runs {
        let pages = rounded(*run, PAGE);
        sum.wanted += pages.len;
        let stayed = file(&mut open, &target.files, run.file).and_then(|file| {
            // Linux caches in units of up to 2 MiB and drops only those that lie within the range. The
            // advice is no order; what it did is looked at.
            drop_pages(file, rounded(*run, FOLIO));
            resident(file, pages)
        });
        sum.stayed = sum.stayed.zip(stayed).map(|(a, b)| a + b);
    }
    sum
}

/// Advises the system to drop pages.
#[cfg(target_os = "linux")]
fn drop_pages(file: &File, pages: Extent) {
    use rustix::fs::{Advice, fadvise};
    let _ = fadvise(file, pages.offset, std::num::NonZeroU64::new(pages.len), Advice::DontNeed);
}

/// Other systems take no such advice: what stays is looked at there as well.
#[cfg(not(target_os = "linux"))]
fn drop_pages(_: &File, _: Extent) {}

fn file<'f>(open: &'f mut [Option<File>], paths: &[PathBuf], number: u32) -> Option<&'f File> {
    let place = open.get_mut(number as usize)?;
    if place.is_none() {
        *place = File::open(paths.get(number as usize)?).ok();
    }
    place.as_ref()
}

/// The run rounded out to multiples of `granule`.
fn rounded(run: Extent, granule: u64) -> Extent {
    let offset = run.offset / granule * granule;
    let len = (run.offset - offset).saturating_add(run.len);
    Extent { file: run.file, offset, len: len.checked_next_multiple_of(granule).unwrap_or(len) }
}

/// Bytes of the system's pages in which `pages` lie that are in the page cache; `None` where the system does not
/// tell.
pub(crate) fn resident(file: &File, pages: Extent) -> Option<u64> {
    let page = rustix::param::page_size();
    // The system's pages may be larger than ours.
    let pages = rounded(pages, page as u64);
    // Nothing beyond the end of the file is cached.
    let len = file.metadata().ok()?.len().saturating_sub(pages.offset).min(pages.len);
    if len == 0 {
        return Some(0);
    }
    let len = usize::try_from(len).ok()?;
    // SAFETY: the map is only asked which of its pages are in memory; no byte of it is looked at, so it
    // does not matter who changes the file.
    let map = unsafe { MmapOptions::new().offset(pages.offset).len(len).map(file) }.ok()?;
    let mut states = vec![0u8; len.div_ceil(page)];
    // SAFETY: `states` has a byte for each page of the map.
    let code =
        unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), map.len(), states.as_mut_ptr().cast()) };
    (code == 0).then(|| states.iter().filter(|&&state| state & 1 == 1).count() as u64 * page as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_is_resident_until_it_is_evicted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("experts");
        std::fs::write(&path, vec![3; 1 << 20]).unwrap();
        let file = File::open(&path).unwrap();
        // Dirty pages stay whatever is advised.
        file.sync_all().unwrap();
        std::fs::read(&path).unwrap();
        let run = Extent { file: 0, offset: 5000, len: 500_000 };
        let whole = rounded(run, PAGE);
        assert_eq!((whole.offset, whole.len), (4096, 503_808));
        if resident(&file, whole) != Some(whole.len) {
            eprintln!("SKIPPED: this file system does not keep or tell what is cached");
            return;
        }
        let target = Target { files: vec![path], runs: vec![run] };
        let found = evict(&target, &target.runs);
        assert_eq!(found.wanted, whole.len);
        assert!(found.is_cold(), "{found:?}");
        assert!(resident(&file, Extent { file: 0, offset: 1 << 30, len: 4096 }) == Some(0));
    }
}
