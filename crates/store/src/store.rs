//! The expert store: settings and opening.
//!
//! **Locks.** One mutex guards the slot table; under it nothing is read, no observer is called and no
//! other lock is taken. A lock above it is held while the cache is resized, also while a
//! [`ChunkListener`] lets go of a chunk. The arena's atomic words come below it: they may be touched with or without the
//! mutex. A condition variable belongs to it: `done` (fetches wait for arrivals and freed slots). Loaders
//! sleep on the bell, whose own lock is taken last.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use metaltail_container::{ExpertPlace, Extent};

use crate::arena::{Arena, ArenaView};
use crate::error::StoreError;
use crate::event::{Observer, StoreEvent};
use crate::geometry::{Geometry, LayerExperts};
use crate::io::{
    Chosen, Direct, DriveFigures, DriveFiles, Drives, ExpertReader, Io, IoMode, MOST_DRIVES, Wish, choose,
};
use crate::loaders::{Carriage, Loaders};
use crate::machine::Machine;
use crate::policy::{ExpertId, PolicyKind, PolicyShape};
use crate::sync::Mutex;
use crate::table::{Limits, Table};
use chunks::Resizing;

mod chunks;
mod resize;
mod shared;

pub use chunks::ChunkListener;

pub(crate) use shared::{Shared, State};

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
    /// Slots for experts that are loaded since they are expected, for each size class; see
    /// [`ExpertStore::expect`].
    pub staging: usize,
    /// Experts that get slots of their own and never leave them, as (layer, expert), most used first. They are
    /// loaded while nobody waits for others.
    pub pinned: Vec<(u32, u32)>,
    /// Whether an expert's checksum, where the container has one, is verified: at its first load, and at every
    /// one where several drives have it.
    pub checksums: bool,
    /// Whether slots are locked in memory when they are filled, so that the system neither swaps them out nor
    /// compresses them; as far as it allows, with a notice where it does not.
    pub mlock: bool,
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
            staging: 0,
            pinned: Vec::new(),
            checksums: true,
            mlock: false,
            patience: Duration::from_secs(60),
        }
    }
}

/// Routed experts on disk, some of them in memory; [`ExpertStore::fetch`] is the way to them.
pub struct ExpertStore {
    shared: Arc<Shared>,
    mode: IoMode,
    /// Held while chunks come and go.
    resizing: Mutex<Resizing>,
    /// Who knows the arena's chunks beside leases, if anyone does.
    listener: OnceLock<Arc<dyn ChunkListener>>,
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

    pub(crate) fn build(
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
        let limits = Limits {
            cap: config.cap,
            pool: config.pool,
            in_flight: config.in_flight,
            staging: config.staging,
            pinned: pinned(&config.pinned, &layers)?,
        };
        let (slots, total) = count_slots(&geometry, &limits)?;
        let mut classes = Vec::with_capacity(slots.len());
        for (&bytes, &count) in geometry.classes.iter().zip(&slots) {
            classes.push((usize::try_from(bytes).map_err(|_| too_many(&limits))?, count));
        }
        let arena = Arc::new(Arena::new(&classes)?);
        if config.mlock {
            arena.lock_what_is_filled();
        }
        let shape = PolicyShape {
            scopes: limits.scopes(&geometry),
            slots: total,
            experts: layers.iter().map(|l| l.experts.len()).collect(),
        };
        let numbers: Vec<u32> = layers.iter().map(|l| l.layer).collect();
        let table = Table::new(&geometry, &numbers, &slots, &limits, config.policy.build(&shape));
        let settings = (config.patience, config.checksums);
        let shared = Arc::new(Shared::new(arena, drives, layers, table, observer, settings));
        let carriage = Carriage { uring: mode.uring, loaders: config.loaders, chunk: config.chunk_bytes };
        let _loaders = Loaders::start(&shared, carriage)?;
        shared.load_pins();
        Ok(ExpertStore { shared, mode, resizing: Mutex::default(), listener: OnceLock::new(), _loaders })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// How the store reads, and why so.
    pub fn io_mode(&self) -> &IoMode {
        &self.mode
    }

    /// Looks whether files of experts were written to while they are in use. If so it says which, and every
    /// checksum is verified again at the expert's next load. Cheap enough for a few times a second.
    pub fn look_at_files(&self) {
        let drives = &self.shared.drives;
        let mut names = Vec::new();
        for drive in 0..drives.len() {
            let reader = drives.reader(drive);
            names.extend(reader.changed().into_iter().map(|file| reader.path(file).display().to_string()));
        }
        let Some(first) = names.first() else { return };
        self.shared.distrust();
        let others = match names.len() - 1 {
            0 => String::new(),
            n => format!(" (and {n} more)"),
        };
        let then = match self.shared.checksums {
            true => "checksums are verified anew from now on",
            false => "no checksum will find what is wrong, since they are off",
        };
        self.shared.emit(&StoreEvent::Notice(format!(
            "{first}{others} was written to while it is in use: what was just computed may be wrong; {then}"
        )));
    }

    /// What each drive carried since the store was opened.
    pub fn drives(&self) -> Vec<DriveFigures> {
        self.shared.drives.figures()
    }

    /// Smallest and largest cap of a layer now; below the configured one after [`ExpertStore::enforce`].
    pub fn caps(&self) -> (usize, usize) {
        self.shared.lock().table.caps()
    }

    /// Slots that experts may be cached in now, those of all layers.
    pub fn cached_slots(&self) -> usize {
        self.shared.lock().table.cached_slots()
    }

    /// Bytes of all slots that may be used now, whatever for.
    pub fn capacity_bytes(&self) -> u64 {
        self.shared.lock().table.capacity_bytes()
    }

    /// Says what `layer` will probably be asked for next, likeliest first, in place of what was said before.
    /// Such experts are loaded into staged slots while nobody waits for a load; loads that have become
    /// pointless end early. Numbers that the layer does not have are ignored.
    ///
    /// # Errors
    /// [`StoreError::NoSuchLayer`].
    pub fn expect(&self, layer: u32, experts: &[u32]) -> Result<(), StoreError> {
        let index = self.shared.layer_index(layer)?;
        let count = self.shared.layers[index as usize].experts.len();
        let known: Vec<u32> = experts.iter().copied().filter(|&expert| (expert as usize) < count).collect();
        let mut events = Vec::new();
        let mut state = self.shared.lock();
        state.table.expect(index, &known, Instant::now(), &mut events);
        let loads = state.table.idle_loads();
        drop(state);
        self.shared.wake_loaders(loads);
        events.iter().for_each(|event| self.shared.emit(event));
        Ok(())
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

    /// Bytes of slots that are locked in memory; see [`StoreConfig::mlock`].
    pub fn locked_bytes(&self) -> u64 {
        self.shared.arena.locked_bytes()
    }

    /// Memory mappings that hold all slots.
    pub fn mappings(&self) -> usize {
        self.shared.arena.mappings()
    }

    /// Where all slots lie.
    pub fn arena(&self) -> ArenaView {
        ArenaView(Arc::clone(&self.shared.arena))
    }

    /// Checks the slot table against itself: every slot is counted once, where it belongs, and none is lost.
    /// Takes time in the number of slots; meant for tests and long runs.
    ///
    /// # Errors
    /// [`StoreError::Internal`] with the first contradiction.
    pub fn audit(&self) -> Result<(), StoreError> {
        self.shared.lock().table.contradiction().map_or(Ok(()), |text| Err(StoreError::Internal(text)))
    }

    /// State of queue and slots in words, for reports.
    pub fn dump(&self) -> String {
        self.shared.lock().table.dump(Instant::now())
    }
}

fn too_many(limits: &Limits) -> StoreError {
    let Limits { cap, in_flight, staging, .. } = limits;
    StoreError::Config(format!("cap {cap}, {in_flight} in flight and {staging} staged are too many slots"))
}

/// Slots of each class and of all.
fn count_slots(geometry: &Geometry, limits: &Limits) -> Result<(Vec<usize>, usize), StoreError> {
    let slots = limits.slots(geometry).ok_or_else(|| too_many(limits))?;
    let total = slots.iter().try_fold(0u32, |sum, &n| u32::try_from(n).ok().and_then(|n| sum.checked_add(n)));
    let total = total.filter(|&n| n < u32::MAX).ok_or_else(|| too_many(limits))?;
    Ok((slots, total as usize))
}

/// The pinned experts by index of their layer.
fn pinned(pinned: &[(u32, u32)], layers: &[LayerExperts]) -> Result<Vec<ExpertId>, StoreError> {
    let mut seen = std::collections::HashSet::new();
    let mut ids = Vec::with_capacity(pinned.len());
    for &(layer, expert) in pinned {
        let index = layers.iter().position(|l| l.layer == layer).ok_or(StoreError::NoSuchLayer { layer })?;
        let count = layers[index].experts.len();
        if expert as usize >= count {
            return Err(StoreError::NoSuchExpert { layer, expert, count });
        }
        let id = ExpertId { layer: index as u32, expert };
        if seen.insert(id) {
            ids.push(id);
        }
    }
    Ok(ids)
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
