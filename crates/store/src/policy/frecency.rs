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
const SLOW: u32 = 6;
/// Tenths of the value that come from the fast and from the slow rate.
const FAST_TENTHS: u64 = 3;
const SLOW_TENTHS: u64 = 7;
/// What a use by the layer's last token adds.
const RECENT: u64 = ONE / 5;

/// Buckets of a scope: four an octave, from 2^−13 up.
const BUCKETS: usize = 64;
const LOWEST_OCTAVE: u32 = 11;

/// Spokes of a layer's wheel; no check lies further ahead.
const SPOKES: u32 = 64;

/// Keeps what the next token is likeliest to use.
///
/// **Value.** For every expert, kept or not, two rates of use decay with half-lives of 4 and 64 tokens.
/// Its value, an estimate of the probability that its layer's next token uses it, is
/// `0.3 · fast + 0.7 · slow`, and 0.2 more if the last token used it: routers repeat themselves, and then
/// soon forget. A use counts `⁴√share`, so an expert that the router barely chose weighs less.
///
/// **Order.** Values are sorted into buckets of a quarter octave. The lowest goes first; in a bucket the
/// *newest* goes first. Layers come round like hands of a clock: what was sorted last belongs to the
/// layers just done and will not be asked for until all others were. That is why there is no cliff where
/// a scope is smaller than the experts of one token, at which LRU finds nothing. A newcomer of low value is
/// the next to go, as soon as it is free.
///
/// **Cost.** Values fall while nothing happens, so a slot must be sorted anew now and then. Its layer's
/// clock does so after 1, 2, 3, 4, 6, 8, 12, 16, … tokens without use, from a wheel of dates, until its
/// value is in the lowest bucket: a bounded number of times (under 30) a use. The rest is O(1).
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

/// Ticks from a check that found `idle` ticks without use to the next one.
fn next_check(idle: u32) -> u32 {
    match idle {
        0..4 => 1,
        _ => (1 << (idle.ilog2() - 1)).min(SPOKES / 2),
    }
}

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
        let id = ExpertId { layer: 0, expert: 0 };
        let slot = Slot { id, scope: 0, bucket: 0, spoke: NONE };
        Frecency {
            rates: PerExpert::new(&shape.experts, Rates::default()),
            ticks: vec![0; shape.experts.len()],
            slots: vec![slot; shape.slots],
            buckets: Lists::new(shape.scopes * BUCKETS, shape.slots),
            filled: vec![0; shape.scopes],
            wheel: Lists::new(shape.experts.len() * SPOKES as usize, shape.slots),
            fast: Decay::new(FAST),
            slow: Decay::new(SLOW),
        }
    }

    /// Value now, and ticks without use.
    pub(super) fn value(&self, id: ExpertId) -> (u64, u32) {
        let rates = self.rates.get(id);
        let idle = self.ticks[id.layer as usize] - rates.at;
        let rate =
            FAST_TENTHS * self.fast.after(rates.fast, idle) + SLOW_TENTHS * self.slow.after(rates.slow, idle);
        (rate / 10 + if idle == 0 && rates.at > 0 { RECENT } else { 0 }, idle)
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

    /// Has the slot checked again when its value may have left its bucket.
    fn remember(&mut self, number: u32, idle: u32) {
        let Slot { id, bucket, .. } = self.slots[number as usize];
        if bucket == 0 {
            return;
        }
        let date = self.ticks[id.layer as usize] + next_check(idle);
        let spoke = id.layer * SPOKES + date % SPOKES;
        self.slots[number as usize].spoke = spoke;
        self.wheel.push_newest(spoke as usize, number);
    }

    /// Sorts a slot by its value now.
    fn sort(&mut self, number: u32) {
        let (value, idle) = self.value(self.slots[number as usize].id);
        self.put(number, bucket(value));
        self.remember(number, idle);
    }
}

impl Replacement for Frecency {
    fn step(&mut self, layer: u32) {
        let tick = &mut self.ticks[layer as usize];
        *tick = (*tick + 1).min(u32::MAX / 2);
        let spoke = layer * SPOKES + *tick % SPOKES;
        // Checks lie 1 to 32 ticks ahead, so none of those made here lands on this spoke.
        loop {
            let number = self.wheel.oldest(spoke as usize);
            if number == NONE {
                break;
            }
            self.forget(number);
            let (value, idle) = self.value(self.slots[number as usize].id);
            let new = bucket(value);
            if new != self.slots[number as usize].bucket {
                self.take(number);
                self.put(number, new);
            }
            self.remember(number, idle);
        }
    }

    fn requested(&mut self, id: ExpertId, share: Share) {
        let now = self.ticks[id.layer as usize];
        // ⁴√(share / 256) with 1 being 2^12: the fourth root of share / 2^8 · 2^48.
        let root = (u64::from(share.in_256ths()) << 40).isqrt().isqrt();
        let (fast, slow) = ((self.fast.unit(ONE) * root) >> 12, (self.slow.unit(ONE) * root) >> 12);
        let idle = now - self.rates.get(id).at;
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

    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        let mut filled = self.filled[scope as usize];
        while filled != 0 {
            let bucket = filled.trailing_zeros();
            if let Some(slot) = self.buckets.from_newest(Self::list(scope, bucket), evictable) {
                return Some(slot);
            }
            filled &= filled - 1;
        }
        None
    }
}
