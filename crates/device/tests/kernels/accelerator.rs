//! The accelerator of Metal kernels as an engine uses it: many operations at a time, several submissions in flight.

use metaltail_device::kernels::{ExpertPass, KernelDevice, Reference};
use metaltail_device::metal::cpu::CpuLauncher;
use metaltail_device::metal::{Launcher, MetalAccelerator};
use metaltail_device::residency::{Mode, ResidencyError, spans_of};
use metaltail_kernels::{
    Accelerator, AcceleratorExperts, Attend, Combine, Completion, ComputeError, ExpertCompute, ExpertRows,
    ExpertTask, ExpertWeights, Lists, Op, Order, Rows, Select, View,
};
use metaltail_quant::{Format, MatrixLayout, MatrixRef};

use crate::data::Numbers;
use crate::experts::Pass;
use crate::metal::Setup;

fn accelerator() -> MetalAccelerator<CpuLauncher> {
    MetalAccelerator::new(CpuLauncher::new(1, 1))
}

fn put<A: Accelerator>(accelerator: &mut A, numbers: &[f32]) -> Result<View, ComputeError> {
    let view = accelerator.buffer(numbers.len())?.view();
    accelerator.write(view, numbers)?;
    Ok(view)
}

fn get<A: Accelerator>(accelerator: &mut A, view: View, count: usize) -> Result<Vec<f32>, ComputeError> {
    let mut numbers = vec![0.0; count];
    accelerator.read(view, &mut numbers)?;
    Ok(numbers)
}

/// A norm, two products, gates, another product and a sum, each on what came before, in one submission.
pub fn chain<L: Launcher>(accelerator: &mut MetalAccelerator<L>) -> Result<Vec<f32>, ComputeError> {
    let mut numbers = Numbers::new(5);
    let mut hold = |rows, cols| accelerator.hold(numbers.matrix(Format::Int8Row, rows, cols).as_ref());
    let (gate, up, down) = (hold(40, 64)?, hold(40, 64)?, hold(64, 40)?);
    let x = put(accelerator, &numbers.floats(2 * 64))?;
    let weight = put(accelerator, &numbers.floats(64))?;
    let mut room = |numbers| put(accelerator, &vec![0.0; numbers]);
    let (normed, gates, ups, inner, out) = (room(128)?, room(80)?, room(80)?, room(80)?, room(128)?);
    let rows = |view| Rows { view, stride: 64 };
    let product = |matrix, x, out| Op::Product { matrix, x, inputs: 2, out, order: Order::Decode };
    for op in [
        Op::RmsNorm { from: rows(x), to: rows(normed), rows: 2, width: 64, weight, eps: 1e-6 },
        product(gate, normed, gates),
        product(up, normed, ups),
        Op::SwiGlu { gate: gates, up: ups, out: inner, count: 80 },
        product(down, inner, out),
        Op::Add { from: out, to: x, count: 128 },
    ] {
        accelerator.record(&op)?;
    }
    accelerator.wait()?;
    get(accelerator, x, 128)
}

#[test]
fn barriers_lie_only_where_something_is_read_that_was_written() {
    let mut accelerator = accelerator();
    chain(&mut accelerator).unwrap();
    let counts = accelerator.counts().get();
    assert_eq!((counts.launches, counts.submissions), (6, 1));
    assert_eq!(counts.barriers, 4, "the two products with the norm's rows go side by side");
}

#[test]
fn memory_in_use_is_refused_with_what_to_do_and_released_later() {
    let mut accelerator = accelerator();
    let (a, b) = (put(&mut accelerator, &[1.0, 2.0]).unwrap(), put(&mut accelerator, &[10.0, 20.0]).unwrap());
    let buffers = accelerator.launcher().buffers();
    accelerator.record(&Op::Add { from: a, to: b, count: 2 }).unwrap();
    for submitted in [false, true] {
        for refused in [accelerator.write(a, &[5.0]), accelerator.read(b, &mut [0.0])] {
            let message = refused.unwrap_err().to_string();
            assert!(message.contains("in use") && message.contains("wait first"), "{submitted}: {message}");
        }
        accelerator.submit().unwrap();
    }
    accelerator.release(a.buffer);
    assert!(accelerator.record(&Op::Add { from: a, to: b, count: 2 }).is_err(), "released");
    assert_eq!(accelerator.launcher().buffers(), buffers, "the device still reads it");
    accelerator.wait().unwrap();
    assert_eq!(accelerator.launcher().buffers(), buffers - 1);
    assert_eq!(get(&mut accelerator, b, 2).unwrap(), [11.0, 22.0]);
}

#[test]
fn what_does_not_fit_is_refused_and_records_nothing() {
    let mut accelerator = accelerator();
    let a = put(&mut accelerator, &[1.0; 8]).unwrap();
    assert!(accelerator.record(&Op::Add { from: a, to: a.plus(4), count: 5 }).is_err());
    assert!(accelerator.record(&Op::Add { from: a.plus(4), to: a, count: 5 }).is_err());
    assert!(accelerator.write(a.plus(5), &[0.0; 4]).is_err() && accelerator.read(a, &mut [0.0; 9]).is_err());
    let matrix = accelerator.hold(Numbers::new(1).matrix(Format::F32, 2, 4).as_ref()).unwrap();
    let other = metaltail_kernels::HeldMatrix { id: 1, ..matrix };
    let product = |matrix| Op::Product { matrix, x: a, inputs: 1, out: a.plus(4), order: Order::Decode };
    let unknown = accelerator.record(&product(other)).unwrap_err().to_string();
    assert!(unknown.contains("not held"), "{unknown}");
    let layout = MatrixLayout::new(Format::Bf16, 2, 4).unwrap();
    assert!(accelerator.record(&product(metaltail_kernels::HeldMatrix { layout, ..matrix })).is_err());
    accelerator.wait().unwrap();
    assert_eq!(accelerator.counts().get().launches, 0);
    accelerator.record(&product(matrix)).unwrap();
    accelerator.wait().unwrap();
}

/// A kernel that does not exist: the failure is told once, then all goes on.
#[test]
fn after_a_failure_the_accelerator_is_as_before() {
    let mut accelerator = accelerator().with_replaced("add", "missing_");
    let (a, b) = (put(&mut accelerator, &[1.0]).unwrap(), put(&mut accelerator, &[2.0]).unwrap());
    let copy = |from, to| {
        let rows = |view| Rows { view, stride: 1 };
        Op::Copy { from: rows(from), to: rows(to), rows: 1, width: 1 }
    };
    accelerator.record(&Op::Add { from: a, to: b, count: 1 }).unwrap();
    accelerator.submit().unwrap();
    accelerator.record(&copy(a, b)).unwrap();
    let failed = accelerator.wait().unwrap_err().to_string();
    assert!(failed.contains("no such kernel"), "{failed}");
    accelerator.wait().unwrap();
    assert_eq!(get(&mut accelerator, b, 1).unwrap(), [2.0], "nothing ran behind what failed");
    accelerator.record(&copy(a, b)).unwrap();
    accelerator.wait().unwrap();
    assert_eq!(get(&mut accelerator, b, 1).unwrap(), [1.0]);
    let ledger = accelerator.launcher().residency().ledger();
    assert!(ledger.difference(&[]).is_empty());
}

/// An expert in slots of the test's own: gate, up and down as layout, weights and scales.
struct Slots {
    matrices: [(MatrixLayout, Vec<u8>, Vec<u8>); 3],
    pairs: Vec<(u32, u32)>,
}

impl Slots {
    fn task(&self) -> ExpertTask<'_> {
        let [gate, up, down] = self.matrices.each_ref().map(|(l, w, s)| MatrixRef::new(*l, w, s).unwrap());
        ExpertTask::new(ExpertWeights { gate, up, down }, &self.pairs)
    }
}

fn some_experts(seed: u64) -> Vec<Slots> {
    let mut numbers = Numbers::new(seed);
    let formats = [Format::Int8Row, Format::Int4Group(32), Format::F32];
    let pairs =
        [vec![(0, 0)], vec![(0, 1), (1, 4)], vec![(1, 5)], vec![(0, 2), (1, 3), (2, 6), (2, 7), (0, 8)]];
    let experts = pairs.into_iter().enumerate().map(|(expert, pairs)| {
        let inner = 32 + expert * 8;
        let matrices = [(inner, 64), (inner, 64), (64, inner)].map(|(rows, cols)| {
            let m = numbers.matrix(formats[expert % 3], rows, cols);
            (m.layout(), m.weights().to_vec(), m.scales().to_vec())
        });
        Slots { matrices, pairs }
    });
    experts.collect()
}

/// Cached experts, then those that had to be loaded, then their sum, without a wait between.
#[test]
fn experts_go_in_several_submissions_and_are_combined_in_the_last() {
    let experts = some_experts(7);
    let tasks: Vec<ExpertTask<'_>> = experts.iter().map(Slots::task).collect();
    let x = Numbers::new(8).floats(3 * 64);
    let mut wanted = vec![0.0; 9 * 64];
    Reference::new().unwrap().experts(&ExpertPass { x: &x, hidden: 64, tasks: &tasks }, &mut wanted).unwrap();
    let mut accelerator = accelerator();
    for round in 0..3 {
        let activations = put(&mut accelerator, &x).unwrap();
        let products = put(&mut accelerator, &[0.0; 9 * 64]).unwrap();
        let stream = put(&mut accelerator, &[0.0; 9 * 64]).unwrap();
        let rows = ExpertRows { x: activations, inputs: 3, hidden: 64, out: products, outputs: 9 };
        for part in tasks.chunks(2) {
            accelerator.experts(&rows, part).unwrap();
            accelerator.submit().unwrap();
        }
        let combine =
            Combine { products, weights: vec![1.0; 9], top_k: 1, shared: None, x: stream, width: 64 };
        accelerator.record(&Op::Combine(combine)).unwrap();
        accelerator.wait().unwrap();
        let got = get(&mut accelerator, stream, 9 * 64).unwrap();
        let far = got.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < 1e-4, "round {round}: {far}");
        assert_eq!(accelerator.counts().get().experts, 4 * (round + 1));
        for view in [activations, products, stream] {
            accelerator.release(view.buffer);
        }
    }
    let buffers = accelerator.launcher().buffers();
    assert!(buffers <= 3, "tables and intermediates are used again: {buffers} buffers");
}

/// The bytes of a lease are the device's until it was waited for: what changes before shows.
#[test]
fn a_lease_that_is_given_up_too_early_shows() {
    let mut experts = some_experts(7);
    let x = Numbers::new(8).floats(3 * 64);
    let mut accelerator = accelerator();
    let activations = put(&mut accelerator, &x).unwrap();
    let mut run = |experts: &mut [Slots], early: bool| {
        let products = put(&mut accelerator, &[0.0; 9 * 64]).unwrap();
        let rows = ExpertRows { x: activations, inputs: 3, hidden: 64, out: products, outputs: 9 };
        accelerator.experts(&rows, &experts.iter().map(Slots::task).collect::<Vec<_>>()).unwrap();
        accelerator.submit().unwrap();
        if early {
            // In its place: the slot has another expert now.
            for (expert, other) in experts.iter_mut().zip(some_experts(9)) {
                for (slot, other) in expert.matrices.iter_mut().zip(other.matrices) {
                    slot.1.copy_from_slice(&other.1);
                }
            }
        }
        accelerator.wait().unwrap();
        get(&mut accelerator, products, 9 * 64).unwrap()
    };
    let good = run(&mut experts, false);
    assert_eq!(run(&mut experts, false), good);
    assert_ne!(run(&mut experts, true), good);
}

#[test]
fn experts_alone_are_those_of_the_reference() {
    let pass = Pass::new(17, 7, 70, 33);
    let wanted = pass.run(&mut Reference::new().unwrap(), "reference").unwrap();
    let mut experts = AcceleratorExperts::new(accelerator());
    experts.begin(&pass.x, 70, pass.outputs).unwrap();
    for tasks in pass.tasks().chunks(3) {
        assert_eq!(experts.submit(tasks).unwrap(), Completion::InFlight);
    }
    let got = experts.finish().unwrap();
    let far = got.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far < 1e-4, "{far}");
}

/// Lists go from the choice to the attention without the host, in blocks of any size.
#[test]
fn lists_are_chosen_and_read_on_the_device() {
    let (heads, nope, rope, value, lora, positions, top_k) = (3, 5, 2, 4, 24, 90, 16);
    let run = |most_scores: usize, kept: Option<usize>| {
        let mut accelerator = accelerator().with_most_scores(most_scores);
        let mut numbers = Numbers::new(3);
        let kv_b = numbers.matrix(Format::Bf16, heads * (nope + value), lora);
        let kv_b = accelerator.hold(kv_b.as_ref()).unwrap();
        let visible: Vec<u32> = vec![3, 20, 88, 89, 90];
        let rows = visible.len();
        let mut put = |numbers: &[f32]| put(&mut accelerator, numbers).unwrap();
        let queries = put(&numbers.floats(rows * heads * (nope + rope)));
        let index_queries = put(&numbers.floats(rows * 2 * 8));
        let weights = put(&numbers.floats(rows * 2));
        let index_keys = put(&numbers.floats(positions * 8));
        let mut keys = numbers.floats(positions * (lora + rope));
        if let Some(kept) = kept {
            keys[kept * (lora + rope)..].iter_mut().for_each(|key| *key += 1.0);
        }
        let (keys, chosen) = (put(&keys), put(&vec![0.0; rows * top_k]));
        let out = put(&vec![0.0; rows * heads * value]);
        let counts: Vec<u32> = visible.iter().map(|count| (*count).min(top_k as u32)).collect();
        let (queries_of, keys_of) = (index_queries, index_keys);
        let select = Select {
            heads: 2,
            dim: 8,
            top_k,
            queries: queries_of,
            weights,
            keys: keys_of,
            counts: visible,
            chosen,
        };
        accelerator.record(&Op::Select(select)).unwrap();
        let lists = Some(Lists { chosen, top_k });
        let scale = 0.4;
        let attend =
            Attend { heads, nope, rope, value, kv_b, scale, queries, keys, counts, lists, positions, out };
        accelerator.record(&Op::Attend(attend.clone())).unwrap();
        accelerator.wait().unwrap();
        let longer = Attend { counts: vec![17; rows], ..attend };
        let refused = accelerator.record(&Op::Attend(longer)).unwrap_err().to_string();
        assert!(refused.contains("17 positions of a list of 16"), "{refused}");
        let mut ids = vec![0; rows * top_k];
        accelerator.read_ids(chosen, &mut ids).unwrap();
        (ids, get(&mut accelerator, out, rows * heads * value).unwrap())
    };
    let (ids, whole) = run(1 << 20, None);
    assert_eq!(ids[..3], [0, 1, 2], "a row with fewer positions has them all");
    assert!(ids[2 * top_k..3 * top_k].is_sorted() && ids[3 * top_k - 1] < 88);
    for most in [1, 2 * heads * 90 * 4] {
        assert_eq!(run(most, None), (ids.clone(), whole.clone()), "{most} bytes of scores");
    }
    // What no row chose is not read.
    let last = ids[top_k..].chunks(top_k).map(|list| list[top_k - 1]).max().unwrap() as usize;
    assert_eq!(run(1 << 20, Some(last + 1)).1, whole);
    assert_ne!(run(1 << 20, Some(last)).1, whole);
}

#[test]
fn weights_are_declared_while_they_are_held() {
    let setup = Setup { declaring: Some(Mode::Set), ..Setup::default() };
    let launcher = setup.launcher();
    let residency = std::sync::Arc::clone(launcher.residency());
    let mut accelerator = MetalAccelerator::new(launcher);
    let m = Numbers::new(1).matrix(Format::Int8Row, 8, 16);
    let held = accelerator.hold(m.as_ref()).unwrap();
    let copy = accelerator.weights().matrix(held).unwrap();
    assert_eq!((copy.weights(), copy.scales()), (m.as_ref().weights(), m.as_ref().scales()));
    let span = spans_of(copy).next().unwrap();
    assert!(residency.ledger().find(span).is_some());
    let view = put(&mut accelerator, &[1.0; 24]).unwrap();
    let product = Op::Product { matrix: held, x: view, inputs: 1, out: view.plus(16), order: Order::Decode };
    accelerator.record(&product).unwrap();
    accelerator.submit().unwrap();
    assert!(
        matches!(residency.ledger().unregister(span), Err(ResidencyError::Unknown(_))),
        "a part of a chunk"
    );
    drop(accelerator);
    assert!(residency.ledger().find(span).is_none());
}
