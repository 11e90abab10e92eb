//! Metal kernels on the processor, for tests: feature `msl-cpu`.

use std::ops::Range;
use std::sync::Arc;

use metaltail_kernels::{Buffer, ComputeError, Extent};
use metaltail_mslcpu::run::{self, RunError, Schedule, Withheld};

use super::buffers::Buffers;
use super::launch::{Argument, Launch, Launcher};
use crate::residency::{Ledger, Mode, Residency, ResidencyError, ResidencyStats, Span, Submission};
use crate::sim::{Profile, SimDriver};

const NAME: &str = "metal-on-cpu";

/// [`Launcher`] that runs the kernels on the processor and finds mistakes on the way.
///
/// Kernels run when they are waited for, not before: what the host changes too early shows. Between two barriers they
/// run in the order of the schedule: a barrier that is missing shows too, and the simulated device refuses it.
pub struct CpuLauncher {
    schedule: Schedule,
    residency: Arc<Residency<SimDriver>>,
    /// Whether host memory must be declared.
    declaring: bool,
    /// Whether declared memory is taken away from kernels that do not reach it.
    withholding: bool,
    buffers: Buffers<run::Buffer>,
    recorded: Vec<Step>,
    submitted: Vec<(Submission, Vec<Step>)>,
}

enum Step {
    Launch(Launch, Vec<Span>),
    Barrier,
}

fn failed(error: RunError) -> ComputeError {
    ComputeError::Device { device: NAME, message: error.to_string() }
}

fn refused(error: ResidencyError) -> ComputeError {
    ComputeError::Device { device: NAME, message: error.to_string() }
}

fn range(span: Span) -> Range<usize> {
    span.base..span.base.saturating_add(span.len)
}

/// A ledger over the simulated device.
fn ledger(mode: Mode) -> Arc<Residency<SimDriver>> {
    Arc::new(Residency::new(Ledger::new(SimDriver::new(Profile::m5max()), mode)))
}

impl CpuLauncher {
    /// `order`: 0 runs threads, threadgroups and launches forward, 1 backward, others shuffle with that seed. `threads`
    /// of the processor share the threadgroups. All memory of the process is taken to be declared.
    pub fn new(order: u32, threads: u32) -> CpuLauncher {
        CpuLauncher {
            schedule: Schedule { order, threads, ..Schedule::default() },
            residency: ledger(Mode::Set),
            declaring: false,
            withholding: false,
            buffers: Buffers::new(NAME),
            recorded: Vec::new(),
            submitted: Vec::new(),
        }
    }

    /// Takes subnormal floats for zeros, as many GPUs do.
    pub fn flushing_subnormals(mut self) -> CpuLauncher {
        self.schedule.flush = true;
        self
    }

    /// Holds kernels to what is declared: host memory that is not is refused, and buffers that a launch does not name
    /// are taken away while it runs. Before anything else: the ledger is another one then.
    pub fn declaring(mut self, mode: Mode) -> CpuLauncher {
        (self.residency, self.declaring) = (ledger(mode), true);
        self
    }

    /// Takes declared memory away while launches run that do not say that they reach it. For memory that no other
    /// thread uses meanwhile.
    pub fn withholding(mut self) -> CpuLauncher {
        self.withholding = true;
        self
    }

    /// The ledger's figures.
    pub fn stats(&self) -> ResidencyStats {
        self.residency.stats()
    }

    /// Buffers that there are.
    pub fn buffers(&self) -> usize {
        self.buffers.len()
    }

    /// Hands the launches to the simulated device, which refuses what a real one would not survive.
    fn check(&self, steps: &[Step]) -> Result<(), ComputeError> {
        let mut ledger = self.residency.ledger();
        let device = ledger.driver_mut();
        device.begin_submission();
        for step in steps {
            let Step::Launch(launch, reached) = step else {
                device.barrier();
                continue;
            };
            let spans = |extents: &mut dyn Iterator<Item = &Extent>| {
                extents.map(|extent| self.span(*extent)).collect::<Result<Vec<_>, _>>()
            };
            let touched = spans(&mut launch.footprint.touched())?;
            let written = spans(&mut launch.footprint.written())?;
            let weights = if self.declaring { &reached[..] } else { &[] };
            let outcome = device.dispatch(weights, &touched, &written);
            outcome.map_err(|error| failed(RunError::Kernel(format!("{}: {error}", launch.kernel))))?;
        }
        Ok(())
    }

    fn span(&self, extent: Extent) -> Result<Span, ComputeError> {
        let base = self.buffers.get(extent.buffer)?.address() as usize;
        Ok(Span { base: base + extent.start * 4, len: (extent.end - extent.start) * 4 })
    }

    /// The order in which launches between two barriers run.
    fn ordered<'a>(&self, mut launches: Vec<&'a Step>) -> Vec<&'a Step> {
        match self.schedule.order {
            0 => {}
            1 => launches.reverse(),
            seed => {
                let mut state = u64::from(seed) << 1 | 1;
                for last in (1..launches.len()).rev() {
                    state =
                        state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    launches.swap(last, (state >> 33) as usize % (last + 1));
                }
            }
        }
        launches
    }

    fn run(&self, steps: &[Step], withheld: Option<&Withheld>) -> Result<(), ComputeError> {
        for between in steps.split(|step| matches!(step, Step::Barrier)) {
            for step in self.ordered(between.iter().collect()) {
                if let Step::Launch(launch, reached) = step {
                    self.run_one(launch, reached, withheld)?;
                }
            }
        }
        Ok(())
    }

    fn run_one(
        &self,
        launch: &Launch,
        reached: &[Span],
        withheld: Option<&Withheld>,
    ) -> Result<(), ComputeError> {
        let Some(withheld) = withheld else { return self.dispatch(launch) };
        let mut lent: Vec<Range<usize>> = {
            let ledger = self.residency.ledger();
            reached.iter().filter_map(|span| ledger.find(*span)).map(range).collect()
        };
        lent.sort_unstable_by_key(|range| range.start);
        lent.dedup();
        withheld.lend(&lent, || self.dispatch(launch)).map_err(failed)?
    }

    fn dispatch(&self, launch: &Launch) -> Result<(), ComputeError> {
        let argument = |argument| {
            Ok(match argument {
                &Argument::Buffer(index, buffer, offset) => {
                    run::Argument::Buffer(index, self.buffers.get(buffer)?, offset)
                }
                Argument::Bytes(index, bytes) => run::Argument::Bytes(*index, bytes),
                &Argument::Threadgroup(index, length) => run::Argument::Threadgroup(index, length),
            })
        };
        let arguments = launch.arguments.iter().map(argument).collect::<Result<Vec<_>, ComputeError>>()?;
        let open = |open: bool| {
            let mut bound = launch.buffers().filter(|_| self.declaring);
            bound.try_for_each(|buffer| self.buffers.get(buffer)?.set_open(open).map_err(failed))
        };
        open(true)?;
        let ([x, y], threads) = (launch.groups, [launch.threads, 1, 1]);
        let outcome = run::dispatch(&launch.kernel, &arguments, [x, y, 1], threads, self.schedule);
        open(false)?;
        outcome.map(drop).map_err(failed)
    }

    /// Runs what was handed over.
    fn run_all(&self) -> Result<(), ComputeError> {
        let withheld = match self.withholding {
            true => {
                let declared = self.residency.ledger().spans().map(range).collect();
                Some(Withheld::new(declared).map_err(failed)?)
            }
            false => None,
        };
        self.submitted.iter().try_for_each(|(_, steps)| self.run(steps, withheld.as_ref()))
    }

    /// Tells the ledger that all has ended.
    fn complete(&mut self) -> Result<(), ComputeError> {
        let ended = self.submitted.drain(..).map(|(submission, _)| self.residency.complete(submission));
        let outcome = ended.fold(Ok(()), Result::and).map_err(refused);
        self.buffers.end_all();
        outcome
    }
}

impl Launcher for CpuLauncher {
    type Driver = SimDriver;

    fn name(&self) -> &'static str {
        NAME
    }

    fn residency(&self) -> &Arc<Residency<SimDriver>> {
        &self.residency
    }

    fn allocate(&mut self, bytes: usize) -> Result<Buffer, ComputeError> {
        let buffer = run::Buffer::new(bytes).map_err(failed)?;
        buffer.set_open(!self.declaring).map_err(failed)?;
        self.buffers.insert(buffer)
    }

    fn free(&mut self, buffer: Buffer) {
        self.buffers.free(buffer);
    }

    fn write(&mut self, buffer: Buffer, offset: usize, bytes: &[u8]) -> Result<(), ComputeError> {
        self.buffers.idle(buffer)?.write_at(offset, bytes).map_err(failed)
    }

    fn read(&mut self, buffer: Buffer, offset: usize, bytes: &mut [u8]) -> Result<(), ComputeError> {
        self.buffers.idle(buffer)?.read_at(offset, bytes).map_err(failed)
    }

    fn host_address(&self, span: Span) -> Option<u64> {
        // A process has one address space.
        let known = !self.declaring || self.residency.ledger().find(span).is_some();
        known.then_some(span.base as u64)
    }

    fn barrier(&mut self) {
        self.recorded.push(Step::Barrier);
    }

    fn launch(&mut self, launch: Launch, reached: &[Span]) -> Result<(), ComputeError> {
        self.buffers.begin_use(&launch.buffers().collect::<Vec<_>>())?;
        self.recorded.push(Step::Launch(launch, reached.to_vec()));
        Ok(())
    }

    fn submit(&mut self) -> Result<(), ComputeError> {
        let steps = std::mem::take(&mut self.recorded);
        if steps.iter().all(|step| matches!(step, Step::Barrier)) {
            return Ok(());
        }
        let submission = self.residency.submit().map_err(refused)?;
        if let Err(error) = self.check(&steps) {
            self.residency.complete(submission).map_err(refused)?;
            return Err(error);
        }
        self.submitted.push((submission, steps));
        Ok(())
    }

    fn wait(&mut self) -> Result<(), ComputeError> {
        let handed = self.submit();
        let ran = self.run_all();
        let ended = self.complete();
        ran.and(handed).and(ended)
    }
}

impl Drop for CpuLauncher {
    /// What nobody waits for is not run, and memory is given back.
    fn drop(&mut self) {
        let _ = self.complete();
    }
}
