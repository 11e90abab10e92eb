//! The slot table: which slot holds which expert, in what phase and tier, held by whom.
//!
//! Plain data without I/O, threads or clocks of its own; the store keeps it under its only mutex.
//! Look-up, victim choice, taking and freeing a slot are O(1) in the number of slots.
//!
//! ```text
//!        start_load        take_job          complete(ok)      last hold dropped
//! Free ───────────▶ Queued ────────▶ Loading ────────▶ Ready ───────────────▶ Ready, kept ─▶ Free
//!                     │ last hold dropped   └─(failed)▶ Failed ─▶ Free                evicted
//!                     └────────────▶ Free (load cancelled)
//! ```
//! A free slot is *away* while its chunk of the arena is out of use. A *hold* is a lease or a fetch that waits. Every slot that is not free counts in one [`Tier`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crate::error::StoreError;
use crate::event::{EvictReason, LoadRank, StoreEvent, Tier};
use crate::geometry::Geometry;
use crate::policy::{ExpertId, Replacement};

mod ahead;
mod chunks;
mod report;
mod resize;

pub(crate) use chunks::{Left, Want};

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Free,
    Queued,
    Loading,
    Ready,
    Failed,
    /// Its chunk is out of use.
    Away,
}

struct Slot {
    class: u32,
    id: ExpertId,
    phase: Phase,
    tier: Tier,
    /// Rank of its load; demand as soon as anyone waits for it.
    rank: LoadRank,
    /// A speculative load of no more use: it is to end at the next occasion.
    abandoned: bool,
    /// A staged expert that was asked for: it is kept when the last hold drops.
    adopted: bool,
    /// Whether its first use was told.
    told: bool,
    /// Whether its pages were ever written since they were given back.
    touched: bool,
    holds: u32,
    /// Counts assignments, so that a queued job of an earlier one is recognised.
    serial: u64,
    /// Arena generation of the bytes, in phase `Ready`.
    generation: u64,
    /// Bytes that its load read.
    bytes: u64,
    /// Order of completion among all loads.
    arrival: u64,
    queued: Option<Instant>,
    error: Option<Arc<StoreError>>,
}

struct Class {
    bytes: u64,
    /// Touched slots at the back, given-back ones at the front: taking from the back reuses pages.
    free: VecDeque<u32>,
    in_flight: usize,
    staged: usize,
    pinned: usize,
    /// Slots in phase `Queued` or `Loading` at the rank of demand.
    loading: usize,
    /// Staged slots with their serials, oldest first; some may have left meanwhile.
    stage: VecDeque<(u32, u64)>,
}

struct Layer {
    number: u32,
    class: usize,
    scope: usize,
    /// Slot of each expert.
    index: Vec<u32>,
    /// Which experts belong in pinned slots; empty where none does.
    pinned: Vec<bool>,
}

impl Layer {
    fn pins(&self, expert: u32) -> bool {
        self.pinned.get(expert as usize).is_some_and(|&pinned| pinned)
    }
}

/// Cached slots that share a limit: a layer's, or in a pool those of a size class.
struct Scope {
    layers: usize,
    /// Experts of its layers: more slots would stay empty.
    experts: usize,
    class: usize,
    kept: usize,
    cap: usize,
}

/// How many slots there are for what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Cached slots a layer.
    pub(crate) cap: usize,
    /// Whether layers of a size class share theirs.
    pub(crate) pool: bool,
    /// Slots a class for experts on their way.
    pub(crate) in_flight: usize,
    /// Slots a class for speculation.
    pub(crate) staging: usize,
    /// Experts with slots of their own, by index of the layer, most used first.
    pub(crate) pinned: Vec<ExpertId>,
}

impl Limits {
    /// Number of scopes.
    pub(crate) fn scopes(&self, geometry: &Geometry) -> usize {
        if self.pool { geometry.classes.len() } else { geometry.layers.len() }
    }

    /// Slots of each class; `None` where they are too many to count.
    pub(crate) fn slots(&self, geometry: &Geometry) -> Option<Vec<usize>> {
        let mut slots = geometry.kept_slots(self.cap);
        for pin in &self.pinned {
            let class = geometry.layers[pin.layer as usize].class;
            slots[class] = slots[class].checked_add(1)?;
        }
        slots.into_iter().map(|n| n.checked_add(self.in_flight)?.checked_add(self.staging)).collect()
    }
}

/// A load for a loader to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) slot: u32,
    pub(crate) id: ExpertId,
    pub(crate) queued: Instant,
    pub(crate) rank: LoadRank,
}

impl Job {
    /// Whether nobody waited for it when it began: it may be called off.
    pub(crate) fn is_ahead(&self) -> bool {
        self.rank != LoadRank::Demand
    }
}

/// How a load ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The bytes lie in the slot under this generation; so many were read.
    Loaded { generation: u64, bytes: u64 },
    /// A speculative load gave way; see [`Table::should_stop`].
    Stopped,
    /// The expert cannot be had.
    Failed(StoreError),
}

/// What a look-up found; but for `Missing` the caller now has a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// In memory, in this tier.
    Ready(u32, Tier),
    /// Being loaded already, for someone else.
    Joined(u32),
    /// Being loaded already, ahead of demand and into this tier.
    Late(u32, Tier),
    /// Its load was waiting in the lowest rank and is now demanded.
    Promoted(u32),
    /// Not there.
    Missing,
}

/// What became of a load that a fetch waits for.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    Pending,
    Ready { generation: u64, arrival: u64, tier: Tier },
    Failed(Arc<StoreError>),
}

pub(crate) struct Table {
    slots: Vec<Slot>,
    classes: Vec<Class>,
    layers: Vec<Layer>,
    scopes: Vec<Scope>,
    pool: bool,
    policy: Box<dyn Replacement>,
    /// Loads that someone waits for, with the serial of the assignment.
    demand: VecDeque<(u32, u64)>,
    /// Loads of experts that are expected to be asked for.
    speculation: VecDeque<(u32, u64)>,
    /// Loads into pinned slots.
    pins: VecDeque<(u32, u64)>,
    /// Loads under way below the rank of demand.
    ahead: Vec<u32>,
    /// Pinned experts, most used first.
    pinned: Vec<ExpertId>,
    in_flight_limit: usize,
    staging_limit: usize,
    arrivals: u64,
}

impl Table {
    /// `numbers` are the layers' numbers; `slots` the slots of each class, in arena order.
    pub(crate) fn new(
        geometry: &Geometry,
        numbers: &[u32],
        slots: &[usize],
        limits: &Limits,
        policy: Box<dyn Replacement>,
    ) -> Table {
        let mut table = Table {
            slots: Vec::new(),
            classes: Vec::new(),
            layers: Vec::new(),
            scopes: Vec::new(),
            pool: limits.pool,
            policy,
            demand: VecDeque::new(),
            speculation: VecDeque::new(),
            pins: VecDeque::new(),
            ahead: Vec::new(),
            pinned: limits.pinned.clone(),
            in_flight_limit: limits.in_flight,
            staging_limit: limits.staging,
            arrivals: 0,
        };
        for ((class, &bytes), &count) in (0u32..).zip(&geometry.classes).zip(slots) {
            let first = table.slots.len() as u32;
            // Back to front, so that low numbers are taken first.
            let free = (first..first + count as u32).rev().collect();
            let stage = VecDeque::new();
            table.classes.push(Class { bytes, free, in_flight: 0, staged: 0, pinned: 0, loading: 0, stage });
            table.slots.extend((0..count).map(|_| Slot::free(class)));
        }
        let scopes = 0..limits.scopes(geometry);
        table.scopes.extend(scopes.map(|_| Scope { layers: 0, experts: 0, class: 0, kept: 0, cap: 0 }));
        for (at, (size, &number)) in geometry.layers.iter().zip(numbers).enumerate() {
            let scope = if limits.pool { size.class } else { at };
            table.scopes[scope].layers += 1;
            table.scopes[scope].experts += size.experts;
            table.scopes[scope].class = size.class;
            table.scopes[scope].cap += limits.cap.min(size.experts);
            let (class, index) = (size.class, vec![NONE; size.experts]);
            table.layers.push(Layer { number, class, scope, index, pinned: Vec::new() });
        }
        for pin in &limits.pinned {
            let layer = &mut table.layers[pin.layer as usize];
            layer.pinned.resize(layer.index.len(), false);
            layer.pinned[pin.expert as usize] = true;
        }
        table
    }

    pub(crate) fn in_flight_limit(&self) -> usize {
        self.in_flight_limit
    }

    /// Whether loads of the layer's size class are on their way.
    pub(crate) fn loading(&self, layer: u32) -> bool {
        self.classes[self.layers[layer as usize].class].loading > 0
    }

    /// Whether anyone waits for a load.
    fn demanded(&self) -> bool {
        self.classes.iter().any(|class| class.loading > 0)
    }

    /// The policy, to be told what the rows of a fetch use.
    pub(crate) fn policy(&mut self) -> &mut dyn Replacement {
        &mut *self.policy
    }

    /// Finds an expert and takes a hold on it.
    pub(crate) fn look_up(&mut self, id: ExpertId) -> Found {
        let layer = &self.layers[id.layer as usize];
        let (number, scope) = (layer.index[id.expert as usize], layer.scope);
        if number == NONE {
            return Found::Missing;
        }
        let slot = &mut self.slots[number as usize];
        match (slot.phase, slot.rank) {
            (Phase::Ready, _) => {
                slot.holds += 1;
                let tier = slot.tier;
                match tier {
                    Tier::Cached => self.policy.touched(scope as u32, number),
                    Tier::Staged => slot.adopted = true,
                    Tier::Pinned | Tier::InFlight => {}
                }
                Found::Ready(number, tier)
            }
            (_, LoadRank::Demand) => {
                slot.holds += 1;
                Found::Joined(number)
            }
            (Phase::Queued, LoadRank::Pin) => {
                slot.holds += 1;
                self.want(number);
                self.demand.push_back((number, self.slots[number as usize].serial));
                Found::Promoted(number)
            }
            (Phase::Queued, LoadRank::Speculation) => {
                // Nothing was read yet, so it may as well take a slot of those for demand.
                self.free(number);
                Found::Missing
            }
            _ => {
                slot.holds += 1;
                slot.adopted = slot.tier == Tier::Staged;
                let tier = slot.tier;
                self.want(number);
                Found::Late(number, tier)
            }
        }
    }

    /// From now on someone waits for the slot's load.
    fn want(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        slot.rank = LoadRank::Demand;
        slot.abandoned = false;
        self.classes[slot.class as usize].loading += 1;
    }

    /// Assigns a free slot to a missing expert and queues its load, with one hold;
    /// `None` while every in-flight slot is taken.
    pub(crate) fn start_load(&mut self, id: ExpertId, now: Instant) -> Option<u32> {
        let class = &mut self.classes[self.layers[id.layer as usize].class];
        if class.in_flight >= self.in_flight_limit {
            return None;
        }
        let number = class.free.pop_back()?;
        class.in_flight += 1;
        class.loading += 1;
        let serial = self.assign(number, id, Tier::InFlight, LoadRank::Demand, now);
        self.slots[number as usize].holds = 1;
        self.demand.push_back((number, serial));
        Some(number)
    }

    /// Gives a slot out of the free ones to an expert; its serial.
    fn assign(&mut self, number: u32, id: ExpertId, tier: Tier, rank: LoadRank, now: Instant) -> u64 {
        self.layers[id.layer as usize].index[id.expert as usize] = number;
        let slot = &mut self.slots[number as usize];
        let (class, touched, serial) = (slot.class, slot.touched, slot.serial + 1);
        let phase = Phase::Queued;
        *slot = Slot { id, phase, tier, rank, touched, serial, queued: Some(now), ..Slot::free(class) };
        serial
    }

    /// The next load that is waited for, now in phase `Loading`.
    pub(crate) fn take_demanded(&mut self) -> Option<Job> {
        let number = Self::pop(&mut self.demand, &self.slots)?;
        Some(self.take(number))
    }

    /// The next load, now in phase `Loading`: what is waited for first, and anything else only while
    /// nothing is waited for.
    pub(crate) fn take_job(&mut self) -> Option<Job> {
        if let Some(job) = self.take_demanded() {
            return Some(job);
        }
        if self.demanded() {
            return None;
        }
        let ahead = Self::pop(&mut self.speculation, &self.slots);
        let number = ahead.or_else(|| Self::pop(&mut self.pins, &self.slots))?;
        self.ahead.push(number);
        Some(self.take(number))
    }

    fn take(&mut self, number: u32) -> Job {
        let slot = &mut self.slots[number as usize];
        slot.phase = Phase::Loading;
        slot.touched = true;
        let queued = slot.queued.unwrap_or_else(Instant::now);
        Job { slot: number, id: slot.id, queued, rank: slot.rank }
    }

    /// The first entry whose slot is still queued under the entry's serial.
    fn pop(queue: &mut VecDeque<(u32, u64)>, slots: &[Slot]) -> Option<u32> {
        let valid = |&(number, serial): &(u32, u64)| {
            let slot = &slots[number as usize];
            slot.phase == Phase::Queued && slot.serial == serial
        };
        while let Some(entry) = queue.pop_front() {
            if valid(&entry) {
                return Some(entry.0);
            }
        }
        None
    }

    /// Ends a load.
    pub(crate) fn complete(&mut self, number: u32, ended: Ended, out: &mut Vec<StoreEvent>) {
        self.arrivals += 1;
        self.ahead.retain(|&slot| slot != number);
        let slot = &mut self.slots[number as usize];
        let id = slot.id;
        if matches!(ended, Ended::Stopped) && (slot.holds > 0 || slot.rank == LoadRank::Pin) {
            return self.begin_again(number);
        }
        slot.arrival = self.arrivals;
        if slot.rank == LoadRank::Demand {
            self.classes[slot.class as usize].loading -= 1;
        }
        match ended {
            Ended::Loaded { generation, bytes } => {
                slot.phase = Phase::Ready;
                slot.generation = generation;
                slot.bytes = bytes;
            }
            Ended::Stopped => {
                slot.phase = Phase::Failed;
                self.layers[id.layer as usize].index[id.expert as usize] = NONE;
            }
            Ended::Failed(e) => {
                slot.phase = Phase::Failed;
                slot.error = Some(Arc::new(e));
                // The next fetch tries again, in another slot.
                self.layers[id.layer as usize].index[id.expert as usize] = NONE;
            }
        }
        if self.slots[number as usize].holds == 0 {
            self.settle(number, out);
        }
    }

    /// Queues a load anew that gave way just when someone began to wait for it, or that nobody waits for.
    fn begin_again(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        slot.phase = Phase::Queued;
        match slot.rank {
            LoadRank::Pin => self.pins.push_back((number, slot.serial)),
            _ => self.demand.push_back((number, slot.serial)),
        }
    }

    /// State of a slot that the caller holds.
    pub(crate) fn outcome(&self, number: u32) -> Outcome {
        let slot = &self.slots[number as usize];
        match (slot.phase, &slot.error) {
            (Phase::Ready, _) => {
                Outcome::Ready { generation: slot.generation, arrival: slot.arrival, tier: slot.tier }
            }
            (Phase::Failed, Some(e)) => Outcome::Failed(Arc::clone(e)),
            _ => Outcome::Pending,
        }
    }

    /// State of a slot that is handed to its holder now. The first use of one that was expected is told here, by
    /// who uses it: a loader might do so too late for a report.
    pub(crate) fn deliver(&mut self, number: u32, out: &mut Vec<StoreEvent>) -> Outcome {
        let slot = &mut self.slots[number as usize];
        let used = slot.phase == Phase::Ready && slot.adopted;
        if used && !std::mem::replace(&mut slot.told, true) {
            let (layer, expert) = (self.layers[slot.id.layer as usize].number, slot.id.expert);
            out.push(StoreEvent::SpeculationUsed { layer, expert, bytes: slot.bytes });
        }
        self.outcome(number)
    }

    /// Drops a hold. With the last one the slot becomes kept or free. Returns whether a slot became free.
    pub(crate) fn release(&mut self, number: u32, out: &mut Vec<StoreEvent>) -> bool {
        let slot = &mut self.slots[number as usize];
        slot.holds = slot.holds.saturating_sub(1);
        slot.holds == 0 && self.settle(number, out)
    }

    /// Decides what becomes of a slot that nobody holds; whether one became free.
    fn settle(&mut self, number: u32, out: &mut Vec<StoreEvent>) -> bool {
        let slot = &mut self.slots[number as usize];
        let (id, tier, adopted) = (slot.id, slot.tier, slot.adopted);
        let layer = &self.layers[id.layer as usize];
        let (scope, pinned) = (layer.scope, layer.pins(id.expert));
        match (slot.phase, tier) {
            (Phase::Free | Phase::Loading | Phase::Away, _) => return false,
            (Phase::Queued, _) => {
                self.classes[slot.class as usize].loading -= 1;
                out.push(StoreEvent::LoadCancelled { layer: layer.number, expert: id.expert });
                self.free(number);
            }
            (Phase::Failed, _) => self.free(number),
            // Not one whose pin was given up while it loaded or was held.
            (Phase::Ready, Tier::Pinned) if pinned => return false,
            (Phase::Ready, Tier::Cached) => self.trim(scope, EvictReason::Replaced, out),
            (Phase::Ready, Tier::Staged) if !adopted => return false,
            (Phase::Ready, _) if pinned => self.move_to(number, Tier::Pinned),
            (Phase::Ready, _) if self.scopes[scope].cap == 0 => self.free(number),
            (Phase::Ready, _) => {
                self.move_to(number, Tier::Cached);
                self.policy.inserted(scope as u32, number, id);
                self.trim(scope, EvictReason::Replaced, out);
            }
        }
        true
    }

    /// Counts a slot in another tier.
    fn move_to(&mut self, number: u32, tier: Tier) {
        let slot = &mut self.slots[number as usize];
        let old = std::mem::replace(&mut slot.tier, tier);
        let class = slot.class as usize;
        let scope = self.layers[slot.id.layer as usize].scope;
        *self.count(old, class, scope) -= 1;
        *self.count(tier, class, scope) += 1;
    }

    fn count(&mut self, tier: Tier, class: usize, scope: usize) -> &mut usize {
        match tier {
            Tier::InFlight => &mut self.classes[class].in_flight,
            Tier::Staged => &mut self.classes[class].staged,
            Tier::Pinned => &mut self.classes[class].pinned,
            Tier::Cached => &mut self.scopes[scope].kept,
        }
    }

    /// Evicts until the scope keeps no more than its cap, leased slots excepted.
    fn trim(&mut self, scope: usize, reason: EvictReason, out: &mut Vec<StoreEvent>) {
        while self.scopes[scope].kept > self.scopes[scope].cap {
            let slots = &self.slots;
            let Some(victim) = self.policy.victim(scope as u32, &|s| slots[s as usize].holds == 0) else {
                return;
            };
            self.policy.removed(scope as u32, victim);
            self.evict(victim, reason, out);
        }
    }

    fn evict(&mut self, number: u32, reason: EvictReason, out: &mut Vec<StoreEvent>) {
        let ExpertId { layer, expert } = self.slots[number as usize].id;
        out.push(StoreEvent::Evicted { layer: self.layers[layer as usize].number, expert, reason });
        self.free(number);
    }

    fn free(&mut self, number: u32) {
        let slot = &self.slots[number as usize];
        let (id, class, tier) = (slot.id, slot.class as usize, slot.tier);
        let layer = &mut self.layers[id.layer as usize];
        // A failed slot gave its place in the index up already, perhaps to a second attempt.
        let place = &mut layer.index[id.expert as usize];
        if *place == number {
            *place = NONE;
        }
        let scope = layer.scope;
        *self.count(tier, class, scope) -= 1;
        let slot = &mut self.slots[number as usize];
        slot.phase = Phase::Free;
        slot.tier = Tier::InFlight;
        slot.error = None;
        self.classes[class].free.push_back(number);
    }
}

impl Slot {
    fn free(class: u32) -> Slot {
        Slot {
            class,
            id: ExpertId { layer: 0, expert: 0 },
            phase: Phase::Free,
            tier: Tier::InFlight,
            rank: LoadRank::Demand,
            abandoned: false,
            adopted: false,
            told: false,
            touched: false,
            holds: 0,
            serial: 0,
            generation: 0,
            bytes: 0,
            arrival: 0,
            queued: None,
            error: None,
        }
    }
}

#[cfg(test)]
mod tests;
