//! The primitives that threads of the store meet at: the standard ones, or under `cfg(shuttle)` those of a
//! checker that tries many interleavings of them.

#[cfg(not(shuttle))]
pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
#[cfg(not(shuttle))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(shuttle))]
pub(crate) use std::thread;

#[cfg(shuttle)]
pub(crate) use shuttle::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
#[cfg(shuttle)]
pub(crate) use shuttle::thread;
