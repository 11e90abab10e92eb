//! The simulated device: rules that are enforced, and a virtual clock.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::profile::{Profile, time};
use crate::residency::{DriverError, Limits, MOST_SETS, ResidencyDriver, SetId, Span};

#[derive(Clone, Debug, Default)]
struct SimSet {
    committed: BTreeMap<usize, usize>,
    added: BTreeMap<usize, usize>,
    removed: BTreeSet<usize>,
    resident: bool,
    used: Duration,
}

impl SimSet {
    /// What it costs to wire it now: nothing, unless it was released, or nobody used it for long.
    fn rewiring(&self, profile: &Profile, now: Duration) -> Duration {
        let unwire_after = time(profile.unwire_after);
        let idle = unwire_after > Duration::ZERO && now.saturating_sub(self.used) > unwire_after;
        let bytes: usize = self.committed.values().sum();
        if idle || !self.resident { time(profile.rewire * bytes as f64) } else { Duration::ZERO }
    }
}

/// What a submission has done so far.
#[derive(Clone, Debug, Default)]
struct Encoding {
    /// Declared for it.
    declared: BTreeMap<usize, usize>,
    /// Written by it since the last barrier.
    written: Vec<Span>,
}

/// Virtual time by what it went into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimTimes {
    /// Kernels.
    pub kernel: Duration,
    /// Between handing work over and its first kernel: base cost, declarations, wiring.
    pub stall: Duration,
    /// Of that, wiring memory anew.
    pub rewire: Duration,
    /// Slowing down of everything else meanwhile.
    pub coupled: Duration,
    /// Making allocations known.
    pub register: Duration,
}

/// What was counted, for prices that are not known yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimCounts {
    /// Allocations made known.
    pub registered: u64,
    /// Commits.
    pub commits: u64,
    /// Members of the sets committed, over all commits.
    pub members: u64,
    /// Bytes wired because memory declared before had been removed.
    pub rewired: u64,
}

/// A device that computes nothing itself: it knows what memory may be touched when, refuses what a real one
/// would not survive, and says how long it would have taken.
#[derive(Clone, Debug)]
pub struct SimDriver {
    profile: Profile,
    clock: Duration,
    wrapped: BTreeMap<usize, usize>,
    sets: Vec<SimSet>,
    encoding: Encoding,
    /// Being overwritten by a loader.
    writing: Vec<Span>,
    /// Something that the last submission declared was forgotten since.
    dropped: bool,
    times: SimTimes,
    counts: SimCounts,
    experts: u64,
}

/// The entry that holds all of `span`.
fn holds(map: &BTreeMap<usize, usize>, span: Span) -> bool {
    let found = map.range(..=span.base).next_back();
    found.is_some_and(|(&base, &len)| Span { base, len }.contains(span))
}

fn overlap(a: Span, b: Span) -> bool {
    a.base < b.base.saturating_add(b.len) && b.base < a.base.saturating_add(a.len)
}

fn refuse<T>(call: &'static str, reason: impl Into<String>) -> Result<T, DriverError> {
    Err(DriverError { call, reason: reason.into() })
}

fn unknown(call: &'static str, set: SetId) -> DriverError {
    DriverError { call, reason: format!("there is no set {}", set.0) }
}

impl SimDriver {
    /// A device of a machine, with nothing known to it.
    pub fn new(profile: Profile) -> SimDriver {
        SimDriver {
            profile,
            clock: Duration::ZERO,
            wrapped: BTreeMap::new(),
            sets: Vec::new(),
            encoding: Encoding::default(),
            writing: Vec::new(),
            dropped: false,
            times: SimTimes::default(),
            counts: SimCounts::default(),
            experts: 0,
        }
    }

    /// The machine.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Virtual time so far.
    pub fn times(&self) -> SimTimes {
        self.times
    }

    /// What was counted so far.
    pub fn counts(&self) -> SimCounts {
        self.counts
    }

    /// Experts computed so far.
    pub fn experts(&self) -> u64 {
        self.experts
    }

    /// Counts experts that were computed.
    pub(super) fn computed(&mut self, experts: usize) {
        self.experts += experts as u64;
    }

    /// Time passes elsewhere.
    pub fn pass(&mut self, by: Duration) {
        self.clock = self.clock.saturating_add(by);
    }

    /// Work is handed over: what was declared and written before belongs to another submission.
    pub fn begin_submission(&mut self) {
        self.encoding.written.clear();
        let now = self.clock;
        for set in self.sets.iter_mut().filter(|set| set.resident) {
            // The system wires an idle set again with the submission that needs it.
            let cost = set.rewiring(&self.profile, now);
            self.times.rewire += cost;
            self.times.stall += cost;
            self.clock += cost;
            set.used = now;
        }
        let cost = time(self.profile.submit);
        self.times.stall += cost;
        self.clock += cost;
    }

    /// A kernel reads and writes memory. `weights` are read through addresses and must be resident; `bound` is
    /// what the call itself names.
    ///
    /// # Errors
    /// Weights that are not resident, were freed or are being overwritten; what an earlier kernel of this
    /// submission wrote, without a barrier between.
    pub fn dispatch(&mut self, weights: &[Span], bound: &[Span], writes: &[Span]) -> Result<(), DriverError> {
        for &span in weights {
            self.readable(span)?;
        }
        for &span in weights.iter().chain(bound) {
            if let Some(written) = self.encoding.written.iter().find(|w| overlap(**w, span)) {
                let reason = format!("{span} is read after {written} was written, without a barrier");
                return refuse("run a kernel", reason);
            }
        }
        self.encoding.written.extend(writes);
        let bytes: usize = weights.iter().map(|span| span.len).sum();
        let cost = time(bytes as f64 / self.profile.kernel_rate);
        self.times.kernel += cost;
        self.clock += cost;
        Ok(())
    }

    /// What was written before may be read after.
    pub fn barrier(&mut self) {
        self.encoding.written.clear();
    }

    fn readable(&self, span: Span) -> Result<(), DriverError> {
        if !holds(&self.wrapped, span) {
            return refuse("run a kernel", format!("{span} is not known to the device, or was freed"));
        }
        if let Some(writing) = self.writing.iter().find(|w| overlap(**w, span)) {
            return refuse("run a kernel", format!("{span} is read while {writing} is being overwritten"));
        }
        let member = |set: &SimSet| set.resident && holds(&set.committed, span);
        if !self.sets.iter().any(member) && !holds(&self.encoding.declared, span) {
            return refuse("run a kernel", format!("{span} is not resident"));
        }
        Ok(())
    }

    /// A loader begins to overwrite memory.
    pub fn begin_write(&mut self, span: Span) {
        self.writing.push(span);
    }

    /// It is done.
    pub fn end_write(&mut self, span: Span) {
        self.writing.retain(|writing| *writing != span);
    }

    fn set(&mut self, call: &'static str, set: SetId) -> Result<&mut SimSet, DriverError> {
        self.sets.get_mut(set.0 as usize).ok_or_else(|| unknown(call, set))
    }
}

impl ResidencyDriver for SimDriver {
    fn limits(&self) -> Limits {
        Limits {
            sets: self.profile.sets,
            working_set: self.profile.working_set,
            setting: self.profile.working_set_setting.is_some().then_some("iogpu.wired_limit_mb"),
            allocation: self.profile.allocation,
        }
    }

    fn now(&self) -> Duration {
        self.clock
    }

    fn idle(&mut self, by: Duration) {
        self.pass(by);
    }

    fn wrap(&mut self, span: Span) -> Result<(), DriverError> {
        let cost = time(self.profile.register);
        self.times.register += cost;
        self.clock += cost;
        self.counts.registered += 1;
        match self.wrapped.insert(span.base, span.len) {
            None => Ok(()),
            Some(_) => refuse("wrap memory", format!("{span} is known already")),
        }
    }

    fn unwrap(&mut self, span: Span) {
        self.wrapped.remove(&span.base);
        self.dropped |= self.encoding.declared.contains_key(&span.base);
    }

    fn create_set(&mut self) -> Result<SetId, DriverError> {
        if self.sets.len() >= self.profile.sets.min(MOST_SETS) {
            return refuse(
                "create a set",
                format!("a queue takes {} sets", self.profile.sets.min(MOST_SETS)),
            );
        }
        self.sets.push(SimSet { resident: true, used: self.clock, ..SimSet::default() });
        Ok(SetId(self.sets.len() as u32 - 1))
    }

    fn add(&mut self, set: SetId, span: Span) -> Result<(), DriverError> {
        if self.wrapped.get(&span.base) != Some(&span.len) {
            return refuse("add to a set", format!("{span} is not known to the device"));
        }
        let set = self.set("add to a set", set)?;
        if !set.removed.remove(&span.base) {
            set.added.insert(span.base, span.len);
        }
        Ok(())
    }

    fn remove(&mut self, set: SetId, span: Span) -> Result<(), DriverError> {
        let set = self.set("remove from a set", set)?;
        if set.added.remove(&span.base).is_none() {
            if !set.committed.contains_key(&span.base) {
                return refuse("remove from a set", format!("{span} is not in it"));
            }
            set.removed.insert(span.base);
        }
        Ok(())
    }

    fn commit(&mut self, set: SetId) -> Result<(), DriverError> {
        let set = self.set("commit a set", set)?;
        let added = std::mem::take(&mut set.added);
        set.committed.extend(added);
        for base in std::mem::take(&mut set.removed) {
            set.committed.remove(&base);
        }
        let members = set.committed.len();
        self.clock += time(self.profile.commit_seconds(members));
        self.counts.commits += 1;
        self.counts.members += members as u64;
        Ok(())
    }

    fn request(&mut self, set: SetId) -> Result<(), DriverError> {
        let known = self.sets.get_mut(set.0 as usize);
        let set = known.ok_or_else(|| unknown("request a set", set))?;
        self.clock += set.rewiring(&self.profile, self.clock);
        set.resident = true;
        set.used = self.clock;
        Ok(())
    }

    fn release(&mut self, set: SetId) -> Result<(), DriverError> {
        self.set("release a set", set)?.resident = false;
        Ok(())
    }

    fn declare(&mut self, spans: &[Span]) -> Result<(), DriverError> {
        self.encoding.declared = spans.iter().map(|span| (span.base, span.len)).collect();
        let bytes: usize = spans.iter().map(|span| span.len).sum();
        // What was wired for the list of before is not wired for another one.
        let wired = match std::mem::take(&mut self.dropped) {
            true => {
                self.counts.rewired += bytes as u64;
                bytes as f64
            }
            false => bytes as f64 - self.profile.unwired(),
        };
        let rewire = time(self.profile.rewire * wired);
        let cost = time(self.profile.declare * spans.len() as f64) + rewire;
        let coupled = rewire.mul_f64(self.profile.coupling);
        self.times.stall += cost;
        self.times.rewire += rewire;
        self.times.coupled += coupled;
        self.clock += cost + coupled;
        Ok(())
    }
}
