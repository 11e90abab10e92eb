//! What a back end must be able to do with Metal kernels.

use std::sync::Arc;

use metaltail_kernels::{Buffer, ComputeError, Extent, Footprint};

use crate::residency::{Residency, ResidencyDriver, Span};

/// The most bytes of [`Argument::Bytes`] (`setBytes`).
pub const MOST_BYTES: usize = 4096;

/// What a kernel gets at an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// `[[buffer(index)]]`: a buffer from a byte on.
    Buffer(u32, Buffer, usize),
    /// `[[buffer(index)]]`: constants, at most [`MOST_BYTES`].
    Bytes(u32, Vec<u8>),
    /// `[[threadgroup(index)]]`: threadgroup memory of this many bytes, a multiple of 16.
    Threadgroup(u32, usize),
}

/// One kernel with everything it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel's name in the library.
    pub kernel: String,
    /// Its arguments.
    pub arguments: Vec<Argument>,
    /// Threadgroups in x and y.
    pub groups: [u32; 2],
    /// Threads of a threadgroup: whole SIMD groups of 32.
    pub threads: u32,
    /// What it reads and writes of its buffers.
    pub footprint: Footprint,
}

impl Launch {
    /// A launch without arguments.
    pub(super) fn new(kernel: impl Into<String>, groups: [u32; 2], threads: u32) -> Launch {
        let (arguments, footprint) = (Vec::new(), Footprint::default());
        Launch { kernel: kernel.into(), arguments, groups, threads, footprint }
    }

    /// The next index of `[[buffer(…)]]`.
    fn next(&self) -> u32 {
        self.arguments.iter().map(|argument| u32::from(!matches!(argument, Argument::Threadgroup(..)))).sum()
    }

    fn bind(&mut self, extent: Extent) {
        let index = self.next();
        self.arguments.push(Argument::Buffer(index, extent.buffer, extent.start * 4));
    }

    /// The next buffer, of which `extent` is read.
    pub(super) fn reads(mut self, extent: Extent) -> Launch {
        self.bind(extent);
        self.footprint.reads.push(extent);
        self
    }

    /// The next buffer, of which `extent` is written.
    pub(super) fn writes(mut self, extent: Extent) -> Launch {
        self.bind(extent);
        self.footprint.writes.push(extent);
        self
    }

    /// The next buffer, of which `extent` is read and written.
    pub(super) fn changes(mut self, extent: Extent) -> Launch {
        self.bind(extent);
        self.footprint.changes.push(extent);
        self
    }

    /// A buffer that the kernel does not touch: something has to be bound.
    pub(super) fn stand_in(mut self, buffer: Buffer) -> Launch {
        self.bind(Extent { buffer, start: 0, end: 0 });
        self
    }

    /// Constants at the next index of buffers.
    pub(super) fn given(mut self, bytes: Vec<u8>) -> Launch {
        debug_assert!(bytes.len() <= MOST_BYTES, "{}: {} bytes", self.kernel, bytes.len());
        let index = self.next();
        self.arguments.push(Argument::Bytes(index, bytes));
        self
    }

    /// Threadgroup memory at the next index of it.
    pub(super) fn threadgroup(mut self, bytes: usize) -> Launch {
        let index = self.arguments.len() as u32 - self.next();
        self.arguments.push(Argument::Threadgroup(index, bytes));
        self
    }

    /// The buffers among its arguments.
    pub fn buffers(&self) -> impl Iterator<Item = Buffer> {
        self.arguments.iter().filter_map(|argument| match argument {
            Argument::Buffer(_, buffer, _) => Some(*buffer),
            Argument::Bytes(..) | Argument::Threadgroup(..) => None,
        })
    }
}

/// A place where Metal kernels run: an Apple GPU, or the processor in tests.
///
/// Launches are recorded, handed over by `submit`, and have ended after `wait`. Until then the buffers that they name
/// are in use, and so is the host memory that they reach.
pub trait Launcher: Send {
    /// To what host memory is declared.
    type Driver: ResidencyDriver;

    /// Name for messages.
    fn name(&self) -> &'static str;

    /// What host memory is declared.
    fn residency(&self) -> &Arc<Residency<Self::Driver>>;

    /// Memory of the device, all zero. Its address is a multiple of 4 where its length is one, and of 16 where its length
    /// is one of 16.
    ///
    /// # Errors
    /// No memory.
    fn allocate(&mut self, bytes: usize) -> Result<Buffer, ComputeError>;

    /// Gives memory up. It is freed when nothing uses it any more.
    fn free(&mut self, buffer: Buffer);

    /// Copies bytes into memory.
    ///
    /// # Errors
    /// Memory that there is not, that is smaller, or that is in use.
    fn write(&mut self, buffer: Buffer, offset: usize, bytes: &[u8]) -> Result<(), ComputeError>;

    /// Copies bytes from memory.
    ///
    /// # Errors
    /// As [`Launcher::write`].
    fn read(&mut self, buffer: Buffer, offset: usize, bytes: &mut [u8]) -> Result<(), ComputeError>;

    /// Where kernels find host memory: what a pointer in a table of addresses holds. None where it is not declared.
    fn host_address(&self, span: Span) -> Option<u64>;

    /// What launches before wrote can be read, and what they read can be written, by those after. Without it the
    /// launches of a submission may run in any order, and side by side.
    fn barrier(&mut self);

    /// Records a kernel. `reached` is host memory that it finds by an address in a table: none of its arguments.
    ///
    /// # Errors
    /// A buffer that there is not. Nothing is recorded then.
    fn launch(&mut self, launch: Launch, reached: &[Span]) -> Result<(), ComputeError>;

    /// Hands over what was recorded, behind all that was handed over before.
    ///
    /// # Errors
    /// What the device refuses; nothing of what was recorded runs then.
    fn submit(&mut self) -> Result<(), ComputeError>;

    /// Hands over what was recorded and waits until all has ended. The wait is passive.
    ///
    /// # Errors
    /// The first failure. Nothing is in use afterwards, whatever happened.
    fn wait(&mut self) -> Result<(), ComputeError>;
}
