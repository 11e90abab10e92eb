//! Linear attention with a recurrent state: the gated delta rule.

use metaltail_container::Role;

use super::Tensors;

/// A gated delta net (arXiv 2412.06464) behind a causal convolution of queries, keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaNetPlan {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a query and of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Positions that the convolution sees, its own and those before it.
    pub kernel: usize,
    /// `eps` of the gated norm of each head's result.
    pub norm_eps: f32,
    /// How the projections of the hidden state are stored.
    pub projections: DeltaProjections,
    /// Which value heads share a key head.
    pub sharing: HeadSharing,
    /// How the rate of decay of each value head is stored.
    pub rate: DecayRate,
}

/// Which heads of values share a head of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadSharing {
    /// Those in a row: value head `v` of `n` to a key head has key head `v / n`.
    Neighbours,
    /// Value head `v` has key head `v mod` their number. GGUF files are written so.
    Modulo,
}

/// How the rate of decay `−exp(A)` of a value head is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecayRate {
    /// A, as `A_log`.
    Logarithm,
    /// The rate itself, under the same name. GGUF files are written so.
    Plain,
}

/// How the projections to queries, keys, values and gates are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaProjections {
    /// `in_proj_qkv` (all queries, all keys, all values), `in_proj_z`, `in_proj_a` and `in_proj_b`.
    Apart,
    /// `in_proj_qkvz` and `in_proj_ba`: the rows of one key head after those of another.
    ByKeyHead,
}

impl DeltaNetPlan {
    /// Width of all queries, and of all keys.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Width of all values.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Channels of the convolution: queries, keys, values.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// The key head that a value head shares.
    pub fn key_head(&self, value_head: usize) -> usize {
        match self.sharing {
            HeadSharing::Neighbours => value_head / (self.value_heads / self.key_heads),
            HeadSharing::Modulo => value_head % self.key_heads,
        }
    }

    /// Numbers that a sequence's state has: those of the convolution's window, and the heads' matrices.
    pub fn state_sizes(&self) -> (usize, usize) {
        ((self.kernel - 1) * self.channels(), self.values() * self.key_dim)
    }

    pub(super) fn tensors(&self, hidden: usize, out: &mut Tensors<'_>) {
        let (channels, values, heads) = (self.channels(), self.values(), self.value_heads);
        match self.projections {
            DeltaProjections::Apart => {
                out.matrix("linear_attn.in_proj_qkv.weight", channels, hidden, Role::Attention);
                out.matrix("linear_attn.in_proj_z.weight", values, hidden, Role::Attention);
                out.matrix("linear_attn.in_proj_a.weight", heads, hidden, Role::Gate);
                out.matrix("linear_attn.in_proj_b.weight", heads, hidden, Role::Gate);
            }
            DeltaProjections::ByKeyHead => {
                out.matrix("linear_attn.in_proj_qkvz.weight", channels + values, hidden, Role::Attention);
                out.matrix("linear_attn.in_proj_ba.weight", 2 * heads, hidden, Role::Gate);
            }
        }
        out.matrix("linear_attn.conv1d.weight", channels, self.kernel, Role::Convolution);
        out.vector("linear_attn.A_log", heads, Role::Bias);
        out.vector("linear_attn.dt_bias", heads, Role::Bias);
        out.vector("linear_attn.norm.weight", self.value_dim, Role::Norm);
        out.matrix("linear_attn.out_proj.weight", hidden, values, Role::Attention);
    }
}
