//! The ledger behind a lock.

use std::sync::PoisonError;
#[cfg(not(shuttle))]
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

#[cfg(shuttle)]
use shuttle::sync::{Condvar, Mutex, MutexGuard};

use metaltail_store::rank;

use super::driver::{ResidencyDriver, Span};
use super::ledger::{Ledger, ResidencyError, Submission};
use super::stats::ResidencyStats;

/// How long a removal waits for submissions that may read the memory.
const PATIENCE: Duration = Duration::from_secs(60);

/// A [`Ledger`] that threads share.
#[derive(Debug)]
pub struct Residency<D> {
    ledger: Mutex<Ledger<D>>,
    ended: Condvar,
    patience: Duration,
}

impl<D: ResidencyDriver> Residency<D> {
    /// Shares a ledger.
    pub fn new(ledger: Ledger<D>) -> Residency<D> {
        Residency { ledger: Mutex::new(ledger), ended: Condvar::new(), patience: PATIENCE }
    }

    /// Waits less, or longer, for submissions in flight.
    pub fn with_patience(self, patience: Duration) -> Residency<D> {
        Residency { patience, ..self }
    }

    /// The ledger, for a moment. In debug builds a thread that holds the expert store's lock panics here:
    /// driver calls take long, and loaders wait for that lock.
    pub fn ledger(&self) -> MutexGuard<'_, Ledger<D>> {
        rank::assert_free("call a device's driver");
        // Every call of the ledger leaves it in a state that is whole.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Ledger::register`].
    ///
    /// # Errors
    /// As there.
    pub fn register(&self, span: Span) -> Result<(), ResidencyError> {
        self.ledger().register(span)
    }

    /// As [`Ledger::submit`].
    ///
    /// # Errors
    /// As there.
    pub fn submit(&self) -> Result<Submission, ResidencyError> {
        self.ledger().submit()
    }

    /// As [`Ledger::complete`].
    ///
    /// # Errors
    /// As there.
    pub fn complete(&self, submission: Submission) -> Result<(), ResidencyError> {
        let completed = self.ledger().complete(submission);
        self.ended.notify_all();
        completed
    }

    /// As [`Ledger::unregister`], but waits for submissions that may read the memory.
    ///
    /// # Errors
    /// As there; [`ResidencyError::Stalled`] where they do not end.
    pub fn unregister(&self, span: Span) -> Result<(), ResidencyError> {
        let began = Instant::now();
        let mut ledger = self.ledger();
        loop {
            match ledger.unregister(span) {
                Err(ResidencyError::InFlight { .. }) => {}
                other => return other,
            }
            let left = self.patience.checked_sub(began.elapsed());
            let left = left.ok_or(ResidencyError::Stalled { span, seconds: self.patience.as_secs() })?;
            ledger = self.ended.wait_timeout(ledger, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Figures so far.
    pub fn stats(&self) -> ResidencyStats {
        self.ledger().stats()
    }
}
