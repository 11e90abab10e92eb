//! Attention kinds and rotation.

use metaltail_container::Role;

use super::{DeltaNetPlan, Tensors};

/// Attention kinds.
#[derive(Clone, Debug, PartialEq)]
pub enum AttentionPlan {
    /// Multi-head latent attention (compressed keys and values).
    Mla(MlaPlan),
    /// Grouped-query attention.
    Gqa(GqaPlan),
    /// Linear attention with a recurrent state.
    DeltaNet(DeltaNetPlan),
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
    /// How the map from latents to keys and values is stored.
    pub expansion: KvExpansion,
}

/// How the map from latents to the keys and values of all heads is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvExpansion {
    /// `kv_b_proj`: of each head first the rows that give its key, then those that give its value.
    #[default]
    Joint,
    /// `k_b_proj`, each head's rows that give the key transposed, so that a query times it lies in the latent
    /// space, and `v_b_proj`. GGUF files are written so.
    Split,
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
    /// Whether the output projection adds a bias.
    pub output_bias: bool,
    /// Whether each head has a learned score that joins the softmax and stands for no position.
    pub sinks: bool,
    /// Positions that a row attends to, its own and those before it; all where there is none.
    pub window: Option<usize>,
    /// Whether the projection of queries gives each head a gate too, as wide and right after its query: the
    /// head's result is multiplied by the gate's sigmoid.
    pub gate: bool,
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
            AttentionPlan::DeltaNet(_) => Vec::new(),
        }
    }

    /// Of a recurrent layer, the numbers that one state of a sequence has: those of its convolution's
    /// window, and its matrices.
    pub fn state_sizes(&self) -> Option<(usize, usize)> {
        match self {
            AttentionPlan::DeltaNet(delta) => Some(delta.state_sizes()),
            AttentionPlan::Mla(_) | AttentionPlan::Gqa(_) => None,
        }
    }
}

impl MlaPlan {
    pub(super) fn tensors(&self, hidden: usize, out: &mut Tensors<'_>) {
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
        match self.expansion {
            KvExpansion::Joint => {
                let expanded = self.heads * (self.nope + self.value);
                out.matrix("self_attn.kv_b_proj.weight", expanded, self.kv_lora, Role::Attention);
            }
            KvExpansion::Split => {
                let (keys, values) = (self.heads * self.kv_lora, self.heads * self.value);
                out.matrix("self_attn.k_b_proj.weight", keys, self.nope, Role::Attention);
                out.matrix("self_attn.v_b_proj.weight", values, self.kv_lora, Role::Attention);
            }
        }
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
    pub(super) fn tensors(&self, hidden: usize, out: &mut Tensors<'_>) {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let gated = if self.gate { 2 * q } else { q };
        out.matrix("self_attn.q_proj.weight", gated, hidden, Role::Attention);
        out.matrix("self_attn.k_proj.weight", kv, hidden, Role::Attention);
        out.matrix("self_attn.v_proj.weight", kv, hidden, Role::Attention);
        out.matrix("self_attn.o_proj.weight", hidden, q, Role::Attention);
        if self.bias {
            out.vector("self_attn.q_proj.bias", gated, Role::Bias);
            out.vector("self_attn.k_proj.bias", kv, Role::Bias);
            out.vector("self_attn.v_proj.bias", kv, Role::Bias);
        }
        if self.output_bias {
            out.vector("self_attn.o_proj.bias", hidden, Role::Bias);
        }
        if self.sinks {
            out.vector("self_attn.sinks", self.heads, Role::Bias);
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
