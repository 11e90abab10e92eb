//! Every family against an independent implementation (`fixtures/README.md`).

mod common;
#[path = "common/oracle.rs"]
mod oracle;

use common::{exact, ids, json, open, root};
use metaltail_engine::score;
use metaltail_model::{CancelFlag, MlaForm};

/// The family's checkpoint against its oracle.
fn agrees_with_the_oracle(family: &str, form: MlaForm) {
    let dir = root().join("fixtures/oracles").join(family);
    oracle::agrees(&dir, &dir.join("oracle.json"), form);
}

#[test]
fn glm_moe_dsa_agrees_with_sparse_attention_active() {
    agrees_with_the_oracle("glm_moe_dsa", MlaForm::Absorbed);
}

#[test]
fn glm_moe_dsa_agrees_in_the_reconstructed_form() {
    agrees_with_the_oracle("glm_moe_dsa", MlaForm::Reconstructed);
}

#[test]
fn glm_moe_dsa_agrees_below_its_index_topk() {
    agrees_with_the_oracle("glm_moe_dsa_dense_ctx", MlaForm::Absorbed);
}

#[test]
fn deepseek_v3_agrees_with_groups_and_yarn() {
    agrees_with_the_oracle("deepseek_v3", MlaForm::Absorbed);
}

#[test]
fn deepseek_v3_agrees_without_query_compression() {
    agrees_with_the_oracle("deepseek_v3_noqlora", MlaForm::Absorbed);
}

#[test]
fn olmoe_agrees() {
    agrees_with_the_oracle("olmoe", MlaForm::Absorbed);
}

#[test]
fn qwen3_moe_agrees() {
    agrees_with_the_oracle("qwen3_moe", MlaForm::Absorbed);
}

#[test]
fn mixtral_agrees_without_norms_of_queries_and_keys() {
    agrees_with_the_oracle("mixtral", MlaForm::Absorbed);
}

#[test]
fn glm4_moe_agrees_with_biases_and_half_of_each_head_rotated() {
    agrees_with_the_oracle("glm4_moe", MlaForm::Absorbed);
}

#[test]
fn minimax_m2_agrees_with_norms_over_whole_projections() {
    agrees_with_the_oracle("minimax_m2", MlaForm::Absorbed);
}

#[test]
fn gpt_oss_agrees_with_sinks_windows_and_stacked_experts() {
    agrees_with_the_oracle("gpt_oss", MlaForm::Absorbed);
}

#[test]
fn gpt_oss_agrees_in_its_published_form() {
    agrees_with_the_oracle("gpt_oss_mxfp4", MlaForm::Absorbed);
}

#[test]
fn qwen3_5_moe_agrees_with_recurrent_layers_between_gated_attention() {
    agrees_with_the_oracle("qwen3_5_moe", MlaForm::Absorbed);
}

#[test]
fn an_oracle_with_another_answer_is_noticed() {
    // The comparison itself can fail: one token later, every other answer is wrong.
    let dir = root().join("fixtures/oracles/glm_moe_dsa");
    let oracle = json(&dir.join("oracle.json"));
    let engine = open(&dir, &exact());
    let mut prompt = ids(&oracle["prompt"]);
    prompt.remove(0);
    let score = score(&engine, &[prompt], &[], &CancelFlag::new(), &mut |_| {}).unwrap();
    assert_ne!(score.argmax[0], ids(&oracle["argmax"])[..39]);
}
