//! A fetch: the experts of one layer of one step, handed out as they become available.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::StoreError;
use crate::event::{StoreEvent, Tier};
use crate::lease::Lease;
use crate::policy::{ExpertId, Replacement, Share};
use crate::store::{ExpertStore, Shared, State};
use crate::sync::{AtomicUsize, Ordering};
use crate::table::{Found, Outcome};

/// An expert that the fetch has a hold on.
struct Held {
    position: usize,
    expert: u32,
    slot: u32,
}

/// Experts asked for and not yet delivered. Dropping it cancels what has not begun; loads under way
/// finish into the cache. Leases already given are unaffected.
pub struct Fetch<'s> {
    shared: &'s Arc<Shared>,
    /// Index of the layer.
    layer: u32,
    hits: Vec<Held>,
    coming: Vec<Held>,
    /// Misses without a slot yet, in order.
    unissued: VecDeque<(usize, u32)>,
    /// In-flight slots that leases of this fetch hold now.
    leased: Arc<AtomicUsize>,
}

/// What `Fetch::gather` found.
enum Gathered {
    Landed(Vec<Held>),
    /// A load failed; the hold on its slot is still to be dropped.
    Broken(Held, Arc<StoreError>),
    /// Nothing came in time.
    Nothing(StoreError),
}

/// What the look-ups of a fetch found.
#[derive(Default)]
struct Counts {
    pinned: u32,
    cached: u32,
    staged: u32,
    misses: u32,
    joined: u32,
}

impl Counts {
    fn hit(&mut self, tier: Tier) {
        match tier {
            Tier::Pinned => self.pinned += 1,
            Tier::Staged => self.staged += 1,
            Tier::Cached | Tier::InFlight => self.cached += 1,
        }
    }
}

impl ExpertStore {
    /// Looks up `experts` of `layer`, distinct and ascending, and begins to load those that are missing.
    ///
    /// Each expert counts as one look-up: a hit when its bytes are in memory, or on their way before anyone
    /// asked, and a miss otherwise. To the replacement policy this is one token that uses all of them alike.
    ///
    /// # Errors
    /// [`StoreError::NoSuchLayer`], [`StoreError::NoSuchExpert`], [`StoreError::Order`].
    pub fn fetch(&self, layer: u32, experts: &[u32]) -> Result<Fetch<'_>, StoreError> {
        self.begin(layer, experts, |index, policy| {
            policy.step(index);
            for &expert in experts {
                policy.requested(ExpertId { layer: index, expert }, Share::EVEN);
            }
        })
    }

    /// As [`ExpertStore::fetch`], for `rows` of a step: each row's experts with their router weights. All that
    /// rows use must be among `experts`. The replacement policy hears of the rows one by one.
    ///
    /// # Errors
    /// As [`ExpertStore::fetch`].
    pub fn fetch_rows(
        &self,
        layer: u32,
        experts: &[u32],
        rows: &[Vec<(u32, f32)>],
    ) -> Result<Fetch<'_>, StoreError> {
        self.begin(layer, experts, |index, policy| {
            for row in rows {
                let sum: f32 = row.iter().map(|&(_, weight)| weight).sum();
                policy.step(index);
                for &(expert, weight) in row.iter().filter(|(e, _)| experts.binary_search(e).is_ok()) {
                    let share = Share::of(weight, sum, row.len());
                    policy.requested(ExpertId { layer: index, expert }, share);
                }
            }
        })
    }

    fn begin(
        &self,
        layer: u32,
        experts: &[u32],
        tell: impl FnOnce(u32, &mut dyn Replacement),
    ) -> Result<Fetch<'_>, StoreError> {
        let shared = self.shared();
        let index = shared.layer_index(layer)?;
        let count = shared.layers[index as usize].experts.len();
        if let Some(pair) = experts.windows(2).find(|w| w[0] >= w[1]) {
            return Err(StoreError::Order { layer, before: pair[0], expert: pair[1] });
        }
        if let Some(&expert) = experts.last().filter(|&&e| e as usize >= count) {
            return Err(StoreError::NoSuchExpert { layer, expert, count });
        }
        let mut fetch = Fetch {
            shared,
            layer: index,
            hits: Vec::new(),
            coming: Vec::new(),
            unissued: VecDeque::new(),
            leased: Arc::default(),
        };
        let mut counts = Counts::default();
        let mut state = shared.lock();
        tell(index, state.table.policy());
        state.table.drop_others(index, |expert| experts.binary_search(&expert).is_ok());
        for (position, &expert) in experts.iter().enumerate() {
            let found = state.table.look_up(ExpertId { layer: index, expert });
            fetch.take(found, position, expert, &mut counts);
        }
        let queued = fetch.issue(&mut state);
        drop(state);
        shared.wake_loaders(queued);
        let lookups = experts.len() as u32;
        let Counts { pinned, cached, staged, misses, joined } = counts;
        shared.emit(&StoreEvent::Lookup { layer, lookups, pinned, cached, staged, misses, joined });
        Ok(fetch)
    }
}

impl Fetch<'_> {
    /// Files what a look-up found.
    fn take(&mut self, found: Found, position: usize, expert: u32, counts: &mut Counts) {
        let held = |slot| Held { position, expert, slot };
        match found {
            Found::Ready(slot, tier) => {
                counts.hit(tier);
                self.hits.push(held(slot));
            }
            Found::Late(slot, tier) => {
                counts.hit(tier);
                self.coming.push(held(slot));
            }
            Found::Joined(slot) => {
                counts.misses += 1;
                counts.joined += 1;
                self.coming.push(held(slot));
            }
            Found::Promoted(slot) => {
                counts.misses += 1;
                self.coming.push(held(slot));
            }
            Found::Missing => {
                counts.misses += 1;
                self.unissued.push_back((position, expert));
            }
        }
    }

    /// Experts that are not in memory yet.
    pub fn pending(&self) -> usize {
        self.coming.len() + self.unissued.len()
    }

    /// The next experts, as (position in the fetch's list, lease): first all hits at once, then the misses
    /// in the order of their arrival, all that have landed and at least one; `None` when all are delivered.
    ///
    /// Loads need slots, and leases hold slots: drop leases of misses before asking for more.
    ///
    /// # Errors
    /// [`StoreError::LeasesExhausted`] when no load can begin because leases hold every in-flight slot: at
    /// once if they are this fetch's own, else after the store's patience. [`StoreError::Stalled`] when
    /// nothing arrives for that long. After either the fetch can be asked again. A failed load's error is
    /// returned once, after what landed with it; the other experts still come.
    pub fn next_batch(&mut self) -> Result<Option<Vec<(usize, Lease)>>, StoreError> {
        if !self.hits.is_empty() {
            let hits = std::mem::take(&mut self.hits);
            return self.lease(hits).map(Some);
        }
        if self.coming.is_empty() && self.unissued.is_empty() {
            return Ok(None);
        }
        let (gathered, felt) = self.gather();
        if !felt.is_zero() {
            let layer = self.number();
            self.shared.emit(&StoreEvent::Waited { layer, felt });
        }
        match gathered {
            Gathered::Landed(landed) => self.lease(landed).map(Some),
            Gathered::Nothing(error) => Err(error),
            Gathered::Broken(held, error) => {
                self.shared.release([held.slot]);
                Err(StoreError::clone(&error))
            }
        }
    }

    /// Turns holds on ready slots into leases.
    fn lease(&mut self, held: Vec<Held>) -> Result<Vec<(usize, Lease)>, StoreError> {
        let (mut state, mut events) = (self.shared.lock(), Vec::new());
        let outcomes: Vec<_> = held.iter().map(|h| state.table.deliver(h.slot, &mut events)).collect();
        drop(state);
        events.iter().for_each(|event| self.shared.emit(event));
        let mut leases = Vec::with_capacity(held.len());
        let mut lost = None;
        for (Held { position, expert, slot }, outcome) in held.into_iter().zip(outcomes) {
            let pinned = match outcome {
                Outcome::Ready { generation, tier, .. } => {
                    self.shared.arena.begin_read(slot, generation).map(|bytes| (bytes, tier))
                }
                _ => None,
            };
            let Some((bytes, tier)) = pinned else {
                // Cannot happen while the table counts holds rightly; the arena refuses all the same.
                lost = Some(slot);
                self.shared.release([slot]);
                continue;
            };
            let in_flight = (tier == Tier::InFlight).then(|| Arc::clone(&self.leased));
            let id = ExpertId { layer: self.layer, expert };
            leases.push((position, Lease::new(Arc::clone(self.shared), slot, id, bytes, in_flight)));
        }
        match lost {
            Some(slot) => Err(StoreError::Internal(format!("slot {slot} was overwritten while it was held"))),
            None => Ok(leases),
        }
    }

    fn number(&self) -> u32 {
        self.shared.layers[self.layer as usize].layer
    }

    /// Gives slots to misses as far as there are any; how many loads were queued.
    fn issue(&mut self, state: &mut State) -> usize {
        let now = Instant::now();
        let mut queued = 0;
        while let Some(&(position, expert)) = self.unissued.front() {
            let id = ExpertId { layer: self.layer, expert };
            // Another fetch may have begun to load it meanwhile.
            let slot = match state.table.look_up(id) {
                Found::Ready(slot, _) | Found::Joined(slot) | Found::Late(slot, _) => slot,
                Found::Promoted(slot) => {
                    queued += 1;
                    slot
                }
                Found::Missing => match state.table.start_load(id, now) {
                    Some(slot) => {
                        queued += 1;
                        slot
                    }
                    None => break,
                },
            };
            self.unissued.pop_front();
            self.coming.push(Held { position, expert, slot });
        }
        queued
    }

    /// Waits until something landed, failed, or patience ends; and the time spent waiting.
    fn gather(&mut self) -> (Gathered, Duration) {
        let began = Instant::now();
        let mut felt = Duration::ZERO;
        let shared = self.shared;
        let mut state = shared.lock();
        loop {
            let queued = self.issue(&mut state);
            shared.wake_loaders(queued);
            if let Some(found) = self.arrived(&state) {
                return (found, felt);
            }
            let leased = self.leased.load(Ordering::Relaxed);
            let limit = state.table.in_flight_limit();
            let blocked = self.coming.is_empty();
            let left = shared.patience.saturating_sub(began.elapsed());
            if (blocked && leased >= limit) || left.is_zero() {
                return (Gathered::Nothing(self.stalled(&state, felt)), felt);
            }
            let slept = Instant::now();
            state = shared.wait_for_change(state, left);
            felt += slept.elapsed();
        }
    }

    /// What landed among `coming`, in order of arrival, or the first failure.
    fn arrived(&mut self, state: &State) -> Option<Gathered> {
        let mut landed = Vec::new();
        let mut failed = None;
        let mut at = 0;
        while at < self.coming.len() {
            match state.table.outcome(self.coming[at].slot) {
                Outcome::Ready { arrival, .. } => landed.push((self.coming.swap_remove(at), arrival)),
                Outcome::Failed(e) => {
                    failed = Some((at, e));
                    at += 1;
                }
                Outcome::Pending => at += 1,
            }
        }
        if !landed.is_empty() {
            landed.sort_unstable_by_key(|&(_, arrival)| arrival);
            return Some(Gathered::Landed(landed.into_iter().map(|(held, _)| held).collect()));
        }
        let (at, error) = failed?;
        Some(Gathered::Broken(self.coming.swap_remove(at), error))
    }

    fn stalled(&self, state: &State, waited: Duration) -> StoreError {
        let layer = self.number();
        if self.coming.is_empty() && !state.table.loading(self.layer) {
            let (waiting, in_flight) = (self.unissued.len(), state.table.in_flight_limit());
            return StoreError::LeasesExhausted { layer, waiting, in_flight };
        }
        StoreError::Stalled { layer, waited, dump: state.table.dump(Instant::now()) }
    }
}

impl Drop for Fetch<'_> {
    fn drop(&mut self) {
        self.shared.release(self.hits.drain(..).chain(self.coming.drain(..)).map(|held| held.slot));
    }
}
