//! Teacher-forced evaluation: how well the model predicts given ids.

use std::collections::BTreeMap;

use metaltail_model::CancelFlag;
use serde::Serialize;

use crate::engine::Engine;
use crate::error::EngineError;
use crate::sampler::greedy;
use crate::session::Session;
use crate::telemetry::Phase;

/// Rows whose logits are held at a time: a row of a large vocabulary takes most of a megabyte.
const LOGIT_ROWS: usize = 16;

/// Result of [`score`].
#[derive(Clone, Debug, Default, Serialize)]
pub struct Score {
    /// Mean negative log-likelihood over all predicted tokens, in nats; none if there are none.
    pub nll: Option<f64>,
    /// Predicted tokens.
    pub tokens: usize,
    /// Mean of each sequence; none for a sequence of one id.
    pub per_sequence: Vec<Option<f64>>,
    /// Most likely next id after every id.
    pub argmax: Vec<Vec<u32>>,
    /// Logit rows of the first sequence at the positions asked for.
    pub logits: BTreeMap<usize, Vec<f32>>,
}

/// Scores sequences, each from an empty context.
///
/// # Errors
/// Empty sequences, sequences longer than the context, positions past the end of the first
/// sequence, and all that a step may refuse.
pub fn score(
    engine: &Engine,
    sequences: &[Vec<u32>],
    positions: &[usize],
    cancel: &CancelFlag,
    progress: &mut dyn FnMut(usize),
) -> Result<Score, EngineError> {
    let len = sequences.first().map_or(0, Vec::len);
    if let Some(&position) = positions.iter().find(|position| **position >= len) {
        return Err(EngineError::PositionPastEnd { position, len });
    }
    engine.telemetry().begin(Phase::Prefill);
    let result = score_all(engine, sequences, positions, cancel, progress);
    engine.rest();
    result
}

fn score_all(
    engine: &Engine,
    sequences: &[Vec<u32>],
    positions: &[usize],
    cancel: &CancelFlag,
    progress: &mut dyn FnMut(usize),
) -> Result<Score, EngineError> {
    let mut result = Score::default();
    let mut total = 0.0;
    for (index, ids) in sequences.iter().enumerate() {
        if ids.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let wanted = if index == 0 { positions } else { &[] };
        let mut sequence = Sequence { ids, wanted, sum: 0.0, argmax: Vec::new() };
        let mut session = Session::new(engine);
        session.extend(ids, cancel, &mut |first, hidden| {
            let width = engine.plan().hidden;
            for (i, rows) in hidden.chunks(LOGIT_ROWS * width).enumerate() {
                let logits = engine.logits(rows)?;
                sequence.take(first + i * LOGIT_ROWS, &logits, engine.plan().vocab, &mut result);
            }
            progress(hidden.len() / width);
            Ok(())
        })?;
        let predicted = ids.len() - 1;
        total += sequence.sum;
        result.tokens += predicted;
        result.per_sequence.push((predicted > 0).then(|| sequence.sum / predicted as f64));
        result.argmax.push(sequence.argmax);
    }
    result.nll = (result.tokens > 0).then(|| total / result.tokens as f64);
    Ok(result)
}

struct Sequence<'a> {
    ids: &'a [u32],
    wanted: &'a [usize],
    sum: f64,
    argmax: Vec<u32>,
}

impl Sequence<'_> {
    fn take(&mut self, first: usize, logits: &[f32], vocab: usize, result: &mut Score) {
        for (i, row) in logits.chunks(vocab).enumerate() {
            let position = first + i;
            self.argmax.push(greedy(row));
            if let Some(&next) = self.ids.get(position + 1) {
                self.sum += nll(row, next);
            }
            if self.wanted.contains(&position) {
                result.logits.insert(position, row.to_vec());
            }
        }
    }
}

/// `ln Σ exp(row) − row[id]`, in f64.
fn nll(row: &[f32], id: u32) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|value| f64::from(value - max).exp()).sum();
    sum.ln() + f64::from(max) - row.get(id as usize).map_or(f64::NEG_INFINITY, |v| f64::from(*v))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nll_of_equal_logits_is_the_logarithm_of_their_number() {
        assert!((nll(&[3.0; 8], 5) - 8f64.ln()).abs() < 1e-12);
    }
}
