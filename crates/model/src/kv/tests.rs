use serde_json::json;

use super::*;

/// One recurrent layer and one with rows.
fn plan() -> Plan {
    Plan::from_config(&json!({
        "model_type": "qwen3_5_moe_text", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2,
        "full_attention_interval": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16
    }))
    .unwrap()
}

fn rows(positions: std::ops::Range<u32>, phase: Phase) -> Vec<Row> {
    positions.map(|position| Row { sequence: 0, position, token: 0, phase }).collect()
}

/// A step whose state after it is `value` everywhere.
fn step(cache: &mut KvCache, positions: std::ops::Range<u32>, phase: Phase, value: f32) {
    let (_, after) = cache.step_state(0).unwrap();
    after.window.fill(value);
    after.matrix.fill(value);
    cache.commit(0, &rows(positions, phase));
}

fn value(cache: &KvCache) -> f32 {
    let state = cache.state(0).unwrap();
    assert!(state.window.iter().chain(&state.matrix).all(|number| *number == state.matrix[0]));
    state.matrix[0]
}

#[test]
fn a_step_that_does_not_commit_leaves_the_state_as_it_was() {
    let mut cache = KvCache::new(&plan());
    step(&mut cache, 0..5, Phase::Prompt, 5.0);
    cache.step_state(0).unwrap().1.matrix.fill(9.0);
    assert_eq!((cache.len(), value(&cache)), (5, 5.0));
    // Nor does a step of other sequences touch it.
    cache.commit(1, &rows(5..6, Phase::Generation));
    assert_eq!((cache.len(), value(&cache)), (5, 5.0));
}

#[test]
fn truncation_falls_back_to_the_state_before_the_last_prompt_step_or_to_nothing() {
    let mut cache = KvCache::new(&plan());
    step(&mut cache, 0..5, Phase::Prompt, 5.0);
    step(&mut cache, 5..9, Phase::Prompt, 9.0);
    step(&mut cache, 9..10, Phase::Generation, 10.0);
    step(&mut cache, 10..11, Phase::Generation, 11.0);
    assert_eq!((cache.truncate(11), cache.truncate(20)), (11, 11), "there is nothing to forget");
    assert_eq!(value(&cache), 11.0);
    assert_eq!((cache.truncate(8), value(&cache)), (5, 5.0));
    // The kept state stays for another time.
    step(&mut cache, 5..6, Phase::Generation, 6.0);
    assert_eq!((cache.truncate(5), value(&cache)), (5, 5.0));
    assert_eq!((cache.truncate(4), value(&cache)), (0, 0.0));
    step(&mut cache, 0..1, Phase::Generation, 1.0);
    assert_eq!((cache.truncate(0), value(&cache)), (0, 0.0));
}

#[test]
fn rows_alone_are_cut_where_asked() {
    let mut plan = plan();
    plan.layers.remove(0);
    let mut cache = KvCache::new(&plan);
    cache.commit(0, &rows(0..7, Phase::Prompt));
    assert_eq!((cache.truncate(3), cache.len()), (3, 3));
    assert!(cache.check(0, &rows(2..4, Phase::Prompt)).is_ok());
}

#[test]
fn rows_that_do_not_follow_are_refused_where_there_is_a_state() {
    let mut cache = KvCache::new(&plan());
    step(&mut cache, 0..5, Phase::Prompt, 5.0);
    assert!(cache.check(0, &rows(5..8, Phase::Prompt)).is_ok());
    for positions in [4..6, 6..7] {
        let first = positions.start;
        let error = cache.check(0, &rows(positions, Phase::Prompt)).unwrap_err();
        assert!(matches!(error, ModelError::NotNext { position, wanted: 5 } if position == first), "{error}");
    }
    // Rows of other sequences are none of its business.
    assert!(cache.check(1, &rows(5..6, Phase::Prompt)).is_ok());
}

#[test]
fn the_state_is_charged_once_a_sequence_whatever_its_length() {
    let plan = plan();
    // (3 · 128 + 4 · 16 · 16) numbers.
    assert_eq!(plan.state_bytes(), 4 * (3 * 128 + 1024));
    let [none, one, two] = [0, 64, 128].map(|positions| KvCache::bytes_for(&plan, positions));
    assert_eq!(none, 3 * plan.state_bytes());
    assert_eq!((one - none, two - one), (64 * 2 * 64 * 4, 64 * 2 * 64 * 4));
}
