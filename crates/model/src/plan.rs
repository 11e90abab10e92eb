//! A model as data: what each layer computes, with every dimension checked.
//!
//! A family turns a configuration into a [`Plan`]; everything after that (inventory, loading, the
//! forward pass, memory arithmetic) works from the plan and knows no family.

use metaltail_container::{ExpertLayerSpec, Inventory, Role, TensorSpec};

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
    /// Whether the head is the embedding matrix.
    pub tied_head: bool,
    /// Layers in order.
    pub layers: Vec<LayerPlan>,
    /// The draft (next-next-token) layer, stored after the last.
    pub draft: Option<LayerPlan>,
}

/// One decoder layer: attention, then a feed-forward part, each behind a norm.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerPlan {
    /// Attention part.
    pub attention: AttentionPlan,
    /// Feed-forward part.
    pub ffn: FfnPlan,
}

/// Attention kinds.
#[derive(Clone, Debug, PartialEq)]
pub enum AttentionPlan {
    /// Multi-head latent attention (compressed keys and values).
    Mla(MlaPlan),
    /// Grouped-query attention.
    Gqa(GqaPlan),
}

/// How multi-head latent attention is computed. Both give the same numbers up to rounding;
/// one is chosen for a whole session, never by the number of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MlaForm {
    /// Queries are mapped into the latent space: no expanded keys or values.
    #[default]
    Absorbed,
    /// Keys and values are rebuilt from the latents, a tile at a time.
    Reconstructed,
}

/// Multi-head latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaPlan {
    /// Query heads.
    pub heads: usize,
    /// Width of the compressed query, if queries are compressed.
    pub q_lora: Option<usize>,
    /// Width of the compressed keys and values.
    pub kv_lora: usize,
    /// Width of a head's part without position.
    pub nope: usize,
    /// Width of a head's rotated part.
    pub rope: RopePlan,
    /// Width of a head's value.
    pub value: usize,
    /// Factor on scores before the softmax.
    pub scale: f32,
    /// `eps` of the norms of the compressed query and keys.
    pub lora_norm_eps: f32,
    /// Sparse selection of positions.
    pub indexer: IndexerUse,
    /// Form of computation.
    pub form: MlaForm,
}

/// Whether a layer attends to selected positions only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IndexerUse {
    /// Attends to all positions.
    None,
    /// Owns an indexer that selects positions.
    Own(IndexerPlan),
    /// Uses the selection of the last layer that owns an indexer.
    Shared,
}

/// DSA lightning indexer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexerPlan {
    /// Indexer heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Positions kept; with fewer in the context all are kept.
    pub top_k: usize,
}

/// Grouped-query attention.
#[derive(Clone, Debug, PartialEq)]
pub struct GqaPlan {
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Rotation of queries and keys.
    pub rope: RopePlan,
    /// Factor on scores before the softmax.
    pub scale: f32,
    /// Norm of queries and keys.
    pub qk_norm: QkNorm,
    /// `eps` of that norm.
    pub qk_norm_eps: f32,
    /// Whether the projections of queries, keys and values add a bias.
    pub bias: bool,
}

/// What the norm of queries and keys runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Neither is normed.
    None,
    /// Each head alone.
    Head,
    /// The whole projection.
    Projection,
}

/// Which elements a rotation pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// `(2j, 2j+1)`, results written as halves.
    Interleaved,
    /// `(j, j + dim/2)`.
    Halves,
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopePlan {
    /// Rotated width (even).
    pub dim: usize,
    /// Radians a position for each pair: `dim / 2` of them.
    pub inv_freq: Vec<f32>,
    /// Pairing.
    pub pairs: RopePairs,
    /// Factor on cosine and sine (YaRN), 1 otherwise.
    pub magnitude: f32,
}

/// Feed-forward kinds.
#[derive(Clone, Debug, PartialEq)]
pub enum FfnPlan {
    /// SwiGLU of this width.
    Dense {
        /// Width.
        width: usize,
    },
    /// Routed experts.
    Moe(MoePlan),
}

/// Mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MoePlan {
    /// Routed experts.
    pub experts: usize,
    /// Experts a row.
    pub top_k: usize,
    /// Width of an expert.
    pub width: usize,
    /// Router.
    pub router: RouterPlan,
    /// Width of the shared expert, if there is one.
    pub shared_width: Option<usize>,
    /// What its tensors are called.
    pub names: MoeNames,
}

/// What checkpoints call the tensors of a mixture, after the layer's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeNames {
    /// The block that router, experts and shared expert belong to.
    pub block: &'static str,
    /// The router's correction bias, within the block.
    pub correction_bias: &'static str,
    /// Gate, up and down of an expert, after its number.
    pub expert: [&'static str; 3],
}

impl MoeNames {
    /// The names of most families.
    pub const MLP: MoeNames = MoeNames {
        block: "mlp",
        correction_bias: "gate.e_score_correction_bias",
        expert: [".gate_proj.weight", ".up_proj.weight", ".down_proj.weight"],
    };
    /// Mixtral's names, and those of families that took them over.
    pub const BLOCK_SPARSE: MoeNames = MoeNames {
        block: "block_sparse_moe",
        correction_bias: "e_score_correction_bias",
        expert: [".w1.weight", ".w3.weight", ".w2.weight"],
    };

    /// Name of the router's matrix; `prefix` is the layer's.
    pub(crate) fn router(&self, prefix: &str) -> String {
        format!("{prefix}{}.gate.weight", self.block)
    }

    /// Name of the router's correction bias.
    pub(crate) fn correction_bias(&self, prefix: &str) -> String {
        format!("{prefix}{}.{}", self.block, self.correction_bias)
    }

    /// Name of the shared expert, before its matrices.
    pub(crate) fn shared(&self, prefix: &str) -> String {
        format!("{prefix}{}.shared_experts", self.block)
    }
}

/// From logits to chosen experts and their weights.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterPlan {
    /// Logit to score.
    pub scoring: Scoring,
    /// Whether a learned bias is added for the choice (not for the weight).
    pub correction_bias: bool,
    /// `(groups, groups kept)`, if the choice is limited to groups.
    pub groups: Option<(usize, usize)>,
    /// Whether the chosen weights are divided by their sum.
    pub normalise: bool,
    /// Factor on the weights.
    pub scale: f32,
}

/// Logit to score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Logistic function of each logit.
    Sigmoid,
    /// Softmax over all experts.
    Softmax,
}

impl AttentionPlan {
    /// Widths in floats of what one position keeps in the key-value cache, a stream each.
    pub fn kv_streams(&self) -> Vec<usize> {
        match self {
            AttentionPlan::Mla(mla) => {
                let mut streams = vec![mla.kv_lora + mla.rope.dim];
                if let IndexerUse::Own(indexer) = &mla.indexer {
                    streams.push(indexer.head_dim);
                }
                streams
            }
            AttentionPlan::Gqa(gqa) => vec![gqa.kv_heads * gqa.head_dim; 2],
        }
    }
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

impl MlaPlan {
    fn tensors(&self, hidden: usize, out: &mut Tensors<'_>) {
        let query_width = self.heads * (self.nope + self.rope.dim);
        match self.q_lora {
            Some(rank) => {
                out.matrix("self_attn.q_a_proj.weight", rank, hidden, Role::Attention);
                out.vector("self_attn.q_a_layernorm.weight", rank, Role::Norm);
                out.matrix("self_attn.q_b_proj.weight", query_width, rank, Role::Attention);
            }
            None => out.matrix("self_attn.q_proj.weight", query_width, hidden, Role::Attention),
        }
        let kv_width = self.kv_lora + self.rope.dim;
        out.matrix("self_attn.kv_a_proj_with_mqa.weight", kv_width, hidden, Role::Attention);
        out.vector("self_attn.kv_a_layernorm.weight", self.kv_lora, Role::Norm);
        let expanded = self.heads * (self.nope + self.value);
        out.matrix("self_attn.kv_b_proj.weight", expanded, self.kv_lora, Role::Attention);
        out.matrix("self_attn.o_proj.weight", hidden, self.heads * self.value, Role::Attention);
        if let (IndexerUse::Own(indexer), Some(rank)) = (&self.indexer, self.q_lora) {
            let width = indexer.heads * indexer.head_dim;
            out.matrix("self_attn.indexer.wq_b.weight", width, rank, Role::Indexer);
            out.matrix("self_attn.indexer.wk.weight", indexer.head_dim, hidden, Role::Indexer);
            out.vector("self_attn.indexer.k_norm.weight", indexer.head_dim, Role::Norm);
            out.vector("self_attn.indexer.k_norm.bias", indexer.head_dim, Role::Norm);
            out.matrix("self_attn.indexer.weights_proj.weight", indexer.heads, hidden, Role::IndexerWeights);
        }
    }
}

impl GqaPlan {
    fn tensors(&self, hidden: usize, out: &mut Tensors<'_>) {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        out.matrix("self_attn.q_proj.weight", q, hidden, Role::Attention);
        out.matrix("self_attn.k_proj.weight", kv, hidden, Role::Attention);
        out.matrix("self_attn.v_proj.weight", kv, hidden, Role::Attention);
        out.matrix("self_attn.o_proj.weight", hidden, q, Role::Attention);
        if self.bias {
            out.vector("self_attn.q_proj.bias", q, Role::Bias);
            out.vector("self_attn.k_proj.bias", kv, Role::Bias);
            out.vector("self_attn.v_proj.bias", kv, Role::Bias);
        }
        let norms = match self.qk_norm {
            QkNorm::None => return,
            QkNorm::Head => (self.head_dim, self.head_dim),
            QkNorm::Projection => (q, kv),
        };
        out.vector("self_attn.q_norm.weight", norms.0, Role::Norm);
        out.vector("self_attn.k_norm.weight", norms.1, Role::Norm);
    }
}

fn swiglu_tensors(name: &str, width: usize, hidden: usize, role: Role, out: &mut Tensors<'_>) {
    out.matrix(&format!("{name}.gate_proj.weight"), width, hidden, role);
    out.matrix(&format!("{name}.up_proj.weight"), width, hidden, role);
    out.matrix(&format!("{name}.down_proj.weight"), hidden, width, role);
}

impl LayerPlan {
    fn tensors(&self, hidden: usize, out: &mut Tensors<'_>) {
        out.vector("input_layernorm.weight", hidden, Role::Norm);
        out.vector("post_attention_layernorm.weight", hidden, Role::Norm);
        match &self.attention {
            AttentionPlan::Mla(mla) => mla.tensors(hidden, out),
            AttentionPlan::Gqa(gqa) => gqa.tensors(hidden, out),
        }
        match &self.ffn {
            FfnPlan::Dense { width } => swiglu_tensors("mlp", *width, hidden, Role::DenseFfn, out),
            FfnPlan::Moe(moe) => {
                out.matrix(&moe.names.router(""), moe.experts, hidden, Role::Router);
                if moe.router.correction_bias {
                    out.vector(&moe.names.correction_bias(""), moe.experts, Role::RouterBias);
                }
                if let Some(width) = moe.shared_width {
                    swiglu_tensors(&moe.names.shared(""), width, hidden, Role::SharedExpert, out);
                }
            }
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
