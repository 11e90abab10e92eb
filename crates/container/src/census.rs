//! The census: what a directory holds of what its configuration asks for.
//!
//! Taken from headers alone, before anything is allocated, so that a model that lacks layers is
//! refused with all that is missing instead of failing at the first absent tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

use metaltail_quant::Format;
use serde::Serialize;

use crate::checkpoint::{Checkpoint, Kind};
use crate::error::Error;
use crate::inventory::{ExpertLayerSpec, Inventory, Part, Role, TensorSpec};
use crate::place::MatrixPlace;
use crate::slab::{MANIFEST, Manifest};

/// Names that a message lists before it says how many more there are.
const NAMED: usize = 5;

/// What a complete directory holds. Bytes count weights and scales, not padding.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Census {
    /// What the directory is.
    pub kind: Kind,
    /// Matrices and vectors that the model uses, those of experts included.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// By what they are for.
    pub roles: BTreeMap<&'static str, RoleCensus>,
    /// Layers with routed experts, ascending; the draft layer only if it is complete.
    pub layers: Vec<LayerCensus>,
    /// State of the draft layer.
    pub draft: Draft,
    /// Optional tensors that are absent, the draft layer's left out.
    pub absent_optional: Vec<String>,
    /// Stored tensors that the model does not use.
    pub unused: usize,
}

/// The tensors of one role.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RoleCensus {
    /// Number of matrices and vectors.
    pub tensors: usize,
    /// Bytes of weights and scales.
    pub bytes: u64,
    /// Number of tensors in each format.
    pub formats: BTreeMap<String, usize>,
}

/// The routed experts of one layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerCensus {
    /// Layer index.
    pub layer: u32,
    /// Number of experts.
    pub experts: u32,
    /// Whether this is the draft layer.
    pub draft: bool,
    /// Formats that occur, by name.
    pub formats: BTreeSet<String>,
    /// Bytes read for the largest expert, padding included.
    pub expert_bytes: u64,
    /// Bytes of all runs, padding included.
    pub bytes: u64,
    /// Most reads that one expert takes.
    pub runs: usize,
    /// Whether every expert carries a checksum.
    pub checksummed: bool,
}

/// State of the draft layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum Draft {
    /// The configuration has none.
    None,
    /// None of its tensors is there.
    Absent,
    /// Some are there; the layer is not used.
    Partial {
        /// Tensors present.
        present: usize,
        /// Tensors wanted.
        wanted: usize,
        /// First absent ones.
        missing: Vec<String>,
    },
    /// All of it is there.
    Complete,
}

/// What a directory lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// The directory.
    pub dir: PathBuf,
    /// Safetensors files that were read.
    pub files: usize,
    /// Tensors that the model needs, those of experts included.
    pub wanted: usize,
    /// How many of them are absent.
    pub absent: usize,
    /// Layers that lack tensors, ascending.
    pub layers: Vec<LayerGap>,
    /// First absent names.
    pub first: Vec<String>,
}

/// What one layer lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerGap {
    /// Layer index.
    pub layer: u32,
    /// Tensors that it needs.
    pub wanted: usize,
    /// How many of them are absent.
    pub absent: usize,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} lacks {} of the {} tensors that config.json asks for ({} safetensors {} read)",
            self.dir.display(),
            self.absent,
            self.wanted,
            self.files,
            if self.files == 1 { "file was" } else { "files were" },
        )?;
        let whole = |gap: &LayerGap| gap.absent == gap.wanted;
        let runs: Vec<&[LayerGap]> =
            self.layers.chunk_by(|a, b| whole(a) && whole(b) && a.layer + 1 == b.layer).collect();
        for (i, run) in runs.iter().take(NAMED).enumerate() {
            f.write_str(if i == 0 { ": " } else { "; " })?;
            let absent: usize = run.iter().map(|gap| gap.absent).sum();
            match run {
                [gap] if whole(gap) => write!(f, "layer {} absent ({absent} tensors)", gap.layer)?,
                [gap] => write!(f, "layer {} lacks {absent} of {} tensors", gap.layer, gap.wanted)?,
                [first, .., last] => {
                    write!(f, "layers {} to {} absent ({absent} tensors)", first.layer, last.layer)?;
                }
                [] => {}
            }
        }
        if runs.len() > NAMED {
            write!(f, "; and {} more ranges", runs.len() - NAMED)?;
        }
        write!(
            f,
            ". Missing: {}. Fetch the files that are missing into the same directory; if none is, config.json belongs to another model",
            some_of_total(&self.first, self.absent)
        )
    }
}

/// The first few of some names, and how many more there are.
pub(crate) fn some_of(names: &[String]) -> String {
    some_of_total(names, names.len())
}

fn some_of_total(names: &[String], total: usize) -> String {
    let shown = names.len().min(NAMED);
    let mut text = names[..shown].join(", ");
    if total > shown {
        text.push_str(&format!(" and {} more", total - shown));
    }
    text
}

/// Name of a role in reports.
pub fn role_name(role: Role) -> &'static str {
    match role {
        Role::Embedding => "embedding",
        Role::Head => "head",
        Role::Norm => "norm",
        Role::Bias => "bias",
        Role::Router => "router",
        Role::RouterBias => "router bias",
        Role::Attention => "attention",
        Role::Indexer => "indexer",
        Role::IndexerWeights => "indexer weights",
        Role::DenseFfn => "dense feed-forward",
        Role::SharedExpert => "shared expert",
        Role::Gate => "gate",
        Role::Convolution => "convolution",
        Role::Draft => "draft",
    }
}

fn is_draft(spec: &TensorSpec, layers: &BTreeSet<u32>) -> bool {
    spec.role == Role::Draft || spec.layer.is_some_and(|layer| layers.contains(&layer))
}

impl Checkpoint {
    /// Holds the directory against what its configuration asks for.
    ///
    /// # Errors
    /// [`Error::Incomplete`] with everything that is missing; else the first tensor whose shape,
    /// type or size does not fit.
    pub fn check(&self, inventory: &Inventory) -> Result<Census, Error> {
        self.refuse_missing(inventory)?;
        let draft_layers = inventory.draft_layers();
        let draft = self.draft(inventory);
        let use_draft = draft == Draft::Complete;
        let mut census = Census {
            kind: self.kind(),
            tensors: 0,
            bytes: 0,
            roles: BTreeMap::new(),
            layers: Vec::new(),
            draft,
            absent_optional: Vec::new(),
            unused: 0,
        };
        let mut claimed = 0;
        for spec in &inventory.tensors {
            let in_draft = is_draft(spec, &draft_layers);
            if in_draft && !use_draft {
                continue;
            }
            if !self.has(&spec.name) {
                census.absent_optional.push(spec.name.clone());
                continue;
            }
            claimed += census.count(role_name(spec.role), &self.matrix(spec)?);
        }
        for layer in inventory.experts.iter().filter(|layer| use_draft || !layer.draft) {
            claimed += self.count_layer(layer, &mut census)?;
        }
        census.unused = self.stored().saturating_sub(claimed);
        if let Some(tensors) = self.gguf_tensors() {
            let drafts = tensors.refuse_unused(inventory)?;
            if !use_draft && !drafts.is_empty() {
                self.notice(format!("not used, as of draft layers: {}", some_of(&drafts)));
            }
            // A stacked tensor holds a matrix of every expert.
            census.unused = drafts.len();
        }
        self.refuse_other_parameters(inventory, (!use_draft).then_some(&draft_layers))?;
        self.notice_layers_beyond(inventory);
        self.notice_undeclared_draft();
        Ok(census)
    }

    /// Whether every tensor of the draft layer is there, to the last expert's last matrix.
    ///
    /// False where the inventory has no draft layer.
    pub fn draft_complete(&self, inventory: &Inventory) -> bool {
        self.draft(inventory) == Draft::Complete
    }

    /// State of the draft layer.
    pub fn draft(&self, inventory: &Inventory) -> Draft {
        let layers = inventory.draft_layers();
        let dense = inventory.tensors.iter().filter(|spec| is_draft(spec, &layers));
        let experts = inventory.experts.iter().filter(|layer| layer.draft);
        let names =
            dense.map(|spec| spec.name.clone()).chain(experts.flat_map(|layer| self.expert_names(layer)));
        let (mut present, mut wanted, mut missing) = (0, 0, Vec::new());
        for name in names {
            wanted += 1;
            if self.has(&name) {
                present += 1;
            } else if missing.len() < NAMED {
                missing.push(name);
            }
        }
        match (present, wanted) {
            (_, 0) => Draft::None,
            (0, _) => Draft::Absent,
            _ if present == wanted => Draft::Complete,
            _ => Draft::Partial { present, wanted, missing },
        }
    }

    /// Refuses a slab container whose manifest names other formats than its matrices have.
    ///
    /// `left_out` are layers that are not used.
    fn refuse_other_parameters(
        &self,
        inventory: &Inventory,
        left_out: Option<&BTreeSet<u32>>,
    ) -> Result<(), Error> {
        let Some(Manifest { parameters, experts, .. }) = self.manifest() else {
            return Ok(());
        };
        let hold = |what: &str, says: &str, place: &dyn Fn() -> String, got: Format| {
            // These two promise nothing about a single matrix.
            if says == "keep" || says == "mixed" || says == got.to_string() {
                return Ok(());
            }
            let path = self.dir().join(MANIFEST);
            let (what, says, got) = (format!("parameters.{what}"), says.to_owned(), got.to_string());
            Err(Error::ManifestDisagrees {
                path,
                what: what.into(),
                says: says.into(),
                place: place().into(),
                got: got.into(),
            })
        };
        let quantised = |spec: &&TensorSpec| {
            let used = left_out.is_none_or(|layers| !is_draft(spec, layers)) && self.has(&spec.name);
            used && spec.rows != 1 && !spec.role.keeps_f32()
        };
        for spec in inventory.tensors.iter().filter(quantised) {
            let got = self.matrix(spec)?.layout.format();
            hold("rest", &parameters.rest, &|| format!("tensor {:?}", spec.name), got)?;
        }
        for layer in experts {
            let used = left_out.is_none_or(|layers| !layers.contains(&layer.layer));
            let spec = inventory.experts.iter().find(|spec| spec.layer == layer.layer);
            let Some(spec) = spec.filter(|_| used) else {
                continue;
            };
            let (what, says) = match spec.draft {
                true => ("draft_experts", &parameters.draft_experts),
                false => ("experts", &parameters.experts),
            };
            for got in layer.formats {
                hold(what, says, &|| format!("the experts of layer {}", layer.layer), got)?;
            }
        }
        Ok(())
    }

    /// Notices stored layers after the last one that the inventory knows.
    fn notice_layers_beyond(&self, inventory: &Inventory) {
        let dense = inventory.tensors.iter().filter_map(|spec| spec.layer);
        let Some(last) = dense.chain(inventory.experts.iter().map(|layer| layer.layer)).max() else {
            return;
        };
        // Only the model's own stack: a vision tower has layers too.
        let stack = format!("{}layers.", self.prefix());
        let layer = |name: &str| name.strip_prefix(&stack)?.split('.').next()?.parse::<u32>().ok();
        let beyond: Vec<u32> = self.tensor_names().filter_map(layer).filter(|layer| *layer > last).collect();
        if let (Some(first), Some(end)) = (beyond.iter().min(), beyond.iter().max()) {
            let layers =
                if first == end { format!("layer {first}") } else { format!("layers {first}–{end}") };
            self.notice(format!(
                "the files hold {layers} that config.json does not use ({} tensors): is num_hidden_layers right?",
                beyond.len()
            ));
        }
    }

    /// Notices draft layers that lie beside the model's own stack, which no configuration declares.
    fn notice_undeclared_draft(&self) {
        let count = self.tensor_names().filter(|name| name.starts_with("mtp.")).count();
        if count > 0 {
            self.notice(format!(
                "the files hold {count} tensors of draft layers (mtp.…), which are not used: no answer depends on them"
            ));
        }
    }

    /// Counts one layer's experts; returns how many stored tensors they are.
    fn count_layer(&self, layer: &ExpertLayerSpec, census: &mut Census) -> Result<usize, Error> {
        let mut claimed = 0;
        let mut counted = LayerCensus {
            layer: layer.layer,
            experts: layer.count,
            draft: layer.draft,
            formats: BTreeSet::new(),
            expert_bytes: 0,
            bytes: 0,
            runs: 0,
            checksummed: layer.count > 0,
        };
        let role = if layer.draft { "draft expert" } else { "expert" };
        // A tensor may hold matrices of all experts.
        let mut seen = BTreeSet::new();
        for expert in 0..layer.count {
            let place = self.expert(layer, expert)?;
            let bytes: u64 = place.runs.iter().map(|run| run.len).sum();
            counted.expert_bytes = counted.expert_bytes.max(bytes);
            counted.bytes += bytes;
            counted.runs = counted.runs.max(place.runs.len());
            counted.checksummed &= place.checksum.is_some();
            for (part, which) in place.parts.iter().zip(Part::ALL) {
                let format = part.layout.format().to_string();
                census.add(role, &format, part.layout.bytes() as u64);
                if seen.insert(self.stored_name(&layer.name(expert, which))) {
                    claimed += 1 + usize::from(part.scales.is_some());
                }
                counted.formats.insert(format);
            }
        }
        if let Some(stack) = self.stack(layer) {
            claimed = stack.tensors().len();
        }
        census.layers.push(counted);
        Ok(claimed)
    }

    /// Canonical names of all tensors of a layer's experts, as this directory stores them.
    fn expert_names(&self, layer: &ExpertLayerSpec) -> Vec<String> {
        if let Some(stack) = self.stack(layer) {
            return stack.tensors();
        }
        (0..layer.count).flat_map(|expert| Part::ALL.map(|part| layer.name(expert, part))).collect()
    }

    /// Refuses a directory that lacks tensors which the model cannot do without.
    fn refuse_missing(&self, inventory: &Inventory) -> Result<(), Error> {
        let mut missing = Missing {
            dir: self.dir().to_owned(),
            files: self.files().len(),
            wanted: 0,
            absent: 0,
            layers: Vec::new(),
            first: Vec::new(),
        };
        let mut layers: BTreeMap<u32, LayerGap> = BTreeMap::new();
        let mut need = |layer: Option<u32>, name: String| {
            let present = self.has(&name);
            missing.wanted += 1;
            if let Some(layer) = layer {
                let gap = layers.entry(layer).or_insert(LayerGap { layer, wanted: 0, absent: 0 });
                gap.wanted += 1;
                gap.absent += usize::from(!present);
            }
            if !present {
                missing.absent += 1;
                if missing.first.len() < NAMED {
                    missing.first.push(name);
                }
            }
        };
        for spec in inventory.tensors.iter().filter(|spec| !spec.optional) {
            need(spec.layer, spec.name.clone());
        }
        for layer in inventory.experts.iter().filter(|layer| !layer.draft) {
            self.expert_names(layer).into_iter().for_each(|name| need(Some(layer.layer), name));
        }
        if missing.absent == 0 {
            return Ok(());
        }
        missing.layers = layers.into_values().filter(|gap| gap.absent > 0).collect();
        Err(Error::Incomplete(Box::new(missing)))
    }
}

impl Census {
    /// Counts a matrix; returns how many stored tensors it is.
    fn count(&mut self, role: &'static str, place: &MatrixPlace) -> usize {
        self.add(role, &place.layout.format().to_string(), place.layout.bytes() as u64);
        1 + usize::from(place.scales.is_some())
    }

    fn add(&mut self, role: &'static str, format: &str, bytes: u64) {
        self.tensors += 1;
        self.bytes += bytes;
        let counted = self.roles.entry(role).or_default();
        counted.tensors += 1;
        counted.bytes += bytes;
        match counted.formats.get_mut(format) {
            Some(count) => *count += 1,
            None => {
                counted.formats.insert(format.to_owned(), 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(layers: Vec<LayerGap>) -> String {
        Missing { dir: "dir".into(), files: 1, wanted: 140, absent: 50, layers, first: vec!["a".into()] }
            .to_string()
    }

    #[test]
    fn adjacent_absent_layers_are_one_range() {
        let gap = |layer, absent| LayerGap { layer, wanted: 24, absent };
        let text = missing(vec![gap(2, 24), gap(3, 24), gap(4, 1), gap(6, 24)]);
        assert!(
            text.contains("layers 2 to 3 absent (48 tensors); layer 4 lacks 1 of 24 tensors; layer 6 absent")
        );
        assert!(text.contains("lacks 50 of the 140 tensors"), "{text}");
        assert!(text.contains("a and 49 more"), "{text}");
    }
}
