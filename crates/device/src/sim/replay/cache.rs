//! Slots of a cache as addresses, and the order in which they come and go.

use crate::residency::SlabAllocation;
use crate::residency::Span;
use crate::sim::workload::Workload;

/// Where the first slot lies: nothing is read or written there.
const BASE: usize = 1 << 40;
/// Allocations begin on whole pages of this size.
const PAGE: usize = 16 << 10;
/// Bytes of an arena's chunk at most, and the share of the cache that it is at most, as a divisor.
const CHUNK: usize = 1 << 30;
const CHUNK_SHARE: usize = 16;
/// Slots of a chunk at least.
const CHUNK_SLOTS: usize = 8;

/// The slots of all layers.
pub(super) struct Cache {
    slot_bytes: usize,
    stride: usize,
    /// Slots of an allocation.
    per_allocation: usize,
    layers: Vec<Vec<Span>>,
    pinned: Vec<Span>,
    /// Slots that had an address so far.
    used: usize,
    /// Distinct experts that a layer has been asked for while its slots fill.
    asked: f64,
    /// Parts of an expert that are due for replacement.
    due: f64,
    /// Where the next submission's experts begin.
    turn: usize,
}

impl Cache {
    pub(super) fn new(workload: &Workload, slabs: SlabAllocation, most_slots: usize) -> Cache {
        let stride = workload.expert_bytes.next_multiple_of(PAGE);
        let all = (workload.layers * most_slots).saturating_mul(stride);
        let chunk = CHUNK.min(all / CHUNK_SHARE) / stride;
        Cache {
            slot_bytes: workload.expert_bytes,
            stride,
            per_allocation: match slabs {
                SlabAllocation::Arena => chunk.max(CHUNK_SLOTS),
                SlabAllocation::PerExpert => 1,
            },
            layers: vec![Vec::new(); workload.layers],
            pinned: Vec::new(),
            used: 0,
            asked: 0.0,
            due: 0.0,
            turn: 0,
        }
    }

    /// A slot, and the allocation that begins with it, where one does.
    fn slot(&mut self) -> (Span, Option<Span>) {
        let base = BASE + self.used * self.stride;
        let begins = self.used.is_multiple_of(self.per_allocation);
        self.used += 1;
        let allocation = begins.then_some(Span { base, len: self.per_allocation * self.stride });
        (Span { base, len: self.slot_bytes }, allocation)
    }

    /// Pins experts: the allocations to declare.
    pub(super) fn pin(&mut self, experts: usize) -> Vec<Span> {
        let mut allocations = Vec::new();
        for _ in 0..experts {
            let (slot, allocation) = self.slot();
            self.pinned.push(slot);
            allocations.extend(allocation);
        }
        // Cached experts begin a chunk of their own.
        self.used = self.used.next_multiple_of(self.per_allocation);
        allocations
    }

    /// Slots that each layer gains with the next token, while it has fewer than `slots`: one for each expert
    /// that it has not seen.
    pub(super) fn fill(&mut self, workload: &Workload, slots: usize) -> usize {
        let had = self.asked as usize;
        if had >= slots {
            return 0;
        }
        let new = workload.top_k as f64 * (1.0 - workload.hits(self.asked));
        self.asked = (self.asked + new).min(slots as f64);
        self.asked as usize - had
    }

    /// Experts that each layer replaces with the next token, where so many miss in the mean.
    pub(super) fn replaced(&mut self, misses: f64) -> usize {
        self.due += misses;
        let whole = self.due.floor();
        self.due -= whole;
        whole as usize
    }

    /// A slot more for a layer: the allocation to declare, where it begins one.
    pub(super) fn add(&mut self, layer: usize) -> Option<Span> {
        let (slot, allocation) = self.slot();
        self.layers[layer].push(slot);
        allocation
    }

    /// Slots of a layer.
    pub(super) fn held(&self, layer: usize) -> usize {
        self.layers[layer].len()
    }

    /// A layer's slab is to grow: allocations to remove before. Arenas gain chunks and lose none.
    pub(super) fn regrow(&mut self, layer: usize) -> Vec<Span> {
        let all = self.layers[layer].len();
        self.free(layer, all)
    }

    /// Takes a layer's oldest slots: allocations to remove. An arena's slots are overwritten and stay.
    pub(super) fn free(&mut self, layer: usize, slots: usize) -> Vec<Span> {
        if self.per_allocation > 1 {
            return Vec::new();
        }
        let slots = slots.min(self.layers[layer].len());
        let stride = self.stride;
        self.layers[layer].drain(..slots).map(|slot| Span { len: stride, ..slot }).collect()
    }

    /// Experts that a submission of a layer reads: what it and the pinned ones have, in turn.
    pub(super) fn chosen(&mut self, layer: usize, count: usize) -> Vec<Span> {
        let slots = &self.layers[layer];
        let all = slots.len() + self.pinned.len();
        if all == 0 {
            return Vec::new();
        }
        let at = |n: usize| slots.get(n % all).copied().unwrap_or_else(|| self.pinned[n % all - slots.len()]);
        let chosen = (0..count).map(|n| at(self.turn + n)).collect();
        self.turn = (self.turn + count) % all;
        chosen
    }
}
