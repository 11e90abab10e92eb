//! Sessions: loading, prefill and decode steps, sampling, stop rules, cancellation and telemetry.
//!
//! An [`Engine`] is a loaded model with its store, threads and budget. A [`Session`] is one
//! sequence on it: what was computed, and how it goes on. All figures come from one stream of
//! events, gathered by [`telemetry::Telemetry`].
#![forbid(unsafe_code)]

mod device;
mod engine;
mod error;
pub mod memory;
mod open;
mod options;
mod pins;
mod prefetch;
pub mod sampler;
mod score;
mod session;
pub mod stop;
pub mod telemetry;
mod upkeep;
pub mod usage;

pub use device::{AcceleratorFacts, DeviceFigures, DeviceKind, DeviceOptions, accelerator_facts};
pub use engine::Engine;
pub use error::EngineError;
pub use metaltail_device::residency::{Difference, KeepAliveTimes, Mode as ResidencyMode, SlabAllocation};
pub use options::{DEFAULT_CONTEXT, DEFAULT_POLICY, DEFAULT_PREFILL_CHUNK, EngineOptions, Resolved};
pub use pins::{PinMode, Pins};
pub use score::{Score, score};
pub use session::{EachChunk, Finish, Flow, GenerateOptions, Generation, Session};
pub use usage::{UsageMode, UsagePlace};
