//! Fewer slots when memory is short, more when there is room.

use super::{Phase, Slot, Table};
use crate::event::{EvictReason, StoreEvent, Tier};

impl Table {
    /// Frees at least `over` bytes if it can: spare slots first, then what was only expected, then cached
    /// experts, from the scopes that keep most, whose caps stay lowered, and pinned ones last. Returns slots
    /// taken out of the table; see [`Table::given_back`].
    pub(crate) fn shrink(&mut self, over: u64, out: &mut Vec<StoreEvent>) -> Vec<u32> {
        let mut taken = Vec::new();
        let mut freed = 0u64;
        let limit = self.in_flight_limit;
        let mut evicted = false;
        let mut speculation = true;
        loop {
            freed += self.harvest(over.saturating_sub(freed), limit, &mut taken);
            if freed >= over {
                break;
            }
            if std::mem::take(&mut speculation) {
                self.clear_stage(out);
                continue;
            }
            let fullest = (0..self.scopes.len()).max_by_key(|&s| self.scopes[s].kept);
            let kept = fullest.map_or(0, |s| self.scopes[s].kept);
            match fullest.filter(|_| kept > 0) {
                Some(scope) => {
                    self.scopes[scope].cap = kept - 1;
                    evicted = true;
                    self.trim(scope, EvictReason::Memory, out);
                    if self.scopes[scope].kept == kept {
                        break; // Everything in it is leased.
                    }
                }
                None if self.unpin(out) => {}
                None => {
                    // Nothing is kept: even the slots of the next misses are better given back now.
                    self.harvest(over - freed, 0, &mut taken);
                    break;
                }
            }
        }
        if evicted && !self.pool {
            // No layer may grow back to what the fullest had to give up.
            let level = self.scopes.iter().map(|s| s.kept).max().unwrap_or(0);
            self.scopes.iter_mut().for_each(|s| s.cap = s.cap.min(level));
        }
        taken
    }

    /// As [`Table::lower`]. Returns slots taken out of the table, whose pages exist; see [`Table::given_back`].
    pub(crate) fn restrict(&mut self, over: u64, out: &mut Vec<StoreEvent>) -> Vec<u32> {
        self.lower(over, out);
        let mut taken = Vec::new();
        self.harvest(u64::MAX, self.in_flight_limit + self.staging_limit, &mut taken);
        taken
    }

    /// Lowers caps, the highest first, until at least `over` bytes fewer may be kept if it can; then gives up
    /// pins.
    pub(crate) fn lower(&mut self, over: u64, out: &mut Vec<StoreEvent>) {
        let mut lowered = 0u64;
        while lowered < over {
            let highest = (0..self.scopes.len()).max_by_key(|&s| self.scopes[s].cap);
            match highest.filter(|&s| self.scopes[s].cap > 0) {
                Some(scope) => {
                    self.scopes[scope].cap -= 1;
                    lowered += self.classes[self.scopes[scope].class].bytes;
                    self.trim(scope, EvictReason::Memory, out);
                }
                None => {
                    let before = self.capacity_bytes();
                    if !self.unpin(out) {
                        break;
                    }
                    lowered += before - self.capacity_bytes();
                }
            }
        }
    }

    /// Frees staged slots that nobody asked for.
    pub(crate) fn clear_stage(&mut self, out: &mut Vec<StoreEvent>) {
        for class in 0..self.classes.len() {
            for (number, serial) in std::mem::take(&mut self.classes[class].stage) {
                let slot = &self.slots[number as usize];
                let here = slot.serial == serial && slot.tier == Tier::Staged && !slot.adopted;
                match slot.phase {
                    Phase::Ready if here => self.discard(number, out),
                    Phase::Queued if here => self.free(number),
                    Phase::Loading if here => self.classes[class].stage.push_back((number, serial)),
                    _ => {}
                }
            }
        }
    }

    /// Gives up the least used pinned expert that nobody holds; whether there was one.
    pub(super) fn unpin(&mut self, out: &mut Vec<StoreEvent>) -> bool {
        while let Some(id) = self.pinned.pop() {
            let layer = &mut self.layers[id.layer as usize];
            layer.pinned[id.expert as usize] = false;
            let number = layer.index[id.expert as usize];
            let Some(slot) = self.slots.get(number as usize) else { continue };
            match (slot.tier, slot.phase) {
                (Tier::Pinned, Phase::Ready) if slot.holds == 0 => {
                    self.evict(number, EvictReason::Memory, out);
                    return true;
                }
                (Tier::Pinned, Phase::Queued) if slot.holds == 0 => {
                    self.free(number);
                    return true;
                }
                _ => {}
            }
        }
        false
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

    /// Cached slots that could be added to each class before every expert has one, with the bytes of a slot.
    pub(crate) fn room(&self) -> Vec<(usize, u64)> {
        let mut room: Vec<(usize, u64)> = self.classes.iter().map(|class| (0, class.bytes)).collect();
        for scope in &self.scopes {
            room[scope.class].0 += scope.experts.saturating_sub(scope.cap);
        }
        room
    }

    /// Slots of a class that no cap allows to be used: what shrinking left behind.
    pub(crate) fn unused(&self, class: usize) -> usize {
        let here = |slot: &&Slot| slot.class == class as u32 && slot.phase != Phase::Away;
        let total = self.slots.iter().filter(here).count();
        let caps: usize = self.scopes.iter().filter(|s| s.class == class).map(|s| s.cap).sum();
        let pinned = self.pinned.iter().filter(|p| self.layers[p.layer as usize].class == class).count();
        total.saturating_sub(caps + pinned + self.in_flight_limit + self.staging_limit)
    }

    /// Adds `count` slots, numbered after the last one, to a class.
    pub(crate) fn add_slots(&mut self, class: usize, count: usize) {
        let first = self.slots.len() as u32;
        self.slots.extend((0..count).map(|_| Slot::free(class as u32)));
        for number in first..self.slots.len() as u32 {
            self.classes[class].free.push_front(number);
        }
        self.policy.grow(self.slots.len());
    }

    /// Raises the caps of a class by up to `count` slots in all, evenly; by how many.
    pub(crate) fn raise(&mut self, class: usize, count: usize) -> usize {
        let mut left = count;
        while left > 0 {
            let fitting = self.scopes.iter_mut().filter(|s| s.class == class && s.cap < s.experts);
            let Some(scope) = fitting.min_by_key(|s| s.cap) else { break };
            // A pool takes all at once, layers one after the other.
            let step = if self.pool { left.min(scope.experts - scope.cap) } else { 1 };
            scope.cap += step;
            left -= step;
        }
        count - left
    }

    /// Smallest and largest cap of a layer; in a pool the mean of its layers, rounded down.
    pub(crate) fn caps(&self) -> (usize, usize) {
        let caps = || self.scopes.iter().map(|s| s.cap / s.layers.max(1));
        (caps().min().unwrap_or(0), caps().max().unwrap_or(0))
    }

    /// Bytes of the slots that may be used: cached, pinned, staged and in flight.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        let bytes = |class: usize| self.classes[class].bytes;
        let cached = self.scopes.iter().map(|s| (s.cap as u64).saturating_mul(bytes(s.class)));
        let pinned = self.pinned.iter().map(|p| bytes(self.layers[p.layer as usize].class));
        let moving = (self.in_flight_limit + self.staging_limit) as u64;
        let moving = self.classes.iter().map(|class| class.bytes.saturating_mul(moving));
        cached.chain(pinned).chain(moving).fold(0, u64::saturating_add)
    }

    /// Cached slots of all layers.
    pub(crate) fn cached_slots(&self) -> usize {
        self.scopes.iter().map(|s| s.cap).sum()
    }
}
