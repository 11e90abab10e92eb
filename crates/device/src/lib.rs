//! Accelerators.
//!
//! [`residency`] is what all of them share: memory is declared to a device once, so that the size of the expert
//! cache costs nothing.
#![forbid(unsafe_code)]

pub mod residency;
