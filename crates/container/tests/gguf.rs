//! GGUF files of an independent writer, sets of them, and what is said of them.

#[path = "support/gguf.rs"]
mod support;

use std::fs;
use std::path::{Path, PathBuf};

use metaltail_container::gguf::{Array, Gguf, Scalar, Support, TensorType, Value, ValueKind, is_gguf};
use metaltail_container::{Checkpoint, Error, Kind};
use serde_json::json;
use support::{File, text, u32_value};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/gguf").join(name)
}

/// A directory with these files.
fn dir(files: &[(&str, File)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, file) in files {
        fs::write(dir.path().join(name), file.bytes()).unwrap();
    }
    dir
}

const FIRST: &str = "m-00001-of-00002.gguf";
const SECOND: &str = "m-00002-of-00002.gguf";

/// A set of two, as it should be.
fn set() -> [(&'static str, File); 2] {
    let first = File::new().key("general.architecture", text("a")).split(0, 2, 3).tensor("x", "F32", &[4]);
    let second = File::new().split(1, 2, 3).tensor("y", "F32", &[4]).tensor("z", "F32", &[4]);
    [(FIRST, first), (SECOND, second)]
}

fn refused(files: &[(&str, File)], name: &str) -> Error {
    Gguf::open(&dir(files).path().join(name)).unwrap_err()
}

#[test]
fn types_are_those_of_the_independent_package() {
    let rows: Vec<(u32, String, u64, u64)> =
        serde_json::from_slice(&fs::read(fixture("types.json")).unwrap()).unwrap();
    assert_eq!(rows.len(), TensorType::all().count());
    for (number, name, elements, bytes) in rows {
        let kind = TensorType::from_number(number).unwrap_or_else(|| panic!("{name} is not known"));
        assert_eq!((kind.name(), kind.block_elements(), kind.block_bytes()), (&*name, elements, bytes));
    }
}

#[test]
fn a_mixture_of_experts_is_described() {
    let gguf = Gguf::open(&fixture("moe.gguf")).unwrap();
    let report = gguf.report();
    assert_eq!(report.architecture.as_deref(), Some("qwen3moe"));
    assert_eq!(report.name.as_deref(), Some("tiny moe"));
    assert_eq!(report.file_type.unwrap().name, Some("Q4_0"));
    let model = &report.model;
    assert_eq!((model.layers, model.hidden, model.vocab), (Some(2), Some(32), Some(8)));
    assert_eq!((model.experts, model.top_k, model.expert_width), (Some(4), Some(2), Some(32)));
    assert_eq!((model.max_context, model.heads, model.kv_heads), (Some(4096), Some(2), Some(1)));
    let tokenizer = report.tokenizer.unwrap();
    assert_eq!((&*tokenizer.model, tokenizer.pre.as_deref()), ("gpt2", Some("qwen2")));
    assert_eq!((tokenizer.tokens, tokenizer.merges), (Some(8), Some(3)));
    assert_eq!(report.chat_templates.len(), 1);
    assert_eq!(report.chat_templates[0].bytes, "{{ messages[0].content }}".len());

    // Two 32 × 32 matrices of Q4_0 (18 bytes for 32) and one of Q4_1 (20) or Q5_1 (24).
    let layers: Vec<_> = report.layers.iter().map(|l| (l.layer, l.experts, l.expert_bytes, l.runs)).collect();
    assert_eq!(layers, [(0, 4, 32 * (18 + 18 + 20), 3), (1, 4, 32 * (18 + 18 + 24), 3)]);
    assert_eq!(report.layers[1].formats, ["Q4_0", "Q5_1"]);
    assert_eq!(report.roles["routed experts"].bytes, 4 * 32 * (56 + 60));
    assert_eq!(report.routed_parameter_count, 2 * 3 * 4 * 32 * 32);
    assert_eq!(report.parameter_count, 24_576 + 2 * (8 * 32) + 32 + 2 * (32 + 1024 + 32 + 128));
    assert_eq!(report.roles["router"].tensors, 2);
    assert_eq!(report.types["Q4_0"].bits_per_weight, 4.5);
    assert_eq!(report.notices, [""; 0]);
    let by_role: u64 = report.roles.values().map(|role| role.bytes).sum();
    let by_type: u64 = report.types.values().map(|counted| counted.bytes).sum();
    assert_eq!((by_role, by_type), (report.bytes, report.bytes));

    // A token that is no UTF-8 is kept as it is.
    let Some(Value::Array(Array::Strings(tokens))) = gguf.get("tokenizer.ggml.tokens") else { panic!() };
    assert_eq!((tokens.get(0), tokens.get(7), tokens.get(8)), (Some(&b"t0"[..]), Some(&b"\xc3"[..]), None));
}

#[test]
fn every_kind_of_value_is_read_as_it_was_written() {
    let gguf = Gguf::open(&fixture("dense.gguf")).unwrap();
    for (key, scalar) in [
        ("x.u8", Scalar::U8(200)),
        ("x.i8", Scalar::I8(-3)),
        ("x.u16", Scalar::U16(65000)),
        ("x.i16", Scalar::I16(-300)),
        ("x.u32", Scalar::U32(4_000_000_000)),
        ("x.i32", Scalar::I32(-70000)),
        ("x.f32", Scalar::F32(0.1)),
        ("x.u64", Scalar::U64(1 << 40)),
        ("x.i64", Scalar::I64(-(1 << 40))),
        ("x.f64", Scalar::F64(0.1)),
        ("x.bool", Scalar::Bool(true)),
    ] {
        assert_eq!(gguf.get(key), Some(&Value::Scalar(scalar)), "{key}");
    }
    assert_eq!(gguf.get("x.string").and_then(Value::as_str), Some("Müller"));
    let Some(Value::Array(Array::Strings(strings))) = gguf.get("x.strings") else { panic!() };
    assert_eq!(strings.iter().collect::<Vec<_>>(), [&b"a"[..], b"", b"bc"]);
    let items = |key: &str| match gguf.get(key) {
        Some(Value::Array(Array::Scalars(scalars))) => scalars.iter().collect::<Vec<_>>(),
        other => panic!("{key}: {other:?}"),
    };
    assert_eq!(items("x.ints"), [1, -2, 3].map(Scalar::I32));
    assert_eq!(items("x.floats"), [0.5, -0.25].map(Scalar::F32));
    assert_eq!(items("x.bools"), [true, false].map(Scalar::Bool));

    let report = gguf.report();
    assert_eq!(report.alignment, 64);
    let entry = |key: &str| report.metadata.iter().find(|entry| entry.key == key).unwrap();
    assert_eq!(entry("x.f32").value, json!(0.1));
    assert_eq!((&*entry("x.ints").kind, entry("x.ints").length), ("[int32]", Some(3)));
}

#[test]
fn types_that_cannot_be_computed_are_listed_and_said() {
    let report = Gguf::open(&fixture("dense.gguf")).unwrap().report();
    let listed_only: Vec<_> =
        report.types.iter().filter(|(_, t)| t.support == Support::None).map(|(name, _)| &**name).collect();
    assert_eq!(listed_only, ["IQ2_XXS", "TQ1_0"]);
    assert_eq!(report.notices.len(), 2);
    assert!(report.notices[0].contains("1 tensor of type IQ2_XXS"), "{:?}", report.notices);
    assert_eq!(report.types["Q4_K"].bytes, 2 * 144);
    assert_eq!(report.layers, []);
}

#[test]
fn tensor_bytes_lie_where_the_header_says() {
    // The writer's script put 0, 1, 2, … there.
    let gguf = Gguf::open(&fixture("dense.gguf")).unwrap();
    let bytes = fs::read(fixture("dense.gguf")).unwrap();
    let (_, norm) = gguf.tensors().find(|(_, tensor)| tensor.name == "output_norm.weight").unwrap();
    let data = &bytes[norm.offset as usize..][..norm.len as usize];
    let values: Vec<f32> = data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    assert_eq!(values, (0..256).map(|n| n as f32).collect::<Vec<_>>());
}

#[test]
fn a_set_is_found_from_any_of_its_files() {
    let names = ["pair-00001-of-00002.gguf", "pair-00002-of-00002.gguf"];
    for name in names {
        let gguf = Gguf::open(&fixture(name)).unwrap();
        let report = gguf.report();
        assert_eq!(report.files.iter().map(|file| &*file.name).collect::<Vec<_>>(), names);
        assert_eq!((report.tensors, report.files[0].tensors, report.files[1].tensors), (4, 2, 2));
        assert_eq!(report.architecture.as_deref(), Some("olmoe"));
        // gate is in the first file, up and down in the second: 2 × 32 elements of Q8_0 each.
        assert_eq!((report.layers[0].experts, report.layers[0].expert_bytes), (2, 3 * 2 * 34));
        assert_eq!(report.layers[0].runs, 3);
    }
}

#[test]
fn a_missing_part_is_named() {
    let [first, second] = set();
    for (kept, name, missing) in [(first, FIRST, SECOND), (second, SECOND, FIRST)] {
        let Error::MissingShards(found) = refused(&[kept], name) else { panic!("{name}") };
        assert_eq!((&found.names[..], found.present, found.expected), (&[missing.to_owned()][..], 1, 2));
    }
}

#[test]
fn a_part_that_is_there_twice_is_named() {
    let [first, _] = set();
    let error = refused(&[(FIRST, first.1.clone()), (SECOND, first.1)], FIRST).to_string();
    assert!(error.contains(SECOND) && error.contains("split.no is 0, wanted 1"), "{error}");
}

#[test]
fn a_foreign_part_is_named_by_what_tells_it() {
    let part = |no, count, tensors| File::new().split(no, count, tensors);
    let rest = |file: File| file.tensor("y", "F32", &[4]).tensor("z", "F32", &[4]);
    for (second, words) in [
        (rest(part(1, 3, 3)), "split.count is 3, wanted 2"),
        (rest(part(1, 2, 4)), "split.tensors.count is 4, wanted 3"),
        (rest(File::new()), "split.count is absent, wanted 2"),
        (
            rest(part(1, 2, 3).key("general.architecture", text("b"))),
            "general.architecture is \"b\", wanted \"a\"",
        ),
        (rest(File::new().key("split.count", u32_value(2))), "split.no is absent, wanted 1"),
    ] {
        let [first, _] = set();
        let error = refused(&[first, (SECOND, second)], FIRST).to_string();
        assert!(error.contains(SECOND) && error.contains(words), "{words}: {error}");
    }
    let [first, _] = set();
    let double = part(1, 2, 3).tensor("x", "F32", &[4]).tensor("z", "F32", &[4]);
    let error = refused(&[first.clone(), (SECOND, double)], FIRST);
    assert!(matches!(&error, Error::DuplicateTensor { tensor, .. } if tensor == "x"), "{error}");
    let short = part(1, 2, 3).tensor("y", "F32", &[4]);
    let error = refused(&[first, (SECOND, short)], FIRST);
    assert!(matches!(error, Error::GgufTensorCount { wanted: 3, got: 2, .. }), "{error}");
}

#[test]
fn names_and_keys_of_a_set_must_agree() {
    let [first, second] = set();
    let error = refused(&[("renamed.gguf", first.1.clone())], "renamed.gguf");
    assert!(matches!(error, Error::GgufPartName { count: 2, .. }), "{error}");
    let error = refused(&[("m-00001-of-00003.gguf", first.1.clone())], "m-00001-of-00003.gguf").to_string();
    assert!(error.contains("split.count is 2, wanted 3"), "{error}");
    let error = refused(&[(FIRST, File::new())], FIRST).to_string();
    assert!(error.contains("split.count is absent, wanted 2"), "{error}");
    // Names in the wrong order.
    let error = refused(&[(FIRST, second.1), (SECOND, first.1)], FIRST).to_string();
    assert!(error.contains(FIRST) && error.contains("split.no is 1, wanted 0"), "{error}");
    let alone = dir(&[("m-00001-of-00001.gguf", File::new())]);
    assert!(Gguf::open(&alone.path().join("m-00001-of-00001.gguf")).is_ok());
    let error = refused(&[("a.gguf", File::new().key("split.count", text("2")))], "a.gguf");
    assert!(matches!(error, Error::GgufFile { .. }), "{error}");
}

#[test]
fn odd_experts_are_said_and_left_out() {
    let base = || File::new().key("general.architecture", text("a")).key("a.expert_count", u32_value(4));
    let report = |file: File| Gguf::open(&dir(&[("m.gguf", file)]).path().join("m.gguf")).unwrap().report();
    let flat = report(base().tensor("blk.0.ffn_up_exps.weight", "F32", &[4, 4]));
    assert_eq!(flat.layers, []);
    assert!(flat.notices[0].contains("\"blk.0.ffn_up_exps.weight\"") && flat.notices[0].contains("[4, 4]"));
    let uneven = base().tensor("blk.0.ffn_up_exps.weight", "F32", &[4, 4, 3]).tensor(
        "blk.0.ffn_down_exps.weight",
        "F32",
        &[4, 4, 2],
    );
    assert_eq!(report(uneven).layers, []);
    let fewer = report(base().tensor("blk.0.ffn_up_exps.weight", "F32", &[4, 4, 3]));
    assert_eq!(fewer.layers[0].experts, 3);
    assert!(fewer.notices[0].contains("3 experts, but expert_count is 4"), "{:?}", fewer.notices);
    let old = report(base().tensor("blk.0.ffn_up.0.weight", "F32", &[4, 4]));
    assert_eq!(old.roles["routed experts"].tensors, 1);
    assert!(old.notices[0].contains("one tensor each"), "{:?}", old.notices);
}

#[test]
fn biases_belong_to_experts_and_a_single_expert_is_one_run() {
    let file = |experts: u64| {
        let file = File::new()
            .key("general.architecture", text("a"))
            .key("a.block_count", u32_value(1))
            .key("a.nextn_predict_layers", u32_value(1));
        let weights = file.tensor("blk.0.ffn_gate_up_exps.weight", "F32", &[4, 8, experts]);
        weights.tensor("blk.0.ffn_gate_up_exps.bias", "F32", &[8, experts])
    };
    let layer = |experts| {
        let dir = dir(&[("m.gguf", file(experts))]);
        Gguf::open(&dir.path().join("m.gguf")).unwrap().report().layers.remove(0)
    };
    let (two, one) = (layer(2), layer(1));
    assert_eq!((two.expert_bytes, two.runs, two.draft), (4 * (32 + 8), 2, true));
    assert_eq!((one.expert_bytes, one.runs), (160, 1));
}

#[test]
fn the_kind_follows_from_content_or_name() {
    let dir = dir(&[("weights", File::new())]);
    let other = dir.path().join("notes.gguf");
    fs::write(&other, "no").unwrap();
    assert!(is_gguf(&dir.path().join("weights")) && is_gguf(&other));
    assert!(!is_gguf(dir.path()) && !is_gguf(&fixture("types.json")));
    let error = Gguf::open(&other).unwrap_err();
    assert!(matches!(error, Error::GgufFile { .. }), "{error}");
    assert!(matches!(Gguf::open(&dir.path().join("absent.gguf")), Err(Error::NotFound { .. })));
    assert!(matches!(Gguf::open(dir.path()), Err(Error::NotRegular { .. })));
    // To be run it is opened, whatever it is called.
    assert_eq!(Checkpoint::open(&dir.path().join("weights")).unwrap().kind(), Kind::Gguf);
}

#[test]
fn nested_arrays_are_summed_up() {
    let inner = support::scalars(ValueKind::U8, vec![1, 2]);
    let dir = dir(&[("m.gguf", File::new().key("a", Value::Array(Array::Arrays(vec![inner]))))]);
    let entry = &Gguf::open(&dir.path().join("m.gguf")).unwrap().report().metadata[0];
    assert_eq!((&*entry.kind, entry.length), ("[array]", Some(1)));
}
