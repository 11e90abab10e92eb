//! Dispatches become a command buffer.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_metal::{
    MTLBarrierScope, MTLCommandBuffer, MTLCommandEncoder, MTLCommandQueue, MTLComputeCommandEncoder,
    MTLDispatchType, MTLResourceUsage, MTLSize,
};

use crate::buffer::{Buffer, RawBuffer};
use crate::command::MetalCommand;
use crate::dispatch::{Argument, Dispatch, Encoder, KernelLimits};
use crate::driver::MetalDriver;
use crate::error::MetalError;
use crate::health::{Health, Use};
use crate::in_flight::InFlight;
use crate::kernels::Kernels;
use crate::queue::Backend;
use metaltail_device::residency::Span;

/// An [`Encoder`] that fills one command buffer. Dropped before it is handed over, nothing of it runs.
pub struct MetalEncoder<'k> {
    kernels: &'k Kernels,
    command: Retained<ProtocolObject<dyn MTLCommandBuffer>>,
    encoder: Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>,
    uses: Vec<Use>,
    dispatches: u64,
    began: Instant,
    ended: bool,
}

impl std::fmt::Debug for MetalEncoder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MetalEncoder").field("dispatches", &self.dispatches).finish_non_exhaustive()
    }
}

fn size([x, y, z]: [u32; 3]) -> MTLSize {
    MTLSize { width: x as usize, height: y as usize, depth: z as usize }
}

impl<'k> MetalEncoder<'k> {
    /// A command buffer for which `declared` is declared, as memory that is read.
    pub(crate) fn begin(
        kernels: &'k Kernels,
        declared: &[Retained<RawBuffer>],
    ) -> Result<MetalEncoder<'k>, MetalError> {
        let began = Instant::now();
        // Both objects would otherwise stay in a pool that a Rust thread does not have.
        autoreleasepool(|_| {
            let not_made = |what: &str| MetalError::NotMade { what: what.into() };
            let command =
                kernels.gpu().queue().commandBuffer().ok_or_else(|| not_made("a command buffer"))?;
            // Experts do not wait for one another; what must wait has a barrier.
            let encoder = command.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent);
            let encoder = encoder.ok_or_else(|| not_made("a compute encoder"))?;
            for buffer in declared {
                encoder.useResource_usage(ProtocolObject::from_ref(&**buffer), MTLResourceUsage::Read);
            }
            Ok(MetalEncoder {
                kernels,
                command,
                encoder,
                uses: Vec::new(),
                dispatches: 0,
                began,
                ended: false,
            })
        })
    }

    /// What a kernel can have, for the choice of a grid.
    ///
    /// # Errors
    /// A name that there is not; a kernel that the device cannot run.
    pub fn limits(&self, kernel: &str) -> Result<KernelLimits, MetalError> {
        self.kernels.limits(kernel)
    }

    fn commit(mut self) -> InFlight<MetalCommand> {
        self.end();
        let (uses, encode) = (std::mem::take(&mut self.uses), self.began.elapsed());
        let command = MetalCommand::new(self.command.clone());
        InFlight::start(command, Arc::clone(self.kernels.gpu().health()), uses, self.dispatches, encode)
    }

    fn end(&mut self) {
        if !std::mem::replace(&mut self.ended, true) {
            self.encoder.endEncoding();
        }
    }

    fn bind(&mut self, argument: &Argument<'_, Buffer>) {
        match *argument {
            Argument::Buffer { index, buffer, offset } => {
                // SAFETY: index and offset were checked; the use keeps the host away until the end is noticed,
                // and the command buffer keeps the memory.
                unsafe { self.encoder.setBuffer_offset_atIndex(Some(buffer.raw()), offset, index as usize) };
                self.uses.push(buffer.in_use());
            }
            Argument::Bytes { index, bytes } => {
                let base = NonNull::from(bytes).cast();
                // SAFETY: the slice is copied before the call returns; index and length were checked.
                unsafe { self.encoder.setBytes_length_atIndex(base, bytes.len(), index as usize) };
            }
            Argument::Threadgroup { index, len } => {
                // SAFETY: index and length were checked.
                unsafe { self.encoder.setThreadgroupMemoryLength_atIndex(len, index as usize) };
            }
        }
    }
}

impl Backend for Kernels {
    type Driver = MetalDriver;
    type Encoder<'a> = MetalEncoder<'a>;
    type Command = MetalCommand;

    fn health(&self) -> &Health {
        self.gpu().health()
    }

    fn is_capturing(&self) -> bool {
        self.gpu().is_capturing()
    }

    fn address(driver: &MetalDriver, span: Span) -> Option<u64> {
        driver.address(span)
    }

    fn begin(&self, driver: &mut MetalDriver) -> Result<MetalEncoder<'_>, MetalError> {
        MetalEncoder::begin(self, &driver.take_declared())
    }

    fn commit(&self, encoder: MetalEncoder<'_>) -> InFlight<MetalCommand> {
        encoder.commit()
    }
}

impl Encoder for MetalEncoder<'_> {
    type Buffer = Buffer;

    fn dispatch(&mut self, dispatch: &Dispatch<'_, Buffer>) -> Result<(), MetalError> {
        let pipeline = self.kernels.pipeline(dispatch.kernel)?;
        dispatch.check(&pipeline.limits, &self.kernels.gpu().facts().groups, Buffer::len)?;
        self.encoder.setComputePipelineState(&pipeline.state);
        dispatch.arguments.iter().for_each(|argument| self.bind(argument));
        let (groups, threads) = (size(dispatch.shape.groups), size(dispatch.shape.threads));
        self.encoder.dispatchThreadgroups_threadsPerThreadgroup(groups, threads);
        self.dispatches += 1;
        Ok(())
    }

    fn barrier(&mut self) {
        self.encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
    }
}

impl Drop for MetalEncoder<'_> {
    /// Metal ends the process where an encoder goes that was not ended.
    fn drop(&mut self) {
        self.end();
    }
}
