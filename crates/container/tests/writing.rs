//! What the slab writer puts on disk.

#[path = "common/glm.rs"]
mod glm;
#[path = "common/model.rs"]
mod model;

use metaltail_container::Part;
use metaltail_container::synth::{Like, SynthFormat, SynthOptions};
use model::{contents, part, tiny};
use safetensors::SafeTensors;
use xxhash_rust::xxh3::xxh3_64;

#[test]
fn every_file_opens_with_the_stock_reader_and_gives_the_same_bytes() {
    let slab = tiny(SynthFormat::Slab);
    let ours = slab.open();
    let files = contents(slab.dir.path());
    let mut seen = 0;
    for (_, bytes) in files.iter().filter(|(name, _)| name.ends_with(".safetensors")) {
        let stock = SafeTensors::deserialize(bytes).unwrap();
        for layer in &slab.inventory.experts {
            for (expert, which) in (0..layer.count).flat_map(|e| Part::ALL.map(|p| (e, p))) {
                let name = layer.name(expert, which);
                let Ok(weights) = stock.tensor(&name) else {
                    continue;
                };
                let scales = stock.tensor(&format!("{name}.qs")).unwrap();
                let (our_weights, our_scales) = part(&ours, layer, expert, which);
                assert_eq!(weights.data(), our_weights, "{name}");
                assert_eq!(scales.data(), our_scales, "{name}");
                seen += 1;
            }
        }
        for spec in &slab.inventory.tensors {
            let Ok(weights) = stock.tensor(&spec.name) else {
                continue;
            };
            let matrix = ours.read_matrix(spec).unwrap();
            assert_eq!(weights.data(), matrix.weights(), "{}", spec.name);
            let elements: usize = weights.shape().iter().product();
            assert_eq!(elements, spec.rows * spec.cols, "{}", spec.name);
            seen += 1;
        }
    }
    let experts: u32 = slab.inventory.experts.iter().map(|l| 3 * l.count).sum();
    assert_eq!(seen, slab.inventory.tensors.len() + experts as usize);
}

#[test]
fn runs_are_whole_pages_with_gate_up_down_then_scales() {
    let slab = tiny(SynthFormat::Slab);
    let ours = slab.open();
    for layer in &slab.inventory.experts {
        let mut end = None;
        for expert in 0..layer.count {
            let place = ours.expert(layer, expert).unwrap();
            let [run] = place.runs[..] else { panic!("a slab expert is one run") };
            assert_eq!((run.offset % 4096, run.len % 4096), (0, 0));
            assert!(end.is_none_or(|end| end == run.offset), "runs follow one another");
            end = Some(run.offset + run.len);
            let weights = place.parts.map(|p| p.weights.offset);
            let scales = place.parts.map(|p| p.scales.unwrap().offset);
            let order = [weights, scales].concat();
            assert!(order.is_sorted() && order[0] == 0, "{order:?}");
            assert!(order.iter().all(|o| o % 64 == 0), "{order:?}");
        }
    }
}

#[test]
fn data_begins_on_a_page_and_gaps_are_zero_tensors() {
    let slab = tiny(SynthFormat::Slab);
    for (name, bytes) in contents(slab.dir.path()) {
        if !name.ends_with(".safetensors") {
            continue;
        }
        let (header, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!((8 + header) % 4096, 0, "{name}");
        assert_eq!(metadata.metadata().as_ref().unwrap()["metaltail.slab"], "1");
        let stock = SafeTensors::deserialize(&bytes).unwrap();
        let pads = stock.tensors().into_iter().filter(|(tensor, _)| tensor.starts_with("__pad."));
        for (tensor, view) in pads {
            assert!(view.data().iter().all(|b| *b == 0), "{name}: {tensor}");
        }
    }
}

#[test]
fn checksums_are_those_of_the_bytes_on_disk() {
    let slab = tiny(SynthFormat::Slab);
    let files = contents(slab.dir.path());
    let ours = slab.open();
    let manifest = ours.manifest().unwrap();
    let weight_files = files.keys().filter(|name| name.ends_with(".safetensors")).count();
    assert_eq!(manifest.files.len(), weight_files);
    for file in &manifest.files {
        assert_eq!(file.bytes, files[&file.name].len() as u64);
        assert_eq!(file.xxh3.0, xxh3_64(&files[&file.name]), "{}", file.name);
    }
    let mut dense = 0;
    for (_, bytes) in files.iter().filter(|(name, _)| name.starts_with("dense-")) {
        let stock = SafeTensors::deserialize(bytes).unwrap();
        for (tensor, view) in stock.tensors().into_iter().filter(|(tensor, _)| !tensor.starts_with("__pad."))
        {
            assert_eq!(manifest.dense[&tensor].0, xxh3_64(view.data()), "{tensor}");
            dense += 1;
        }
    }
    assert_eq!(manifest.dense.len(), dense);
    assert!(manifest.dense.keys().any(|tensor| tensor.ends_with(".qs")));
    for layer in &manifest.experts {
        let bytes = &files[&layer.file];
        assert_eq!(bytes.len() as u64, layer.first + layer.stride * layer.xxh3.len() as u64);
        let runs = bytes[layer.first as usize..].chunks(layer.stride as usize);
        for (run, checksum) in runs.zip(&layer.xxh3) {
            assert_eq!(xxh3_64(run), checksum.0, "layer {}", layer.layer);
        }
    }
}

#[test]
fn nothing_unfinished_is_left_behind() {
    let options = SynthOptions { mixed: true, ..SynthOptions::new(Like::Tiny, SynthFormat::Slab) };
    let slab = model::model(Like::Tiny, &options);
    for name in contents(slab.dir.path()).keys() {
        assert!(!name.ends_with(".partial") && name != "convert.json", "{name}");
    }
}
