//! Metal kernels on the CPU, without a Mac: a tool of tests.
//!
//! [`translate`] turns Metal source into C++, [`build`] compiles it together with a `metal_stdlib` of our own
//! (`shim/`, needs clang 19), and `run` (a feature) dispatches the kernels: every GPU thread is a fiber, barriers and
//! SIMD-group operations are meeting points, buffers end at a guard page. A build script calls [`build::compile`];
//! the tests of that crate then call `run::dispatch`.
//!
//! What this can tell about a kernel and what it cannot: `docs/design/metal.md`. Linux on x86-64 only.

pub mod build;
#[cfg(feature = "run")]
pub mod run;
pub mod translate;
