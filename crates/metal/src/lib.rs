//! The host side of the Metal back end.
//!
//! Metal computes where `.metal` sources say how; this crate finds the device, declares memory to it once, turns
//! dispatches into command buffers and waits for them. Nobody who wrote it had a Mac: it is type-checked, linted
//! and linked for `aarch64-apple-darwin`, and was never run. `docs/design/metal-host.md` says what that leaves
//! open and how to find out.
//!
//! What needs no Metal is compiled and tested everywhere:
//! * [`limits`]: which device is taken, and what it can take.
//! * [`memory`]: which host memory a device can use, and where an address lies in it.
//! * [`room`]: one account of all that a device holds.
//! * [`dispatch`]: the boundary to kernels – a kernel's name, its arguments by index, the grid – and its checks.
//! * [`queue`], [`in_flight`]: submissions, which the ledger knows from their beginning to their end.
//! * [`launcher`]: launches of an accelerator, kept until they are handed over as one command buffer.
//! * [`health`]: whether the device was lost; who uses a buffer.
//! * [`wait`], [`times`]: waiting without spinning; where the time of a submission went.
//! * [`error`]: what can go wrong, and what to do then.
//!
//! The rest exists on macOS alone, and so does every `unsafe` of this crate.
#![cfg_attr(not(target_os = "macos"), forbid(unsafe_code))]

pub mod dispatch;
pub mod error;
pub mod health;
pub mod in_flight;
pub mod launcher;
pub mod limits;
pub mod memory;
pub mod queue;
pub mod room;
pub mod times;
pub mod wait;

#[cfg(test)]
mod double;

#[cfg(target_os = "macos")]
mod buffer;
#[cfg(target_os = "macos")]
pub mod check;
#[cfg(target_os = "macos")]
mod command;
#[cfg(target_os = "macos")]
mod driver;
#[cfg(target_os = "macos")]
mod encoder;
#[cfg(target_os = "macos")]
mod gpu;
#[cfg(target_os = "macos")]
mod kernels;
#[cfg(target_os = "macos")]
mod open;
#[cfg(target_os = "macos")]
mod sysctl;

pub use error::{Failure, FailureKind, MetalError};

#[cfg(target_os = "macos")]
pub use buffer::Buffer;
#[cfg(target_os = "macos")]
pub use command::MetalCommand;
#[cfg(target_os = "macos")]
pub use driver::MetalDriver;
#[cfg(target_os = "macos")]
pub use encoder::MetalEncoder;
#[cfg(target_os = "macos")]
pub use gpu::Gpu;
#[cfg(target_os = "macos")]
pub use kernels::{Kernels, MathMode, Source};
#[cfg(target_os = "macos")]
pub use open::{Accelerator, Opened};

/// A queue of Metal's.
#[cfg(target_os = "macos")]
pub type MetalQueue = queue::Queue<Kernels>;

/// Loaders register memory while another thread submits; a submission may be finished elsewhere than it was made.
#[cfg(target_os = "macos")]
const _: () = {
    const fn shared<T: Send + Sync>() {}
    const fn sent<T: Send>() {}
    shared::<Gpu>();
    shared::<MetalQueue>();
    sent::<Buffer>();
    sent::<queue::Submitted<Kernels>>();
    sent::<Accelerator>();
};
