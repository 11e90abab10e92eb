//! Writing the slab container (`docs/design/slab.md`): plan, files, manifest.
//!
//! [`SlabPlan`] fixes every byte position from names and layouts alone; [`write_file`] then asks
//! a [`Weights`] for the bytes, file by file, so that convert and synth share one writer.

pub(crate) mod directory;
mod error;
pub(crate) mod file;
pub(crate) mod parallel;

use std::collections::BTreeMap;
use std::path::Path;

use metaltail_quant::{Format, MatrixLayout};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

pub use error::WriteError;
use file::{FilePlan, FilePlanner, FileWriter, dtype, sync_dir, weights_shape, write_atomic};

use crate::slab::{
    BLOB_ALIGN, Checksum, FORMAT_NAME, MANIFEST, META_SLAB, META_TENSORS, Manifest, ManifestExperts,
    ManifestFile, Parameters, RUN_ALIGN, SCALES_SUFFIX, TensorMeta, TensorMetas, VERSION,
};
use crate::{ExpertLayerSpec, Part, TensorSpec};

/// A dense file is closed when it has passed this many bytes.
pub(crate) const DENSE_FILE: u64 = 2 << 30;

/// Weight and scale bytes of one matrix.
pub(crate) struct Blobs {
    /// Weight bytes, as many as the layout says.
    pub weights: Vec<u8>,
    /// Scale bytes, empty for formats without scales.
    pub scales: Vec<u8>,
}

/// Where the bytes come from.
pub(crate) trait Weights: Sync {
    /// The bytes of a dense tensor in `layout`.
    fn dense(&self, spec: &TensorSpec, layout: MatrixLayout) -> Result<Blobs, WriteError>;

    /// Fills one expert's run; `run` is zeroed and has `shape.stride` bytes.
    fn expert(
        &self,
        spec: &ExpertLayerSpec,
        expert: u32,
        shape: &RunShape,
        run: &mut [u8],
    ) -> Result<(), WriteError>;
}

/// Where the six blobs lie in an expert's run: gate, up, down weights, then their scales.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RunShape {
    /// Gate, up, down.
    pub layouts: [MatrixLayout; 3],
    /// Offsets of the weights.
    pub weights: [usize; 3],
    /// Offsets of the scales (those of a format without scales are empty).
    pub scales: [usize; 3],
    /// Length of the run, padding included.
    pub stride: usize,
}

impl RunShape {
    /// Lays the blobs out at multiples of 64 in a run of whole pages.
    pub(crate) fn new(layouts: [MatrixLayout; 3]) -> Option<RunShape> {
        let align = |n: usize, to: u64| n.checked_next_multiple_of(to as usize);
        let mut end = 0usize;
        let mut place = |len: usize| {
            let at = align(end, BLOB_ALIGN)?;
            end = at.checked_add(len)?;
            Some(at)
        };
        let mut weights = [0; 3];
        let mut scales = [0; 3];
        for (at, layout) in weights.iter_mut().zip(&layouts) {
            *at = place(layout.weight_bytes())?;
        }
        for (at, layout) in scales.iter_mut().zip(&layouts) {
            if layout.scale_bytes() > 0 {
                *at = place(layout.scale_bytes())?;
            }
        }
        Some(RunShape { layouts, weights, scales, stride: align(end, RUN_ALIGN)? })
    }

    /// The weight bytes and the scale bytes of one matrix of a run.
    pub(crate) fn part_mut<'r>(&self, run: &'r mut [u8], part: Part) -> (&'r mut [u8], &'r mut [u8]) {
        let i = part as usize;
        let layout = &self.layouts[i];
        // Scales lie behind all weights, so the run splits between them.
        let (head, tail) = run.split_at_mut(self.weights[2] + self.layouts[2].weight_bytes());
        let weights = &mut head[self.weights[i]..][..layout.weight_bytes()];
        let scales = match layout.scale_bytes() {
            0 => &mut [],
            len => &mut tail[self.scales[i] - (self.weights[2] + self.layouts[2].weight_bytes())..][..len],
        };
        (weights, scales)
    }

    fn formats(&self) -> [Format; 3] {
        self.layouts.map(|l| l.format())
    }
}

/// What one file holds.
#[derive(Clone, Debug)]
pub(crate) enum Body {
    /// Dense tensors in order.
    Dense(Vec<(TensorSpec, MatrixLayout)>),
    /// All experts of a layer, ascending.
    Experts(ExpertLayerSpec, Box<RunShape>),
}

/// One file with every position fixed.
#[derive(Clone, Debug)]
pub(crate) struct SlabFile {
    /// Name, header and length.
    pub plan: FilePlan,
    /// What it holds.
    pub body: Body,
}

/// All files of a slab container except the copied ones and the manifest.
#[derive(Clone, Debug)]
pub(crate) struct SlabPlan {
    /// Dense files, then expert files by layer.
    pub files: Vec<SlabFile>,
}

/// A complete file and what the manifest says about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Finished {
    /// Name in the container's directory.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// XXH3-64 of the whole file.
    pub xxh3: Checksum,
    /// XXH3-64 of each expert's run, for an expert file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<Checksum>,
    /// XXH3-64 of each tensor, for a dense file.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dense: BTreeMap<String, Checksum>,
}

impl SlabFile {
    /// The finished file with zeros for checksums.
    fn blank(&self) -> Finished {
        let mut dense = BTreeMap::new();
        let mut runs = Vec::new();
        match &self.body {
            Body::Dense(tensors) => {
                for (spec, layout) in tensors {
                    let scales = (layout.scale_bytes() > 0).then(|| format!("{}{SCALES_SUFFIX}", spec.name));
                    dense.extend(scales.into_iter().chain([spec.name.clone()]).map(|n| (n, Checksum(0))));
                }
            }
            Body::Experts(spec, _) => runs = vec![Checksum(0); spec.count as usize],
        }
        let (name, bytes) = (self.plan.name().to_owned(), self.plan.bytes());
        Finished { name, bytes, xxh3: Checksum(0), runs, dense }
    }

    /// Whether `finished` has this file's length and a checksum of everything in it.
    pub(crate) fn is_described_by(&self, finished: &Finished) -> bool {
        let blank = self.blank();
        finished.name == blank.name
            && finished.bytes == blank.bytes
            && finished.runs.len() == blank.runs.len()
            && finished.dense.keys().eq(blank.dense.keys())
    }
}

impl SlabPlan {
    /// Plans files for dense tensors, in the order given, and layers of experts.
    pub(crate) fn new(
        dense: Vec<(TensorSpec, MatrixLayout)>,
        experts: Vec<(ExpertLayerSpec, [MatrixLayout; 3])>,
        dense_file: u64,
    ) -> Result<SlabPlan, WriteError> {
        let mut files = Vec::new();
        let mut group: Vec<(TensorSpec, MatrixLayout)> = Vec::new();
        let mut bytes = 0u64;
        for item in dense {
            bytes = bytes.saturating_add(item.1.bytes() as u64);
            group.push(item);
            if bytes > dense_file {
                files.push(dense_plan(files.len(), std::mem::take(&mut group))?);
                bytes = 0;
            }
        }
        if !group.is_empty() {
            files.push(dense_plan(files.len(), group)?);
        }
        for (spec, layouts) in experts {
            files.push(experts_plan(spec, layouts)?);
        }
        Ok(SlabPlan { files })
    }

    /// The manifest for finished files; `finished` is in the order of [`SlabPlan::files`].
    pub(crate) fn manifest(
        &self,
        model_type: &str,
        parameters: &Parameters,
        finished: &[Finished],
    ) -> Manifest {
        let files = finished
            .iter()
            .map(|f| ManifestFile { name: f.name.clone(), bytes: f.bytes, xxh3: f.xxh3 })
            .collect();
        let experts = self
            .files
            .iter()
            .zip(finished)
            .filter_map(|(file, finished)| match &file.body {
                Body::Dense(_) => None,
                Body::Experts(spec, shape) => Some(ManifestExperts {
                    layer: spec.layer,
                    file: finished.name.clone(),
                    formats: shape.formats(),
                    first: file.plan.data_start(),
                    stride: shape.stride as u64,
                    xxh3: finished.runs.clone(),
                }),
            })
            .collect();
        Manifest {
            format: FORMAT_NAME.to_owned(),
            version: VERSION,
            model_type: model_type.to_owned(),
            parameters: parameters.clone(),
            files,
            dense: finished.iter().flat_map(|f| f.dense.clone()).collect(),
            experts,
        }
    }

    /// Length of the manifest, which does not depend on the checksums' values.
    pub(crate) fn manifest_bytes(&self, model_type: &str, parameters: &Parameters) -> u64 {
        let finished: Vec<Finished> = self.files.iter().map(SlabFile::blank).collect();
        manifest_text(&self.manifest(model_type, parameters, &finished)).len() as u64
    }
}

/// The manifest's bytes on disk.
fn manifest_text(manifest: &Manifest) -> String {
    let mut text = serde_json::json!(manifest).to_string();
    text.push('\n');
    text
}

/// Writes `manifest.json`, the last file, by rename.
pub(crate) fn write_manifest(dir: &Path, manifest: &Manifest) -> Result<(), WriteError> {
    write_atomic(dir, MANIFEST, manifest_text(manifest).as_bytes())
}

/// Plans a dense file; each blob begins at a multiple of 64.
fn dense_plan(index: usize, tensors: Vec<(TensorSpec, MatrixLayout)>) -> Result<SlabFile, WriteError> {
    let mut planner = FilePlanner::new(format!("dense-{index:05}.safetensors"));
    let mut metas = TensorMetas::new();
    for (spec, layout) in &tensors {
        planner.pad_to(BLOB_ALIGN)?;
        push_weights(&mut planner, &mut metas, &spec.name, layout)?;
        if layout.scale_bytes() > 0 {
            planner.pad_to(BLOB_ALIGN)?;
            push_scales(&mut planner, &spec.name, layout)?;
        }
    }
    let plan = planner.finish(&metadata(&metas), RUN_ALIGN);
    Ok(SlabFile { plan, body: Body::Dense(tensors) })
}

/// Plans the file of one layer's experts.
fn experts_plan(spec: ExpertLayerSpec, layouts: [MatrixLayout; 3]) -> Result<SlabFile, WriteError> {
    let name = format!("experts-{:05}.safetensors", spec.layer);
    let shape = RunShape::new(layouts).ok_or_else(|| WriteError::Overflow { file: name.clone() })?;
    let mut planner = FilePlanner::new(name);
    let mut metas = TensorMetas::new();
    for expert in 0..spec.count {
        for part in Part::ALL {
            planner.pad_to(BLOB_ALIGN)?;
            let layout = &shape.layouts[part as usize];
            push_weights(&mut planner, &mut metas, &spec.name(expert, part), layout)?;
        }
        for part in Part::ALL {
            let layout = &shape.layouts[part as usize];
            if layout.scale_bytes() > 0 {
                planner.pad_to(BLOB_ALIGN)?;
                push_scales(&mut planner, &spec.name(expert, part), layout)?;
            }
        }
        planner.pad_to(RUN_ALIGN)?;
    }
    let plan = planner.finish(&metadata(&metas), RUN_ALIGN);
    Ok(SlabFile { plan, body: Body::Experts(spec, Box::new(shape)) })
}

fn push_weights(
    planner: &mut FilePlanner,
    metas: &mut TensorMetas,
    name: &str,
    layout: &MatrixLayout,
) -> Result<(), WriteError> {
    let meta = TensorMeta { format: layout.format(), rows: layout.rows(), cols: layout.cols() };
    metas.insert(name.to_owned(), meta);
    planner.push(name, dtype(layout.format()), &weights_shape(layout), layout.weight_bytes() as u64)
}

fn push_scales(planner: &mut FilePlanner, name: &str, layout: &MatrixLayout) -> Result<(), WriteError> {
    let shape = [layout.scale_rows(), layout.scale_cols()];
    planner.push(&format!("{name}{SCALES_SUFFIX}"), "F32", &shape, layout.scale_bytes() as u64)
}

fn metadata(metas: &TensorMetas) -> BTreeMap<&'static str, String> {
    BTreeMap::from([(META_SLAB, "1".to_owned()), (META_TENSORS, serde_json::json!(metas).to_string())])
}

/// Writes one file; `progress` hears the bytes of this file so far and may stop the work.
pub(crate) fn write_file(
    dir: &Path,
    file: &SlabFile,
    weights: &dyn Weights,
    threads: usize,
    progress: &mut dyn FnMut(u64) -> Result<(), WriteError>,
) -> Result<Finished, WriteError> {
    let mut writer = FileWriter::create(dir, &file.plan)?;
    progress(writer.written())?;
    let mut runs = Vec::new();
    let mut dense = BTreeMap::new();
    match &file.body {
        Body::Dense(tensors) => {
            for (spec, layout) in tensors {
                let blobs = weights.dense(spec, *layout)?;
                for (suffix, blob) in [("", &blobs.weights), (SCALES_SUFFIX, &blobs.scales)] {
                    if !blob.is_empty() {
                        writer.pad_to(BLOB_ALIGN)?;
                        writer.write(blob)?;
                        dense.insert(format!("{}{suffix}", spec.name), Checksum(xxh3_64(blob)));
                    }
                }
                progress(writer.written())?;
            }
        }
        Body::Experts(spec, shape) => {
            let make = |i: usize| {
                let mut run = vec![0u8; shape.stride];
                // The count is a u32, so every index is.
                weights.expert(spec, i as u32, shape, &mut run)?;
                let hash = xxh3_64(&run);
                Ok((run, hash))
            };
            parallel::in_order(spec.count as usize, threads, make, |_, (run, hash): (Vec<u8>, u64)| {
                writer.write(&run)?;
                runs.push(Checksum(hash));
                progress(writer.written())
            })?;
        }
    }
    let xxh3 = Checksum(writer.finish()?);
    sync_dir(dir)?;
    Ok(Finished { name: file.plan.name().to_owned(), bytes: file.plan.bytes(), xxh3, runs, dense })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Role;
    use metaltail_quant::GgufFormat;
    use proptest::prelude::*;

    const FORMATS: [Format; 7] = [
        Format::Bf16,
        Format::Int8Row,
        Format::Int4Row,
        Format::Int4Group(64),
        Format::Fp8Block,
        Format::Gguf(GgufFormat::Q4_0),
        Format::Gguf(GgufFormat::Mxfp4),
    ];

    /// Dimensions that rows of blocks divide, where one of the formats has any.
    fn whole_blocks(hidden: usize, width: usize, formats: [usize; 3]) -> (usize, usize) {
        let blocks = formats.iter().any(|format| matches!(FORMATS[*format], Format::Gguf(_)));
        if blocks { (hidden.next_multiple_of(32), width.next_multiple_of(32)) } else { (hidden, width) }
    }

    fn layer(count: u32, hidden: usize, width: usize) -> ExpertLayerSpec {
        ExpertLayerSpec {
            layer: 7,
            count,
            hidden,
            width,
            draft: false,
            prefix: "e.".to_owned(),
            suffixes: [".gate", ".up", ".down"],
            stacked: None,
        }
    }

    proptest! {
        #[test]
        fn the_header_places_every_blob_where_the_run_has_it(
            count in 1u32..5, hidden in 1usize..300, width in 1usize..300,
            gate in 0usize..7, up in 0usize..7, down in 0usize..7,
        ) {
            let (hidden, width) = whole_blocks(hidden, width, [gate, up, down]);
            let spec = layer(count, hidden, width);
            let layouts = [(gate, Part::Gate), (up, Part::Up), (down, Part::Down)].map(|(format, part)| {
                let (rows, cols) = spec.shape(part);
                MatrixLayout::new(FORMATS[format], rows, cols).unwrap()
            });
            let plan = SlabPlan::new(Vec::new(), vec![(spec.clone(), layouts)], DENSE_FILE).unwrap();
            let Body::Experts(_, shape) = &plan.files[0].body else { panic!("an expert file") };
            let file = &plan.files[0].plan;
            let runs = u64::from(count) * shape.stride as u64;
            prop_assert_eq!(file.bytes(), file.data_start() + runs);
            let mut bytes = file.header().to_vec();
            bytes.resize(file.bytes() as usize, 0);
            let stock = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let offset = |name: &str| {
                let data = stock.tensor(name).unwrap().data().as_ptr() as usize;
                data - bytes.as_ptr() as usize - file.data_start() as usize
            };
            for (expert, part) in (0..count).flat_map(|e| Part::ALL.map(|p| (e, p))) {
                let name = spec.name(expert, part);
                let run = expert as usize * shape.stride;
                prop_assert_eq!(offset(&name), run + shape.weights[part as usize]);
                if shape.layouts[part as usize].scale_bytes() > 0 {
                    prop_assert_eq!(offset(&format!("{name}.qs")), run + shape.scales[part as usize]);
                }
            }
        }

        #[test]
        fn the_parts_of_a_run_do_not_overlap(hidden in 1usize..200, width in 1usize..200, format in 0usize..7) {
            let (hidden, width) = whole_blocks(hidden, width, [format; 3]);
            let spec = layer(1, hidden, width);
            let layouts = Part::ALL.map(|part| {
                let (rows, cols) = spec.shape(part);
                MatrixLayout::new(FORMATS[format], rows, cols).unwrap()
            });
            let shape = RunShape::new(layouts).unwrap();
            let mut run = vec![0u8; shape.stride];
            for part in Part::ALL {
                let (weights, scales) = shape.part_mut(&mut run, part);
                weights.iter_mut().chain(scales).for_each(|b| *b += 1);
            }
            let used: usize = layouts.iter().map(|l| l.bytes()).sum();
            prop_assert!(run.iter().all(|b| *b <= 1));
            prop_assert_eq!(run.iter().filter(|b| **b == 1).count(), used);
        }
    }

    #[test]
    fn a_dense_file_is_closed_when_it_has_passed_the_limit() {
        let tensor = |i: usize| TensorSpec {
            name: format!("t{i}"),
            rows: 10,
            cols: 10,
            role: Role::Attention,
            layer: None,
            optional: false,
        };
        let layout = MatrixLayout::new(Format::F32, 10, 10).unwrap();
        let dense = (0..5).map(|i| (tensor(i), layout)).collect();
        let plan = SlabPlan::new(dense, Vec::new(), 500).unwrap();
        let names: Vec<&str> = plan.files.iter().map(|f| f.plan.name()).collect();
        assert_eq!(names, ["dense-00000.safetensors", "dense-00001.safetensors", "dense-00002.safetensors"]);
    }
}
