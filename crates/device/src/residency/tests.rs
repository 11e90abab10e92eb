//! The ledger against a driver that keeps books of its own and refuses what it is told to.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use proptest::prelude::*;

use super::*;

mod keeper;

const MIB: usize = 1 << 20;

/// A set as the driver knows it.
#[derive(Clone, Debug, Default)]
struct FakeSet {
    committed: BTreeSet<Span>,
    added: BTreeSet<Span>,
    removed: BTreeSet<Span>,
    resident: bool,
}

/// Books of a driver. A call whose number is in `failing` is refused.
#[derive(Clone, Debug)]
struct Fake {
    limits: Limits,
    wrapped: BTreeSet<Span>,
    sets: BTreeMap<SetId, FakeSet>,
    declared: Vec<Span>,
    calls: Vec<&'static str>,
    failing: BTreeSet<usize>,
    clock: Duration,
}

impl Fake {
    fn new() -> Fake {
        Fake {
            limits: Limits {
                sets: 32,
                working_set: 4000 * MIB as u64,
                setting: Some("iogpu.wired_limit_mb"),
                allocation: 1000 * MIB as u64,
            },
            wrapped: BTreeSet::new(),
            sets: BTreeMap::new(),
            declared: Vec::new(),
            calls: Vec::new(),
            failing: BTreeSet::new(),
            clock: Duration::ZERO,
        }
    }

    fn call(&mut self, call: &'static str) -> Result<(), DriverError> {
        let number = self.calls.len();
        self.calls.push(call);
        self.clock += Duration::from_millis(1);
        match self.failing.contains(&number) {
            true => Err(DriverError { call, reason: "told to".into() }),
            false => Ok(()),
        }
    }

    /// The next call of any kind is refused.
    fn fail_next(&mut self) {
        self.failing.insert(self.calls.len());
    }

    /// Whether the device may read all of it now.
    fn readable(&self, span: Span) -> bool {
        let in_set = |set: &FakeSet| set.resident && set.committed.contains(&span);
        self.wrapped.contains(&span) && (self.sets.values().any(in_set) || self.declared.contains(&span))
    }

    /// All that any set holds or is to hold.
    fn members(&self) -> BTreeSet<Span> {
        let of = |set: &FakeSet| set.committed.union(&set.added).copied().collect::<Vec<_>>();
        self.sets.values().flat_map(of).collect()
    }

    fn count(&self, call: &str) -> usize {
        self.calls.iter().filter(|c| **c == call).count()
    }
}

impl ResidencyDriver for Fake {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn now(&self) -> Duration {
        self.clock
    }

    fn wrap(&mut self, span: Span) -> Result<(), DriverError> {
        self.call("wrap")?;
        assert!(self.wrapped.insert(span), "wrapped twice");
        Ok(())
    }

    fn unwrap(&mut self, span: Span) {
        assert!(!self.members().contains(&span), "freed while a set holds it");
        assert!(self.wrapped.remove(&span), "unwrapped and never wrapped");
    }

    fn create_set(&mut self) -> Result<SetId, DriverError> {
        self.call("create_set")?;
        assert!(self.sets.len() < 32, "more sets than a queue takes");
        let id = SetId(self.sets.len() as u32);
        self.sets.insert(id, FakeSet { resident: true, ..FakeSet::default() });
        Ok(id)
    }

    fn add(&mut self, set: SetId, span: Span) -> Result<(), DriverError> {
        self.call("add")?;
        assert!(self.wrapped.contains(&span));
        if !self.sets.get_mut(&set).unwrap().removed.remove(&span) {
            assert!(!self.members().contains(&span), "added twice");
            self.sets.get_mut(&set).unwrap().added.insert(span);
        }
        Ok(())
    }

    fn remove(&mut self, set: SetId, span: Span) -> Result<(), DriverError> {
        self.call("remove")?;
        let set = self.sets.get_mut(&set).unwrap();
        if !set.added.remove(&span) {
            assert!(set.committed.contains(&span), "removed and never added");
            assert!(set.removed.insert(span), "removed twice");
        }
        Ok(())
    }

    fn commit(&mut self, set: SetId) -> Result<(), DriverError> {
        self.call("commit")?;
        let set = self.sets.get_mut(&set).unwrap();
        let (added, removed) = (std::mem::take(&mut set.added), std::mem::take(&mut set.removed));
        set.committed.extend(added);
        set.committed.retain(|span| !removed.contains(span));
        Ok(())
    }

    fn request(&mut self, set: SetId) -> Result<(), DriverError> {
        self.call("request")?;
        self.sets.get_mut(&set).unwrap().resident = true;
        Ok(())
    }

    fn release(&mut self, set: SetId) -> Result<(), DriverError> {
        self.call("release")?;
        self.sets.get_mut(&set).unwrap().resident = false;
        Ok(())
    }

    fn declare(&mut self, spans: &[Span]) -> Result<(), DriverError> {
        self.declared.clear();
        self.call("declare")?;
        self.declared.extend(spans);
        Ok(())
    }
}

fn ledger() -> Ledger<Fake> {
    Ledger::new(Fake::new(), Mode::Set)
}

/// The `n`th chunk of 100 MiB.
fn chunk(n: usize) -> Span {
    Span { base: (n + 1) * 128 * MIB, len: 100 * MIB }
}

#[test]
fn declared_once_a_submission_declares_nothing_whatever_is_cached() {
    for chunks in [1, 30] {
        let mut ledger = ledger();
        (0..chunks).for_each(|n| ledger.register(chunk(n)).unwrap());
        let first = ledger.submit().unwrap();
        ledger.complete(first).unwrap();
        let calls = ledger.driver().calls.len();
        for _ in 0..100 {
            let submission = ledger.submit().unwrap();
            assert!((0..chunks).all(|n| ledger.driver().readable(chunk(n))));
            ledger.complete(submission).unwrap();
        }
        assert_eq!(ledger.driver().calls.len(), calls, "a submission called the driver");
        assert_eq!(ledger.stats().declared, 0);
    }
}

#[test]
fn walking_declares_everything_with_each_submission() {
    let mut ledger = Ledger::new(Fake::new(), Mode::Walk);
    (0..7).for_each(|n| ledger.register(chunk(n)).unwrap());
    for _ in 0..3 {
        let submission = ledger.submit().unwrap();
        assert!((0..7).all(|n| ledger.driver().readable(chunk(n))));
        ledger.complete(submission).unwrap();
    }
    let stats = ledger.stats();
    assert_eq!((stats.declared, stats.declared_per_submit(), stats.sets), (21, Some(7.0), 0));
    assert_eq!(stats.fallback, None);
}

#[test]
fn without_sets_it_walks_and_says_why() {
    let mut none = Fake::new();
    none.limits.sets = 0;
    let old = Ledger::new(none, Mode::Set);
    assert_eq!(old.mode(), Mode::Walk);
    assert!(old.stats().fallback.unwrap().contains("no residency sets"));

    // In a virtual machine the first set cannot be created.
    let mut ledger = ledger();
    ledger.driver_mut().failing.insert(1);
    ledger.register(chunk(0)).unwrap();
    assert_eq!(ledger.mode(), Mode::Walk);
    assert!(ledger.stats().fallback.unwrap().contains("told to"));
    ledger.submit().unwrap();
    assert!(ledger.driver().readable(chunk(0)));
}

#[test]
fn a_capture_walks_while_it_runs() {
    let mut ledger = ledger();
    ledger.register(chunk(0)).unwrap();
    ledger.set_capture(true);
    let during = ledger.submit().unwrap();
    assert_eq!((ledger.mode(), ledger.stats().declared, ledger.stats().captures), (Mode::Walk, 1, 1));
    ledger.complete(during).unwrap();
    ledger.set_capture(false);
    ledger.submit().unwrap();
    assert_eq!((ledger.mode(), ledger.stats().declared), (Mode::Set, 1));
}

#[test]
fn several_sets_share_what_is_declared_and_there_are_never_more_than_a_queue_takes() {
    let mut ledger = ledger();
    // A set holds 5 % of 4000 MiB: two chunks.
    (0..8).for_each(|n| ledger.register(chunk(n)).unwrap());
    assert_eq!(ledger.stats().sets, 4);
    ledger.submit().unwrap();
    let (before, one) = (ledger.driver().count("commit"), chunk(8));
    ledger.register(one).unwrap();
    ledger.submit().unwrap();
    // The commit after it touches one small set.
    assert_eq!(ledger.driver().count("commit"), before + 1);

    let mut many = Ledger::new(Fake::new(), Mode::Set);
    let small = |n: usize| Span { base: (n + 1) * 256 * MIB, len: 110 * MIB };
    (0..36).for_each(|n| many.register(small(n)).unwrap());
    assert_eq!(many.stats().sets, MOST_SETS);
    many.submit().unwrap();
    assert!((0..36).all(|n| many.driver().readable(small(n))));
}

#[test]
fn additions_are_batched_and_removals_are_not() {
    let mut ledger = ledger();
    (0..2).for_each(|n| ledger.register(chunk(n)).unwrap());
    assert_eq!(ledger.driver().count("commit"), 0);
    let submission = ledger.submit().unwrap();
    assert_eq!(ledger.driver().count("commit"), 1);
    ledger.complete(submission).unwrap();
    // Committed before it returns: the memory is freed next.
    ledger.unregister(chunk(0)).unwrap();
    assert_eq!(ledger.driver().count("commit"), 2);
    assert!(!ledger.driver().readable(chunk(0)) && ledger.driver().readable(chunk(1)));
    let stats = ledger.stats();
    assert!(stats.flush > Duration::ZERO && stats.unregister > Duration::ZERO);
    assert_eq!((stats.registered, stats.unregistered, stats.allocations), (2, 1, 1));
    // What no commit has seen needs none to leave.
    ledger.register(chunk(5)).unwrap();
    ledger.unregister(chunk(5)).unwrap();
    assert_eq!(ledger.driver().count("commit"), 2);
}

#[test]
fn what_a_submission_in_flight_may_read_is_not_removed() {
    let mut ledger = ledger();
    ledger.register(chunk(0)).unwrap();
    let (first, second) = (ledger.submit().unwrap(), ledger.submit().unwrap());
    ledger.register(chunk(1)).unwrap();
    // No submission can know of it.
    ledger.unregister(chunk(1)).unwrap();
    for left in [second, first] {
        let refused = ledger.unregister(chunk(0)).unwrap_err();
        assert!(matches!(refused, ResidencyError::InFlight { .. }), "{refused}");
        assert!(ledger.driver().readable(chunk(0)));
        ledger.complete(left).unwrap();
    }
    ledger.unregister(chunk(0)).unwrap();
    assert_eq!(ledger.complete(first), Err(ResidencyError::NotInFlight(first)));
}

#[test]
fn a_removal_waits_for_submissions_and_not_for_ever() {
    let shared = Arc::new(Residency::new(ledger()).with_patience(Duration::from_millis(50)));
    shared.register(chunk(0)).unwrap();
    let submission = shared.submit().unwrap();
    let stalled = shared.unregister(chunk(0)).unwrap_err();
    assert!(matches!(stalled, ResidencyError::Stalled { .. }), "{stalled}");

    let shared = Arc::new(Residency::new(ledger()));
    shared.register(chunk(0)).unwrap();
    let submission_too = shared.submit().unwrap();
    assert_eq!(submission, submission_too);
    let (tell, told) = mpsc::channel();
    let remover = std::thread::spawn({
        let shared = Arc::clone(&shared);
        move || {
            shared.unregister(chunk(0)).unwrap();
            tell.send(()).unwrap();
        }
    });
    assert!(told.recv_timeout(Duration::from_millis(50)).is_err(), "removed under a submission");
    shared.complete(submission_too).unwrap();
    told.recv_timeout(Duration::from_secs(20)).unwrap();
    remover.join().unwrap();
}

#[test]
#[cfg(debug_assertions)]
fn no_driver_call_under_the_slot_tables_lock() {
    let shared = Residency::new(ledger());
    shared.register(chunk(0)).unwrap();
    let locked = metaltail_store::testing::as_if_locked();
    let call = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| shared.register(chunk(1))));
    assert!(call.is_err(), "a driver was called under the lock");
    drop(locked);
    shared.register(chunk(1)).unwrap();
}

#[test]
fn what_cannot_be_declared_is_refused_with_the_reason() {
    let mut ledger = ledger();
    ledger.register(chunk(0)).unwrap();
    ledger.register(chunk(0)).unwrap();
    assert_eq!(ledger.stats().registered, 1);
    let at = |base: usize, len: usize| Span { base, len };
    let inside = at(chunk(0).base + MIB, MIB);
    for span in
        [inside, at(chunk(0).base, MIB), at(chunk(0).base - MIB, 2 * MIB), at(MIB, 0), at(usize::MAX, 2)]
    {
        let refused = ledger.register(span).unwrap_err();
        assert!(matches!(refused, ResidencyError::BadSpan { .. }), "{span}: {refused}");
    }
    let large = ledger.register(at(1 << 40, 1001 * MIB)).unwrap_err();
    assert!(matches!(large, ResidencyError::TooLarge { .. }), "{large}");
    (0..4).for_each(|n| ledger.register(at((n + 1) << 40, 975 * MIB)).unwrap_or(()));
    let over = ledger.register(chunk(1)).unwrap_err().to_string();
    assert!(over.contains("iogpu.wired_limit_mb") && over.contains("--ram"), "{over}");
    assert!(matches!(ledger.unregister(chunk(7)), Err(ResidencyError::Unknown(_))));
    assert_eq!(ledger.find(inside), Some(chunk(0)));
    assert_eq!(ledger.find(at(chunk(0).base + 99 * MIB, 2 * MIB)), None);
}

#[test]
fn it_stays_resident_while_work_is_expected_and_comes_back_when_it_was_given_up() {
    let mut ledger = ledger();
    (0..6).for_each(|n| ledger.register(chunk(n)).unwrap());
    let (cadence, idle) = (Duration::from_millis(100), Duration::from_secs(180));
    assert!(!ledger.keep_alive(cadence, idle).unwrap(), "nothing was submitted yet");
    let submission = ledger.submit().unwrap();
    ledger.complete(submission).unwrap();
    assert!(!ledger.keep_alive(cadence, idle).unwrap(), "too early");
    ledger.driver_mut().clock += Duration::from_millis(200);
    assert!(ledger.keep_alive(cadence, idle).unwrap());
    assert!(!ledger.keep_alive(cadence, idle).unwrap());
    ledger.driver_mut().clock += idle;
    assert!(!ledger.keep_alive(cadence, idle).unwrap(), "nobody is waiting any more");

    // 150 MiB are two sets of two chunks each at most.
    assert_eq!(ledger.give_up(150 * MIB as u64).unwrap(), 200 * MIB as u64);
    let readable = |ledger: &Ledger<Fake>| (0..6).filter(|&n| ledger.driver().readable(chunk(n))).count();
    assert_eq!(readable(&ledger), 4);
    let submission = ledger.submit().unwrap();
    assert_eq!(readable(&ledger), 6);
    assert_eq!(ledger.give_up(1).unwrap(), 0, "taken from a submission in flight");
    ledger.complete(submission).unwrap();
    assert_eq!((ledger.stats().given_up, ledger.stats().rebuilt, ledger.stats().kept_alive), (1, 1, 1));
}

#[test]
fn a_refused_call_leaves_the_ledger_as_it_was() {
    // Each call in turn is refused: registering, submitting and removing in the end succeed when repeated.
    for failing in 0..12 {
        let mut ledger = ledger();
        ledger.register(chunk(9)).unwrap();
        let before = ledger.driver().calls.len();
        ledger.driver_mut().failing.insert(before + failing);
        while ledger.register(chunk(0)).is_err() {
            assert!(!ledger.driver().wrapped.contains(&chunk(0)), "refused, and still wrapped");
        }
        let submission = loop {
            if let Ok(submission) = ledger.submit() {
                break submission;
            }
            assert_eq!(ledger.stats().submissions, 0);
        };
        assert!(ledger.driver().readable(chunk(0)) && ledger.driver().readable(chunk(9)));
        ledger.complete(submission).unwrap();
        while ledger.unregister(chunk(0)).is_err() {
            assert!(ledger.driver().wrapped.contains(&chunk(0)), "it may not be freed yet");
        }
        assert!(ledger.difference(&[chunk(9)]).is_empty());
        assert_eq!(ledger.driver().members(), BTreeSet::from([chunk(9)]));
    }
}

#[test]
fn a_removal_that_could_not_be_committed_is_not_read_and_ends_with_the_next_commit() {
    let mut ledger = ledger();
    ledger.register(chunk(0)).unwrap();
    ledger.register(chunk(1)).unwrap();
    let submission = ledger.submit().unwrap();
    ledger.complete(submission).unwrap();
    let commit = ledger.driver().calls.len() + 1;
    ledger.driver_mut().failing.insert(commit);
    assert!(matches!(ledger.unregister(chunk(0)), Err(ResidencyError::Driver(_))));
    assert_eq!(ledger.find(chunk(0)), None);
    let submission = ledger.submit().unwrap();
    assert!(!ledger.driver().readable(chunk(0)) && ledger.driver().readable(chunk(1)));
    // The submission that came after does not hold it.
    ledger.unregister(chunk(0)).unwrap();
    ledger.complete(submission).unwrap();
    assert!(ledger.difference(&[chunk(1)]).is_empty());
}

#[test]
fn a_refused_removal_is_taken_back_whether_a_commit_came_between_or_not() {
    for between in [false, true] {
        let mut ledger = ledger();
        (0..2).for_each(|n| ledger.register(chunk(n)).unwrap());
        let run = |ledger: &mut Ledger<Fake>| {
            let submission = ledger.submit().unwrap();
            let readable = ledger.driver().readable(chunk(0));
            ledger.complete(submission).unwrap();
            readable
        };
        assert!(run(&mut ledger));
        let commit = ledger.driver().calls.len() + 1;
        ledger.driver_mut().failing.insert(commit);
        ledger.unregister(chunk(0)).unwrap_err();
        assert!(!between || !run(&mut ledger));
        // Taking it back can be refused as well.
        ledger.driver_mut().fail_next();
        ledger.register(chunk(0)).unwrap_err();
        ledger.register(chunk(0)).unwrap();
        assert_eq!(ledger.find(chunk(0)), Some(chunk(0)));
        assert!(run(&mut ledger), "{between}");
        assert!(ledger.difference(&[chunk(0), chunk(1)]).is_empty());
        // And then it leaves as any other.
        ledger.unregister(chunk(0)).unwrap();
        assert!(ledger.difference(&[chunk(1)]).is_empty() && !ledger.driver().wrapped.contains(&chunk(0)));
        assert_eq!(ledger.stats().bytes, chunk(1).len as u64);
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Register(usize),
    Unregister(usize),
    Submit,
    Complete(usize),
    GiveUp(u64),
    KeepAlive,
    FailNext,
    Capture(bool),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0usize..12).prop_map(Op::Register),
        3 => (0usize..12).prop_map(Op::Unregister),
        3 => Just(Op::Submit),
        3 => (0usize..4).prop_map(Op::Complete),
        1 => (0u64..500).prop_map(Op::GiveUp),
        1 => Just(Op::KeepAlive),
        2 => Just(Op::FailNext),
        1 => any::<bool>().prop_map(Op::Capture),
    ]
}

proptest! {
    /// Random interleavings of loaders, submissions, evictions of chunks and refusals against plain sets: what
    /// is live, what is going, what was submitted when.
    #[test]
    fn the_ledger_mirrors_a_plain_reference(ops in prop::collection::vec(op(), 1..120), walk in any::<bool>()) {
        let mode = if walk { Mode::Walk } else { Mode::Set };
        let mut ledger = Ledger::new(Fake::new(), mode);
        let mut live: BTreeSet<Span> = BTreeSet::new();
        let mut going: BTreeSet<Span> = BTreeSet::new();
        let mut in_flight: Vec<(Submission, BTreeSet<Span>)> = Vec::new();
        for op in ops {
            match op {
                Op::Register(n) => {
                    if ledger.register(chunk(n)).is_ok() {
                        going.remove(&chunk(n));
                        live.insert(chunk(n));
                    }
                }
                Op::Unregister(n) => {
                    let span = chunk(n);
                    let read = in_flight.iter().any(|(_, reads)| reads.contains(&span));
                    match ledger.unregister(span) {
                        Ok(()) => {
                            prop_assert!(!read, "removed under a submission");
                            prop_assert!(live.remove(&span) || going.remove(&span));
                            prop_assert!(!ledger.driver().wrapped.contains(&span));
                        }
                        Err(ResidencyError::Unknown(_)) => prop_assert!(!live.contains(&span) && !going.contains(&span)),
                        Err(ResidencyError::InFlight { .. }) => prop_assert!(!in_flight.is_empty()),
                        Err(_) => {
                            prop_assert!(ledger.driver().wrapped.contains(&span));
                            if ledger.find(span).is_none() && live.remove(&span) {
                                going.insert(span);
                            }
                        }
                    }
                }
                Op::Submit => {
                    if let Ok(submission) = ledger.submit() {
                        for span in &live {
                            prop_assert!(ledger.driver().readable(*span), "{span} is not resident");
                        }
                        in_flight.push((submission, live.clone()));
                    }
                }
                Op::Complete(n) if n < in_flight.len() => {
                    let (submission, _) = in_flight.remove(n);
                    prop_assert!(ledger.complete(submission).is_ok());
                }
                Op::Complete(_) => {}
                Op::GiveUp(mib) => drop(ledger.give_up(mib << 20)),
                Op::KeepAlive => drop(ledger.keep_alive(Duration::from_millis(1), Duration::from_secs(1))),
                Op::FailNext => ledger.driver_mut().fail_next(),
                Op::Capture(running) => ledger.set_capture(running),
            }
            // What submissions in flight read stays wrapped, whatever happens.
            for (_, reads) in &in_flight {
                prop_assert!(reads.is_subset(&ledger.driver().wrapped));
            }
            let known: Vec<Span> = live.union(&going).copied().collect();
            prop_assert!(ledger.difference(&known).is_empty());
            prop_assert_eq!(known.into_iter().collect::<BTreeSet<_>>(), ledger.driver().wrapped.clone());
        }
    }
}
