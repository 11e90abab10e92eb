//! A command buffer that was handed over, and its end.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block2::RcBlock;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLCommandBuffer, MTLCommandBufferStatus};

use crate::buffer::Use;
use crate::error::{Failure, MetalError};
use crate::gpu::{Gpu, words};
use crate::times::{Stamps, SubmissionTimes};
use crate::wait::Latch;

type CommandBuffer = ProtocolObject<dyn MTLCommandBuffer>;

/// A submission that the GPU has. Dropping it waits for its end: its memory is in use until then.
pub struct InFlight {
    gpu: Arc<Gpu>,
    command: Retained<CommandBuffer>,
    ended: Arc<Latch>,
    uses: Vec<Use>,
    dispatches: u64,
    encode: Duration,
    committed: Instant,
}

// SAFETY: encoding is over, and what is left – waiting, state, error, times – may be asked of a command buffer from
// any thread; its reference count is atomic.
unsafe impl Send for InFlight {}

impl std::fmt::Debug for InFlight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InFlight").field("state", &state(self.command.status())).finish_non_exhaustive()
    }
}

fn state(status: MTLCommandBufferStatus) -> &'static str {
    match status {
        MTLCommandBufferStatus::NotEnqueued => "not enqueued",
        MTLCommandBufferStatus::Enqueued => "enqueued",
        MTLCommandBufferStatus::Committed => "waiting to be scheduled",
        MTLCommandBufferStatus::Scheduled => "scheduled or running",
        MTLCommandBufferStatus::Completed => "completed",
        MTLCommandBufferStatus::Error => "failed",
        _ => "in a state that this version does not know",
    }
}

impl InFlight {
    pub(crate) fn commit(
        gpu: Arc<Gpu>,
        command: Retained<CommandBuffer>,
        uses: Vec<Use>,
        dispatches: u64,
        encode: Duration,
    ) -> InFlight {
        let ended = Arc::new(Latch::default());
        let tell = Arc::clone(&ended);
        let handler = RcBlock::new(move |_: NonNull<CommandBuffer>| tell.open());
        // SAFETY: Metal copies the block and calls it once, from a thread of its own; what it owns may be sent there.
        unsafe { command.addCompletedHandler(RcBlock::as_ptr(&handler)) };
        let committed = Instant::now();
        command.commit();
        InFlight { gpu, command, ended, uses, dispatches, encode, committed }
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
            return Err(MetalError::TimedOut {
                seconds: patience.as_secs(),
                state: state(self.command.status()),
            });
        };
        self.uses.clear();
        if let Some(failure) = self.failed() {
            return Err(MetalError::Failed(failure));
        }
        let stamps = Stamps {
            schedule_start: self.command.kernelStartTime(),
            schedule_end: self.command.kernelEndTime(),
            gpu_start: self.command.GPUStartTime(),
            gpu_end: self.command.GPUEndTime(),
        };
        Ok(SubmissionTimes::new(self.encode, ended.saturating_duration_since(self.committed), stamps))
    }

    /// Why it failed, where it has; the device remembers what it does not survive.
    fn failed(&self) -> Option<Failure> {
        if self.command.status() != MTLCommandBufferStatus::Error {
            return None;
        }
        let failure = autoreleasepool(|_| match self.command.error() {
            Some(error) => Failure::new(error.domain().to_string(), error.code() as i64, words(&error)),
            None => Failure::new("none".into(), 0, "it failed without an error".into()),
        });
        self.gpu.note(&failure);
        Some(failure)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // Without an end to patience: the GPU may write until then, and the memory goes after. The system's watchdog
        // ends what runs for ever.
        if !self.has_ended() {
            self.command.waitUntilCompleted();
        }
        // Nobody may have asked, and later submissions must hear of a device that is lost.
        self.failed();
    }
}
