//! Metal kernels: their source, the layout of what they read, and how they are launched.
//!
//! Everything here is plain code for every system. What is missing on a system is a [`Launcher`]: with the feature
//! `msl-cpu` (for tests, needs clang 19) `cpu` has one that runs the kernels on the processor. Nothing has been run
//! on a Mac: `docs/design/metal.md` says what is known and what is not.

mod accelerator;
mod buffers;
mod encode;
mod experts;
mod launch;
mod layout;
mod scratch;
mod source;

#[cfg(feature = "msl-cpu")]
pub mod cpu;

pub use accelerator::{AcceleratorCounts, MetalAccelerator, SharedCounts};
pub use buffers::Buffers;
pub use launch::{Argument, Launch, Launcher, MOST_BYTES};
pub use layout::{EXPERT_BYTES, MATRIX_BYTES};
pub use source::source;
