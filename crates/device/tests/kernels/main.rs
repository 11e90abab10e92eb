//! One suite for every device's kernels. A device joins by a line of `suite!` at the end; the Mac's is in
//! `crates/metal/tests/kernels.rs`.
//!
//! The oracle is the scalar reference of `quant` and `kernels`, the tolerances follow from the order of sums and are
//! worked out for the numbers at hand (`data::sum_error`): results of two devices differ by no more than roundings.

mod attention;
mod checks;
mod data;
mod experts;
mod pieces;
mod products;

#[cfg(feature = "msl-cpu")]
mod accelerator;
#[cfg(feature = "msl-cpu")]
mod metal;
#[cfg(feature = "msl-cpu")]
mod planted;

use std::sync::Arc;

use checks::faults;

use metaltail_device::kernels::{HostKernels, KernelDevice, Reference};
use metaltail_device::residency::{DeclaredArena, HeldWeights, Ledger, Mode, Residency, SlabAllocation};
use metaltail_device::sim::{Profile, SimAccelerator, SimDriver};
use metaltail_kernels::{Accelerator as _, Kernels, Op, Pool};
use metaltail_store::testing::empty_arena;

/// The suite on one device.
macro_rules! suite {
    ($name:ident, $device:expr) => {
        #[test]
        fn $name() {
            let mut device = $device;
            let faults: Vec<String> = faults(&mut device, "").collect();
            assert!(faults.is_empty(), "{}:\n{}", device.name(), faults.join("\n"));
        }
    };
}

suite!(the_reference_passes, Reference::new().unwrap());
suite!(the_simulated_accelerator_passes, sim(Mode::Set));
suite!(the_simulated_accelerator_passes_declared_each_time, sim(Mode::Walk));

/// The simulated accelerator, with experts in memory that is declared to it.
fn sim(mode: Mode) -> HostKernels<SimAccelerator, SimDriver> {
    let (accelerator, residency) = simulated(mode);
    HostKernels::new(accelerator, HeldWeights::new(residency)).with_offset(5)
}

fn simulated(mode: Mode) -> (SimAccelerator, Arc<Residency<SimDriver>>) {
    let ledger = Ledger::new(SimDriver::new(Profile::m5max()), mode);
    let residency = Arc::new(Residency::new(ledger));
    let arena = DeclaredArena::new(empty_arena(), SlabAllocation::Arena, Arc::clone(&residency));
    let accelerator = SimAccelerator::new(Arc::new(arena), Kernels::best(), &Arc::new(Pool::new(1)));
    (accelerator, residency)
}

/// What uses a buffer goes on when it is given up; nothing else begins to, and it goes with the wait.
#[test]
fn a_buffer_that_was_given_up_takes_no_more_operations() {
    let (mut sim, _) = simulated(Mode::Set);
    let [from, to] = [(); 2].map(|()| sim.buffer(4).unwrap());
    sim.write(from.view(), &[1.0; 4]).unwrap();
    let add = Op::Add { from: from.view(), to: to.view(), count: 4 };
    sim.record(&add).unwrap();
    sim.release(from);
    sim.record(&add).unwrap_err();
    sim.wait().unwrap();
    let mut sums = [0.0; 4];
    sim.read(to.view(), &mut sums).unwrap();
    assert_eq!(sums, [1.0; 4]);
    sim.write(from.view(), &[1.0; 4]).unwrap_err();
}

#[cfg(feature = "msl-cpu")]
mod on_metal {
    use metaltail_device::residency::Mode;

    use super::{KernelDevice, faults};
    use crate::metal::Setup;

    suite!(metal_passes, Setup::default().device());
    // Fewer threadgroups than work: every kernel has to loop.
    suite!(metal_passes_past_the_launch_limit, Setup { most_groups: Some(2), ..Setup::default() }.device());
    // Weights that begin at an odd address, as in a file; operands that do not begin their buffer.
    suite!(
        metal_passes_at_odd_addresses,
        Setup { order: 1, around: [5, 3], offset: 3, ..Setup::default() }.device()
    );
    suite!(metal_passes_without_subnormals, Setup { flush: true, ..Setup::default() }.device());
    // What launches reach through addresses declared once, and with every submission; nothing else can be read.
    suite!(metal_passes_declared_once, Setup { declaring: Some(Mode::Set), ..Setup::default() }.device());
    suite!(
        metal_passes_declared_each_time,
        Setup { declaring: Some(Mode::Walk), ..Setup::default() }.device()
    );
    // Rows of an attention one at a time, threads in no order.
    suite!(
        metal_passes_in_shuffled_orders,
        Setup { order: 77, threads: 2, most_scores: Some(1), ..Setup::default() }.device()
    );
}
