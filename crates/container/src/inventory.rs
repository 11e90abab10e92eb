//! What a model must hold, as data: every tensor with its shape and role.
//!
//! The model room derives an [`Inventory`] from a configuration; this room never knows a family.
//! Census, convert and synth all work from it.

use std::collections::BTreeSet;

/// What a tensor is for; decides the format that `convert` stores it in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Role {
    /// Token embedding.
    Embedding,
    /// Output head.
    Head,
    /// Any norm weight or bias.
    Norm,
    /// A bias vector.
    Bias,
    /// Router logits matrix.
    Router,
    /// Router correction bias.
    RouterBias,
    /// Attention projection.
    Attention,
    /// Indexer projection.
    Indexer,
    /// Indexer head weights (always kept in f32).
    IndexerWeights,
    /// Feed-forward matrix of a dense layer.
    DenseFfn,
    /// Shared expert matrix.
    SharedExpert,
    /// What gates or decays something: few rows, on which much depends (always kept in f32).
    Gate,
    /// Taps of a convolution along the sequence, a row a channel (always kept in f32).
    Convolution,
    /// Any matrix of the draft layer that is not an expert, norm or router.
    Draft,
}

impl Role {
    /// Whether `convert` and every reader keep this tensor in f32 (never quantised).
    pub fn keeps_f32(self) -> bool {
        matches!(
            self,
            Role::Norm
                | Role::Bias
                | Role::Router
                | Role::RouterBias
                | Role::IndexerWeights
                | Role::Gate
                | Role::Convolution
        )
    }
}

/// One dense tensor. A vector of `n` has `rows == 1`, `cols == n`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Canonical name, as in the family's Hugging Face checkpoints.
    pub name: String,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// What it is for.
    pub role: Role,
    /// Layer it belongs to, if any.
    pub layer: Option<u32>,
    /// Whether the model runs without it (the whole draft layer, for instance).
    pub optional: bool,
}

/// The three matrices of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// `width × hidden`, passed through the activation.
    Gate,
    /// `width × hidden`, multiplied with the gate.
    Up,
    /// `hidden × width`.
    Down,
}

impl Part {
    /// All three, in the order in which our container stores them.
    pub const ALL: [Part; 3] = [Part::Gate, Part::Up, Part::Down];
}

/// Names of tensors that hold a matrix of all experts of a layer, after [`ExpertLayerSpec::prefix`].
///
/// Two forms are read. Plain numbers: `GATE_UP` `[experts, hidden, 2 · width]` with gate and up in turn, and `DOWN`
/// `[experts, width, hidden]`, inputs before outputs. MXFP4: `GATE_UP_blocks`, `GATE_UP_scales`, `DOWN_blocks` and
/// `DOWN_scales`, outputs before inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StackedNames {
    /// Gate and up.
    pub gate_up: &'static str,
    /// Down.
    pub down: &'static str,
}

/// The routed experts of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertLayerSpec {
    /// Layer index (the draft layer has the index after the last).
    pub layer: u32,
    /// Number of routed experts.
    pub count: u32,
    /// Model width.
    pub hidden: usize,
    /// Expert width.
    pub width: usize,
    /// Whether this is the draft layer.
    pub draft: bool,
    /// Name before the expert number, e.g. `model.layers.3.mlp.experts.`.
    pub prefix: String,
    /// Names after the number for gate, up, down, e.g. `.gate_proj.weight`.
    pub suffixes: [&'static str; 3],
    /// Names of the tensors of all experts, where the family's Hugging Face checkpoints have those instead. Other
    /// containers have a tensor a matrix.
    pub stacked: Option<StackedNames>,
}

impl ExpertLayerSpec {
    /// Canonical tensor name of one matrix of one expert.
    pub fn name(&self, expert: u32, part: Part) -> String {
        format!("{}{expert}{}", self.prefix, self.suffixes[part as usize])
    }

    /// `(rows, cols)` of one matrix.
    pub fn shape(&self, part: Part) -> (usize, usize) {
        match part {
            Part::Gate | Part::Up => (self.width, self.hidden),
            Part::Down => (self.hidden, self.width),
        }
    }
}

/// Everything a model must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// `model_type` of the configuration.
    pub family: String,
    /// Dense tensors.
    pub tensors: Vec<TensorSpec>,
    /// Layers that have routed experts, ascending; the draft layer, if any, last.
    pub experts: Vec<ExpertLayerSpec>,
}

impl Inventory {
    /// The layers that belong to the draft: the one with draft experts, and those of draft matrices.
    pub(crate) fn draft_layers(&self) -> BTreeSet<u32> {
        let experts = self.experts.iter().filter(|e| e.draft).map(|e| e.layer);
        let dense = self.tensors.iter().filter(|t| t.role == Role::Draft).filter_map(|t| t.layer);
        experts.chain(dense).collect()
    }
}
