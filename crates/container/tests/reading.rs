//! The three kinds of directories give the same values, at the places that the formats promise.

#[path = "support/reading.rs"]
mod support;
#[path = "support/reading_slab.rs"]
mod support_slab;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use metaltail_container::{
    Checkpoint, Draft, Error, ExpertLayerSpec, Inventory, Kind, Part, Role, TensorSpec, inspect, verify,
};
use metaltail_quant::{Format, GgufFormat, MatrixLayout, MatrixRef, OwnedMatrix, dequantize};
use support::{colibri_shard, config, hf_shard, inventory, model_dir, stored, values};
use support_slab::slab_dir;

/// Reads an expert's runs and cuts out one matrix, dequantised.
fn expert_values(checkpoint: &Checkpoint, layer: &ExpertLayerSpec, expert: u32, part: Part) -> Vec<f32> {
    let place = checkpoint.expert(layer, expert).unwrap();
    let runs: Vec<Vec<u8>> = place.runs.iter().map(|&run| checkpoint.read_extent(run).unwrap()).collect();
    let at = place.parts[part as usize];
    let weights = &runs[at.weights.run as usize][at.weights.offset as usize..][..at.layout.weight_bytes()];
    let scales =
        at.scales.map_or(&[][..], |s| &runs[s.run as usize][s.offset as usize..][..at.layout.scale_bytes()]);
    let mut out = vec![0.0; at.layout.rows() * at.layout.cols()];
    dequantize(MatrixRef::new(at.layout, weights, scales).unwrap(), &mut out);
    out
}

/// What `values` become when stored in a format.
fn through(name: &str, format: Format, rows: usize, cols: usize) -> Vec<f32> {
    let layout = MatrixLayout::new(format, rows, cols).unwrap();
    let (weights, scales) = stored(name, layout);
    let mut out = vec![0.0; rows * cols];
    dequantize(OwnedMatrix::new(layout, weights, scales).unwrap().as_ref(), &mut out);
    out
}

fn check_experts(checkpoint: &Checkpoint, inventory: &Inventory, format: Format) {
    for layer in &inventory.experts {
        for expert in 0..layer.count {
            for part in Part::ALL {
                let (rows, cols) = layer.shape(part);
                let name = layer.name(expert, part);
                let wanted = through(&name, format, rows, cols);
                assert_eq!(expert_values(checkpoint, layer, expert, part), wanted, "{name}");
            }
        }
    }
}

#[test]
fn a_single_file_checkpoint_gives_its_stored_values() {
    let inventory = inventory(2, false);
    let dir = model_dir(&hf_shard(&inventory));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.kind(), Kind::Hf);
    assert_eq!(checkpoint.model_type(), Some("tiny"));
    for spec in &inventory.tensors {
        assert_eq!(
            checkpoint.read_f32(spec).unwrap(),
            values(&spec.name, spec.rows * spec.cols),
            "{}",
            spec.name
        );
        assert_eq!(checkpoint.read_matrix(spec).unwrap().layout().format(), Format::Bf16);
    }
    check_experts(&checkpoint, &inventory, Format::Bf16);
    let census = checkpoint.check(&inventory).unwrap();
    assert_eq!(census.tensors, inventory.tensors.len() + 2 * 4 * 3);
    assert_eq!((census.unused, census.draft), (0, Draft::None));
}

#[test]
fn adjacent_matrices_of_an_expert_are_one_read() {
    // Sorted by name, down, gate and up of one expert follow one another.
    let inventory = inventory(1, false);
    let dir = model_dir(&hf_shard(&inventory));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let place = checkpoint.expert(&inventory.experts[0], 2).unwrap();
    assert_eq!(place.runs.len(), 1);
    assert_eq!(place.runs[0].len, 3 * 64 * 32 * 2);
    assert_eq!(place.parts.map(|p| p.weights.offset), [4096, 8192, 0]);
    assert_eq!(place.checksum, None);
}

#[test]
fn scattered_matrices_of_an_expert_are_three_reads() {
    let inventory = inventory(1, false);
    let (rest, up) = hf_shard(&inventory).split(|name| name.ends_with(".up_proj.weight"));
    let (rest, gate) = rest.split(|name| name.ends_with(".gate_proj.weight"));
    let dir = model_dir(&rest);
    up.write(&dir.path().join("b.safetensors"));
    gate.write(&dir.path().join("a.safetensors"));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.expert(&inventory.experts[0], 1).unwrap().runs.len(), 3);
    check_experts(&checkpoint, &inventory, Format::Bf16);
}

#[test]
fn shards_with_an_index_are_read_and_stray_files_left_alone() {
    let inventory = inventory(2, false);
    let (a, b) = hf_shard(&inventory).split(|name| name.contains("layers.2."));
    let dir = tempfile::tempdir().unwrap();
    config(dir.path());
    let mut map = BTreeMap::new();
    for (shard, file) in [(&a, "model-00001-of-00002.safetensors"), (&b, "model-00002-of-00002.safetensors")]
    {
        shard.write(&dir.path().join(file));
        map.extend(shard.names().into_iter().map(|name| (name, file)));
    }
    a.write(&dir.path().join("consolidated.safetensors"));
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.files().len(), 2);
    checkpoint.check(&inventory).unwrap();
    check_experts(&checkpoint, &inventory, Format::Bf16);
}

#[test]
fn fp8_with_block_scales_is_read_from_a_checkpoint() {
    let mut shard = hf_shard(&inventory(1, false));
    let name = "model.layers.0.self_attn.o_proj.weight";
    let layout = MatrixLayout::new(Format::Fp8Block, 64, 128).unwrap();
    let (weights, scales) = stored(name, layout);
    shard.remove(|other| other != name).tensor(name, "F8_E4M3", &[64, 128], weights);
    shard.tensor(&format!("{name}_scale_inv"), "F32", &[1, 1], scales);
    let dir = model_dir(&shard);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.kind(), Kind::Hf);
    let inventory = inventory(1, false);
    let spec = inventory.tensors.iter().find(|t| t.name == name).unwrap();
    assert_eq!(checkpoint.read_f32(spec).unwrap(), through(name, Format::Fp8Block, 64, 128));
    assert_eq!(checkpoint.check(&inventory).unwrap().unused, 0);
}

#[test]
fn every_format_of_a_colibri_directory_is_inferred() {
    let inventory = inventory(2, true);
    for format in [Format::Int8Row, Format::Int4Row, Format::Int4Group(16), Format::Fp8Block] {
        let dir = model_dir(&colibri_shard(&inventory, format));
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.kind(), Kind::Colibri);
        assert_eq!(checkpoint.expert(&inventory.experts[1], 3).unwrap().runs.len(), 2, "weights, scales");
        check_experts(&checkpoint, &inventory, format);
        let census = checkpoint.check(&inventory).unwrap();
        assert_eq!((census.unused, census.draft), (0, Draft::Complete));
        assert_eq!(census.roles["router"].formats, BTreeMap::from([("f32".to_owned(), 3)]));
        assert_eq!(census.roles["attention"].formats["int8"], 4);
        assert!(checkpoint.notices().is_empty());
    }
}

#[test]
fn a_shard_index_copied_along_with_a_converted_model_is_not_consulted() {
    let inventory = inventory(1, false);
    let dir = model_dir(&colibri_shard(&inventory, Format::Int4Row));
    let index = r#"{"weight_map": {"lm_head.weight": "model-00001-of-00141.safetensors"}}"#;
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    Checkpoint::open(dir.path()).unwrap().check(&inventory).unwrap();
}

#[test]
fn an_ambiguous_matrix_is_int8_unless_stamped_and_that_is_said() {
    // 256 × 16384: 2 × 128 blocks of 128 × 128 are as many as there are rows.
    let spec = TensorSpec {
        name: "model.layers.0.self_attn.o_proj.weight".to_owned(),
        rows: 256,
        cols: 16384,
        role: Role::Attention,
        layer: Some(0),
        optional: false,
    };
    let mut shard = support::Shard::default();
    shard.tensor(&spec.name, "U8", &[256 * 16384], vec![0x38; 256 * 16384]);
    shard.tensor(&format!("{}.qs", spec.name), "F32", &[256], 1f32.to_le_bytes().repeat(256));
    let dir = model_dir(&shard);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.matrix(&spec).unwrap().layout.format(), Format::Int8Row);
    assert_eq!(checkpoint.notices().len(), 1, "{:?}", checkpoint.notices());

    shard.meta("colibri.fmt", &serde_json::json!({spec.name.clone(): "fp8-e4m3-b128"}).to_string());
    let dir = model_dir(&shard);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.matrix(&spec).unwrap().layout.format(), Format::Fp8Block);
    assert!(checkpoint.notices().is_empty());
}

#[test]
fn an_expert_of_a_slab_container_is_one_aligned_run_with_a_checksum() {
    let inventory = inventory(2, true);
    let gguf = [GgufFormat::Q8_0, GgufFormat::Q5_1, GgufFormat::Mxfp4].map(Format::Gguf);
    for format in [Format::Int4Group(32), Format::Int8Row, Format::Bf16].into_iter().chain(gguf) {
        let dir = slab_dir(&inventory, format);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.kind(), Kind::Slab);
        for layer in &inventory.experts {
            for expert in 0..layer.count {
                let place = checkpoint.expert(layer, expert).unwrap();
                let [run] = place.runs[..] else { panic!("{} runs", place.runs.len()) };
                assert_eq!((run.offset % 4096, run.len % 4096), (0, 0));
                let bytes = checkpoint.read_extent(run).unwrap();
                assert_eq!(place.checksum, Some(xxhash_rust::xxh3::xxh3_64(&bytes)));
            }
        }
        check_experts(&checkpoint, &inventory, format);
        for spec in &inventory.tensors {
            assert_eq!(checkpoint.read_f32(spec).unwrap(), values(&spec.name, spec.rows * spec.cols));
        }
        let report = inspect(&checkpoint, &inventory).unwrap();
        assert!(report.census.layers.iter().all(|layer| layer.checksummed && layer.runs == 1));
        assert_eq!(report.census.unused, 0);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["kind"], "slab");
        assert_eq!(json["draft"]["state"], "complete");
        assert_eq!(json["parameters"]["source"], "synth");
    }
}

#[test]
fn verification_names_the_layer_the_expert_and_the_offset_of_a_flipped_bit() {
    let inventory = inventory(2, false);
    let dir = slab_dir(&inventory, Format::Int8Row);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let mut seen = Vec::new();
    let clean = verify(&checkpoint, &inventory, &mut |progress| seen.push(progress)).unwrap();
    assert_eq!((clean.experts, clean.checksummed, clean.files), (8, 8, 1));
    assert!(clean.damage.is_empty(), "{:?}", clean.damage);
    let last = seen.last().unwrap();
    assert_eq!((last.bytes, last.total), (clean.bytes, clean.bytes));

    let run = checkpoint.expert(&inventory.experts[1], 2).unwrap().runs[0];
    let path = &checkpoint.files()[run.file as usize];
    let mut bytes = fs::read(path).unwrap();
    bytes[run.offset as usize + 777] ^= 4;
    fs::write(path, bytes).unwrap();
    let found = verify(&checkpoint, &inventory, &mut |_| {}).unwrap();
    let [damage] = &found.damage[..] else { panic!("{:?}", found.damage) };
    assert_eq!((damage.layer, damage.expert, damage.offset), (Some(2), Some(2), run.offset));
    assert_eq!(&damage.file, path);
    assert!(damage.reason.contains("checksum"));
}

#[test]
fn verification_goes_on_after_a_file_that_was_cut_short() {
    let inventory = inventory(2, false);
    let dir = slab_dir(&inventory, Format::Int8Row);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let last = checkpoint.expert(&inventory.experts[0], 3).unwrap().runs[0];
    let file = fs::File::options().write(true).open(&checkpoint.files()[last.file as usize]).unwrap();
    file.set_len(last.offset + 100).unwrap();
    let found = verify(&checkpoint, &inventory, &mut |_| {}).unwrap();
    let [damage] = &found.damage[..] else { panic!("{:?}", found.damage) };
    assert_eq!((damage.layer, damage.expert), (Some(1), Some(3)));
    assert!(damage.reason.contains(&format!("offset {}", last.offset)), "{}", damage.reason);
    assert_eq!(found.experts, 8);
}

#[test]
fn tensors_are_found_under_any_prefix() {
    // T11
    let inventory = inventory(2, false);
    for prefix in ["model.language_model.", "language_model.model.", "transformer.", ""] {
        let outer = prefix.strip_suffix("model.").unwrap_or("");
        let mut shard = hf_shard(&inventory);
        shard.rename(|name| match name.strip_prefix("model.") {
            Some(rest) => format!("{prefix}{rest}"),
            None => format!("{outer}{name}"),
        });
        // A second, smaller stack of layers must not be taken for the model.
        shard.tensor("vision.layers.0.input_layernorm.weight", "F32", &[1], vec![0; 4]);
        let dir = model_dir(&shard);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.prefix(), prefix);
        assert_eq!(checkpoint.check(&inventory).unwrap().unused, 1);
        check_experts_names_only(&checkpoint, &inventory);
    }
}

fn check_experts_names_only(checkpoint: &Checkpoint, inventory: &Inventory) {
    let layer = &inventory.experts[0];
    let wanted = values(&layer.name(0, Part::Gate), 64 * 32);
    assert_eq!(expert_values(checkpoint, layer, 0, Part::Gate), wanted);
}

#[test]
fn a_draft_layer_counts_only_with_its_last_matrix() {
    let inventory = inventory(1, true);
    let whole = hf_shard(&inventory);
    let last = inventory.experts[1].name(3, Part::Down);
    let cut = whole.clone().remove(|name| name != last).clone();
    let none = whole.clone().remove(|name| !name.contains("layers.2.")).clone();
    let state = |shard: &support::Shard| {
        let dir = model_dir(shard);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let census = checkpoint.check(&inventory).unwrap();
        assert_eq!(census.layers.len(), 1 + usize::from(census.draft == Draft::Complete));
        assert_eq!(census.draft == Draft::Complete, checkpoint.draft_complete(&inventory));
        census.draft
    };
    assert_eq!(state(&whole), Draft::Complete);
    assert_eq!(state(&none), Draft::Absent);
    assert_eq!(state(&cut), Draft::Partial { present: 15, wanted: 16, missing: vec![last.clone()] });
}

#[test]
fn layers_that_config_json_does_not_use_are_noticed() {
    let dir = model_dir(&hf_shard(&inventory(6, false)));
    let notices = |inventory: &Inventory| {
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let report = inspect(&checkpoint, inventory).unwrap();
        assert_eq!(report.notices, checkpoint.notices());
        report.notices
    };
    let found = notices(&inventory(2, false));
    assert_eq!(
        found,
        ["the files hold layers 3–6 that config.json does not use (60 tensors): is num_hidden_layers right?"]
    );
    assert!(notices(&inventory(5, false))[0].contains("hold layer 6 that"));
    assert!(notices(&inventory(6, false)).is_empty());
    assert!(notices(&inventory(6, true)).is_empty(), "an absent draft layer is none of this");
}

#[test]
fn a_flipped_bit_of_a_dense_tensor_is_named_unless_checking_is_off() {
    let inventory = inventory(2, true);
    let dir = slab_dir(&inventory, Format::Int8Row);
    let path = dir.path().join("dense-00000.safetensors");
    let whole = fs::read(&path).unwrap();
    for spec in &inventory.tensors {
        let mut checkpoint = Checkpoint::open(dir.path()).unwrap();
        let place = checkpoint.matrix(spec).unwrap().weights;
        let mut bytes = whole.clone();
        // The last value's lowest bit: nothing but a checksum can see it.
        bytes[(place.offset + place.len) as usize - 4] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let error = checkpoint.read_f32(spec).unwrap_err();
        let Error::Checksum { file, tensor, offset, wanted, got } = &error else { panic!("{error}") };
        assert_eq!((file, tensor, *offset), (&path, &spec.name, place.offset));
        let read = &bytes[place.offset as usize..][..place.len as usize];
        assert_eq!(got.0, xxhash_rust::xxh3::xxh3_64(read));
        assert_ne!(wanted, got);
        checkpoint.verify_dense(false);
        checkpoint.read_f32(spec).unwrap();
    }
}

#[test]
fn the_oracle_checkpoints_are_read() {
    let oracles = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/oracles"));
    if !oracles.is_dir() {
        println!("SKIPPED: ../shared is absent");
        return;
    }
    for (name, sparse) in [("glm_moe_dsa", 1..4), ("olmoe", 0..4)] {
        let checkpoint = Checkpoint::open(&oracles.join(name)).unwrap();
        assert_eq!((checkpoint.kind(), checkpoint.model_type()), (Kind::Hf, Some(name)));
        let layer = |layer| ExpertLayerSpec {
            layer,
            count: 8,
            hidden: 64,
            width: 32,
            draft: false,
            prefix: format!("model.layers.{layer}.mlp.experts."),
            suffixes: [".gate_proj.weight", ".up_proj.weight", ".down_proj.weight"],
            stacked: None,
        };
        let inventory = Inventory {
            family: name.to_owned(),
            tensors: vec![TensorSpec {
                name: "model.norm.weight".to_owned(),
                rows: 1,
                cols: 64,
                role: Role::Norm,
                layer: None,
                optional: false,
            }],
            experts: sparse.map(layer).collect(),
        };
        let census = checkpoint.check(&inventory).unwrap();
        assert!(census.layers.iter().all(|layer| layer.runs == 1 && layer.expert_bytes == 3 * 64 * 32 * 2));
        let norm = checkpoint.read_f32(&inventory.tensors[0]).unwrap();
        assert!(norm.iter().all(|v| v.is_finite()) && norm.iter().any(|v| *v != 0.0));
        let found = verify(&checkpoint, &inventory, &mut |_| {}).unwrap();
        assert_eq!((found.checksummed, found.damage.len()), (0, 0));
        assert_eq!(found.bytes, census.layers.iter().map(|layer| layer.bytes).sum::<u64>());
    }
}
