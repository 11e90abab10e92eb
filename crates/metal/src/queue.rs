//! Submissions that the residency ledger knows.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use metaltail_device::residency::{Residency, ResidencyDriver, ResidencyError, Span, Submission};

use crate::error::MetalError;
use crate::health::Health;
use crate::in_flight::{Command, InFlight};
use crate::times::{Figures, SharedFigures, SubmissionTimes};

/// How long a submission is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a queue needs of a device: Metal's kernels on a Mac, a double in tests.
pub trait Backend {
    /// To what memory is declared.
    type Driver: ResidencyDriver;
    /// Fills a command buffer.
    type Encoder<'a>
    where
        Self: 'a;
    /// A command buffer.
    type Command: Command;

    /// Whether the device works.
    fn health(&self) -> &Health;

    /// Whether a capture runs, which sees only what each submission names.
    fn is_capturing(&self) -> bool;

    /// Where kernels find host memory.
    fn address(driver: &Self::Driver, span: Span) -> Option<u64>;

    /// Begins a submission; what was declared for it since the last one is declared now.
    ///
    /// # Errors
    /// No command buffer.
    fn begin(&self, driver: &mut Self::Driver) -> Result<Self::Encoder<'_>, MetalError>;

    /// Hands everything over to the GPU.
    fn commit(&self, encoder: Self::Encoder<'_>) -> InFlight<Self::Command>;
}

/// Kernels, the memory they may read, and the way to run them. Several submissions may be in flight: what is resident
/// goes first, what had to be loaded follows.
pub struct Queue<B: Backend> {
    backend: Arc<B>,
    residency: Arc<Residency<B::Driver>>,
    patience: Duration,
    figures: SharedFigures,
}

/// A submission in flight. Dropping it waits for its end and tells the ledger.
pub struct Submitted<B: Backend> {
    in_flight: Option<InFlight<B::Command>>,
    /// Until the ledger was told of its end.
    submission: Option<Submission>,
    residency: Arc<Residency<B::Driver>>,
}

impl<B: Backend> fmt::Debug for Queue<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("figures", &self.figures()).finish_non_exhaustive()
    }
}

impl<B: Backend> fmt::Debug for Submitted<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Submitted").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

impl<B: Backend> Queue<B> {
    /// Runs what `backend` has on what `residency` declares; both must be of one device.
    pub fn new(backend: Arc<B>, residency: Arc<Residency<B::Driver>>) -> Queue<B> {
        Queue { backend, residency, patience: PATIENCE, figures: SharedFigures::default() }
    }

    /// Waits less, or longer, for submissions.
    pub fn with_patience(self, patience: Duration) -> Queue<B> {
        Queue { patience, ..self }
    }

    /// The device.
    pub fn backend(&self) -> &Arc<B> {
        &self.backend
    }

    /// The ledger.
    pub fn residency(&self) -> &Arc<Residency<B::Driver>> {
        &self.residency
    }

    /// Where kernels find host memory, in the order asked.
    ///
    /// # Errors
    /// The first that is not declared.
    pub fn addresses(&self, spans: &[Span]) -> Result<Vec<u64>, MetalError> {
        let ledger = self.residency.ledger();
        let address = |&span: &Span| {
            let found = B::address(ledger.driver(), span);
            found.ok_or_else(|| MetalError::from(ResidencyError::Unknown(span)))
        };
        spans.iter().map(address).collect()
    }

    /// Hands over what `encode` encodes. All that is declared may be read by it until it has ended.
    ///
    /// # Errors
    /// What the ledger, `encode` or the device refuses; nothing runs then.
    pub fn submit(
        &self,
        encode: impl FnOnce(&mut B::Encoder<'_>) -> Result<(), MetalError>,
    ) -> Result<Submitted<B>, MetalError> {
        self.backend.health().check()?;
        let (submission, encoder) = {
            let mut ledger = self.residency.ledger();
            ledger.set_capture(self.backend.is_capturing());
            let submission = ledger.submit()?;
            (submission, self.backend.begin(ledger.driver_mut()))
        };
        // From here on the ledger hears of the end, whatever happens.
        let (submission, residency) = (Some(submission), Arc::clone(&self.residency));
        let mut submitted = Submitted { in_flight: None, submission, residency };
        let committed = encoder.and_then(|mut encoder| {
            encode(&mut encoder)?;
            self.backend.health().check()?;
            Ok(self.backend.commit(encoder))
        });
        submitted.in_flight = Some(committed?);
        Ok(submitted)
    }

    /// Waits for a submission and tells the ledger that it has ended. One that has ended before takes no time.
    ///
    /// # Errors
    /// [`MetalError::TimedOut`] where it goes on: it may be waited for again. [`MetalError::Failed`] where it has
    /// failed.
    pub fn finish(&self, submitted: &mut Submitted<B>) -> Result<SubmissionTimes, MetalError> {
        let Some(in_flight) = &mut submitted.in_flight else { return Ok(SubmissionTimes::default()) };
        let dispatches = in_flight.dispatches();
        let waited = in_flight.wait(self.patience);
        if matches!(waited, Err(MetalError::TimedOut { .. })) {
            return waited;
        }
        submitted.end();
        let times = waited?;
        self.figures.add(dispatches, &times);
        Ok(times)
    }

    /// Sums over all submissions that were waited for and ended well.
    pub fn figures(&self) -> Figures {
        self.figures.get()
    }

    /// The same, to look at while the queue works.
    pub fn shared_figures(&self) -> SharedFigures {
        self.figures.clone()
    }
}

impl<B: Backend> Submitted<B> {
    /// Whether it has ended, well or not.
    pub fn has_ended(&self) -> bool {
        self.in_flight.as_ref().is_none_or(InFlight::has_ended)
    }

    /// First the end, then the word of it, once.
    fn end(&mut self) {
        drop(self.in_flight.take());
        if let Some(submission) = self.submission.take() {
            // The ledger refuses only what it was told by another way, and then there is nothing left to tell.
            let _ = self.residency.complete(submission);
        }
    }
}

impl<B: Backend> Drop for Submitted<B> {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests;
