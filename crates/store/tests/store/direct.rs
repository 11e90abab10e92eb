//! Real files, through the page cache and past it.

use std::path::PathBuf;
use std::sync::Arc;

use metaltail_store::testing::Recorder;
use metaltail_store::{Direct, ExpertStore, StoreConfig, StoreError, StoreEvent};

use crate::rig::*;

/// Unaligned experts of two runs, the last of which ends with a file of no whole number of blocks.
fn fetched(dir: &std::path::Path, direct: Direct) -> Result<(ExpertStore, Vec<StoreEvent>), StoreError> {
    let files: Vec<PathBuf> = (0..2).map(|l| dir.join(format!("experts-{l}"))).collect();
    for (l, file) in (0u32..).zip(&files) {
        std::fs::write(file, bytes(l, file_len(7))).unwrap();
    }
    let recorder = Arc::new(Recorder::default());
    let settings = StoreConfig { direct, ..config(2, 2, 4) };
    let store = ExpertStore::open(&files, layers(2, 7), settings, recorder.clone())?;
    for layer in 0..2 {
        let mut fetch = store.fetch(layer + 3, &[0, 1, 2, 3, 4, 5, 6])?;
        while let Some(batch) = fetch.next_batch()? {
            assert!(batch.iter().all(|(_, lease)| is_whole(lease, layer, 7)));
        }
    }
    let events = recorder.take();
    Ok((store, events))
}

#[test]
fn direct_and_buffered_reads_give_the_bytes_of_the_file() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    assert!(!file_len(7).is_multiple_of(4096));
    let (buffered, events) = fetched(dir.path(), Direct::Off).unwrap();
    assert!(!buffered.io_mode().direct);
    let read = |events: &[StoreEvent]| {
        let bytes =
            events.iter().map(|e| if let StoreEvent::ReadFinished { bytes, .. } = e { *bytes } else { 0 });
        bytes.sum::<u64>()
    };
    assert_eq!(read(&events), 14 * (WEIGHTS + SCALES));
    match fetched(dir.path(), Direct::On) {
        Ok((direct, events)) => {
            assert!(direct.io_mode().direct);
            assert!(read(&events) > 14 * (WEIGHTS + SCALES), "padding counts as read");
        }
        Err(StoreError::Direct { file, source }) => {
            eprintln!("SKIPPED: no direct reads of {}: {source}", file.display());
        }
        Err(e) => panic!("{e}"),
    }
}

#[test]
fn the_automatic_choice_says_why() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (store, events) = fetched(dir.path(), Direct::Auto).unwrap();
    let mode = store.io_mode();
    assert!(!mode.direct && mode.reason.contains("page cache"), "{mode:?}");
    // Chosen because the experts fit: nothing that a user should have to read.
    assert!(!mode.makeshift && !events.iter().any(|e| matches!(e, StoreEvent::Notice(_))));
}
