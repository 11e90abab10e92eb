//! Synthetic models: every form holds the same model, and the seed decides it.

#[path = "common/glm.rs"]
mod glm;
#[path = "common/model.rs"]
mod model;

use std::ops::ControlFlow;

use metaltail_container::convert::WriteError;
use metaltail_container::synth::{Like, SynthFormat, SynthOptions, config, synth};
use metaltail_container::{Kind, Part};
use metaltail_quant::{Format, MatrixLayout, OwnedMatrix, dequantize};
use model::{Model, contents, model, part, tiny};
use proptest::prelude::*;
use tempfile::TempDir;

/// Experts of all layers of two models, matrix by matrix.
fn same_experts(a: &Model, b: &Model) {
    let (x, y) = (a.open(), b.open());
    for layer in &a.inventory.experts {
        for (expert, which) in (0..layer.count).flat_map(|e| Part::ALL.map(|p| (e, p))) {
            let name = layer.name(expert, which);
            assert_eq!(part(&x, layer, expert, which), part(&y, layer, expert, which), "{name}");
        }
    }
}

#[test]
fn slab_and_colibri_hold_the_same_quantised_bytes() {
    for experts in [Format::Int4Row, Format::Int4Group(32)] {
        for mixed in [false, true] {
            let options = |format| SynthOptions { experts, mixed, ..SynthOptions::new(Like::Tiny, format) };
            let slab = model(Like::Tiny, &options(SynthFormat::Slab));
            let colibri = model(Like::Tiny, &options(SynthFormat::Colibri));
            assert_eq!((slab.open().kind(), colibri.open().kind()), (Kind::Slab, Kind::Colibri));
            same_experts(&slab, &colibri);
            for spec in &slab.inventory.tensors {
                let (a, b) =
                    (slab.open().read_matrix(spec).unwrap(), colibri.open().read_matrix(spec).unwrap());
                assert_eq!(a.layout(), b.layout(), "{}", spec.name);
                assert_eq!((a.weights(), a.scales()), (b.weights(), b.scales()), "{}", spec.name);
            }
        }
    }
}

#[test]
fn the_checkpoint_form_holds_the_dequantised_values_in_bf16() {
    let (slab, hf) = (tiny(SynthFormat::Slab), tiny(SynthFormat::Hf));
    let (ours, stock) = (slab.open(), hf.open());
    assert_eq!(stock.kind(), Kind::Hf);
    for spec in &slab.inventory.tensors {
        let rounded: Vec<f32> =
            ours.read_f32(spec).unwrap().iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect();
        assert_eq!(rounded, stock.read_f32(spec).unwrap(), "{}", spec.name);
    }
    let layer = &slab.inventory.experts[1];
    let layout = ours.expert(layer, 5).unwrap().parts[2].layout;
    let (weights, scales) = part(&ours, layer, 5, Part::Down);
    let mut values = vec![0.0; layout.rows() * layout.cols()];
    dequantize(OwnedMatrix::new(layout, weights, scales).unwrap().as_ref(), &mut values);
    let bf16 = MatrixLayout::new(Format::Bf16, layout.rows(), layout.cols()).unwrap();
    let wanted = OwnedMatrix::quantize(bf16, &values).unwrap();
    assert_eq!(part(&stock, layer, 5, Part::Down).0, wanted.weights());
}

#[test]
fn norms_and_routers_are_equal_in_every_form() {
    let models = [SynthFormat::Slab, SynthFormat::Colibri, SynthFormat::Hf].map(tiny);
    let kept = models[0].inventory.tensors.iter().filter(|t| t.role.keeps_f32());
    for spec in kept {
        let [a, b, c] = models.each_ref().map(|m| m.open().read_f32(spec).unwrap());
        assert_eq!(a, b, "{}", spec.name);
        assert_eq!(a, c, "{}", spec.name);
    }
}

#[test]
fn every_form_passes_the_census() {
    for format in [SynthFormat::Slab, SynthFormat::Colibri, SynthFormat::Hf] {
        let model = tiny(format);
        let checkpoint = model.open();
        checkpoint.check(&model.inventory).unwrap();
        assert!(checkpoint.draft_complete(&model.inventory), "{format}");
        assert_eq!(checkpoint.config()["model_type"], "glm_moe_dsa");
    }
}

#[test]
fn the_colibri_form_has_the_usual_files() {
    let files = contents(tiny(SynthFormat::Colibri).dir.path());
    let names: Vec<&str> = files.keys().map(String::as_str).filter(|n| n.ends_with(".safetensors")).collect();
    let wanted =
        ["00000", "00001", "00002", "idx-00000", "mtp-00000"].map(|n| format!("out-{n}.safetensors"));
    assert_eq!(names, wanted);
}

#[test]
fn colibri_files_are_in_the_stock_writers_order() {
    for (name, bytes) in contents(tiny(SynthFormat::Colibri).dir.path()) {
        if !name.ends_with(".safetensors") {
            continue;
        }
        let stock = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let again = safetensors::serialize(stock.tensors(), None).unwrap();
        assert!(again == bytes, "{name} differs from what the stock writer makes of its tensors");
    }
}

#[test]
fn the_seed_decides_every_byte() {
    let options = SynthOptions::new(Like::Tiny, SynthFormat::Slab);
    let [a, b] = [0, 0].map(|seed| contents(model(Like::Tiny, &SynthOptions { seed, ..options }).dir.path()));
    assert!(a == b, "the same seed gave other files");
    let other = contents(model(Like::Tiny, &SynthOptions { seed: 1, ..options }).dir.path());
    assert_eq!(a["config.json"], other["config.json"]);
    for name in a.keys().filter(|n| n.ends_with(".safetensors")) {
        assert!(a[name] != other[name], "{name} does not depend on the seed");
    }
}

#[test]
fn an_expert_of_fat_is_two_mebibytes() {
    let config = config(Like::Fat, Some(1), Some(2)).unwrap();
    let inventory = glm::inventory(&config);
    let dir = TempDir::new().unwrap();
    let options = SynthOptions::new(Like::Fat, SynthFormat::Slab);
    synth(dir.path(), &config, &inventory, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    let model = Model { dir, inventory };
    assert_eq!(model.open().manifest().unwrap().experts[0].stride, 2 << 20);
}

#[test]
fn a_mixed_model_has_one_layer_of_int8() {
    let options = SynthOptions { mixed: true, ..SynthOptions::new(Like::Tiny, SynthFormat::Slab) };
    let model = model(Like::Tiny, &options);
    let formats: Vec<[Format; 3]> =
        model.open().manifest().unwrap().experts.iter().map(|e| e.formats).collect();
    let (int4, int8) = ([Format::Int4Group(32); 3], [Format::Int8Row; 3]);
    assert_eq!(formats, [int4, int8, int4, int8], "the last is the draft layer");
}

#[test]
fn a_directory_with_something_in_it_is_refused() {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    let config = config(Like::Tiny, None, None).unwrap();
    let options = SynthOptions::new(Like::Tiny, SynthFormat::Hf);
    let made =
        synth(dir.path(), &config, &glm::inventory(&config), &options, &mut |_| ControlFlow::Continue(()));
    assert!(matches!(made, Err(WriteError::NotEmpty { .. })), "{made:?}");
    assert_eq!(contents(dir.path()).len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_number_of_layers_experts_and_shards_round_trips(
        layers in 1u32..5, experts in 1u32..6, shards in 1u32..5, seed: u64,
    ) {
        let config = config(Like::Tiny, Some(layers), Some(experts)).unwrap();
        let inventory = glm::inventory(&config);
        let models = [SynthFormat::Slab, SynthFormat::Colibri, SynthFormat::Hf].map(|format| {
            let dir = TempDir::new().unwrap();
            let options = SynthOptions { shards: Some(shards), seed, ..SynthOptions::new(Like::Tiny, format) };
            synth(dir.path(), &config, &inventory, &options, &mut |_| ControlFlow::Continue(())).unwrap();
            Model { dir, inventory: inventory.clone() }
        });
        for model in &models {
            model.open().check(&inventory).unwrap();
        }
        same_experts(&models[0], &models[1]);
    }
}
