//! Loads that nobody waits for yet: speculation into staged slots, and pinned experts.

use std::time::Instant;

use super::{NONE, Phase, Table};
use crate::event::{LoadRank, StoreEvent, Tier};
use crate::policy::ExpertId;

impl Table {
    /// Queues the loads of all pinned experts.
    pub(crate) fn load_pins(&mut self, now: Instant) {
        for at in 0..self.pinned.len() {
            let id = self.pinned[at];
            let layer = &self.layers[id.layer as usize];
            if layer.index[id.expert as usize] != NONE {
                continue;
            }
            let class = &mut self.classes[layer.class];
            let Some(number) = class.free.pop_back() else { return };
            class.pinned += 1;
            let serial = self.assign(number, id, Tier::Pinned, LoadRank::Pin, now);
            self.pins.push_back((number, serial));
        }
    }

    /// Replaces what is expected of a layer: queues loads of `experts`, likeliest first, as far as there are
    /// staged slots, and drops what was expected before and has not arrived.
    pub(crate) fn expect(&mut self, layer: u32, experts: &[u32], now: Instant, out: &mut Vec<StoreEvent>) {
        self.drop_others(layer, |expert| experts.contains(&expert));
        for &expert in experts {
            let id = ExpertId { layer, expert };
            if self.layers[layer as usize].index[expert as usize] != NONE {
                continue;
            }
            let Some(number) = self.stage(self.layers[layer as usize].class, out) else { break };
            let serial = self.assign(number, id, Tier::Staged, LoadRank::Speculation, now);
            let class = self.slots[number as usize].class as usize;
            self.classes[class].stage.push_back((number, serial));
            self.speculation.push_back((number, serial));
        }
    }

    /// Drops speculative loads of a layer's experts that are not `wanted`: those in the queue at once, those
    /// under way at their next occasion.
    pub(crate) fn drop_others(&mut self, layer: u32, wanted: impl Fn(u32) -> bool) {
        // As long as the staged slots are many, whatever the size of the cache.
        for at in 0..self.speculation.len() {
            let (number, serial) = self.speculation[at];
            let slot = &self.slots[number as usize];
            let stale = slot.phase == Phase::Queued && slot.serial == serial && slot.id.layer == layer;
            if stale && !wanted(slot.id.expert) {
                self.free(number);
            }
        }
        let slots = &self.slots;
        self.speculation.retain(|&(number, serial)| {
            let slot = &slots[number as usize];
            slot.phase == Phase::Queued && slot.serial == serial
        });
        for &number in &self.ahead {
            let slot = &mut self.slots[number as usize];
            if slot.rank == LoadRank::Speculation && slot.id.layer == layer {
                slot.abandoned = !wanted(slot.id.expert);
            }
        }
    }

    /// Whether a load below the rank of demand is to end: nobody wants it any more, or someone waits for
    /// another one.
    pub(crate) fn should_stop(&self, number: u32) -> bool {
        let slot = &self.slots[number as usize];
        slot.rank != LoadRank::Demand && (slot.abandoned || self.demanded())
    }

    /// Loads that loaders may begin since nobody waits for any.
    pub(crate) fn idle_loads(&self) -> usize {
        match self.demanded() {
            true => 0,
            false => self.speculation.len() + self.pins.len(),
        }
    }

    /// A slot for speculation: a free one, or that of the staged expert which came first and was not asked
    /// for.
    fn stage(&mut self, class: usize, out: &mut Vec<StoreEvent>) -> Option<u32> {
        self.tidy_stage(class);
        if self.classes[class].staged >= self.staging_limit {
            let &(oldest, _) = self.classes[class].stage.front()?;
            let slot = &self.slots[oldest as usize];
            if slot.phase != Phase::Ready || slot.holds > 0 {
                return None;
            }
            self.classes[class].stage.pop_front();
            self.discard(oldest, out);
        }
        let class = &mut self.classes[class];
        let number = class.free.pop_back()?;
        class.staged += 1;
        Some(number)
    }

    /// Forgets entries of slots that were adopted or freed.
    fn tidy_stage(&mut self, class: usize) {
        let slots = &self.slots;
        let staged = |&(number, serial): &(u32, u64)| {
            let slot = &slots[number as usize];
            let here = slot.phase != Phase::Free && slot.serial == serial;
            here && slot.tier == Tier::Staged && !slot.adopted
        };
        // As many entries as staged slots, and those that left since the last call.
        self.classes[class].stage.retain(staged);
    }

    /// Frees a staged slot that was not asked for.
    pub(super) fn discard(&mut self, number: u32, out: &mut Vec<StoreEvent>) {
        let slot = &self.slots[number as usize];
        let (layer, expert) = (self.layers[slot.id.layer as usize].number, slot.id.expert);
        out.push(StoreEvent::SpeculationDiscarded { layer, expert, bytes: slot.bytes });
        self.free(number);
    }
}
