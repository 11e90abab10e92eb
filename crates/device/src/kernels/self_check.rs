//! A few operations on a device and on the processor: asked before a device computes for a user.

use std::sync::Arc;

use metaltail_kernels::{Accelerator, ComputeError, ExpertTask, ExpertWeights};
use metaltail_quant::{Format, MatrixLayout, OwnedMatrix};

use super::{
    Combination, ExpertPass, HostKernels, Indexer, KernelDevice, KernelError, LatentAttention, Norm,
    Positions, Reference, Rope, Router, Strided,
};
use crate::residency::{HeldWeights, Residency, ResidencyDriver};

/// How far numbers may lie apart, beside one: devices add in different orders, and these sums are short.
const TOLERANCE: f32 = 1e-4;

/// Formats that models come in.
const FORMATS: [Format; 7] = [
    Format::F32,
    Format::F16,
    Format::Bf16,
    Format::Int8Row,
    Format::Int4Row,
    Format::Int4Group(64),
    Format::Fp8Block,
];

/// Numbers between −1 and 1 that follow from where they begin.
struct Numbers(u32);

impl Numbers {
    fn floats(&mut self, count: usize) -> Vec<f32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (self.0 >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    fn matrix(&mut self, format: Format, rows: usize, cols: usize) -> Result<OwnedMatrix, KernelError> {
        let made = |error: &dyn std::fmt::Display| KernelError::Device {
            device: "reference",
            message: format!("a matrix for the check: {error}"),
        };
        let layout = MatrixLayout::new(format, rows, cols).map_err(|error| made(&error))?;
        OwnedMatrix::quantize(layout, &self.floats(rows * cols)).map_err(|error| made(&error))
    }
}

/// A check: the numbers that a device computes, ids among them as numbers.
type Check = fn(&mut dyn KernelDevice) -> Result<Vec<f32>, KernelError>;

/// Every check, by what it computes.
const CHECKS: [(&str, Check); 10] = [
    ("products", products),
    ("prefill products", prefill),
    ("experts", experts),
    ("norms", norms),
    ("gates, sums and copies", elements),
    ("sums of experts", combinations),
    ("rotations", rotations),
    ("choices of experts", routes),
    ("attention", attention),
    ("choices of positions", selections),
];

/// Compares a device with the processor, a few numbers of every operation; gives it back where it is right. `residency`
/// is what its memory is declared to.
///
/// # Errors
/// What differs, with both numbers, or what the device refuses.
pub fn self_check<A: Accelerator, D: ResidencyDriver>(
    accelerator: A,
    residency: &Arc<Residency<D>>,
) -> Result<A, ComputeError> {
    let device = accelerator.name();
    let mut host = HostKernels::new(accelerator, HeldWeights::new(Arc::clone(residency)));
    let failed = |message: String| ComputeError::Device { device, message };
    let mut reference = Reference::new().map_err(|error| failed(error.to_string()))?;
    for (what, check) in CHECKS {
        let wanted = check(&mut reference).map_err(|error| failed(error.to_string()))?;
        let found = check(&mut host).map_err(|error| failed(format!("{what}: {error}")))?;
        let differ = |(found, wanted): (&f32, &f32)| {
            // Not `>`: a NaN differs from every number.
            let near = (found - wanted).abs() <= TOLERANCE * wanted.abs().max(1.0);
            !near
        };
        if let Some(at) = found.iter().zip(&wanted).position(differ) {
            return Err(failed(format!(
                "it computes other numbers than the processor ({what}, number {at}: {}, not {}): its answers would be wrong, so it is not used",
                found[at], wanted[at]
            )));
        }
    }
    Ok(host.into_accelerator())
}

fn products(device: &mut dyn KernelDevice) -> Result<Vec<f32>, KernelError> {
    let (mut numbers, mut results) = (Numbers(1), Vec::new());
    for format in FORMATS {
        let (m, x) = (numbers.matrix(format, 37, 128)?, numbers.floats(3 * 128));
        let mut out = vec![0.0; 3 * 37];
        device.matmul(m.as_ref(), &x, &mut out)?;
        results.extend(out);
    }
    Ok(results)
}

fn prefill(device: &mut dyn KernelDevice) -> Result<Vec<f32>, KernelError> {
    let (mut numbers, mut results) = (Numbers(2), Vec::new());
    for format in FORMATS {
        let (m, x) = (numbers.matrix(format, 37, 128)?, numbers.floats(33 * 128));
        let mut out = vec![0.0; 33 * 37];
        device.gemm(m.as_ref(), &x, &mut out)?;
        results.extend(out);
    }
    Ok(results)
}

fn experts(device: &mut dyn KernelDevice) -> Result<Vec<f32>, KernelError> {
    let mut numbers = Numbers(3);
    let mut weights = Vec::new();
    for format in [Format::Int4Group(64), Format::Int8Row] {
        let mut of = |rows, cols| numbers.matrix(format, rows, cols);
        weights.push([of(48, 64)?, of(48, 64)?, of(64, 48)?]);
    }
    let pairs: [&[(u32, u32)]; 2] = [&[(0, 1)], &[(0, 0), (1, 2)]];
    let tasks: Vec<ExpertTask<'_>> = weights
        .iter()
        .zip(pairs)
        .map(|([gate, up, down], pairs)| {
            let weights = ExpertWeights { gate: gate.as_ref(), up: up.as_ref(), down: down.as_ref() };
            ExpertTask::new(weights, pairs)
        })
        .collect();
    let (x, mut out) = (numbers.floats(2 * 64), vec![0.0; 3 * 64]);
    device.experts(&ExpertPass { x: &x, hidden: 64, tasks: &tasks }, &mut out)?;
    Ok(out)
}

fn norms(device: &mut dyn KernelDevice) -> Result<Vec<f32>, KernelError> {
    let mut numbers = Numbers(4);
    let (weight, x, mut out) = (numbers.floats(100), numbers.floats(400), vec![0.0; 300]);
    let strided = Strided { rows: 3, width: 100, from: 150, to: 100 };
    let norm = Norm { strided, weight: &weight, eps: 1e-6 };
    device.rms_norm(&norm, &x, &mut out)?;
    let (bias, mut other) = (numbers.floats(100), vec![0.0; 300]);
    device.layer_norm(&norm, &bias, &x, &mut other)?;
    out.extend(other);
    Ok(out)
}

fn elements(device: &mut dyn KernelDevice) -> Result<Vec<f32>, KernelError> {
    let mut numbers = Numbers(9);
    let (gate, up, mut out) = (numbers.floats(300), numbers.floats(300), vec![0.0; 300]);
    device.swiglu(&gate, &up, &mut out)?;
    device.add(&up, &mut out)?;
    let mut to = vec![0.0; 130];
    device.copy(&Strided { rows: 3, width: 30, from: 100, to: 50 }, &gate, &mut to)?;
    out.extend(to);
    Ok(out)
}

fn combinations(device: &mut dyn KernelDevice) -> Result<Vec<f32>, KernelError> {
    let mut numbers = Numbers(10);
    let (products, shared) = (numbers.floats(2 * 3 * 70), numbers.floats(2 * 70));
    let weights = [0.5, 0.0, -0.25, 1.5, 2.0, 0.125];
    let mut results = Vec::new();
    for shared in [None, Some(&shared[..])] {
        let mut x = numbers.floats(2 * 70);
        let combination = Combination { weights: &weights, top_k: 3, products: &products, shared, width: 70 };
        device.combine(&combination, &mut x)?;
        results.extend(x);
    }
    Ok(results)
}

fn rotations(device: &mut dyn KernelDevice) -> Result<Vec<f32>, KernelError> {
    let mut numbers = Numbers(5);
    let angles = numbers.floats(2 * 8);
    let cosines: Vec<f32> = angles.iter().map(|angle| angle.cos()).collect();
    let sines: Vec<f32> = angles.iter().map(|angle| angle.sin()).collect();
    let mut x = numbers.floats(2 * 3 * 24);
    let (heads, head, offset, dim, interleaved) = (3, 24, 8, 16, true);
    device.rope(&Rope { heads, head, offset, cosines: &cosines, sines: &sines, dim, interleaved }, &mut x)?;
    Ok(x)
}

fn routes(device: &mut dyn KernelDevice) -> Result<Vec<f32>, KernelError> {
    let mut numbers = Numbers(6);
    let bias = numbers.floats(64);
    let logits: Vec<f32> = numbers.floats(2 * 64).into_iter().map(|x| (x * 8.0).round() / 4.0).collect();
    let mut results = Vec::new();
    for (softmax, groups) in [(true, None), (false, None), (false, Some((8, 3)))] {
        let bias = Some(&bias[..]).filter(|_| !softmax);
        let router = Router { experts: 64, top_k: 8, softmax, bias, groups, normalise: true, scale: 2.5 };
        let routes = device.route(&router, &logits)?;
        results.extend(routes.ids.into_iter().map(|id| id as f32));
        results.extend(routes.weights);
    }
    Ok(results)
}

fn attention(device: &mut dyn KernelDevice) -> Result<Vec<f32>, KernelError> {
    let mut numbers = Numbers(7);
    let (heads, nope, rope, value, lora) = (3, 16, 8, 24, 64);
    let kv_b = numbers.matrix(Format::Int8Row, heads * (nope + value), lora)?;
    let keys = numbers.floats(20 * (lora + rope));
    let queries = numbers.floats(2 * heads * (nope + rope));
    let rows = [Positions::Below(20), Positions::Listed(&[0, 3, 4, 17])];
    let kv_b = kv_b.as_ref();
    let attention = LatentAttention { heads, nope, rope, value, kv_b, scale: 0.2, keys: &keys, rows: &rows };
    let mut out = vec![0.0; 2 * heads * value];
    device.attend(&attention, &queries, &mut out)?;
    Ok(out)
}

fn selections(device: &mut dyn KernelDevice) -> Result<Vec<f32>, KernelError> {
    let mut numbers = Numbers(8);
    let (heads, dim, top_k) = (2, 32, 6);
    let (keys, queries) = (numbers.floats(30 * dim), numbers.floats(2 * heads * dim));
    let weights = numbers.floats(2 * heads);
    let indexer = Indexer { heads, dim, top_k, keys: &keys, counts: &[30, 4] };
    let chosen = device.select(&indexer, &queries, &weights)?;
    Ok(chosen.into_iter().flatten().map(|position| position as f32).collect())
}

#[cfg(test)]
mod tests {
    use metaltail_kernels::{Kernels, Pool};
    use metaltail_store::testing::empty_arena;

    use super::*;
    use crate::residency::{DeclaredArena, Ledger, Mode, SlabAllocation};
    use crate::sim::{Profile, SimAccelerator, SimDriver};

    #[test]
    fn the_simulated_device_passes_and_leaves_nothing_declared() {
        let residency = Arc::new(Residency::new(Ledger::new(SimDriver::new(Profile::m5max()), Mode::Set)));
        let arena =
            Arc::new(DeclaredArena::new(empty_arena(), SlabAllocation::Arena, Arc::clone(&residency)));
        let device = SimAccelerator::new(arena, Kernels::best(), &Arc::new(Pool::new(1)));
        drop(self_check(device, &residency).unwrap());
        assert_eq!(residency.stats().allocations, 0);
    }
}
