//! How close do expert kernels come to the memory's bandwidth?
//!
//! For each format, experts of one shape that together exceed the caches are computed for one row
//! (decode) in rotation, `top_k` at a time, as a sparse layer does. A plain read of as many bytes
//! is measured in the same round: the ratio of the two is the answer.

use std::sync::Arc;
use std::time::Instant;

use metaltail_kernels::{CpuExperts, ExpertCompute, ExpertTask, ExpertWeights, Kernels, Numerics, Pool};
use metaltail_quant::{Format, GgufFormat, MatrixLayout, OwnedMatrix};
use serde::Serialize;

use crate::{Bandwidth, Spread};

/// What to measure.
#[derive(Clone, Debug)]
pub struct KernelOptions {
    /// Model width.
    pub hidden: usize,
    /// Expert width.
    pub width: usize,
    /// Experts a pass.
    pub top_k: usize,
    /// Bytes of experts to rotate over.
    pub working_set: usize,
    /// Rounds.
    pub rounds: usize,
    /// Threads.
    pub threads: usize,
    /// Formats.
    pub formats: Vec<Format>,
}

/// One format and numerics.
#[derive(Clone, Debug, Serialize)]
pub struct KernelRow {
    /// Number format of the weights.
    pub format: String,
    /// `exact` (f32 activations) or `int8` (quantised activations).
    pub activations: &'static str,
    /// Bytes of one expert.
    pub expert_bytes: usize,
    /// Weight bytes read a second.
    pub gb_per_second: Spread,
    /// The same over the plain read of the same round.
    pub of_ceiling: Spread,
}

/// Result of [`measure`].
#[derive(Clone, Debug, Serialize)]
pub struct KernelReport {
    /// Instruction set.
    pub isa: String,
    /// Threads.
    pub threads: usize,
    /// Model width, expert width, experts a pass.
    pub shape: [usize; 3],
    /// Plain read of memory.
    pub ceiling_gb_per_second: Spread,
    /// A row a format and numerics.
    pub rows: Vec<KernelRow>,
}

struct Expert {
    parts: [OwnedMatrix; 3],
}

impl Expert {
    fn new(format: Format, hidden: usize, width: usize, seed: u64) -> Option<Expert> {
        let part = |rows, cols, salt: u64| {
            let layout = MatrixLayout::new(format, rows, cols).ok()?;
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(salt);
            let mut noise = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state
            };
            let weights = match format {
                // Bit patterns of such formats must be small numbers, not infinities.
                Format::F32 => {
                    (0..rows * cols).flat_map(|_| ((noise() as i32 as f32) * 1e-11).to_le_bytes()).collect()
                }
                Format::F16 | Format::Bf16 => {
                    (0..rows * cols).flat_map(|_| [noise() as u8, 0x38 | (noise() as u8 & 0x81)]).collect()
                }
                Format::Fp8Block => (0..rows * cols).map(|_| noise() as u8 & 0xb7).collect(),
                Format::Gguf(format) => gguf_blocks(format, layout.weight_bytes(), noise),
                _ => (0..layout.weight_bytes()).map(|_| noise() as u8).collect(),
            };
            let scales = 0.01f32.to_le_bytes().repeat(layout.scale_bytes() / 4);
            OwnedMatrix::new(layout, weights, scales).ok()
        };
        Some(Expert { parts: [part(width, hidden, 1)?, part(width, hidden, 2)?, part(hidden, width, 3)?] })
    }

    fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.layout().bytes()).sum()
    }

    fn weights(&self) -> ExpertWeights<'_> {
        let [gate, up, down] = &self.parts;
        ExpertWeights { gate: gate.as_ref(), up: up.as_ref(), down: down.as_ref() }
    }
}

/// Random blocks, their `f16` scales 2⁻⁷ (0x2000) and MXFP4's exponents 2⁻⁷.
fn gguf_blocks(format: GgufFormat, bytes: usize, mut noise: impl FnMut() -> u64) -> Vec<u8> {
    let mut weights: Vec<u8> = (0..bytes).map(|_| noise() as u8).collect();
    for block in weights.chunks_mut(format.block_bytes()) {
        for at in format.halves() {
            block[*at..at + 2].copy_from_slice(&0x2000u16.to_le_bytes());
        }
        if format == GgufFormat::Mxfp4 {
            block[0] = 120;
        }
    }
    weights
}

struct Arm {
    format: Format,
    activations: &'static str,
    compute: CpuExperts,
    rates: Vec<f64>,
    ratios: Vec<f64>,
}

/// Measures all formats. `progress` is told each finished round.
pub fn measure(options: &KernelOptions, progress: &mut dyn FnMut(usize)) -> Option<KernelReport> {
    let pool = Arc::new(Pool::new(options.threads));
    let kernels = Kernels::best();
    let ceiling = Bandwidth::new(options.working_set);
    let mut ceilings = Vec::new();
    let mut rows = Vec::new();
    for &format in &options.formats {
        // One format's experts at a time: together they would not fit.
        let first = Expert::new(format, options.hidden, options.width, 1)?;
        let count = (options.working_set / first.bytes()).max(options.top_k);
        let experts: Option<Vec<Expert>> = (0..count as u64)
            .map(|seed| Expert::new(format, options.hidden, options.width, seed + 1))
            .collect();
        let experts = experts?;
        let numerics: &[(Numerics, &'static str)] = match Kernels::has_integer_path(format) {
            true => &[(Numerics::QuantizedActivations, "int8"), (Numerics::Exact, "exact")],
            false => &[(Numerics::Exact, "exact")],
        };
        let mut arms: Vec<Arm> = numerics
            .iter()
            .map(|&(numerics, activations)| Arm {
                format,
                activations,
                compute: CpuExperts::new(pool.clone(), kernels, numerics),
                rates: Vec::new(),
                ratios: Vec::new(),
            })
            .collect();
        for round in 0..=options.rounds {
            let plain = ceiling.measure(&pool);
            for arm in &mut arms {
                let rate = pass(arm, &experts, options)?;
                // The first round warms up.
                if round > 0 {
                    arm.rates.push(rate);
                    arm.ratios.push(rate / plain);
                }
            }
            if round > 0 {
                ceilings.push(plain);
            }
            progress(round);
        }
        for arm in arms {
            rows.push(KernelRow {
                format: arm.format.to_string(),
                activations: arm.activations,
                expert_bytes: first.bytes(),
                gb_per_second: Spread::of(&arm.rates)?,
                of_ceiling: Spread::of(&arm.ratios)?,
            });
        }
    }
    Some(KernelReport {
        isa: kernels.isa().to_string(),
        threads: options.threads,
        shape: [options.hidden, options.width, options.top_k],
        ceiling_gb_per_second: Spread::of(&ceilings)?,
        rows,
    })
}

/// All experts once, `top_k` a pass, one row: GB/s of weights.
fn pass(arm: &mut Arm, experts: &[Expert], options: &KernelOptions) -> Option<f64> {
    let x: Vec<f32> = (0..options.hidden).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let pairs: Vec<[(u32, u32); 1]> = (0..options.top_k as u32).map(|o| [(0, o)]).collect();
    let start = Instant::now();
    let mut bytes = 0;
    for group in experts.chunks_exact(options.top_k) {
        let tasks: Vec<ExpertTask<'_>> = group
            .iter()
            .zip(&pairs)
            .map(|(expert, pairs)| ExpertTask::new(expert.weights(), pairs))
            .collect();
        arm.compute.begin(&x, options.hidden, options.top_k).ok()?;
        arm.compute.submit(&tasks).ok()?;
        std::hint::black_box(arm.compute.finish().ok()?);
        bytes += group.iter().map(Expert::bytes).sum::<usize>();
    }
    Some(bytes as f64 / start.elapsed().as_secs_f64() / 1e9)
}
