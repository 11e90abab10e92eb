//! The ledger behind a lock.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
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
    /// Wakes the thread in [`Residency::keep`].
    resumed: Condvar,
    /// Whether that thread sleeps until a submission. Written and read under the ledger's lock.
    dormant: AtomicBool,
}

/// When a thread looks at the ledger again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// After a time.
    After(Duration),
    /// When a submission has ended.
    Submission,
    /// Never.
    End,
}

impl<D: ResidencyDriver> Residency<D> {
    /// Shares a ledger.
    pub fn new(ledger: Ledger<D>) -> Residency<D> {
        Residency {
            ledger: Mutex::new(ledger),
            ended: Condvar::new(),
            patience: PATIENCE,
            resumed: Condvar::new(),
            dormant: AtomicBool::new(false),
        }
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
        let mut ledger = self.ledger();
        let completed = ledger.complete(submission);
        let dormant = self.dormant.load(Ordering::Relaxed);
        drop(ledger);
        self.ended.notify_all();
        if dormant {
            self.resumed.notify_all();
        }
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

    /// Has `look` look at the ledger, under its lock and from this thread, whenever it wants to.
    pub(super) fn keep(&self, mut look: impl FnMut(&mut Ledger<D>) -> Next) {
        let mut ledger = self.ledger();
        loop {
            let next = look(&mut ledger);
            self.dormant.store(next == Next::Submission, Ordering::Relaxed);
            ledger = match next {
                Next::End => return,
                Next::Submission => self.resumed.wait(ledger).unwrap_or_else(PoisonError::into_inner),
                Next::After(time) => {
                    self.resumed.wait_timeout(ledger, time).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Has the thread in [`Residency::keep`] look now, after `change`.
    pub(super) fn rouse(&self, change: impl FnOnce()) {
        // No driver is called: no matter what else this thread holds.
        let ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        change();
        drop(ledger);
        self.resumed.notify_all();
    }

    /// Whether the thread in [`Residency::keep`] sleeps until a submission.
    #[cfg(test)]
    pub(super) fn keeper_sleeps(&self) -> bool {
        let _ledger = self.ledger();
        self.dormant.load(Ordering::Relaxed)
    }

    /// Figures so far.
    pub fn stats(&self) -> ResidencyStats {
        self.ledger().stats()
    }
}
