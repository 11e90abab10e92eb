//! Metal kernels on the processor, for tests: feature `msl-cpu`.

use metaltail_mslcpu::run::{self, Buffer, RunError, Schedule};

use super::launch::{Argument, Launch, Launcher};
use crate::kernels::KernelError;

/// [`Launcher`] that runs the kernels on the processor and finds mistakes on the way.
pub struct CpuLauncher {
    schedule: Schedule,
}

impl CpuLauncher {
    /// `order`: 0 runs threads and threadgroups forward, 1 backward, others shuffle with that seed. `threads` of the
    /// processor share the threadgroups.
    pub fn new(order: u32, threads: u32) -> CpuLauncher {
        CpuLauncher { schedule: Schedule { order, threads, strict: true } }
    }
}

fn failed(error: RunError) -> KernelError {
    KernelError::Device { device: "metal-on-cpu", message: error.to_string() }
}

impl Launcher for CpuLauncher {
    type Buffer = Buffer;

    fn name(&self) -> &'static str {
        "metal-on-cpu"
    }

    fn buffer(&mut self, bytes: &[u8]) -> Result<Buffer, KernelError> {
        Buffer::of(bytes).map_err(failed)
    }

    fn address(&self, buffer: &Buffer) -> u64 {
        buffer.address()
    }

    fn read(&mut self, buffer: &Buffer) -> Result<Vec<u8>, KernelError> {
        Ok(buffer.read())
    }

    fn launch(&mut self, launch: &Launch<'_, Buffer>, _reached: &[&Buffer]) -> Result<(), KernelError> {
        let arguments: Vec<run::Argument<'_>> = launch
            .arguments
            .iter()
            .map(|argument| match argument {
                Argument::Buffer(index, buffer, offset) => run::Argument::Buffer(*index, buffer, *offset),
                Argument::Bytes(index, bytes) => run::Argument::Bytes(*index, bytes),
                Argument::Threadgroup(index, length) => run::Argument::Threadgroup(*index, *length),
            })
            .collect();
        let [x, y] = launch.groups;
        run::dispatch(&launch.kernel, &arguments, [x, y, 1], [launch.threads, 1, 1], self.schedule)
            .map_err(failed)?;
        Ok(())
    }
}
