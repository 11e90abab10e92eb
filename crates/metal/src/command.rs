//! Metal's command buffers.

use std::ptr::NonNull;
use std::sync::Arc;

use block2::RcBlock;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLCommandBuffer, MTLCommandBufferStatus};

use crate::error::Failure;
use crate::gpu::words;
use crate::in_flight::{Command, State};
use crate::times::Stamps;
use crate::wait::Latch;

type Raw = ProtocolObject<dyn MTLCommandBuffer>;

/// A command buffer after its encoding.
pub struct MetalCommand(Retained<Raw>);

// SAFETY: encoding is over, and what is left – committing, waiting, state, error, times – may be asked of a command
// buffer from any thread; its reference count is atomic.
unsafe impl Send for MetalCommand {}

impl MetalCommand {
    /// All of its encoders have ended.
    pub(crate) fn new(encoded: Retained<Raw>) -> MetalCommand {
        MetalCommand(encoded)
    }
}

impl Command for MetalCommand {
    fn commit(&self, ended: Arc<Latch>) {
        let handler = RcBlock::new(move |_: NonNull<Raw>| ended.open());
        // SAFETY: Metal copies the block and calls it once, from a thread of its own; what it owns may be sent there.
        unsafe { self.0.addCompletedHandler(RcBlock::as_ptr(&handler)) };
        self.0.commit();
    }

    fn state(&self) -> State {
        match self.0.status() {
            MTLCommandBufferStatus::NotEnqueued | MTLCommandBufferStatus::Enqueued => State::Fresh,
            MTLCommandBufferStatus::Committed => State::Waiting,
            MTLCommandBufferStatus::Scheduled => State::Scheduled,
            MTLCommandBufferStatus::Completed => State::Completed,
            MTLCommandBufferStatus::Error => State::Failed,
            _ => State::Unknown,
        }
    }

    fn failure(&self) -> Failure {
        autoreleasepool(|_| match self.0.error() {
            Some(error) => Failure::new(error.domain().to_string(), error.code() as i64, words(&error)),
            None => Failure::new("none".into(), 0, "it failed without an error".into()),
        })
    }

    fn stamps(&self) -> Stamps {
        Stamps {
            schedule_start: self.0.kernelStartTime(),
            schedule_end: self.0.kernelEndTime(),
            gpu_start: self.0.GPUStartTime(),
            gpu_end: self.0.GPUEndTime(),
        }
    }

    fn block(&self) {
        self.0.waitUntilCompleted();
    }
}
