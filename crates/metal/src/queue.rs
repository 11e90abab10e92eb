//! Submissions that the residency ledger knows.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use metaltail_device::residency::{Residency, Span, Submission};

use crate::driver::MetalDriver;
use crate::encoder::MetalEncoder;
use crate::error::MetalError;
use crate::in_flight::InFlight;
use crate::kernels::Kernels;
use crate::times::{Figures, SubmissionTimes};

/// How long a submission is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Kernels, the memory they may read, and the way to run them. Several submissions may be in flight: what is resident
/// goes first, what had to be loaded follows.
#[derive(Debug)]
pub struct MetalQueue {
    kernels: Arc<Kernels>,
    residency: Arc<Residency<MetalDriver>>,
    patience: Duration,
    figures: Mutex<Figures>,
}

/// A submission in flight. Dropping it waits for its end and tells the ledger.
#[derive(Debug)]
pub struct Submitted {
    in_flight: Option<InFlight>,
    submission: Submission,
    residency: Arc<Residency<MetalDriver>>,
}

impl MetalQueue {
    /// Runs `kernels` on what `residency` declares; both must be of one device.
    pub fn new(kernels: Arc<Kernels>, residency: Arc<Residency<MetalDriver>>) -> MetalQueue {
        MetalQueue { kernels, residency, patience: PATIENCE, figures: Mutex::default() }
    }

    /// Waits less, or longer, for submissions.
    pub fn with_patience(self, patience: Duration) -> MetalQueue {
        MetalQueue { patience, ..self }
    }

    /// The ledger.
    pub fn residency(&self) -> &Arc<Residency<MetalDriver>> {
        &self.residency
    }

    /// Where kernels find host memory, in the order asked.
    ///
    /// # Errors
    /// The first that is not declared.
    pub fn addresses(&self, spans: &[Span]) -> Result<Vec<u64>, MetalError> {
        use metaltail_device::residency::ResidencyError::Unknown;
        let ledger = self.residency.ledger();
        spans.iter().map(|&span| Ok(ledger.driver().address(span).ok_or(Unknown(span))?)).collect()
    }

    /// Hands over what `encode` encodes. All that is declared may be read by it until it has ended.
    ///
    /// # Errors
    /// What the ledger, `encode` or Metal refuses; nothing runs then.
    pub fn submit(
        &self,
        encode: impl FnOnce(&mut MetalEncoder<'_>) -> Result<(), MetalError>,
    ) -> Result<Submitted, MetalError> {
        self.kernels.gpu().check_alive()?;
        let (submission, encoder) = {
            let mut ledger = self.residency.ledger();
            ledger.set_capture(self.kernels.gpu().is_capturing());
            let submission = ledger.submit()?;
            (submission, ledger.driver_mut().encoder(&self.kernels))
        };
        let committed = encoder.and_then(|mut encoder| {
            encode(&mut encoder)?;
            encoder.commit()
        });
        match committed {
            Ok(in_flight) => {
                let residency = Arc::clone(&self.residency);
                Ok(Submitted { in_flight: Some(in_flight), submission, residency })
            }
            Err(error) => {
                self.residency.complete(submission)?;
                Err(error)
            }
        }
    }

    /// Waits for a submission and tells the ledger that it has ended. One that has ended before takes no time.
    ///
    /// # Errors
    /// [`MetalError::TimedOut`] where it goes on: it may be waited for again. [`MetalError::Failed`] where it has
    /// failed.
    pub fn finish(&self, submitted: &mut Submitted) -> Result<SubmissionTimes, MetalError> {
        let Some(in_flight) = &mut submitted.in_flight else { return Ok(SubmissionTimes::default()) };
        let dispatches = in_flight.dispatches();
        let waited = in_flight.wait(self.patience);
        if matches!(waited, Err(MetalError::TimedOut { .. })) {
            return waited;
        }
        submitted.end()?;
        let times = waited?;
        self.figures.lock().unwrap_or_else(PoisonError::into_inner).add(dispatches, &times);
        Ok(times)
    }

    /// Sums over all submissions that were waited for and ended well.
    pub fn figures(&self) -> Figures {
        *self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Submitted {
    /// First the end, then the word of it, once.
    fn end(&mut self) -> Result<(), MetalError> {
        match self.in_flight.take() {
            None => Ok(()),
            Some(in_flight) => {
                drop(in_flight);
                Ok(self.residency.complete(self.submission)?)
            }
        }
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        // The ledger refuses only what it was told by another way, and then there is nothing left to tell.
        let _ = self.end();
    }
}
