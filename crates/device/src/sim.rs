//! A simulated device.
//!
//! It enforces what real devices leave to luck: memory that is not resident, was freed or is being overwritten
//! must not be touched, and what one kernel wrote is not read by the next without a barrier. And it charges a
//! virtual clock with a machine's costs ([`Profile`]). What it computes is computed by the scalar reference
//! kernels, so `run --device sim` gives real text. [`replay`] drives the same ledger and device through runs
//! that others published ([`rows`]), and [`fit`] finds the machine's numbers from them. It explains published figures and says what a design would
//! change; it is no evidence about hardware.

mod accelerator;
mod driver;
pub mod fit;
mod minimum;
mod profile;
pub mod replay;
pub mod rows;
#[cfg(test)]
mod tests;
mod workload;

pub use accelerator::SimAccelerator;
pub use driver::{SimCounts, SimDriver, SimTimes};
pub use profile::{Profile, ProfileError};
pub use workload::{Streaming, Workload};
