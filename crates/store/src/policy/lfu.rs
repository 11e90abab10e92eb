//! Least frequently used, with decay.

use super::decay::Decay;
use super::lists::{Lists, NONE};
use super::{ExpertId, PerExpert, PolicyShape, Replacement, Share};

/// Tokens after which a use counts half.
const HALF_LIFE: u32 = 16;
/// Steps of the logarithm an octave: with one a token, decay moves a bucket a token.
const STEPS: u32 = HALF_LIFE;
/// Buckets of a scope: 32 octaves.
const RING: usize = 512;
/// A use, in the fixed point of the counts.
const ONE: u64 = 1 << 16;
/// The largest count: one use a token tends to 1 / (1 − 2^(−1/16)) ≈ 23.6.
const LARGEST: u64 = 32 * ONE;

/// Least frequently used, uses counted for every expert, kept or not, and halved every 16 tokens.
///
/// All counts decay alike, so two untouched slots never change order: a slot's place is
/// `tick + 16 · log₂(count)` at its last use, and places are buckets in a ring that the clock moves
/// along. What falls off its end shares the last bucket. Equal places: the older goes first.
pub struct Lfu {
    counts: PerExpert<Count>,
    ids: Vec<ExpertId>,
    places: Vec<u32>,
    lists: Lists,
    rings: Vec<Ring>,
    ticks: Vec<u32>,
    now: u32,
    decay: Decay,
}

#[derive(Clone, Copy, Default)]
struct Count {
    value: u64,
    at: u32,
}

#[derive(Clone)]
struct Ring {
    /// The smallest place that has a bucket.
    base: u32,
    filled: [u64; RING / 64],
}

/// `16 · log₂(value)`, by a straight line in each octave.
pub(super) fn steps(value: u64) -> u32 {
    let value = value.max(1);
    let octave = value.ilog2();
    let fraction = if octave >= 4 { value >> (octave - 4) } else { value << (4 - octave) };
    octave * STEPS + (fraction as u32 - STEPS)
}

impl Lfu {
    /// A policy of this shape.
    pub fn new(shape: &PolicyShape) -> Lfu {
        let id = ExpertId { layer: 0, expert: 0 };
        Lfu {
            counts: PerExpert::new(&shape.experts, Count::default()),
            ids: vec![id; shape.slots],
            places: vec![0; shape.slots],
            lists: Lists::new(shape.scopes * RING, shape.slots),
            rings: vec![Ring { base: 0, filled: [0; RING / 64] }; shape.scopes],
            ticks: vec![0; shape.experts.len()],
            now: 0,
            decay: Decay::new(HALF_LIFE.ilog2()),
        }
    }

    fn list(scope: u32, place: u32) -> usize {
        scope as usize * RING + place as usize % RING
    }

    /// Moves the ring on so that the largest place possible now has a bucket.
    fn advance(&mut self, scope: u32) {
        let highest = self.now + steps(LARGEST);
        let target = (highest + 1).saturating_sub(RING as u32);
        let behind = target.saturating_sub(self.rings[scope as usize].base);
        // After a whole turn everything lies in the last bucket.
        for _ in 0..behind.min(RING as u32) {
            let base = self.rings[scope as usize].base;
            let (from, to) = (Self::list(scope, base), Self::list(scope, base + 1));
            self.lists.prepend(from, to);
            self.mark(scope, base);
            self.rings[scope as usize].base += 1;
            self.mark(scope, base + 1);
        }
        let ring = &mut self.rings[scope as usize];
        if ring.base < target {
            let (from, to) = (Self::list(scope, ring.base), Self::list(scope, target));
            let base = std::mem::replace(&mut ring.base, target);
            if from != to {
                self.lists.prepend(from, to);
            }
            self.mark(scope, base);
            self.mark(scope, target);
        }
    }

    fn mark(&mut self, scope: u32, place: u32) {
        let empty = self.lists.is_empty(Self::list(scope, place));
        let (word, bit) = (place as usize % RING / 64, place % 64);
        let filled = &mut self.rings[scope as usize].filled[word];
        *filled = *filled & !(1 << bit) | u64::from(!empty) << bit;
    }

    fn put(&mut self, scope: u32, slot: u32) {
        self.advance(scope);
        let count = *self.counts.get(self.ids[slot as usize]);
        let place = (count.at + steps(count.value)).max(self.rings[scope as usize].base);
        self.places[slot as usize] = place;
        self.lists.push_newest(Self::list(scope, place), slot);
        self.mark(scope, place);
    }

    fn take(&mut self, scope: u32, slot: u32) {
        let place = self.places[slot as usize].max(self.rings[scope as usize].base);
        self.lists.unlink(Self::list(scope, place), slot);
        self.mark(scope, place);
    }
}

impl Replacement for Lfu {
    fn step(&mut self, layer: u32) {
        let tick = &mut self.ticks[layer as usize];
        *tick = (*tick + 1).min(u32::MAX / 2);
        self.now = self.now.max(*tick);
    }

    fn requested(&mut self, id: ExpertId, _share: Share) {
        let now = self.ticks[id.layer as usize];
        let count = self.counts.get_mut(id);
        count.value = (self.decay.after(count.value, now - count.at) + ONE).min(LARGEST);
        count.at = now;
    }

    fn inserted(&mut self, scope: u32, slot: u32, id: ExpertId) {
        self.ids[slot as usize] = id;
        self.put(scope, slot);
    }

    fn touched(&mut self, scope: u32, slot: u32) {
        self.take(scope, slot);
        self.put(scope, slot);
    }

    fn removed(&mut self, scope: u32, slot: u32) {
        self.take(scope, slot);
    }

    fn grow(&mut self, slots: usize) {
        self.ids.resize(slots, ExpertId { layer: 0, expert: 0 });
        self.places.resize(slots, 0);
        self.lists.grow(slots);
    }

    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        let ring = &self.rings[scope as usize];
        let mut place = ring.base;
        let end = ring.base + RING as u32;
        while place < end {
            let rest = ring.filled[place as usize % RING / 64] >> (place % 64);
            if rest == 0 {
                place += 64 - place % 64;
                continue;
            }
            place += rest.trailing_zeros();
            if place >= end {
                break;
            }
            let found = self.lists.oldest_that(Self::list(scope, place), evictable);
            if found.is_some_and(|slot| slot != NONE) {
                return found;
            }
            place += 1;
        }
        None
    }
}
