//! Logits to a token.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Keeps the likeliest tokens up to this much probability, in (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Keeps this many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps tokens of at least this share of the likeliest one's probability, in [0, 1]; 0 keeps all.
    pub min_p: f32,
    /// Begins the random sequence: the same seed gives the same text.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 };

    /// Checks the ranges.
    ///
    /// # Errors
    /// The first value out of its range.
    pub fn validate(&self) -> Result<(), SamplingError> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err(SamplingError::Temperature(self.temperature));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(SamplingError::TopP(self.top_p));
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return Err(SamplingError::MinP(self.min_p));
        }
        Ok(())
    }
}

/// A sampling setting out of its range.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// Negative, infinite or not a number.
    #[error("temperature must be 0 or more, got {0}; 0 takes the most likely token")]
    Temperature(f32),
    /// Outside (0, 1].
    #[error("top-p must be above 0 and at most 1, got {0}; 1 keeps all tokens")]
    TopP(f32),
    /// Outside [0, 1].
    #[error("min-p must be between 0 and 1, got {0}; 0 keeps all tokens")]
    MinP(f32),
}

/// Draws tokens. One draw of the random sequence a token, none where the choice is greedy.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    random: ChaCha8Rng,
    /// Kept between tokens for its memory.
    candidates: Vec<Candidate>,
}

/// A token still in the draw.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    /// Probability relative to the likeliest token's, which has 1.
    weight: f64,
}

impl Sampler {
    /// A sampler at the beginning of its random sequence.
    ///
    /// # Errors
    /// A setting is out of its range.
    pub fn new(sampling: Sampling) -> Result<Sampler, SamplingError> {
        sampling.validate()?;
        let random = ChaCha8Rng::seed_from_u64(sampling.seed);
        Ok(Sampler { sampling, random, candidates: Vec::new() })
    }

    /// What was asked for.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// Chooses a token. `logits[id]` belongs to `id`; NaN counts as negative infinity. Where every
    /// logit is, or there is none, the answer is 0.
    ///
    /// The filters follow one another as elsewhere: temperature, top-k, top-p over what top-k left,
    /// min-p.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let best = greedy(logits);
        let top = logits.get(best as usize).copied().unwrap_or(f32::NAN);
        // An infinite logit leaves nothing to weigh: its probability is 1.
        if self.sampling.temperature == 0.0 || !top.is_finite() {
            return best;
        }
        self.weigh(logits, top);
        self.keep_top_k();
        self.keep_top_p();
        if self.sampling.min_p > 0.0 {
            let least = f64::from(self.sampling.min_p);
            self.candidates.retain(|candidate| candidate.weight >= least);
        }
        self.draw().unwrap_or(best)
    }

    /// Fills `candidates` with every token of a weight above 0, by ascending id.
    fn weigh(&mut self, logits: &[f32], top: f32) {
        let temperature = f64::from(self.sampling.temperature);
        let weight = |logit: f32| ((f64::from(logit) - f64::from(top)) / temperature).exp();
        self.candidates.clear();
        let weighed = (0u32..).zip(logits).filter(|(_, logit)| !logit.is_nan());
        self.candidates.extend(
            weighed
                .map(|(id, &logit)| Candidate { id, weight: weight(logit) })
                .filter(|candidate| candidate.weight > 0.0),
        );
    }

    fn keep_top_k(&mut self) {
        let k = self.sampling.top_k;
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, likelier);
            self.candidates.truncate(k);
            self.candidates.sort_unstable_by(likelier);
        }
    }

    /// Keeps the shortest run of likeliest tokens that reaches top-p, at least one.
    fn keep_top_p(&mut self) {
        if self.sampling.top_p >= 1.0 {
            return;
        }
        let total: f64 = self.candidates.iter().map(|candidate| candidate.weight).sum();
        let wanted = f64::from(self.sampling.top_p) * total;
        // The run is usually short and the vocabulary long, so only as much is sorted as is needed.
        let (mut sorted, mut reached, mut kept) = (0, 0.0, 0);
        while sorted < self.candidates.len() && reached < wanted {
            let rest = &mut self.candidates[sorted..];
            let chunk = (sorted * 7).max(64).min(rest.len());
            if chunk < rest.len() {
                rest.select_nth_unstable_by(chunk - 1, likelier);
            }
            rest[..chunk].sort_unstable_by(likelier);
            for candidate in &rest[..chunk] {
                if reached >= wanted {
                    break;
                }
                reached += candidate.weight;
                kept += 1;
            }
            sorted += chunk;
        }
        self.candidates.truncate(kept.max(1));
    }

    /// Draws one of the candidates by weight; `None` when there is none.
    fn draw(&mut self) -> Option<u32> {
        let total: f64 = self.candidates.iter().map(|candidate| candidate.weight).sum();
        // 53 bits: a uniform number in [0, 1), by hand so that no library's version changes texts.
        let uniform = (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = uniform * total;
        for candidate in &self.candidates {
            if left < candidate.weight {
                return Some(candidate.id);
            }
            left -= candidate.weight;
        }
        // Rounding may leave a crumb beyond the last.
        self.candidates.last().map(|candidate| candidate.id)
    }
}

/// The largest logit's id, the lowest among equals; NaN counts as negative infinity.
pub fn greedy(logits: &[f32]) -> u32 {
    let mut best = (0u32, f32::NEG_INFINITY);
    for (id, &logit) in (0u32..).zip(logits) {
        if logit > best.1 {
            best = (id, logit);
        }
    }
    best.0
}

/// Orders by descending weight, equals by ascending id.
fn likelier(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampler(temperature: f32, top_k: usize, top_p: f32, min_p: f32) -> Sampler {
        Sampler::new(Sampling { temperature, top_p, top_k, min_p, seed: 7 }).unwrap()
    }

    /// The ids that can be drawn, ascending.
    fn support(mut sampler: Sampler, logits: &[f32]) -> Vec<u32> {
        let mut seen: Vec<u32> = (0..2000).map(|_| sampler.sample(logits)).collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    }

    /// Logits of the given probabilities.
    fn logits(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals() {
        let mut sampler = Sampler::new(Sampling::GREEDY).unwrap();
        assert_eq!(sampler.sample(&[0.0, 2.0, 2.0, 1.0]), 1);
        assert_eq!(sampler.sample(&[-0.0, 0.0]), 0);
    }

    #[test]
    fn nan_and_infinities_are_survived() {
        for temperature in [0.0, 1.0] {
            let mut sampler = sampler(temperature, 0, 0.9, 0.0);
            let (nan, infinity) = (f32::NAN, f32::INFINITY);
            assert_eq!(sampler.sample(&[nan, -1e30, nan]), 1);
            assert_eq!(sampler.sample(&[nan, nan]), 0);
            assert_eq!(sampler.sample(&[-infinity, -infinity]), 0);
            assert_eq!(sampler.sample(&[1.0, infinity, infinity]), 1);
            assert_eq!(sampler.sample(&[]), 0);
        }
    }

    #[test]
    fn draws_follow_the_distribution() {
        let probabilities = [0.4, 0.3, 0.15, 0.1, 0.05];
        for (temperature, top_p) in [(1.0f32, 1.0f32), (2.0, 1.0), (1.0, 0.9999)] {
            let mut sampler = sampler(temperature, 0, top_p, 0.0);
            let scores = logits(&probabilities);
            let mut counts = [0u32; 5];
            for _ in 0..20_000 {
                counts[sampler.sample(&scores) as usize] += 1;
            }
            let tempered = probabilities.map(|p| p.powf(1.0 / temperature));
            let total: f32 = tempered.iter().sum();
            let chi_square: f32 = (0..5)
                .map(|i| {
                    let expected = 20_000.0 * tempered[i] / total;
                    (counts[i] as f32 - expected).powi(2) / expected
                })
                .sum();
            // The 99.9th percentile with 4 degrees of freedom.
            assert!(chi_square < 18.47, "{chi_square} {counts:?}");
        }
    }

    #[test]
    fn each_filter_keeps_what_it_should() {
        let scores = logits(&[0.05, 0.4, 0.3, 0.15, 0.1]);
        assert_eq!(support(sampler(1.0, 0, 1.0, 0.0), &scores), [0, 1, 2, 3, 4]);
        assert_eq!(support(sampler(1.0, 2, 1.0, 0.0), &scores), [1, 2]);
        assert_eq!(support(sampler(1.0, 0, 0.75, 0.0), &scores), [1, 2, 3]);
        assert_eq!(support(sampler(1.0, 0, 0.0001, 0.0), &scores), [1]);
        assert_eq!(support(sampler(1.0, 0, 1.0, 0.3), &scores), [1, 2, 3]);
    }

    #[test]
    fn top_p_measures_what_top_k_left() {
        // Alone, 0.5 is reached by the first two. Of top-k's three (0.9 in all) 0.4 is 0.44, so the
        // first two again; with top-p 0.42 the first alone suffices only after top-k.
        let scores = logits(&[0.4, 0.3, 0.2, 0.1]);
        assert_eq!(support(sampler(1.0, 0, 0.42, 0.0), &scores), [0, 1]);
        assert_eq!(support(sampler(1.0, 3, 0.42, 0.0), &scores), [0]);
    }

    #[test]
    fn filters_come_after_temperature() {
        // At temperature 2 the weights are the square roots, so min-p 0.3 keeps 0.1 of 0.9.
        let scores = logits(&[0.9, 0.1]);
        assert_eq!(support(sampler(1.0, 0, 1.0, 0.3), &scores), [0]);
        assert_eq!(support(sampler(2.0, 0, 1.0, 0.3), &scores), [0, 1]);
    }

    #[test]
    fn equals_at_the_border_go_by_lowest_id() {
        let scores = [1.0, 3.0, 3.0, 3.0];
        assert_eq!(support(sampler(1.0, 2, 1.0, 0.0), &scores), [1, 2]);
        assert_eq!(support(sampler(1.0, 0, 0.4, 0.0), &scores), [1, 2]);
    }

    #[test]
    fn the_same_seed_draws_the_same_tokens() {
        let scores: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin()).collect();
        let draw = |seed| -> Vec<u32> {
            let sampling = Sampling { temperature: 0.8, top_p: 0.95, top_k: 0, min_p: 0.0, seed };
            let mut sampler = Sampler::new(sampling).unwrap();
            (0..50).map(|_| sampler.sample(&scores)).collect()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }

    #[test]
    fn values_out_of_range_are_refused() {
        let ok = Sampling { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 };
        for bad in [
            Sampling { temperature: -0.1, ..ok },
            Sampling { temperature: f32::NAN, ..ok },
            Sampling { temperature: f32::INFINITY, ..ok },
            Sampling { top_p: 0.0, ..ok },
            Sampling { top_p: 1.01, ..ok },
            Sampling { top_p: f32::NAN, ..ok },
            Sampling { min_p: -0.1, ..ok },
            Sampling { min_p: 1.1, ..ok },
        ] {
            assert!(Sampler::new(bad).is_err(), "{bad:?}");
        }
        assert!(ok.validate().is_ok());
    }

    proptest! {
        #[test]
        fn top_p_keeps_the_shortest_sufficient_run(
            scores in prop::collection::vec(-8f32..8.0, 1..700),
            top_p in 0.01f32..0.999,
        ) {
            let mut sampler = sampler(1.0, 0, top_p, 0.0);
            sampler.weigh(&scores, scores[greedy(&scores) as usize]);
            let mut all = sampler.candidates.clone();
            let total: f64 = all.iter().map(|candidate| candidate.weight).sum();
            sampler.keep_top_p();
            all.sort_by(likelier);
            let ids: Vec<u32> = sampler.candidates.iter().map(|candidate| candidate.id).collect();
            let expected: Vec<u32> = all[..ids.len()].iter().map(|candidate| candidate.id).collect();
            prop_assert_eq!(&ids, &expected);
            let mass = |n: usize| all[..n].iter().map(|candidate| candidate.weight).sum::<f64>() / total;
            prop_assert!(mass(ids.len()) >= f64::from(top_p) - 1e-9);
            prop_assert!(mass(ids.len() - 1) < f64::from(top_p) + 1e-9);
        }

        #[test]
        fn any_logits_give_a_token_of_the_vocabulary(
            bits in prop::collection::vec(any::<u32>(), 1..50),
            temperature in 0f32..3.0, top_k in 0usize..60, top_p in 0.01f32..=1.0, min_p in 0f32..=1.0,
        ) {
            let scores: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            let mut sampler = sampler(temperature, top_k, top_p, min_p);
            let id = sampler.sample(&scores) as usize;
            prop_assert!(id < scores.len());
            prop_assert!(!scores[id].is_nan() || scores.iter().all(|s| s.is_nan() || *s == f32::NEG_INFINITY));
        }
    }
}
