//! The suite of every device's kernels (`crates/device/tests/kernels`) on a Mac's GPU. Never run by who wrote it.
#![cfg(target_os = "macos")]

#[path = "../../device/tests/kernels/attention.rs"]
mod attention;
#[path = "../../device/tests/kernels/checks.rs"]
mod checks;
#[path = "../../device/tests/kernels/data.rs"]
mod data;
#[path = "../../device/tests/kernels/experts.rs"]
mod experts;
#[path = "../../device/tests/kernels/pieces.rs"]
mod pieces;
#[path = "../../device/tests/kernels/products.rs"]
mod products;

use std::sync::Arc;

use metaltail_device::kernels::{HostKernels, KernelDevice};
use metaltail_device::metal::Launcher;
use metaltail_device::residency::{HeldWeights, Mode};
use metaltail_metal::Gpu;

/// All claims on one way to declare memory, with operands at the beginning of their buffers or behind it.
fn passes(mode: Mode, offset: usize) {
    let gpu = match Gpu::open(None) {
        Ok(gpu) => gpu,
        // Some virtual machines have none.
        Err(error) => return println!("SKIPPED: {error}"),
    };
    let accelerator = gpu.bare_accelerator(mode).expect("Metal's compiler takes the kernels");
    let experts = HeldWeights::new(Arc::clone(accelerator.launcher().residency()));
    let mut device = HostKernels::new(accelerator, experts).with_offset(offset);
    let faults: Vec<String> = checks::faults(&mut device, "").collect();
    assert!(faults.is_empty(), "{}:\n{}", device.name(), faults.join("\n"));
    println!("{:?}", device.accelerator().launcher().figures());
}

#[test]
fn kernels_agree_with_the_reference_where_memory_is_declared_once() {
    passes(Mode::Set, 0);
}

#[test]
fn kernels_agree_with_the_reference_where_memory_is_declared_each_time() {
    passes(Mode::Walk, 3);
}
