//! One suite for every device's kernels. A device joins by a line of `suite!` at the end.
//!
//! The oracle is the scalar reference of `quant` and `kernels`, the tolerances follow from the order of sums and are
//! worked out for the numbers at hand (`data::sum_error`): results of two devices differ by no more than roundings.

mod attention;
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

use data::Outcome;
use metaltail_device::kernels::{KernelDevice, Reference};

/// What a check is called with.
type Check = fn(&mut dyn KernelDevice) -> Outcome;

/// Every check, by the claim that it makes.
const CHECKS: [(&str, Check); 28] = [
    ("products agree with the reference", products::agree_with_the_reference),
    ("products do not depend on the width", products::do_not_depend_on_the_width),
    ("products know every fp8 code", products::know_every_fp8_code),
    ("products keep what is not finite where it is", products::keep_what_is_not_finite_where_it_is),
    ("experts agree with the reference", experts::agree_with_the_reference),
    ("experts do not depend on each other", experts::do_not_depend_on_each_other),
    ("experts leave rows that nobody names", experts::leave_rows_that_nobody_names),
    ("norms agree with the reference", pieces::norms_agree_with_the_reference),
    ("layer norms agree with the reference", pieces::layer_norms_agree_with_the_reference),
    ("copies are bits", pieces::copies_are_bits),
    ("sums agree with the reference", pieces::sums_agree_with_the_reference),
    ("combinations agree with the reference", pieces::combinations_agree_with_the_reference),
    ("rotations agree with the reference", pieces::rotations_agree_with_the_reference),
    ("routes agree with the reference", pieces::routes_agree_with_the_reference),
    ("routes stay in the best groups", pieces::routes_stay_in_the_best_groups),
    ("routes break ties by the lowest id", pieces::routes_break_ties_by_the_lowest_id),
    ("routes survive damaged logits", pieces::routes_survive_damaged_logits),
    ("rows are independent", pieces::rows_are_independent),
    ("gates agree with the reference", pieces::gates_agree_with_the_reference),
    ("prefill agrees with the reference", products::for_many_agree_with_the_reference),
    ("prefill does not depend on each other", products::for_many_do_not_depend_on_each_other),
    ("attention agrees with built keys and values", attention::agrees_with_built_keys_and_values),
    ("attention knows every format", attention::knows_every_format),
    ("attention does not depend on other rows", attention::does_not_depend_on_other_rows),
    ("attention reads what is listed", attention::reads_what_is_listed),
    ("attention stands extremes", attention::stands_extremes),
    ("selections agree with the reference", attention::selections_agree_with_the_reference),
    ("selections stand extremes", attention::selections_stand_extremes),
];

/// What is wrong with a device, of the claims that begin so. Nothing is checked before it is asked for.
fn faults<'a>(device: &'a mut dyn KernelDevice, claims: &'a str) -> impl Iterator<Item = String> + 'a {
    let asked = CHECKS.iter().filter(move |(claim, _)| claim.starts_with(claims));
    asked.filter_map(|(claim, check)| check(device).err().map(|fault| format!("{claim}: {fault}")))
}

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
