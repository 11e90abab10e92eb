//! CPU compute on quantised blocks: GEMV and GEMM by format and instruction set, expert blocks, a thread pool.
//!
//! Every product adds in one canonical order (`docs/design/formats.md`), so a result has the same
//! bits on every instruction set, in any batch and on any number of threads.

mod accelerator;
mod activation;
mod chunks;
mod cores;
mod experts;
mod gguf;
mod isa;
mod job;
mod kernels;
mod ops;
mod pool;
mod scalar;
mod scalar_gguf;
mod simd;
mod tiles;
mod tiles_q8;
mod transpose;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

pub use accelerator::{
    Accelerator, AcceleratorExperts, Attend, Buffer, Combine, ExpertRows, Extent, Footprint, HeldMatrix,
    Lists, MOST_INTERMEDIATE, Op, Order, Rope, Route, Rows, Select, View,
};
pub use activation::Activation;
pub use cores::default_threads;
pub use experts::{
    Completion, ComputeError, CpuExperts, ExpertBiases, ExpertCompute, ExpertTask, ExpertWeights, Numerics,
};
pub use isa::{Isa, UnsupportedIsa};
pub use kernels::Kernels;
pub use ops::{
    layer_norm, rms_norm, rms_norm_in_place, sigmoid, silu, silu_mul, silu_mul_in_place, softmax_in_place,
};
pub use pool::Pool;
