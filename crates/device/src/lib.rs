//! Accelerators.
//!
//! [`residency`] is what all of them share: memory is declared to a device once, so that the size of the expert
//! cache costs nothing. [`sim`] is a device that enforces the rules and needs no hardware. [`kernels`] says what every
//! device computes, [`metal`] has the kernels of Apple's.
#![forbid(unsafe_code)]

mod hazards;
pub mod kernels;
pub mod metal;
pub mod residency;
pub mod sim;
