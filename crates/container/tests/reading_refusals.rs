//! Directories that are refused, and what the refusal says.

#[path = "support/reading.rs"]
mod support;
#[path = "support/reading_slab.rs"]
mod support_slab;

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fs::{self, File};
use std::path::Path;

use metaltail_container::{Checkpoint, Error, Part, parse_manifest};
use metaltail_quant::Format;
use support::{Shard, colibri_shard, config, hf_shard, inventory, model_dir};
use support_slab::{slab_dir, write_manifest};

fn refused(dir: &Path) -> Error {
    Checkpoint::open(dir).unwrap_err()
}

/// Opens a directory of one file, whose census must be refused.
fn unfit(shard: &Shard, sparse: u32) -> Error {
    let dir = model_dir(shard);
    Checkpoint::open(dir.path()).unwrap().check(&inventory(sparse, false)).unwrap_err()
}

#[test]
fn what_is_no_model_directory_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(refused(&dir.path().join("absent")), Error::NotFound { .. }));
    assert!(matches!(refused(dir.path()), Error::NoConfig { .. }));
    config(dir.path());
    assert!(matches!(refused(&dir.path().join("config.json")), Error::NotDirectory { .. }));
    assert!(matches!(refused(dir.path()), Error::NoTensors { .. }));
    fs::write(dir.path().join("model.gguf"), "GGUF").unwrap();
    assert!(matches!(refused(dir.path()), Error::GgufFile { .. }), "a configuration may lie beside");
    assert!(matches!(refused(&dir.path().join("model.gguf")), Error::GgufFile { .. }));
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert!(matches!(refused(dir.path()), Error::GgufFile { .. }), "the only model in it is meant");
    fs::write(dir.path().join("mmproj-model.gguf"), "GGUF").unwrap();
    assert!(matches!(refused(dir.path()), Error::GgufFile { .. }), "a projector is no model");
    fs::write(dir.path().join("other-00001-of-00002.gguf"), "GGUF").unwrap();
    let error = refused(dir.path());
    assert!(error.to_string().contains("2 GGUF models (model.gguf, other-00001-of-00002.gguf)"), "{error}");
}

#[test]
fn a_config_that_is_no_object_or_too_large_is_refused() {
    // T08
    let dir = model_dir(&hf_shard(&inventory(1, false)));
    let path = dir.path().join("config.json");
    for (text, got) in [("[1]", "an array"), ("3", "a number"), ("null", "null"), ("\"x\"", "a string")] {
        fs::write(&path, text).unwrap();
        assert!(matches!(refused(dir.path()), Error::NotObject { got: g, .. } if g == got), "{text}");
    }
    for text in ["", "{\"a\":", &"[".repeat(100_000)] {
        fs::write(&path, text).unwrap();
        assert!(matches!(refused(dir.path()), Error::Json { .. }));
    }
    File::create(&path).unwrap().set_len((256 << 20) + 1).unwrap();
    assert!(matches!(refused(dir.path()), Error::JsonTooLarge { got: 268_435_457, .. }));
}

/// Two shards, numbered as usual; layer 2 is in the second.
fn sharded(with_index: bool) -> tempfile::TempDir {
    let (a, b) = hf_shard(&inventory(2, false)).split(|name| name.contains("layers.2."));
    let dir = tempfile::tempdir().unwrap();
    config(dir.path());
    let mut map = BTreeMap::new();
    for (shard, file) in [(&a, "model-00001-of-00002.safetensors"), (&b, "model-00002-of-00002.safetensors")]
    {
        shard.write(&dir.path().join(file));
        map.extend(shard.names().into_iter().map(|name| (name, file)));
    }
    if with_index {
        let index = serde_json::json!({"weight_map": map}).to_string();
        fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    }
    dir
}

#[test]
fn a_missing_last_shard_is_counted_and_named() {
    // T01
    let dir = sharded(true);
    fs::remove_file(dir.path().join("model-00002-of-00002.safetensors")).unwrap();
    let error = refused(dir.path());
    let Error::MissingShards(missing) = &error else { panic!("{error}") };
    assert_eq!((missing.present, missing.expected), (1, 2));
    assert_eq!(missing.names, ["model-00002-of-00002.safetensors"]);
    assert_eq!((missing.tensors, missing.layers), (Some(15), Some((2, 2))));
    let text = error.to_string();
    assert!(text.contains("1 of 2 files") && text.contains("layer 2") && text.contains("Fetch"), "{text}");
}

#[test]
fn a_missing_shard_is_seen_by_its_number_without_an_index() {
    // T01
    let dir = sharded(false);
    fs::remove_file(dir.path().join("model-00001-of-00002.safetensors")).unwrap();
    assert!(
        matches!(refused(dir.path()), Error::MissingShards(m) if m.names == ["model-00001-of-00002.safetensors"])
    );
}

#[test]
fn an_index_that_disagrees_with_the_shards_is_refused() {
    let dir = sharded(true);
    let path = dir.path().join("model.safetensors.index.json");
    let text = fs::read_to_string(&path).unwrap();
    let moved = text.replacen("00001-of", "00002-of", 1);
    fs::write(&path, moved).unwrap();
    assert!(matches!(refused(dir.path()), Error::IndexDisagrees { .. }));
    fs::write(&path, text.replacen("\"lm_head.weight\"", "\"lm_head.bias\"", 1)).unwrap();
    assert!(matches!(refused(dir.path()), Error::IndexDisagrees { got, .. } if got == "no shard"));
    fs::write(&path, text.replace("model-00002", "../model-00002")).unwrap();
    assert!(matches!(refused(dir.path()), Error::IndexShardName { .. }));
    fs::write(&path, r#"{"weight_map": [1]}"#).unwrap();
    assert!(matches!(refused(dir.path()), Error::Json { .. }));
}

#[test]
fn a_slab_container_without_one_of_its_files_is_refused() {
    // T01
    let dir = slab_dir(&inventory(2, false), Format::Int8Row);
    fs::remove_file(dir.path().join("experts-00002.safetensors")).unwrap();
    let error = refused(dir.path());
    assert!(
        matches!(&error, Error::MissingShards(m) if m.names == ["experts-00002.safetensors"] && m.layers == Some((2, 2))),
        "{error}"
    );
}

#[test]
fn absent_layers_are_listed_before_anything_is_read() {
    // T03
    let mut shard = hf_shard(&inventory(4, false));
    shard.remove(|name| !name.contains("layers.2.") && !name.contains("layers.3."));
    let error = unfit(&shard, 4);
    let Error::Incomplete(missing) = &error else { panic!("{error}") };
    assert_eq!(missing.absent, 30);
    assert_eq!(
        missing.layers.iter().map(|gap| (gap.layer, gap.absent, gap.wanted)).collect::<Vec<_>>(),
        [(2, 15, 15), (3, 15, 15)]
    );
    assert!(error.to_string().contains("layers 2 to 3 absent (30 tensors)"), "{error}");
}

#[test]
fn one_absent_matrix_of_one_expert_is_named() {
    let mut shard = hf_shard(&inventory(2, false));
    let gone = inventory(2, false).experts[1].name(3, Part::Down);
    shard.remove(|name| name != gone);
    let error = unfit(&shard, 2);
    assert!(
        error.to_string().contains("layer 2 lacks 1 of 15 tensors") && error.to_string().contains(&gone),
        "{error}"
    );
}

#[test]
fn a_colibri_directory_without_its_last_shard_is_refused_by_the_census() {
    // T01: names of these shards do not tell how many there were.
    let (a, _) =
        colibri_shard(&inventory(2, false), Format::Int4Row).split(|name| name.contains("layers.2."));
    assert!(unfit(&a, 2).to_string().contains("layer 2 absent (15 tensors)"));
}

#[test]
fn another_shape_than_the_configuration_asks_for_is_refused() {
    // T07: a vector stored with more elements than there is room for.
    let mut shard = hf_shard(&inventory(1, false));
    let name = "model.norm.weight";
    shard.remove(|other| other != name).tensor(name, "F32", &[4096], vec![0; 4096 * 4]);
    let error = unfit(&shard, 1);
    let Error::Shape { tensor, wanted, got, file } = &error else { panic!("{error}") };
    assert_eq!((tensor.as_str(), &wanted[..], &got[..]), (name, &[64][..], &[4096][..]));
    assert!(file.ends_with("model.safetensors"));
}

#[test]
fn an_element_type_that_cannot_be_computed_with_is_refused_by_name() {
    let mut shard = hf_shard(&inventory(1, false));
    let name = "model.norm.weight";
    shard.remove(|other| other != name).tensor(name, "I64", &[64], vec![0; 64 * 8]);
    assert!(unfit(&shard, 1).to_string().contains("I64"));
    shard.remove(|other| other != name).tensor(name, "F8_E4M3", &[64], vec![0; 64]);
    assert!(
        matches!(unfit(&shard, 1), Error::MissingTensor { tensor, .. } if tensor == "model.norm.weight_scale_inv")
    );
}

#[test]
fn a_damaged_header_names_its_file() {
    // T04, T09
    let dir = model_dir(&hf_shard(&inventory(1, false)));
    let path = dir.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let error = refused(dir.path());
    assert!(error.to_string().contains("model.safetensors"), "{error}");
    assert!(error.source().unwrap().to_string().contains("cut short"));
    fs::write(&path, "short").unwrap();
    assert!(matches!(refused(dir.path()), Error::Header { .. }));
}

#[test]
fn a_directory_or_a_dangling_link_in_place_of_a_file_is_refused() {
    let dir = model_dir(&hf_shard(&inventory(1, false)));
    let path = dir.path().join("x.safetensors");
    fs::create_dir(&path).unwrap();
    assert!(matches!(refused(dir.path()), Error::NotRegular { found: "a directory", .. }));
    fs::remove_dir(&path).unwrap();
    std::os::unix::fs::symlink("nowhere", &path).unwrap();
    assert!(matches!(refused(dir.path()), Error::Io { action: "open", .. }));
}

#[test]
fn a_tensor_in_two_files_is_refused_with_both() {
    let shard = hf_shard(&inventory(1, false));
    let dir = model_dir(&shard);
    shard.write(&dir.path().join("copy.safetensors"));
    let Error::DuplicateTensor { first, second, .. } = refused(dir.path()) else { panic!() };
    assert!(first.ends_with("copy.safetensors") && second.ends_with("model.safetensors"));
}

#[test]
fn formats_of_the_registry_that_are_not_supported_are_refused_by_name() {
    let name = "model.layers.0.self_attn.o_proj.weight";
    let base = colibri_shard(&inventory(1, false), Format::Int4Row);
    let refusal = |weights: usize, dtype: &str, scales: usize| {
        let mut shard = base.clone();
        let width = match dtype {
            "F32" => 4,
            "BF16" => 2,
            _ => 1,
        };
        shard.remove(|other| !other.starts_with(name)).tensor(name, "U8", &[weights], vec![0; weights]);
        shard.tensor(&format!("{name}.qs"), dtype, &[scales], vec![0; scales * width]);
        unfit(&shard, 1)
    };
    for (weights, dtype, scales, format) in [
        (64 * 32, "F32", 64, "int2-row"),
        (64 * 2 * 24, "F32", 64 * 2, "int3-g64"),
        (64 * 98, "F32", 1, "e8-iq3-lattice"),
        (64 * 64, "U8", 64 * 4, "mxfp4"),
        (64 * 128, "F8_E8M0", 1, "fp8-e4m3-b128 with UE8M0 scales"),
    ] {
        let error = refusal(weights, dtype, scales);
        assert!(
            matches!(&error, Error::UnsupportedFormat { format: f, .. } if f == format),
            "{format}: {error}"
        );
    }
    assert!(matches!(refusal(64 * 128, "F32", 63), Error::ScaleBytes { got: 252, .. }));
    assert!(matches!(refusal(64 * 64, "F32", 65), Error::ScaleBytes { .. }));
    assert!(matches!(refusal(64 * 128 - 1, "F32", 64), Error::WeightBytes { got: 8191, .. }));
    assert!(matches!(refusal(64 * 128, "BF16", 64), Error::Dtype { wanted: "F32", .. }));
}

#[test]
fn a_stamp_that_cannot_be_true_is_refused() {
    let name = "model.layers.0.self_attn.o_proj.weight";
    let stamped = |text: &str| {
        let mut shard = colibri_shard(&inventory(1, false), Format::Int4Row);
        shard.meta("colibri.fmt", text);
        shard
    };
    let claim = |format: &str| stamped(&format!(r#"{{"{name}": "{format}"}}"#));
    assert!(matches!(unfit(&claim("int4-row"), 1), Error::Stamp { .. }));
    assert!(matches!(unfit(&claim("int4-rans256-g0"), 1), Error::UnsupportedFormat { .. }));
    assert!(matches!(refused(model_dir(&claim("int5")).path()), Error::Stamp { .. }));
    assert!(matches!(refused(model_dir(&stamped("[]")).path()), Error::Stamp { .. }));
    let dir = model_dir(&claim("int8-row"));
    Shard::default()
        .meta("colibri.fmt", &format!(r#"{{"{name}": "f32"}}"#))
        .write(&dir.path().join("z.safetensors"));
    assert!(matches!(refused(dir.path()), Error::Stamp { .. }));
}

#[test]
fn an_unfinished_slab_container_is_refused_with_the_way_to_go_on() {
    // T13
    let unfinished = |dir: &Path| {
        let error = refused(dir);
        assert!(matches!(error, Error::Unfinished { .. }), "{error}");
        assert!(error.to_string().contains("run the same convert again"));
    };
    let dir = slab_dir(&inventory(1, false), Format::Int8Row);
    fs::remove_file(dir.path().join("manifest.json")).unwrap();
    unfinished(dir.path());
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("convert.json"), "{}").unwrap();
    unfinished(dir.path());
}

#[test]
fn a_manifest_that_disagrees_with_the_files_is_refused() {
    let inventory = inventory(2, false);
    let dir = slab_dir(&inventory, Format::Int8Row);
    let good = parse_manifest(&fs::read(dir.path().join("manifest.json")).unwrap()).unwrap();
    let open = |change: &dyn Fn(&mut metaltail_container::Manifest)| {
        let mut manifest = good.clone();
        change(&mut manifest);
        write_manifest(dir.path(), &manifest);
        Checkpoint::open(dir.path()).and_then(|checkpoint| checkpoint.check(&inventory)).unwrap_err()
    };
    assert!(matches!(open(&|m| m.files[0].bytes += 1), Error::FileLength { .. }));
    assert!(matches!(open(&|m| m.experts[0].stride *= 2), Error::Slab { .. }));
    assert!(matches!(open(&|m| m.experts[0].first += 4096), Error::Slab { .. }));
    assert!(matches!(open(&|m| m.experts[0].formats[2] = Format::Int4Row), Error::Slab { .. }));
    assert!(matches!(open(&|m| m.experts[0].xxh3.truncate(2)), Error::Slab { .. }));
    assert!(matches!(open(&|m| m.experts.truncate(1)), Error::Incomplete(_)));
    let name = "model.layers.0.self_attn.o_proj.weight";
    let error = open(&|m| assert!(m.dense.remove(name).is_some()));
    assert!(matches!(&error, Error::Slab { what, .. } if what.contains(name)), "{error}");
    assert!(matches!(open(&|m| m.experts[0].file = m.experts[1].file.clone()), Error::Incomplete(_)));
    fs::write(dir.path().join("manifest.json"), "{").unwrap();
    assert!(matches!(refused(dir.path()), Error::Manifest { .. }));
}

#[test]
fn an_expert_that_the_layer_does_not_have_is_refused() {
    let inventory = inventory(1, false);
    let dir = model_dir(&hf_shard(&inventory));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(matches!(checkpoint.expert(&inventory.experts[0], 4), Err(Error::NoSuchExpert { count: 4, .. })));
}

#[test]
fn a_manifest_of_another_family_or_with_other_parameters_is_refused_by_name() {
    let inventory = inventory(2, true);
    let dir = slab_dir(&inventory, Format::Int8Row);
    let good = parse_manifest(&fs::read(dir.path().join("manifest.json")).unwrap()).unwrap();
    let open = |change: &dyn Fn(&mut metaltail_container::Manifest)| {
        let mut manifest = good.clone();
        change(&mut manifest);
        write_manifest(dir.path(), &manifest);
        Checkpoint::open(dir.path()).and_then(|checkpoint| checkpoint.check(&inventory))
    };
    open(&|_| ()).unwrap();
    open(&|m| m.parameters.rest = "keep".to_owned()).unwrap();
    open(&|m| m.parameters.experts = "mixed".to_owned()).unwrap();
    let refused = |wanted: &str, change: &dyn Fn(&mut metaltail_container::Manifest)| {
        let error = open(change).unwrap_err();
        assert!(matches!(&error, Error::ManifestDisagrees { what, .. } if **what == *wanted), "{error}");
        error.to_string()
    };
    let text = refused("model_type", &|m| m.model_type = "other".to_owned());
    assert!(text.contains("other") && text.contains("tiny") && text.contains("config.json"), "{text}");
    let text = refused("parameters.rest", &|m| m.parameters.rest = "int8".to_owned());
    assert!(text.contains("f32") && text.contains("model.embed_tokens.weight"), "{text}");
    let text = refused("parameters.experts", &|m| m.parameters.experts = "int4-g64".to_owned());
    assert!(text.contains("the experts of layer 1"), "{text}");
    refused("parameters.experts", &|m| m.parameters.experts = "nonsense".to_owned());
    let text = refused("parameters.draft_experts", &|m| m.parameters.draft_experts = "int4".to_owned());
    assert!(text.contains("the experts of layer 3"), "{text}");
}

#[test]
fn parameters_are_not_held_against_a_draft_layer_that_is_not_used() {
    // By config.json layer 3 is the draft layer, in the files it is one of the main ones.
    let dir = slab_dir(&inventory(4, false), Format::Int8Row);
    let mut manifest = parse_manifest(&fs::read(dir.path().join("manifest.json")).unwrap()).unwrap();
    manifest.parameters.draft_experts = "int4".to_owned();
    write_manifest(dir.path(), &manifest);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    checkpoint.check(&inventory(2, true)).unwrap();
    assert!(checkpoint.notices()[0].contains("hold layer 4 that"), "{:?}", checkpoint.notices());
}

#[test]
fn what_a_parser_says_is_said_once() {
    let broken = |name: &str| {
        let dir = slab_dir(&inventory(1, false), Format::Int8Row);
        let path = dir.path().join(name);
        let length = fs::metadata(&path).unwrap().len();
        fs::write(&path, "{".repeat(length as usize)).unwrap();
        if name.ends_with(".safetensors") {
            let mut bytes = fs::read(&path).unwrap();
            bytes[..8].copy_from_slice(&100u64.to_le_bytes());
            fs::write(&path, bytes).unwrap();
        }
        let error = refused(dir.path());
        let mut texts = vec![error.to_string()];
        let mut next = error.source();
        while let Some(cause) = next {
            texts.push(cause.to_string());
            next = cause.source();
        }
        texts
    };
    for name in ["manifest.json", "config.json", "dense-00000.safetensors"] {
        let texts = broken(name);
        let said = texts.iter().filter(|text| text.contains("line 1 column")).count();
        assert_eq!(said, 1, "{name}: {texts:?}");
    }
}

#[test]
fn a_dangling_link_among_the_small_files_is_named() {
    for name in ["config.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"] {
        let dir = model_dir(&hf_shard(&inventory(1, false)));
        let path = dir.path().join(name);
        fs::remove_file(&path).ok();
        std::os::unix::fs::symlink("../gone", &path).unwrap();
        let error = refused(dir.path());
        assert!(matches!(&error, Error::DanglingLink { path: p, .. } if *p == path), "{error}");
        assert!(error.to_string().contains("../gone") && !error.is_io(), "{error}");
    }
}

#[test]
fn nan_and_infinity_in_what_is_kept_in_f32_are_named() {
    let whole = inventory(1, false);
    let read = |shard: &Shard, name: &str| {
        let dir = model_dir(shard);
        let spec = whole.tensors.iter().find(|spec| spec.name == name).unwrap();
        Checkpoint::open(dir.path()).unwrap().read_f32(spec)
    };
    let named = |error: Error, name: &str| {
        let Error::NotFinite { tensor, what, index, .. } = &error else { panic!("{error}") };
        assert_eq!(tensor, name);
        (*what, *index)
    };
    let put = |name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>| {
        let mut shard = hf_shard(&whole);
        shard.remove(|other| other != name).tensor(name, dtype, shape, bytes);
        read(&shard, name)
    };
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = vec![1.0; 64];
        values[17] = odd;
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let name = "model.norm.weight";
        assert_eq!(named(put(name, "F32", &[64], bytes).unwrap_err(), name), ("value", 17));
    }
    let name = "model.norm.weight";
    for (dtype, infinity) in [("BF16", 0x7f80u16), ("F16", 0x7c00)] {
        let mut bytes = vec![0; 64 * 2];
        bytes[80..82].copy_from_slice(&infinity.to_le_bytes());
        assert_eq!(named(put(name, dtype, &[64], bytes).unwrap_err(), name), ("value", 40));
    }
    let router = vec![0xff; 4 * 64 * 4];
    assert!(put("model.layers.1.mlp.gate.weight", "F32", &[4, 64], router).is_ok(), "routing survives NaN");
    let name = "model.layers.0.self_attn.o_proj.weight";
    let mut scales = 1f32.to_le_bytes().repeat(64);
    scales[20..24].copy_from_slice(&f32::NAN.to_le_bytes());
    let mut shard = colibri_shard(&whole, Format::Int8Row);
    let qs = format!("{name}.qs");
    shard.remove(|other| other != qs).tensor(&qs, "F32", &[64], scales);
    assert_eq!(named(read(&shard, name).unwrap_err(), name), ("scale", 5));
}
