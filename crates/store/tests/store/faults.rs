//! Drives that fail, stall, lie and stop.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use metaltail_store::testing::{Fault, MemoryFiles, Recorder};
use metaltail_store::{ExpertStore, StoreConfig, StoreError, StoreEvent};
use xxhash_rust::xxh3::xxh3_64;

use crate::rig::*;

const EIO: i32 = 5;
const ENODEV: i32 = 19;

/// The only error of fetching experts 0 to 3, and how many experts came all the same.
fn broken_fetch(store: &ExpertStore) -> (StoreError, usize) {
    let mut fetch = store.fetch(3, &[0, 1, 2, 3]).unwrap();
    let (mut errors, mut came) = (Vec::new(), 0);
    loop {
        match fetch.next_batch() {
            Ok(Some(batch)) => came += batch.len(),
            Ok(None) => break,
            Err(error) => errors.push(error),
        }
    }
    assert_eq!(errors.len(), 1, "{errors:?}");
    (errors.remove(0), came)
}

#[test]
fn three_faults_have_three_texts_and_the_other_experts_still_come() {
    let weights = 100 + 2 * WEIGHTS;
    let faults: [(Fault, Fault, u64, &str); 3] = [
        (Fault::Error(EIO), Fault::None, 0, "OS code 5"),
        (Fault::Short(1000), Fault::Error(ENODEV), 1000, "OS code 19"),
        (Fault::Short(1000), Fault::Short(0), 1000, "ends early"),
    ];
    for (first, then, got, text) in faults {
        let healed = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&healed);
        let (store, recorder) =
            store((1, 8), config(8, 2, 4), move |_, offset, _| match offset.checked_sub(weights) {
                Some(0) if !seen.load(Ordering::Relaxed) => first,
                Some(1000) if !seen.load(Ordering::Relaxed) => then,
                _ => Fault::None,
            });
        let (error, came) = broken_fetch(&store);
        let message = error.to_string();
        for part in
            ["expert 2 of layer 3", "memory-0", "offset 12100", "wanted 6000", &format!("got {got}"), text]
        {
            assert!(message.contains(part), "{part} in {message}");
        }
        let has_source = error.source().is_some();
        assert!(has_source == matches!(error, StoreError::Read { .. }));
        assert_eq!(came, 3);
        let failed =
            recorder.take().into_iter().find(|e| matches!(e, StoreEvent::ReadFinished { ok: false, .. }));
        // Another loader may have read the scales meanwhile, or given them up.
        let arrived = [got, got + SCALES];
        assert!(matches!(failed, Some(StoreEvent::ReadFinished { bytes, .. }) if arrived.contains(&bytes)));
        healed.store(true, Ordering::Relaxed);
        assert_eq!(fetch_all(&store, 3, &[0, 1, 2, 3]).len(), 4, "the next fetch tries again");
        assert_eq!(store.kept(3).unwrap(), [0, 1, 2, 3]);
    }
}

#[test]
fn a_fetch_dropped_half_way_cancels_what_has_not_begun() {
    let gates = Gates::default();
    let (store, recorder) = store((1, 8), config(8, 1, 4), gates.hook(8));
    gates.open(1);
    let mut fetch = store.fetch(3, &[1, 2, 3, 4, 5, 6]).unwrap();
    assert_eq!(fetch.next_batch().unwrap().unwrap().len(), 1);
    // The loader sits in expert 2 from now on, or will; 3 and 4 are queued, the others have no slot.
    while !recorder.take().iter().any(|e| matches!(e, StoreEvent::ReadStarted { expert: 2, .. })) {
        std::thread::yield_now();
    }
    drop(fetch);
    let cancelled =
        recorder.take().into_iter().filter(|e| matches!(e, StoreEvent::LoadCancelled { .. })).count();
    assert!((2..=3).contains(&cancelled), "{cancelled} cancelled");
    (2..7).for_each(|e| gates.open(e));
    assert_eq!(fetch_all(&store, 3, &[2, 3, 4, 5, 6]).len(), 5);
    assert_eq!(store.kept(3).unwrap(), [1, 2, 3, 4, 5, 6]);
    let read_twice =
        recorder.take().iter().filter(|e| matches!(e, StoreEvent::ReadStarted { expert: 2, .. })).count();
    assert_eq!(read_twice, 0, "the load under way was finished and used");
}

#[test]
fn a_stuck_drive_is_reported_with_the_state_and_may_recover() {
    let gates = Gates::default();
    let patience = Duration::from_millis(30);
    let (store, _) = store((1, 8), StoreConfig { patience, ..config(8, 1, 2) }, gates.hook(8));
    let mut fetch = store.fetch(3, &[0, 1, 2]).unwrap();
    let error = fetch.next_batch().unwrap_err();
    assert!(matches!(&error, StoreError::Stalled { layer: 3, .. }), "{error}");
    let text = error.to_string();
    for part in ["layer 3 expert 0", "layer 3 expert 1: Queued", "2 of 2 in flight", "holds"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    (0..3).for_each(|e| gates.open(e));
    let mut came = 0;
    loop {
        match fetch.next_batch() {
            Ok(Some(batch)) => came += batch.len(),
            Ok(None) => break,
            // A busy machine may stall for these few milliseconds again.
            Err(StoreError::Stalled { .. }) => {}
            Err(e) => panic!("{e}"),
        }
    }
    assert_eq!(came, 3);
}

fn checked_store(damage: bool) -> (ExpertStore, Arc<Recorder>) {
    let mut file = bytes(0, file_len(4));
    let mut layers = layers(1, 4);
    for place in &mut layers[0].experts {
        let whole: Vec<u8> =
            place.runs.iter().flat_map(|r| &file[r.offset as usize..][..r.len as usize]).copied().collect();
        place.checksum = Some(xxh3_64(&whole));
    }
    if damage {
        file[layers[0].experts[2].runs[1].offset as usize + 299] ^= 1;
    }
    let recorder = Arc::new(Recorder::default());
    let reader = Box::new(MemoryFiles::new(vec![file]));
    (ExpertStore::with_reader(reader, layers, config(0, 2, 4), recorder.clone()).unwrap(), recorder)
}

#[test]
fn a_damaged_expert_is_named() {
    let (store, _) = checked_store(true);
    let (error, came) = broken_fetch(&store);
    assert!(matches!(error, StoreError::Checksum { layer: 3, expert: 2, offset: 12_100, .. }), "{error}");
    assert!(error.to_string().contains("memory-0") && came == 3);
}

#[test]
fn a_checksum_is_verified_once_an_expert() {
    let (store, recorder) = checked_store(false);
    let verified = || recorder.take().iter().filter(|e| matches!(e, StoreEvent::Verified { .. })).count();
    fetch_all(&store, 3, &[0, 1, 2]);
    assert_eq!(verified(), 3);
    fetch_all(&store, 3, &[0, 1, 2, 3]);
    assert_eq!(verified(), 1);
}

#[test]
fn a_file_cut_short_is_refused_at_opening() {
    let reader = Box::new(MemoryFiles::new(vec![bytes(0, file_len(4) - 1)]));
    let opened =
        ExpertStore::with_reader(reader, layers(1, 4), config(1, 1, 1), Arc::new(Recorder::default()));
    let Err(error @ StoreError::Place { layer: 3, expert: 3, .. }) = opened else { panic!("opened") };
    let text = error.to_string();
    assert!(
        text.contains("memory-0 has 25299 bytes") && text.contains("wanted 300 from offset 25000"),
        "{text}"
    );
}

#[test]
fn impossible_settings_are_refused() {
    for bad in [config(1, 0, 1), config(1, 1, 0), config(usize::MAX, 1, usize::MAX)] {
        let reader = Box::new(files(1, 4));
        let opened = ExpertStore::with_reader(reader, layers(1, 4), bad, Arc::new(Recorder::default()));
        assert!(matches!(opened.err(), Some(StoreError::Config(_))));
    }
}
