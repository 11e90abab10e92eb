//! One model in every way in which checkpoints of `qwen3_5_moe` and `qwen3_next` are published: the same bits.

mod common;
#[path = "common/rewrite.rs"]
mod rewrite;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use metaltail_container::Checkpoint;
use metaltail_container::convert::{ConvertOptions, Target, convert};
use metaltail_engine::telemetry::{Listener, Telemetry};
use metaltail_engine::{Engine, EngineError, score};
use metaltail_model::{CancelFlag, Plan};
use rewrite::{Tensor, Tensors};
use serde_json::{Value, json};
use synthetic::{Router, random_ids};
use tempfile::TempDir;

const LINEAR: &str = "linear_attn.";

/// The oracle's configuration and tensors.
fn original() -> (Value, Tensors) {
    let dir = common::root().join("fixtures/oracles/qwen3_5_moe");
    (common::json(&dir.join("config.json")), rewrite::read(&dir))
}

fn try_open(dir: &Path) -> (Result<Engine, EngineError>, Vec<String>) {
    let heard = Arc::new(Router::default());
    let telemetry = Arc::new(Telemetry::new(vec![heard.clone() as Arc<dyn Listener>]));
    let engine = Engine::open(dir, &common::exact(), telemetry, &|_, _| {});
    let notices = heard.notices();
    (engine, notices)
}

/// Bits of logits, and what was said.
fn bits(config: &Value, tensors: &Tensors) -> (Vec<u32>, Vec<String>) {
    let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    rewrite::write(dir.path(), config, tensors);
    let (engine, notices) = try_open(dir.path());
    (logits(&engine.unwrap()), notices)
}

fn logits(engine: &Engine) -> Vec<u32> {
    let prompt = random_ids(20, 320, 1);
    let score = score(engine, &[prompt], &[0, 7, 19], &CancelFlag::new(), &mut |_| {}).unwrap();
    score.logits.values().flatten().map(|logit| logit.to_bits()).collect()
}

fn wanted() -> Vec<u32> {
    let (config, tensors) = original();
    bits(&config, &tensors).0
}

/// The projections of linear attention by key head, as `qwen3_next` has them.
fn by_key_head(config: &Value, tensors: &Tensors) -> Tensors {
    let number = |key: &str| config[key].as_u64().unwrap() as usize;
    let (heads, dim) = (number("linear_num_key_heads"), number("linear_key_head_dim"));
    let share = number("linear_num_value_heads") / heads;
    let values = share * number("linear_value_head_dim");
    let cols = number("hidden_size");
    let mut out = Tensors::new();
    for (name, tensor) in tensors {
        let Some((layer, part)) = name.split_once(LINEAR) else {
            out.insert(name.clone(), tensor.clone());
            continue;
        };
        let other = |part: &str| &tensors[&format!("{layer}{LINEAR}{part}.weight")];
        let (renamed, tensor) = match part {
            "in_proj_qkv.weight" => {
                let z = other("in_proj_z");
                let rows = (0..heads).flat_map(|head| {
                    let query = head * dim..(head + 1) * dim;
                    let key = heads * dim + query.start..heads * dim + query.end;
                    let value = 2 * heads * dim + head * values..2 * heads * dim + (head + 1) * values;
                    let gate = head * values..(head + 1) * values;
                    query.chain(key).chain(value).map(|row| tensor.row(row)).chain(gate.map(|row| z.row(row)))
                });
                ("in_proj_qkvz.weight", Tensor::of_rows(rows, cols))
            }
            "in_proj_b.weight" => {
                let a = other("in_proj_a");
                let rows = (0..heads).flat_map(|head| {
                    let own = head * share..(head + 1) * share;
                    own.clone().map(|row| tensor.row(row)).chain(own.map(|row| a.row(row)))
                });
                ("in_proj_ba.weight", Tensor::of_rows(rows, cols))
            }
            "in_proj_z.weight" | "in_proj_a.weight" => continue,
            other => (other, tensor.clone()),
        };
        out.insert(format!("{layer}{LINEAR}{renamed}"), tensor);
    }
    out
}

#[test]
fn qwen3_next_is_the_same_model_with_other_projections() {
    let (mut config, tensors) = original();
    let sorted = by_key_head(&config, &tensors);
    assert_eq!(sorted.len(), tensors.len() - 2 * 3, "three layers have two tensors fewer");
    config["model_type"] = "qwen3_next".into();
    // Every fourth layer has full attention where nothing is said.
    config.as_object_mut().unwrap().remove("layer_types");
    assert!(bits(&config, &sorted).0 == wanted());
}

/// A model that sees: names with a prefix, towers beside it, the configuration within another, experts of a layer
/// in two tensors.
fn published(config: &Value, tensors: &Tensors) -> (Value, Tensors) {
    let mut out = Tensors::new();
    let experts = config["num_experts"].as_u64().unwrap() as usize;
    for (name, tensor) in tensors {
        let renamed = match name.strip_prefix("model.") {
            Some(rest) => format!("model.language_model.{rest}"),
            None => name.clone(),
        };
        let Some((block, expert)) = renamed.split_once(".experts.") else {
            out.insert(renamed, tensor.clone());
            continue;
        };
        if expert != "0.gate_proj.weight" {
            continue;
        }
        let layer = name.split_once(".experts.").unwrap().0;
        let part = |expert: usize, part: &str| &tensors[&format!("{layer}.experts.{expert}.{part}.weight")];
        let stack = |parts: &[&str]| {
            let all: Vec<&Tensor> =
                (0..experts).flat_map(|e| parts.iter().map(move |p| part(e, p))).collect();
            let shape = vec![experts, parts.len() * all[0].shape[0], all[0].shape[1]];
            Tensor { shape, bytes: all.iter().flat_map(|tensor| tensor.bytes.clone()).collect() }
        };
        out.insert(format!("{block}.experts.gate_up_proj"), stack(&["gate_proj", "up_proj"]));
        out.insert(format!("{block}.experts.down_proj"), stack(&["down_proj"]));
    }
    let one = Tensor { shape: vec![1, 2], bytes: vec![0; 4] };
    for name in
        ["mtp.fc.weight", "mtp.layers.0.input_layernorm.weight", "model.visual.patch_embed.proj.weight"]
    {
        out.insert(name.to_owned(), one.clone());
    }
    let outer = json!({
        "model_type": "qwen3_5_moe", "text_config": config, "vision_config": {"depth": 1},
        "tie_word_embeddings": false,
    });
    (outer, out)
}

#[test]
fn the_published_form_gives_the_same_bits_and_what_is_left_out_is_told() {
    let (config, tensors) = original();
    let (outer, published) = published(&config, &tensors);
    let (found, notices) = bits(&outer, &published);
    assert!(found == wanted());
    let told = notices.iter().filter(|text| text.contains("2 tensors of draft layers (mtp.…)")).count();
    assert_eq!(told, 1, "{notices:?}");
}

#[test]
fn the_published_form_converts_and_every_tensor_but_the_towers_has_a_use() {
    let (config, tensors) = original();
    let (outer, published) = published(&config, &tensors);
    let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    rewrite::write(dir.path(), &outer, &published);
    let source = Checkpoint::open(dir.path()).unwrap();
    let inventory = Plan::from_config(source.config()).unwrap().inventory();
    let census = source.check(&inventory).unwrap();
    assert_eq!(census.unused, 3);
    // Gate and up of an expert follow one another.
    assert!(census.layers.iter().all(|layer| (layer.runs, layer.experts) == (2, 8)));
    let slab = dir.path().join("slab");
    let keep = ConvertOptions { experts: Target::Keep, rest: Target::Keep, draft_experts: Target::Keep };
    convert(&source, &inventory, &slab, &keep, &mut |_| ControlFlow::Continue(())).unwrap();
    assert!(logits(&try_open(&slab).0.unwrap()) == wanted());
}

#[test]
fn experts_in_a_stack_of_another_shape_are_refused_by_name() {
    let (config, tensors) = original();
    let (outer, published) = published(&config, &tensors);
    let name = "model.language_model.layers.2.mlp.experts.down_proj";
    for shape in [vec![8, 32, 64], vec![4, 128, 32], vec![8 * 64, 32]] {
        let mut other = published.clone();
        other.get_mut(name).unwrap().shape = shape.clone();
        let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        rewrite::write(dir.path(), &outer, &other);
        let error = try_open(dir.path()).0.err().unwrap().to_string();
        assert!(error.contains("layers.2.mlp.experts."), "{shape:?}: {error}");
    }
}
