//! What only the Metal kernels on the processor are asked: any order of threads gives the same bits, and mistakes
//! are found.

use metaltail_device::kernels::{Indexer, KernelDevice, Router};
use metaltail_device::metal::MetalKernels;
use metaltail_device::metal::cpu::CpuLauncher;
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
}

/// What the suite first says about a device with one planted mistake, in some orders of threads.
fn found(plant: &Planted, number: usize) -> Option<String> {
    [0, 1, 9].into_iter().find_map(|order| {
        let device = device(order, 1).with_most_groups(3);
        let mut wrong = device.with_replaced(plant.kind.kernels, &prefix(number));
        faults(&mut wrong, plant.kind.claims).next()
    })
}

#[test]
fn every_planted_mistake_is_found() {
    let mut missed = Vec::new();
    for (number, plant) in PLANTED.iter().enumerate() {
        let (unit, passage, mistake) = (plant.kind.unit, plant.passage, plant.mistake);
        match found(plant, number) {
            Some(fault) => println!("{unit}: {mistake:?}: {fault}"),
            None => missed.push(format!("{unit}: {passage:?} became {mistake:?}")),
        }
    }
    assert!(missed.is_empty(), "nothing noticed:\n{}", missed.join("\n"));
}
