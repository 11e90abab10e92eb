//! A model as data: what each layer computes, with every dimension checked.
//!
//! A family turns a configuration into a [`Plan`]; everything after that (inventory, loading, the
//! forward pass, memory arithmetic) works from the plan and knows no family.

mod attention;
mod delta;
mod ffn;

use metaltail_container::{ExpertLayerSpec, Inventory, Role, TensorSpec};

pub use attention::{
    AttentionPlan, GqaPlan, IndexerPlan, IndexerUse, KvExpansion, MlaForm, MlaPlan, QkNorm, RopePairs,
    RopePlan,
};
pub use delta::{DecayRate, DeltaNetPlan, DeltaProjections, HeadSharing};
use ffn::swiglu_tensors;
pub use ffn::{ExpertBiasForm, FfnPlan, MoeNames, MoePlan, RouterPlan, Scoring};

/// A whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// `model_type`.
    pub family: String,
    /// Model width.
    pub hidden: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Longest context that the model was made for.
    pub max_context: usize,
    /// `eps` of the layer and final norms.
    pub norm_eps: f32,
    /// How the factors of norms are stored: those of the residual stream, of queries and of keys.
    pub norms: NormWeights,
    /// Whether the head is the embedding matrix.
    pub tied_head: bool,
    /// Layers in order.
    pub layers: Vec<LayerPlan>,
    /// The draft (next-next-token) layer, stored after the last.
    pub draft: Option<LayerPlan>,
}

/// How the factors of a norm are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormWeights {
    /// As they are.
    #[default]
    Plain,
    /// Less 1, so that zero leaves a state as it is.
    OnePlus,
}

/// One decoder layer: attention, then a feed-forward part, each behind a norm.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerPlan {
    /// Attention part.
    pub attention: AttentionPlan,
    /// Feed-forward part.
    pub ffn: FfnPlan,
}

/// Collects the tensors of one layer under its name prefix.
pub(crate) struct Tensors<'a> {
    prefix: String,
    layer: Option<u32>,
    draft: bool,
    list: &'a mut Vec<TensorSpec>,
}

impl Tensors<'_> {
    pub(crate) fn matrix(&mut self, name: &str, rows: usize, cols: usize, role: Role) {
        let role = if self.draft && !role.keeps_f32() { Role::Draft } else { role };
        self.list.push(TensorSpec {
            name: format!("{}{name}", self.prefix),
            rows,
            cols,
            role,
            layer: self.layer,
            optional: self.draft,
        });
    }

    pub(crate) fn vector(&mut self, name: &str, len: usize, role: Role) {
        self.matrix(name, 1, len, role);
    }
}

impl LayerPlan {
    fn tensors(&self, hidden: usize, out: &mut Tensors<'_>) {
        out.vector("input_layernorm.weight", hidden, Role::Norm);
        out.vector("post_attention_layernorm.weight", hidden, Role::Norm);
        match &self.attention {
            AttentionPlan::Mla(mla) => mla.tensors(hidden, out),
            AttentionPlan::Gqa(gqa) => gqa.tensors(hidden, out),
            AttentionPlan::DeltaNet(delta) => delta.tensors(hidden, out),
        }
        match &self.ffn {
            FfnPlan::Dense { width } => swiglu_tensors("mlp", *width, hidden, Role::DenseFfn, out),
            FfnPlan::Moe(moe) => moe.tensors(hidden, out),
        }
    }

    fn experts(&self, hidden: usize, layer: u32, draft: bool) -> Option<ExpertLayerSpec> {
        let FfnPlan::Moe(moe) = &self.ffn else { return None };
        Some(ExpertLayerSpec {
            layer,
            // Range-checked to 4096 when the plan was made.
            count: moe.experts as u32,
            hidden,
            width: moe.width,
            draft,
            prefix: format!("model.layers.{layer}.{}.experts.", moe.names.block),
            suffixes: moe.names.expert,
            stacked: moe.names.stacked,
        })
    }

    /// The mixture-of-experts part, if this layer is sparse.
    pub fn moe(&self) -> Option<&MoePlan> {
        match &self.ffn {
            FfnPlan::Moe(moe) => Some(moe),
            FfnPlan::Dense { .. } => None,
        }
    }
}

impl Plan {
    /// Every tensor that the model needs, with shape and role.
    pub fn inventory(&self) -> Inventory {
        let mut tensors = Vec::new();
        let mut experts = Vec::new();
        {
            let mut top = Tensors { prefix: String::new(), layer: None, draft: false, list: &mut tensors };
            top.matrix("model.embed_tokens.weight", self.vocab, self.hidden, Role::Embedding);
            top.vector("model.norm.weight", self.hidden, Role::Norm);
            if !self.tied_head {
                top.matrix("lm_head.weight", self.vocab, self.hidden, Role::Head);
            }
        }
        for (index, (layer, draft)) in self.all_layers().enumerate() {
            // At most 129 layers, checked when the plan was made.
            let index = index as u32;
            let mut out = Tensors {
                prefix: format!("model.layers.{index}."),
                layer: Some(index),
                draft,
                list: &mut tensors,
            };
            layer.tensors(self.hidden, &mut out);
            if draft {
                out.matrix("eh_proj.weight", self.hidden, 2 * self.hidden, Role::Draft);
                out.vector("enorm.weight", self.hidden, Role::Norm);
                out.vector("hnorm.weight", self.hidden, Role::Norm);
                out.vector("shared_head.norm.weight", self.hidden, Role::Norm);
            }
            experts.extend(layer.experts(self.hidden, index, draft));
        }
        Inventory { family: self.family.clone(), tensors, experts }
    }

    /// Main layers, then the draft layer if there is one; true marks the latter.
    pub fn all_layers(&self) -> impl Iterator<Item = (&LayerPlan, bool)> {
        self.layers.iter().map(|layer| (layer, false)).chain(self.draft.iter().map(|d| (d, true)))
    }

    /// Floats that one position keeps in the key-value cache over all main layers.
    pub fn kv_floats_per_token(&self) -> usize {
        self.layers.iter().flat_map(|layer| layer.attention.kv_streams()).sum()
    }

    /// Bytes of one state of a sequence over all main layers that are recurrent, whatever its length.
    pub fn state_bytes(&self) -> u64 {
        let sizes = self.layers.iter().filter_map(|layer| layer.attention.state_sizes());
        sizes.map(|(window, matrix)| 4 * (window as u64).saturating_add(matrix as u64)).sum()
    }

    /// Number of main layers with routed experts.
    pub fn sparse_layers(&self) -> usize {
        self.layers.iter().filter(|layer| layer.moe().is_some()).count()
    }

    /// Selections (routed experts used) for one row: sum of top-k over sparse layers.
    pub fn selections_per_row(&self) -> usize {
        self.layers.iter().filter_map(LayerPlan::moe).map(|moe| moe.top_k).sum()
    }

    /// The same plan with another form of latent attention.
    pub fn with_mla_form(mut self, form: MlaForm) -> Self {
        for layer in self.layers.iter_mut().chain(self.draft.iter_mut()) {
            if let AttentionPlan::Mla(mla) = &mut layer.attention {
                mla.form = form;
            }
        }
        self
    }
}
