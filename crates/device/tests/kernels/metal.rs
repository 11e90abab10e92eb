//! What only the Metal kernels on the processor are asked: any order of threads gives the same bits, and mistakes
//! are found.

use std::sync::Arc;

use metaltail_device::kernels::{HostKernels, Indexer, KernelDevice, Norm, Router, Strided, self_check};
use metaltail_device::metal::cpu::CpuLauncher;
use metaltail_device::metal::{Argument, Launch, Launcher, MetalAccelerator};
use metaltail_device::residency::{HeldWeights, Mode, Placement, Residency, Span};
use metaltail_device::sim::SimDriver;
use metaltail_kernels::{Buffer, ComputeError, Footprint};
use metaltail_quant::Format;

use crate::accelerator::chain;
use crate::attention::Case;
use crate::checks::faults;
use crate::data::{FORMATS, Numbers, product, written};
use crate::experts::Pass;
use crate::planted::{PLANTED, Planted, prefix};

pub type Device<L = CpuLauncher> = HostKernels<MetalAccelerator<L>, SimDriver>;

/// How a device of the suite is set.
#[derive(Clone, Copy)]
pub struct Setup {
    pub order: u32,
    pub threads: u32,
    /// Whether subnormals count as zeros.
    pub flush: bool,
    /// How memory is declared, where what is not cannot be read.
    pub declaring: Option<Mode>,
    pub most_groups: Option<u32>,
    pub most_scores: Option<usize>,
    /// Bytes before and behind weights.
    pub around: [usize; 2],
    /// Numbers before operands.
    pub offset: usize,
}

impl Default for Setup {
    fn default() -> Setup {
        let (declaring, most_groups, most_scores) = (None, None, None);
        Setup {
            order: 0,
            threads: 1,
            flush: false,
            declaring,
            most_groups,
            most_scores,
            around: [0, 0],
            offset: 0,
        }
    }
}

impl Setup {
    pub fn launcher(&self) -> CpuLauncher {
        let mut launcher = CpuLauncher::new(self.order, self.threads).withholding();
        if self.flush {
            launcher = launcher.flushing_subnormals();
        }
        match self.declaring {
            Some(mode) => launcher.declaring(mode),
            None => launcher,
        }
    }

    pub fn accelerator<L: Launcher>(&self, launcher: L) -> MetalAccelerator<L> {
        let [before, behind] = self.around;
        let mut accelerator = MetalAccelerator::new(launcher).with_fresh_scratch();
        accelerator = accelerator.with_placement(Placement::Apart { before, behind });
        if let Some(most) = self.most_groups {
            accelerator = accelerator.with_most_groups(most);
        }
        match self.most_scores {
            Some(most) => accelerator.with_most_scores(most),
            None => accelerator,
        }
    }

    fn host<L: Launcher<Driver = SimDriver>>(&self, accelerator: MetalAccelerator<L>) -> Device<L> {
        let [before, behind] = self.around;
        let residency = Arc::clone(accelerator.launcher().residency());
        let experts = HeldWeights::new(residency).with_placement(Placement::Apart { before, behind });
        HostKernels::new(accelerator, experts).with_offset(self.offset)
    }

    /// A device.
    pub fn device(&self) -> Device {
        self.host(self.accelerator(self.launcher()))
    }

    /// One in which other kernels stand for those that begin so.
    fn with_replaced(&self, kernels: &str, prefix: &str) -> Device {
        self.host(self.accelerator(self.launcher()).with_replaced(kernels, prefix))
    }
}

/// Scores and choice of a few rows, for comparisons of bits.
fn some_selection(device: &mut Device) -> Vec<u32> {
    let mut numbers = Numbers::new(99);
    let (queries, weights) = (numbers.floats(2 * 3 * 20), numbers.floats(6));
    let keys = numbers.floats(333 * 20);
    let indexer = Indexer { heads: 3, dim: 20, top_k: 50, keys: &keys, counts: &[332, 333] };
    device.select(&indexer, &queries, &weights).unwrap().concat()
}

/// The bits of one result of every kernel.
fn bits(device: &mut Device) -> Vec<u32> {
    let mut numbers = Numbers::new(1234);
    let mut all = Vec::new();
    for format in FORMATS {
        for width in [1, 4, 7] {
            let (m, x) = (numbers.matrix(format, 37, 530), numbers.floats(width * 530));
            all.extend(product(device, "a product", &m, &x).unwrap());
        }
    }
    for format in FORMATS {
        let (m, x) = (numbers.matrix(format, 37, 130), numbers.floats(35 * 130));
        all.extend(written("a product", 35 * 37, |out| device.gemm(m.as_ref(), &x, out)).unwrap());
    }
    for rows in [1, 3] {
        let case = Case::new([5, 33, 10, 31, 130], Format::Int4Group(64), 300, rows, true);
        all.extend(case.run(device, "attention").unwrap());
    }
    all.extend(Pass::new(5, 7, 100, 60).run(device, "experts").unwrap());
    let (x, weight) = (numbers.floats(3 * 777), numbers.floats(777));
    let norm = Norm { strided: Strided::dense(3, 777), weight: &weight, eps: 1e-6 };
    all.extend(written("a norm", x.len(), |out| device.rms_norm(&norm, &x, out)).unwrap());
    all.extend(written("a norm", x.len(), |out| device.layer_norm(&norm, &x[..777], &x, out)).unwrap());
    let router = Router {
        experts: 160,
        top_k: 8,
        softmax: true,
        bias: Some(&weight[..160]),
        groups: Some((8, 3)),
        normalise: true,
        scale: 1.5,
    };
    let routes = device.route(&router, &x[..3 * 160]).unwrap();
    all.extend(routes.weights);
    let floats = all.iter().map(|v| v.to_bits());
    floats.chain(routes.ids).chain(some_selection(device)).collect()
}

#[test]
fn the_order_of_threads_does_not_change_a_bit() {
    let forward = bits(&mut Setup::default().device());
    for (order, threads) in [(1, 1), (2, 1), (3, 2), (4, 1), (5, 2)] {
        let setup = Setup { order, threads, ..Setup::default() };
        assert!(bits(&mut setup.device()) == forward, "order {order}, {threads} threads");
    }
}

#[test]
fn neither_the_launch_nor_the_place_changes_a_bit() {
    let usual = bits(&mut Setup::default().device());
    let other = |what: &str, setup: Setup| assert!(bits(&mut setup.device()) == usual, "{what}");
    other("one threadgroup", Setup { most_groups: Some(1), ..Setup::default() });
    other("aligned weights inside a buffer", Setup { around: [4, 4], ..Setup::default() });
    other("odd addresses", Setup { around: [1, 7], ..Setup::default() });
    other("operands inside a buffer", Setup { offset: 5, ..Setup::default() });
    other("a row of scores at a time", Setup { most_scores: Some(1), ..Setup::default() });
    other("two rows of scores at a time", Setup { most_scores: Some(2 * 5 * 303 * 4), ..Setup::default() });
    let accelerator = MetalAccelerator::new(CpuLauncher::new(0, 1));
    let experts = HeldWeights::new(Arc::clone(accelerator.launcher().residency()));
    assert!(bits(&mut HostKernels::new(accelerator, experts)) == usual, "as an engine has it");
}

/// The invariant of residency, at the level of kernels: how memory is declared is no part of the arithmetic.
#[test]
fn declared_once_or_with_every_submission_the_bits_are_the_same() {
    let usual = bits(&mut Setup::default().device());
    for mode in [Mode::Set, Mode::Walk] {
        let mut device = Setup { declaring: Some(mode), ..Setup::default() }.device();
        assert!(bits(&mut device) == usual, "{mode:?}");
        let residency = Arc::clone(device.accelerator().launcher().residency());
        let (stats, counts) = (residency.stats(), device.accelerator().counts().get());
        assert!(stats.registered > 0, "{stats:?}");
        assert_eq!(stats.submissions, counts.submissions, "one a submission, not one a launch");
        assert!(counts.launches > counts.submissions && counts.barriers > 0, "{counts:?}");
        assert_eq!(mode == Mode::Set, stats.declared == 0, "{stats:?}");
        assert_eq!(mode == Mode::Set, stats.commits > 0, "{stats:?}");
        drop(device);
        let stats = residency.stats();
        assert_eq!((stats.allocations, stats.registered), (0, stats.unregistered), "all freed: {stats:?}");
    }
}

/// What a launcher does not pass on.
#[derive(Clone, Copy, PartialEq)]
enum Forgets {
    /// What kernels reach through addresses.
    Reached,
    Barriers,
    /// Where a matrix begins: the kernel goes a row too far.
    Place,
    /// And what launches touch, so that the simulated device has nothing to object to.
    BarriersAndFootprints,
}

/// A launcher that forgets a part of what it is told.
struct Forgetful {
    launcher: CpuLauncher,
    forgets: Forgets,
}

impl Launcher for Forgetful {
    type Driver = SimDriver;

    fn name(&self) -> &'static str {
        "forgetful"
    }

    fn residency(&self) -> &Arc<Residency<SimDriver>> {
        self.launcher.residency()
    }

    fn allocate(&mut self, bytes: usize) -> Result<Buffer, ComputeError> {
        self.launcher.allocate(bytes)
    }

    fn free(&mut self, buffer: Buffer) {
        self.launcher.free(buffer);
    }

    fn write(&mut self, buffer: Buffer, offset: usize, bytes: &[u8]) -> Result<(), ComputeError> {
        self.launcher.write(buffer, offset, bytes)
    }

    fn read(&mut self, buffer: Buffer, offset: usize, bytes: &mut [u8]) -> Result<(), ComputeError> {
        self.launcher.read(buffer, offset, bytes)
    }

    fn host_address(&self, span: Span) -> Option<u64> {
        self.launcher.host_address(span)
    }

    fn barrier(&mut self) {
        if matches!(self.forgets, Forgets::Reached | Forgets::Place) {
            self.launcher.barrier();
        }
    }

    fn launch(&mut self, mut launch: Launch, reached: &[Span]) -> Result<(), ComputeError> {
        if self.forgets == Forgets::BarriersAndFootprints {
            launch.footprint = Footprint::default();
        }
        if self.forgets == Forgets::Place {
            for argument in &mut launch.arguments {
                if let Argument::Bytes(0, matrix) = argument {
                    let [mut weights, mut row_bytes] = [[0; 8]; 2];
                    weights.copy_from_slice(&matrix[..8]);
                    row_bytes[..4].copy_from_slice(&matrix[28..32]);
                    let next = u64::from_le_bytes(weights) + u64::from_le_bytes(row_bytes);
                    matrix[..8].copy_from_slice(&next.to_le_bytes());
                }
            }
        }
        let reached = if self.forgets == Forgets::Reached { &[] } else { reached };
        self.launcher.launch(launch, reached)
    }

    fn submit(&mut self) -> Result<(), ComputeError> {
        self.launcher.submit()
    }

    fn wait(&mut self) -> Result<(), ComputeError> {
        self.launcher.wait()
    }
}

#[test]
fn what_is_not_declared_cannot_be_read() {
    for mode in [Mode::Set, Mode::Walk] {
        let setup = Setup { declaring: Some(mode), ..Setup::default() };
        let forgetful = Forgetful { launcher: setup.launcher(), forgets: Forgets::Reached };
        let mut device = setup.host(setup.accelerator(forgetful));
        let mut numbers = Numbers::new(3);
        let (m, x) = (numbers.matrix(Format::Int8Row, 5, 40), numbers.floats(40));
        let refused = product(&mut device, "a product", &m, &x).unwrap_err();
        assert!(refused.contains("the kernel met memory that is none of its own"), "{refused}");
        let refused = Pass::new(5, 3, 40, 20).run(&mut device, "experts").unwrap_err();
        assert!(refused.contains("the kernel met memory that is none of its own"), "{refused}");
    }
}

#[test]
fn a_row_behind_the_end_of_weights_is_not_read() {
    let setup = Setup::default();
    let forgetful = Forgetful { launcher: setup.launcher(), forgets: Forgets::Place };
    let mut device = setup.host(setup.accelerator(forgetful));
    let mut numbers = Numbers::new(3);
    let (m, x) = (numbers.matrix(Format::Int8Row, 5, 40), numbers.floats(40));
    let refused = product(&mut device, "a product", &m, &x).unwrap_err();
    assert!(refused.contains("the kernel met memory that is none of its own"), "{refused}");
}

/// Experts in memory that nobody has declared.
#[test]
fn experts_that_are_not_declared_are_refused_with_what_to_do() {
    let setup = Setup { declaring: Some(Mode::Set), ..Setup::default() };
    let accelerator = setup.accelerator(setup.launcher());
    let other = CpuLauncher::new(0, 1).declaring(Mode::Set);
    let mut device = HostKernels::new(accelerator, HeldWeights::new(Arc::clone(other.residency())));
    let refused = Pass::new(5, 3, 40, 20).run(&mut device, "experts").unwrap_err();
    assert!(refused.contains("projection of task") && refused.contains("is not declared"), "{refused}");
    assert_eq!(device.accelerator().counts().get().experts, 0);
}

/// Without barriers the simulated device refuses what depends on them, and where it is not asked, launches in another
/// order give other numbers.
#[test]
fn a_missing_barrier_is_found() {
    let run = |order: u32, forgets| {
        let setup = Setup { order, ..Setup::default() };
        chain(&mut setup.accelerator(Forgetful { launcher: setup.launcher(), forgets }))
    };
    let in_order = |order| {
        let setup = Setup { order, ..Setup::default() };
        chain(&mut setup.accelerator(setup.launcher())).unwrap()
    };
    let good = in_order(0);
    for order in [1, 2, 3] {
        assert_eq!(in_order(order), good, "with barriers any order does");
    }
    let refused = run(0, Forgets::Barriers).unwrap_err().to_string();
    assert!(refused.contains("without a barrier"), "{refused}");
    assert_eq!(run(0, Forgets::BarriersAndFootprints).unwrap(), good, "forward it goes well by luck");
    assert_ne!(run(1, Forgets::BarriersAndFootprints).unwrap(), good, "backward, and nobody objected");
}

/// What the suite first says about a device with one planted mistake, in some orders of threads and at last where
/// subnormals are flushed.
fn found(plant: &Planted, number: usize) -> Option<String> {
    let usual = Setup { most_groups: Some(3), ..Setup::default() };
    let setups =
        [usual, Setup { order: 1, ..usual }, Setup { order: 9, ..usual }, Setup { flush: true, ..usual }];
    setups.into_iter().find_map(|setup| {
        let mut wrong = setup.with_replaced(plant.kind.kernels, &prefix(number));
        faults(&mut wrong, plant.kind.claims).next()
    })
}

#[test]
fn every_planted_mistake_is_found() {
    let mut missed = Vec::new();
    for (number, plant) in PLANTED.iter().enumerate() {
        let (unit, passage, mistake) = (plant.kind.unit, plant.passage, plant.mistake);
        match found(plant, number) {
            Some(fault) => {
                assert!(!fault.contains("no such kernel"), "{unit}: {fault}");
                println!("{unit}: {mistake:?}: {fault}");
            }
            None => missed.push(format!("{unit}: {passage:?} became {mistake:?}")),
        }
    }
    assert!(missed.is_empty(), "nothing noticed:\n{}", missed.join("\n"));
}

/// What is asked of a device before it computes for a user: right kernels pass, and of each operation some mistakes are
/// noticed (those in rare values and at odd sizes are the suite's to find).
#[test]
fn the_check_before_use_passes_right_kernels_and_stops_wrong_ones() {
    let usual = Setup::default();
    let accelerator = usual.accelerator(usual.launcher());
    let residency = Arc::clone(accelerator.launcher().residency());
    self_check(accelerator, &residency).unwrap();
    let mut noticed = std::collections::BTreeMap::<&str, [usize; 2]>::new();
    for (number, plant) in PLANTED.iter().enumerate() {
        let accelerator =
            usual.accelerator(usual.launcher()).with_replaced(plant.kind.kernels, &prefix(number));
        let residency = Arc::clone(accelerator.launcher().residency());
        let counts = noticed.entry(plant.kind.claims).or_default();
        counts[1] += 1;
        if let Err(error) = self_check(accelerator, &residency) {
            assert!(!error.to_string().contains("no such kernel"), "{error}");
            counts[0] += 1;
        }
    }
    println!("{noticed:?}");
    for (claims, [found, all]) in noticed {
        assert!(3 * found >= all, "{claims}: {found} of {all}");
    }
}
