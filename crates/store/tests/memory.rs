//! Memory of the process itself: mappings and pages. Alone in its process, and one test, so that no other disturbs it.

use std::error::Error;
use std::sync::Arc;

use metaltail_container::Extent;
use metaltail_store::testing::{MemoryFiles, Recorder, place};
use metaltail_store::{
    ArenaChunk, ChunkListener, ExpertStore, LayerExperts, Machine, StoreConfig, StoreEvent,
};

const MIB: u64 = 1 << 20;

fn store(layers: u32, experts: u32, len: u64, cap: usize) -> (ExpertStore, Arc<Recorder>) {
    let at = |e: u32| Extent { file: 0, offset: u64::from(e % 8) * len, len };
    let layer = |layer| LayerExperts { layer, experts: (0..experts).map(|e| place(&[at(e)])).collect() };
    let recorder = Arc::new(Recorder::default());
    let config = StoreConfig { cap, loaders: 2, in_flight: 2, ..StoreConfig::default() };
    let files = Box::new(MemoryFiles::new(vec![vec![7; 8 * len as usize]]));
    let store = ExpertStore::with_reader(files, (0..layers).map(layer).collect(), config, recorder.clone());
    (store.unwrap(), recorder)
}

fn fill(store: &ExpertStore, layers: u32, experts: u32) {
    for layer in 0..layers {
        let all: Vec<u32> = (0..experts).collect();
        let mut fetch = store.fetch(layer, &all).unwrap();
        while let Some(batch) = fetch.next_batch().unwrap() {
            drop(batch);
        }
    }
}

fn maps() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

fn many_slots_are_few_mappings() {
    let before = maps();
    let (store, _) = store(80, 256, 4096, 256);
    fill(&store, 2, 256);
    assert!(maps() < before + 100, "{} mappings more for 20,480 slots", maps() - before);
    assert!(store.mappings() <= 20);
}

fn pages_are_given_back_and_caps_stay_lowered() {
    // 4 layers × 16 experts × 1 MiB, all kept.
    let (store, recorder) = store(4, 16, MIB, 16);
    assert_eq!(store.enforce(100, 100), 0, "not over the limit: nothing happens");
    fill(&store, 4, 16);
    let full = Machine::own_anon_now().unwrap();
    recorder.take();
    let given = store.enforce(full - 32 * MIB, full);
    assert!((32 * MIB..34 * MIB).contains(&given), "{given} bytes given back");
    let after = Machine::own_anon_now().unwrap();
    assert!(after <= full - 30 * MIB, "{full} bytes before, {after} after");
    let events = recorder.take();
    let shrunk = events.iter().find(|e| matches!(e, StoreEvent::Shrunk { .. }));
    assert!(
        matches!(shrunk, Some(StoreEvent::Shrunk { short: 0, min_cap: 7.., max_cap: ..=8, .. })),
        "{shrunk:?}"
    );
    fill(&store, 4, 16);
    let again = Machine::own_anon_now().unwrap();
    assert!(again <= full - 28 * MIB, "grew back to {again}");
    // Nothing is left to give at the end, and it says so.
    store.enforce(0, u64::MAX);
    assert_eq!(store.caps(), (0, 0));
    assert!(recorder.take().iter().any(|e| matches!(e, StoreEvent::Shrunk { short: 1.., .. })));
    fill(&store, 4, 16);
}

/// Knows the memory, and lets go of it.
struct Device;

impl ChunkListener for Device {
    fn leaving(&self, _: ArenaChunk) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(())
    }
}

fn a_chunk_that_goes_takes_its_memory_along_and_nothing_else() {
    let (store, _) = store(4, 16, MIB, 16);
    store.set_chunk_listener(Arc::new(Device));
    fill(&store, 4, 16);
    let (full, mappings) = (Machine::own_anon_now().unwrap(), maps());
    let given = store.enforce(full - 6 * MIB, full);
    assert!((6 * MIB..17 * MIB).contains(&given), "{given} bytes given back");
    let after = Machine::own_anon_now().unwrap();
    assert!(
        full - after >= given - MIB / 2 && full - after <= given + MIB,
        "{full}, then {after}; said {given}"
    );
    assert_eq!(maps(), mappings, "its addresses stay");
    fill(&store, 4, 16);
    let refilled = Machine::own_anon_now().unwrap();
    // Two slots for loads had not been used before.
    assert!(refilled < after + 3 * MIB, "{full} full, {given} given, {after} after, {refilled} refilled");
    while store.grow(64 * MIB).unwrap() > 0 {}
    fill(&store, 4, 16);
    let again = Machine::own_anon_now().unwrap();
    assert!(again.abs_diff(full) < 3 * MIB, "{full}, then {again}");
}

fn a_cache_that_holds_everything_grows_by_nothing() {
    for (cap, room) in [(16, 64 * MIB), (4, 0), (4, MIB)] {
        let (store, _) = store(4, 16, MIB, cap);
        let before = store.arena().chunks();
        assert_eq!(store.grow(room).unwrap(), 0, "cap {cap}, {room} bytes");
        assert_eq!(store.arena().chunks(), before, "a mapping of no slots");
    }
    let (store, _) = store(4, 16, MIB, 4);
    let chunks = store.arena().chunks();
    assert_eq!(store.grow(9 * MIB).unwrap(), 8 * MIB, "a chunk at a time");
    let grown = store.arena().chunk(chunks).unwrap();
    assert_eq!(grown.len, 8 * grown.slot_bytes);
}

fn file_pages_are_not_counted() {
    let mut file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut file, &vec![1; 48 << 20]).unwrap();
    let before = Machine::own_anon_now().unwrap();
    // SAFETY: the file is ours alone and is not changed while mapped.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    let sum: u64 = map.iter().step_by(4096).map(|&b| u64::from(b)).sum();
    assert_eq!(sum, (48 << 20) / 4096);
    let after = Machine::own_anon_now().unwrap();
    assert!(after < before + 8 * MIB, "48 MiB of file pages added {} bytes", after - before);
}

#[test]
fn few_mappings_and_pages_given_back() {
    if !cfg!(target_os = "linux") {
        eprintln!("SKIPPED: reads /proc");
        return;
    }
    many_slots_are_few_mappings();
    pages_are_given_back_and_caps_stay_lowered();
    a_chunk_that_goes_takes_its_memory_along_and_nothing_else();
    a_cache_that_holds_everything_grows_by_nothing();
    file_pages_are_not_counted();
}
