//! The usage history of colibrì, `.coli_usage`: text, `layer expert count` a line, after two lines of head
//! with negative numbers: `-1 layers experts` and `-2 version engine`. Old files have no head.

use super::{UsageError, UsageIdentity, UsageProfile};

/// The version of the text.
const VERSION: u32 = 1;
/// Lines of a history at most: one an expert, a million, and the head.
const MOST_LINES: usize = (1 << 20) + 16;

/// What a history must know of a model beyond its sparse layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColiModel<'m> {
    /// Layers, dense ones included, the draft layer not.
    pub layers: u32,
    /// Experts of a sparse layer, the most of any.
    pub experts: u32,
    /// The model's family, as colibrì names its engines (`glm_moe_dsa`, `olmoe`, …).
    pub family: &'m str,
}

/// A history that was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ColiUsage {
    /// (layers, experts) of its head.
    pub shape: Option<(u32, u32)>,
    /// (version, hash of the engine's name) of its head.
    pub engine: Option<(u32, u32)>,
    /// (layer, expert, uses), in the order of the file.
    pub counts: Vec<(u32, u32, u32)>,
}

/// FNV-1a with 32 bits.
fn fnv(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

impl ColiUsage {
    /// Reads the text; an empty one is a history without uses.
    ///
    /// # Errors
    /// [`UsageError::Line`] for anything but three whole numbers, or too many lines.
    pub fn parse(text: &str) -> Result<ColiUsage, UsageError> {
        let mut usage = ColiUsage::default();
        for (line, content) in (1..).zip(text.lines()) {
            let wrong = |reason: String| UsageError::Line { line, reason };
            let mut words = content.split_whitespace();
            let [Some(first), Some(second), Some(third), None] =
                [words.next(), words.next(), words.next(), words.next()]
            else {
                if content.trim().is_empty() {
                    continue;
                }
                return Err(wrong("wanted three numbers: layer, expert, count".into()));
            };
            let number = |text: &str| text.parse::<u32>().map_err(|_| wrong(format!("{text:?} is no count")));
            let (second, third) = (number(second)?, number(third)?);
            match first {
                "-1" => usage.shape = Some((second, third)),
                "-2" => usage.engine = Some((second, third)),
                layer => usage.counts.push((number(layer)?, second, third)),
            }
            if line > MOST_LINES {
                return Err(wrong(format!("a history has at most {MOST_LINES} lines")));
            }
        }
        Ok(usage)
    }

    /// What is against taking this as the history of a model by its family alone; `None` where nothing is.
    pub fn other_engine(&self, model: &ColiModel<'_>) -> Option<String> {
        let (_, engine) = self.engine?;
        let wanted = fnv(model.family);
        (engine != wanted).then(|| {
            format!("it was written for the engine {engine:08x}, not for {} ({wanted:08x})", model.family)
        })
    }
}

impl UsageProfile {
    /// Adds a history to the counts, scaled down to the half-life where it is longer. Uses of the draft
    /// layer, which it stores as one layer more, are passed over where this profile has none. Returns the
    /// uses that came in. The engine's name is not looked at: see [`ColiUsage::other_engine`].
    ///
    /// # Errors
    /// [`UsageError::History`]: another version, other dimensions, a dense layer, an expert that there is
    /// not. Nothing is added then.
    pub fn add_coli(&mut self, usage: &ColiUsage, model: &ColiModel<'_>) -> Result<u64, UsageError> {
        let refuse = |reason: String| Err(UsageError::History { reason });
        if let Some((version, _)) = usage.engine
            && version != VERSION
        {
            return refuse(format!("it has version {version}, wanted {VERSION}"));
        }
        if let Some((layers, experts)) = usage.shape
            && (layers, experts) != (model.layers, model.experts)
        {
            let (l, e) = (model.layers, model.experts);
            return refuse(format!("it has {layers} layers of {experts} experts, the model {l} of {e}"));
        }
        let mut history = Vec::with_capacity(usage.counts.len());
        for &(layer, expert, uses) in &usage.counts {
            let Some(at) = self.identity.index(layer) else {
                if layer == model.layers {
                    continue;
                }
                return refuse(format!("it counts experts of layer {layer}, which has none in this model"));
            };
            let experts = self.identity.layers[at].1;
            if expert >= experts {
                return refuse(format!("it counts expert {expert} of layer {layer}, which has {experts}"));
            }
            history.push((at, expert, uses));
        }
        Ok(self.add_history(&history))
    }

    /// The counts as a history, rounded; an empty profile gives an empty text.
    pub fn to_coli(&self, model: &ColiModel<'_>) -> String {
        let UsageIdentity { layers, .. } = &self.identity;
        let mut text = String::new();
        for (&(number, experts), &first) in layers.iter().zip(&self.first) {
            for (expert, count) in self.counts[first..first + experts as usize].iter().enumerate() {
                let uses = count.saturating_add(super::ONE / 2) / super::ONE;
                if uses > 0 {
                    let uses = uses.min(u64::from(u32::MAX));
                    text.push_str(&format!("{number} {expert} {uses}\n"));
                }
            }
        }
        if text.is_empty() {
            return text;
        }
        let (l, e, id) = (model.layers, model.experts, fnv(model.family));
        format!("-1 {l} {e}\n-2 {VERSION} {id}\n{text}")
    }
}
