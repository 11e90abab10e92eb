//! Expert blocks on the processor: what they compute, and what they refuse.

use std::sync::Arc;

use metaltail_kernels::{
    Activation, Buffer, Completion, ComputeError, CpuExperts, ExpertBiases, ExpertCompute, ExpertRows,
    ExpertTask, ExpertWeights, Kernels, Numerics, Pool, silu_mul,
};
use metaltail_quant::{Format, MatrixLayout, MatrixRef, OwnedMatrix, QuantizedRows};

const HIDDEN: usize = 80;
const INNER: usize = 100;

struct Expert {
    gate: OwnedMatrix,
    up: OwnedMatrix,
    down: OwnedMatrix,
}

impl Expert {
    fn new(formats: [Format; 3], seed: u32) -> Expert {
        let matrix = |format, rows, cols, salt| {
            let layout = MatrixLayout::new(format, rows, cols).unwrap();
            OwnedMatrix::quantize(layout, &numbers(rows * cols, seed * 3 + salt)).unwrap()
        };
        Expert {
            gate: matrix(formats[0], INNER, HIDDEN, 0),
            up: matrix(formats[1], INNER, HIDDEN, 1),
            down: matrix(formats[2], HIDDEN, INNER, 2),
        }
    }

    fn weights(&self) -> ExpertWeights<'_> {
        ExpertWeights { gate: self.gate.as_ref(), up: self.up.as_ref(), down: self.down.as_ref() }
    }
}

/// Seeded numbers in −1..1.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// One product for one input, by the public matrix product.
fn product(m: MatrixRef<'_>, x: &[f32], quantize: bool) -> Vec<f32> {
    let (pool, k) = (Pool::new(1), Kernels::best());
    let rows = m.layout().rows();
    let mut out = vec![0.0; rows];
    if quantize && Kernels::has_integer_path(m.layout().format()) {
        k.matmul_q8(&pool, m, 0..rows, &QuantizedRows::new(x, x.len()), &mut out, rows);
    } else {
        k.matmul(&pool, m, 0..rows, x, 1, &mut out, rows);
    }
    out
}

fn by_hand(expert: &Expert, x: &[f32], quantize: bool) -> Vec<f32> {
    let gate = product(expert.gate.as_ref(), x, quantize);
    let up = product(expert.up.as_ref(), x, quantize);
    let mut inner = vec![0.0; INNER];
    silu_mul(&gate, &up, &mut inner);
    product(expert.down.as_ref(), &inner, quantize)
}

fn cpu(threads: usize, numerics: Numerics) -> CpuExperts {
    CpuExperts::new(Arc::new(Pool::new(threads)), Kernels::best(), numerics)
}

fn experts() -> Vec<Expert> {
    let group = Format::Int4Group(32);
    [
        [group, group, group],
        [Format::Int8Row, Format::Int8Row, Format::Int8Row],
        [Format::Int4Row, Format::Bf16, group],
        [Format::Fp8Block, Format::Fp8Block, Format::F16],
    ]
    .into_iter()
    .enumerate()
    .map(|(seed, formats)| Expert::new(formats, seed as u32))
    .collect()
}

/// Rows that chose each of the four experts, with their output rows in no order.
const PAIRS: [&[(u32, u32)]; 4] =
    [&[(0, 3), (2, 0)], &[(1, 1), (0, 6), (2, 2), (3, 8), (4, 9)], &[], &[(2, 4), (1, 7)]];

#[test]
fn outputs_have_the_bits_of_the_three_products_one_by_one() {
    let experts = experts();
    let x = numbers(5 * HIDDEN, 99);
    for numerics in [Numerics::Exact, Numerics::QuantizedActivations] {
        for threads in [1, 3] {
            let mut device = cpu(threads, numerics);
            device.begin(&x, HIDDEN, 10).unwrap();
            let tasks: Vec<_> =
                experts.iter().zip(PAIRS).map(|(e, pairs)| ExpertTask::new(e.weights(), pairs)).collect();
            assert_eq!(device.submit(&tasks).unwrap(), Completion::Done);
            let out = device.finish().unwrap();
            for (expert, pairs) in experts.iter().zip(PAIRS) {
                for &(input, output) in pairs {
                    let row = &x[input as usize * HIDDEN..][..HIDDEN];
                    let wanted = by_hand(expert, row, numerics == Numerics::QuantizedActivations);
                    assert_eq!(
                        out[output as usize * HIDDEN..][..HIDDEN],
                        wanted,
                        "{numerics:?}, {threads} threads, output {output}"
                    );
                }
            }
            assert_eq!(out[5 * HIDDEN..6 * HIDDEN], [0.0; HIDDEN], "a row that nobody names is zero");
        }
    }
}

#[test]
fn the_split_into_submits_does_not_change_the_outputs() {
    let experts = experts();
    let x = numbers(5 * HIDDEN, 7);
    let tasks: Vec<_> =
        experts.iter().zip(PAIRS).map(|(e, pairs)| ExpertTask::new(e.weights(), pairs)).collect();
    let mut device = cpu(2, Numerics::QuantizedActivations);
    device.begin(&x, HIDDEN, 10).unwrap();
    device.submit(&tasks).unwrap();
    let together = device.finish().unwrap().to_vec();
    device.begin(&x, HIDDEN, 10).unwrap();
    for task in tasks.iter().rev() {
        device.submit(std::slice::from_ref(task)).unwrap();
    }
    assert_eq!(device.finish().unwrap(), together);
}

#[test]
fn a_pass_leaves_nothing_behind_for_the_next() {
    let experts = experts();
    let mut device = cpu(2, Numerics::QuantizedActivations);
    device.begin(&numbers(5 * HIDDEN, 1), HIDDEN, 10).unwrap();
    let tasks: Vec<_> =
        experts.iter().zip(PAIRS).map(|(e, pairs)| ExpertTask::new(e.weights(), pairs)).collect();
    device.submit(&tasks).unwrap();

    let x = numbers(HIDDEN, 2);
    device.begin(&x, HIDDEN, 2).unwrap();
    device.submit(&[ExpertTask::new(experts[0].weights(), &[(0, 1)])]).unwrap();
    let out = device.finish().unwrap();
    assert_eq!(out[..HIDDEN], [0.0; HIDDEN]);
    assert_eq!(out[HIDDEN..], by_hand(&experts[0], &x, true));
}

#[test]
fn quantised_activations_are_near_exact_ones() {
    let expert = Expert::new([Format::Int4Group(32); 3], 4);
    let x = numbers(HIDDEN, 5);
    let (exact, fast) = (by_hand(&expert, &x, false), by_hand(&expert, &x, true));
    let norm = |v: &[f32]| v.iter().map(|v| v * v).sum::<f32>().sqrt();
    let difference: Vec<f32> = exact.iter().zip(&fast).map(|(a, b)| a - b).collect();
    assert_ne!(exact, fast);
    assert!(norm(&difference) < 0.02 * norm(&exact), "{} of {}", norm(&difference), norm(&exact));
}

#[test]
fn a_task_that_does_not_fit_is_refused_and_the_pass_goes_on() {
    let expert = Expert::new([Format::Int8Row; 3], 0);
    let x = numbers(2 * HIDDEN, 3);
    let mut device = cpu(1, Numerics::Exact);
    device.begin(&x, HIDDEN, 2).unwrap();
    let with = |pairs| ExpertTask::new(expert.weights(), pairs);

    let error = device.submit(&[with(&[(0, 0)]), with(&[(2, 1)])]).unwrap_err();
    assert!(matches!(error, ComputeError::Row { what: "input", task: 1, row: 2, rows: 2 }), "{error}");
    let error = device.submit(&[with(&[(0, 2)])]).unwrap_err();
    assert!(matches!(error, ComputeError::Row { what: "output", task: 0, row: 2, rows: 2 }), "{error}");
    let error = device.submit(&[with(&[(0, 1), (1, 1)])]).unwrap_err();
    assert!(matches!(error, ComputeError::OutputTwice { task: 0, row: 1 }), "{error}");
    let swapped = ExpertWeights { down: expert.gate.as_ref(), ..expert.weights() };
    let error = device.submit(&[ExpertTask::new(swapped, &[(0, 0)])]).unwrap_err();
    assert!(matches!(error, ComputeError::Shape { matrix: "down", task: 0, .. }), "{error}");

    // No refused row counts as taken.
    device.submit(&[with(&[(0, 0), (1, 1)])]).unwrap();
    let error = device.submit(&[with(&[(0, 0)])]).unwrap_err();
    assert!(matches!(error, ComputeError::OutputTwice { .. }), "{error}");
    assert_eq!(device.finish().unwrap()[..HIDDEN], by_hand(&expert, &x[..HIDDEN], false));
}

#[test]
fn a_pass_of_broken_rows_or_impossible_size_is_refused() {
    let mut device = cpu(1, Numerics::Exact);
    assert!(matches!(
        device.begin(&[0.0; 3], 2, 1),
        Err(ComputeError::Activations { numbers: 3, hidden: 2 })
    ));
    assert!(matches!(device.begin(&[], 0, 1), Err(ComputeError::Activations { .. })));
    assert!(matches!(device.begin(&[0.0; 2], 2, usize::MAX), Err(ComputeError::TooLarge { .. })));
}

#[test]
fn activations_that_are_not_finite_stay_in_their_rows() {
    let expert = Expert::new([Format::Int4Group(32); 3], 8);
    for numerics in [Numerics::Exact, Numerics::QuantizedActivations] {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = numbers(2 * HIDDEN, 6);
            x[5] = bad;
            let mut device = cpu(2, numerics);
            device.begin(&x, HIDDEN, 2).unwrap();
            device.submit(&[ExpertTask::new(expert.weights(), &[(0, 0), (1, 1)])]).unwrap();
            let out = device.finish().unwrap();
            assert!(out[..HIDDEN].iter().all(|v| !v.is_finite()));
            assert_eq!(
                out[HIDDEN..],
                by_hand(&expert, &x[HIDDEN..], numerics == Numerics::QuantizedActivations)
            );
        }
    }
}

/// The definition in double precision, number by number.
fn clamped_by_hand(expert: &Expert, biases: &ExpertBiases<'_>, x: &[f32]) -> Vec<f64> {
    let (alpha, limit) = (1.702, 0.75);
    let rows = |m: &OwnedMatrix, bias: &[f32], x: &[f64]| -> Vec<f64> {
        let mut values = vec![0.0; m.layout().rows() * m.layout().cols()];
        metaltail_quant::dequantize(m.as_ref(), &mut values);
        let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
        values.chunks(x.len()).zip(bias).map(|(row, bias)| dot(row) + f64::from(*bias)).collect()
    };
    let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    let (gate, up) = (rows(&expert.gate, biases.gate, &x), rows(&expert.up, biases.up, &x));
    let join = |(gate, up): (&f64, &f64)| {
        let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
        (up + 1.0) * gate / (1.0 + (-alpha * gate).exp())
    };
    let inner: Vec<f64> = gate.iter().zip(&up).map(join).collect();
    rows(&expert.down, biases.down, &inner)
}

#[test]
fn biases_and_the_clamped_activation_are_those_of_the_definition() {
    let x = numbers(5 * HIDDEN, 99);
    let bias = [numbers(INNER, 50), numbers(INNER, 51), numbers(HIDDEN, 52)];
    let biases = ExpertBiases { gate: &bias[0], up: &bias[1], down: &bias[2] };
    let activation = Activation::ClampedSwiGlu { alpha: 1.702, limit: 0.75 };
    // Exact: rounded activations would hide an error of the size that is looked for.
    let (experts, mut results) = (experts(), Vec::new());
    for threads in [1, 3] {
        let mut device = cpu(threads, Numerics::Exact);
        device.begin(&x, HIDDEN, 10).unwrap();
        let tasks: Vec<_> = experts
            .iter()
            .zip(PAIRS)
            .map(|(e, pairs)| ExpertTask {
                activation,
                biases: Some(biases),
                ..ExpertTask::new(e.weights(), pairs)
            })
            .collect();
        device.submit(&tasks).unwrap();
        results.push(device.finish().unwrap().to_vec());
    }
    assert!(results[0] == results[1], "bits depend on the number of threads");
    for (expert, pairs) in experts.iter().zip(PAIRS) {
        for &(input, output) in pairs {
            let wanted = clamped_by_hand(expert, &biases, &x[input as usize * HIDDEN..][..HIDDEN]);
            let found = &results[0][output as usize * HIDDEN..][..HIDDEN];
            for (found, wanted) in found.iter().zip(wanted) {
                assert!(
                    (f64::from(*found) - wanted).abs() < 1e-4,
                    "output {output}: {found}, wanted {wanted}"
                );
            }
        }
    }
}

#[test]
fn a_bias_of_another_length_is_refused() {
    let expert = Expert::new([Format::Int8Row; 3], 0);
    let (inner, hidden) = (vec![0.0; INNER], vec![0.0; HIDDEN]);
    let right = ExpertBiases { gate: &inner, up: &inner, down: &hidden };
    let mut device = cpu(1, Numerics::Exact);
    device.begin(&numbers(HIDDEN, 3), HIDDEN, 1).unwrap();
    for (wrong, named) in [
        (ExpertBiases { gate: &hidden, ..right }, "gate"),
        (ExpertBiases { up: &inner[1..], ..right }, "up"),
        (ExpertBiases { down: &inner, ..right }, "down"),
    ] {
        let task = ExpertTask { biases: Some(wrong), ..ExpertTask::new(expert.weights(), &[(0, 0)]) };
        let error = device.submit(&[task]).unwrap_err();
        assert!(matches!(error, ComputeError::Bias { matrix, task: 0, .. } if matrix == named), "{error}");
    }
    // A refused submit claims no row.
    let task = ExpertTask { biases: Some(right), ..ExpertTask::new(expert.weights(), &[(0, 0)]) };
    device.submit(&[task]).unwrap();
}

#[test]
fn accelerators_refuse_what_only_the_processor_computes() {
    let expert = Expert::new([Format::Int8Row; 3], 0);
    let rows =
        ExpertRows { x: Buffer(1).view(), inputs: 1, hidden: HIDDEN, out: Buffer(2).view(), outputs: 1 };
    let plain = ExpertTask::new(expert.weights(), &[(0, 0)]);
    rows.check(&[plain]).unwrap();
    let (inner, hidden) = (vec![0.0; INNER], vec![0.0; HIDDEN]);
    let biases = Some(ExpertBiases { gate: &inner, up: &inner, down: &hidden });
    let activation = Activation::ClampedSwiGlu { alpha: 1.0, limit: 1.0 };
    for (task, named) in [
        (ExpertTask { biases, ..plain }, "biases"),
        (ExpertTask { activation, ..plain }, "clamped activation"),
    ] {
        let error = rows.check(&[plain, task]).unwrap_err();
        assert!(matches!(error, ComputeError::ProcessorOnly { task: 1, .. }), "{error}");
        assert!(error.to_string().contains(named), "{error}");
    }
}
