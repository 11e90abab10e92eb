//! What only the Metal kernels on the processor are asked: any order of threads gives the same bits, and mistakes
//! are found.

use metaltail_device::kernels::{Indexer, KernelDevice, KernelError, Router};
use metaltail_device::metal::cpu::{CpuBuffer, CpuLauncher};
use metaltail_device::metal::{Launch, Launcher, MetalKernels};
use metaltail_device::residency::Mode;
use metaltail_quant::Format;

use crate::attention::Case;
use crate::data::{FORMATS, Numbers, product, written};
use crate::experts::Pass;
use crate::faults;
use crate::planted::{PLANTED, Planted, prefix};

pub type Device = MetalKernels<CpuLauncher>;

pub fn device(order: u32, threads: u32) -> Device {
    MetalKernels::new(CpuLauncher::new(order, threads))
}

/// As [`device`], where subnormals count as zeros.
pub fn flushing() -> Device {
    MetalKernels::new(CpuLauncher::new(0, 1).flushing_subnormals())
}

/// As [`device`], where memory that is not declared cannot be read.
pub fn declaring(mode: Mode) -> Device {
    MetalKernels::new(CpuLauncher::new(0, 1).declaring(mode))
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
    all.extend(written("a norm", x.len(), |out| device.rms_norm(&x, &weight, 1e-6, out)).unwrap());
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
    let forward = bits(&mut device(0, 1));
    for (order, threads) in [(1, 1), (2, 1), (3, 2), (4, 1), (5, 2)] {
        assert!(bits(&mut device(order, threads)) == forward, "order {order}, {threads} threads");
    }
}

#[test]
fn neither_the_launch_nor_the_address_changes_a_bit() {
    let usual = bits(&mut device(0, 1));
    assert!(bits(&mut device(0, 1).with_most_groups(1)) == usual, "one threadgroup");
    assert!(bits(&mut device(0, 1).with_weights_between(4, 4)) == usual, "aligned weights inside a buffer");
    assert!(bits(&mut device(0, 1).with_weights_between(1, 7)) == usual, "odd addresses");
    assert!(bits(&mut device(0, 1).with_weights_in_place()) == usual, "in the caller's memory");
}

/// The invariant of residency, at the level of kernels: how memory is declared is no part of the arithmetic.
#[test]
fn declared_once_or_with_every_launch_the_bits_are_the_same() {
    let usual = bits(&mut device(0, 1));
    for mode in [Mode::Set, Mode::Walk] {
        let mut device = declaring(mode);
        assert!(bits(&mut device) == usual, "{mode:?}");
        let stats = device.launcher().residency().unwrap();
        assert!(stats.submissions > 0 && stats.registered > 0, "{stats:?}");
        assert_eq!(mode == Mode::Set, stats.declared == 0, "{stats:?}");
        assert_eq!(mode == Mode::Set, stats.commits > 0, "{stats:?}");
        assert_eq!((stats.allocations, stats.registered), (0, stats.unregistered), "all freed: {stats:?}");
    }
}

/// A launcher that tells its device nothing of what kernels reach through addresses.
struct Forgetful(CpuLauncher);

impl Launcher for Forgetful {
    type Buffer = CpuBuffer;

    fn name(&self) -> &'static str {
        "forgetful"
    }

    fn buffer(&mut self, bytes: &[u8]) -> Result<CpuBuffer, KernelError> {
        self.0.buffer(bytes)
    }

    fn address(&self, buffer: &CpuBuffer) -> u64 {
        self.0.address(buffer)
    }

    fn host_address(&self, bytes: &[u8]) -> Option<u64> {
        self.0.host_address(bytes)
    }

    fn read(&mut self, buffer: &CpuBuffer) -> Result<Vec<u8>, KernelError> {
        self.0.read(buffer)
    }

    fn launch(&mut self, launch: &Launch<'_, CpuBuffer>, _: &[&CpuBuffer]) -> Result<(), KernelError> {
        self.0.launch(launch, &[])
    }
}

#[test]
fn what_is_not_declared_cannot_be_read() {
    for mode in [Mode::Set, Mode::Walk] {
        let mut device = MetalKernels::new(Forgetful(CpuLauncher::new(0, 1).declaring(mode)));
        let mut numbers = Numbers::new(3);
        let (m, x) = (numbers.matrix(Format::Int8Row, 5, 40), numbers.floats(40));
        let refused = product(&mut device, "a product", &m, &x).unwrap_err();
        assert!(refused.contains("the kernel met memory that is none of its own"), "{refused}");
        let refused = Pass::new(5, 3, 40, 20).run(&mut device, "experts").unwrap_err();
        assert!(refused.contains("the kernel met memory that is none of its own"), "{refused}");
    }
}

/// What the suite first says about a device with one planted mistake, in some orders of threads and at last where
/// subnormals are flushed.
fn found(plant: &Planted, number: usize) -> Option<String> {
    let devices = [|| device(0, 1), || device(1, 1), || device(9, 1), flushing];
    devices.into_iter().find_map(|device| {
        let mut wrong = device().with_most_groups(3).with_replaced(plant.kind.kernels, &prefix(number));
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
