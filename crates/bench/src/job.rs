//! What one arm is told to do, and the ids it does it with.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What decoding is fed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Feed {
    /// Random ids for a model with random weights, greedy for any other.
    #[default]
    Auto,
    /// Seeded random ids: models with random weights route degenerately on their own greedy text.
    Random,
    /// The most likely id of the row before.
    Greedy,
    /// The end of each given sequence; what is before it is the prompt.
    Ids,
}

impl fmt::Display for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Feed::Auto => "auto",
            Feed::Random => "random",
            Feed::Greedy => "greedy",
            Feed::Ids => "ids",
        })
    }
}

/// State of the page cache before each prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PageCache {
    /// Nothing of the weight files is in it.
    #[default]
    Cold,
    /// All of the weight files is in it.
    Warm,
}

impl fmt::Display for PageCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == PageCache::Cold { "cold" } else { "warm" })
    }
}

/// What an arm does: prompts in rotation in one process, some to warm up and the others to measure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Begins the random ids.
    pub seed: u64,
    /// Prompts that count.
    pub prompts: usize,
    /// Prompts before them, which fill the expert cache.
    pub warmup: usize,
    /// Ids of a random prompt.
    pub prompt_tokens: usize,
    /// Rows decoded after each prompt.
    pub tokens: usize,
    /// What decoding is fed.
    pub feed: Feed,
    /// State of the page cache.
    pub page_cache: PageCache,
    /// Whether logits are looked at for more than the most likely id, as a comparison of numerics needs.
    pub numerics: bool,
    /// Given ids instead of random ones.
    pub sequences: Option<Vec<Vec<u32>>>,
}

/// Ids of one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// What is computed before decoding.
    pub ids: Vec<u32>,
    /// What decoding is fed; none where it is greedy.
    pub forced: Option<Vec<u32>>,
}

/// A job that cannot be done.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// A sequence too short to leave a prompt.
    #[error(
        "sequence {at} has {len} ids, and --feed ids decodes the last {tokens} of them after at least one: give longer sequences or fewer --max-tokens"
    )]
    ShortSequence {
        /// Its place.
        at: usize,
        /// Its ids.
        len: usize,
        /// Rows to decode.
        tokens: usize,
    },
    /// An id outside the vocabulary.
    #[error("sequence {at} has the id {id}, and the model's ids are below {vocab}")]
    Vocabulary {
        /// The sequence's place.
        at: usize,
        /// The id.
        id: u32,
        /// Ids of the model.
        vocab: usize,
    },
    /// `--feed ids` without ids.
    #[error("--feed ids needs --ids FILE")]
    NoIds,
    /// A list of sequences without one.
    #[error("the list of sequences, or one of them, is empty")]
    Empty,
}

impl Job {
    /// The prompts in order, those that warm up first. Warm-ups are other ids than what is measured,
    /// as far as the sequences go round. `feed` is what [`Feed::Auto`] became.
    ///
    /// # Errors
    /// Sequences that are empty, too short, or have ids of another vocabulary.
    pub fn prompts(&self, feed: Feed, vocab: usize) -> Result<Vec<Prompt>, JobError> {
        let order = (self.prompts..self.prompts + self.warmup).chain(0..self.prompts);
        match &self.sequences {
            Some(sequences) => order.map(|at| self.given(sequences, at, feed, vocab)).collect(),
            None if feed == Feed::Ids => Err(JobError::NoIds),
            None => Ok(order.map(|at| self.random(at, feed, vocab)).collect()),
        }
    }

    fn given(&self, sequences: &[Vec<u32>], at: usize, feed: Feed, vocab: usize) -> Result<Prompt, JobError> {
        let at = at % sequences.len().max(1);
        let ids = sequences.get(at).filter(|ids| !ids.is_empty()).ok_or(JobError::Empty)?;
        if let Some(&id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(JobError::Vocabulary { at, id, vocab });
        }
        if feed != Feed::Ids {
            let forced = (feed == Feed::Random).then(|| random_ids(self.seed, at, self.tokens, vocab));
            return Ok(Prompt { ids: ids.clone(), forced });
        }
        match ids.len().checked_sub(self.tokens) {
            Some(cut @ 1..) => Ok(Prompt { ids: ids[..cut].to_vec(), forced: Some(ids[cut..].to_vec()) }),
            _ => Err(JobError::ShortSequence { at, len: ids.len(), tokens: self.tokens }),
        }
    }

    fn random(&self, at: usize, feed: Feed, vocab: usize) -> Prompt {
        let mut ids = random_ids(self.seed, at, self.prompt_tokens + self.tokens, vocab);
        let forced = ids.split_off(self.prompt_tokens);
        Prompt { ids, forced: (feed == Feed::Random).then_some(forced) }
    }
}

/// `count` ids below `vocab` that are the same for the same seed and place (SplitMix64).
fn random_ids(seed: u64, at: usize, count: usize, vocab: usize) -> Vec<u32> {
    let mut state = seed.wrapping_add((at as u64).wrapping_mul(0xd1b5_4a32_d192_ed03));
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    // A vocabulary is below 2^32.
    (0..count).map(|_| (next() % vocab.max(1) as u64) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> Job {
        Job {
            seed: 7,
            prompts: 3,
            warmup: 1,
            prompt_tokens: 4,
            tokens: 5,
            feed: Feed::Auto,
            page_cache: PageCache::Warm,
            numerics: false,
            sequences: None,
        }
    }

    #[test]
    fn prompts_rotate_and_depend_on_the_seed_alone() {
        let prompts = job().prompts(Feed::Random, 50).unwrap();
        assert_eq!(prompts.len(), 4);
        for (i, prompt) in prompts.iter().enumerate() {
            assert_eq!((prompt.ids.len(), prompt.forced.as_ref().map(Vec::len)), (4, Some(5)));
            assert!(prompt.ids.iter().all(|id| *id < 50));
            assert!(prompts[..i].iter().all(|earlier| earlier != prompt));
        }
        assert_eq!(prompts, job().prompts(Feed::Random, 50).unwrap());
        assert_ne!(prompts, Job { seed: 8, ..job() }.prompts(Feed::Random, 50).unwrap());
    }

    #[test]
    fn greedy_decoding_is_fed_nothing() {
        assert!(job().prompts(Feed::Greedy, 50).unwrap().iter().all(|prompt| prompt.forced.is_none()));
    }

    #[test]
    fn given_sequences_end_in_what_is_decoded() {
        let sequences = vec![(0..8).collect(), (10..18).collect()];
        let given = Job { sequences: Some(sequences), ..job() };
        let prompts = given.prompts(Feed::Ids, 50).unwrap();
        assert_eq!(prompts[0].ids, [10, 11, 12], "the warm-up is the sequence after the measured ones");
        assert_eq!(prompts[1].ids, [0, 1, 2]);
        assert_eq!(prompts[1].forced.as_deref(), Some(&[3, 4, 5, 6, 7][..]));
    }

    #[test]
    fn sequences_that_do_not_suit_are_refused() {
        let with = |sequences: Vec<Vec<u32>>| Job { sequences: Some(sequences), ..job() };
        let short = with(vec![vec![1; 5]]).prompts(Feed::Ids, 50);
        assert_eq!(short, Err(JobError::ShortSequence { at: 0, len: 5, tokens: 5 }));
        let foreign = with(vec![vec![1, 50]]).prompts(Feed::Greedy, 50);
        assert_eq!(foreign, Err(JobError::Vocabulary { at: 0, id: 50, vocab: 50 }));
        assert_eq!(with(vec![]).prompts(Feed::Greedy, 50), Err(JobError::Empty));
        assert_eq!(job().prompts(Feed::Ids, 50), Err(JobError::NoIds));
    }
}
