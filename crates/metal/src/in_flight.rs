//! A command buffer that was handed over, and its end.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Failure, MetalError};
use crate::health::{Health, Use};
use crate::times::{Stamps, SubmissionTimes};
use crate::wait::Latch;

/// How far a command buffer has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// Not handed over.
    Fresh,
    /// Handed over, and not scheduled.
    Waiting,
    /// On the GPU, or about to be.
    Scheduled,
    /// Ended well.
    Completed,
    /// Failed.
    Failed,
    /// Something that this version does not know.
    Unknown,
}

impl State {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            State::Fresh => "not handed over",
            State::Waiting => "waiting to be scheduled",
            State::Scheduled => "scheduled or running",
            State::Completed => "completed",
            State::Failed => "failed",
            State::Unknown => "in a state that this version does not know",
        }
    }
}

/// What a command buffer can be asked: Metal's on a Mac, a double's in tests.
pub trait Command: Send {
    /// Hands it over, once. `ended` is opened when it has ended, well or not, by whatever thread.
    fn commit(&self, ended: Arc<Latch>);

    /// How far it has got.
    fn state(&self) -> State;

    /// Why it failed.
    fn failure(&self) -> Failure;

    /// Its times; they mean something after its end.
    fn stamps(&self) -> Stamps;

    /// Sleeps until it has ended, however long that takes.
    fn block(&self);
}

/// A submission that the GPU has. Dropping it waits for its end: its memory is in use until then.
pub struct InFlight<C: Command> {
    command: C,
    health: Arc<Health>,
    ended: Arc<Latch>,
    uses: Vec<Use>,
    dispatches: u64,
    encode: Duration,
    committed: Instant,
}

impl<C: Command> fmt::Debug for InFlight<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("state", &self.command.state()).finish_non_exhaustive()
    }
}

impl<C: Command> InFlight<C> {
    /// Hands `command` over: `dispatches` of them, encoded in `encode`, during which `uses` began.
    pub fn start(
        command: C,
        health: Arc<Health>,
        uses: Vec<Use>,
        dispatches: u64,
        encode: Duration,
    ) -> InFlight<C> {
        let ended = Arc::new(Latch::default());
        let committed = Instant::now();
        command.commit(Arc::clone(&ended));
        InFlight { command, health, ended, uses, dispatches, encode, committed }
    }

    /// Dispatches in it.
    pub fn dispatches(&self) -> u64 {
        self.dispatches
    }

    /// Whether it has ended, well or not.
    pub fn has_ended(&self) -> bool {
        self.ended.opened().is_some()
    }

    /// Sleeps until it has ended, `patience` at most.
    ///
    /// # Errors
    /// [`MetalError::TimedOut`] where it goes on: it may be waited for again. [`MetalError::Failed`] where it has
    /// failed; what it was to write is not there.
    pub fn wait(&mut self, patience: Duration) -> Result<SubmissionTimes, MetalError> {
        let Some(ended) = self.ended.wait(patience) else {
            return Err(MetalError::TimedOut { waited: patience, state: self.command.state().name() });
        };
        self.uses.clear();
        if let Some(failure) = self.failed() {
            return Err(MetalError::Failed(failure));
        }
        let wall = ended.saturating_duration_since(self.committed);
        Ok(SubmissionTimes::new(self.encode, wall, self.command.stamps()))
    }

    /// Why it failed, where it has; the device remembers what it does not survive.
    fn failed(&self) -> Option<Failure> {
        let failure = (self.command.state() == State::Failed).then(|| self.command.failure())?;
        self.health.note(&failure);
        Some(failure)
    }
}

impl<C: Command> Drop for InFlight<C> {
    fn drop(&mut self) {
        // Without an end to patience: the GPU may write until then, and the memory goes after. The system's watchdog
        // ends what runs for ever.
        if !self.has_ended() {
            self.command.block();
        }
        // Nobody may have asked, and later submissions must hear of a device that is lost.
        self.failed();
    }
}
