//! Frequency and recency together: what the next token is likeliest to use.

use super::decay::Decay;
use super::lists::{Lists, NONE};
use super::{ExpertId, PerExpert, PolicyShape, Replacement, Share};

/// One, in the fixed point of values.
const ONE: u64 = 1 << 24;
/// The largest rate: more than any sum of uses, one a tick, tends to.
const LARGEST: u64 = 1 << 27;
/// log₂ of the half-lives, in tokens.
const FAST: u32 = 2;
const SLOW: u32 = 5;
/// Tenths of the value that come from the fast and from the slow rate.
const FAST_TENTHS: u64 = 4;
const SLOW_TENTHS: u64 = 6;
/// What the share of repeats is taken for before any was seen, and log₂ of the uses it is averaged over.
const REPEATS: u64 = ONE * 3 / 10;
const REPEATS_OVER: u32 = 11;

/// Buckets of a scope: four an octave, from 2^−13 up.
const BUCKETS: usize = 64;
const LOWEST_OCTAVE: u32 = 11;

/// Spokes of a layer's wheel; no date lies further ahead.
const SPOKES: u32 = 64;

/// Keeps what the next token is likeliest to use.
///
/// **Value.** For every expert, kept or not, two rates of use decay with half-lives of 4 and 32 tokens.
/// Its value, an estimate of the probability that its layer's next token uses it, is
/// `0.4 · fast + 0.6 · slow`, and more if the last token used it: half the share of uses that repeat one
/// by the token before, which is measured as the model runs (models differ: a third here, a sixth there).
/// A use counts `⁴√share`, so an expert that the router barely chose weighs less.
///
/// **Order.** Values are sorted into buckets of a quarter octave. The lowest goes first; in a bucket the
/// *newest* goes first. Layers come round like hands of a clock: what was sorted last belongs to the
/// layers just done and will not be asked for until all others were. That is why there is no cliff where
/// a scope is smaller than the experts of one token, at which LRU finds nothing. A newcomer of low value is
/// the next to go, as soon as it is free.
///
/// **Cost.** Values fall while nothing happens, so a slot must be sorted anew now and then: at the tick of
/// its layer at which it leaves its bucket, found by bisection and noted in a wheel of dates. A use lets
/// it fall through all buckets once at most, so that sorting is O(1) amortised (under 70 times a use, and
/// seven evaluations each). The rest is O(1).
pub struct Frecency {
    rates: PerExpert<Rates>,
    ticks: Vec<u32>,
    slots: Vec<Slot>,
    buckets: Lists,
    /// One bit a bucket that is not empty, for each scope.
    filled: Vec<u64>,
    wheel: Lists,
    fast: Decay,
    slow: Decay,
    /// Share of uses that repeat one by the token before.
    repeats: u64,
}

#[derive(Clone, Copy, Default)]
struct Rates {
    fast: u64,
    slow: u64,
    /// The layer's tick at the last use; 0 for none.
    at: u32,
}

#[derive(Clone, Copy)]
struct Slot {
    id: ExpertId,
    scope: u32,
    bucket: u32,
    /// Index of its list in the wheel, or [`NONE`].
    spoke: u32,
}

/// A slot that keeps nothing.
const EMPTY: Slot = Slot { id: ExpertId { layer: 0, expert: 0 }, scope: 0, bucket: 0, spoke: NONE };

/// The bucket of a value: a straight line in each octave.
pub(super) fn bucket(value: u64) -> u32 {
    let value = value.max(1 << LOWEST_OCTAVE);
    let octave = value.ilog2();
    let quarter = (value >> (octave - 2)) as u32 & 3;
    ((octave - LOWEST_OCTAVE) * 4 + quarter).min(BUCKETS as u32 - 1)
}

impl Frecency {
    /// A policy of this shape.
    pub fn new(shape: &PolicyShape) -> Frecency {
        Frecency {
            rates: PerExpert::new(&shape.experts, Rates::default()),
            ticks: vec![0; shape.experts.len()],
            slots: vec![EMPTY; shape.slots],
            buckets: Lists::new(shape.scopes * BUCKETS, shape.slots),
            filled: vec![0; shape.scopes],
            wheel: Lists::new(shape.experts.len() * SPOKES as usize, shape.slots),
            fast: Decay::new(FAST),
            slow: Decay::new(SLOW),
            repeats: REPEATS,
        }
    }

    /// Value at a tick of its layer, which must not be before its last use.
    fn value_at(&self, id: ExpertId, tick: u32) -> u64 {
        let rates = self.rates.get(id);
        let idle = tick - rates.at;
        let fast = FAST_TENTHS * self.fast.after(rates.fast, idle);
        let slow = SLOW_TENTHS * self.slow.after(rates.slow, idle);
        let recent = if idle == 0 && rates.at > 0 { self.repeats / 2 } else { 0 };
        (fast + slow) / 10 + recent
    }

    pub(super) fn value(&self, id: ExpertId) -> u64 {
        self.value_at(id, self.ticks[id.layer as usize])
    }

    fn list(scope: u32, bucket: u32) -> usize {
        scope as usize * BUCKETS + bucket as usize
    }

    fn put(&mut self, number: u32, bucket: u32) {
        let slot = &mut self.slots[number as usize];
        slot.bucket = bucket;
        self.buckets.push_newest(Self::list(slot.scope, bucket), number);
        self.filled[slot.scope as usize] |= 1 << bucket;
    }

    fn take(&mut self, number: u32) {
        let Slot { scope, bucket, .. } = self.slots[number as usize];
        let list = Self::list(scope, bucket);
        self.buckets.unlink(list, number);
        if self.buckets.is_empty(list) {
            self.filled[scope as usize] &= !(1 << bucket);
        }
    }

    /// Takes the slot off the wheel.
    fn forget(&mut self, number: u32) {
        let spoke = std::mem::replace(&mut self.slots[number as usize].spoke, NONE);
        if spoke != NONE {
            self.wheel.unlink(spoke as usize, number);
        }
    }

    /// Notes when the slot must be sorted again: at the first tick at which its value is in another bucket,
    /// or when the wheel comes round.
    fn remember(&mut self, number: u32) {
        let Slot { id, bucket: here, .. } = self.slots[number as usize];
        if here == 0 {
            return;
        }
        let now = self.ticks[id.layer as usize];
        let (mut still, mut gone) = (0, SPOKES - 1);
        while gone - still > 1 {
            let middle = (still + gone) / 2;
            match bucket(self.value_at(id, now + middle)) == here {
                true => still = middle,
                false => gone = middle,
            }
        }
        let spoke = id.layer * SPOKES + (now + gone) % SPOKES;
        self.slots[number as usize].spoke = spoke;
        self.wheel.push_newest(spoke as usize, number);
    }

    /// Sorts a slot by its value now.
    fn sort(&mut self, number: u32) {
        self.put(number, bucket(self.value(self.slots[number as usize].id)));
        self.remember(number);
    }
}

impl Replacement for Frecency {
    fn step(&mut self, layer: u32) {
        let tick = &mut self.ticks[layer as usize];
        *tick = (*tick + 1).min(u32::MAX / 2);
        let spoke = layer * SPOKES + *tick % SPOKES;
        // Dates lie 1 to 63 ticks ahead, so none of those made here lands on this spoke.
        loop {
            let number = self.wheel.oldest(spoke as usize);
            if number == NONE {
                break;
            }
            self.forget(number);
            let new = bucket(self.value(self.slots[number as usize].id));
            if new != self.slots[number as usize].bucket {
                self.take(number);
                self.put(number, new);
            }
            self.remember(number);
        }
    }

    fn requested(&mut self, id: ExpertId, share: Share) {
        let now = self.ticks[id.layer as usize];
        // ⁴√(share / 256) with 1 being 2^12: the fourth root of share / 2^8 · 2^48.
        let root = (u64::from(share.in_256ths()) << 40).isqrt().isqrt();
        let (fast, slow) = ((self.fast.unit(ONE) * root) >> 12, (self.slow.unit(ONE) * root) >> 12);
        let last = self.rates.get(id).at;
        let idle = now - last;
        if now > 1 {
            let repeat = if last > 0 && idle == 1 { ONE } else { 0 };
            self.repeats = self.repeats - (self.repeats >> REPEATS_OVER) + (repeat >> REPEATS_OVER);
        }
        let rates = self.rates.get_mut(id);
        // Many uses in one tick must not leave what `Decay` takes.
        rates.fast = (self.fast.after(rates.fast, idle) + fast).min(LARGEST);
        rates.slow = (self.slow.after(rates.slow, idle) + slow).min(LARGEST);
        rates.at = now;
    }

    fn inserted(&mut self, scope: u32, slot: u32, id: ExpertId) {
        self.slots[slot as usize] = Slot { id, scope, bucket: 0, spoke: NONE };
        self.sort(slot);
    }

    fn touched(&mut self, _scope: u32, slot: u32) {
        self.take(slot);
        self.forget(slot);
        self.sort(slot);
    }

    fn removed(&mut self, _scope: u32, slot: u32) {
        self.take(slot);
        self.forget(slot);
    }

    fn grow(&mut self, slots: usize) {
        self.slots.resize(slots, EMPTY);
        self.buckets.grow(slots);
        self.wheel.grow(slots);
    }

    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        let mut filled = self.filled[scope as usize];
        while filled != 0 {
            let bucket = filled.trailing_zeros();
            if let Some(slot) = self.buckets.newest_that(Self::list(scope, bucket), evictable) {
                return Some(slot);
            }
            filled &= filled - 1;
        }
        None
    }
}
