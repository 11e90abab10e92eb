//! Metal's kernels for an accelerator: launches are kept, and become one command buffer when they are handed over.

use std::sync::Arc;

use metaltail_device::metal::{self, Argument, Buffers, Launch};
use metaltail_device::residency::{Residency, Span};
use metaltail_kernels::{Buffer, ComputeError};

use crate::dispatch::{self, Dispatch, Shape};
use crate::error::MetalError;
use crate::queue::{Backend, Queue, Submitted};
use crate::times::SharedFigures;

const NAME: &str = "metal";

/// Memory of a device's own, which the host reaches while no submission uses it.
pub trait Memory: Send {
    /// Copies bytes into it.
    ///
    /// # Errors
    /// Bytes that do not fit; memory in use.
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MetalError>;

    /// Copies bytes from it.
    ///
    /// # Errors
    /// As [`Memory::write`].
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), MetalError>;
}

/// A device whose encoder takes dispatches: Metal's on a Mac, a double in tests.
pub trait LaunchBackend: Backend {
    /// Its memory.
    type Memory: Memory;

    /// Memory of zeros.
    ///
    /// # Errors
    /// No bytes, or more than there are.
    fn allocate(&self, bytes: usize) -> Result<Self::Memory, MetalError>;

    /// Adds a dispatch.
    ///
    /// # Errors
    /// A kernel that there is not, or that does not fit.
    fn dispatch(
        encoder: &mut Self::Encoder<'_>,
        dispatch: &Dispatch<'_, Self::Memory>,
    ) -> Result<(), MetalError>;

    /// What dispatches before wrote can be read by those after.
    fn barrier(encoder: &mut Self::Encoder<'_>);
}

#[derive(Debug)]
enum Step {
    Launch(Launch),
    Barrier,
}

/// [`metal::Launcher`] on a [`Queue`].
pub struct Launcher<B: LaunchBackend> {
    /// Dropped first: that waits for their ends.
    in_flight: Vec<Submitted<B>>,
    recorded: Vec<Step>,
    buffers: Buffers<B::Memory>,
    queue: Queue<B>,
}

impl<B: LaunchBackend> std::fmt::Debug for Launcher<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Launcher")
            .field("in_flight", &self.in_flight.len())
            .field("recorded", &self.recorded.len())
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}

fn failed(error: impl std::fmt::Display) -> ComputeError {
    ComputeError::Device { device: NAME, message: error.to_string() }
}

impl<B: LaunchBackend> Launcher<B> {
    /// Launches on `queue`.
    pub fn new(queue: Queue<B>) -> Launcher<B> {
        Launcher { in_flight: Vec::new(), recorded: Vec::new(), buffers: Buffers::new(NAME), queue }
    }

    /// Where the time of all submissions goes that were waited for.
    pub fn figures(&self) -> SharedFigures {
        self.queue.shared_figures()
    }

    /// Adds a launch to a command buffer.
    fn encode(
        buffers: &Buffers<B::Memory>,
        encoder: &mut B::Encoder<'_>,
        launch: &Launch,
    ) -> Result<(), MetalError> {
        let argument = |argument| {
            Ok(match argument {
                &Argument::Buffer(index, buffer, offset) => {
                    let memory = buffers.get(buffer);
                    let gone =
                        |error: ComputeError| MetalError::NotMade { what: format!("a launch: {error}") };
                    dispatch::Argument::Buffer { index, buffer: memory.map_err(gone)?, offset }
                }
                Argument::Bytes(index, bytes) => dispatch::Argument::Bytes { index: *index, bytes },
                &Argument::Threadgroup(index, len) => dispatch::Argument::Threadgroup { index, len },
            })
        };
        let arguments = launch.arguments.iter().map(argument).collect::<Result<Vec<_>, MetalError>>()?;
        let [x, y] = launch.groups;
        let shape = Shape { groups: [x, y, 1], threads: [launch.threads, 1, 1] };
        B::dispatch(encoder, &Dispatch { kernel: &launch.kernel, arguments: &arguments, shape })
    }
}

impl<B: LaunchBackend + Send + Sync> metal::Launcher for Launcher<B> {
    type Driver = B::Driver;

    fn name(&self) -> &'static str {
        NAME
    }

    fn residency(&self) -> &Arc<Residency<B::Driver>> {
        self.queue.residency()
    }

    fn allocate(&mut self, bytes: usize) -> Result<Buffer, ComputeError> {
        let memory = self.queue.backend().allocate(bytes).map_err(failed)?;
        self.buffers.insert(memory)
    }

    fn free(&mut self, buffer: Buffer) {
        self.buffers.free(buffer);
    }

    fn write(&mut self, buffer: Buffer, offset: usize, bytes: &[u8]) -> Result<(), ComputeError> {
        self.buffers.idle(buffer)?.write(offset, bytes).map_err(failed)
    }

    fn read(&mut self, buffer: Buffer, offset: usize, bytes: &mut [u8]) -> Result<(), ComputeError> {
        self.buffers.idle(buffer)?.read(offset, bytes).map_err(failed)
    }

    fn host_address(&self, span: Span) -> Option<u64> {
        self.queue.addresses(&[span]).ok()?.first().copied()
    }

    fn barrier(&mut self) {
        self.recorded.push(Step::Barrier);
    }

    /// What is reached needs no word: all that is declared may be read by every submission.
    fn launch(&mut self, launch: Launch, _reached: &[Span]) -> Result<(), ComputeError> {
        self.buffers.begin_use(&launch.buffers().collect::<Vec<_>>())?;
        self.recorded.push(Step::Launch(launch));
        Ok(())
    }

    fn submit(&mut self) -> Result<(), ComputeError> {
        let steps = std::mem::take(&mut self.recorded);
        if steps.iter().all(|step| matches!(step, Step::Barrier)) {
            return Ok(());
        }
        let submitted = self.queue.submit(|encoder| {
            for step in &steps {
                match step {
                    Step::Launch(launch) => Self::encode(&self.buffers, encoder, launch)?,
                    Step::Barrier => B::barrier(encoder),
                }
            }
            Ok(())
        });
        self.in_flight.push(submitted.map_err(failed)?);
        Ok(())
    }

    fn wait(&mut self) -> Result<(), ComputeError> {
        let handed = self.submit();
        let mut outcome = Ok(());
        // All that ends is told of, and of several failures the first: those behind it follow from it.
        for mut submitted in self.in_flight.drain(..) {
            let ended = loop {
                match self.queue.finish(&mut submitted) {
                    // Whoever waited takes memory back after: it has to have ended. The system's watchdog ends what
                    // runs for ever.
                    Err(MetalError::TimedOut { .. }) => {}
                    ended => break ended,
                }
            };
            outcome = outcome.and(ended.map(drop).map_err(failed));
        }
        self.buffers.end_all();
        outcome.and(handed)
    }
}

#[cfg(target_os = "macos")]
mod on_macos {
    use super::{Dispatch, LaunchBackend, Memory, MetalError};
    use crate::dispatch::Encoder;
    use crate::{Buffer, Kernels, MetalEncoder};

    impl Memory for Buffer {
        fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MetalError> {
            Buffer::write(self, offset, bytes)
        }

        fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), MetalError> {
            Buffer::read(self, offset, bytes)
        }
    }

    impl LaunchBackend for Kernels {
        type Memory = Buffer;

        fn allocate(&self, bytes: usize) -> Result<Buffer, MetalError> {
            self.gpu().buffer(bytes)
        }

        fn dispatch(
            encoder: &mut MetalEncoder<'_>,
            dispatch: &Dispatch<'_, Buffer>,
        ) -> Result<(), MetalError> {
            Encoder::dispatch(encoder, dispatch)
        }

        fn barrier(encoder: &mut MetalEncoder<'_>) {
            Encoder::barrier(encoder);
        }
    }
}

#[cfg(test)]
mod tests;
