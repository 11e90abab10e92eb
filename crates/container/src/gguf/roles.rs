//! What a tensor is for, by its name in GGUF.

use std::fmt;

/// The matrix of an expert that a stacked tensor belongs to, `_exps` in its name.
pub(super) const STACKED: &str = "_exps.";
/// Roles that one expert of many has.
pub(super) const ROUTED: &str = "routed experts";

/// Layer and the rest of a name `blk.N.REST`.
pub(super) fn layer_of(name: &str) -> Option<(u32, &str)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}

/// Whether the tensor holds a matrix, bias or scale of every expert of a layer, one after the other.
pub(super) fn is_stacked(rest: &str) -> bool {
    rest.strip_prefix("ffn_")
        .and_then(|rest| rest.split_once(STACKED))
        .is_some_and(|(matrix, _)| matches!(matrix, "gate" | "up" | "down" | "gate_up"))
}

/// Whether the tensor is a matrix of one expert: `ffn_gate.7.weight`, as old files have them.
pub(super) fn is_single_expert(rest: &str) -> bool {
    let mut pieces = rest.split('.');
    let matrix = pieces.next().is_some_and(|m| matches!(m, "ffn_gate" | "ffn_up" | "ffn_down"));
    matrix && pieces.next().is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// Name of a tensor's role in reports; the words are those of [`role_name`](crate::role_name) where
/// both know the role.
pub(super) fn role_of(name: &str) -> &'static str {
    let Some((_, rest)) = layer_of(name) else {
        return match name.split('.').next().unwrap_or_default() {
            "token_embd" | "per_layer_token_embd" | "position_embd" | "token_types" => "embedding",
            "output" => "head",
            "output_norm" | "token_embd_norm" | "per_layer_proj_norm" => "norm",
            "rope_freqs" | "rope_factors_long" | "rope_factors_short" => "rope",
            _ => "other",
        };
    };
    let stem = rest.split('.').next().unwrap_or_default();
    match stem {
        _ if is_stacked(rest) || is_single_expert(rest) => ROUTED,
        "nextn" => "draft",
        "indexer" => "indexer",
        "exp_probs_b" => "router bias",
        "ffn_gate_inp" => "router",
        _ if stem.ends_with("_shexp") => "shared expert",
        _ if stem.contains("norm") => "norm",
        _ if stem.starts_with("attn_") => "attention",
        _ if stem.starts_with("ssm_") || stem.starts_with("time_mix") || stem == "shortconv" => "recurrence",
        "ffn_gate" | "ffn_up" | "ffn_down" => "dense feed-forward",
        _ => "other",
    }
}

/// What a `general.file_type` stands for: the mix of types that most weights have.
pub(super) fn file_type(number: u64) -> Option<&'static str> {
    Some(match number {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        7 => "Q8_0",
        8 => "Q5_0",
        9 => "Q5_1",
        10 => "Q2_K",
        11 => "Q3_K_S",
        12 => "Q3_K_M",
        13 => "Q3_K_L",
        14 => "Q4_K_S",
        15 => "Q4_K_M",
        16 => "Q5_K_S",
        17 => "Q5_K_M",
        18 => "Q6_K",
        19 => "IQ2_XXS",
        20 => "IQ2_XS",
        21 => "Q2_K_S",
        22 => "IQ3_XS",
        23 => "IQ3_XXS",
        24 => "IQ1_S",
        25 => "IQ4_NL",
        26 => "IQ3_S",
        27 => "IQ3_M",
        28 => "IQ2_S",
        29 => "IQ2_M",
        30 => "IQ4_XS",
        31 => "IQ1_M",
        32 => "BF16",
        36 => "TQ1_0",
        37 => "TQ2_0",
        38 => "MXFP4_MOE",
        39 => "NVFP4",
        40 => "Q1_0",
        _ => return None,
    })
}

/// Distinct names in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Names(Vec<String>);

impl Names {
    pub fn add(&mut self, name: impl fmt::Display) {
        let name = name.to_string();
        if !self.0.contains(&name) {
            self.0.push(name);
        }
    }

    pub fn into_vec(self) -> Vec<String> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_follow_from_names() {
        for (name, role) in [
            ("token_embd.weight", "embedding"),
            ("output.weight", "head"),
            ("output_norm.weight", "norm"),
            ("blk.0.attn_q.weight", "attention"),
            ("blk.0.attn_kv_a_mqa.weight", "attention"),
            ("blk.0.attn_q_norm.weight", "norm"),
            ("blk.0.ffn_gate.weight", "dense feed-forward"),
            ("blk.3.ffn_gate_inp.weight", "router"),
            ("blk.3.exp_probs_b.bias", "router bias"),
            ("blk.3.ffn_gate_exps.weight", ROUTED),
            ("blk.3.ffn_down_exps.bias", ROUTED),
            ("blk.3.ffn_gate_up_exps.weight", ROUTED),
            ("blk.3.ffn_down.17.weight", ROUTED),
            ("blk.3.ffn_norm_exps.weight", "norm"),
            ("blk.3.ffn_up_shexp.weight", "shared expert"),
            ("blk.78.nextn.eh_proj.weight", "draft"),
            ("blk.1.indexer.attn_q_b.weight", "indexer"),
            ("blk.1.ssm_in.weight", "recurrence"),
            ("blk.x.ffn_up.weight", "other"),
            ("mm.0.weight", "other"),
        ] {
            assert_eq!(role_of(name), role, "{name}");
        }
    }
}
