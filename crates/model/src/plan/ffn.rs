//! Feed-forward kinds: dense, or routed experts with their router.

use metaltail_container::{Role, StackedNames};
use metaltail_kernels::Activation;

use super::Tensors;

/// Feed-forward kinds.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "one a layer, and nearly all of them are routed")]
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
    /// What stands between an expert's products.
    pub activation: Activation,
    /// Whether experts add biases to their products, and how those are stored.
    pub expert_biases: Option<ExpertBiasForm>,
    /// Whether the shared expert's result is multiplied by the sigmoid of a learned product with the input.
    pub shared_gate: bool,
    /// What its tensors are called.
    pub names: MoeNames,
}

/// How the biases of all experts of a layer are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertBiasForm {
    /// Those of gate and up in turn in one tensor, those of down in another.
    InTurn,
    /// A tensor each of gate, up and down. GGUF files are written so.
    Apart,
}

/// What checkpoints call the tensors of a mixture, after the layer's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeNames {
    /// The block that router, experts and shared expert belong to.
    pub block: &'static str,
    /// The router, within the block.
    pub router: &'static str,
    /// The router's correction bias, within the block.
    pub correction_bias: &'static str,
    /// The shared expert, within the block.
    pub shared: &'static str,
    /// Gate, up and down of an expert, after its number.
    pub expert: [&'static str; 3],
    /// Tensors of all experts, where Hugging Face checkpoints have those.
    pub stacked: Option<StackedNames>,
}

impl MoeNames {
    /// The names of most families.
    pub const MLP: MoeNames = MoeNames {
        block: "mlp",
        router: "gate",
        correction_bias: "gate.e_score_correction_bias",
        shared: "shared_experts",
        expert: [".gate_proj.weight", ".up_proj.weight", ".down_proj.weight"],
        stacked: None,
    };
    /// Mixtral's names, and those of families that took them over.
    pub const BLOCK_SPARSE: MoeNames = MoeNames {
        block: "block_sparse_moe",
        router: "gate",
        correction_bias: "e_score_correction_bias",
        shared: "shared_experts",
        expert: [".w1.weight", ".w3.weight", ".w2.weight"],
        stacked: None,
    };
    /// Those of gpt_oss, whose checkpoints stack the experts of a layer; elsewhere each has the usual names.
    pub const STACKED: MoeNames = MoeNames {
        router: "router",
        stacked: Some(StackedNames { gate_up: "gate_up_proj", down: "down_proj" }),
        ..MoeNames::MLP
    };

    /// Those of Qwen's families with a shared expert, of which there is only one.
    pub const ONE_SHARED: MoeNames = MoeNames { shared: "shared_expert", ..MoeNames::MLP };

    /// Name of the router's matrix; `prefix` is the layer's.
    pub(crate) fn router(&self, prefix: &str) -> String {
        format!("{prefix}{}.{}.weight", self.block, self.router)
    }

    /// Name of the bias of the router's logits.
    pub(crate) fn router_bias(&self, prefix: &str) -> String {
        format!("{prefix}{}.{}.bias", self.block, self.router)
    }

    /// Name of a tensor with biases of all experts; `part` is `gate`, `up`, `gate_up` or `down`.
    pub(crate) fn expert_biases(&self, prefix: &str, part: &str) -> String {
        format!("{prefix}{}.experts.{part}_proj_bias", self.block)
    }

    /// Name of the router's correction bias.
    pub(crate) fn correction_bias(&self, prefix: &str) -> String {
        format!("{prefix}{}.{}", self.block, self.correction_bias)
    }

    /// Name of the shared expert, before its matrices.
    pub(crate) fn shared(&self, prefix: &str) -> String {
        format!("{prefix}{}.{}", self.block, self.shared)
    }

    /// Name of what gates the shared expert.
    pub(crate) fn shared_gate(&self, prefix: &str) -> String {
        format!("{prefix}{}.{}_gate.weight", self.block, self.shared)
    }
}

/// From logits to chosen experts and their weights.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterPlan {
    /// Logit to score.
    pub scoring: Scoring,
    /// Whether the logits have a bias of their own.
    pub bias: bool,
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

pub(super) fn swiglu_tensors(name: &str, width: usize, hidden: usize, role: Role, out: &mut Tensors<'_>) {
    out.matrix(&format!("{name}.gate_proj.weight"), width, hidden, role);
    out.matrix(&format!("{name}.up_proj.weight"), width, hidden, role);
    out.matrix(&format!("{name}.down_proj.weight"), hidden, width, role);
}

impl MoePlan {
    /// Tensors of the router, the shared expert and biases.
    pub(super) fn tensors(&self, hidden: usize, out: &mut Tensors<'_>) {
        out.matrix(&self.names.router(""), self.experts, hidden, Role::Router);
        if self.router.bias {
            out.vector(&self.names.router_bias(""), self.experts, Role::Bias);
        }
        if self.router.correction_bias {
            out.vector(&self.names.correction_bias(""), self.experts, Role::RouterBias);
        }
        let mut biases = |part, cols| {
            out.matrix(&self.names.expert_biases("", part), self.experts, cols, Role::Bias);
        };
        match self.expert_biases {
            None => {}
            Some(ExpertBiasForm::InTurn) => {
                biases("gate_up", 2 * self.width);
                biases("down", hidden);
            }
            Some(ExpertBiasForm::Apart) => {
                biases("gate", self.width);
                biases("up", self.width);
                biases("down", hidden);
            }
        }
        if let Some(width) = self.shared_width {
            swiglu_tensors(&self.names.shared(""), width, hidden, Role::SharedExpert, out);
        }
        if self.shared_gate {
            out.vector(&self.names.shared_gate(""), hidden, Role::Gate);
        }
    }
}
