//! The usage profile: which experts a model used, across runs.
//!
//! A profile holds a count for every expert, in which old uses fade, and a sample of the last tokens'
//! choices, on which pin sizes are judged ([`pin`]). It belongs to one checkpoint: [`UsageIdentity`].
//!
//! **Fading.** At each save the counts that were there are multiplied by `2^(−new / half-life)`, where
//! `new` is the number of selections since the last save and the half-life is
//! [`HALF_LIFE`] selections for each expert of the model (GLM-5, 19,200 experts, 600 selections a token:
//! 33 thousand tokens). The sum of all counts so never exceeds half-life / ln 2 by much, and a profile
//! follows its user within some long conversations. Saving twice as often fades no faster.

mod coli;
mod error;
mod file;
mod lock;
pub mod pin;
mod pin_file;
mod recorder;
mod replace;
mod sample;
#[cfg(test)]
mod tests;

pub use coli::{ColiModel, ColiUsage};
pub use error::UsageError;
pub use lock::ProfileLock;
pub use pin_file::PinFile;
pub use recorder::{Saved, UsageRecorder, read_own, read_profile, write_coli, write_profile};
pub use sample::{SAMPLE_TOKENS, STEP_TOKENS};

use xxhash_rust::xxh3::xxh3_64;

use crate::geometry::LayerExperts;
use sample::{Sample, Staging};

/// Selections for each expert of a model after which a count weighs half.
pub const HALF_LIFE: u64 = 1024;

/// One use, in the fixed point of counts.
const ONE: u64 = 1 << 16;
/// The largest count, 2^47 uses: sums of all experts' counts stay far from overflow.
const MOST: u64 = 1 << 63;
/// Experts over all layers, as many as a trace may name.
const MOST_EXPERTS: usize = 1 << 20;
/// Experts of one layer: the sample keeps 16-bit numbers, of which the last means none.
const MOST_LAYER_EXPERTS: usize = u16::MAX as usize;
const MOST_TOP_K: u32 = 1 << 10;

/// Whose profile it is: the sparse layers, and the files they were read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageIdentity {
    /// (number, experts) of every sparse layer, in order.
    pub layers: Vec<(u32, u32)>,
    /// Experts that a token chooses in a layer, the most of any layer.
    pub top_k: u32,
    /// Hash of what names the checkpoint's contents (manifest or index).
    pub checkpoint: u64,
}

impl UsageIdentity {
    /// The identity of a store's layers; `checkpoint` is whatever differs between two checkpoints of one
    /// shape, such as manifest, configuration, file names and lengths.
    ///
    /// # Errors
    /// [`UsageError::Shape`] for more layers or experts than a profile takes.
    pub fn new(layers: &[LayerExperts], top_k: usize, checkpoint: &[u8]) -> Result<Self, UsageError> {
        // Counts above 2^32 are refused by `check`.
        let size =
            |layer: &LayerExperts| (layer.layer, u32::try_from(layer.experts.len()).unwrap_or(u32::MAX));
        let identity = UsageIdentity {
            layers: layers.iter().map(size).collect(),
            top_k: u32::try_from(top_k).unwrap_or(u32::MAX),
            checkpoint: xxh3_64(checkpoint),
        };
        identity.check()?;
        Ok(identity)
    }

    /// Refuses shapes that a profile cannot hold.
    fn check(&self) -> Result<(), UsageError> {
        let refuse = |reason: String| Err(UsageError::Shape { reason });
        if self.layers.is_empty() {
            return refuse("the model has no sparse layers".into());
        }
        let total = self.layers.iter().fold(0usize, |sum, &(_, n)| sum.saturating_add(n as usize));
        if total > MOST_EXPERTS {
            return refuse(format!("{total} experts are more than the {MOST_EXPERTS} that a profile takes"));
        }
        if let Some((layer, n)) = self.layers.iter().find(|(_, n)| *n as usize >= MOST_LAYER_EXPERTS) {
            return refuse(format!("layer {layer} has {n} experts, more than {MOST_LAYER_EXPERTS}"));
        }
        if self.top_k == 0 || self.top_k > MOST_TOP_K {
            return refuse(format!("{} experts a token are outside 1 to {MOST_TOP_K}", self.top_k));
        }
        Ok(())
    }

    /// Hash of shape and checkpoint: names the default file.
    pub fn fingerprint(&self) -> u64 {
        xxh3_64(&file::identity_bytes(self))
    }

    /// Experts of all layers.
    pub fn experts(&self) -> usize {
        self.layers.iter().map(|&(_, n)| n as usize).sum()
    }

    /// Selections of one token: sparse layers × top-k.
    pub fn selections_per_token(&self) -> u64 {
        self.layers.len() as u64 * u64::from(self.top_k)
    }

    /// Selections after which a count weighs half.
    pub fn half_life(&self) -> u64 {
        HALF_LIFE * self.experts() as u64
    }

    /// What differs from another identity, in words; `None` where nothing does.
    pub fn difference(&self, other: &UsageIdentity) -> Option<String> {
        let shape = |id: &UsageIdentity| {
            format!("{} sparse layers, {} experts, {} a token", id.layers.len(), id.experts(), id.top_k)
        };
        if (&self.layers, self.top_k) != (&other.layers, other.top_k) {
            let (wanted, got) = (shape(self), shape(other));
            return Some(match wanted == got {
                true => "it has other layer numbers".into(),
                false => format!("wanted {wanted}, got {got}"),
            });
        }
        (self.checkpoint != other.checkpoint)
            .then(|| format!("wanted checkpoint {:016x}, got {:016x}", self.checkpoint, other.checkpoint))
    }

    /// Index of a layer by its number.
    fn index(&self, layer: u32) -> Option<usize> {
        self.layers.iter().position(|&(number, _)| number == layer)
    }

    /// Position of each layer's first expert among all.
    fn first(&self) -> Vec<usize> {
        let starts = self.layers.iter().scan(0, |next, &(_, n)| {
            let first = *next;
            *next += n as usize;
            Some(first)
        });
        starts.collect()
    }
}

/// Counts by expert and a sample of the last tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageProfile {
    identity: UsageIdentity,
    /// Selections that runs recorded, without fading.
    selections: u64,
    /// Uses of every expert, in 1/65,536, layer after layer.
    counts: Vec<u64>,
    first: Vec<usize>,
    sample: Sample,
}

impl UsageProfile {
    /// An empty profile.
    pub fn new(identity: UsageIdentity) -> UsageProfile {
        UsageProfile {
            selections: 0,
            counts: vec![0; identity.experts()],
            first: identity.first(),
            sample: Sample::new(&identity),
            identity,
        }
    }

    /// Whose it is.
    pub fn identity(&self) -> &UsageIdentity {
        &self.identity
    }

    /// Selections that runs recorded since the profile began, without fading: tokens × sparse layers ×
    /// top-k.
    pub fn selections(&self) -> u64 {
        self.selections
    }

    /// Sum of all counts, faded, in whole uses.
    pub fn weight(&self) -> u64 {
        let sum: u128 = self.counts.iter().map(|&count| u128::from(count)).sum();
        u64::try_from(sum / u128::from(ONE)).unwrap_or(u64::MAX)
    }

    /// Uses of an expert, faded; 0 for one that there is not.
    pub fn count(&self, layer: u32, expert: u32) -> f64 {
        let index = self.identity.index(layer).filter(|&at| expert < self.identity.layers[at].1);
        index.map_or(0.0, |at| self.counts[self.first[at] + expert as usize] as f64 / ONE as f64)
    }

    /// Tokens in the sample.
    pub fn sampled(&self) -> usize {
        self.sample.tokens.len()
    }

    /// Experts that were used, hottest first by uses a byte: `bytes` has those of an expert of each layer.
    /// Ties go to the lower layer, then the lower expert.
    pub fn hottest(&self, bytes: &[u64]) -> Vec<(u32, u32)> {
        pin::ranked(&self.identity, &self.counts, bytes)
    }

    /// Adds another profile of the same layers, such as that of the checkpoint a model was converted from.
    /// What is here fades by what comes; the sample becomes the other's where that has more. Returns the
    /// uses that came in.
    ///
    /// # Errors
    /// [`UsageError::History`] for other layers or another number of experts a token.
    pub fn add_profile(&mut self, other: &UsageProfile) -> Result<u64, UsageError> {
        let here = UsageIdentity { checkpoint: other.identity.checkpoint, ..self.identity.clone() };
        if let Some(reason) = here.difference(&other.identity) {
            return Err(UsageError::History { reason });
        }
        self.fade(other.weight());
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*more).min(MOST);
        }
        self.selections = self.selections.saturating_add(other.selections);
        if other.sample.tokens.len() > self.sample.tokens.len() {
            self.sample = other.sample.clone();
        }
        Ok(other.weight())
    }

    /// Takes in what was used since the last save; what was there fades by as much.
    fn absorb(&mut self, new: &Pending) {
        self.fade(new.selections);
        for (count, &uses) in self.counts.iter_mut().zip(&new.counts) {
            *count = count.saturating_add(uses.saturating_mul(ONE)).min(MOST);
        }
        self.selections = self.selections.saturating_add(new.selections);
        self.sample.extend(&new.sample);
    }

    fn fade(&mut self, selections: u64) {
        let half_lives = selections as f64 / self.identity.half_life().max(1) as f64;
        // Between 0 and 1, in 1/2^32.
        let factor = ((-half_lives).exp2() * (1u64 << 32) as f64) as u128;
        for count in &mut self.counts {
            *count = ((u128::from(*count) * factor) >> 32) as u64;
        }
    }

    /// Adds the counts of a history that another program wrote; one longer than the half-life is scaled
    /// down to it, so that it fades as our own does. Returns the uses that came in.
    fn add_history(&mut self, history: &[(usize, u32, u32)]) -> u64 {
        let sum: u64 = history.iter().map(|&(_, _, uses)| u64::from(uses)).sum();
        let most = self.identity.half_life().min(sum);
        for &(layer, expert, uses) in history {
            let scaled = u128::from(uses) * u128::from(ONE) * u128::from(most) / u128::from(sum.max(1));
            let count = &mut self.counts[self.first[layer] + expert as usize];
            *count = count.saturating_add(scaled as u64).min(MOST);
        }
        most
    }
}

/// What was used since the last save.
#[derive(Clone, Debug)]
struct Pending {
    counts: Vec<u64>,
    selections: u64,
    sample: Sample,
    staging: Staging,
}

impl Pending {
    fn new(identity: &UsageIdentity) -> Pending {
        Pending {
            counts: vec![0; identity.experts()],
            selections: 0,
            sample: Sample::new(identity),
            staging: Staging::default(),
        }
    }

    /// What the rows of a step chose in the layer of index `at`, whose first expert is `first`.
    fn record(&mut self, at: usize, experts: u32, first: usize, rows: &[Vec<(u32, f32)>]) {
        for &(expert, _) in rows.iter().flatten() {
            // Routers choose among the layer's experts; anything else is not counted anywhere.
            if expert < experts {
                self.counts[first + expert as usize] += 1;
                self.selections += 1;
            }
        }
        self.staging.record(at, experts, rows, &mut self.sample);
    }

    /// Puts back what could not be saved, which was used before all that is here.
    fn restore(&mut self, mut older: Pending) {
        self.counts.iter_mut().zip(&older.counts).for_each(|(count, uses)| *count += uses);
        self.selections += older.selections;
        older.sample.extend(&self.sample);
        self.sample = older.sample;
    }
}
