//! What a back end must be able to do with Metal kernels.

use crate::kernels::KernelError;

/// What a kernel gets at an index.
#[derive(Debug)]
pub enum Argument<'a, B> {
    /// `[[buffer(index)]]`: a buffer from a byte on.
    Buffer(u32, &'a B, usize),
    /// `[[buffer(index)]]`: constants, at most 4 KiB (`setBytes`).
    Bytes(u32, Vec<u8>),
    /// `[[threadgroup(index)]]`: threadgroup memory of this many bytes, a multiple of 16.
    Threadgroup(u32, usize),
}

/// One kernel with everything it needs.
#[derive(Debug)]
pub struct Launch<'a, B> {
    /// The kernel's name in the library.
    pub kernel: String,
    /// Its arguments.
    pub arguments: Vec<Argument<'a, B>>,
    /// Threadgroups in x and y.
    pub groups: [u32; 2],
    /// Threads of a threadgroup: whole SIMD groups of 32.
    pub threads: u32,
}

/// A place where Metal kernels run: an Apple GPU, or the processor in tests.
pub trait Launcher {
    /// Memory that kernels reach.
    type Buffer;

    /// Name for messages.
    fn name(&self) -> &'static str;

    /// A buffer that holds `bytes`. Its address is a multiple of 4 where its length is one, and of 16 where its length
    /// is one of 16.
    ///
    /// # Errors
    /// No memory.
    fn buffer(&mut self, bytes: &[u8]) -> Result<Self::Buffer, KernelError>;

    /// Where kernels find the buffer's first byte: what a pointer in a table of addresses holds (`gpuAddress`).
    fn address(&self, buffer: &Self::Buffer) -> u64;

    /// Where kernels find host memory that is declared to the device, if they reach it in place; its owner keeps it
    /// alive and as it is until launches that read it have ended.
    fn host_address(&self, bytes: &[u8]) -> Option<u64>;

    /// The buffer's bytes, once all launches have ended.
    ///
    /// # Errors
    /// A launch that failed.
    fn read(&mut self, buffer: &Self::Buffer) -> Result<Vec<u8>, KernelError>;

    /// Runs a kernel behind all earlier ones, whose writes it sees. `reached` are buffers that the kernel finds by an
    /// address in a table: they are not among its arguments, and a GPU has to be told of them.
    ///
    /// # Errors
    /// What the device refuses or finds wrong.
    fn launch(
        &mut self,
        launch: &Launch<'_, Self::Buffer>,
        reached: &[&Self::Buffer],
    ) -> Result<(), KernelError>;
}
