//! What store, fetches, leases and loaders share, and the ways in which they meet.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use metaltail_container::ExpertPlace;

use crate::arena::Arena;
use crate::error::StoreError;
use crate::event::{Observer, StoreEvent};
use crate::geometry::LayerExperts;
use crate::io::ExpertReader;
use crate::policy::ExpertId;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::table::{Ended, Job, Table};

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
    pub(crate) reader: Box<dyn ExpertReader>,
    pub(crate) patience: Duration,
    numbers: HashMap<u32, u32>,
    state: Mutex<State>,
    work: Condvar,
    done: Condvar,
    observer: Arc<dyn Observer>,
    checksums: bool,
}

impl Shared {
    pub(super) fn new(
        arena: Arc<Arena>,
        reader: Box<dyn ExpertReader>,
        layers: Vec<LayerExperts>,
        table: Table,
        observer: Arc<dyn Observer>,
        (patience, checksums): (Duration, bool),
    ) -> Shared {
        let verified = layers.iter().map(|l| vec![false; l.experts.len()]).collect();
        Shared {
            arena,
            reader,
            patience,
            numbers: layers.iter().map(|l| l.layer).zip(0..).collect(),
            layers,
            state: Mutex::new(State { table, verified, stopping: false }),
            work: Condvar::new(),
            done: Condvar::new(),
            observer,
            checksums,
        }
    }

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

    /// Tells fetches that a load ended or a slot became free.
    pub(crate) fn changed(&self) {
        self.done.notify_all();
    }

    /// Tells loaders that there is something to do.
    pub(crate) fn wake_loaders(&self) {
        self.work.notify_all();
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
        let idle = state.table.idle_work();
        drop(state);
        if freed {
            self.changed();
        }
        if idle {
            self.wake_loaders();
        }
        events.iter().for_each(|e| self.emit(e));
    }

    /// The next load; waits for one. `None` when the store closes.
    pub(crate) fn next_job(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.stopping {
                return None;
            }
            if let Some(job) = state.table.take_job() {
                return Some(job);
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
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
        let idle = state.table.idle_work();
        drop(state);
        self.changed();
        if idle {
            // The drive has nothing to do for anyone who waits.
            self.wake_loaders();
        }
        events.iter().for_each(|e| self.emit(e));
    }

    /// Begins to load pinned experts, as far as nobody waits for others.
    pub(super) fn load_pins(&self) {
        self.lock().table.load_pins(Instant::now());
        self.wake_loaders();
    }

    pub(crate) fn stop(&self) {
        self.lock().stopping = true;
        self.wake_loaders();
    }

    pub(crate) fn needs_check(&self, id: ExpertId) -> bool {
        self.checksums && !self.lock().verified[id.layer as usize][id.expert as usize]
    }

    pub(crate) fn checked(&self, id: ExpertId) {
        self.lock().verified[id.layer as usize][id.expert as usize] = true;
    }
}
