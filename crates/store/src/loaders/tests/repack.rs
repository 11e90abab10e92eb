//! Experts that are made over after they were read.

use metaltail_container::{Repack, RunOffset, Stored};
use metaltail_quant::{Format, MatrixLayout};

use super::*;

/// Gate and up: 100 × 125, in turn in the columns of the first run. Down: 14 × 25, the second run.
const SHAPES: [(usize, usize); 3] = [(100, 125), (100, 125), (14, 25)];

fn repack() -> Repack {
    let layouts = SHAPES.map(|(rows, cols)| MatrixLayout::new(Format::Bf16, rows, cols).unwrap());
    let at = |run| RunOffset { run, offset: 0 };
    let pair = |first| Stored::Transposed { at: at(0), pitch: 200, first, step: 2 };
    let down = Stored::Transposed { at: at(1), pitch: 14, first: 0, step: 1 };
    Repack::new(layouts, [pair(0), pair(1), down]).unwrap()
}

fn repacked_layers() -> Vec<LayerExperts> {
    let mut layers = layers();
    for place in layers.iter_mut().flat_map(|layer| &mut layer.experts) {
        let repack = repack();
        (place.parts, place.repack) = (repack.parts(), Some(Box::new(repack)));
    }
    layers
}

/// What an expert's matrices must be, element by element.
fn matrices(file: u32, e: u32) -> [Vec<u8>; 3] {
    let [first, second] = [0, 1].map(|run| {
        let run = expert(file, e).runs[run];
        &bytes(file)[run.offset as usize..][..run.len as usize]
    });
    let element = |bytes: &[u8], at: usize| [bytes[2 * at], bytes[2 * at + 1]];
    let of = |part: usize, stored: &dyn Fn(usize, usize) -> [u8; 2]| {
        let (rows, cols) = SHAPES[part];
        (0..rows * cols).flat_map(|i| stored(i / cols, i % cols)).collect::<Vec<u8>>()
    };
    [
        of(0, &|row, col| element(first, col * 200 + 2 * row)),
        of(1, &|row, col| element(first, col * 200 + 2 * row + 1)),
        of(2, &|row, col| element(second, col * 14 + row)),
    ]
}

/// Fetches every expert of both layers, several times, and holds its matrices against the files.
fn assert_all(store: &ExpertStore, rounds: usize) {
    let parts = repack().parts();
    for layer in (0..2).cycle().take(2 * rounds) {
        let ids: Vec<u32> = (0..EXPERTS).collect();
        let (mut fetch, mut came) = (store.fetch(layer + 3, &ids).unwrap(), 0);
        while let Some(batch) = fetch.next_batch().unwrap() {
            for (_, lease) in &batch {
                for (part, wanted) in parts.iter().zip(matrices(layer, lease.expert())) {
                    let found = &lease.run(0)[part.weights.offset as usize..][..wanted.len()];
                    assert!(found == wanted, "expert {} of layer {}", lease.expert(), layer + 3);
                }
            }
            came += batch.len();
        }
        assert_eq!(came, EXPERTS as usize);
    }
    store.audit().unwrap();
}

#[test]
fn every_load_is_repacked_however_it_was_read() {
    for uring in carriers() {
        for (chunk, direct, loaders) in [(None, false, 1), (Some(16_384), false, 3), (None, true, 3)] {
            let mut rig = Rig::new(1);
            if direct && FileReader::open(&[Rig::path(rig.dirs.path(), 0, 0)], true).is_err() {
                println!("SKIPPED: no direct reads");
                continue;
            }
            (rig.layers, rig.direct) = (repacked_layers(), direct);
            // Nothing is kept: each round reads and repacks again, the later ones without a checksum.
            rig.config = StoreConfig { cap: 0, chunk_bytes: chunk, loaders, ..rig.config };
            let (store, recorder, _dirs) = rig.open(uring);
            assert_all(&store, 3);
            let events = recorder.take();
            let count = |of: fn(&StoreEvent) -> bool| events.iter().filter(|event| of(event)).count();
            assert_eq!(count(|event| matches!(event, StoreEvent::ReadFinished { ok: true, .. })), 48);
            assert_eq!(count(|event| matches!(event, StoreEvent::Verified { .. })), 16);
        }
    }
}

#[test]
fn what_was_cached_is_what_was_repacked() {
    for uring in carriers() {
        let mut rig = Rig::new(1);
        rig.layers = repacked_layers();
        rig.config.cap = EXPERTS as usize;
        let (store, recorder, _dirs) = rig.open(uring);
        assert_all(&store, 3);
        let reads = recorder.take().iter().filter(|e| matches!(e, StoreEvent::ReadFinished { .. })).count();
        assert_eq!(reads, 16);
    }
}

/// The checksum is of the stored bytes, so damage is found and mended before anything is made of it.
#[test]
fn damage_is_mended_before_the_repack() {
    for uring in carriers() {
        let mut rig = Rig::new(2);
        rig.layers = repacked_layers();
        rig.config.cap = 0;
        rig.damage(0, 0, expert(0, 5).runs[0].offset + 4321);
        let (store, _, _dirs) = rig.open(uring);
        assert_all(&store, 2);
    }
}

#[test]
fn a_failed_read_is_an_error_and_the_next_one_is_repacked() {
    for uring in carriers() {
        let mut rig = Rig::new(1);
        rig.layers = repacked_layers();
        let calls = AtomicU32::new(0);
        rig.hook(0, move |_, _, _| match calls.fetch_add(1, Ordering::Relaxed) {
            0 => Fault::Error(libc::EIO),
            _ => Fault::None,
        });
        let (store, _, _dirs) = rig.open(uring);
        let mut fetch = store.fetch(3, &[0]).unwrap();
        assert!(matches!(fetch.next_batch(), Err(StoreError::Read { .. })));
        drop(fetch);
        assert_all(&store, 1);
    }
}
