//! Hits, misses, caps and leases.

use std::sync::Arc;

use metaltail_store::testing::Fault;
use metaltail_store::{EvictReason, StoreError, StoreEvent};
use proptest::prelude::*;

use crate::rig::*;

fn pass(_: u32, _: u64, _: usize) -> Fault {
    Fault::None
}

/// `(lookups, cached, misses)` of all fetches.
fn looked_up(events: &[StoreEvent]) -> (u32, u32, u32) {
    events.iter().fold((0, 0, 0), |sum, event| match event {
        StoreEvent::Lookup { lookups, cached, misses, .. } => {
            (sum.0 + lookups, sum.1 + cached, sum.2 + misses)
        }
        _ => sum,
    })
}

#[test]
fn hits_come_first_and_at_once_then_misses_in_order_of_arrival() {
    let gates = Gates::default();
    let (store, recorder) = store((1, 8), config(8, 4, 8), gates.hook(8));
    gates.open(2);
    gates.open(5);
    fetch_all(&store, 3, &[2, 5]);
    recorder.take();
    let mut fetch = store.fetch(3, &[0, 2, 3, 4, 5]).unwrap();
    let hits = fetch.next_batch().unwrap().unwrap();
    assert_eq!(hits.iter().map(|(p, l)| (*p, l.expert())).collect::<Vec<_>>(), [(1, 2), (4, 5)]);
    for (expert, position) in [(4, 3), (0, 0), (3, 2)] {
        gates.open(expert);
        let batch = fetch.next_batch().unwrap().unwrap();
        assert_eq!(batch.iter().map(|(p, l)| (*p, l.expert())).collect::<Vec<_>>(), [(position, expert)]);
        assert!(is_whole(&batch[0].1, 0, 8));
    }
    assert!(fetch.next_batch().unwrap().is_none());
    assert!(hits.iter().all(|(_, lease)| is_whole(lease, 0, 8)));
    assert_eq!(looked_up(&recorder.take()), (5, 2, 3));
}

#[test]
fn cap_zero_keeps_nothing_and_still_serves_all() {
    let (store, recorder) = store((1, 8), config(0, 2, 2), pass);
    for _ in 0..3 {
        assert_eq!(fetch_all(&store, 3, &[0, 1, 2, 3, 4, 5, 6, 7]).len(), 8);
    }
    assert!(store.kept(3).unwrap().is_empty());
    assert_eq!(looked_up(&recorder.take()), (24, 0, 24));
}

#[test]
fn a_cap_below_top_k_keeps_the_latest() {
    let (store, _) = store((2, 8), config(3, 1, 8), pass);
    fetch_all(&store, 4, &[0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(store.kept(4).unwrap(), [5, 6, 7]);
    assert!(store.kept(3).unwrap().is_empty());
}

#[test]
fn a_leased_expert_is_never_evicted_or_overwritten() {
    let (store, recorder) = store((1, 16), config(2, 2, 4), pass);
    fetch_all(&store, 3, &[0, 1]);
    let mut fetch = store.fetch(3, &[0, 1]).unwrap();
    let held = fetch.next_batch().unwrap().unwrap();
    drop(fetch);
    for round in 0..5 {
        fetch_all(&store, 3, &[2 + round, 8 + round]);
    }
    assert_eq!(store.kept(3).unwrap(), [0, 1], "newcomers go, since all others are leased");
    assert!(held.iter().all(|(_, lease)| is_whole(lease, 0, 16)));
    // Not even memory pressure takes them.
    store.enforce(0, u64::MAX);
    assert!(held.iter().all(|(_, lease)| is_whole(lease, 0, 16)));
    drop(store);
    assert!(held.iter().all(|(_, lease)| is_whole(lease, 0, 16)), "leases outlive the store");
    drop(held);
    let gone = |event: &StoreEvent| {
        matches!(event, StoreEvent::Evicted { expert: 0 | 1, reason: EvictReason::Replaced, .. })
    };
    assert_eq!(
        recorder.take().iter().filter(|e| gone(e)).count(),
        1,
        "the lowered cap is kept after the leases"
    );
}

#[test]
fn too_many_leases_are_an_error_that_dropping_them_mends() {
    let (store, _) = store((1, 8), config(4, 2, 3), pass);
    let mut fetch = store.fetch(3, &[0, 1, 2, 3, 4]).unwrap();
    let mut held = Vec::new();
    let error = loop {
        match fetch.next_batch() {
            Ok(batch) => held.extend(batch.unwrap()),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, StoreError::LeasesExhausted { layer: 3, waiting: 2, in_flight: 3 }), "{error}");
    assert_eq!(held.len(), 3);
    held.clear();
    let mut rest = 0;
    while let Some(batch) = fetch.next_batch().unwrap() {
        rest += batch.len();
    }
    assert_eq!(rest, 2);
}

#[test]
fn a_fetch_of_nonsense_is_refused() {
    let (store, _) = store((1, 8), config(1, 1, 1), pass);
    let refusal = |layer, experts: &[u32]| store.fetch(layer, experts).err().unwrap();
    assert!(matches!(refusal(9, &[0]), StoreError::NoSuchLayer { layer: 9 }));
    assert!(matches!(refusal(3, &[0, 8]), StoreError::NoSuchExpert { layer: 3, expert: 8, count: 8 }));
    assert!(matches!(refusal(3, &[1, 1]), StoreError::Order { before: 1, expert: 1, .. }));
    assert!(matches!(refusal(3, &[2, 1]), StoreError::Order { before: 2, expert: 1, .. }));
    assert!(store.fetch(3, &[]).unwrap().next_batch().unwrap().is_none());
}

#[test]
fn two_fetches_share_one_load() {
    let gates = Gates::default();
    let (store, recorder) = store((1, 8), config(2, 2, 4), gates.hook(8));
    let mut one = store.fetch(3, &[6]).unwrap();
    let mut two = store.fetch(3, &[6]).unwrap();
    gates.open(6);
    let (a, b) = (one.next_batch().unwrap().unwrap(), two.next_batch().unwrap().unwrap());
    assert!(is_whole(&a[0].1, 0, 8) && is_whole(&b[0].1, 0, 8));
    let events = recorder.take();
    assert_eq!(events.iter().filter(|e| matches!(e, StoreEvent::ReadFinished { .. })).count(), 1);
    assert_eq!(looked_up(&events), (2, 0, 2));
    assert!(events.iter().any(|e| matches!(e, StoreEvent::Lookup { joined: 1, .. })));
}

#[test]
fn bytes_in_events_are_the_bytes_read() {
    let (store, recorder) = store((1, 8), config(8, 2, 4), pass);
    fetch_all(&store, 3, &[0, 1, 2]);
    let read = recorder.take().iter().fold(0, |sum, e| match e {
        StoreEvent::ReadFinished { bytes, calls: 2, ok: true, .. } => sum + bytes,
        _ => sum,
    });
    assert_eq!(read, 3 * (WEIGHTS + SCALES));
}

#[test]
fn threads_that_fetch_at_once_get_whole_experts_and_leave_order() {
    let (store, recorder) = store((2, 16), config(3, 3, 4), pass);
    let store = Arc::new(store);
    std::thread::scope(|scope| {
        for thread in 0u32..4 {
            let store = Arc::clone(&store);
            scope.spawn(move || {
                let mut seed = thread + 1;
                for _ in 0..150 {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let (layer, mask) = (seed >> 31, seed >> 8 & 0xffff);
                    let experts: Vec<u32> = (0..16).filter(|e| mask >> e & 1 == 1).collect();
                    let mut fetch = store.fetch(3 + layer, &experts).unwrap();
                    let mut seen = 0;
                    // Some fetches are left half way.
                    while let Some(batch) = fetch.next_batch().unwrap() {
                        seen += batch.len();
                        assert!(batch.iter().all(|(_, lease)| is_whole(lease, layer, 16)));
                        if seed.is_multiple_of(7) {
                            break;
                        }
                    }
                    assert!(seen == experts.len() || seed.is_multiple_of(7));
                }
            });
        }
    });
    // What was cancelled while running ends before this does.
    let all: Vec<u32> = (0..16).collect();
    assert_eq!(fetch_all(&store, 3, &all).len() + fetch_all(&store, 4, &all).len(), 32);
    assert!(store.kept(3).unwrap().len() <= 3 && store.kept(4).unwrap().len() <= 3);
    drop(store);
    let events = recorder.take();
    let (lookups, hits, misses) = looked_up(&events);
    assert_eq!(lookups, hits + misses);
    let count = |f: fn(&StoreEvent) -> bool| events.iter().filter(|e| f(e)).count();
    assert_eq!(
        count(|e| matches!(e, StoreEvent::ReadStarted { .. })),
        count(|e| matches!(e, StoreEvent::ReadFinished { ok: true, .. }))
    );
}

/// A plain LRU of each layer, oldest first.
fn plain_lru(kept: &mut Vec<u32>, cap: usize, experts: &[u32]) -> (u32, u32) {
    let (hits, misses): (Vec<u32>, Vec<u32>) = experts.iter().partition(|e| kept.contains(e));
    kept.retain(|e| !hits.contains(e));
    kept.extend(&hits);
    for &miss in &misses {
        kept.push(miss);
        if kept.len() > cap {
            kept.remove(0);
        }
    }
    (hits.len() as u32, misses.len() as u32)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// One loader, batches dropped in order: hits, misses and contents are those of a plain LRU.
    #[test]
    fn hits_and_misses_are_those_of_a_plain_lru(
        cap in 0usize..7, in_flight in 1usize..5,
        fetches in prop::collection::vec((0u32..2, 1u32..256), 1..25),
    ) {
        let (store, recorder) = store((2, 8), config(cap, 1, in_flight), pass);
        let mut plain: [Vec<u32>; 2] = Default::default();
        for (layer, mask) in fetches {
            let experts: Vec<u32> = (0..8).filter(|e| mask >> e & 1 == 1).collect();
            let (hits, misses) = plain_lru(&mut plain[layer as usize], cap, &experts);
            prop_assert_eq!(fetch_all(&store, layer + 3, &experts).len(), experts.len());
            prop_assert_eq!(looked_up(&recorder.take()), (hits + misses, hits, misses));
            let mut kept = plain[layer as usize].clone();
            kept.sort_unstable();
            prop_assert!(kept.len() <= cap);
            prop_assert_eq!(store.kept(layer + 3).unwrap(), kept);
        }
    }
}
