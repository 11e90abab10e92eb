//! From canonical tensor names to those of GGUF files.
//!
//! GGUF has one table of names for all architectures: a tensor's name follows from what it is for. Alternatives
//! are tried in order, since some architectures name the norm before the feed-forward part after what precedes it.

/// Where a canonical tensor may be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Candidates {
    /// Whole tensors, the first that is there.
    pub whole: Vec<String>,
    /// The expert whose slice it is of stacked tensors; those of one expert alone are whole.
    pub slice: Option<Slice>,
}

/// One expert's part of a stacked tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    /// Expert number.
    pub expert: u32,
    /// The tensor that stacks this matrix of all experts.
    pub stacked: String,
    /// The tensor that stacks gate over up, and whether the second half is meant.
    pub joined: Option<(String, bool)>,
}

/// Where the tensor of a canonical name may be; `None` where GGUF has no such tensor.
pub(crate) fn candidates(canonical: &str) -> Option<Candidates> {
    let whole = |names: &[&str]| {
        Some(Candidates { whole: names.iter().map(|name| (*name).to_owned()).collect(), slice: None })
    };
    match canonical {
        "model.embed_tokens.weight" => return whole(&["token_embd.weight"]),
        "model.norm.weight" => return whole(&["output_norm.weight"]),
        "lm_head.weight" => return whole(&["output.weight"]),
        _ => {}
    }
    let (layer, rest) = canonical.strip_prefix("model.layers.")?.split_once('.')?;
    let block = |name: &str| format!("blk.{layer}.{name}");
    let block_parts = rest.strip_prefix("mlp.").or_else(|| rest.strip_prefix("block_sparse_moe."));
    if let Some(expert) = block_parts.and_then(|rest| rest.strip_prefix("experts.")) {
        return expert_slice(&block, expert);
    }
    let names: Vec<String> = match block_parts {
        Some(rest) => vec![block(&feed_forward(rest)?)],
        None => layer_part(rest)?.iter().map(|name| block(name)).collect(),
    };
    Some(Candidates { whole: names, slice: None })
}

/// The tensor that a file is written with: of an expert's matrix, the one that stacks those of all experts.
pub(crate) fn written(canonical: &str) -> Option<String> {
    let Candidates { whole, slice } = candidates(canonical)?;
    slice.map(|slice| slice.stacked).or(whole.into_iter().next())
}

/// `7.gate_proj.weight` and the like, after `experts.`; `gate_proj_bias` has those of all.
fn expert_slice(block: &dyn Fn(&str) -> String, rest: &str) -> Option<Candidates> {
    if let Some(matrix) = rest.strip_suffix("_proj_bias").filter(|m| matches!(*m, "gate" | "up" | "down")) {
        return Some(Candidates { whole: vec![block(&format!("ffn_{matrix}_exps.bias"))], slice: None });
    }
    let (expert, matrix) = rest.split_once('.')?;
    let expert: u32 = expert.parse().ok()?;
    let matrix = match matrix {
        "gate_proj.weight" | "w1.weight" => "gate",
        "up_proj.weight" | "w3.weight" => "up",
        "down_proj.weight" | "w2.weight" => "down",
        _ => return None,
    };
    let joined = (matrix != "down").then(|| (block("ffn_gate_up_exps.weight"), matrix == "up"));
    Some(Candidates {
        whole: vec![block(&format!("ffn_{matrix}.{expert}.weight"))],
        slice: Some(Slice { expert, stacked: block(&format!("ffn_{matrix}_exps.weight")), joined }),
    })
}

/// A part of the feed-forward block that is no routed expert's.
fn feed_forward(rest: &str) -> Option<String> {
    Some(match rest {
        "gate.weight" | "router.weight" => "ffn_gate_inp.weight".to_owned(),
        "router.bias" => "ffn_gate_inp.bias".to_owned(),
        "gate.e_score_correction_bias" | "e_score_correction_bias" => "exp_probs_b.bias".to_owned(),
        "shared_expert_gate.weight" => "ffn_gate_inp_shexp.weight".to_owned(),
        _ => {
            let shared = rest.strip_prefix("shared_experts.").or_else(|| rest.strip_prefix("shared_expert."));
            let matrix = shared.unwrap_or(rest).strip_suffix("_proj.weight")?;
            if !matches!(matrix, "gate" | "up" | "down") {
                return None;
            }
            let suffix = if shared.is_some() { "_shexp" } else { "" };
            format!("ffn_{matrix}{suffix}.weight")
        }
    })
}

/// A part of a layer outside of its feed-forward block.
fn layer_part(rest: &str) -> Option<&'static [&'static str]> {
    const NAMES: [(&str, &[&str]); 39] = [
        ("input_layernorm.weight", &["attn_norm.weight"]),
        ("post_attention_layernorm.weight", &["ffn_norm.weight", "post_attention_norm.weight"]),
        ("self_attn.q_proj.weight", &["attn_q.weight"]),
        ("self_attn.k_proj.weight", &["attn_k.weight"]),
        ("self_attn.v_proj.weight", &["attn_v.weight"]),
        ("self_attn.o_proj.weight", &["attn_output.weight"]),
        ("self_attn.q_proj.bias", &["attn_q.bias"]),
        ("self_attn.k_proj.bias", &["attn_k.bias"]),
        ("self_attn.v_proj.bias", &["attn_v.bias"]),
        ("self_attn.o_proj.bias", &["attn_output.bias"]),
        ("self_attn.q_norm.weight", &["attn_q_norm.weight"]),
        ("self_attn.k_norm.weight", &["attn_k_norm.weight"]),
        ("self_attn.sinks", &["attn_sinks.weight"]),
        ("self_attn.q_a_proj.weight", &["attn_q_a.weight"]),
        ("self_attn.q_a_layernorm.weight", &["attn_q_a_norm.weight"]),
        ("self_attn.q_b_proj.weight", &["attn_q_b.weight"]),
        ("self_attn.kv_a_proj_with_mqa.weight", &["attn_kv_a_mqa.weight"]),
        ("self_attn.kv_a_layernorm.weight", &["attn_kv_a_norm.weight"]),
        ("self_attn.kv_b_proj.weight", &["attn_kv_b.weight"]),
        ("self_attn.k_b_proj.weight", &["attn_k_b.weight"]),
        ("self_attn.v_b_proj.weight", &["attn_v_b.weight"]),
        ("self_attn.indexer.wq_b.weight", &["indexer.attn_q_b.weight"]),
        ("self_attn.indexer.wk.weight", &["indexer.attn_k.weight"]),
        ("self_attn.indexer.k_norm.weight", &["indexer.k_norm.weight"]),
        ("self_attn.indexer.k_norm.bias", &["indexer.k_norm.bias"]),
        ("self_attn.indexer.weights_proj.weight", &["indexer.proj.weight"]),
        ("linear_attn.in_proj_qkv.weight", &["attn_qkv.weight"]),
        ("linear_attn.in_proj_z.weight", &["attn_gate.weight"]),
        ("linear_attn.in_proj_a.weight", &["ssm_alpha.weight"]),
        ("linear_attn.in_proj_b.weight", &["ssm_beta.weight"]),
        ("linear_attn.out_proj.weight", &["ssm_out.weight"]),
        ("linear_attn.conv1d.weight", &["ssm_conv1d.weight"]),
        ("linear_attn.A_log", &["ssm_a"]),
        ("linear_attn.dt_bias", &["ssm_dt.bias"]),
        ("linear_attn.norm.weight", &["ssm_norm.weight"]),
        ("eh_proj.weight", &["nextn.eh_proj.weight"]),
        ("enorm.weight", &["nextn.enorm.weight"]),
        ("hnorm.weight", &["nextn.hnorm.weight"]),
        ("shared_head.norm.weight", &["nextn.shared_head_norm.weight"]),
    ];
    NAMES.iter().find(|(name, _)| *name == rest).map(|(_, stored)| *stored)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_from_what_a_tensor_is_for() {
        for (canonical, stored) in [
            ("lm_head.weight", "output.weight"),
            ("model.layers.7.input_layernorm.weight", "blk.7.attn_norm.weight"),
            ("model.layers.7.self_attn.q_proj.bias", "blk.7.attn_q.bias"),
            ("model.layers.0.mlp.gate_proj.weight", "blk.0.ffn_gate.weight"),
            ("model.layers.3.mlp.gate.weight", "blk.3.ffn_gate_inp.weight"),
            ("model.layers.3.block_sparse_moe.gate.weight", "blk.3.ffn_gate_inp.weight"),
            ("model.layers.3.block_sparse_moe.e_score_correction_bias", "blk.3.exp_probs_b.bias"),
            ("model.layers.3.mlp.shared_experts.up_proj.weight", "blk.3.ffn_up_shexp.weight"),
            ("model.layers.46.shared_head.norm.weight", "blk.46.nextn.shared_head_norm.weight"),
        ] {
            assert_eq!(candidates(canonical).unwrap().whole, [stored], "{canonical}");
        }
        let norm = candidates("model.layers.1.post_attention_layernorm.weight").unwrap();
        assert_eq!(norm.whole, ["blk.1.ffn_norm.weight", "blk.1.post_attention_norm.weight"]);
    }

    #[test]
    fn an_expert_is_a_slice_of_a_stacked_tensor() {
        let found = candidates("model.layers.2.mlp.experts.19.up_proj.weight").unwrap();
        assert_eq!(found.whole, ["blk.2.ffn_up.19.weight"]);
        let slice = found.slice.unwrap();
        assert_eq!((slice.expert, slice.stacked.as_str()), (19, "blk.2.ffn_up_exps.weight"));
        assert_eq!(slice.joined, Some(("blk.2.ffn_gate_up_exps.weight".to_owned(), true)));
        let down = candidates("model.layers.2.block_sparse_moe.experts.0.w2.weight").unwrap().slice.unwrap();
        assert_eq!((down.stacked.as_str(), down.joined), ("blk.2.ffn_down_exps.weight", None));
    }

    #[test]
    fn what_gguf_does_not_have_has_no_name() {
        for canonical in [
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "x",
            "model.layers.0.mlp.experts.x.up_proj.weight",
        ] {
            assert_eq!(candidates(canonical), None, "{canonical}");
        }
    }
}
