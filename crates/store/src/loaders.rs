//! Loaders: they take queued loads, read them in parts, verify, repack, and report.
//!
//! What is to be read, from which drive, and what becomes of a part that failed is decided in [`work`];
//! [`threads`] and [`uring`] are two ways to carry the reads out.

use std::sync::Arc;

use crate::error::StoreError;
use crate::store::Shared;

mod load;
mod mend;
mod repack;
mod threads;
#[cfg(target_os = "linux")]
mod uring;
mod work;

#[cfg(test)]
mod tests;

use work::Work;

/// A running way to carry out reads, fed by [`Work`] until the store closes.
trait Carrier: Send + Sync {
    /// Waits until its last read is over; the store is closing.
    fn join(&mut self);
}

/// How loads are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Carriage {
    /// Whether an io_uring carries reads out, and not threads.
    pub(crate) uring: bool,
    /// Threads.
    pub(crate) loaders: usize,
    /// Longest part of a load in bytes; where nothing is said, see [`Work`].
    pub(crate) chunk: Option<u64>,
}

/// Loaders that end with the value, after the reads they are in.
pub(crate) struct Loaders {
    shared: Arc<Shared>,
    carrier: Box<dyn Carrier>,
}

impl Loaders {
    pub(crate) fn start(shared: &Arc<Shared>, carriage: Carriage) -> Result<Loaders, StoreError> {
        let work = Arc::new(Work::new(Arc::clone(shared), carriage.chunk));
        let carrier: Box<dyn Carrier> = match carriage.uring {
            #[cfg(target_os = "linux")]
            true => Box::new(uring::Uring::start(work, carriage.loaders)?),
            _ => Box::new(threads::Threads::start(&work, carriage.loaders)?),
        };
        Ok(Loaders { shared: Arc::clone(shared), carrier })
    }
}

impl Drop for Loaders {
    fn drop(&mut self) {
        self.shared.stop();
        self.carrier.join();
    }
}
