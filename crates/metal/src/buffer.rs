//! Memory that both sides write and read.

use std::ptr;

use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLBuffer, MTLDevice, MTLResourceOptions};

use crate::error::MetalError;
use crate::gpu::Gpu;
use crate::health::{Use, Uses};
use crate::room::Held;

pub(crate) type RawBuffer = ProtocolObject<dyn MTLBuffer>;

/// Memory of Metal's own, shared by processor and GPU. Metal tracks hazards in it: submissions that write it run in
/// the order in which they were handed over. It can be sent to another thread and not be used by two.
pub struct Buffer {
    raw: Retained<RawBuffer>,
    len: usize,
    uses: Uses,
    _held: Held,
}

// SAFETY: Metal's buffers belong to no thread; reference counts are atomic, and length, contents and address
// never change. Without `Sync`, a look at `uses` and the copy after it have no encoding between them.
unsafe impl Send for Buffer {}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Buffer {
    pub(crate) fn new(gpu: &Gpu, len: usize) -> Result<Buffer, MetalError> {
        let limit = usize::try_from(gpu.facts().buffer).unwrap_or(usize::MAX);
        if len == 0 || len > limit {
            return Err(MetalError::BufferSize { wanted: len, limit });
        }
        let held = gpu.room().hold(len as u64)?;
        let raw = gpu.device().newBufferWithLength_options(len, MTLResourceOptions::StorageModeShared);
        let raw = raw.ok_or_else(|| MetalError::NotMade { what: format!("a buffer of {len} bytes") })?;
        let buffer = Buffer { raw, len, uses: Uses::default(), _held: held };
        // SAFETY: `len` bytes begin at `contents`, and nobody else knows them yet.
        unsafe { ptr::write_bytes(buffer.base(), 0, len) };
        Ok(buffer)
    }

    /// Bytes of it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: an empty one is not made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where a kernel finds its first byte.
    pub fn address(&self) -> u64 {
        self.raw.gpuAddress()
    }

    /// Copies `bytes` into it, from byte `offset` on.
    ///
    /// # Errors
    /// Bytes that do not fit; [`MetalError::InUse`] while a submission may read or write it.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MetalError> {
        let at = self.place(offset, bytes.len())?;
        // SAFETY: the range lies in the buffer by `place`; no submission uses it, and the borrow of `self` is exclusive.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        Ok(())
    }

    /// Copies from byte `offset` on into `bytes`.
    ///
    /// # Errors
    /// As [`Buffer::write`].
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), MetalError> {
        let at = self.place(offset, bytes.len())?;
        // SAFETY: the range lies in the buffer by `place`; no submission uses it, and none can begin to during
        // the copy, since that would take this thread.
        unsafe { ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Address of a range that may be copied now.
    fn place(&self, offset: usize, len: usize) -> Result<*mut u8, MetalError> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(MetalError::OutOfBuffer { offset, len, size: self.len });
        }
        self.uses.none()?;
        Ok(self.base().wrapping_add(offset))
    }

    fn base(&self) -> *mut u8 {
        self.raw.contents().cast().as_ptr()
    }

    pub(crate) fn raw(&self) -> &RawBuffer {
        &self.raw
    }

    pub(crate) fn in_use(&self) -> Use {
        self.uses.begin()
    }
}
