//! What store, fetches, leases and loaders share, and the ways in which they meet.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use metaltail_container::ExpertPlace;

use crate::arena::Arena;
use crate::bell::Bell;
use crate::error::StoreError;
use crate::event::{Observer, StoreEvent};
use crate::geometry::LayerExperts;
use crate::io::Drives;
use crate::policy::ExpertId;
use crate::rank::Held;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::table::{Ended, Job, Table};

/// What the mutex guards.
pub(crate) struct State {
    pub(crate) table: Table,
    /// Experts whose checksum was seen to be right.
    verified: Vec<Vec<bool>>,
    stopping: bool,
}

/// The state, for as long as its lock is held.
pub(crate) struct Locked<'g> {
    state: MutexGuard<'g, State>,
    held: Held,
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
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
    pub(crate) checksums: bool,
}

impl Shared {
    pub(super) fn new(
        arena: Arc<Arena>,
        drives: Drives,
        layers: Vec<LayerExperts>,
        table: Table,
        observer: Arc<dyn Observer>,
        (patience, checksums): (Duration, bool),
    ) -> Shared {
        let verified = layers.iter().map(|l| vec![false; l.experts.len()]).collect();
        Shared {
            arena,
            drives,
            bell: Bell::default(),
            patience,
            numbers: layers.iter().map(|l| l.layer).zip(0..).collect(),
            layers,
            state: Mutex::new(State { table, verified, stopping: false }),
            done: Condvar::new(),
            observer,
            checksums,
        }
    }

    /// No code under this lock can leave the table half changed, so a poisoned lock is taken as it is.
    pub(crate) fn lock(&self) -> Locked<'_> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Locked { state, held: Held::new() }
    }

    pub(crate) fn wait_for_change<'g>(&self, locked: Locked<'g>, limit: Duration) -> Locked<'g> {
        let Locked { state, held } = locked;
        let state = self.done.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0;
        Locked { state, held }
    }

    /// Tells fetches that a load ended or a slot became free.
    pub(crate) fn changed(&self) {
        self.done.notify_all();
    }

    /// Tells loaders that so many loads wait.
    pub(crate) fn wake_loaders(&self, loads: usize) {
        match loads {
            0 => {}
            1 => self.bell.ring(),
            _ => self.bell.ring_all(),
        }
    }

    pub(crate) fn emit(&self, event: &StoreEvent) {
        self.observer.on(event);
    }

    /// Says so, once, where the system refuses to lock slots in memory.
    pub(crate) fn tell_refused_lock(&self) {
        let Some(error) = self.arena.take_refused_lock() else { return };
        let (done, limit) = (self.arena.locked_bytes(), lock_limit());
        self.emit(&StoreEvent::Notice(format!(
            "{} of the expert cache are locked in memory and no more can be ({error}): raise the limit of locked memory (ulimit -l{limit}) to what the cache takes, or leave --mlock off",
            mib(done),
        )));
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
        let idle = state.table.idle_loads();
        drop(state);
        if freed {
            self.changed();
        }
        self.wake_loaders(idle);
        events.iter().for_each(|e| self.emit(e));
    }

    /// The next load, if there is one; with `ahead` also one that nobody waits for.
    pub(crate) fn try_next_job(&self, ahead: bool) -> Option<Job> {
        let table = &mut self.lock().table;
        if ahead { table.take_job() } else { table.take_demanded() }
    }

    /// Whether the store closes: no load begins any more.
    pub(crate) fn stopping(&self) -> bool {
        self.lock().stopping
    }

    /// Whether a load below the rank of demand is to end between two of its reads.
    pub(crate) fn should_stop(&self, job: &Job) -> bool {
        let state = self.lock();
        state.stopping || state.table.should_stop(job.slot)
    }

    pub(crate) fn complete(&self, slot: u32, ended: Ended) {
        let mut events = Vec::new();
        let mut state = self.lock();
        state.table.complete(slot, ended, &mut events);
        let idle = state.table.idle_loads();
        drop(state);
        self.changed();
        // The drive may have nothing to do for anyone who waits.
        self.wake_loaders(idle);
        events.iter().for_each(|e| self.emit(e));
    }

    /// Begins to load pinned experts, as far as nobody waits for others.
    pub(super) fn load_pins(&self) {
        let mut state = self.lock();
        state.table.load_pins(Instant::now());
        let loads = state.table.idle_loads();
        drop(state);
        self.wake_loaders(loads);
    }

    pub(crate) fn stop(&self) {
        self.lock().stopping = true;
        self.bell.ring_all();
    }

    /// Whether an expert's checksum is to be computed: at its first load; at every one where its bytes may
    /// come from several drives, in any mixture.
    pub(crate) fn needs_check(&self, id: ExpertId) -> bool {
        let mixed = || self.place(id).runs.iter().any(|run| self.drives.has_copies(run.file));
        self.checksums && (mixed() || !self.lock().verified[id.layer as usize][id.expert as usize])
    }

    pub(crate) fn checked(&self, id: ExpertId) {
        self.lock().verified[id.layer as usize][id.expert as usize] = true;
    }

    /// Every checksum is verified again at the next load.
    pub(crate) fn distrust(&self) {
        self.lock().verified.iter_mut().for_each(|layer| layer.fill(false));
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

/// The process's limit of locked memory, for a message.
fn lock_limit() -> String {
    use rustix::process::{Resource, getrlimit};
    getrlimit(Resource::Memlock).current.map_or(String::new(), |bytes| format!(", now {}", mib(bytes)))
}
