//! A queue over a device of the imagination, whose command buffers end when a test says so.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use metaltail_device::residency::{Ledger, Mode};

use super::*;
use crate::double::{Driver, Encoder, Gpu, PAGE, span};
use crate::error::{COMMAND_BUFFER_DOMAIN, Failure, FailureKind};
use crate::health::Uses;
use crate::in_flight::State;

fn queue() -> (Arc<Gpu>, Queue<Gpu>) {
    let gpu = Arc::<Gpu>::default();
    let residency = Residency::new(Ledger::new(Driver::default(), Mode::Set)).with_patience(Duration::ZERO);
    residency.register(span(1)).unwrap();
    residency.register(span(2)).unwrap();
    (Arc::clone(&gpu), Queue::new(gpu, Arc::new(residency)).with_patience(Duration::from_millis(2)))
}

/// Whether the ledger takes memory to be read by a submission.
fn in_flight(queue: &Queue<Gpu>) -> bool {
    let removed = queue.residency.ledger().unregister(span(1));
    match removed {
        Err(ResidencyError::InFlight { .. }) => true,
        Ok(()) => {
            queue.residency.register(span(1)).unwrap();
            false
        }
        other => panic!("{other:?}"),
    }
}

fn one(encoder: &mut Encoder) -> Result<(), MetalError> {
    encoder.dispatches += 1;
    Ok(())
}

#[test]
fn a_submission_that_ends_well_gives_its_times_and_frees_memory() {
    let (gpu, queue) = queue();
    let mut submitted = queue.submit(one).unwrap();
    assert!(in_flight(&queue) && !submitted.has_ended());
    gpu.end_last(State::Completed, 0);
    assert!(submitted.has_ended() && in_flight(&queue), "ended, and nobody has asked");
    let times = queue.finish(&mut submitted).unwrap();
    assert_eq!((times.gpu, times.schedule), (Duration::from_millis(250), Duration::from_millis(125)));
    assert_eq!(times.encode, Duration::from_millis(3));
    assert!(!in_flight(&queue));
    assert_eq!(queue.finish(&mut submitted), Ok(SubmissionTimes::default()), "a second time takes none");
    assert_eq!((queue.figures().submissions, queue.figures().dispatches), (1, 1));
}

#[test]
fn what_takes_too_long_is_said_keeps_its_memory_and_is_waited_for_again() {
    let (gpu, queue) = queue();
    let mut submitted = queue.submit(one).unwrap();
    let slow = queue.finish(&mut submitted).unwrap_err();
    assert!(matches!(slow, MetalError::TimedOut { state: "scheduled or running", .. }), "{slow}");
    assert!(in_flight(&queue));
    gpu.end_last(State::Completed, 0);
    queue.finish(&mut submitted).unwrap();
    assert!(!in_flight(&queue));
    assert_eq!(queue.figures().submissions, 1);
}

#[test]
fn a_failure_is_an_error_frees_memory_and_leaves_the_device_usable() {
    let (gpu, queue) = queue();
    let mut submitted = queue.submit(one).unwrap();
    gpu.end_last(State::Failed, 8);
    match queue.finish(&mut submitted) {
        Err(MetalError::Failed(failure)) => assert_eq!(failure.kind, FailureKind::OutOfMemory),
        other => panic!("{other:?}"),
    }
    assert!(!in_flight(&queue));
    assert_eq!(queue.figures().submissions, 0, "nothing was computed");
    let mut next = queue.submit(one).unwrap();
    gpu.end_last(State::Completed, 0);
    queue.finish(&mut next).unwrap();
}

#[test]
fn a_lost_device_takes_nothing_more_and_says_why() {
    let (gpu, queue) = queue();
    let mut submitted = queue.submit(one).unwrap();
    gpu.end_last(State::Failed, 11);
    assert!(matches!(queue.finish(&mut submitted), Err(MetalError::Failed(_))));
    let lost = queue.submit(|_| panic!("nothing is encoded for a lost device")).unwrap_err();
    assert!(matches!(lost, MetalError::Lost(ref failure) if failure.code == 11), "{lost}");
    assert!(!in_flight(&queue));
}

#[test]
fn a_device_that_is_lost_while_encoding_is_handed_nothing() {
    let (gpu, queue) = queue();
    let lost = queue.submit(|encoder| {
        gpu.health.note(&Failure::new(COMMAND_BUFFER_DOMAIN.into(), 4, "revoked".into()));
        one(encoder)
    });
    assert!(matches!(lost, Err(MetalError::Lost(_))));
    assert!(gpu.commands.lock().unwrap().is_empty(), "something was handed over");
    assert!(!in_flight(&queue));
}

#[test]
fn what_cannot_be_begun_or_encoded_is_forgotten_by_the_ledger() {
    let (gpu, queue) = queue();
    let no_kernel = || MetalError::NoKernel { kernel: "k".into() };
    assert_eq!(queue.submit(|_| Err(no_kernel())).unwrap_err(), no_kernel());
    assert!(!in_flight(&queue));
    gpu.full.store(true, Ordering::Relaxed);
    assert!(matches!(queue.submit(one), Err(MetalError::NotMade { .. })));
    assert!(!in_flight(&queue));
}

#[test]
fn dropping_a_submission_waits_for_its_end_and_learns_of_a_loss() {
    let (gpu, queue) = queue();
    let submitted = queue.submit(one).unwrap();
    let (ender, began) = (Arc::clone(&gpu), Instant::now());
    let pause = Duration::from_millis(20);
    let ending = thread::spawn(move || {
        thread::sleep(pause);
        ender.end_last(State::Failed, 4);
    });
    drop(submitted);
    assert!(began.elapsed() >= pause);
    ending.join().unwrap();
    assert!(!in_flight(&queue));
    assert!(matches!(queue.submit(one), Err(MetalError::Lost(_))));
}

#[test]
fn a_buffer_stays_in_use_until_the_end_was_noticed() {
    let (gpu, queue) = queue();
    let uses = Uses::default();
    let mut submitted = queue
        .submit(|encoder| {
            encoder.uses.push(uses.begin());
            Ok(())
        })
        .unwrap();
    gpu.end_last(State::Completed, 0);
    assert_eq!(uses.none(), Err(MetalError::InUse));
    queue.finish(&mut submitted).unwrap();
    assert_eq!(uses.none(), Ok(()));
    // Encoded and never handed over.
    let failed = queue.submit(|encoder| {
        encoder.uses.push(uses.begin());
        Err(MetalError::NotMade { what: "sense".into() })
    });
    assert!(failed.is_err());
    assert_eq!(uses.none(), Ok(()));
}

#[test]
fn several_submissions_are_in_flight_and_end_in_any_order() {
    let (gpu, queue) = queue();
    let mut first = queue.submit(one).unwrap();
    let of_first = gpu.last();
    let mut second = queue.submit(one).unwrap();
    gpu.end_last(State::Completed, 0);
    queue.finish(&mut second).unwrap();
    assert!(in_flight(&queue), "the first one may still read");
    of_first.end(State::Completed, 0);
    queue.finish(&mut first).unwrap();
    assert!(!in_flight(&queue));
}

#[test]
fn a_capture_declares_everything_with_the_submission_and_sets_do_not() {
    let (gpu, queue) = queue();
    let declared = |queue: &Queue<Gpu>| {
        let mut seen = Vec::new();
        let mut submitted = queue
            .submit(|encoder| {
                seen = encoder.declared.clone();
                Ok(())
            })
            .unwrap();
        gpu.end_last(State::Completed, 0);
        queue.finish(&mut submitted).unwrap();
        seen
    };
    assert_eq!(declared(&queue), []);
    gpu.capturing.store(true, Ordering::Relaxed);
    assert_eq!(declared(&queue), [span(1), span(2)]);
    gpu.capturing.store(false, Ordering::Relaxed);
    assert_eq!(declared(&queue), []);
}

#[test]
fn addresses_are_those_of_declared_memory_in_the_order_asked() {
    let (_, queue) = queue();
    let part = Span { base: 2 * PAGE + 40, len: 8 };
    let gib = 1u64 << 30;
    assert_eq!(queue.addresses(&[part, span(1)]), Ok(vec![gib + 2 * 16384 + 40, gib + 16384]));
    let unknown = ResidencyError::Unknown(span(5));
    assert_eq!(queue.addresses(&[span(1), span(5)]), Err(unknown.into()));
}
