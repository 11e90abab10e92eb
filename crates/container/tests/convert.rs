//! Conversion: what comes out, and that no accident changes it.

#[path = "common/glm.rs"]
mod glm;
#[path = "common/model.rs"]
mod model;

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::path::Path;

use metaltail_container::convert::{
    ConvertOptions, ConvertPlan, ConvertReport, Progress, Target, WriteError, convert,
};
use metaltail_container::synth::{Like, SynthFormat, SynthOptions};
use metaltail_container::{Checkpoint, Error, Part, Role, TensorSpec};
use metaltail_quant::{Format, GgufFormat, MatrixLayout, OwnedMatrix};
use model::{Model, contents, part, tiny};
use tempfile::TempDir;

/// The formats that `tiny` is made in.
const AS_MADE: ConvertOptions = ConvertOptions {
    experts: Target::Format(Format::Int4Group(32)),
    rest: Target::Format(Format::Int8Row),
    draft_experts: Target::Format(Format::Int8Row),
};

const KEEP: ConvertOptions =
    ConvertOptions { experts: Target::Keep, rest: Target::Keep, draft_experts: Target::Keep };

fn run(model: &Model, to: &Path, options: &ConvertOptions) -> Result<ConvertReport, WriteError> {
    run_until(model, to, options, u64::MAX)
}

/// Converts, and stops as soon as `limit` bytes are written.
fn run_until(
    model: &Model,
    to: &Path,
    options: &ConvertOptions,
    limit: u64,
) -> Result<ConvertReport, WriteError> {
    convert(&model.open(), &model.inventory, to, options, &mut |p: Progress<'_>| match p.written >= limit {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    })
}

/// Weight files of two directories, byte by byte.
fn same_weights(a: &Path, b: &Path) {
    let weights = |dir| {
        let mut files = contents(dir);
        files.retain(|name, _| name.ends_with(".safetensors"));
        files
    };
    let (a, b) = (weights(a), weights(b));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, bytes) in &a {
        assert!(*bytes == b[name], "{name} differs");
    }
}

#[test]
fn experts_are_quantised_as_the_reference_does() {
    let source = tiny(SynthFormat::Hf);
    let to = TempDir::new().unwrap();
    run(&source, to.path(), &ConvertOptions::default()).unwrap();
    let (from, to) = (source.open(), Checkpoint::open(to.path()).unwrap());
    for layer in &source.inventory.experts {
        let format = if layer.draft { Format::Int8Row } else { Format::Int4Group(64) };
        for (expert, which) in (0..layer.count).flat_map(|e| Part::ALL.map(|p| (e, p))) {
            let (rows, cols) = layer.shape(which);
            let name = layer.name(expert, which);
            let spec = TensorSpec {
                name: name.clone(),
                rows,
                cols,
                role: Role::DenseFfn,
                layer: Some(layer.layer),
                optional: false,
            };
            let layout = MatrixLayout::new(format, rows, cols).unwrap();
            let wanted = OwnedMatrix::quantize(layout, &from.read_f32(&spec).unwrap()).unwrap();
            let (weights, scales) = part(&to, layer, expert, which);
            assert!(weights == wanted.weights() && scales == wanted.scales(), "{name}");
        }
    }
}

#[test]
fn the_rest_is_int8_and_what_the_role_keeps_is_f32() {
    let source = tiny(SynthFormat::Hf);
    let to = TempDir::new().unwrap();
    run(&source, to.path(), &ConvertOptions::default()).unwrap();
    let (from, to) = (source.open(), Checkpoint::open(to.path()).unwrap());
    for spec in &source.inventory.tensors {
        let values = from.read_f32(spec).unwrap();
        let format = if spec.rows == 1 || spec.role.keeps_f32() { Format::F32 } else { Format::Int8Row };
        let layout = MatrixLayout::new(format, spec.rows, spec.cols).unwrap();
        let wanted = OwnedMatrix::quantize(layout, &values).unwrap();
        let got = to.read_matrix(spec).unwrap();
        assert_eq!(got.layout().format(), format, "{}", spec.name);
        assert!(got.weights() == wanted.weights() && got.scales() == wanted.scales(), "{}", spec.name);
    }
}

#[test]
fn a_source_in_the_target_formats_keeps_its_bits() {
    let slab = tiny(SynthFormat::Slab);
    let colibri = tiny(SynthFormat::Colibri);
    let to = TempDir::new().unwrap();
    run(&colibri, to.path(), &AS_MADE).unwrap();
    same_weights(slab.dir.path(), to.path());
}

#[test]
fn keep_copies_whatever_the_source_has() {
    let options = SynthOptions { mixed: true, ..SynthOptions::new(Like::Tiny, SynthFormat::Slab) };
    let slab = model::model(Like::Tiny, &options);
    let to = TempDir::new().unwrap();
    run(&slab, to.path(), &KEEP).unwrap();
    same_weights(slab.dir.path(), to.path());

    let hf = tiny(SynthFormat::Hf);
    let to = TempDir::new().unwrap();
    run(&hf, to.path(), &KEEP).unwrap();
    let layer = &hf.inventory.experts[0];
    let to = Checkpoint::open(to.path()).unwrap();
    assert_eq!(to.expert(layer, 3).unwrap().parts[0].layout.format(), Format::Bf16);
    assert_eq!(part(&to, layer, 3, Part::Up), part(&hf.open(), layer, 3, Part::Up));
}

#[test]
fn the_plan_is_exact_to_the_byte() {
    let source = tiny(SynthFormat::Hf);
    let plan = ConvertPlan::new(&source.open(), &source.inventory, &ConvertOptions::default()).unwrap();
    let to = TempDir::new().unwrap();
    let report = run(&source, to.path(), &ConvertOptions::default()).unwrap();
    let files = contents(to.path());
    assert_eq!(plan.files().count(), files.len());
    for (name, bytes) in plan.files() {
        assert_eq!(files[name].len() as u64, bytes, "{name}");
    }
    let sum: usize = files.values().map(Vec::len).sum();
    assert_eq!((plan.total_bytes(), report.bytes), (sum as u64, sum as u64));
    assert_eq!(files["tokenizer.json"], fs::read(source.dir.path().join("tokenizer.json")).unwrap());
}

#[test]
fn a_conversion_stopped_anywhere_goes_on_to_the_same_bytes() {
    let source = tiny(SynthFormat::Hf);
    let whole = TempDir::new().unwrap();
    let total = run(&source, whole.path(), &ConvertOptions::default()).unwrap().bytes;
    let wanted = contents(whole.path());
    let mut skipped = Vec::new();
    for tenth in [0, 1, 3, 5, 8] {
        let to = TempDir::new().unwrap();
        let stopped = run_until(&source, to.path(), &ConvertOptions::default(), total * tenth / 10);
        assert!(matches!(stopped, Err(WriteError::Interrupted { .. })), "{stopped:?}");
        assert!(Checkpoint::open(to.path()).is_err(), "an unfinished directory is no model");
        let report = run(&source, to.path(), &ConvertOptions::default()).unwrap();
        assert!(contents(to.path()) == wanted, "stopped after {tenth} tenths");
        skipped.push(report.skipped);
    }
    assert!(skipped.is_sorted() && skipped[0] == 0 && *skipped.last().unwrap() > 1, "{skipped:?}");
}

#[test]
fn a_conversion_stopped_twice_goes_on_too() {
    let source = tiny(SynthFormat::Colibri);
    let (whole, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let total = run(&source, whole.path(), &AS_MADE).unwrap().bytes;
    for quarter in [1, 2, 3] {
        run_until(&source, to.path(), &AS_MADE, total * quarter / 4).unwrap_err();
    }
    run(&source, to.path(), &AS_MADE).unwrap();
    assert!(contents(to.path()) == contents(whole.path()));
}

#[test]
fn a_finished_file_that_was_cut_is_written_again() {
    let source = tiny(SynthFormat::Hf);
    let (whole, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let total = run(&source, whole.path(), &ConvertOptions::default()).unwrap().bytes;
    run_until(&source, to.path(), &ConvertOptions::default(), total * 9 / 10).unwrap_err();
    let cut = to.path().join("experts-00001.safetensors");
    File::options().write(true).open(cut).unwrap().set_len(5000).unwrap();
    run(&source, to.path(), &ConvertOptions::default()).unwrap();
    assert!(contents(to.path()) == contents(whole.path()));
}

#[test]
fn a_finished_file_that_was_damaged_is_written_again() {
    let source = tiny(SynthFormat::Hf);
    let (whole, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let total = run(&source, whole.path(), &ConvertOptions::default()).unwrap().bytes;
    let stop = || run_until(&source, to.path(), &ConvertOptions::default(), total * 9 / 10).unwrap_err();
    stop();
    for name in ["dense-00000.safetensors", "experts-00001.safetensors"] {
        let path = to.path().join(name);
        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 5000;
        bytes[last] ^= 1;
        fs::write(&path, bytes).unwrap();
    }
    let again = run(&source, to.path(), &ConvertOptions::default()).unwrap();
    assert!(again.skipped > 0, "whole files are kept");
    assert!(contents(to.path()) == contents(whole.path()));
}

#[test]
fn finished_files_are_read_again_under_the_eyes_of_progress() {
    let source = tiny(SynthFormat::Hf);
    let to = TempDir::new().unwrap();
    run_until(&source, to.path(), &ConvertOptions::default(), 700_000).unwrap_err();
    let stopped = run_until(&source, to.path(), &ConvertOptions::default(), 1);
    assert!(matches!(stopped, Err(WriteError::Interrupted { .. })), "{stopped:?}");
    let mut seen = Vec::new();
    let report =
        convert(&source.open(), &source.inventory, to.path(), &ConvertOptions::default(), &mut |p| {
            seen.push(p.written);
            ControlFlow::Continue(())
        });
    assert!(seen.is_sorted() && seen.last().is_some_and(|last| *last < report.unwrap().bytes));
}

#[test]
fn no_lock_outlives_its_process() {
    let source = tiny(SynthFormat::Hf);
    let to = TempDir::new().unwrap();
    let lock = to.path().join(".convert.lock");
    run_until(&source, to.path(), &ConvertOptions::default(), 1).unwrap_err();
    assert!(!lock.exists(), "after a stop");
    run(&source, to.path(), &KEEP).unwrap_err();
    assert!(!lock.exists(), "after a refusal of a conversion under way");
    run(&source, to.path(), &ConvertOptions::default()).unwrap();
    run(&source, to.path(), &KEEP).unwrap_err();
    assert!(!lock.exists(), "after a refusal of a finished one");
}

#[test]
fn a_drive_that_is_too_small_gets_no_directory() {
    let (rows, cols) = (1usize << 21, 1usize << 20);
    let top = TempDir::new().unwrap();
    fs::write(top.path().join("config.json"), "{\"model_type\": \"vast\"}").unwrap();
    let header = serde_json::json!({"model.embed_tokens.weight": {
        "dtype": "BF16", "shape": [rows, cols], "data_offsets": [0, 2 * rows * cols]
    }});
    let header = header.to_string();
    let path = top.path().join("model.safetensors");
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    fs::write(&path, &bytes).unwrap();
    // A hole of four tebibytes, of which nothing is read.
    let length = (bytes.len() + 2 * rows * cols) as u64;
    if File::options().write(true).open(path).unwrap().set_len(length).is_err() {
        println!("SKIPPED: this drive takes no file of {length} bytes");
        return;
    }
    let spec = TensorSpec {
        name: "model.embed_tokens.weight".to_owned(),
        rows,
        cols,
        role: Role::Embedding,
        layer: None,
        optional: false,
    };
    let inventory = metaltail_container::Inventory {
        family: "vast".to_owned(),
        tensors: vec![spec],
        experts: Vec::new(),
    };
    let source = Checkpoint::open(top.path()).unwrap();
    let place = TempDir::new().unwrap();
    let to = place.path().join("models/new");
    let refused =
        convert(&source, &inventory, &to, &ConvertOptions::default(), &mut |_| ControlFlow::Break(()));
    assert!(matches!(refused, Err(WriteError::Space { .. })), "{refused:?}");
    assert!(!place.path().join("models").exists(), "a directory was left behind");
}

#[test]
fn other_parameters_in_the_same_directory_are_refused_by_name() {
    let source = tiny(SynthFormat::Hf);
    let to = TempDir::new().unwrap();
    let other = ConvertOptions { experts: Target::Format(Format::Int4Row), ..ConvertOptions::default() };
    let refused = |limit| {
        run_until(&source, to.path(), &ConvertOptions::default(), limit).ok();
        let before = contents(to.path());
        let message = run(&source, to.path(), &other).unwrap_err().to_string();
        assert!(message.contains("experts int4-g64,") && message.contains("experts int4,"), "{message}");
        assert!(contents(to.path()) == before, "a refusal changes nothing");
    };
    refused(100_000);
    refused(u64::MAX);
}

#[test]
fn nothing_is_converted_to_a_gguf_format() {
    let source = tiny(SynthFormat::Hf);
    let target = Target::Format(Format::Gguf(GgufFormat::Q4_0));
    for other in [
        ConvertOptions { experts: target, ..ConvertOptions::default() },
        ConvertOptions { rest: target, ..ConvertOptions::default() },
        ConvertOptions { draft_experts: target, ..ConvertOptions::default() },
    ] {
        let refused = ConvertPlan::new(&source.open(), &source.inventory, &other).map(drop);
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("nothing is quantised to Q4_0"), "{message}");
    }
}

#[test]
fn another_source_in_the_same_directory_is_refused() {
    let (one, other) = (tiny(SynthFormat::Hf), tiny(SynthFormat::Hf));
    fs::write(other.dir.path().join("config.json"), "{\"model_type\": \"glm_moe_dsa\"}").unwrap();
    let to = TempDir::new().unwrap();
    run_until(&one, to.path(), &ConvertOptions::default(), 1).unwrap_err();
    let refused = run(&other, to.path(), &ConvertOptions::default());
    assert!(matches!(refused, Err(WriteError::SourceChanged { .. })), "{refused:?}");
}

#[test]
fn a_complete_directory_is_left_alone() {
    let source = tiny(SynthFormat::Hf);
    let to = TempDir::new().unwrap();
    let first = run(&source, to.path(), &ConvertOptions::default()).unwrap();
    assert!(!first.already_complete);
    let before = contents(to.path());
    let again = run_until(&source, to.path(), &ConvertOptions::default(), 0).unwrap();
    assert!(again.already_complete);
    assert_eq!((again.files, again.bytes), (first.files, first.bytes));
    assert!(contents(to.path()) == before);
}

#[test]
fn a_foreign_directory_is_refused_and_untouched() {
    let source = tiny(SynthFormat::Hf);
    let to = TempDir::new().unwrap();
    for (name, text) in
        [("thesis.tex", "mine"), ("convert.json", "[]"), ("manifest.json", "{\"format\": \"other\"}")]
    {
        fs::write(to.path().join(name), text).unwrap();
        let before = fs::read_dir(to.path()).unwrap().count();
        let refused = run(&source, to.path(), &ConvertOptions::default());
        assert!(matches!(refused, Err(WriteError::Foreign { .. })), "{name}: {refused:?}");
        assert_eq!(fs::read_dir(to.path()).unwrap().count(), before);
    }
}

#[test]
fn the_source_itself_is_refused_as_destination() {
    let source = tiny(SynthFormat::Slab);
    let refused = run(&source, source.dir.path(), &AS_MADE);
    assert!(matches!(refused, Err(WriteError::SameDirectory { .. })), "{refused:?}");
}

#[test]
fn a_second_process_is_refused() {
    let source = tiny(SynthFormat::Hf);
    let to = TempDir::new().unwrap();
    let held = File::create(to.path().join(".convert.lock")).unwrap();
    held.try_lock().unwrap();
    let refused = run(&source, to.path(), &ConvertOptions::default());
    assert!(matches!(refused, Err(WriteError::Busy { .. })), "{refused:?}");
    drop(held);
    run(&source, to.path(), &ConvertOptions::default()).unwrap();
}

#[test]
fn an_absent_draft_layer_is_left_out() {
    let source = tiny(SynthFormat::Colibri);
    fs::remove_file(source.dir.path().join("out-mtp-00000.safetensors")).unwrap();
    let to = TempDir::new().unwrap();
    run(&source, to.path(), &AS_MADE).unwrap();
    let to = Checkpoint::open(to.path()).unwrap();
    to.check(&source.inventory).unwrap();
    assert!(!to.draft_complete(&source.inventory));
    assert!(to.tensor_names().all(|name| !name.starts_with("model.layers.4.")));
}

#[test]
fn an_incomplete_source_is_refused_before_anything_is_written() {
    let source = tiny(SynthFormat::Colibri);
    fs::remove_file(source.dir.path().join("out-00002.safetensors")).unwrap();
    let to = TempDir::new().unwrap();
    let refused = run(&source, to.path(), &AS_MADE);
    assert!(matches!(refused, Err(WriteError::Source(_))), "{refused:?}");
    assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
}

#[test]
fn a_damaged_dense_tensor_of_a_slab_source_is_named() {
    let source = tiny(SynthFormat::Slab);
    let spec = source.inventory.tensors.iter().find(|spec| spec.role == Role::Attention).unwrap();
    let scales = source.open().matrix(spec).unwrap().scales.unwrap();
    let path = source.open().files()[scales.file as usize].clone();
    let mut bytes = fs::read(&path).unwrap();
    bytes[scales.offset as usize] ^= 1;
    fs::write(&path, bytes).unwrap();
    let to = TempDir::new().unwrap();
    let refused = run(&source, to.path(), &KEEP);
    let Err(WriteError::Source(Error::Checksum { tensor, .. })) = refused else { panic!("{refused:?}") };
    assert_eq!(tensor, format!("{}.qs", spec.name));
}

#[test]
fn a_damaged_expert_of_a_slab_source_is_named() {
    let source = tiny(SynthFormat::Slab);
    let layer = &source.inventory.experts[0];
    let place = source.open().expert(layer, 2).unwrap();
    let path = source.open().files()[place.runs[0].file as usize].clone();
    let mut bytes = fs::read(&path).unwrap();
    bytes[place.runs[0].offset as usize + 17] ^= 1;
    fs::write(&path, bytes).unwrap();
    let to = TempDir::new().unwrap();
    let refused = run(&source, to.path(), &KEEP);
    assert!(matches!(refused, Err(WriteError::Damaged { layer: 1, expert: 2, .. })), "{refused:?}");
}
