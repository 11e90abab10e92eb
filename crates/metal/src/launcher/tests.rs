//! The launcher over a device of the imagination.

use std::time::{Duration, Instant};

use metaltail_device::metal::{Launcher as _, MetalAccelerator};
use metaltail_device::residency::{Ledger, Mode, ResidencyError};
use metaltail_kernels::{Accelerator, ExpertRows, ExpertTask, ExpertWeights, Footprint, Op, Order, Rows};
use metaltail_quant::{Format, MatrixLayout, MatrixRef};

use super::*;
use crate::double::{Driver, Gpu, span};
use crate::in_flight::State;

fn launcher() -> (Arc<Gpu>, Launcher<Gpu>) {
    let gpu = Arc::<Gpu>::default();
    *gpu.ends.lock().unwrap() = Some((State::Completed, 0));
    let residency = Residency::new(Ledger::new(Driver::default(), Mode::Set)).with_patience(Duration::ZERO);
    residency.register(span(1)).unwrap();
    let queue = Queue::new(Arc::clone(&gpu), Arc::new(residency)).with_patience(Duration::from_millis(2));
    (gpu, Launcher::new(queue))
}

fn launch(kernel: &str, buffer: Buffer) -> Launch {
    let arguments =
        vec![Argument::Buffer(0, buffer, 4), Argument::Bytes(1, vec![7]), Argument::Threadgroup(0, 32)];
    Launch { kernel: kernel.into(), arguments, groups: [3, 2], threads: 64, footprint: Footprint::default() }
}

/// Whether the ledger takes declared memory to be read by a submission.
fn in_flight(launcher: &Launcher<Gpu>) -> bool {
    let removed = launcher.residency().ledger().unregister(span(1));
    match removed {
        Err(ResidencyError::InFlight { .. }) => true,
        removed => {
            removed.unwrap();
            launcher.residency().register(span(1)).unwrap();
            false
        }
    }
}

#[test]
fn launches_are_kept_and_handed_over_as_one_command_buffer() {
    let (gpu, mut launcher) = launcher();
    let buffer = launcher.allocate(40).unwrap();
    launcher.launch(launch("a", buffer), &[]).unwrap();
    launcher.barrier();
    launcher.launch(launch("b", buffer), &[]).unwrap();
    assert!(gpu.log.lock().unwrap().is_empty() && !in_flight(&launcher), "nothing is encoded before");
    launcher.submit().unwrap();
    launcher.submit().unwrap();
    assert!(in_flight(&launcher));
    launcher.launch(launch("c", buffer), &[]).unwrap();
    launcher.wait().unwrap();
    let line = |kernel| format!("{kernel} [3, 2, 1] [64, 1, 1] 0: 40 from 4 1: [7] group 0: 32");
    let wanted = [&line("a"), "barrier", &line("b"), "submit", &line("c"), "submit"];
    assert_eq!(*gpu.log.lock().unwrap(), wanted, "an empty submission is none");
    assert!(!in_flight(&launcher));
    let figures = launcher.figures().get();
    assert_eq!((figures.submissions, figures.dispatches), (2, 3));
    assert_eq!(figures.gpu, Duration::from_millis(500));
}

#[test]
fn memory_is_in_use_from_the_record_to_the_wait() {
    let (_, mut launcher) = launcher();
    let buffer = launcher.allocate(8).unwrap();
    launcher.write(buffer, 4, &[1, 2]).unwrap();
    launcher.launch(launch("a", buffer), &[]).unwrap();
    for _ in 0..2 {
        let refused = launcher.write(buffer, 0, &[9]).unwrap_err().to_string();
        assert!(refused.contains("wait first"), "{refused}");
        launcher.submit().unwrap();
    }
    launcher.free(buffer);
    assert!(launcher.launch(launch("b", buffer), &[]).is_err(), "it was released");
    launcher.wait().unwrap();
    assert!(launcher.read(buffer, 0, &mut [0]).is_err(), "freed");
    let buffer = launcher.allocate(8).unwrap();
    let mut bytes = [9; 8];
    launcher.read(buffer, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 8]);
}

#[test]
fn a_failure_is_told_once_and_the_device_goes_on() {
    let (gpu, mut launcher) = launcher();
    let buffer = launcher.allocate(8).unwrap();
    *gpu.ends.lock().unwrap() = Some((State::Failed, 8));
    launcher.launch(launch("a", buffer), &[]).unwrap();
    launcher.submit().unwrap();
    *gpu.ends.lock().unwrap() = Some((State::Completed, 0));
    launcher.launch(launch("b", buffer), &[]).unwrap();
    assert!(launcher.wait().is_err());
    launcher.wait().unwrap();
    assert!(!in_flight(&launcher) && launcher.write(buffer, 0, &[1]).is_ok());
}

#[test]
fn a_kernel_that_there_is_not_hands_over_nothing() {
    let (gpu, mut launcher) = launcher();
    let buffer = launcher.allocate(8).unwrap();
    launcher.launch(launch("a", buffer), &[]).unwrap();
    launcher.launch(launch("missing", buffer), &[]).unwrap();
    let refused = launcher.submit().unwrap_err().to_string();
    assert!(refused.contains("no kernel is called \"missing\""), "{refused}");
    assert!(gpu.commands.lock().unwrap().is_empty() && !in_flight(&launcher));
    launcher.wait().unwrap();
    launcher.write(buffer, 0, &[1]).unwrap();
}

#[test]
fn the_wait_outlasts_the_queues_patience() {
    let (gpu, mut launcher) = launcher();
    let buffer = launcher.allocate(8).unwrap();
    *gpu.ends.lock().unwrap() = None;
    launcher.launch(launch("a", buffer), &[]).unwrap();
    launcher.submit().unwrap();
    let (ender, pause, began) = (Arc::clone(&gpu), Duration::from_millis(30), Instant::now());
    let ending = std::thread::spawn(move || {
        std::thread::sleep(pause);
        ender.end_last(State::Completed, 0);
    });
    launcher.wait().unwrap();
    assert!(began.elapsed() >= pause, "it was not over");
    ending.join().unwrap();
    assert!(!in_flight(&launcher) && launcher.write(buffer, 0, &[1]).is_ok());
}

#[test]
fn a_lost_device_refuses_everything_and_leaves_memory_alone() {
    let (gpu, mut launcher) = launcher();
    let buffer = launcher.allocate(8).unwrap();
    *gpu.ends.lock().unwrap() = Some((State::Failed, 11));
    launcher.launch(launch("a", buffer), &[]).unwrap();
    assert!(launcher.wait().is_err());
    launcher.launch(launch("b", buffer), &[]).unwrap();
    let lost = launcher.wait().unwrap_err().to_string();
    assert!(lost.contains("lost"), "{lost}");
    assert!(!in_flight(&launcher) && launcher.read(buffer, 0, &mut [0]).is_ok());
}

/// The accelerator on it: weights and experts by the device's addresses, which are not the host's.
#[test]
fn matrices_are_named_by_the_devices_addresses() {
    let (gpu, launcher) = launcher();
    let mut accelerator = MetalAccelerator::new(launcher);
    let layout = MatrixLayout::new(Format::F32, 4, 4).unwrap();
    let (weights, scales) = ([1; 64], []);
    let m = MatrixRef::new(layout, &weights, &scales).unwrap();
    let matrix = accelerator.hold(m).unwrap();
    let view = accelerator.buffer(32).unwrap().view();
    let (from, to) = (Rows { view, stride: 4 }, Rows { view: view.plus(16), stride: 4 });
    accelerator.record(&Op::Copy { from, to, rows: 2, width: 4 }).unwrap();
    accelerator
        .record(&Op::Product { matrix, x: to.view, inputs: 1, out: view, order: Order::Decode })
        .unwrap();
    accelerator.wait().unwrap();
    let held = accelerator.weights().matrix(matrix).unwrap().weights().as_ptr() as u64;
    let address = format!("0: {:?}", (held + (1 << 30)).to_le_bytes()).replace(']', "");
    let log = gpu.log.lock().unwrap().clone();
    assert!(log[0].starts_with("copy_rows") && log[1] == "barrier", "{log:?}");
    assert!(log[2].starts_with("matmul_f32_1") && log[2].contains(&address), "{log:?}");
    // An expert where nothing is declared.
    let rows = ExpertRows { x: view, inputs: 1, hidden: 4, out: view.plus(16), outputs: 1 };
    let task = ExpertTask::new(ExpertWeights { gate: m, up: m, down: m }, &[(0, 0)]);
    let refused = accelerator.experts(&rows, &[task]).unwrap_err().to_string();
    assert!(refused.contains("gate projection of task 0") && refused.contains("not declared"), "{refused}");
}
