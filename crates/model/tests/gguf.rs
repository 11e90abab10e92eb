//! What a GGUF file may say of a model, and what is refused of it by name.

use std::fs;
use std::path::{Path, PathBuf};

use metaltail_container::Checkpoint;
use metaltail_container::gguf::{Gguf, GgufPlan, GgufTensorSpec, Scalar, TensorType, Text, Value};
use metaltail_model::text::{ChatTemplate, Tokenizer};
use metaltail_model::{AttentionPlan, FfnPlan, KvExpansion, Plan, RopePairs};
use proptest::prelude::*;

fn oracle(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/gguf/oracles")
        .join(name)
        .with_extension("gguf")
}

/// A file as data, to be written with a change.
struct Model {
    metadata: Vec<(String, Value)>,
    tensors: Vec<(GgufTensorSpec, Vec<u8>)>,
}

impl Model {
    fn of(name: &str) -> Model {
        let path = oracle(name);
        let (gguf, bytes) = (Gguf::open(&path).unwrap(), fs::read(&path).unwrap());
        let metadata = gguf.parts()[0].header.metadata.clone();
        let tensors = gguf.tensors().map(|(_, tensor)| {
            let spec =
                GgufTensorSpec { name: tensor.name.clone(), kind: tensor.kind, dims: tensor.dims.to_vec() };
            (spec, bytes[tensor.offset as usize..][..tensor.len as usize].to_vec())
        });
        let tensors = tensors.collect();
        Model { metadata, tensors }
    }

    fn set(mut self, key: &str, value: Value) -> Model {
        self.metadata.retain(|(known, _)| known != key);
        self.metadata.push((key.to_owned(), value));
        self
    }

    fn without_key(mut self, key: &str) -> Model {
        let before = self.metadata.len();
        self.metadata.retain(|(known, _)| known != key);
        assert!(self.metadata.len() < before, "{key}");
        self
    }

    fn without_tensors(mut self, prefix: &str) -> Model {
        let before = self.tensors.len();
        self.tensors.retain(|(spec, _)| !spec.name.starts_with(prefix));
        assert!(self.tensors.len() < before, "{prefix}");
        self
    }

    fn write(&self, path: &Path) {
        let specs: Vec<GgufTensorSpec> = self.tensors.iter().map(|(spec, _)| spec.clone()).collect();
        let plan = GgufPlan::new(&self.metadata, &specs).unwrap();
        let mut bytes = plan.header().to_vec();
        for (_, data) in &self.tensors {
            bytes.extend_from_slice(data);
            bytes.extend_from_slice(GgufPlan::padding(data.len() as u64));
        }
        fs::write(path, bytes).unwrap();
    }

    /// What opening it and holding it against its plan says.
    fn refusal(&self) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        self.write(&path);
        let mut checkpoint = Checkpoint::open(&path).unwrap();
        match Plan::of(&mut checkpoint) {
            Err(error) => error.to_string(),
            Ok(plan) => checkpoint.check(&plan.inventory()).unwrap_err().to_string(),
        }
    }
}

fn number(value: u32) -> Value {
    Value::Scalar(Scalar::U32(value))
}

fn text(value: &str) -> Value {
    Value::String(Text(value.as_bytes().into()))
}

fn plan(name: &str) -> (Checkpoint, Plan) {
    let mut checkpoint = Checkpoint::open(&oracle(name)).unwrap();
    let plan = Plan::of(&mut checkpoint).unwrap();
    (checkpoint, plan)
}

/// The same plan as the checkpoint's, but for how the file stores things.
#[test]
fn a_files_plan_is_that_of_its_checkpoint() {
    for name in ["olmoe", "qwen3_moe", "minimax_m2", "glm4_moe"] {
        let (_, mut from_file) = plan(name);
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/oracles").join(name);
        let config = serde_json::from_slice(&fs::read(config.join("config.json")).unwrap()).unwrap();
        let mut published = Plan::from_config(&config).unwrap();
        // Those that wrote the file leave a draft layer out that the checkpoint only declares.
        published.draft = None;
        from_file.max_context = published.max_context;
        assert_eq!(from_file, published, "{name}");
    }
}

#[test]
fn what_the_converter_rearranges_is_in_the_plan() {
    let (_, mixtral) = plan("mixtral");
    let AttentionPlan::Gqa(gqa) = &mixtral.layers[0].attention else { panic!() };
    assert_eq!(gqa.rope.pairs, RopePairs::Interleaved);
    let (_, deepseek) = plan("deepseek_v3");
    let AttentionPlan::Mla(mla) = &deepseek.layers[0].attention else { panic!() };
    assert_eq!(mla.expansion, KvExpansion::Split);
    assert!(matches!(deepseek.layers[0].ffn, FfnPlan::Dense { .. }));
    let (_, v2) = plan("deepseek_v2");
    assert_eq!(v2.family, "deepseek_v2");
}

/// T03: layers that the metadata promise and the file lacks.
#[test]
fn absent_layers_are_listed_before_anything_is_allocated() {
    let refusal = Model::of("olmoe").set("olmoe.block_count", number(6)).refusal();
    assert!(refusal.contains("layers 4 to 5 absent"), "{refusal}");
    let refusal = Model::of("olmoe").without_tensors("blk.2.ffn_up_exps").refusal();
    assert!(refusal.contains("layer 2 lacks"), "{refusal}");
}

/// T08: keys that are missing, of another kind, or out of any range.
#[test]
fn metadata_are_typed_and_range_checked() {
    let model = || Model::of("qwen3_moe");
    for (model, wanted) in [
        (model().without_key("qwen3moe.expert_count"), "no `qwen3moe.expert_count`"),
        (model().without_key("general.architecture"), "no `general.architecture`"),
        (model().set("qwen3moe.block_count", text("4")), "must be a whole number, got the kind string"),
        (model().set("qwen3moe.block_count", number(4096)), "outside 1..=1024"),
        (model().set("qwen3moe.expert_used_count", number(0)), "outside 1..="),
        (model().set("qwen3moe.expert_gating_func", number(2)), "expert_gating_func 2"),
        (model().set("qwen3moe.rope.dimension_count", number(8)), "a rotation of 8 of 32 numbers"),
        (model().set("qwen3moe.rope.scaling.type", text("longrope")), "rope_type \"longrope\""),
        (model().set("general.architecture", text("mamba")), "\"mamba\" is not supported; supported are"),
        (model().set("qwen3moe.attention.value_length", number(16)), "values of 16"),
    ] {
        let refusal = model.refusal();
        assert!(refusal.contains(wanted), "{wanted}: {refusal}");
    }
}

/// T08: a count of layers of which lists would be made that no memory holds.
#[test]
fn layers_without_end_are_refused_before_lists_are_made_of_them() {
    for (name, key) in [("qwen3_5_moe", "qwen35moe"), ("glm_moe_dsa", "glm-dsa"), ("qwen3_moe", "qwen3moe")] {
        let count = Value::Scalar(Scalar::U64(1 << 60));
        let refusal = Model::of(name).set(&format!("{key}.block_count"), count).refusal();
        assert!(refusal.contains("block_count") && refusal.contains("outside 1..=1024"), "{refusal}");
    }
}

/// T14: a file that says it is of another family.
#[test]
fn a_mislabelled_file_is_refused() {
    let refusal = Model::of("qwen3_moe").set("general.architecture", text("olmoe")).refusal();
    assert!(refusal.contains("the GGUF metadata have no `olmoe."), "{refusal}");
}

#[test]
fn a_type_without_arithmetic_is_refused_with_its_tensor() {
    let mut model = Model::of("olmoe");
    let kind = TensorType::all().find(|kind| kind.name() == "TQ1_0").unwrap();
    let (spec, data) = model.tensors.iter_mut().find(|(spec, _)| spec.name == "token_embd.weight").unwrap();
    // Rows of 256 columns, so that the hidden size has to follow.
    (spec.kind, spec.dims[0]) = (kind, 256);
    *data = vec![0; spec.bytes().unwrap() as usize];
    let refusal = model.set("olmoe.embedding_length", number(256)).refusal();
    assert!(refusal.contains("token_embd.weight") && refusal.contains("TQ1_0"), "{refusal}");
}

/// What would be left out without a word would change the answers.
#[test]
fn tensors_and_keys_that_are_not_computed_are_refused_by_name() {
    let with = |name: &str| {
        let mut model = Model::of("olmoe");
        let (spec, data) = model.tensors[2].clone();
        model.tensors.push((GgufTensorSpec { name: name.to_owned(), ..spec }, data));
        model.refusal()
    };
    for name in
        ["blk.1.attn_q.bias", "blk.1.mystery.weight", "blk.1.ffn_down_exps.scale", "blk.0.ffn_gate.0.weight"]
    {
        let refusal = with(name);
        assert!(refusal.contains(name), "{name}: {refusal}");
    }
    let refusal = Model::of("olmoe").set("olmoe.block_count", number(3)).refusal();
    assert!(refusal.contains("blk.3."), "{refusal}");
    for (key, value) in [
        ("olmoe.attention.clamp_kqv", Value::Scalar(Scalar::F32(8.0))),
        ("olmoe.attention.scale", Value::Scalar(Scalar::F32(0.5))),
        ("olmoe.logit_scale", Value::Scalar(Scalar::F32(0.25))),
        ("olmoe.expert_weights_scale", Value::Scalar(Scalar::F32(2.5))),
        ("olmoe.attention.sliding_window", number(16)),
        ("olmoe.rope.dimension_count", number(8)),
    ] {
        let refusal = Model::of("olmoe").set(key, value).refusal();
        assert!(
            refusal.contains(key.rsplit('.').next().unwrap()) || refusal.contains("rotation"),
            "{key}: {refusal}"
        );
    }
}

#[test]
fn another_shape_is_refused_with_both() {
    let refusal = Model::of("olmoe").set("olmoe.expert_feed_forward_length", number(48)).refusal();
    let shape = refusal.contains("_exps.weight") && refusal.contains("48");
    assert!(shape, "{refusal}");
}

#[test]
fn a_file_without_text_parts_has_none() {
    let (checkpoint, _) = plan("olmoe");
    assert!(Tokenizer::of(&checkpoint).unwrap().is_none());
    assert!(ChatTemplate::of(&checkpoint).unwrap().is_none());
}

/// Every kind of scalar, with extremes.
fn wild() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u32>().prop_map(|n| Value::Scalar(Scalar::U32(n))),
        any::<u64>().prop_map(|n| Value::Scalar(Scalar::U64(n))),
        any::<i32>().prop_map(|n| Value::Scalar(Scalar::I32(n))),
        any::<f32>().prop_map(|x| Value::Scalar(Scalar::F32(x))),
        any::<bool>().prop_map(|on| Value::Scalar(Scalar::Bool(on))),
        "\\PC{0,12}".prop_map(|s| text(&s)),
        Just(number(0)),
        Just(number(1)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever stands in place of one value, the answer is a plan or an error, never a panic.
    #[test]
    fn one_wild_value_never_panics(which in 0usize..6, pick in any::<prop::sample::Index>(), value in wild()) {
        let names = ["olmoe", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_5_moe", "mixtral"];
        let mut model = Model::of(names[which]);
        let at = pick.index(model.metadata.len());
        prop_assume!(model.metadata[at].0 != "general.alignment");
        model.metadata[at].1 = value;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        model.write(&path);
        if let Ok(mut checkpoint) = Checkpoint::open(&path)
            && let Ok(plan) = Plan::of(&mut checkpoint)
        {
            let _ = checkpoint.check(&plan.inventory());
            let _ = (Tokenizer::of(&checkpoint).is_ok(), ChatTemplate::of(&checkpoint).is_ok());
        }
    }
}
