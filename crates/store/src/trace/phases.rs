//! Synthetic traces whose popular experts change: for judging how fast a policy forgets.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Selection, Trace, TraceLayer, TracePhase, TraceRow};
use crate::policy::Share;

/// What is generated. The same spec gives the same trace on every machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PhaseSpec {
    /// Layers, at least 1.
    pub layers: u32,
    /// Experts of a layer, at least 1.
    pub experts: u32,
    /// Experts that a token uses of a layer, at least 1 and at most `experts`.
    pub top_k: u32,
    /// Tokens.
    pub tokens: u32,
    /// Tokens after which every layer's popularity is dealt anew, at least 1.
    pub phase_tokens: u32,
    /// Exponent of popularity: the expert of rank r is drawn in proportion to (r + 1)^−zipf.
    pub zipf: f64,
    /// Probability that a use repeats one of the token before.
    pub repeat: f64,
    /// Tokens after each change that count (decode); the others warm (prefill). The first phase only warms,
    /// unless there is no other. `None` counts all.
    pub after: Option<u32>,
    /// Bytes of an expert.
    pub expert_bytes: u64,
    /// Begins the random numbers.
    pub seed: u64,
}

/// A spec that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no such trace can be made: {0}")]
pub struct PhaseError(String);

/// Selections of a trace at most.
const MOST_SELECTIONS: u64 = 1 << 27;

/// In [0, 1).
fn unit(random: &mut ChaCha8Rng) -> f64 {
    (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

fn shuffle(random: &mut ChaCha8Rng, cards: &mut [u32]) {
    for at in (1..cards.len()).rev() {
        cards.swap(at, (random.next_u64() % (at as u64 + 1)) as usize);
    }
}

impl PhaseSpec {
    fn check(&self) -> Result<(), PhaseError> {
        let refuse = |reason: String| Err(PhaseError(reason));
        if self.layers == 0 || self.experts == 0 || self.tokens == 0 || self.phase_tokens == 0 {
            return refuse("layers, experts, tokens and phases must be at least 1 each".into());
        }
        if self.top_k == 0 || self.top_k > self.experts {
            return refuse(format!("{} of {} experts cannot be chosen", self.top_k, self.experts));
        }
        if !(self.zipf.is_finite() && self.zipf >= 0.0 && (0.0..=1.0).contains(&self.repeat)) {
            return refuse("zipf must be 0 or more, repeat between 0 and 1".into());
        }
        let selections =
            u64::from(self.tokens) * u64::from(self.layers).saturating_mul(u64::from(self.top_k));
        if selections > MOST_SELECTIONS {
            return refuse(format!("{selections} selections are more than {MOST_SELECTIONS}"));
        }
        Ok(())
    }

    /// Whether a token counts.
    fn counts(&self, token: u32) -> bool {
        let several = self.tokens > self.phase_tokens;
        let (phase, within) = (token / self.phase_tokens, token % self.phase_tokens);
        self.after.is_none_or(|after| within < after && (phase > 0 || !several))
    }

    /// Generates the trace.
    ///
    /// # Errors
    /// Numbers that contradict each other or are beyond reason.
    pub fn generate(&self) -> Result<Trace, PhaseError> {
        self.check()?;
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        // Sums of the weights up to each rank.
        let sums: Vec<f64> = (0..self.experts)
            .scan(0.0, |sum, rank| {
                *sum += f64::from(rank + 1).powf(-self.zipf);
                Some(*sum)
            })
            .collect();
        let layer =
            |number| TraceLayer { number, expert_bytes: self.expert_bytes, experts: self.experts as usize };
        let mut trace =
            Trace { layers: (0..self.layers).map(layer).collect(), rows: Vec::new(), selections: Vec::new() };
        let mut dealt: Vec<Vec<u32>> = vec![(0..self.experts).collect(); self.layers as usize];
        let mut last: Vec<Vec<u32>> = vec![Vec::new(); self.layers as usize];
        for token in 0..self.tokens {
            if token % self.phase_tokens == 0 {
                dealt.iter_mut().for_each(|cards| shuffle(&mut random, cards));
            }
            let phase = if self.counts(token) { TracePhase::Decode } else { TracePhase::Prefill };
            for layer in 0..self.layers as usize {
                let chosen = self.choose(&mut random, &sums, &dealt[layer], &last[layer]);
                let start = trace.selections.len();
                let selection = |&expert: &u32| Selection { expert, share: Share::EVEN };
                trace.selections.extend(chosen.iter().map(selection));
                // At most 2^27 rows.
                let (group, selections) = (trace.rows.len() as u32, start..trace.selections.len());
                trace.rows.push(TraceRow { layer: layer as u32, phase, group, selections });
                last[layer] = chosen;
            }
        }
        Ok(trace)
    }

    /// Distinct experts of one token and layer: some of the last token's, the rest by popularity.
    fn choose(&self, random: &mut ChaCha8Rng, sums: &[f64], cards: &[u32], last: &[u32]) -> Vec<u32> {
        let mut chosen: Vec<u32> = Vec::with_capacity(self.top_k as usize);
        chosen.extend(last.iter().copied().filter(|_| unit(random) < self.repeat));
        let all = sums.last().copied().unwrap_or(0.0);
        while chosen.len() < self.top_k as usize {
            let drawn = unit(random) * all;
            let rank = sums.partition_point(|&sum| sum <= drawn).min(cards.len() - 1);
            // A popularity that concentrates on fewer experts than are wanted must still end: the next free
            // rank is taken.
            let free = (0..cards.len()).map(|step| cards[(rank + step) % cards.len()]);
            chosen.extend(free.into_iter().find(|card| !chosen.contains(card)));
        }
        chosen
    }
}
