//! How fast is a resident model, and how far is that from the memory's bandwidth?
//!
//! Tokens are seeded random ids (random weights route degenerately on their own greedy text).
//! Every token of decode reads the dense weights and its experts once; that many bytes a second
//! over a plain read of memory is the answer.

use std::time::Instant;

use metaltail_engine::{Engine, EngineError, Session};
use metaltail_kernels::Pool;
use metaltail_model::CancelFlag;
use serde::Serialize;

use crate::{Bandwidth, Spread};

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct DecodeOptions {
    /// Ids of each prompt.
    pub prompt: usize,
    /// Tokens decoded a round.
    pub tokens: usize,
    /// Rounds.
    pub rounds: usize,
    /// Seed of the ids.
    pub seed: u64,
}

/// Result of [`measure`].
#[derive(Clone, Debug, Serialize)]
pub struct DecodeReport {
    /// Bytes that one decoded token reads: dense weights and its experts.
    pub bytes_per_token: u64,
    /// Look-ups of the measured rounds that were answered from memory, as a share of all.
    pub hit_rate: f64,
    /// Plain read of memory.
    pub ceiling_gb_per_second: Spread,
    /// Decode.
    pub decode_tokens_per_second: Spread,
    /// Bytes a token times tokens a second.
    pub decode_gb_per_second: Spread,
    /// The same over the plain read of the same round.
    pub of_ceiling: Spread,
    /// Prefill.
    pub prefill_tokens_per_second: Spread,
}

/// Measures an engine whose experts all fit; rounds before the first one
/// fill the cache and are not counted.
///
/// # Errors
/// What a step may refuse.
pub fn measure(
    engine: &Engine,
    options: &DecodeOptions,
    bytes_per_token: u64,
    progress: &mut dyn FnMut(usize),
) -> Result<Option<DecodeReport>, EngineError> {
    let pool = Pool::new(engine.resolved().threads);
    let ceiling = Bandwidth::new(256 << 20);
    let (mut plain, mut rates, mut ratios, mut prefill) = (vec![], vec![], vec![], vec![]);
    warm_up(engine, options)?;
    engine.telemetry().reset();
    for round in 0..options.rounds {
        let bandwidth = ceiling.measure(&pool);
        let seed = options.seed.wrapping_add(round as u64);
        let (prompt_rate, rate) = one_round(engine, options, seed)?;
        plain.push(bandwidth);
        rates.push(rate);
        ratios.push(rate * bytes_per_token as f64 / 1e9 / bandwidth);
        prefill.push(prompt_rate);
        progress(round + 1);
    }
    let figures = engine.telemetry().figures();
    let cached = figures.prefill.cached + figures.decode.cached;
    let lookups = figures.prefill.lookups + figures.decode.lookups;
    let rates_gb: Vec<f64> = rates.iter().map(|rate| rate * bytes_per_token as f64 / 1e9).collect();
    let report = || {
        Some(DecodeReport {
            bytes_per_token,
            hit_rate: cached as f64 / lookups.max(1) as f64,
            ceiling_gb_per_second: Spread::of(&plain)?,
            decode_tokens_per_second: Spread::of(&rates)?,
            decode_gb_per_second: Spread::of(&rates_gb)?,
            of_ceiling: Spread::of(&ratios)?,
            prefill_tokens_per_second: Spread::of(&prefill)?,
        })
    };
    Ok(report())
}

/// Rounds of other ids until none of their experts had to be read, or reading more does not help.
fn warm_up(engine: &Engine, options: &DecodeOptions) -> Result<(), EngineError> {
    const MOST: u64 = 12;
    for round in 0..MOST {
        engine.telemetry().reset();
        one_round(engine, options, options.seed.wrapping_add(1 << 32).wrapping_add(round))?;
        let figures = engine.telemetry().figures();
        if figures.prefill.misses + figures.decode.misses == 0 {
            break;
        }
    }
    Ok(())
}

/// Prefill and decode of random ids: tokens a second of each.
fn one_round(engine: &Engine, options: &DecodeOptions, seed: u64) -> Result<(f64, f64), EngineError> {
    let vocab = engine.plan().vocab as u64;
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut id = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % vocab) as u32
    };
    let prompt: Vec<u32> = (0..options.prompt).map(|_| id()).collect();
    let cancel = CancelFlag::new();
    let mut session = Session::new(engine);
    let start = Instant::now();
    session.extend(&prompt, &cancel, &mut |_, _| Ok(()))?;
    let prefill = options.prompt as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    for _ in 0..options.tokens {
        session.extend(&[id()], &cancel, &mut |_, hidden| {
            std::hint::black_box(engine.logits(hidden)?);
            Ok(())
        })?;
    }
    Ok((prefill, options.tokens as f64 / start.elapsed().as_secs_f64()))
}
