//! The slot table and the completion path under many interleavings of fetches, leases and loaders.
//!
//! Runs under `RUSTFLAGS="--cfg shuttle"` alone, where the store's mutex, condition variables, atomic words and
//! threads belong to the checker: it decides at each of them who goes on, finds lost wake-ups as deadlocks, and
//! prints the schedule that failed. A wait never times out there, so that patience hides nothing.
#![cfg(shuttle)]

use std::error::Error;
use std::sync::Arc;

use metaltail_container::Extent;
use metaltail_store::testing::{Fault, Faulty, MemoryFiles, place};
use metaltail_store::{
    ArenaChunk, ChunkListener, ExpertStore, LayerExperts, PolicyKind, Silent, StoreConfig, StoreError,
};
use shuttle::thread;

const EXPERTS: u32 = 5;
const LEN: u64 = 4096;

fn byte(layer: u32, expert: u32) -> u8 {
    (layer * EXPERTS + expert + 1) as u8
}

/// Two layers in one file; expert `e` of layer `l` is a page of one byte.
fn files() -> MemoryFiles {
    let pages = (0..2 * EXPERTS).flat_map(|e| vec![e as u8 + 1; LEN as usize]);
    MemoryFiles::new(vec![pages.collect()])
}

fn layers() -> Vec<LayerExperts> {
    let expert = |l, e| place(&[Extent { file: 0, offset: u64::from(l * EXPERTS + e) * LEN, len: LEN }]);
    let layer = |l| LayerExperts { layer: l, experts: (0..EXPERTS).map(|e| expert(l, e)).collect() };
    (0..2).map(layer).collect()
}

fn config() -> StoreConfig {
    StoreConfig {
        cap: 1,
        policy: PolicyKind::Frecency,
        pool: true,
        loaders: 2,
        in_flight: 2,
        staging: 1,
        pinned: vec![(1, 4)],
        ..StoreConfig::default()
    }
}

fn store(hook: impl Fn(u32, u64, usize) -> Fault + Send + Sync + 'static) -> Arc<ExpertStore> {
    store_of(config(), hook)
}

fn store_of(
    config: StoreConfig,
    hook: impl Fn(u32, u64, usize) -> Fault + Send + Sync + 'static,
) -> Arc<ExpertStore> {
    let reader = Box::new(Faulty::new(files(), hook));
    Arc::new(ExpertStore::with_reader(reader, layers(), config, Arc::new(Silent)).unwrap())
}

/// Knows chunks by address, and lets go of them unless told otherwise; others go on meanwhile.
struct Device {
    refuses: bool,
}

impl ChunkListener for Device {
    fn leaving(&self, _: ArenaChunk) -> Result<(), Box<dyn Error + Send + Sync>> {
        thread::yield_now();
        match self.refuses {
            true => Err("told to".into()),
            false => Ok(()),
        }
    }
}

/// Fetches and checks every byte; how many experts failed.
fn fetch(store: &ExpertStore, layer: u32, experts: &[u32]) -> usize {
    let mut fetch = store.fetch(layer, experts).unwrap();
    let (mut seen, mut failed) = (0, 0);
    loop {
        match fetch.next_batch() {
            Ok(Some(batch)) => {
                for (position, lease) in batch {
                    let wanted = byte(layer, experts[position]);
                    assert!(lease.run(0).iter().all(|&b| b == wanted), "bytes of another expert");
                    seen += 1;
                }
            }
            Ok(None) => break,
            Err(StoreError::Read { .. }) => failed += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(seen + failed, experts.len());
    failed
}

/// Tries each test in as many orders as METALTAIL_SHUTTLE_ORDERS says, by chance and with few changes of thread.
fn check(body: impl Fn() -> Arc<ExpertStore> + Send + Sync + 'static) {
    let orders = std::env::var("METALTAIL_SHUTTLE_ORDERS").ok().and_then(|text| text.parse().ok());
    let orders = orders.unwrap_or(300);
    let body = Arc::new(move || body().audit().unwrap());
    let (random, changes) = (Arc::clone(&body), body);
    shuttle::check_random(move || random(), orders);
    shuttle::check_pct(move || changes(), orders, 4);
}

#[test]
fn two_fetches_share_loads_and_slots() {
    check(|| {
        let store = store(|_, _, _| Fault::None);
        let other = Arc::clone(&store);
        let one = thread::spawn(move || {
            fetch(&other, 0, &[0, 1, 2]);
            fetch(&other, 1, &[2, 4]);
        });
        fetch(&store, 0, &[1, 2, 3]);
        fetch(&store, 1, &[4]);
        one.join().unwrap();
        store
    });
}

#[test]
fn what_is_expected_arrives_or_gives_way_and_nothing_is_lost() {
    check(|| {
        let store = store(|_, _, _| Fault::None);
        let other = Arc::clone(&store);
        let one = thread::spawn(move || {
            other.expect(1, &[0, 1]).unwrap();
            fetch(&other, 1, &[1, 2]);
        });
        store.expect(0, &[3, 4]).unwrap();
        fetch(&store, 0, &[0, 4]);
        store.expect(1, &[2, 3]).unwrap();
        one.join().unwrap();
        fetch(&store, 1, &[0, 1, 2, 3, 4]);
        store
    });
}

#[test]
fn failed_loads_reach_their_fetches_and_no_slot_is_lost() {
    check(|| {
        let broken = u64::from(EXPERTS) * 4096;
        let store = store(move |_, offset, _| if offset == broken { Fault::Error(5) } else { Fault::None });
        let other = Arc::clone(&store);
        let one = thread::spawn(move || fetch(&other, 1, &[0, 1]));
        store.expect(1, &[0]).unwrap();
        let failed = fetch(&store, 1, &[0, 3]);
        assert_eq!((failed, one.join().unwrap()), (1, 1));
        assert_eq!(fetch(&store, 1, &[1, 2, 3, 4]), 0);
        store
    });
}

#[test]
fn a_dropped_fetch_and_a_shrinking_cache_leave_a_working_store() {
    check(|| {
        let store = store(|_, _, _| Fault::None);
        let other = Arc::clone(&store);
        let one = thread::spawn(move || {
            drop(other.fetch(0, &[0, 1, 2, 3]).unwrap());
            other.enforce(0, 1 << 20);
        });
        fetch(&store, 0, &[2, 3]);
        store.grow(1 << 20).unwrap();
        one.join().unwrap();
        fetch(&store, 0, &[0, 1, 2, 3, 4]);
        store
    });
}

/// Slots for all experts and loads, in three chunks, of which one leaves and comes back, or is refused, under fetches.
#[test]
fn a_chunk_leaves_and_comes_back_under_fetches() {
    for refuses in [false, true] {
        check(move || {
            let config = StoreConfig { cap: 5, in_flight: 4, staging: 2, ..config() };
            let store = store_of(config, |_, _, _| Fault::None);
            store.set_chunk_listener(Arc::new(Device { refuses }));
            let other = Arc::clone(&store);
            let one = thread::spawn(move || {
                fetch(&other, 0, &[0, 1, 2]);
                other.enforce(0, 1);
                other.grow(1 << 20).unwrap();
            });
            fetch(&store, 0, &[2, 3]);
            store.expect(1, &[2]).unwrap();
            fetch(&store, 1, &[0, 1, 4]);
            one.join().unwrap();
            store.enforce(0, 1);
            fetch(&store, 0, &[0, 1, 2, 3, 4]);
            store
        });
    }
}
