//! Slots locked in memory, by what the system counts. Alone in its process, and one test: limits are the process's.
#![cfg(target_os = "linux")]

use std::error::Error;
use std::sync::Arc;

use metaltail_container::Extent;
use metaltail_store::testing::{MemoryFiles, Recorder, place};
use metaltail_store::{ArenaChunk, ChunkListener, ExpertStore, LayerExperts, StoreConfig, StoreEvent};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

const KIB: u64 = 1 << 10;
const EXPERTS: u32 = 48;
/// 3 MiB of experts in all: within what systems let everyone lock.
const LEN: u64 = 64 * KIB;

/// What the kernel says is locked.
fn locked() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * KIB
}

fn store(mlock: bool) -> (ExpertStore, Arc<Recorder>) {
    let file: Vec<u8> = (0..EXPERTS as u8).flat_map(|e| vec![e; LEN as usize]).collect();
    let at = |e: u32| place(&[Extent { file: 0, offset: u64::from(e) * LEN, len: LEN }]);
    let layers = vec![LayerExperts { layer: 0, experts: (0..EXPERTS).map(at).collect() }];
    let recorder = Arc::new(Recorder::default());
    let config =
        StoreConfig { cap: EXPERTS as usize, loaders: 2, in_flight: 4, mlock, ..StoreConfig::default() };
    let files = Box::new(MemoryFiles::new(vec![file]));
    (ExpertStore::with_reader(files, layers, config, recorder.clone()).unwrap(), recorder)
}

/// Fetches `experts` and looks at every byte.
fn all_is_right(store: &ExpertStore, experts: std::ops::Range<u32>) {
    let mut fetch = store.fetch(0, &experts.collect::<Vec<_>>()).unwrap();
    while let Some(batch) = fetch.next_batch().unwrap() {
        for (_, lease) in batch {
            assert!(lease.run(0).iter().all(|&byte| u32::from(byte) == lease.expert()));
        }
    }
}

/// Lets go of chunks.
struct Device;

impl ChunkListener for Device {
    fn leaving(&self, _: ArenaChunk) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(())
    }
}

fn what_is_filled_is_locked_until_it_goes(chunks: bool) {
    let before = locked();
    let (store, recorder) = store(true);
    if chunks {
        assert!(store.set_chunk_listener(Arc::new(Device)));
    }
    assert_eq!((locked(), store.locked_bytes()), (before, 0), "nothing exists yet");
    all_is_right(&store, 0..10);
    let some = store.locked_bytes();
    assert!((10 * LEN..16 * LEN).contains(&some), "{some}");
    assert_eq!(locked() - before, some);
    all_is_right(&store, 0..EXPERTS);
    let full = store.locked_bytes();
    assert!(full >= u64::from(EXPERTS) * LEN);
    assert_eq!(locked() - before, full);

    let given = store.enforce(0, 9 * LEN);
    assert!(given >= 9 * LEN, "{given}");
    assert_eq!(store.locked_bytes(), full - given);
    assert_eq!(locked() - before, full - given);
    while store.grow(16 * LEN).unwrap() > 0 {}
    all_is_right(&store, 0..EXPERTS);
    assert!(store.locked_bytes() >= full && locked() - before == store.locked_bytes());
    assert!(!recorder.take().iter().any(|event| matches!(event, StoreEvent::Notice(_))));
    drop(store);
    assert_eq!(locked(), before);
}

fn a_small_limit_is_told_once_and_all_goes_on() {
    // Who may lock everything is not limited.
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, sets).unwrap();
    let limit = 4 * LEN + 32 * KIB;
    let hard = getrlimit(Resource::Memlock).maximum;
    setrlimit(Resource::Memlock, Rlimit { current: Some(limit), maximum: hard }).unwrap();
    let before = locked();
    let (store, recorder) = store(true);
    (0..2).for_each(|_| all_is_right(&store, 0..EXPERTS));
    let told: Vec<StoreEvent> = recorder.take();
    let notices = told.iter().filter_map(|event| match event {
        StoreEvent::Notice(text) => Some(text.as_str()),
        _ => None,
    });
    let notices: Vec<&str> = notices.collect();
    assert!(
        matches!(notices[..], [one] if one.contains("ulimit -l") && one.contains("--mlock")),
        "{notices:?}"
    );
    assert!(store.locked_bytes() > 0 && store.locked_bytes() <= limit, "{}", store.locked_bytes());
    assert_eq!(locked() - before, store.locked_bytes());
    store.enforce(0, 1 << 40);
    assert_eq!((store.locked_bytes(), locked()), (0, before));
    all_is_right(&store, 0..EXPERTS);
}

/// Whether this process may lock what the test needs, if need be with the highest limit that it can have.
fn may_lock() -> bool {
    let needed = 8 << 20;
    let privileged = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    let Rlimit { current, maximum } = getrlimit(Resource::Memlock);
    let raised = current.is_none_or(|limit| limit >= needed)
        || setrlimit(Resource::Memlock, Rlimit { current: maximum, maximum }).is_ok()
            && maximum.is_none_or(|limit| limit >= needed);
    privileged || raised
}

#[test]
fn what_is_locked_is_what_the_system_counts() {
    if !may_lock() {
        eprintln!("SKIPPED: no 8 MiB may be locked here (ulimit -l)");
        return;
    }
    let (off, _) = store(false);
    let before = locked();
    all_is_right(&off, 0..EXPERTS);
    assert_eq!((off.locked_bytes(), locked()), (0, before));
    drop(off);
    what_is_filled_is_locked_until_it_goes(false);
    what_is_filled_is_locked_until_it_goes(true);
    a_small_limit_is_told_once_and_all_goes_on();
}
