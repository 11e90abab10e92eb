//! Keeping sets alive: what is done when, by a virtual clock, and that the thread does it.

use std::thread;
use std::time::Instant;

use super::*;
use crate::residency::keeper::Keeper;
use crate::residency::shared::Next;
use crate::sim::{Profile, SimDriver};

const CADENCE: Duration = Duration::from_millis(400);
const IDLE: Duration = Duration::from_secs(180);
const SECOND: Duration = Duration::from_secs(1);

fn times() -> KeepAliveTimes {
    KeepAliveTimes { cadence: CADENCE, idle: IDLE }
}

fn sim() -> Ledger<SimDriver> {
    let mut ledger = Ledger::new(SimDriver::new(Profile::m5max()), Mode::Set);
    ledger.register(chunk(0)).unwrap();
    ledger
}

/// A submission and what it stalled.
fn work(ledger: &mut Ledger<SimDriver>) -> Duration {
    let before = ledger.driver().times().stall;
    let submission = ledger.submit().unwrap();
    ledger.driver_mut().begin_submission();
    ledger.complete(submission).unwrap();
    ledger.driver().times().stall - before
}

#[test]
fn a_first_submission_after_a_pause_stalls_unless_a_keeper_looked_after_the_sets() {
    let mut ledger = sim();
    let usual = work(&mut ledger);
    ledger.driver_mut().pass(20 * SECOND);
    assert!(work(&mut ledger) > usual, "the system lets go of idle sets");

    let mut ledger = sim();
    let mut keeper = Keeper::new(times());
    assert_eq!(keeper.look(&mut ledger, SECOND), Next::Submission, "nothing was submitted yet");
    let usual = work(&mut ledger);
    let mut now = 2 * SECOND;
    while now < 22 * SECOND {
        // It tells the device's clock that time passes.
        assert_eq!(keeper.look(&mut ledger, now), Next::After(CADENCE));
        now += CADENCE;
    }
    assert_eq!(work(&mut ledger), usual);
    assert_eq!(ledger.stats().kept_alive, 49, "20 s at 0.4 s, the first look apart");
}

#[test]
fn a_request_that_comes_too_late_wires_anew() {
    let clock = |cadence: Duration| {
        let mut ledger = sim();
        work(&mut ledger);
        ledger.driver_mut().pass(cadence);
        let before = ledger.driver().now();
        assert!(ledger.keep_alive(cadence, IDLE).unwrap());
        ledger.driver().now() - before
    };
    assert_eq!(clock(SECOND / 2), Duration::ZERO);
    assert!(clock(2 * SECOND) > Duration::ZERO);
}

#[test]
fn it_goes_to_sleep_after_a_long_pause_and_wakes_with_work() {
    let mut ledger = sim();
    let mut keeper = Keeper::new(times());
    work(&mut ledger);
    let mut now = SECOND;
    let mut looks = 0;
    while keeper.look(&mut ledger, now) != Next::Submission {
        now += CADENCE;
        looks += 1;
    }
    assert_eq!(looks, 450, "180 s at 0.4 s");
    let kept = ledger.stats().kept_alive;
    assert_eq!(keeper.look(&mut ledger, now + 100 * SECOND), Next::Submission);
    assert_eq!(ledger.stats().kept_alive, kept);
    work(&mut ledger);
    assert_eq!(keeper.look(&mut ledger, now + 200 * SECOND), Next::After(CADENCE));
    assert_eq!(keeper.look(&mut ledger, now + 201 * SECOND), Next::After(CADENCE));
    assert_eq!(ledger.stats().kept_alive, kept + 1);
}

#[test]
fn a_driver_that_refuses_is_asked_again_after_the_next_submission_only() {
    let mut ledger = ledger();
    let mut keeper = Keeper::new(times());
    ledger.register(chunk(0)).unwrap();
    let submission = ledger.submit().unwrap();
    ledger.complete(submission).unwrap();
    assert_eq!(keeper.look(&mut ledger, SECOND), Next::After(CADENCE));
    ledger.driver_mut().clock += SECOND;
    ledger.driver_mut().fail_next();
    assert_eq!(keeper.look(&mut ledger, 2 * SECOND), Next::Submission);
    assert_eq!((ledger.stats().kept_alive, ledger.stats().keep_alive_refused), (0, 1));
    assert_eq!(ledger.driver().count("request"), 1);
}

/// Waits until something is so, for a minute at most.
fn until(what: &str, so: impl Fn() -> bool) {
    let began = Instant::now();
    while !so() {
        assert!(began.elapsed() < 60 * SECOND, "never: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn its_thread_keeps_sleeps_wakes_and_ends() {
    let residency = Arc::new(Residency::new(sim()));
    let times = KeepAliveTimes { cadence: Duration::from_millis(5), idle: Duration::from_millis(200) };
    let keeper = KeepAlive::start(&residency, times).unwrap();
    let kept = || residency.stats().kept_alive;
    let submit = || {
        let submission = residency.submit().unwrap();
        residency.complete(submission).unwrap();
    };
    until("it sleeps before anything was submitted", || residency.keeper_sleeps());
    assert_eq!(kept(), 0);
    submit();
    until("it keeps", || kept() > 2);
    until("it sleeps", || residency.keeper_sleeps());
    let before = kept();
    thread::sleep(Duration::from_millis(50));
    assert_eq!(kept(), before);
    submit();
    until("it keeps again", || kept() > before);
    drop(keeper);
    assert_eq!(Arc::strong_count(&residency), 1, "the thread has ended");
}

#[test]
fn it_ends_at_once_whatever_it_waits_for() {
    let longest = KeepAliveTimes { cadence: Duration::from_millis(500), idle: 1000 * SECOND };
    for submitted in [false, true] {
        let residency = Arc::new(Residency::new(sim()));
        if submitted {
            let submission = residency.submit().unwrap();
            residency.complete(submission).unwrap();
        }
        for _ in 0..50 {
            drop(KeepAlive::start(&residency, longest).unwrap());
        }
        assert_eq!(Arc::strong_count(&residency), 1);
    }
}

#[test]
fn a_cadence_that_no_system_needs_is_refused() {
    let residency = Arc::new(Residency::new(sim()));
    for (cadence, fits) in [(4, false), (5, true), (500, true), (501, false)] {
        let times = KeepAliveTimes { cadence: Duration::from_millis(cadence), idle: IDLE };
        assert_eq!(KeepAlive::start(&residency, times).is_ok(), fits, "{cadence} ms");
    }
    assert!(KeepAlive::start(&residency, KeepAliveTimes::default()).is_ok());
}
