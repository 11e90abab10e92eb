//! The expert store: opening, settings, and what its threads share.
//!
//! **Locks.** One mutex guards the slot table; under it nothing is read, no observer is called and no
//! other lock is taken. The arena's atomic words come below it: they may be touched with or without the
//! mutex. A condition variable belongs to it: `done` (fetches wait for arrivals and freed slots). Loaders
//! sleep on the bell, whose own lock is taken last.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metaltail_container::{ExpertPlace, Extent};

use crate::arena::Arena;
use crate::bell::Bell;
use crate::error::StoreError;
use crate::event::{Observer, StoreEvent};
use crate::geometry::{Geometry, LayerExperts};
use crate::io::{
    Chosen, Direct, DriveFigures, DriveFiles, Drives, ExpertReader, Io, IoMode, MOST_DRIVES, Wish, choose,
};
use crate::loaders::{Carriage, Loaders};
use crate::machine::Machine;
use crate::policy::{ExpertId, PolicyKind, PolicyShape};
use crate::table::{Job, Keep, Table};

/// Settings of a store. `StoreConfig { cap, ..StoreConfig::default() }` is the usual way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreConfig {
    /// Slots kept a layer; 0 keeps none.
    pub cap: usize,
    /// Which kept expert makes room for another.
    pub policy: PolicyKind,
    /// Whether layers whose experts are of one size share their slots, `cap` being the mean. A policy that
    /// goes by recency alone finds nothing in a pool that is smaller than what one token uses.
    pub pool: bool,
    /// Loader threads, at least 1. They wait for the drive more than they compute.
    pub loaders: usize,
    /// Whether reads bypass the page cache.
    pub direct: Direct,
    /// What carries reads out.
    pub io: Io,
    /// Longest part of an expert that is read at once, in bytes, rounded down to whole pages. Unless said, one
    /// drive reads whole runs, and several drives parts.
    pub chunk_bytes: Option<u64>,
    /// Slots for experts on their way or leased and not kept, for each size class; at least 1.
    pub in_flight: usize,
    /// Whether an expert's checksum, where the container has one, is verified at its first load.
    pub checksums: bool,
    /// Longest wait for an expert before the fetch reports a stall.
    pub patience: Duration,
}

impl StoreConfig {
    /// Loader threads unless told otherwise: two a processor, 4 at most.
    pub fn default_loaders() -> usize {
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        (2 * processors).min(4)
    }

    /// In-flight slots unless told otherwise: two a loader, so that none waits for the reader of the last.
    pub fn default_in_flight(loaders: usize) -> usize {
        loaders.saturating_mul(2).max(8)
    }
}

impl Default for StoreConfig {
    /// Keeps none; 60 s of patience.
    fn default() -> StoreConfig {
        let loaders = StoreConfig::default_loaders();
        StoreConfig {
            cap: 0,
            policy: PolicyKind::default(),
            pool: false,
            loaders,
            direct: Direct::Auto,
            io: Io::Auto,
            chunk_bytes: None,
            in_flight: StoreConfig::default_in_flight(loaders),
            checksums: true,
            patience: Duration::from_secs(60),
        }
    }
}

/// What the mutex guards.
pub(crate) struct State {
    pub(crate) table: Table,
    /// Experts whose checksum was seen to be right.
    verified: Vec<Vec<bool>>,
    stopping: bool,
}

/// What store, fetches, leases and loaders share.
pub(crate) struct Shared {
    pub(crate) arena: Arc<Arena>,
    pub(crate) layers: Vec<LayerExperts>,
    pub(crate) drives: Drives,
    pub(crate) bell: Bell,
    pub(crate) patience: Duration,
    numbers: HashMap<u32, u32>,
    state: Mutex<State>,
    done: Condvar,
    observer: Arc<dyn Observer>,
    checksums: bool,
}

impl Shared {
    /// No code under this lock can leave the table half changed, so a poisoned lock is taken as it is.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wait_for_change<'g>(
        &self,
        state: MutexGuard<'g, State>,
        limit: Duration,
    ) -> MutexGuard<'g, State> {
        self.done.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    pub(crate) fn emit(&self, event: &StoreEvent) {
        self.observer.on(event);
    }

    pub(crate) fn place(&self, id: ExpertId) -> &ExpertPlace {
        &self.layers[id.layer as usize].experts[id.expert as usize]
    }

    pub(crate) fn layer_index(&self, layer: u32) -> Result<u32, StoreError> {
        self.numbers.get(&layer).copied().ok_or(StoreError::NoSuchLayer { layer })
    }

    /// Drops holds, then tells waiting fetches and the observer.
    pub(crate) fn release(&self, slots: impl IntoIterator<Item = u32>) {
        let mut events = Vec::new();
        let mut freed = false;
        let mut state = self.lock();
        for slot in slots {
            freed |= state.table.release(slot, &mut events);
        }
        drop(state);
        if freed {
            self.done.notify_all();
        }
        events.iter().for_each(|e| self.emit(e));
    }

    /// The next load, if one waits.
    pub(crate) fn try_next_job(&self) -> Option<Job> {
        self.lock().table.take_job()
    }

    /// Whether the store closes: no load begins any more.
    pub(crate) fn stopping(&self) -> bool {
        self.lock().stopping
    }

    /// Tells loaders that a load waits.
    pub(crate) fn wake_loaders(&self) {
        self.bell.ring();
    }

    /// Whether a load ahead of need is to be called off.
    pub(crate) fn should_stop(&self, _job: &Job) -> bool {
        false
    }

    pub(crate) fn complete(&self, slot: u32, result: Result<u64, StoreError>) {
        let mut events = Vec::new();
        self.lock().table.complete(slot, result, &mut events);
        self.done.notify_all();
        events.iter().for_each(|e| self.emit(e));
    }

    pub(crate) fn stop(&self) {
        self.lock().stopping = true;
        self.bell.ring_all();
    }

    pub(crate) fn needs_check(&self, id: ExpertId) -> bool {
        self.checksums && !self.lock().verified[id.layer as usize][id.expert as usize]
    }

    pub(crate) fn checked(&self, id: ExpertId) {
        self.lock().verified[id.layer as usize][id.expert as usize] = true;
    }
}

/// Routed experts on disk, some of them in memory; [`ExpertStore::fetch`] is the way to them.
pub struct ExpertStore {
    shared: Arc<Shared>,
    mode: IoMode,
    /// Joined when the store closes.
    _loaders: Loaders,
}

impl ExpertStore {
    /// Opens the files that the layers' places number, maps slots and starts loaders.
    ///
    /// # Errors
    /// Files that cannot be opened, places outside their file, impossible settings, no memory.
    pub fn open(
        files: &[PathBuf],
        layers: Vec<LayerExperts>,
        config: StoreConfig,
        observer: Arc<dyn Observer>,
    ) -> Result<ExpertStore, StoreError> {
        ExpertStore::open_drives(&[DriveFiles::whole(files)], layers, config, observer)
    }

    /// As [`ExpertStore::open`], with files that lie on several drives, some of them on more than one.
    /// That copies of a file are equal is the caller's to know.
    ///
    /// # Errors
    /// As [`ExpertStore::open`], and an expert that lies on no drive.
    pub fn open_drives(
        drives: &[DriveFiles],
        layers: Vec<LayerExperts>,
        config: StoreConfig,
        observer: Arc<dyn Observer>,
    ) -> Result<ExpertStore, StoreError> {
        let available = Machine::probe().ok().map(|m| m.headroom());
        let StoreConfig { direct, io, loaders, in_flight, .. } = config;
        let wish = Wish { direct, io, loaders: loaders.max(1), in_flight: in_flight.max(1), available };
        let Chosen { readers, rates, mode } = choose(drives, &layers, &wish)?;
        if mode.makeshift {
            observer
                .on(&StoreEvent::Notice(format!("expert reads go through the page cache: {}", mode.reason)));
        }
        let named = drives.iter().map(|drive| drive.dir.clone());
        let boxed = readers.into_iter().map(|reader| Box::new(reader) as Box<dyn ExpertReader>);
        ExpertStore::build(named.zip(boxed).collect(), &rates, mode, layers, config, observer)
    }

    /// A store over a reader of the caller's, which threads ask; `config.direct` and `config.io` are ignored.
    ///
    /// # Errors
    /// As [`ExpertStore::open`].
    pub fn with_reader(
        reader: Box<dyn ExpertReader>,
        layers: Vec<LayerExperts>,
        config: StoreConfig,
        observer: Arc<dyn Observer>,
    ) -> Result<ExpertStore, StoreError> {
        ExpertStore::with_readers(vec![reader], layers, config, observer)
    }

    /// As [`ExpertStore::with_reader`], with a reader for each of several drives.
    ///
    /// # Errors
    /// As [`ExpertStore::open_drives`].
    pub fn with_readers(
        readers: Vec<Box<dyn ExpertReader>>,
        layers: Vec<LayerExperts>,
        config: StoreConfig,
        observer: Arc<dyn Observer>,
    ) -> Result<ExpertStore, StoreError> {
        let direct = readers.iter().any(|reader| reader.alignment() > 1);
        let brought = || "the caller brought the readers".to_owned();
        let mode =
            IoMode { direct, reason: brought(), makeshift: false, uring: false, uring_reason: brought() };
        let named = readers.into_iter().enumerate().map(|(n, reader)| (format!("reader-{n}").into(), reader));
        ExpertStore::build(named.collect(), &[], mode, layers, config, observer)
    }

    fn build(
        drives: Vec<(PathBuf, Box<dyn ExpertReader>)>,
        rates: &[Option<f64>],
        mode: IoMode,
        layers: Vec<LayerExperts>,
        config: StoreConfig,
        observer: Arc<dyn Observer>,
    ) -> Result<ExpertStore, StoreError> {
        if config.loaders == 0 || config.in_flight == 0 {
            return Err(StoreError::Config("loaders and in-flight slots must be at least 1 each".into()));
        }
        let geometry = Geometry::new(&layers)?;
        if drives.is_empty() || drives.len() > MOST_DRIVES {
            let got = drives.len();
            return Err(StoreError::Config(format!("{got} drives; 1 to {MOST_DRIVES} are possible")));
        }
        let drives = Drives::new(drives, rates);
        check_files(&drives, &layers)?;
        let too_many = || {
            StoreError::Config(format!(
                "cap {} and {} in flight are too many slots",
                config.cap, config.in_flight
            ))
        };
        let slots = geometry.kept_slots(config.cap);
        let slots: Option<Vec<usize>> = slots.into_iter().map(|n| n.checked_add(config.in_flight)).collect();
        let slots = slots.ok_or_else(too_many)?;
        let total =
            slots.iter().try_fold(0u32, |sum, &n| u32::try_from(n).ok().and_then(|n| sum.checked_add(n)));
        let total = total.filter(|&n| n < u32::MAX).ok_or_else(too_many)? as usize;
        let mut classes = Vec::with_capacity(slots.len());
        for (&bytes, &count) in geometry.classes.iter().zip(&slots) {
            classes.push((usize::try_from(bytes).map_err(|_| too_many())?, count));
        }
        let arena = Arc::new(Arena::new(&classes)?);
        let numbers: Vec<u32> = layers.iter().map(|l| l.layer).collect();
        let keep = Keep { cap: config.cap, pool: config.pool };
        let shape = PolicyShape {
            scopes: keep.scopes(&geometry),
            slots: total,
            experts: layers.iter().map(|l| l.experts.len()).collect(),
        };
        let policy = config.policy.build(&shape);
        let table = Table::new(&geometry, &numbers, &slots, keep, config.in_flight, policy);
        let verified = layers.iter().map(|l| vec![false; l.experts.len()]).collect();
        let shared = Arc::new(Shared {
            arena,
            drives,
            bell: Bell::default(),
            patience: config.patience,
            numbers: numbers.into_iter().zip(0..).collect(),
            layers,
            state: Mutex::new(State { table, verified, stopping: false }),
            done: Condvar::new(),
            observer,
            checksums: config.checksums,
        });
        let carriage = Carriage { uring: mode.uring, loaders: config.loaders, chunk: config.chunk_bytes };
        let _loaders = Loaders::start(&shared, carriage)?;
        Ok(ExpertStore { shared, mode, _loaders })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// How the store reads, and why so.
    pub fn io_mode(&self) -> &IoMode {
        &self.mode
    }

    /// What each drive carried since the store was opened.
    pub fn drives(&self) -> Vec<DriveFigures> {
        self.shared.drives.figures()
    }

    /// Smallest and largest cap of a layer now; below the configured one after [`ExpertStore::enforce`].
    pub fn caps(&self) -> (usize, usize) {
        self.shared.lock().table.caps()
    }

    /// Experts that a layer keeps, ascending.
    ///
    /// # Errors
    /// [`StoreError::NoSuchLayer`].
    pub fn kept(&self, layer: u32) -> Result<Vec<u32>, StoreError> {
        let index = self.shared.layer_index(layer)?;
        Ok(self.shared.lock().table.kept(index))
    }

    /// Every layer's number with the bytes that reading its largest expert takes.
    pub fn expert_bytes(&self) -> Vec<(u32, u64)> {
        let bytes = |place: &ExpertPlace| place.runs.iter().map(|run| run.len).sum();
        let largest = |layer: &LayerExperts| layer.experts.iter().map(bytes).max().unwrap_or(0);
        self.shared.layers.iter().map(|layer| (layer.layer, largest(layer))).collect()
    }

    /// Memory mappings that hold all slots.
    pub fn mappings(&self) -> usize {
        self.shared.arena.mappings()
    }

    /// State of queue and slots in words, for reports.
    pub fn dump(&self) -> String {
        self.shared.lock().table.dump(Instant::now())
    }

    /// To be called at safe points (between steps, no leases out): when `measured_anon`, the process's
    /// *current* anonymous memory in bytes ([`Machine::own_anon_now`]; no peak, no file pages), exceeds
    /// `limit_anon`, evicts in place, gives pages back to the system and lowers caps, so that the memory
    /// does not grow back. Returns the bytes given back.
    pub fn enforce(&self, limit_anon: u64, measured_anon: u64) -> u64 {
        let over = measured_anon.saturating_sub(limit_anon);
        if over == 0 {
            return 0;
        }
        let mut events = Vec::new();
        let taken = self.shared.lock().table.shrink(over, &mut events);
        let mut bytes = 0;
        let mut done = Vec::with_capacity(taken.len());
        for slot in taken {
            let given = self.shared.arena.begin_write(slot).map(|w| w.give_back());
            bytes += given.as_ref().map_or(0, |g| *g.as_ref().unwrap_or(&0));
            done.push((slot, matches!(given, Some(Ok(_)))));
        }
        let mut state = self.shared.lock();
        done.into_iter().for_each(|(slot, given)| state.table.given_back(slot, given));
        let (min_cap, max_cap) = state.table.caps();
        drop(state);
        self.shared.done.notify_all();
        events.push(StoreEvent::Shrunk { bytes, short: over.saturating_sub(bytes), min_cap, max_cap });
        events.iter().for_each(|e| self.shared.emit(e));
        bytes
    }
}

/// Every run must lie inside its file, as long as it is now on every drive that has it.
fn check_files(drives: &Drives, layers: &[LayerExperts]) -> Result<(), StoreError> {
    for layer in layers {
        for (expert, place) in (0u32..).zip(&layer.experts) {
            for &run in &place.runs {
                let fault = (0..drives.len()).find_map(|drive| outside(drives.reader(drive), run));
                let here = (0..drives.len()).any(|drive| drives.reader(drive).has(run.file));
                let absent = || format!("it names file {}, which no drive has", run.file);
                if let Some(reason) = fault.or_else(|| (!here).then(absent)) {
                    return Err(StoreError::Place { layer: layer.layer, expert, reason });
                }
            }
        }
    }
    Ok(())
}

/// Why a run does not lie in its file of this drive, where the drive has it.
fn outside(reader: &dyn ExpertReader, run: Extent) -> Option<String> {
    let Extent { file, offset, len: wanted } = run;
    if !reader.has(file) || offset.saturating_add(wanted) <= reader.len(file) {
        return None;
    }
    let (path, len) = (reader.path(file), reader.len(file));
    Some(format!(
        "{} has {len} bytes; wanted {wanted} from offset {offset}. The file is cut short",
        path.display()
    ))
}
