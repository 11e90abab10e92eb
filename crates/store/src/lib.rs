//! The expert store: arenas, slots, leases, replacement, memory budget and loaders.
//!
//! Routed experts lie on disk; [`ExpertStore`] brings those that a layer needs into slots of few large
//! arenas and hands them out as [`Lease`]s, hits at once and misses as they arrive. How it works, and why:
//! `docs/design/store.md`. This crate knows no model: an expert is a number in a layer and some runs of bytes.

mod arena;
mod bell;
pub mod budget;
mod error;
mod event;
mod fetch;
mod geometry;
mod governor;
mod io;
mod lease;
mod loaders;
mod machine;
pub mod page_cache;
mod policy;
pub mod probe;
pub mod rank;
pub mod signals;
mod store;
mod sync;
mod table;
pub mod testing;
pub mod trace;
pub mod usage;

pub use arena::{ArenaChunk, ArenaView, PAGE};
pub use budget::{Budget, BudgetError, DeviceLimit, Fit, LimitSource, Term, Wanted};
pub use error::StoreError;
pub use event::{EvictReason, LoadRank, Observer, Silent, StoreEvent, Tier};
pub use fetch::Fetch;
pub use geometry::{Geometry, LayerExperts};
pub use governor::{Governor, Order, Probe};
pub use io::{Direct, DriveFigures, DriveFiles, ExpertReader, FileReader, Io, IoMode};
pub use lease::Lease;
pub use machine::{CgroupLevel, Machine, MemoryGroup};
pub use policy::{
    ExpertId, Frecency, Lfu, Lru, PolicyKind, PolicyShape, Replacement, S3Fifo, Share, Sieve, Slru,
};
pub use store::{ChunkListener, ExpertStore, StoreConfig};
