//! The measurement harness.
//!
//! Figures are medians with their smallest and largest value over `n` rounds; what is compared is
//! measured in turn within each round, and the ratio is formed round by round, so that a machine
//! whose speed drifts does not decide the result.
#![forbid(unsafe_code)]

mod bandwidth;
pub mod decode;
pub mod kernels;
mod spread;

pub use bandwidth::Bandwidth;
pub use spread::Spread;
