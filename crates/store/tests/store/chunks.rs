//! A cache whose chunks someone knows by address: they go as a whole, after that one let go, and come back.

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use metaltail_store::testing::Fault;
use metaltail_store::{ArenaChunk, ArenaView, ChunkListener, ExpertStore, StoreConfig, StoreEvent, rank};

use crate::rig::*;

/// Two layers of sixteen experts, all cached: 32 slots and four for loads, in chunks of eight.
const SHAPE: (u32, u32) = (2, 16);
const ALL: [u32; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// Lets go of chunks, or does not.
#[derive(Default)]
struct Device {
    arena: OnceLock<ArenaView>,
    left: Mutex<Vec<ArenaChunk>>,
    refuses: AtomicBool,
}

impl ChunkListener for Device {
    fn leaving(&self, chunk: ArenaChunk) -> Result<(), Box<dyn Error + Send + Sync>> {
        assert!(!rank::table_is_locked());
        assert_eq!(self.arena.get().unwrap().chunk(chunk.number), None, "it can be declared anew");
        if self.refuses.load(Ordering::Relaxed) {
            return Err("the device reads it".into());
        }
        self.left.lock().unwrap().push(chunk);
        Ok(())
    }
}

fn known_to(store: &ExpertStore) -> Arc<Device> {
    let device = Arc::new(Device::default());
    let _ = device.arena.set(store.arena());
    assert!(store.set_chunk_listener(device.clone()));
    assert!(!store.set_chunk_listener(device.clone()), "a second one");
    device
}

fn pass(_: u32, _: u64, _: usize) -> Fault {
    Fault::None
}

/// Fetches everything and looks at every byte.
fn all_is_right(store: &ExpertStore) {
    for layer in 0..SHAPE.0 {
        let mut fetch = store.fetch(layer + 3, &ALL).unwrap();
        let mut seen = 0;
        while let Some(batch) = fetch.next_batch().unwrap() {
            seen += batch.len();
            assert!(batch.iter().all(|(_, lease)| is_whole(lease, layer, SHAPE.1)));
        }
        assert_eq!(seen, 16);
    }
    store.audit().unwrap();
}

fn in_use(store: &ExpertStore) -> Vec<ArenaChunk> {
    (0..store.arena().chunks()).filter_map(|number| store.arena().chunk(number)).collect()
}

#[test]
fn chunks_go_one_by_one_and_come_back_in_their_places() {
    for pool in [false, true] {
        let config = StoreConfig { pool, ..config(16, 2, 4) };
        let (store, recorder) = store(SHAPE, config, pass);
        let device = known_to(&store);
        all_is_right(&store);
        let (before, slots) = (in_use(&store), store.cached_slots());
        let slot = before[0].slot_bytes as u64;
        assert_eq!((before.len(), slots), (5, 32));

        // A byte too many costs a chunk; those that have none to spare stay.
        let given = store.enforce(0, 1);
        assert!(given > 0 && given <= 8 * slot, "{given}");
        let gone = device.left.lock().unwrap().clone();
        assert_eq!((gone.len(), in_use(&store).len()), (1, 4));
        assert!(before.contains(&gone[0]) && !in_use(&store).contains(&gone[0]));
        assert_eq!(store.cached_slots(), slots - gone[0].len / gone[0].slot_bytes);
        all_is_right(&store);

        // All that can go: loads keep a chunk.
        store.enforce(0, 1 << 40);
        assert_eq!(in_use(&store).len(), 1);
        let short = |e: &StoreEvent| matches!(e, StoreEvent::Shrunk { short: 1.., .. });
        assert!(recorder.take().iter().any(short), "what could not be given is told");
        all_is_right(&store);

        // Too little room for a whole one: nothing comes.
        assert_eq!(store.grow(3 * slot).unwrap(), 0);
        while in_use(&store).len() < 5 {
            assert!(store.grow(8 * slot).unwrap() > 0);
            all_is_right(&store);
        }
        while store.grow(64 * slot).unwrap() > 0 {}
        assert_eq!((in_use(&store), store.cached_slots()), (before.clone(), slots));
        all_is_right(&store);
    }
}

#[test]
fn a_chunk_that_is_refused_stays_in_use_and_is_told() {
    let (store, recorder) = store(SHAPE, config(16, 2, 4), pass);
    let device = known_to(&store);
    all_is_right(&store);
    device.refuses.store(true, Ordering::Relaxed);
    let (before, changes) = (in_use(&store), store.arena().changes());
    recorder.take();
    assert_eq!(store.enforce(0, 1), 0);
    let told = recorder.take();
    let kept = told.iter().find_map(|event| match event {
        StoreEvent::ChunkKept { bytes, reason } => Some((*bytes, reason.as_str())),
        _ => None,
    });
    assert!(matches!(kept, Some((1.., "the device reads it"))), "{told:?}");
    assert!(told.iter().any(|e| matches!(e, StoreEvent::Shrunk { bytes: 0, short: 1, .. })));
    assert_eq!(in_use(&store), before);
    assert!(store.arena().changes() > changes, "a device is to look again");
    all_is_right(&store);
    // It is not asked again at once: each time what is in the chunk is lost.
    device.refuses.store(false, Ordering::Relaxed);
    assert_eq!(store.enforce(0, 1), 0);
    assert!(device.left.lock().unwrap().is_empty());
    // What may be kept falls all the same.
    let capacity = store.capacity_bytes();
    store.restrict(20_000);
    assert!(store.capacity_bytes() <= capacity - 20_000);
    all_is_right(&store);
}

#[test]
fn what_is_leased_stays_where_it_is() {
    let (store, _) = store(SHAPE, config(16, 2, 4), pass);
    let device = known_to(&store);
    all_is_right(&store);
    // All hits: an expert of each chunk and more.
    let mut fetch = store.fetch(3, &ALL).unwrap();
    let leases = fetch.next_batch().unwrap().unwrap();
    assert_eq!(leases.len(), 16);
    store.enforce(0, 1 << 40);
    let left = device.left.lock().unwrap().clone();
    for (_, lease) in &leases {
        assert!(is_whole(lease, 0, SHAPE.1));
        let at = lease.run(0).as_ptr() as usize;
        assert!(left.iter().all(|chunk| !(chunk.base..chunk.base + chunk.len).contains(&at)));
    }
    drop(leases);
    drop(fetch);
    all_is_right(&store);
}

#[test]
fn what_may_be_kept_falls_by_whole_chunks_as_far_as_they_fit() {
    let (store, _) = store(SHAPE, config(16, 2, 4), pass);
    let device = known_to(&store);
    all_is_right(&store);
    let (capacity, slot) = (store.capacity_bytes(), in_use(&store)[0].slot_bytes as u64);
    store.restrict(3 * slot);
    assert_eq!(store.capacity_bytes(), capacity - 3 * slot);
    assert!(device.left.lock().unwrap().is_empty(), "a chunk is more than that");
    store.restrict(13 * slot);
    assert_eq!(store.capacity_bytes(), capacity - 16 * slot);
    assert!(!device.left.lock().unwrap().is_empty());
    all_is_right(&store);
}
