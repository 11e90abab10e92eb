//! What the table says of itself.

use std::time::Instant;

use super::{Class, NONE, Phase, Slot, Table};
use crate::event::{LoadRank, Tier};
use crate::policy::ExpertId;

impl Table {
    /// Experts that a layer keeps, ascending; staged ones are not kept yet.
    pub(crate) fn kept(&self, layer: u32) -> Vec<u32> {
        let kept = |s: u32| s != NONE && matches!(self.slots[s as usize].tier, Tier::Cached | Tier::Pinned);
        let ready = |s: u32| kept(s) && self.slots[s as usize].phase == Phase::Ready;
        let index = self.layers[layer as usize].index.iter();
        (0u32..).zip(index).filter(|&(_, &s)| ready(s)).map(|(expert, _)| expert).collect()
    }

    /// State in words, for a report of a stall.
    pub(crate) fn dump(&self, now: Instant) -> String {
        let (demand, speculation, pins) = (self.demand.len(), self.speculation.len(), self.pins.len());
        let mut text = format!("queued: {demand} demanded, {speculation} expected, {pins} pinned");
        for class in &self.classes {
            let Class { bytes, free, in_flight, loading, staged, pinned, .. } = class;
            let limit = self.in_flight_limit;
            let free = free.len();
            text += &format!(
                "; slots of {bytes} bytes: {free} free, {in_flight} of {limit} in flight ({loading} loading), \
                 {staged} staged, {pinned} pinned"
            );
        }
        let busy = |s: &&Slot| matches!(s.phase, Phase::Queued | Phase::Loading | Phase::Failed);
        for slot in self.slots.iter().filter(busy).take(16) {
            let layer = self.layers[slot.id.layer as usize].number;
            let age = slot.queued.map_or(0.0, |q| now.saturating_duration_since(q).as_secs_f32());
            let (expert, phase, rank, holds) = (slot.id.expert, slot.phase, slot.rank, slot.holds);
            text += &format!(
                "; layer {layer} expert {expert}: {phase:?} ({rank:?}) for {age:.1} s, {holds} holds"
            );
        }
        text
    }

    /// Checks the table against itself; the first contradiction in words.
    pub(crate) fn contradiction(&self) -> Option<String> {
        for (c, class) in self.classes.iter().enumerate() {
            let of =
                |f: &dyn Fn(&Slot) -> bool| self.slots.iter().filter(|s| s.class == c as u32 && f(s)).count();
            let used = |s: &Slot| !matches!(s.phase, Phase::Free | Phase::Away);
            let tier = |tier| of(&|s| used(s) && s.tier == tier);
            let counted = [tier(Tier::InFlight), tier(Tier::Staged), tier(Tier::Pinned)];
            let under_way = |s: &Slot| matches!(s.phase, Phase::Queued | Phase::Loading);
            let loading = of(&|s| under_way(s) && s.rank == LoadRank::Demand);
            if [class.in_flight, class.staged, class.pinned] != counted || class.loading != loading {
                return Some(format!("class {c}: in flight, staged, pinned {counted:?}, loading {loading}"));
            }
            if counted[0] > self.in_flight_limit || counted[1] > self.staging_limit {
                return Some(format!("class {c} exceeds its limits: {counted:?}"));
            }
            if class.free.len() != of(&|s| s.phase == Phase::Free) {
                return Some(format!("class {c}: {} in the free list", class.free.len()));
            }
        }
        for (n, scope) in self.scopes.iter().enumerate() {
            let in_scope = |s: &&Slot| self.layers[s.id.layer as usize].scope == n;
            let kept = self.slots.iter().filter(|s| s.phase != Phase::Free && s.tier == Tier::Cached);
            let (count, held) =
                kept.filter(in_scope).fold((0, 0), |(n, h), s| (n + 1, h + usize::from(s.holds > 0)));
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
