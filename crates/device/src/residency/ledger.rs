//! The ledger: which memory is declared to the device, in which set, and since when.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::driver::{DriverError, Limits, ResidencyDriver, SetId, Span};
use super::stats::ResidencyStats;

/// Sets that a queue takes at most on any system known.
pub const MOST_SETS: usize = 32;
/// Share of the working set that a set holds, as a divisor: 5 %.
const SET_SHARE: u64 = 20;

/// How memory is declared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Once, in residency sets attached to the queue.
    Set,
    /// With every submission, each allocation.
    Walk,
}

impl Mode {
    /// Name in flags and reports.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Set => "set",
            Mode::Walk => "walk",
        }
    }
}

/// A submission, numbered in the order in which they were made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Submission(u64);

/// What the ledger refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResidencyError {
    /// Memory that is empty, wraps around the address space or overlaps what is declared already.
    #[error("{span} cannot be declared: {reason}")]
    BadSpan {
        /// The memory.
        span: Span,
        /// Why not.
        reason: &'static str,
    },
    /// An allocation larger than the device takes.
    #[error("an allocation of {wanted} bytes exceeds the {limit} that the device takes")]
    TooLarge {
        /// Its bytes.
        wanted: u64,
        /// The limit.
        limit: u64,
    },
    /// More than may be resident at a time.
    #[error(
        "{wanted} bytes would be declared resident, and the device takes {limit}: lower --ram{}",
        .setting.map(|name| format!(", or raise {name}")).unwrap_or_default()
    )]
    OverWorkingSet {
        /// Bytes declared with this allocation.
        wanted: u64,
        /// The limit.
        limit: u64,
        /// The system setting that raises it.
        setting: Option<&'static str>,
    },
    /// Memory that was never declared, or is no longer.
    #[error("{0} is not declared")]
    Unknown(Span),
    /// A submission in flight may read the memory: it can be removed when that has ended.
    #[error("{span} may be read by submission {}, which is in flight", .submission.0)]
    InFlight {
        /// The memory.
        span: Span,
        /// The last such submission.
        submission: Submission,
    },
    /// A submission that is not in flight.
    #[error("submission {} is not in flight", .0.0)]
    NotInFlight(Submission),
    /// The submissions that read it did not end in time.
    #[error("{span} cannot be removed: a submission in flight has been reading it for {seconds} s")]
    Stalled {
        /// The memory.
        span: Span,
        /// How long was waited.
        seconds: u64,
    },
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// An allocation that is declared.
#[derive(Clone, Copy, Debug)]
struct Entry {
    len: usize,
    /// Index of its set, where it is in one.
    set: Option<usize>,
    /// The first submission that can read it.
    since: u64,
    /// The first submission that cannot read it any more, since its removal was staged before.
    until: Option<u64>,
}

#[derive(Clone, Debug)]
struct SetState {
    id: SetId,
    bytes: u64,
    /// Additions that no commit has seen.
    staged: BTreeSet<usize>,
    /// Removals that no commit has seen, since one failed.
    leaving: BTreeSet<usize>,
    /// Whether it may be taken to be resident; false after it was given up.
    resident: bool,
    used: Duration,
}

/// What the ledger and the true state of things differ in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Expected, and not declared.
    pub missing: Vec<Span>,
    /// Declared, and not expected.
    pub extra: Vec<Span>,
}

impl Difference {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.extra.is_empty()
    }
}

/// The state machine. Every call takes constant time in the number of experts; only a walk visits all
/// allocations, which are few.
#[derive(Debug)]
pub struct Ledger<D> {
    driver: D,
    mode: Mode,
    /// Declares with every submission for now, whatever the mode.
    capture: bool,
    limits: Limits,
    allocations: BTreeMap<usize, Entry>,
    bytes: u64,
    sets: Vec<SetState>,
    next: u64,
    in_flight: BTreeSet<u64>,
    last_submitted: Option<Duration>,
    last_requested: Duration,
    stats: ResidencyStats,
}

impl<D: ResidencyDriver> Ledger<D> {
    /// A ledger without allocations. A system without sets walks, and [`ResidencyStats::fallback`] says why.
    pub fn new(driver: D, mode: Mode) -> Ledger<D> {
        let limits = driver.limits();
        let mut ledger = Ledger {
            driver,
            mode,
            capture: false,
            limits,
            allocations: BTreeMap::new(),
            bytes: 0,
            sets: Vec::new(),
            next: 0,
            in_flight: BTreeSet::new(),
            last_submitted: None,
            last_requested: Duration::ZERO,
            stats: ResidencyStats::default(),
        };
        if mode == Mode::Set && limits.sets == 0 {
            ledger.fall_back("this system has no residency sets".into());
        }
        ledger
    }

    /// The driver.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    /// The driver, for what is not about residency.
    pub fn driver_mut(&mut self) -> &mut D {
        &mut self.driver
    }

    /// The last submission made.
    pub fn last(&self) -> Option<Submission> {
        self.next.checked_sub(1).map(Submission)
    }

    /// How memory is declared now.
    pub fn mode(&self) -> Mode {
        if self.capture { Mode::Walk } else { self.mode }
    }

    /// Figures so far.
    pub fn stats(&self) -> ResidencyStats {
        let (allocations, sets) = (self.allocations.len(), self.sets.len());
        ResidencyStats { allocations, sets, bytes: self.bytes, ..self.stats.clone() }
    }

    /// While a capture of the device runs, sets are not enough: everything is declared with each submission.
    pub fn set_capture(&mut self, running: bool) {
        if running && !self.capture && self.mode == Mode::Set {
            self.stats.captures += 1;
        }
        self.capture = running;
    }

    /// Declares memory. Declaring the same again changes nothing, but takes a removal back that was refused.
    ///
    /// # Errors
    /// Memory that cannot be declared, and what the driver refuses; nothing is declared then.
    pub fn register(&mut self, span: Span) -> Result<(), ResidencyError> {
        if self.allocations.get(&span.base).is_some_and(|entry| entry.len == span.len) {
            return self.stay(span);
        }
        self.check(span)?;
        self.driver.wrap(span)?;
        let set = match self.place(span) {
            Ok(set) => set,
            Err(error) => {
                self.driver.unwrap(span);
                return Err(error.into());
            }
        };
        self.bytes += span.len as u64;
        self.allocations.insert(span.base, Entry { len: span.len, set, since: self.next, until: None });
        self.stats.registered += 1;
        Ok(())
    }

    /// Takes back a removal that was staged and refused, if there was one.
    fn stay(&mut self, span: Span) -> Result<(), ResidencyError> {
        let Some(entry) = self.allocations.get_mut(&span.base) else { return Ok(()) };
        let (Some(index), Some(_)) = (entry.set, entry.until) else { return Ok(()) };
        let set = &mut self.sets[index];
        self.driver.add(set.id, span)?;
        entry.until = None;
        // Unless a commit has taken it out meanwhile, nothing is staged any more.
        if !set.leaving.remove(&span.base) {
            set.staged.insert(span.base);
        }
        Ok(())
    }

    fn check(&self, span: Span) -> Result<(), ResidencyError> {
        let bad = |reason| ResidencyError::BadSpan { span, reason };
        let end = span.end().filter(|_| span.len > 0).ok_or(bad("it is empty or has no end"))?;
        let before = self.allocations.range(..end).next_back();
        if before.is_some_and(|(base, entry)| base.saturating_add(entry.len) > span.base) {
            return Err(bad("it overlaps what is declared already"));
        }
        let wanted = span.len as u64;
        if wanted > self.limits.allocation {
            return Err(ResidencyError::TooLarge { wanted, limit: self.limits.allocation });
        }
        let (wanted, limit) = (self.bytes.saturating_add(wanted), self.limits.working_set);
        if wanted > limit {
            return Err(ResidencyError::OverWorkingSet { wanted, limit, setting: self.limits.setting });
        }
        Ok(())
    }

    /// Finds a set and stages the addition; none where everything is declared with each submission.
    fn place(&mut self, span: Span) -> Result<Option<usize>, DriverError> {
        if self.mode == Mode::Walk {
            return Ok(None);
        }
        let share = self.limits.working_set / SET_SHARE;
        let fits = |set: &SetState| set.bytes.saturating_add(span.len as u64) <= share;
        let index = match self.sets.iter().position(fits) {
            Some(index) => index,
            None if self.sets.len() < self.limits.sets.min(MOST_SETS) => match self.driver.create_set() {
                Ok(id) => {
                    let (staged, leaving) = (BTreeSet::new(), BTreeSet::new());
                    let used = self.driver.now();
                    self.sets.push(SetState { id, bytes: 0, staged, leaving, resident: true, used });
                    self.sets.len() - 1
                }
                Err(error) if self.sets.is_empty() => {
                    self.fall_back(error.to_string());
                    return Ok(None);
                }
                Err(_) => self.emptiest(),
            },
            None => self.emptiest(),
        };
        let set = &mut self.sets[index];
        self.driver.add(set.id, span)?;
        set.staged.insert(span.base);
        set.bytes += span.len as u64;
        Ok(Some(index))
    }

    fn emptiest(&self) -> usize {
        let sets = self.sets.iter().enumerate();
        sets.min_by_key(|(_, set)| set.bytes).map_or(0, |(index, _)| index)
    }

    fn fall_back(&mut self, reason: String) {
        self.mode = Mode::Walk;
        self.stats.fallback.get_or_insert(reason);
    }

    /// Begins a submission: whatever is declared may be read by it.
    ///
    /// # Errors
    /// What the driver refuses; there is no submission then, and what was staged stays so.
    pub fn submit(&mut self) -> Result<Submission, ResidencyError> {
        match self.mode() {
            Mode::Set => self.flush()?,
            Mode::Walk => {
                // What sets hold is declared as well: a capture sees only what is named.
                let spans: Vec<Span> = self.spans().collect();
                self.driver.declare(&spans)?;
                self.stats.declared += spans.len() as u64;
            }
        }
        let now = self.driver.now();
        self.sets.iter_mut().for_each(|set| set.used = now);
        self.last_submitted = Some(now);
        let submission = self.next;
        self.next += 1;
        self.in_flight.insert(submission);
        self.stats.submissions += 1;
        Ok(Submission(submission))
    }

    /// Commits what is staged, a set at a time, and asks for sets back that were given up.
    fn flush(&mut self) -> Result<(), DriverError> {
        let began = self.driver.now();
        let mut flushed = Ok(());
        for set in &mut self.sets {
            if !(set.staged.is_empty() && set.leaving.is_empty()) {
                flushed = self.driver.commit(set.id);
                if flushed.is_err() {
                    break;
                }
                self.stats.commits += 1;
                set.staged.clear();
                set.leaving.clear();
            }
            if !set.resident {
                flushed = self.driver.request(set.id);
                if flushed.is_err() {
                    break;
                }
                set.resident = true;
                self.stats.rebuilt += 1;
            }
        }
        self.stats.flush += self.driver.now().saturating_sub(began);
        flushed
    }

    /// A submission has ended.
    ///
    /// # Errors
    /// One that is not in flight.
    pub fn complete(&mut self, submission: Submission) -> Result<(), ResidencyError> {
        match self.in_flight.remove(&submission.0) {
            true => Ok(()),
            false => Err(ResidencyError::NotInFlight(submission)),
        }
    }

    /// Removes memory: when this returns the device knows nothing of it, and it may be freed.
    ///
    /// # Errors
    /// [`ResidencyError::InFlight`] while a submission may read it; memory that is not declared; what the
    /// driver refuses. The memory must not be freed then; where the driver refused it must not be read any
    /// more either, until the call is repeated or [`Ledger::register`] takes it back.
    pub fn unregister(&mut self, span: Span) -> Result<(), ResidencyError> {
        let entry = self.allocations.get(&span.base).copied().filter(|entry| entry.len == span.len);
        let entry = entry.ok_or(ResidencyError::Unknown(span))?;
        let readers = entry.since..entry.until.unwrap_or(self.next);
        if let Some(&last) = self.in_flight.range(readers).next_back() {
            return Err(ResidencyError::InFlight { span, submission: Submission(last) });
        }
        if let Some(index) = entry.set {
            let began = self.driver.now();
            let left = self.leave(index, span);
            self.stats.unregister += self.driver.now().saturating_sub(began);
            left?;
        }
        self.driver.unwrap(span);
        self.allocations.remove(&span.base);
        self.bytes -= span.len as u64;
        self.stats.unregistered += 1;
        Ok(())
    }

    /// Takes memory out of its set. After a commit that failed, another one, with a submission or here,
    /// makes up for it.
    fn leave(&mut self, index: usize, span: Span) -> Result<(), DriverError> {
        let set = &mut self.sets[index];
        let entry = self.allocations.get_mut(&span.base);
        if let Some(entry) = entry.filter(|entry| entry.until.is_none()) {
            self.driver.remove(set.id, span)?;
            entry.until = Some(self.next);
            if !set.staged.remove(&span.base) {
                set.leaving.insert(span.base);
            }
        }
        if set.leaving.contains(&span.base) {
            self.driver.commit(set.id)?;
            self.stats.commits += 1;
            set.staged.clear();
            set.leaving.clear();
        }
        set.bytes -= span.len as u64;
        Ok(())
    }

    /// Others need memory: gives up the least used sets until at least `bytes` are no longer demanded.
    /// They are asked for again with the next submission. Returns the bytes given up.
    ///
    /// # Errors
    /// What the driver refuses; sets given up before stay so.
    pub fn give_up(&mut self, bytes: u64) -> Result<u64, ResidencyError> {
        let mut given = 0;
        while given < bytes && self.in_flight.is_empty() {
            let kept = self.sets.iter_mut().filter(|set| set.resident && set.bytes > 0);
            let Some(set) = kept.min_by_key(|set| set.used) else { break };
            self.driver.release(set.id)?;
            set.resident = false;
            given += set.bytes;
            self.stats.given_up += 1;
        }
        Ok(given)
    }

    /// Systems let go of sets that nothing uses: while work is expected, they are asked for again every
    /// `cadence`, until nothing has been submitted for `idle`. Whether they were.
    ///
    /// # Errors
    /// What the driver refuses; it is counted.
    pub fn keep_alive(&mut self, cadence: Duration, idle: Duration) -> Result<bool, ResidencyError> {
        let now = self.driver.now();
        let Some(last) = self.last_submitted else { return Ok(false) };
        let since = |then: Duration| now.saturating_sub(then);
        let due = since(last.max(self.last_requested)) >= cadence && since(last) < idle;
        if !due || self.mode() == Mode::Walk {
            return Ok(false);
        }
        for set in self.sets.iter().filter(|set| set.resident) {
            if let Err(error) = self.driver.request(set.id) {
                self.stats.keep_alive_refused += 1;
                return Err(error.into());
            }
        }
        self.last_requested = now;
        self.stats.kept_alive += 1;
        Ok(true)
    }

    /// All that is declared, by address.
    pub fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        self.allocations.iter().map(|(&base, entry)| Span { base, len: entry.len })
    }

    /// The declared allocation in which all of `span` lies, unless it is being removed.
    pub fn find(&self, span: Span) -> Option<Span> {
        let (&base, entry) =
            self.allocations.range(..=span.base).next_back().filter(|(_, e)| e.until.is_none())?;
        Some(Span { base, len: entry.len }).filter(|found| found.contains(span))
    }

    /// What differs from the memory that there really is. Empty unless something was forgotten.
    pub fn difference(&self, expected: &[Span]) -> Difference {
        let expected: BTreeSet<Span> = expected.iter().copied().collect();
        let declared: BTreeSet<Span> = self.spans().collect();
        Difference {
            missing: expected.difference(&declared).copied().collect(),
            extra: declared.difference(&expected).copied().collect(),
        }
    }
}
