//! Experts of one pass.

use metaltail_device::kernels::{ExpertPass, KernelDevice, Reference};
use metaltail_kernels::{ExpertTask, ExpertWeights};
use metaltail_quant::OwnedMatrix;

use crate::data::{FORMATS, Numbers, Outcome, ROUNDING, near, same, sum_error, values, written};

/// Gate, up and down, and the rows that chose the expert.
pub struct Expert {
    matrices: [OwnedMatrix; 3],
    pairs: Vec<(u32, u32)>,
}

pub struct Pass {
    pub x: Vec<f32>,
    pub hidden: usize,
    pub experts: Vec<Expert>,
    pub outputs: usize,
}

impl Pass {
    /// `count` experts in formats that change with each matrix, widths around `inner`, and up to six rows each (some
    /// have none); outputs in an order of their own.
    pub fn new(seed: u64, count: usize, hidden: usize, inner: usize) -> Pass {
        let mut numbers = Numbers::new(seed);
        let rows = 9;
        let counts: Vec<u32> = (0..count).map(|expert| [1, 4, 0, 2, 1, 6, 5][expert % 7]).collect();
        let outputs: u32 = counts.iter().sum();
        let mut next = 0;
        let mut format = |_| FORMATS[numbers.below(FORMATS.len() as u32) as usize];
        let formats: Vec<_> = (0..3 * count).map(&mut format).collect();
        let experts = counts.iter().enumerate().map(|(expert, pairs)| {
            let inner = inner + expert % 3 * 8;
            let mut matrix = |part: usize, rows, cols| numbers.matrix(formats[expert * 3 + part], rows, cols);
            let matrices = [matrix(0, inner, hidden), matrix(1, inner, hidden), matrix(2, hidden, inner)];
            let pairs = (0..*pairs).map(|_| {
                next += 1;
                // 7 has no divisor in common with counts below, so every output row has one pair.
                (numbers.below(rows), outputs - next)
            });
            Expert { matrices, pairs: pairs.collect() }
        });
        let experts = experts.collect();
        Pass { x: numbers.floats(rows as usize * hidden), hidden, experts, outputs: outputs as usize }
    }

    /// All of it for a device.
    pub fn tasks(&self) -> Vec<ExpertTask<'_>> {
        self.experts.iter().map(Expert::task).collect()
    }

    pub fn run(&self, device: &mut dyn KernelDevice, what: &str) -> Result<Vec<f32>, String> {
        let tasks = self.tasks();
        let pass = ExpertPass { x: &self.x, hidden: self.hidden, tasks: &tasks };
        written(what, self.outputs * self.hidden, |out| device.experts(&pass, out))
    }

    /// How far each result can be from the exact one.
    fn bounds(&self) -> Vec<f64> {
        let mut bounds = vec![0.0; self.outputs * self.hidden];
        for expert in &self.experts {
            let [gate, up, down] = [0, 1, 2].map(|m| values(&expert.matrices[m]));
            for &(input, output) in &expert.pairs {
                let x = &self.x[input as usize * self.hidden..][..self.hidden];
                let inner: Vec<(f64, f64)> = gate
                    .chunks(self.hidden)
                    .zip(up.chunks(self.hidden))
                    .map(|(gate, up)| intermediate(gate, up, x))
                    .collect();
                let out = &mut bounds[output as usize * self.hidden..][..self.hidden];
                for (bound, row) in out.iter_mut().zip(down.chunks(inner.len())) {
                    let terms = row.iter().zip(&inner);
                    *bound = terms
                        .map(|(w, (value, error))| {
                            w.abs() * (error + sum_error(inner.len()) * (value.abs() + error))
                        })
                        .sum();
                }
            }
        }
        bounds
    }
}

impl Expert {
    fn task(&self) -> ExpertTask<'_> {
        let [gate, up, down] = [0, 1, 2].map(|m| self.matrices[m].as_ref());
        ExpertTask::new(ExpertWeights { gate, up, down }, &self.pairs)
    }
}

/// silu(gate · x) · (up · x), and how far off it can be: the errors of both sums (silu is nowhere steeper than 1.1),
/// and eight roundings for e^x, the division and the products.
fn intermediate(gate: &[f64], up: &[f64], x: &[f32]) -> (f64, f64) {
    let sum = |row: &[f64]| {
        let products = row.iter().zip(x).map(|(w, x)| w * f64::from(*x));
        products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
    };
    let ((g, g_size), (u, u_size)) = (sum(gate), sum(up));
    let (g_error, u_error) = (g_size * sum_error(x.len()), u_size * sum_error(x.len()));
    let silu = g / (1.0 + (-g).exp());
    let value = silu * u;
    let error = 1.1 * g_error * (u.abs() + u_error) + silu.abs() * u_error + 8.0 * ROUNDING * value.abs();
    (value, error)
}

pub fn agree_with_the_reference(device: &mut dyn KernelDevice) -> Outcome {
    let mut reference = Reference::new().unwrap();
    for (count, hidden, inner) in [(1, 1, 1), (3, 37, 21), (7, 130, 72), (64, 72, 40), (2, 300, 517)] {
        let pass = Pass::new(count as u64, count, hidden, inner);
        let what = format!("{count} experts of {hidden} × {inner}");
        let (got, wanted) = (pass.run(device, &what)?, pass.run(&mut reference, &what)?);
        let bounds = pass.bounds();
        near(&what, &got, &wanted, |i| 2.0 * bounds[i])?;
    }
    Ok(())
}

/// Which other experts and rows a pass has does not change a row's result.
pub fn do_not_depend_on_each_other(device: &mut dyn KernelDevice) -> Outcome {
    let all = Pass::new(17, 7, 70, 33);
    let together = all.run(device, "together")?;
    for expert in &all.experts {
        for &(input, output) in &expert.pairs {
            let alone = Expert { matrices: expert.matrices.clone(), pairs: vec![(0, 0)] };
            let x = all.x[input as usize * all.hidden..][..all.hidden].to_vec();
            let alone = Pass { x, hidden: all.hidden, experts: vec![alone], outputs: 1 };
            let wanted = &together[output as usize * all.hidden..][..all.hidden];
            same(&format!("output row {output} alone"), &alone.run(device, "alone")?, wanted)?;
        }
    }
    Ok(())
}

/// A pass may name output rows with gaps; what lies between stays.
pub fn leave_rows_that_nobody_names(device: &mut dyn KernelDevice) -> Outcome {
    let mut pass = Pass::new(3, 2, 20, 12);
    for (_, output) in pass.experts.iter_mut().flat_map(|expert| &mut expert.pairs) {
        *output = *output * 2 + 1;
    }
    let tasks = pass.tasks();
    let expert_pass = ExpertPass { x: &pass.x, hidden: 20, tasks: &tasks };
    let mut out = vec![7.5f32; 2 * pass.outputs * 20];
    device.experts(&expert_pass, &mut out).map_err(|error| error.to_string())?;
    for (row, numbers) in out.chunks(20).enumerate() {
        let untouched = numbers.iter().all(|v| *v == 7.5);
        if untouched != (row % 2 == 0) {
            return Err(format!("output row {row}: untouched is {untouched}"));
        }
    }
    Ok(())
}
