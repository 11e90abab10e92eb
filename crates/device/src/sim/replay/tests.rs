//! The replay: that it counts what it charges, and that the published rows come out of it.

use std::time::Duration;

use super::*;
use crate::sim::fit::{self, Case};
use crate::sim::{Workload, rows};

/// Everything small, so that every submission can be made.
fn small() -> Profile {
    let profile = Profile::m5max();
    let workload = Workload { layers: 5, experts: 32, top_k: 4, tokens: 40, ..profile.workload.clone() };
    // The walks of some runs are over the share, and those of others are not.
    Profile { workload, working_set: 4_000_000_000, allocation: 4_000_000_000, ..profile }
}

fn runs() -> Vec<Run> {
    let walk = |run: Run| Run { mode: Mode::Walk, ..run };
    let slabs = |run: Run| Run { slabs: SlabAllocation::PerExpert, ..run };
    let growth = Some(Growth { after: 20, slots: 20 });
    let pauses = |keep_alive| Pauses { every: 9, length: Duration::from_secs(3), keep_alive };
    vec![
        Run::new(1),
        slabs(Run::new(12)),
        walk(Run::new(30)),
        walk(slabs(Run::new(30))),
        slabs(Run { growth, pinned: 13, ..Run::new(6) }),
        walk(slabs(Run { growth, ..Run::new(6) })),
        slabs(Run { frees: true, sets: Some(2), ..Run::new(8) }),
        Run { pauses: Some(pauses(None)), ..Run::new(16) },
        Run { pauses: Some(pauses(Some(Duration::from_millis(400)))), ..Run::new(16) },
        Run { pressure: Some(Pressure { every: 7, bytes: 1 << 28 }), ..Run::new(24) },
    ]
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-4 * a.abs().max(b.abs()) + 1e-6
}

fn same(a: &DeviceSeconds, b: &DeviceSeconds) -> bool {
    close(a.kernel, b.kernel)
        && close(a.stall, b.stall)
        && close(a.coupled, b.coupled)
        && close(a.register, b.register)
        && close(a.flush + a.unregister, b.flush + b.unregister)
}

#[test]
fn one_submission_that_counts_for_all_is_as_good_as_all() {
    for run in runs() {
        let every = replay(&small(), &run, Detail::Every).unwrap();
        let changes = replay(&small(), &run, Detail::Changes).unwrap();
        assert_eq!(every.quantities, changes.quantities, "{run:?}");
        assert_eq!((every.allocations, every.sets), (changes.allocations, changes.sets));
        assert!(same(&every.device, &changes.device), "{:?} {:?}", every.device, changes.device);
        assert_eq!(every.quantities.submissions, 200);
    }
}

#[test]
fn prices_of_counts_are_what_the_device_charges() {
    let profile = Profile::m5max();
    let mut rewired = 0;
    for row in rows::published() {
        let Some(run) = row.run(&profile) else { continue };
        let replayed = replay(&profile, &run, Detail::Changes).unwrap();
        let priced = replayed.quantities.price(&profile);
        assert!(same(&replayed.device, &priced), "{}: {:?} {priced:?}", row.name(), replayed.device);
        rewired += u64::from(priced.coupled > 0.0);
    }
    // The collapsed rows, and those that grow while walked.
    assert_eq!(rewired, 4);
}

#[test]
fn what_fills_grows_and_is_freed_is_registered_and_removed() {
    let profile = small();
    let all = runs();
    let of = |n: usize| replay(&profile, &all[n], Detail::Changes).unwrap();
    assert_eq!((of(0).quantities.registered, of(0).allocations), (1, 1));
    assert_eq!((of(1).quantities.registered, of(1).allocations), (60, 60));
    // 30 slots in 5 layers; a chunk is a sixteenth of them, 9 whole ones.
    assert_eq!(of(2).allocations, 17);
    assert_eq!(of(3).allocations, 150);
    // Pins are there before. Six slots a layer, then twenty anew.
    let grown = of(4);
    assert_eq!((grown.quantities.registered, grown.allocations), (130, 113));
    assert!(grown.device.unregister > 0.0);
    // A layer's removals make the next submission wire everything.
    let walked = of(5);
    assert!(walked.quantities.rewired > 5 * 30 * 19_000_000 && walked.device.coupled > 0.0);
    let freed = of(6);
    assert!(freed.quantities.registered > 200 && freed.device.unregister > freed.device.flush);
    assert_eq!((freed.allocations, freed.sets), (40, 2));
}

#[test]
fn idle_sets_cost_what_wiring_them_costs_unless_they_are_kept() {
    let profile = small();
    let all = runs();
    let stall = |n: usize| replay(&profile, &all[n], Detail::Changes).unwrap().device.stall;
    let bytes = 10.0 * 8.0 * 19_005_440.0;
    // Four pauses; the cache is full before the first.
    let wanted = 4.0 * bytes * profile.rewire;
    assert!((stall(7) - stall(8) - wanted).abs() < 1e-4, "{} {} {wanted}", stall(7), stall(8));
}

/// A token may take longer than the system waits before it lets go of idle sets: its layers do not.
#[test]
fn sets_are_not_idle_while_a_slow_machine_decodes() {
    let mut profile = small();
    profile.streaming.host = 4.0 * profile.unwire_after;
    let slow = replay(&profile, &Run::new(16), Detail::Every).unwrap();
    let quick = replay(&small(), &Run::new(16), Detail::Every).unwrap();
    assert_eq!(slow.device.stall, quick.device.stall);
}

#[test]
fn more_than_the_device_takes_is_refused() {
    let refused = replay(&small(), &Run::new(64), Detail::Changes).unwrap_err();
    assert!(matches!(refused, ResidencyError::OverWorkingSet { .. }), "{refused}");
}

fn all() -> (Profile, Vec<Case>) {
    let profile = Profile::m5max();
    let cases = fit::cases(&profile, &rows::published()).unwrap();
    (profile, cases)
}

#[test]
fn every_published_speed_is_predicted_within_15_percent() {
    let (profile, cases) = all();
    assert_eq!(cases.len(), 25);
    assert!(fit::parameters().count() < cases.len());
    for case in &cases {
        let ratio = case.outcome(&profile).tokens_per_second / case.row.tokens_per_second.unwrap();
        assert!((ratio - 1.0).abs() <= 0.15, "{} {}: {ratio}", case.row.name(), case.row.declared_words());
    }
}

#[test]
fn every_published_difference_above_5_percent_has_its_sign() {
    let (profile, cases) = all();
    let comparisons = fit::comparisons(&profile, &cases);
    assert_eq!(comparisons.len(), 36);
    for comparison in &comparisons {
        let name = |n: usize| format!("{} {}", cases[n].row.name(), cases[n].row.declared_words());
        let (slower, faster) = (name(comparison.less), name(comparison.more));
        assert!(comparison.holds(), "{slower} and {faster}: {comparison:?}");
    }
}

/// The finding itself, from figures and not from names.
#[test]
fn walking_collapses_where_declaring_once_does_not() {
    let (profile, cases) = all();
    let speed = |n: usize| cases[n].outcome(&profile).tokens_per_second;
    let stall = |n: usize| cases[n].outcome(&profile).stall;
    // Machine A: caps of 1, 16 and 64, each per submit and once.
    assert!(speed(4) < 0.5 * speed(0) && stall(4) > 5.0 * stall(2));
    let once = [speed(1), speed(3), speed(5)];
    let most = once.iter().copied().fold(0.0, f64::max);
    let least = once.iter().copied().fold(f64::MAX, f64::min);
    assert!(most / least < 1.08, "{once:?}");
    assert!((stall(1) - stall(5)).abs() < 0.01);
}

#[test]
fn the_profile_in_the_tree_is_the_fit_to_the_rows_in_the_tree() {
    let (profile, cases) = all();
    let again = fit::fit(&profile, &rows::published()).unwrap();
    assert_eq!(again.source, profile.source);
    for case in &cases {
        let (a, b) = (case.outcome(&again), case.outcome(&profile));
        let ratio = a.tokens_per_second / b.tokens_per_second;
        assert!((ratio - 1.0).abs() < 2e-3, "{}: {ratio}", case.row.name());
    }
}

#[test]
fn a_profile_that_contradicts_the_rows_is_found_out() {
    type Change = fn(&mut Profile);
    let wrong: [(&str, Change); 4] = [
        // A driver that takes its time for each declaration: then sets make more of a difference than they did.
        ("declare", |p| p.declare *= 10.0),
        ("drive_rate", |p| p.streaming.drive_rate *= 0.7),
        ("commit", |p| p.commit *= 30.0),
        ("register", |p| p.register *= 100.0),
    ];
    for (name, change) in wrong {
        let (mut profile, cases) = all();
        change(&mut profile);
        let off = |case: &Case| {
            (case.outcome(&profile).tokens_per_second / case.row.tokens_per_second.unwrap() - 1.0).abs()
        };
        let order = fit::comparisons(&profile, &cases).iter().all(|comparison| comparison.holds());
        assert!(!order || cases.iter().any(|case| off(case) > 0.15), "{name}");
    }
}

#[test]
fn what_is_left_out_is_predicted_alike_wherever_the_search_begins() {
    let (profile, cases) = all();
    let (near, far) = (fit::without_each(&profile, &cases), fit::without_each_from_scratch(&profile, &cases));
    for ((case, near), far) in cases.iter().zip(near).zip(far) {
        assert!((near / far - 1.0).abs() < 0.01, "{}: {near} and {far}", case.row.name());
    }
}
