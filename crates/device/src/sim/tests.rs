//! What the simulated device refuses, and what it charges.

use std::time::Duration;

use super::*;
use crate::residency::{Ledger, Mode, ResidencyDriver, Span};

const MIB: usize = 1 << 20;

fn chunk(n: usize) -> Span {
    Span { base: (n + 1) << 30, len: 64 * MIB }
}

/// A piece of a chunk, as an expert's matrix would be.
fn part(n: usize) -> Span {
    Span { base: chunk(n).base + 5 * MIB, len: MIB }
}

fn ledger(mode: Mode, chunks: usize) -> Ledger<SimDriver> {
    let mut ledger = Ledger::new(SimDriver::new(Profile::m5max()), mode);
    (0..chunks).for_each(|n| ledger.register(chunk(n)).unwrap());
    ledger
}

fn run(ledger: &mut Ledger<SimDriver>, n: usize) -> Result<(), String> {
    let submission = ledger.submit().unwrap();
    let device = ledger.driver_mut();
    device.begin_submission();
    let ran = device.dispatch(&[part(n)], &[], &[]).map_err(|error| error.to_string());
    ledger.complete(submission).unwrap();
    ran
}

#[test]
fn memory_that_is_not_resident_or_was_freed_must_not_be_touched() {
    for mode in [Mode::Set, Mode::Walk] {
        let mut ledger = ledger(mode, 2);
        run(&mut ledger, 1).unwrap();
        let unknown = run(&mut ledger, 7).unwrap_err();
        assert!(unknown.contains("not known"), "{unknown}");
        ledger.unregister(chunk(1)).unwrap();
        let freed = run(&mut ledger, 1).unwrap_err();
        assert!(freed.contains("freed"), "{freed}");
    }
    // What was declared but not committed, or not declared for this submission, is not resident.
    let mut device = SimDriver::new(Profile::m5max());
    device.wrap(chunk(0)).unwrap();
    let set = device.create_set().unwrap();
    device.add(set, chunk(0)).unwrap();
    let refused = device.dispatch(&[part(0)], &[], &[]).unwrap_err().to_string();
    assert!(refused.contains("not resident"), "{refused}");
    device.commit(set).unwrap();
    device.dispatch(&[part(0)], &[], &[]).unwrap();
    // A removal counts from its commit on.
    device.remove(set, chunk(0)).unwrap();
    device.dispatch(&[part(0)], &[], &[]).unwrap();
    device.commit(set).unwrap();
    assert!(device.dispatch(&[part(0)], &[], &[]).is_err());
}

#[test]
fn a_slot_that_is_being_overwritten_must_not_be_read() {
    let mut ledger = ledger(Mode::Set, 1);
    ledger.driver_mut().begin_write(part(0));
    let raced = run(&mut ledger, 0).unwrap_err();
    assert!(raced.contains("being overwritten"), "{raced}");
    ledger.driver_mut().end_write(part(0));
    run(&mut ledger, 0).unwrap();
}

#[test]
fn what_a_kernel_wrote_is_read_after_a_barrier() {
    let mut ledger = ledger(Mode::Set, 1);
    ledger.submit().unwrap();
    let device = ledger.driver_mut();
    let inner = Span { base: 1 << 62, len: 4096 };
    device.begin_submission();
    device.dispatch(&[part(0)], &[], &[inner]).unwrap();
    let missing = device.dispatch(&[part(0)], &[inner], &[]).unwrap_err().to_string();
    assert!(missing.contains("without a barrier"), "{missing}");
    device.barrier();
    device.dispatch(&[part(0)], &[inner], &[]).unwrap();
}

#[test]
fn a_queue_takes_so_many_sets_and_no_more() {
    let mut device = SimDriver::new(Profile::m5max());
    assert!((0..32).all(|n| device.create_set().unwrap().0 == n));
    assert!(device.create_set().unwrap_err().to_string().contains("32 sets"));
}

#[test]
fn declared_once_a_submission_costs_the_same_whatever_is_cached_and_walking_does_not() {
    let cost = |mode, chunks| {
        let mut ledger = ledger(mode, chunks);
        run(&mut ledger, 0).unwrap();
        let before = ledger.driver().times().stall;
        (0..100).for_each(|_| run(&mut ledger, 0).unwrap());
        ledger.driver().times().stall - before
    };
    assert_eq!(cost(Mode::Set, 1), cost(Mode::Set, 200));
    assert!(cost(Mode::Walk, 200) > cost(Mode::Walk, 1) + Duration::from_millis(3));
}

#[test]
fn walking_more_than_the_share_wires_memory_anew() {
    let profile = Profile { working_set: 100 * 64 * MIB as u64, rewire_share: 0.5, ..Profile::m5max() };
    let rewired = |chunks: usize| {
        let mut ledger = Ledger::new(SimDriver::new(profile.clone()), Mode::Walk);
        (0..chunks).for_each(|n| ledger.register(chunk(n)).unwrap());
        run(&mut ledger, 0).unwrap();
        ledger.driver().times()
    };
    assert_eq!(rewired(50).rewire, Duration::ZERO);
    let above = rewired(80);
    assert!(above.rewire > Duration::ZERO && above.coupled > above.rewire && above.stall > above.rewire);
}

#[test]
fn a_removal_makes_the_next_walk_wire_everything_and_only_that_one() {
    let mut walking = ledger(Mode::Walk, 4);
    let mut rewired = |removed: Option<usize>| {
        if let Some(n) = removed {
            walking.unregister(chunk(n)).unwrap();
        }
        let before = walking.driver().times().rewire;
        run(&mut walking, 0).unwrap();
        walking.driver().times().rewire - before
    };
    assert_eq!(rewired(None), Duration::ZERO);
    let all = Profile::m5max().rewire * (3 * 64 * MIB) as f64;
    assert!((rewired(Some(2)).as_secs_f64() - all).abs() < 1e-8);
    assert_eq!(rewired(None), Duration::ZERO);
    // Nothing of the kind where memory is in sets.
    let mut sets = ledger(Mode::Set, 4);
    run(&mut sets, 0).unwrap();
    sets.unregister(chunk(2)).unwrap();
    run(&mut sets, 0).unwrap();
    assert_eq!(sets.driver().times().rewire, Duration::ZERO);
}

#[test]
fn an_idle_set_is_wired_anew_unless_it_was_kept_alive() {
    let after_a_pause = |keep: bool| {
        let mut ledger = ledger(Mode::Set, 1);
        run(&mut ledger, 0).unwrap();
        for _ in 0..10 {
            ledger.driver_mut().pass(Duration::from_millis(500));
            if keep {
                assert!(ledger.keep_alive(Duration::from_millis(400), Duration::from_secs(180)).unwrap());
            }
        }
        run(&mut ledger, 0).unwrap();
        ledger.driver().times().rewire
    };
    assert_eq!(after_a_pause(true), Duration::ZERO);
    assert!(after_a_pause(false) > Duration::ZERO);
}

#[test]
fn kernels_take_the_time_of_their_bytes() {
    let mut ledger = ledger(Mode::Set, 1);
    run(&mut ledger, 0).unwrap();
    let wanted = MIB as f64 / Profile::m5max().kernel_rate;
    let kernel = ledger.driver().times().kernel.as_secs_f64();
    assert!((kernel - wanted).abs() < 1e-8, "{kernel} for {wanted}");
}
