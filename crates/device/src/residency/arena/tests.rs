//! A real store's arena on the simulated device, whose driver may refuse.

use std::sync::mpsc;
use std::time::Duration;

use metaltail_container::Extent;
use metaltail_store::testing::{MemoryFiles, Recorder, place};
use metaltail_store::{ExpertStore, LayerExperts, StoreConfig, StoreEvent};

use super::*;
use crate::residency::{DriverError, Ledger, Limits, Mode, SetId, Submission};
use crate::sim::{Profile, SimDriver};

const EXPERTS: u32 = 40;
const LEN: u64 = 8192;

/// The simulated device, which refuses one commit after letting so many pass.
struct Unwilling {
    inner: SimDriver,
    refuses: Option<usize>,
}

impl ResidencyDriver for Unwilling {
    fn limits(&self) -> Limits {
        self.inner.limits()
    }
    fn now(&self) -> Duration {
        self.inner.now()
    }
    fn wrap(&mut self, span: Span) -> Result<(), DriverError> {
        self.inner.wrap(span)
    }
    fn unwrap(&mut self, span: Span) {
        self.inner.unwrap(span);
    }
    fn create_set(&mut self) -> Result<SetId, DriverError> {
        self.inner.create_set()
    }
    fn add(&mut self, set: SetId, span: Span) -> Result<(), DriverError> {
        self.inner.add(set, span)
    }
    fn remove(&mut self, set: SetId, span: Span) -> Result<(), DriverError> {
        self.inner.remove(set, span)
    }
    fn commit(&mut self, set: SetId) -> Result<(), DriverError> {
        self.refuses = match self.refuses {
            Some(0) => {
                self.refuses = None;
                return Err(DriverError { call: "commit", reason: "told to".into() });
            }
            left => left.map(|left| left - 1),
        };
        self.inner.commit(set)
    }
    fn request(&mut self, set: SetId) -> Result<(), DriverError> {
        self.inner.request(set)
    }
    fn release(&mut self, set: SetId) -> Result<(), DriverError> {
        self.inner.release(set)
    }
    fn declare(&mut self, spans: &[Span]) -> Result<(), DriverError> {
        self.inner.declare(spans)
    }
}

/// A store whose experts the device reads.
struct Rig {
    store: ExpertStore,
    recorder: Arc<Recorder>,
    device: Arc<DeclaredArena<Unwilling>>,
}

impl Rig {
    /// Forty experts, all cached; expert `e` is bytes of the value `e`.
    fn new(mode: Mode, slabs: SlabAllocation) -> Rig {
        let file: Vec<u8> = (0..EXPERTS as u8).flat_map(|e| vec![e; LEN as usize]).collect();
        let at = |e: u32| place(&[Extent { file: 0, offset: u64::from(e) * LEN, len: LEN }]);
        let layers = vec![LayerExperts { layer: 0, experts: (0..EXPERTS).map(at).collect() }];
        let config =
            StoreConfig { cap: EXPERTS as usize, loaders: 2, in_flight: 4, ..StoreConfig::default() };
        let recorder = Arc::new(Recorder::default());
        let reader = Box::new(MemoryFiles::new(vec![file]));
        let store = ExpertStore::with_reader(reader, layers, config, recorder.clone()).unwrap();
        let driver = Unwilling { inner: SimDriver::new(Profile::m5max()), refuses: None };
        let residency = Arc::new(Residency::new(Ledger::new(driver, mode)));
        let device = Arc::new(DeclaredArena::new(store.arena(), slabs, residency));
        assert!(store.set_chunk_listener(device.clone()));
        Rig { store, recorder, device }
    }

    /// Hands work over that reads an expert where it lies.
    fn submit(&self, bytes: &[u8]) -> Result<Submission, String> {
        self.device.declare_new().map_err(|error| error.to_string())?;
        let mut ledger = self.device.residency().ledger();
        let submission = ledger.submit().map_err(|error| error.to_string())?;
        let device = &mut ledger.driver_mut().inner;
        device.begin_submission();
        let span = Span { base: bytes.as_ptr() as usize, len: bytes.len() };
        match device.dispatch(&[span], &[], &[]) {
            Ok(()) => Ok(submission),
            Err(error) => {
                ledger.complete(submission).unwrap();
                Err(error.to_string())
            }
        }
    }

    /// The device reads every expert, and every byte is right; the ledger mirrors the arena then.
    fn pass(&self) {
        let mut fetch = self.store.fetch(0, &(0..EXPERTS).collect::<Vec<_>>()).unwrap();
        let mut seen = 0;
        while let Some(batch) = fetch.next_batch().unwrap() {
            for (_, lease) in batch {
                let submission = self.submit(lease.run(0)).unwrap();
                assert!(lease.run(0).iter().all(|&byte| u32::from(byte) == lease.expert()));
                self.device.residency().complete(submission).unwrap();
                seen += 1;
            }
        }
        assert_eq!(seen, EXPERTS);
        assert!(self.device.difference(&[]).is_empty(), "{:?}", self.device.difference(&[]));
        self.store.audit().unwrap();
    }

    fn chunks(&self) -> Vec<ArenaChunk> {
        (0..self.store.arena().chunks()).filter_map(|number| self.store.arena().chunk(number)).collect()
    }

    fn unregistered(&self) -> u64 {
        self.device.residency().stats().unregistered
    }
}

#[test]
fn the_ledger_mirrors_a_cache_that_shrinks_and_grows_by_chunks() {
    for (mode, slabs) in [
        (Mode::Set, SlabAllocation::Arena),
        (Mode::Set, SlabAllocation::PerExpert),
        (Mode::Walk, SlabAllocation::Arena),
    ] {
        let rig = Rig::new(mode, slabs);
        rig.pass();
        let (before, allocations) = (rig.chunks(), rig.device.residency().stats().allocations);
        for round in 1..=2 {
            assert!(rig.store.enforce(0, 3 * LEN) > 0);
            let after = rig.chunks();
            let gone = before.iter().find(|chunk| !after.contains(chunk)).unwrap();
            assert_eq!(after.len(), before.len() - 1);
            assert!(rig.unregistered() >= round);
            assert!(rig.device.difference(&[]).is_empty(), "before anything is submitted");
            // SAFETY-free: an address is all that the device gets.
            let touch = Span { base: gone.base, len: 64 };
            let submission = rig.device.residency().submit().unwrap();
            let refused = rig.device.residency().ledger().driver_mut().inner.dispatch(&[touch], &[], &[]);
            assert!(refused.unwrap_err().to_string().contains("freed"), "{mode:?} {slabs:?}");
            rig.device.residency().complete(submission).unwrap();
            rig.pass();
            while rig.store.grow(1 << 20).unwrap() > 0 {}
            rig.pass();
            assert_eq!(
                (rig.chunks(), rig.device.residency().stats().allocations),
                (before.clone(), allocations)
            );
        }
    }
}

#[test]
fn a_removal_that_the_driver_refuses_leaves_the_chunk_in_use_and_is_told() {
    for slabs in [SlabAllocation::Arena, SlabAllocation::PerExpert] {
        // The first commit of a removal, or one in the midst of a chunk's slots.
        for passed in [0, if slabs == SlabAllocation::Arena { 0 } else { 2 }] {
            let rig = Rig::new(Mode::Set, slabs);
            rig.pass();
            let chunks = rig.chunks();
            rig.recorder.take();
            rig.device.residency().ledger().driver_mut().refuses = Some(passed);
            assert_eq!(rig.store.enforce(0, 1), 0);
            let told = rig.recorder.take();
            let reason = |e: &StoreEvent| matches!(e, StoreEvent::ChunkKept { reason, .. } if reason.contains("told to"));
            assert!(told.iter().any(reason), "{told:?}");
            assert_eq!(rig.chunks(), chunks);
            // The device may read all of it again: the removal is taken back with the next submission.
            rig.pass();
        }
    }
}

#[test]
fn a_chunk_waits_for_work_that_may_read_it() {
    let rig = Rig::new(Mode::Set, SlabAllocation::Arena);
    rig.pass();
    let mut fetch = rig.store.fetch(0, &[7]).unwrap();
    let (_, lease) = fetch.next_batch().unwrap().unwrap().pop().unwrap();
    let submission = rig.submit(lease.run(0)).unwrap();
    let at = lease.run(0).as_ptr() as usize;
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            tell.send(rig.store.enforce(0, 1)).unwrap();
        });
        assert!(told.recv_timeout(Duration::from_millis(100)).is_err(), "it went under a submission");
        // Work that comes meanwhile declares what it needs and is not held up.
        let other = rig.submit(lease.run(0)).unwrap();
        rig.device.residency().complete(other).unwrap();
        assert!(told.recv_timeout(Duration::from_millis(50)).is_err(), "it went under a submission");
        rig.device.residency().complete(submission).unwrap();
        assert!(told.recv_timeout(Duration::from_secs(20)).unwrap() > 0);
    });
    assert!(
        rig.chunks().iter().any(|chunk| (chunk.base..chunk.base + chunk.len).contains(&at)),
        "it was leased"
    );
    drop((lease, fetch));
    rig.pass();
}

#[test]
fn a_chunk_that_never_was_declared_leaves_unasked_and_all_are_forgotten_in_the_end() {
    let rig = Rig::new(Mode::Set, SlabAllocation::Arena);
    let mut fetch = rig.store.fetch(0, &[0, 1, 2]).unwrap();
    while fetch.next_batch().unwrap().is_some() {}
    drop(fetch);
    assert!(rig.store.enforce(0, 1) > 0);
    assert_eq!(rig.unregistered(), 0);
    rig.pass();
    let residency = Arc::clone(rig.device.residency());
    assert!(residency.stats().allocations > 0);
    drop(rig);
    assert_eq!((residency.stats().allocations, residency.stats().bytes), (0, 0));
}
