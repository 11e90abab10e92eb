//! Which kept expert goes when its scope keeps too many.
//!
//! | policy | keeps | per call |
//! |---|---|---|
//! | [`Lru`] | what was used last | O(1) |
//! | [`Slru`] | as LRU, what was used twice apart from what was used once | O(1) |
//! | [`Sieve`] | what was used since the hand came by | O(1) amortised |
//! | [`S3Fifo`] | what was used twice as a newcomer, and since | O(1) amortised |
//! | [`Lfu`] | what was used most, a use counting half after 16 tokens | O(1) |
//! | [`Frecency`] | what is likeliest to be used by the next token | O(1) amortised |
//!
//! O(1) means: whatever the number of slots. Leased slots that a victim search steps over are extra.

mod decay;
mod frecency;
mod lfu;
mod lists;
mod lru;
mod s3fifo;
mod sieve;
mod slru;
#[cfg(test)]
mod tests;

pub use frecency::Frecency;
pub use lfu::Lfu;
pub use lru::Lru;
pub use s3fifo::S3Fifo;
pub use sieve::Sieve;
pub use slru::Slru;

use std::fmt;
use std::str::FromStr;

/// Names an expert whatever slot it sits in; counts are kept by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertId {
    /// Index of the layer among the store's layers.
    pub layer: u32,
    /// Expert number.
    pub expert: u32,
}

/// How much a router wanted an expert: its weight relative to the mean weight of the experts chosen
/// with it, in 1/256. A fixed-point number, so that counts made of it are the same on every machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u32);

impl Share {
    /// The mean; also where weights are not known.
    pub const EVEN: Share = Share(256);
    const MAX: u32 = 1 << 16;

    /// The share of `weight` among `chosen` experts whose weights sum to `sum`; [`Share::EVEN`] where that
    /// is no number.
    pub fn of(weight: f32, sum: f32, chosen: usize) -> Share {
        let relative = f64::from(weight) / f64::from(sum) * chosen as f64 * 256.0;
        match relative.is_finite() {
            // In range by the clamp.
            true => Share(relative.round().clamp(1.0, f64::from(Share::MAX)) as u32),
            false => Share::EVEN,
        }
    }

    /// The share in 1/256, between 1 and 65,536.
    pub fn in_256ths(self) -> u32 {
        self.0
    }
}

/// A replacement policy over kept slots.
///
/// A *scope* is a set of slots that share one limit: a layer, or a pool that several layers share.
/// The slot table decides *when* a scope holds too much, the policy *which* slot goes. That slot may be the
/// newest, which is how a policy refuses to keep a newcomer; slots that `evictable` denies never go.
/// Called under the table's lock: no I/O, no locks.
///
/// For every look-up the calls are [`requested`](Replacement::requested), then
/// [`touched`](Replacement::touched) where the expert is kept, or later
/// [`inserted`](Replacement::inserted) where it becomes so.
pub trait Replacement: Send {
    /// `layer` begins to look up the experts of one token, or of one chunk of a prompt: its clock ticks.
    fn step(&mut self, _layer: u32) {}
    /// `id` was looked up, kept or not.
    fn requested(&mut self, _id: ExpertId, _share: Share) {}
    /// `slot` of `scope` now keeps `id`.
    fn inserted(&mut self, scope: u32, slot: u32, id: ExpertId);
    /// A look-up found `slot`.
    fn touched(&mut self, scope: u32, slot: u32);
    /// `slot` is no longer kept (evicted; possibly not by this policy's choice).
    fn removed(&mut self, scope: u32, slot: u32);
    /// There are `slots` slots now, more than before.
    fn grow(&mut self, slots: usize);
    /// The slot to evict next, among those that `evictable` allows. It is not removed yet.
    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32>;
}

/// The policies, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PolicyKind {
    /// [`Lru`]
    #[default]
    Lru,
    /// [`Slru`]
    Slru,
    /// [`Sieve`]
    Sieve,
    /// [`S3Fifo`]
    S3Fifo,
    /// [`Lfu`]
    Lfu,
    /// [`Frecency`]
    Frecency,
}

/// What a policy must know to lay out its tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyShape {
    /// Number of scopes.
    pub scopes: usize,
    /// Number of slots.
    pub slots: usize,
    /// Experts of each layer.
    pub experts: Vec<usize>,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [PolicyKind; 6] = [
        PolicyKind::Lru,
        PolicyKind::Slru,
        PolicyKind::Sieve,
        PolicyKind::S3Fifo,
        PolicyKind::Lfu,
        PolicyKind::Frecency,
    ];

    /// The name, as flags and reports have it.
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Lru => "lru",
            PolicyKind::Slru => "slru",
            PolicyKind::Sieve => "sieve",
            PolicyKind::S3Fifo => "s3-fifo",
            PolicyKind::Lfu => "lfu",
            PolicyKind::Frecency => "frecency",
        }
    }

    /// Whether one pool of slots for all layers suits it. Recency alone has a cliff there: a pool smaller
    /// than what one token uses is swept before anything in it is used again.
    pub fn suits_pool(self) -> bool {
        matches!(self, PolicyKind::Lfu | PolicyKind::Frecency)
    }

    /// A policy of this kind over empty slots.
    pub fn build(self, shape: &PolicyShape) -> Box<dyn Replacement> {
        match self {
            PolicyKind::Lru => Box::new(Lru::new(shape.scopes, shape.slots)),
            PolicyKind::Slru => Box::new(Slru::new(shape.scopes, shape.slots)),
            PolicyKind::Sieve => Box::new(Sieve::new(shape.scopes, shape.slots)),
            PolicyKind::S3Fifo => Box::new(S3Fifo::new(shape)),
            PolicyKind::Lfu => Box::new(Lfu::new(shape)),
            PolicyKind::Frecency => Box::new(Frecency::new(shape)),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = String;

    fn from_str(name: &str) -> Result<PolicyKind, String> {
        PolicyKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names = PolicyKind::ALL.map(PolicyKind::name).join(", ");
            format!("there is no policy {name:?}: use one of {names}")
        })
    }
}

/// Something kept for each expert of each layer, in one array.
struct PerExpert<T> {
    first: Vec<usize>,
    values: Vec<T>,
}

impl<T: Clone> PerExpert<T> {
    fn new(experts: &[usize], value: T) -> PerExpert<T> {
        let mut total = 0;
        let mut first = Vec::with_capacity(experts.len());
        for &count in experts {
            first.push(total);
            total += count;
        }
        PerExpert { first, values: vec![value; total] }
    }

    fn index(&self, id: ExpertId) -> usize {
        self.first[id.layer as usize] + id.expert as usize
    }

    fn get(&self, id: ExpertId) -> &T {
        &self.values[self.index(id)]
    }

    fn get_mut(&mut self, id: ExpertId) -> &mut T {
        let index = self.index(id);
        &mut self.values[index]
    }
}
