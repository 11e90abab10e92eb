//! A slab container built by hand from the design page, for the tests of the reading side.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use metaltail_container::slab::{
    BLOB_ALIGN, Checksum, FORMAT_NAME, META_SLAB, META_TENSORS, Manifest, ManifestExperts, ManifestFile,
    Parameters, RUN_ALIGN, TensorMeta, TensorMetas, VERSION,
};
use metaltail_container::{ExpertLayerSpec, Inventory, Part};
use metaltail_quant::{Format, MatrixLayout};
use xxhash_rust::xxh3::xxh3_64;

use crate::support::{Shard, config, stored};

/// Writes the inventory with experts in `experts` and everything else in f32.
pub fn slab_dir(inventory: &Inventory, experts: Format) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    config(dir.path());
    let (dense_file, dense) = dense_file(dir.path(), inventory);
    let name = experts.to_string();
    let experts = inventory.experts.iter().map(|layer| expert_file(dir.path(), layer, experts)).collect();
    let manifest = Manifest {
        format: FORMAT_NAME.to_owned(),
        version: VERSION,
        model_type: "tiny".to_owned(),
        parameters: Parameters {
            experts: name.clone(),
            rest: "f32".to_owned(),
            draft_experts: name,
            source: "synth".to_owned(),
        },
        files: vec![dense_file],
        dense,
        experts,
    };
    write_manifest(dir.path(), &manifest);
    dir
}

pub fn write_manifest(dir: &Path, manifest: &Manifest) {
    fs::write(dir.join("manifest.json"), serde_json::to_vec(manifest).unwrap()).unwrap();
}

fn finish(shard: &mut Shard, metas: &TensorMetas, path: &Path) -> Vec<u8> {
    shard.meta(META_SLAB, "1").meta(META_TENSORS, &serde_json::to_string(metas).unwrap());
    let bytes = shard.bytes(RUN_ALIGN as usize);
    fs::write(path, &bytes).unwrap();
    bytes
}

fn dense_file(dir: &Path, inventory: &Inventory) -> (ManifestFile, BTreeMap<String, Checksum>) {
    let (mut shard, mut metas) = (Shard::default(), TensorMetas::new());
    let mut checksums = BTreeMap::new();
    for spec in &inventory.tensors {
        let layout = MatrixLayout::new(Format::F32, spec.rows, spec.cols).unwrap();
        let shape = if spec.rows == 1 { vec![spec.cols] } else { vec![spec.rows, spec.cols] };
        let bytes = stored(&spec.name, layout).0;
        checksums.insert(spec.name.clone(), Checksum(xxh3_64(&bytes)));
        shard.tensor(&spec.name, "F32", &shape, bytes);
        metas.insert(spec.name.clone(), TensorMeta { format: Format::F32, rows: spec.rows, cols: spec.cols });
    }
    shard.tensor("__pad.0", "U8", &[4], vec![0; 4]);
    let name = "dense-00000.safetensors";
    let bytes = finish(&mut shard, &metas, &dir.join(name));
    let file =
        ManifestFile { name: name.to_owned(), bytes: bytes.len() as u64, xxh3: Checksum(xxh3_64(&bytes)) };
    (file, checksums)
}

fn expert_file(dir: &Path, layer: &ExpertLayerSpec, format: Format) -> ManifestExperts {
    let (mut shard, mut metas) = (Shard::default(), TensorMetas::new());
    let (mut at, mut pads) = (0, 0);
    let mut pad = |shard: &mut Shard, at: &mut usize, align: u64| {
        let len = at.next_multiple_of(align as usize) - *at;
        if len > 0 {
            shard.tensor(&format!("__pad.{pads}"), "U8", &[len], vec![0; len]);
            pads += 1;
            *at += len;
        }
    };
    for expert in 0..layer.count {
        let parts = Part::ALL.map(|part| {
            let (rows, cols) = layer.shape(part);
            let name = layer.name(expert, part);
            metas.insert(name.clone(), TensorMeta { format, rows, cols });
            let layout = MatrixLayout::new(format, rows, cols).unwrap();
            let (weights, scales) = stored(&name, layout);
            (name, layout, weights, scales)
        });
        for (name, layout, weights, _) in &parts {
            pad(&mut shard, &mut at, BLOB_ALIGN);
            let (dtype, units) = match format {
                Format::Int4Row | Format::Int4Group(_) => ("U8", layout.cols().div_ceil(2)),
                Format::Int8Row => ("I8", layout.cols()),
                Format::Bf16 => ("BF16", layout.cols()),
                Format::Gguf(_) => ("U8", layout.row_bytes()),
                other => panic!("{other} is not built here"),
            };
            shard.tensor(name, dtype, &[layout.rows(), units], weights.clone());
            at += weights.len();
        }
        for (name, layout, _, scales) in parts.iter().filter(|part| !part.3.is_empty()) {
            pad(&mut shard, &mut at, BLOB_ALIGN);
            let shape = [layout.scale_rows(), layout.scale_cols()];
            shard.tensor(&format!("{name}.qs"), "F32", &shape, scales.clone());
            at += scales.len();
        }
        pad(&mut shard, &mut at, RUN_ALIGN);
    }
    let file = format!("experts-{:05}.safetensors", layer.layer);
    let bytes = finish(&mut shard, &metas, &dir.join(&file));
    let stride = at / layer.count as usize;
    let first = bytes.len() - at;
    let xxh3 = bytes[first..].chunks(stride).map(|run| Checksum(xxh3_64(run))).collect();
    ManifestExperts {
        layer: layer.layer,
        file,
        formats: [format; 3],
        first: first as u64,
        stride: stride as u64,
        xxh3,
    }
}
