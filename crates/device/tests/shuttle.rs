//! A ledger that loaders, a submitting thread and one that removes memory share, under many interleavings.
//!
//! Runs under `RUSTFLAGS="--cfg shuttle"` alone; see `crates/store/tests/shuttle.rs`. The simulated device refuses
//! every touch of memory that is not resident, and a removal under a submission would be one.
#![cfg(shuttle)]

use std::sync::Arc;
use std::time::Duration;

use metaltail_device::residency::{Ledger, Mode, Residency, ResidencyDriver, Span};
use metaltail_device::sim::{Profile, SimDriver};
use shuttle::thread;

fn chunk(n: usize) -> Span {
    Span { base: (n + 1) << 30, len: 1 << 20 }
}

/// Tries `body` in as many orders as METALTAIL_SHUTTLE_ORDERS says.
fn check(body: impl Fn() + Copy + Send + Sync + 'static) {
    let orders = std::env::var("METALTAIL_SHUTTLE_ORDERS").ok().and_then(|text| text.parse().ok());
    let orders = orders.unwrap_or(300);
    shuttle::check_random(body, orders);
    shuttle::check_pct(body, orders, 3);
}

fn shared(mode: Mode) -> Arc<Residency<SimDriver>> {
    Arc::new(Residency::new(Ledger::new(SimDriver::new(Profile::m5max()), mode)))
}

/// Submits and touches memory at once, as an encoder does, and completes later.
fn work(residency: &Residency<SimDriver>, spans: &[Span]) {
    let submission = {
        let mut ledger = residency.ledger();
        let submission = ledger.submit().unwrap();
        ledger.driver_mut().begin_submission();
        ledger.driver_mut().dispatch(spans, &[], &[]).unwrap();
        submission
    };
    thread::yield_now();
    residency.complete(submission).unwrap();
}

fn add_remove_and_read(mode: Mode) {
    let residency = shared(mode);
    residency.register(chunk(0)).unwrap();
    residency.register(chunk(1)).unwrap();
    let loader = thread::spawn({
        let residency = Arc::clone(&residency);
        move || {
            residency.register(chunk(2)).unwrap();
            work(&residency, &[chunk(0), chunk(2)]);
        }
    });
    let remover = thread::spawn({
        let residency = Arc::clone(&residency);
        move || residency.unregister(chunk(1)).unwrap()
    });
    work(&residency, &[chunk(0)]);
    loader.join().unwrap();
    remover.join().unwrap();
    let ledger = residency.ledger();
    assert!(ledger.difference(&[chunk(0), chunk(2)]).is_empty());
    assert!(ledger.driver().now() > Duration::ZERO);
}

#[test]
fn memory_is_added_removed_and_read_by_several_threads() {
    check(|| add_remove_and_read(Mode::Set));
}

#[test]
fn the_same_while_everything_is_declared_with_each_submission() {
    check(|| add_remove_and_read(Mode::Walk));
}

/// A removal that begins under a submission ends after it: the device may read the memory until then.
#[test]
fn what_a_submission_reads_is_there_until_it_ends() {
    check(|| {
        let residency = shared(Mode::Set);
        residency.register(chunk(0)).unwrap();
        let submission = residency.submit().unwrap();
        let remover = thread::spawn({
            let residency = Arc::clone(&residency);
            move || residency.unregister(chunk(0)).unwrap()
        });
        let touch = || residency.ledger().driver_mut().dispatch(&[chunk(0)], &[], &[]).unwrap();
        touch();
        thread::yield_now();
        touch();
        residency.complete(submission).unwrap();
        remover.join().unwrap();
        assert_eq!(residency.stats().allocations, 0);
    });
}
