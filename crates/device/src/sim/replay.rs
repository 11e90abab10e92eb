//! Replays of decoding, with a real ledger and a simulated device.
//!
//! What is about residency is not modelled but done: slots are registered as they fill, a cache grows, every
//! layer of every token is a submission of the ledger, and the device charges for it and refuses what is not
//! resident. What is not (the drive, the page cache, the processor) is a sum of few terms ([`Streams`]).
//! Figures are those of a simulation that was fitted to published rows ([`super::fit`]).

mod cache;
mod outcome;
mod quantities;
mod streams;
#[cfg(test)]
mod tests;

use std::time::Duration;

use super::driver::{SimCounts, SimDriver, SimTimes};
use super::profile::{Profile, time};
use super::workload::Workload;
use crate::residency::{Ledger, Mode, ResidencyError, SlabAllocation, Span};
use cache::Cache;

pub use outcome::Outcome;
pub use quantities::{DeviceSeconds, Quantities};
pub use streams::Streams;

/// A cache that grows while decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Tokens decoded before it does.
    pub after: usize,
    /// Slots a layer afterwards.
    pub slots: usize,
}

/// Pauses in which nothing is computed, as between a user's turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pauses {
    /// Tokens between them.
    pub every: usize,
    /// How long they are.
    pub length: Duration,
    /// Sets are asked for again so often meanwhile.
    pub keep_alive: Option<Duration>,
}

/// Others that need memory while decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pressure {
    /// Tokens between their demands.
    pub every: usize,
    /// Bytes that they take each time.
    pub bytes: u64,
}

/// How a run is set.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Name of the machine, for its session's factor.
    pub machine: String,
    /// Slots a layer.
    pub slots: usize,
    /// Whether the cache grows.
    pub growth: Option<Growth>,
    /// Experts pinned, declared as cached ones are.
    pub pinned: usize,
    /// Experts pinned that the device knows nothing of.
    pub apart: usize,
    /// Share of the weights that the device computes.
    pub device_share: f64,
    /// How memory is declared.
    pub mode: Mode,
    /// What is one allocation.
    pub slabs: SlabAllocation,
    /// Sets that a queue takes; none for as many as the profile says.
    pub sets: Option<usize>,
    /// Whether experts are loaded beside the computing.
    pub async_loaders: bool,
    /// Whether reads pass the page cache by.
    pub direct: bool,
    /// Share of the selections that are in memory; none for the curve of the workload.
    pub hits: Option<f64>,
    /// An expert that is evicted is freed and removed, and the next one is an allocation of its own.
    pub frees: bool,
    /// Pauses.
    pub pauses: Option<Pauses>,
    /// Memory pressure.
    pub pressure: Option<Pressure>,
}

impl Run {
    /// This project's defaults with so many slots a layer: declared once, in arenas, several sets.
    pub fn new(slots: usize) -> Run {
        Run {
            machine: String::new(),
            slots,
            growth: None,
            pinned: 0,
            apart: 0,
            device_share: 1.0,
            mode: Mode::Set,
            slabs: SlabAllocation::Arena,
            sets: None,
            async_loaders: false,
            direct: false,
            hits: None,
            frees: false,
            pauses: None,
            pressure: None,
        }
    }

    /// Pinned experts a layer, in the mean.
    pub(super) fn pinned_a_layer(&self, workload: &Workload) -> f64 {
        (self.pinned + self.apart) as f64 / workload.layers as f64
    }

    /// Slots a layer at the end.
    fn most_slots(&self) -> usize {
        self.growth.map_or(self.slots, |growth| growth.slots.max(self.slots))
    }
}

/// Which submissions are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// All.
    Every,
    /// All of a token in which something changes; of another token, whose submissions are all the same,
    /// one, which counts for all.
    Changes,
}

/// What was done, and what it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Replayed {
    /// Time of the device.
    pub device: DeviceSeconds,
    /// What it is the price of.
    pub quantities: Quantities,
    /// Allocations declared at the end.
    pub allocations: usize,
    /// Sets at the end.
    pub sets: usize,
}

/// Replays a run.
///
/// # Errors
/// What the ledger or the device refuses: more memory than it takes.
pub fn replay(profile: &Profile, run: &Run, detail: Detail) -> Result<Replayed, ResidencyError> {
    let mut replay = Replay::new(profile, run, detail)?;
    for token in 0..profile.workload.tokens {
        replay.token(token)?;
    }
    Ok(replay.end())
}

struct Replay<'a> {
    profile: &'a Profile,
    run: &'a Run,
    detail: Detail,
    ledger: Ledger<SimDriver>,
    cache: Cache,
    /// Time after a submission in which the device has nothing to do.
    between: Duration,
    misses: f64,
    /// Registering before the run, which is none of its time.
    before: (SimTimes, SimCounts),
    /// Submissions that were not made since they are as the one that was.
    more: SimTimes,
    quantities: Quantities,
}

impl<'a> Replay<'a> {
    fn new(profile: &'a Profile, run: &'a Run, detail: Detail) -> Result<Replay<'a>, ResidencyError> {
        let machine = Profile { sets: run.sets.unwrap_or(profile.sets), ..profile.clone() };
        let mut ledger = Ledger::new(SimDriver::new(machine), run.mode);
        let workload = &profile.workload;
        let mut cache = Cache::new(workload, run.slabs, run.most_slots());
        for allocation in cache.pin(run.pinned) {
            ledger.register(allocation)?;
        }
        let streams = Streams::of(profile, run);
        let between = (streams.disk + streams.host) / (workload.tokens * workload.layers) as f64;
        let before = (ledger.driver().times(), ledger.driver().counts());
        Ok(Replay {
            profile,
            run,
            detail,
            ledger,
            cache,
            between: time(between),
            misses: workload.top_k as f64 * (1.0 - streams.hits),
            before,
            more: SimTimes::default(),
            quantities: Quantities::default(),
        })
    }

    fn token(&mut self, token: usize) -> Result<(), ResidencyError> {
        let (run, layers) = (self.run, self.profile.workload.layers);
        let filled = self.cache.fill(&self.profile.workload, run.slots);
        let replaced = if run.frees && filled == 0 { self.cache.replaced(self.misses) } else { 0 };
        let growth = run.growth.filter(|growth| growth.after == token);
        let due = |every: usize| token > 0 && token.is_multiple_of(every);
        let pauses = run.pauses.filter(|pauses| due(pauses.every));
        let pressure = run.pressure.filter(|pressure| due(pressure.every));
        if let Some(pauses) = pauses {
            self.pause(&pauses)?;
        }
        if let Some(pressure) = pressure {
            self.ledger.give_up(pressure.bytes)?;
        }
        let quiet = filled + replaced == 0 && growth.is_none() && pauses.is_none() && pressure.is_none();
        if quiet && self.detail == Detail::Changes {
            self.submit(0, layers as u64)?;
        } else {
            for layer in 0..layers {
                self.change(layer, filled, replaced, growth)?;
                self.submit(layer, 1)?;
            }
        }
        Ok(())
    }

    fn pause(&mut self, pauses: &Pauses) -> Result<(), ResidencyError> {
        let Some(cadence) = pauses.keep_alive.filter(|cadence| !cadence.is_zero()) else {
            self.ledger.driver_mut().pass(pauses.length);
            return Ok(());
        };
        let mut left = pauses.length;
        while !left.is_zero() {
            let step = left.min(cadence);
            self.ledger.driver_mut().pass(step);
            self.ledger.keep_alive(cadence, pauses.length.saturating_mul(2))?;
            left -= step;
        }
        Ok(())
    }

    /// What the cache does before a layer's submission.
    fn change(
        &mut self,
        layer: usize,
        filled: usize,
        replaced: usize,
        growth: Option<Growth>,
    ) -> Result<(), ResidencyError> {
        if let Some(growth) = growth {
            for freed in self.cache.regrow(layer) {
                self.ledger.unregister(freed)?;
            }
            let more = growth.slots.saturating_sub(self.cache.held(layer));
            self.add(layer, more)?;
        }
        if replaced > 0 && self.run.slabs == SlabAllocation::PerExpert {
            for freed in self.cache.free(layer, replaced) {
                self.ledger.unregister(freed)?;
            }
            self.add(layer, replaced)?;
        }
        self.add(layer, filled)
    }

    fn add(&mut self, layer: usize, slots: usize) -> Result<(), ResidencyError> {
        for _ in 0..slots {
            if let Some(allocation) = self.cache.add(layer) {
                self.ledger.register(allocation)?;
            }
        }
        Ok(())
    }

    /// A layer's submission, which counts for `times` of them.
    fn submit(&mut self, layer: usize, times: u64) -> Result<(), ResidencyError> {
        let (top_k, share) = (self.profile.workload.top_k, self.run.device_share);
        let (then, wired) = (self.ledger.driver().times(), self.ledger.driver().counts().rewired);
        let submission = self.ledger.submit()?;
        let device = self.ledger.driver_mut();
        device.begin_submission();
        let (mut bytes, mut result) = (0, Ok(()));
        for slot in self.cache.chosen(layer, top_k) {
            let read = Span { len: ((slot.len as f64 * share) as usize).max(1), ..slot };
            bytes += read.len as u64;
            result = result.and_then(|()| device.dispatch(&[read], &[], &[]));
        }
        self.ledger.complete(submission)?;
        result?;
        let now = self.ledger.driver().times();
        let rest = u32::try_from(times - 1).unwrap_or(u32::MAX);
        let more = |now: Duration, then: Duration| now.saturating_sub(then).saturating_mul(rest);
        self.more.kernel += more(now.kernel, then.kernel);
        self.more.stall += more(now.stall, then.stall);
        self.more.coupled += more(now.coupled, then.coupled);
        let declared = self.ledger.stats();
        let anew = self.ledger.driver().counts().rewired != wired;
        let walk = (self.run.mode == Mode::Walk).then_some((declared.allocations, declared.bytes, anew));
        self.quantities.submitted(times, bytes, walk);
        // Once, however often the submission counts: the next one comes no later for it.
        self.ledger.driver_mut().pass(self.between);
        Ok(())
    }

    fn end(mut self) -> Replayed {
        let (stats, driver) = (self.ledger.stats(), self.ledger.driver());
        let (times, counts) = (driver.times(), driver.counts());
        let (before, counted) = self.before;
        let seconds = |now: Duration, before: Duration| now.saturating_sub(before).as_secs_f64();
        self.quantities.counted(&counts, &counted);
        Replayed {
            device: DeviceSeconds {
                kernel: (times.kernel + self.more.kernel).as_secs_f64(),
                stall: (times.stall + self.more.stall).as_secs_f64(),
                coupled: (times.coupled + self.more.coupled).as_secs_f64(),
                register: seconds(times.register, before.register),
                flush: stats.flush.as_secs_f64(),
                unregister: stats.unregister.as_secs_f64(),
            },
            quantities: self.quantities.end(),
            allocations: stats.allocations,
            sets: stats.sets,
        }
    }
}
