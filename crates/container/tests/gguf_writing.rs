//! GGUF files that are written: what is read back is what was given, and a synthetic model in this form
//! holds what it holds in the others.

#[path = "support/gguf.rs"]
mod support;

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use metaltail_container::convert::WriteError;
use metaltail_container::gguf::{
    Array, GgufHeader, GgufPlan, GgufTensorSpec, Scalar, TensorType, Text, Value, ValueKind, parse_gguf,
};
use metaltail_container::synth::{Like, SynthFormat, SynthOptions, config, synth};
use metaltail_container::{Checkpoint, ExpertLayerSpec, Inventory, Role, TensorSpec};
use tempfile::TempDir;

fn spec(name: &str, kind: &str, dims: &[u64]) -> GgufTensorSpec {
    GgufTensorSpec { name: name.to_owned(), kind: TensorType::from_name(kind).unwrap(), dims: dims.to_vec() }
}

/// One key of every kind, arrays of numbers, strings, bools and arrays among them.
fn metadata() -> Vec<(String, Value)> {
    let scalars = [
        Scalar::U8(200),
        Scalar::I8(-3),
        Scalar::U16(65_000),
        Scalar::I16(-300),
        Scalar::U32(4_000_000_000),
        Scalar::I32(-70_000),
        Scalar::F32(0.1),
        Scalar::Bool(true),
        Scalar::U64(1 << 40),
        Scalar::I64(-(1 << 40)),
        Scalar::F64(0.1),
    ];
    let numbers = support::scalars(ValueKind::I16, vec![1, 0, 255, 255]);
    let bools = support::scalars(ValueKind::Bool, vec![1, 0, 1]);
    let values = scalars.into_iter().map(Value::Scalar).chain([
        Value::String(Text(b"M\xC3\xBCller"[..].into())),
        Value::String(Text::default()),
        support::strings(&["a", "", "bc"]),
        support::strings(&[]),
        Value::Array(numbers.clone()),
        Value::Array(Array::Arrays(vec![numbers, bools])),
    ]);
    values.enumerate().map(|(i, value)| (format!("key.{i}"), value)).collect()
}

fn parsed(plan: &GgufPlan) -> GgufHeader {
    parse_gguf(plan.header(), plan.header().len() as u64 + plan.data()).unwrap()
}

#[test]
fn a_header_reads_back_as_it_was_given() {
    let tensors = [
        spec("vector", "F32", &[3]),
        spec("matrix", "Q4_0", &[64, 5]),
        spec("experts", "Q6_K", &[256, 3, 7]),
        spec("four", "F16", &[1, 2, 3, 4]),
    ];
    let plan = GgufPlan::new(&metadata(), &tensors).unwrap();
    let header = parsed(&plan);
    assert_eq!(header.version, 3);
    assert_eq!(header.metadata, metadata());
    assert_eq!(header.data_start, plan.header().len() as u64);
    for (read, given) in header.tensors.iter().zip(&tensors) {
        assert_eq!((&read.name, read.kind, &*read.dims), (&given.name, given.kind, &given.dims[..]));
    }
    // 12, 180, 4410 and 48 bytes, each padded to 32.
    assert_eq!(plan.tensors(), [12, 180, 4410, 48]);
    let offsets: Vec<u64> = header.tensors.iter().map(|t| t.offset - header.data_start).collect();
    assert_eq!((&offsets[..], plan.data()), (&[0, 32, 224, 4640][..], 4704));
    assert_eq!([12, 180, 4410, 4416].map(|n| GgufPlan::padding(n).len()), [20, 12, 6, 0]);
}

#[test]
fn the_bytes_are_those_of_another_writer() {
    let mut other = support::File::new();
    for (key, value) in metadata() {
        other = other.key(&key, value);
    }
    let other = other.tensor("a", "Q8_0", &[32, 3]).tensor("b", "F32", &[5]);
    let plan = GgufPlan::new(&metadata(), &[spec("a", "Q8_0", &[32, 3]), spec("b", "F32", &[5])]).unwrap();
    assert_eq!(other.bytes()[..plan.header().len()], *plan.header());
}

#[test]
fn what_has_no_size_is_refused() {
    let long = "x".repeat(65_536);
    for (tensor, why) in [
        (spec("t", "F32", &[]), "no dimension"),
        (spec("t", "F32", &[1, 2, 3, 4, 5]), "5 dimensions"),
        (spec("t", "F32", &[4, 0]), "is 0"),
        (spec("t", "Q4_K", &[384, 2]), "rows of 384 values"),
        (spec("t", "F32", &[1 << 40, 1 << 30]), "more than 2^64 bytes"),
        (spec("", "F32", &[1]), "1 to 65535 bytes"),
        (spec(&long, "F32", &[1]), "1 to 65535 bytes"),
    ] {
        let refused = GgufPlan::new(&[], &[tensor]).unwrap_err();
        assert!(refused.to_string().contains(why), "{refused}");
    }
    let huge = spec("t", "F32", &[1 << 61]);
    let sum = GgufPlan::new(&[], &[huge.clone(), spec("u", "F32", &[1 << 60]), huge]);
    assert!(matches!(sum, Err(WriteError::Overflow { .. })), "{sum:?}");
}

// ---- synthetic models ----

/// What an `olmoe` of two layers with three experts of 32 × 64 holds.
fn inventory() -> Inventory {
    let tensor =
        |name: String, rows, cols, role, layer| TensorSpec { name, rows, cols, role, layer, optional: false };
    let mut tensors = vec![
        tensor("model.embed_tokens.weight".to_owned(), 272, 64, Role::Embedding, None),
        tensor("model.norm.weight".to_owned(), 1, 64, Role::Norm, None),
        tensor("lm_head.weight".to_owned(), 272, 64, Role::Head, None),
    ];
    let mut experts = Vec::new();
    for layer in 0..2 {
        let mut add = |name: &str, rows, role| {
            let name = format!("model.layers.{layer}.{name}.weight");
            tensors.push(tensor(name, rows, 64, role, Some(layer)));
        };
        for name in ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"] {
            add(name, 1, Role::Norm);
        }
        for name in ["q", "k", "v", "o"] {
            add(&format!("self_attn.{name}_proj"), 64, Role::Attention);
        }
        add("mlp.gate", 3, Role::Router);
        experts.push(ExpertLayerSpec {
            layer,
            count: 3,
            hidden: 64,
            width: 32,
            draft: false,
            prefix: format!("model.layers.{layer}.mlp.experts."),
            suffixes: [".gate_proj.weight", ".up_proj.weight", ".down_proj.weight"],
            stacked: None,
        });
    }
    Inventory { family: "olmoe".to_owned(), tensors, experts }
}

/// Its configuration, as far as the file's metadata are drawn from it.
fn olmoe() -> serde_json::Value {
    let mut config = metaltail_container::synth::config(Like::Olmoe, Some(2), Some(3)).unwrap();
    config["hidden_size"] = 64.into();
    config["vocab_size"] = 272.into();
    config
}

fn made(path: &Path, format: SynthFormat, blocks: &str, seed: u64) -> Result<(), WriteError> {
    let blocks = TensorType::from_name(blocks).unwrap();
    let options = SynthOptions { blocks, seed, ..SynthOptions::new(Like::Olmoe, format) };
    synth(path, &olmoe(), &inventory(), &options, &mut |_| ControlFlow::Continue(())).map(drop)
}

fn read(path: &Path) -> (GgufHeader, Vec<u8>) {
    let bytes = fs::read(path).unwrap();
    (parse_gguf(&bytes[..], bytes.len() as u64).unwrap(), bytes)
}

#[test]
fn a_synthetic_file_has_every_tensor_in_its_type() {
    for blocks in ["f16", "q8_0", "iq4_nl", "mxfp4"] {
        let dir = TempDir::new().unwrap();
        made(dir.path(), SynthFormat::Gguf, blocks, 0).unwrap();
        let (header, bytes) = read(&dir.path().join("model.gguf"));
        assert_eq!(
            bytes.len() as u64,
            header.tensors.last().unwrap().offset + header.tensors.last().unwrap().len.next_multiple_of(32)
        );
        let names: Vec<&str> = header.tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names.len(), 3 + 2 * (9 + 3));
        assert_eq!(
            names[..4],
            ["token_embd.weight", "output_norm.weight", "output.weight", "blk.0.attn_norm.weight"]
        );
        for tensor in &header.tensors {
            let f32 = tensor.name.contains("norm") || tensor.name.contains("ffn_gate_inp");
            let wanted = if f32 { "f32" } else { blocks };
            assert!(tensor.kind.name().eq_ignore_ascii_case(wanted), "{}", tensor.name);
        }
        let down = header.tensors.iter().find(|t| t.name == "blk.1.ffn_down_exps.weight").unwrap();
        assert_eq!(*down.dims, [32, 64, 3]);
    }
}

#[test]
fn norms_and_routers_are_those_of_a_checkpoint() {
    let dir = TempDir::new().unwrap();
    let (hf, file) = (dir.path().join("hf"), dir.path().join("m.gguf"));
    made(&hf, SynthFormat::Hf, "q4_0", 5).unwrap();
    made(&file, SynthFormat::Gguf, "q4_0", 5).unwrap();
    let checkpoint = Checkpoint::open(&hf).unwrap();
    let (header, bytes) = read(&file);
    let floats = |name: &str| -> Vec<f32> {
        let tensor = header.tensors.iter().find(|t| t.name == name).unwrap();
        let data = &bytes[tensor.offset as usize..][..tensor.len as usize];
        data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    for (ours, theirs) in [
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.1.self_attn.k_norm.weight", "blk.1.attn_k_norm.weight"),
        ("model.layers.1.post_attention_layernorm.weight", "blk.1.ffn_norm.weight"),
        ("model.layers.0.mlp.gate.weight", "blk.0.ffn_gate_inp.weight"),
    ] {
        let spec = inventory().tensors.into_iter().find(|t| t.name == ours).unwrap();
        assert_eq!(checkpoint.read_f32(&spec).unwrap(), floats(theirs), "{ours}");
    }
}

#[test]
fn the_seed_decides_every_byte_and_experts_differ() {
    let dir = TempDir::new().unwrap();
    let file = |name: &str, seed| {
        let path = dir.path().join(name);
        made(&path, SynthFormat::Gguf, "q5_1", seed).unwrap();
        read(&path)
    };
    let ((header, a), (_, b), (_, c)) = (file("a.gguf", 7), file("b.gguf", 7), file("c.gguf", 8));
    assert!(a == b, "the same seed gave another file");
    let data = |bytes: &[u8]| bytes[header.data_start as usize..].to_vec();
    assert!(data(&a) != data(&c), "the seed decides nothing");
    let gate = header.tensors.iter().find(|t| t.name == "blk.0.ffn_gate_exps.weight").unwrap();
    let experts: Vec<&[u8]> =
        a[gate.offset as usize..][..gate.len as usize].chunks(gate.len as usize / 3).collect();
    assert!(experts[0] != experts[1] && experts[1] != experts[2]);
}

#[test]
fn a_file_that_is_there_or_was_begun_is_not_left_half_done() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("m.gguf");
    let options = SynthOptions::new(Like::Olmoe, SynthFormat::Gguf);
    let mut reports = 0;
    let stopped = synth(&dir.path().join("new/m.gguf"), &olmoe(), &inventory(), &options, &mut |progress| {
        reports += 1;
        if progress.written > progress.total / 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(stopped, Err(WriteError::Interrupted { .. })) && reports > 1, "{stopped:?}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing stays of a stopped file");

    fs::write(&file, "mine").unwrap();
    let refused = made(&file, SynthFormat::Gguf, "q4_0", 0);
    assert!(matches!(refused, Err(WriteError::Exists { .. })), "{refused:?}");
    assert_eq!(fs::read(&file).unwrap(), b"mine");
    let refused = made(dir.path(), SynthFormat::Gguf, "q4_0", 0);
    assert!(matches!(refused, Err(WriteError::NotEmpty { .. })), "{refused:?}");
}

#[test]
fn rows_that_do_not_divide_and_other_families_are_refused() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("m.gguf");
    let refused = made(&file, SynthFormat::Gguf, "q4_k", 0).unwrap_err();
    assert!(refused.to_string().contains("rows of 64 values"), "{refused}");
    let config = config(Like::Tiny, None, None).unwrap();
    let options = SynthOptions::new(Like::Tiny, SynthFormat::Gguf);
    let other = Inventory { family: "glm_moe_dsa".to_owned(), ..inventory() };
    let refused = synth(&file, &config, &other, &options, &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert!(refused.to_string().contains("not of the family glm_moe_dsa"), "{refused}");
    assert!(!file.exists());
}
