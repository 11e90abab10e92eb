//! A small model in memory, and a drive whose reads wait until they are let go.

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex};

use metaltail_container::{ExpertPlace, Extent};
use metaltail_store::testing::{Fault, Faulty, MemoryFiles, Recorder, place};
use metaltail_store::{ExpertStore, LayerExperts, Lease, StoreConfig};

pub const WEIGHTS: u64 = 6000;
pub const SCALES: u64 = 300;

/// File bytes that differ from place to place.
pub fn bytes(file: u32, len: u64) -> Vec<u8> {
    let mix = |i: u64| (i ^ u64::from(file) << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56;
    (0..len).map(|i| mix(i) as u8).collect()
}

/// Two runs an expert, as in a colibrì directory: all weights, then all scales, nothing aligned;
/// the last expert's scales end with the file.
pub fn expert(file: u32, experts: u32, e: u32) -> ExpertPlace {
    let weights = 100 + u64::from(e) * WEIGHTS;
    let scales = 100 + u64::from(experts) * WEIGHTS + u64::from(e) * SCALES;
    place(&[Extent { file, offset: weights, len: WEIGHTS }, Extent { file, offset: scales, len: SCALES }])
}

pub fn file_len(experts: u32) -> u64 {
    100 + u64::from(experts) * (WEIGHTS + SCALES)
}

/// `layers` layers, numbered from 3, one file each.
pub fn layers(layers: u32, experts: u32) -> Vec<LayerExperts> {
    let layer =
        |l| LayerExperts { layer: l + 3, experts: (0..experts).map(|e| expert(l, experts, e)).collect() };
    (0..layers).map(layer).collect()
}

pub fn files(layers: u32, experts: u32) -> MemoryFiles {
    MemoryFiles::new((0..layers).map(|l| bytes(l, file_len(experts))).collect())
}

pub fn config(cap: usize, loaders: usize, in_flight: usize) -> StoreConfig {
    StoreConfig { cap, loaders, in_flight, ..StoreConfig::default() }
}

/// A store over the model in memory whose reads pass `hook(file, offset, bytes)`.
pub fn store(
    shape: (u32, u32),
    config: StoreConfig,
    hook: impl Fn(u32, u64, usize) -> Fault + Send + Sync + 'static,
) -> (ExpertStore, Arc<Recorder>) {
    let recorder = Arc::new(Recorder::default());
    let reader = Box::new(Faulty::new(files(shape.0, shape.1), hook));
    let store = ExpertStore::with_reader(reader, layers(shape.0, shape.1), config, recorder.clone());
    (store.unwrap(), recorder)
}

/// The expert that a read of weights in [`expert`]'s layout belongs to.
pub fn expert_at(offset: u64, experts: u32) -> Option<u32> {
    let e = (offset.checked_sub(100)? / WEIGHTS) as u32;
    (e < experts).then_some(e)
}

/// Whether a lease has the bytes that the file has.
pub fn is_whole(lease: &Lease, file: u32, experts: u32) -> bool {
    let all = bytes(file, file_len(experts));
    let runs = expert(file, experts, lease.expert()).runs;
    let mut same =
        runs.iter().enumerate().map(|(i, r)| lease.run(i) == &all[r.offset as usize..][..r.len as usize]);
    same.all(|s| s)
}

/// Reads of an expert's weights wait here until it is opened.
#[derive(Clone, Default)]
pub struct Gates(Arc<(Mutex<HashSet<u32>>, Condvar)>);

impl Gates {
    pub fn open(&self, expert: u32) {
        self.0.0.lock().unwrap().insert(expert);
        self.0.1.notify_all();
    }

    /// A hook for layers of `experts` experts.
    pub fn hook(&self, experts: u32) -> impl Fn(u32, u64, usize) -> Fault + Send + Sync + 'static {
        let gates = self.clone();
        move |_, offset, _| {
            if let Some(expert) = expert_at(offset, experts) {
                let open = gates.0.0.lock().unwrap();
                drop(gates.0.1.wait_while(open, |open| !open.contains(&expert)).unwrap());
            }
            Fault::None
        }
    }
}

/// Fetches `experts`, dropping each batch before the next; positions in order of delivery.
pub fn fetch_all(store: &ExpertStore, layer: u32, experts: &[u32]) -> Vec<usize> {
    let mut fetch = store.fetch(layer, experts).unwrap();
    let mut order = Vec::new();
    while let Some(batch) = fetch.next_batch().unwrap() {
        order.extend(batch.iter().map(|(position, _)| *position));
    }
    order
}
