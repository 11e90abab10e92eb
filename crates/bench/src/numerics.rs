//! How numbers of two arms compare where they may differ: both were fed the same ids.

use serde::{Deserialize, Serialize};

use crate::arm::ArmRecord;

/// How numbers of the arms compare where they may differ.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Numerics {
    /// Share of rows with the same most likely id.
    pub agreement: f64,
    /// The first row with another one.
    pub divergence: Option<Divergence>,
    /// Mean negative log-likelihood of the fed ids in A, nats.
    pub nll_a: Option<f64>,
    /// In B.
    pub nll_b: Option<f64>,
    /// How far two runs of A are apart in it: the noise floor.
    pub nll_noise: Option<f64>,
    /// Kullback–Leibler divergence of B's next-id distribution from A's, the mean over some rows, nats.
    pub kl: Option<f64>,
    /// The largest of these rows.
    pub kl_max: Option<f64>,
    /// The mean between two runs of A: the noise floor.
    pub kl_noise: Option<f64>,
}

/// The first row whose most likely id differs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Divergence {
    /// Which prompt.
    pub prompt: usize,
    /// Which row after it.
    pub row: usize,
    /// A's id.
    pub a: u32,
    /// B's id.
    pub b: u32,
    /// How far A's most likely logit was above the next one.
    pub margin: Option<f32>,
}

impl Numerics {
    /// Compares A with B, and with a second run of A where there is one.
    pub fn of(a: &ArmRecord, again: Option<&ArmRecord>, b: &ArmRecord) -> Numerics {
        let (mut same, mut all) = (0usize, 0usize);
        for (a, b) in a.measured().zip(b.measured()) {
            same += a.ids.iter().zip(&b.ids).filter(|(a, b)| a == b).count();
            all += a.ids.len();
        }
        let noise = nll(a).zip(again.and_then(nll)).map(|(first, second)| (first - second).abs());
        let of_b = divergences(a, b);
        Numerics {
            agreement: same as f64 / all.max(1) as f64,
            divergence: first_divergence(a, b),
            nll_a: nll(a),
            nll_b: nll(b),
            nll_noise: noise,
            kl: mean(&of_b),
            kl_max: of_b.iter().copied().reduce(f64::max),
            kl_noise: again.and_then(|again| mean(&divergences(a, again))),
        }
    }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn nll(record: &ArmRecord) -> Option<f64> {
    let values: Option<Vec<f64>> = record.measured().map(|row| row.nll).collect();
    mean(&values?)
}

fn first_divergence(a: &ArmRecord, b: &ArmRecord) -> Option<Divergence> {
    a.measured().zip(b.measured()).enumerate().find_map(|(prompt, (a, b))| {
        let row = a.ids.iter().zip(&b.ids).position(|(a, b)| a != b)?;
        Some(Divergence { prompt, row, a: a.ids[row], b: b.ids[row], margin: a.margins.get(row).copied() })
    })
}

/// The divergence of each row whose logits were kept.
fn divergences(a: &ArmRecord, b: &ArmRecord) -> Vec<f64> {
    let rows = a.measured().zip(b.measured()).flat_map(|(a, b)| a.logits.iter().zip(&b.logits));
    rows.filter(|(a, b)| a.len() == b.len()).map(|(a, b)| kl(a, b)).collect()
}

/// Σ p (ln p − ln q) of the distributions that two rows of logits mean, in nats.
fn kl(a: &[f32], b: &[f32]) -> f64 {
    let (norm_a, norm_b) = (log_sum(a), log_sum(b));
    let terms = a.iter().zip(b).map(|(&a, &b)| {
        let (ln_p, ln_q) = (f64::from(a) - norm_a, f64::from(b) - norm_b);
        ln_p.exp() * (ln_p - ln_q)
    });
    // Rounding may leave less than nothing.
    terms.sum::<f64>().max(0.0)
}

/// ln Σ exp of a row.
pub(crate) fn log_sum(logits: &[f32]) -> f64 {
    let most = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    most + logits.iter().map(|&logit| (f64::from(logit) - most).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_zero_of_the_same_distribution_and_ln_2_of_half_of_it() {
        assert_eq!(kl(&[1.0, 2.0], &[3.0, 4.0]), 0.0);
        // All on one id against one half on it.
        assert!((kl(&[0.0, -200.0], &[0.0, 0.0]) - 2.0f64.ln()).abs() < 1e-9);
        assert!((log_sum(&[1000.0, 1000.0]) - (1000.0 + 2.0f64.ln())).abs() < 1e-9);
    }
}
