//! Checksums, and experts that one drive has damaged and another has not.

use xxhash_rust::xxh3::Xxh3;

use crate::error::StoreError;
use crate::event::StoreEvent;
use crate::geometry::segments;
use crate::io::{Traffic, read_run};
use crate::policy::ExpertId;
use crate::store::Shared;

/// Compares the checksum at an expert's first load. Where it differs, reads the whole expert from each drive
/// in turn until one has it right. `sources` are the drives that the bytes came from, as bits.
pub(super) fn verify(shared: &Shared, id: ExpertId, slot: &mut [u8], sources: u64) -> Result<(), StoreError> {
    let place = shared.place(id);
    let Some(wanted) = place.checksum.filter(|_| shared.needs_check(id)) else {
        return Ok(());
    };
    let got = checksum(shared, id, slot);
    if got != wanted {
        mend(shared, id, slot, sources, wanted, got)?;
    }
    shared.checked(id);
    let (layer, expert) = (shared.layers[id.layer as usize].layer, id.expert);
    shared.emit(&StoreEvent::Verified { layer, expert });
    Ok(())
}

fn checksum(shared: &Shared, id: ExpertId, slot: &[u8]) -> u64 {
    let mut hash = Xxh3::new();
    segments(shared.place(id)).for_each(|s| hash.update(&slot[s.data()]));
    hash.digest()
}

fn mend(
    shared: &Shared,
    id: ExpertId,
    slot: &mut [u8],
    sources: u64,
    wanted: u64,
    got: u64,
) -> Result<(), StoreError> {
    let (drives, place) = (&shared.drives, shared.place(id));
    let has_all = |drive: &usize| place.runs.iter().all(|run| drives.reader(*drive).has(run.file));
    // Bytes of a single drive need not be read from it again.
    let mut damaged = if sources.count_ones() == 1 { sources } else { 0 };
    for drive in (0..drives.len()).filter(has_all).filter(|d| damaged & (1 << d) == 0).collect::<Vec<_>>() {
        let mut traffic = Traffic::default();
        let read = segments(place).try_for_each(|s| {
            read_run(drives.reader(drive), s.run, &mut slot[s.start..s.start + s.span], &mut traffic)
        });
        match read {
            Ok(()) if checksum(shared, id, slot) == wanted => {
                tell(shared, id, damaged, sources & !damaged & !(1 << drive));
                return Ok(());
            }
            Ok(()) => damaged |= 1 << drive,
            // A drive that fails is no help, and says nothing about the others.
            Err(_) => {}
        }
    }
    let (layer, expert) = (shared.layers[id.layer as usize].layer, id.expert);
    let first = place.runs.first().copied();
    let path = |file| match (0..drives.len()).find(|d| sources & (1 << d) != 0 && drives.reader(*d).has(file))
    {
        Some(drive) => drives.reader(drive).path(file),
        None => drives.path(file),
    };
    let (file, offset) = first.map_or_else(Default::default, |run| (path(run.file), run.offset));
    Err(StoreError::Checksum { layer, expert, file, offset, wanted, got })
}

/// Names what is damaged, and reads it no more: `certain` drives, or where there are none `suspects`.
fn tell(shared: &Shared, id: ExpertId, certain: u64, suspects: u64) {
    let drives = &shared.drives;
    let (layer, expert) = (shared.layers[id.layer as usize].layer, id.expert);
    let blamed = if certain != 0 { certain } else { suspects };
    let sure = certain != 0 || suspects.count_ones() == 1;
    let mut files: Vec<u32> = shared.place(id).runs.iter().map(|run| run.file).collect();
    files.dedup();
    let mut paths = Vec::new();
    for drive in (0..drives.len()).filter(|d| blamed & (1 << d) != 0) {
        for &file in files.iter().filter(|&&file| drives.reader(drive).has(file)) {
            paths.push(drives.reader(drive).path(file).display().to_string());
            if sure {
                drives.set_aside(drive, file);
            }
        }
    }
    let (joined, next) = match sure {
        true => (paths.join(" and "), "it is set aside. Copy it again"),
        false => (paths.join(" or "), "another drive has it right. Copy these files again"),
    };
    shared.emit(&StoreEvent::Notice(format!(
        "expert {expert} of layer {layer} is damaged in {joined}: {next}"
    )));
}
