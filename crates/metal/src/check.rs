//! A check of a device by whoever has one: does memory that is declared once reach kernels through addresses, and
//! what does declaring it with each submission cost instead?
//!
//! It goes the engine's way – mappings as the expert store makes them, the residency ledger, a command buffer with
//! a barrier – with two small kernels, and compares every number with the processor's. It needs no model.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memmap2::{MmapMut, MmapOptions};
use metaltail_device::kernels::self_check;
use metaltail_device::metal::Launcher as _;
use metaltail_device::residency::{Ledger, Mode, Residency, ResidencyStats, Span};
use metaltail_kernels::ComputeError;

use crate::MetalQueue;
use crate::buffer::Buffer;
use crate::dispatch::{Argument, Dispatch, Encoder, Shape};
use crate::driver::MetalDriver;
use crate::error::MetalError;
use crate::gpu::Gpu;
use crate::kernels::{Kernels, MathMode, Source};
use crate::times::Figures;

/// The kernels of the check.
const SOURCE: Source<'static> = Source { name: "check.metal", text: include_str!("../kernels/check.metal") };

/// What a check failed at.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// Metal refused or failed.
    #[error(transparent)]
    Metal(#[from] MetalError),
    /// The system gave no memory.
    #[error("the system gave no mapping of {bytes} bytes: {source}")]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// What it said.
        source: std::io::Error,
    },
    /// The accelerator refused or failed.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// The GPU read other numbers than the processor wrote.
    #[error("chunk {chunk}: the GPU says {got:#x}, the processor {wanted:#x}")]
    Differs {
        /// Number of the chunk.
        chunk: usize,
        /// The GPU's number.
        got: u32,
        /// The processor's.
        wanted: u32,
    },
    /// Something that was to be refused was not, or the other way round.
    #[error("{0}")]
    Unexpected(String),
}

/// How large a check is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckSize {
    /// Chunks of memory, each one allocation.
    pub chunks: usize,
    /// Bytes of each; a multiple of 4.
    pub bytes: usize,
    /// Submissions.
    pub submissions: usize,
}

/// What a check found.
#[derive(Clone, Debug)]
pub struct CheckRow {
    /// How memory was declared in the end: not as asked where there are no sets.
    pub mode: Mode,
    /// Its size.
    pub size: CheckSize,
    /// Times of the submissions.
    pub figures: Figures,
    /// The ledger's figures.
    pub residency: ResidencyStats,
    /// Bytes held in the device's account.
    pub held: u64,
    /// The same in Metal's own count.
    pub allocated: u64,
}

impl CheckRow {
    /// Heads of the columns of [`CheckRow::line`].
    pub const HEAD: &'static str = "mode chunks  MiB each  declared/submit  encode us  sched us  wall us   gpu us  stall us  flush us  MiB held  MiB Metal";

    /// The row as a line; times are means over the submissions, `flush` a sum.
    pub fn line(&self) -> String {
        let n = self.figures.submissions.max(1) as f64;
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let mean = |time: Duration| time.as_secs_f64() * 1e6 / n;
        let Figures { encode, schedule, wall, gpu, stall, .. } = self.figures;
        format!(
            "{:4} {:6} {:9.2} {:16.1} {:10.1} {:9.1} {:8.1} {:8.1} {:9.1} {:9.1} {:9.2} {:10.2}",
            self.mode.name(),
            self.size.chunks,
            mib(self.size.bytes as f64),
            self.residency.declared_per_submit().unwrap_or(0.0),
            mean(encode),
            mean(schedule),
            mean(wall),
            mean(gpu),
            mean(stall),
            self.residency.flush.as_secs_f64() * 1e6,
            mib(self.held as f64),
            mib(self.allocated as f64),
        )
    }
}

/// The words of a chunk: another sequence for each.
fn fill(map: &mut MmapMut, chunk: usize) -> u32 {
    let mut word = chunk as u32 ^ 0x9E37_79B9;
    let mut sum = 0u32;
    for bytes in map.as_chunks_mut::<4>().0 {
        word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *bytes = word.to_le_bytes();
        sum = sum.wrapping_add(word);
    }
    sum
}

fn map(bytes: usize) -> Result<MmapMut, CheckError> {
    let map = MmapOptions::new().len(bytes).no_reserve_swap().map_anon();
    map.map_err(|source| CheckError::Map { bytes, source })
}

fn span(map: &MmapMut) -> Span {
    Span { base: map.as_ptr().expose_provenance(), len: map.len() }
}

/// Everything that a check runs on. Fields drop in order: what reads memory first, the memory last.
struct Bench {
    sums: Buffer,
    doubled: Buffer,
    table: Buffer,
    queue: MetalQueue,
    chunks: Vec<MmapMut>,
    wanted: Vec<u32>,
}

impl Bench {
    fn new(gpu: &Arc<Gpu>, mode: Mode, size: CheckSize) -> Result<Bench, CheckError> {
        // SAFETY: the kernels read the chunks of the table and write `sums` and `doubled`, all of which `run` sizes
        // by the number of chunks; no other dispatch of them is made.
        let kernels = unsafe { Kernels::compile(gpu, &[SOURCE], MathMode::Safe)? };
        // SAFETY: what is registered are the mappings of this `Bench`, which go after the ledger.
        let driver = unsafe { MetalDriver::new(Arc::clone(gpu)) };
        let queue = MetalQueue::new(kernels, Arc::new(Residency::new(Ledger::new(driver, mode))));
        let (words, entries) = (size.chunks.saturating_mul(4), size.chunks.saturating_mul(16));
        let (sums, doubled, table) = (gpu.buffer(words)?, gpu.buffer(words)?, gpu.buffer(entries)?);
        let mut bench = Bench { sums, doubled, table, queue, chunks: Vec::new(), wanted: Vec::new() };
        for chunk in 0..size.chunks {
            let mut memory = map(size.bytes)?;
            bench.wanted.push(fill(&mut memory, chunk));
            bench.chunks.push(memory);
            let last = bench.chunks.last().map(span);
            last.map_or(Ok(()), |span| bench.queue.residency().register(span)).map_err(MetalError::from)?;
        }
        bench.fill_table()?;
        Ok(bench)
    }

    fn fill_table(&mut self) -> Result<(), CheckError> {
        let spans: Vec<Span> = self.chunks.iter().map(span).collect();
        let addresses = self.queue.addresses(&spans)?;
        let entries = addresses.iter().zip(&spans);
        let bytes: Vec<u8> = entries
            .flat_map(|(at, span)| [at.to_le_bytes(), (span.len as u64 / 4).to_le_bytes()].concat())
            .collect();
        Ok(self.table.write(0, &bytes)?)
    }

    fn run(&self) -> Result<(), CheckError> {
        let chunks = self.chunks.len() as u32;
        let parameters = chunks.to_le_bytes();
        let mut submitted = self.queue.submit(|encoder| {
            let limits = encoder.limits("check_sums")?;
            let shape = Shape::rows(chunks as usize, 1, 4, &limits, 1024);
            let arguments = [
                Argument::Buffer { index: 0, buffer: &self.table, offset: 0 },
                Argument::Buffer { index: 1, buffer: &self.sums, offset: 0 },
                Argument::Bytes { index: 2, bytes: &parameters },
            ];
            encoder.dispatch(&Dispatch { kernel: "check_sums", arguments: &arguments, shape })?;
            encoder.barrier();
            let width = encoder.limits("check_doubled")?.width.max(1) as u32;
            let shape = Shape { groups: [chunks.div_ceil(width), 1, 1], threads: [width, 1, 1] };
            let arguments = [
                Argument::Buffer { index: 0, buffer: &self.sums, offset: 0 },
                Argument::Buffer { index: 1, buffer: &self.doubled, offset: 0 },
                Argument::Bytes { index: 2, bytes: &parameters },
            ];
            encoder.dispatch(&Dispatch { kernel: "check_doubled", arguments: &arguments, shape })
        })?;
        self.queue.finish(&mut submitted)?;
        Ok(())
    }

    fn compare(&self) -> Result<(), CheckError> {
        let mut bytes = vec![0; self.doubled.len()];
        self.doubled.read(0, &mut bytes)?;
        for (chunk, (got, sum)) in bytes.as_chunks::<4>().0.iter().zip(&self.wanted).enumerate() {
            let (got, wanted) = (u32::from_le_bytes(*got), sum.wrapping_mul(2));
            if got != wanted {
                return Err(CheckError::Differs { chunk, got, wanted });
            }
        }
        Ok(())
    }

    /// A loader overwrites a chunk between submissions, and one leaves: the rest is read as before.
    fn change(&mut self) -> Result<(), CheckError> {
        if let Some(first) = self.chunks.first_mut() {
            self.wanted[0] = fill(first, usize::MAX);
        }
        self.run()?;
        self.compare()?;
        if self.chunks.len() > 1
            && let Some(last) = self.chunks.last().map(span)
        {
            self.queue.residency().unregister(last).map_err(MetalError::from)?;
            self.chunks.pop();
            self.wanted.pop();
            if self.queue.addresses(&[last]).is_ok() {
                return Err(CheckError::Unexpected("memory that was removed still has an address".into()));
            }
            self.run()?;
            self.compare()?;
        }
        Ok(())
    }
}

impl Drop for Bench {
    /// Where submissions have ended, memory may leave; fields drop after.
    fn drop(&mut self) {
        for chunk in &self.chunks {
            let _ = self.queue.residency().unregister(span(chunk));
        }
    }
}

/// Runs a check of a size: every submission reads all chunks, all numbers are compared, a chunk is overwritten, one
/// is removed.
///
/// # Errors
/// What Metal refuses, and numbers that differ.
pub fn run(gpu: &Arc<Gpu>, mode: Mode, size: CheckSize) -> Result<CheckRow, CheckError> {
    let mut bench = Bench::new(gpu, mode, size)?;
    for _ in 0..size.submissions {
        bench.run()?;
        bench.compare()?;
    }
    let (figures, residency) = (bench.queue.figures(), bench.queue.residency().stats());
    let mode = bench.queue.residency().ledger().mode();
    let (held, allocated) = (gpu.room().held(), gpu.allocated());
    bench.change()?;
    Ok(CheckRow { mode, size, figures, residency, held, allocated })
}

/// Compiles the engine's own kernels and compares a few numbers of each operation with the processor's. How long the
/// compiler took.
///
/// # Errors
/// What Metal refuses, and numbers that differ.
pub fn kernels(gpu: &Arc<Gpu>, mode: Mode) -> Result<Duration, CheckError> {
    let began = Instant::now();
    let accelerator = gpu.bare_accelerator(mode)?;
    let compiled = began.elapsed();
    let residency = Arc::clone(accelerator.launcher().residency());
    drop(self_check(accelerator, &residency)?);
    Ok(compiled)
}
