//! What is claimed of every device.

use metaltail_device::kernels::KernelDevice;

use crate::data::Outcome;
use crate::{attention, experts, pieces, products};

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
pub fn faults<'a>(device: &'a mut dyn KernelDevice, claims: &'a str) -> impl Iterator<Item = String> + 'a {
    let asked = CHECKS.iter().filter(move |(claim, _)| claim.starts_with(claims));
    asked.filter_map(|(claim, check)| check(device).err().map(|fault| format!("{claim}: {fault}")))
}
