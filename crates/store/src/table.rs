//! The slot table: which slot holds which expert, in what phase, held by whom.
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
//! A *hold* is a lease or a fetch that waits. Slots that are neither free nor kept are *in flight*.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crate::error::StoreError;
use crate::event::{EvictReason, StoreEvent};
use crate::geometry::Geometry;
use crate::policy::{ExpertId, Replacement, Share};

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Free,
    Queued,
    Loading,
    Ready,
    Failed,
}

struct Slot {
    class: u32,
    id: ExpertId,
    phase: Phase,
    kept: bool,
    /// Whether its pages were ever written since they were given back.
    touched: bool,
    holds: u32,
    /// Counts assignments, so that a queued job of an earlier one is recognised.
    serial: u64,
    /// Arena generation of the bytes, in phase `Ready`.
    generation: u64,
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
    /// In-flight slots in phase `Queued` or `Loading`.
    loading: usize,
}

struct Layer {
    number: u32,
    class: usize,
    scope: usize,
    /// Slot of each expert.
    index: Vec<u32>,
}

/// Kept slots that share a limit: a layer's, or in a pool those of a size class.
struct Scope {
    layers: usize,
    kept: usize,
    cap: usize,
}

/// How many slots are kept, and what shares a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keep {
    /// Slots a layer.
    pub(crate) cap: usize,
    /// Whether layers of a size class share theirs.
    pub(crate) pool: bool,
}

impl Keep {
    /// Number of scopes.
    pub(crate) fn scopes(self, geometry: &Geometry) -> usize {
        if self.pool { geometry.classes.len() } else { geometry.layers.len() }
    }
}

/// A load for a loader to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) slot: u32,
    pub(crate) id: ExpertId,
    pub(crate) queued: Instant,
    /// Whether nobody asked for it yet: it may be called off between parts.
    pub(crate) speculative: bool,
}

/// What a look-up found; in the first two cases the caller now has a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// In memory.
    Ready(u32),
    /// Being loaded for someone else.
    Coming(u32),
    /// Not there.
    Missing,
}

/// What became of a load that a fetch waits for.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    Pending,
    Ready { generation: u64, arrival: u64, kept: bool },
    Failed(Arc<StoreError>),
}

pub(crate) struct Table {
    slots: Vec<Slot>,
    classes: Vec<Class>,
    layers: Vec<Layer>,
    scopes: Vec<Scope>,
    pool: bool,
    policy: Box<dyn Replacement>,
    queue: VecDeque<(u32, u64)>,
    in_flight_limit: usize,
    arrivals: u64,
}

impl Table {
    /// `numbers` are the layers' numbers; `slots` the slots of each class, in arena order.
    pub(crate) fn new(
        geometry: &Geometry,
        numbers: &[u32],
        slots: &[usize],
        keep: Keep,
        in_flight_limit: usize,
        policy: Box<dyn Replacement>,
    ) -> Table {
        let mut table = Table {
            slots: Vec::new(),
            classes: Vec::new(),
            layers: Vec::new(),
            scopes: Vec::new(),
            pool: keep.pool,
            policy,
            queue: VecDeque::new(),
            in_flight_limit,
            arrivals: 0,
        };
        for ((class, &bytes), &count) in (0u32..).zip(&geometry.classes).zip(slots) {
            let first = table.slots.len() as u32;
            // Back to front, so that low numbers are taken first.
            let free = (first..first + count as u32).rev().collect();
            table.classes.push(Class { bytes, free, in_flight: 0, loading: 0 });
            table.slots.extend((0..count).map(|_| Slot::free(class)));
        }
        let scopes = 0..keep.scopes(geometry);
        table.scopes.extend(scopes.map(|_| Scope { layers: 0, kept: 0, cap: 0 }));
        for (at, (size, &number)) in geometry.layers.iter().zip(numbers).enumerate() {
            let scope = if keep.pool { size.class } else { at };
            table.scopes[scope].layers += 1;
            table.scopes[scope].cap += keep.cap.min(size.experts);
            let index = vec![NONE; size.experts];
            table.layers.push(Layer { number, class: size.class, scope, index });
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

    /// Tells the policy that a fetch begins, and what it looks up.
    pub(crate) fn begin_step(&mut self, layer: u32, experts: &[u32]) {
        self.policy.step(layer);
        for &expert in experts {
            self.policy.requested(ExpertId { layer, expert }, Share::EVEN);
        }
    }

    /// Finds an expert and takes a hold on it.
    pub(crate) fn look_up(&mut self, id: ExpertId) -> Found {
        let number = self.layers[id.layer as usize].index[id.expert as usize];
        if number == NONE {
            return Found::Missing;
        }
        let slot = &mut self.slots[number as usize];
        slot.holds += 1;
        if slot.kept {
            self.policy.touched(self.layers[id.layer as usize].scope as u32, number);
        }
        match slot.phase {
            Phase::Ready => Found::Ready(number),
            _ => Found::Coming(number),
        }
    }

    /// Assigns a free slot to a missing expert and queues its load, with one hold;
    /// `None` while every in-flight slot is taken.
    pub(crate) fn start_load(&mut self, id: ExpertId, now: Instant) -> Option<u32> {
        let layer = &mut self.layers[id.layer as usize];
        let class = &mut self.classes[layer.class];
        if class.in_flight >= self.in_flight_limit {
            return None;
        }
        let number = class.free.pop_back()?;
        class.in_flight += 1;
        class.loading += 1;
        layer.index[id.expert as usize] = number;
        let slot = &mut self.slots[number as usize];
        slot.id = id;
        slot.phase = Phase::Queued;
        slot.holds = 1;
        slot.serial += 1;
        slot.queued = Some(now);
        self.queue.push_back((number, slot.serial));
        Some(number)
    }

    /// The next load, now in phase `Loading`.
    pub(crate) fn take_job(&mut self) -> Option<Job> {
        while let Some((number, serial)) = self.queue.pop_front() {
            let slot = &mut self.slots[number as usize];
            if slot.phase == Phase::Queued && slot.serial == serial {
                slot.phase = Phase::Loading;
                slot.touched = true;
                let queued = slot.queued.unwrap_or_else(Instant::now);
                return Some(Job { slot: number, id: slot.id, queued, speculative: false });
            }
        }
        None
    }

    /// Ends a load: the bytes lie in the slot under this generation, or it failed.
    pub(crate) fn complete(
        &mut self,
        number: u32,
        result: Result<u64, StoreError>,
        out: &mut Vec<StoreEvent>,
    ) {
        self.arrivals += 1;
        let slot = &mut self.slots[number as usize];
        let id = slot.id;
        slot.arrival = self.arrivals;
        self.classes[slot.class as usize].loading -= 1;
        match result {
            Ok(generation) => {
                slot.phase = Phase::Ready;
                slot.generation = generation;
            }
            Err(e) => {
                slot.phase = Phase::Failed;
                slot.error = Some(Arc::new(e));
                // The next fetch tries again, in another slot.
                self.layers[id.layer as usize].index[id.expert as usize] = NONE;
            }
        }
        if slot.holds == 0 {
            self.settle(number, out);
        }
    }

    /// State of a slot that the caller holds.
    pub(crate) fn outcome(&self, number: u32) -> Outcome {
        let slot = &self.slots[number as usize];
        match (slot.phase, &slot.error) {
            (Phase::Ready, _) => {
                Outcome::Ready { generation: slot.generation, arrival: slot.arrival, kept: slot.kept }
            }
            (Phase::Failed, Some(e)) => Outcome::Failed(Arc::clone(e)),
            _ => Outcome::Pending,
        }
    }

    /// Drops a hold. With the last one the slot becomes kept or free. Returns whether a slot became free.
    pub(crate) fn release(&mut self, number: u32, out: &mut Vec<StoreEvent>) -> bool {
        let slot = &mut self.slots[number as usize];
        slot.holds = slot.holds.saturating_sub(1);
        slot.holds == 0 && self.settle(number, out)
    }

    /// Decides what becomes of a slot that nobody holds.
    fn settle(&mut self, number: u32, out: &mut Vec<StoreEvent>) -> bool {
        let slot = &mut self.slots[number as usize];
        let id = slot.id;
        let &Layer { number: layer, scope, .. } = &self.layers[id.layer as usize];
        match slot.phase {
            Phase::Free | Phase::Loading => return false,
            Phase::Queued => {
                self.classes[slot.class as usize].loading -= 1;
                out.push(StoreEvent::LoadCancelled { layer, expert: id.expert });
                self.free(number);
            }
            Phase::Failed => self.free(number),
            Phase::Ready if slot.kept => self.trim(scope, EvictReason::Replaced, out),
            Phase::Ready if self.scopes[scope].cap == 0 => self.free(number),
            Phase::Ready => {
                slot.kept = true;
                self.scopes[scope].kept += 1;
                self.classes[slot.class as usize].in_flight -= 1;
                self.policy.inserted(scope as u32, number, id);
                self.trim(scope, EvictReason::Replaced, out);
            }
        }
        true
    }

    /// Evicts until the scope keeps no more than its cap, leased slots excepted.
    fn trim(&mut self, scope: usize, reason: EvictReason, out: &mut Vec<StoreEvent>) {
        while self.scopes[scope].kept > self.scopes[scope].cap {
            let slots = &self.slots;
            let Some(victim) = self.policy.victim(scope as u32, &|s| slots[s as usize].holds == 0) else {
                return;
            };
            self.policy.removed(scope as u32, victim);
            let ExpertId { layer, expert } = self.slots[victim as usize].id;
            out.push(StoreEvent::Evicted { layer: self.layers[layer as usize].number, expert, reason });
            self.free(victim);
        }
    }

    fn free(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        let layer = &mut self.layers[slot.id.layer as usize];
        let class = &mut self.classes[slot.class as usize];
        match slot.kept {
            true => self.scopes[layer.scope].kept -= 1,
            false => class.in_flight -= 1,
        }
        // A failed slot gave its place in the index up already, perhaps to a second attempt.
        let place = &mut layer.index[slot.id.expert as usize];
        if *place == number {
            *place = NONE;
        }
        slot.phase = Phase::Free;
        slot.kept = false;
        slot.error = None;
        class.free.push_back(number);
    }

    /// Frees at least `over` bytes if it can: spare slots first, then kept ones, from the scopes that keep
    /// most, whose caps stay lowered. Returns slots taken out of the table; see [`Table::given_back`].
    pub(crate) fn shrink(&mut self, over: u64, out: &mut Vec<StoreEvent>) -> Vec<u32> {
        let mut taken = Vec::new();
        let mut freed = 0u64;
        let limit = self.in_flight_limit;
        let mut evicted = false;
        loop {
            freed += self.harvest(over.saturating_sub(freed), limit, &mut taken);
            if freed >= over {
                break;
            }
            let Some(scope) = (0..self.scopes.len()).max_by_key(|&s| self.scopes[s].kept) else {
                break;
            };
            let before = self.scopes[scope].kept;
            if before == 0 {
                // Nothing is kept: even the slots of the next misses are better given back now.
                self.harvest(over - freed, 0, &mut taken);
                break;
            }
            self.scopes[scope].cap = before - 1;
            evicted = true;
            self.trim(scope, EvictReason::Memory, out);
            if self.scopes[scope].kept == before {
                break; // Everything in it is leased.
            }
        }
        if evicted && !self.pool {
            // No layer may grow back to what the fullest had to give up.
            let level = self.scopes.iter().map(|s| s.kept).max().unwrap_or(0);
            self.scopes.iter_mut().for_each(|s| s.cap = s.cap.min(level));
        }
        taken
    }

    /// Takes touched free slots that exceed what `reserve` in-flight slots may use.
    fn harvest(&mut self, over: u64, reserve: usize, taken: &mut Vec<u32>) -> u64 {
        let mut freed = 0;
        for class in &mut self.classes {
            let touched = class.free.iter().rev().take_while(|&&s| self.slots[s as usize].touched).count();
            let spare = (touched + class.in_flight).saturating_sub(reserve).min(touched);
            for _ in 0..spare {
                if freed >= over {
                    return freed;
                }
                let Some(number) = class.free.pop_back() else {
                    break;
                };
                freed += class.bytes;
                taken.push(number);
            }
        }
        freed
    }

    /// Returns a slot of [`Table::shrink`] to the free ones, its pages given back or not.
    pub(crate) fn given_back(&mut self, number: u32, done: bool) {
        let slot = &mut self.slots[number as usize];
        let free = &mut self.classes[slot.class as usize].free;
        if done {
            slot.touched = false;
            free.push_front(number);
        } else {
            free.push_back(number);
        }
    }

    /// Smallest and largest cap of a layer; in a pool the mean of its layers, rounded down.
    pub(crate) fn caps(&self) -> (usize, usize) {
        let caps = || self.scopes.iter().map(|s| s.cap / s.layers.max(1));
        (caps().min().unwrap_or(0), caps().max().unwrap_or(0))
    }

    /// Experts that a layer keeps, ascending.
    pub(crate) fn kept(&self, layer: u32) -> Vec<u32> {
        let index = self.layers[layer as usize].index.iter();
        let kept = (0u32..).zip(index).filter(|&(_, &s)| s != NONE && self.slots[s as usize].kept);
        kept.map(|(expert, _)| expert).collect()
    }

    /// State in words, for a report of a stall.
    pub(crate) fn dump(&self, now: Instant) -> String {
        let mut text = format!("{} jobs queued", self.queue.len());
        for class in &self.classes {
            let Class { bytes, free, in_flight, loading } = class;
            let limit = self.in_flight_limit;
            let free = free.len();
            text += &format!(
                "; slots of {bytes} bytes: {free} free, {in_flight} of {limit} in flight ({loading} loading)"
            );
        }
        let busy = |s: &&Slot| matches!(s.phase, Phase::Queued | Phase::Loading | Phase::Failed);
        for slot in self.slots.iter().filter(busy).take(16) {
            let layer = self.layers[slot.id.layer as usize].number;
            let age = slot.queued.map_or(0.0, |q| now.saturating_duration_since(q).as_secs_f32());
            let (expert, phase, holds) = (slot.id.expert, slot.phase, slot.holds);
            text += &format!("; layer {layer} expert {expert}: {phase:?} for {age:.1} s, {holds} holds");
        }
        text
    }

    /// Checks the table against itself; the first contradiction in words.
    #[cfg(test)]
    pub(crate) fn contradiction(&self) -> Option<String> {
        for (c, class) in self.classes.iter().enumerate() {
            let of =
                |f: &dyn Fn(&Slot) -> bool| self.slots.iter().filter(|s| s.class == c as u32 && f(s)).count();
            let in_flight = of(&|s| s.phase != Phase::Free && !s.kept);
            let loading = of(&|s| matches!(s.phase, Phase::Queued | Phase::Loading));
            if (class.in_flight, class.loading) != (in_flight, loading) || in_flight > self.in_flight_limit {
                return Some(format!("class {c}: {in_flight} in flight, {loading} loading"));
            }
            if class.free.len() != of(&|s| s.phase == Phase::Free) {
                return Some(format!("class {c}: {} in the free list", class.free.len()));
            }
        }
        for (n, scope) in self.scopes.iter().enumerate() {
            let kept = self.slots.iter().filter(|s| s.kept && self.layers[s.id.layer as usize].scope == n);
            let (count, held) = kept.fold((0, 0), |(n, h), s| (n + 1, h + usize::from(s.holds > 0)));
            if count != scope.kept || count > scope.cap.max(held) {
                return Some(format!("scope {n}: keeps {count}, says {}, cap {}", scope.kept, scope.cap));
            }
        }
        for (l, layer) in self.layers.iter().enumerate() {
            for (expert, &s) in (0u32..).zip(&layer.index) {
                if s != NONE && self.slots[s as usize].id != (ExpertId { layer: l as u32, expert }) {
                    return Some(format!("layer {l} expert {expert} points at a stranger"));
                }
            }
        }
        None
    }
}

impl Slot {
    fn free(class: u32) -> Slot {
        Slot {
            class,
            id: ExpertId { layer: 0, expert: 0 },
            phase: Phase::Free,
            kept: false,
            touched: false,
            holds: 0,
            serial: 0,
            generation: 0,
            arrival: 0,
            queued: None,
            error: None,
        }
    }
}

#[cfg(test)]
mod tests;
