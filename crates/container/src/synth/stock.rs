//! The forms that other programs write: colibrì directories and Hugging Face checkpoints.

use std::collections::BTreeMap;
use std::path::Path;

use metaltail_quant::{Format, MatrixLayout, MatrixRef};
use serde_json::json;

use super::values::Values;
use super::{Layouts, Meter};
use crate::convert::transcode::transcode;
use crate::slab::SCALES_SUFFIX;
use crate::slab_writer::WriteError;
use crate::slab_writer::file::{
    FilePlan, FilePlanner, FileWriter, dtype, sync_dir, weights_shape, write_atomic,
};
use crate::slab_writer::parallel::{in_order, worker_threads};
use crate::{ExpertLayerSpec, Inventory, Part, Role, StackedNames};

/// Header padding of the stock writer.
const STOCK_ALIGN: u64 = 8;

/// One matrix or vector of the model.
#[derive(Clone, Debug)]
struct Matrix {
    name: String,
    role: Role,
    layout: MatrixLayout,
}

/// Matrices that stay in one file: a dense one, or the three of an expert.
struct Unit {
    layer: Option<u32>,
    draft: bool,
    indexer: bool,
    matrices: Vec<Matrix>,
    /// All experts of a layer, in place of matrices.
    stack: Option<Stack>,
}

impl Unit {
    fn bytes(&self, form: Form) -> u64 {
        let stacked = self.stack.iter().flat_map(Stack::entries).map(|entry| entry.bytes);
        self.matrices.iter().map(|m| form.bytes(&m.layout)).chain(stacked).sum()
    }

    fn entries(&self, form: Form) -> Vec<Entry> {
        let stacked = self.stack.iter().flat_map(Stack::entries);
        self.matrices.iter().flat_map(|m| form.entries(m)).chain(stacked).collect()
    }
}

/// The experts of a layer that share tensors.
#[derive(Clone)]
struct Stack {
    spec: ExpertLayerSpec,
    names: StackedNames,
    layouts: [MatrixLayout; 3],
}

impl Stack {
    /// Its two tensors, inputs before outputs, gate and up in turn.
    fn entries(&self) -> Vec<Entry> {
        let entry = |name: &str, parts: &'static [Part]| {
            let layout = self.layouts[parts[0] as usize];
            let shape = vec![self.spec.count as usize, layout.cols(), parts.len() * layout.rows()];
            let numbers = shape.iter().fold(1u64, |product, &dim| product.saturating_mul(dim as u64));
            Entry {
                name: format!("{}{name}", self.spec.prefix),
                dtype: "BF16",
                shape,
                bytes: numbers.saturating_mul(2),
                content: Content::Stack(Box::new(self.clone()), parts),
            }
        };
        vec![entry(self.names.gate_up, &[Part::Gate, Part::Up]), entry(self.names.down, &[Part::Down])]
    }

    /// The bytes of one expert in the tensor of these parts.
    fn expert(&self, parts: &[Part], expert: u32, values: Values) -> Result<Vec<u8>, WriteError> {
        let of = |part: &Part| {
            let (name, layout) = (self.spec.name(expert, *part), self.layouts[*part as usize]);
            Matrix { name, role: Role::DenseFfn, layout }.bytes(Piece::Bf16, values)
        };
        let stored = parts.iter().map(of).collect::<Result<Vec<_>, _>>()?;
        let layout = self.layouts[parts[0] as usize];
        let (rows, cols) = (layout.rows(), layout.cols());
        let mut out = Vec::with_capacity(parts.len() * rows * cols * 2);
        for at in (0..cols).flat_map(|col| (0..rows).map(move |row| (row * cols + col) * 2)) {
            stored.iter().for_each(|part| out.extend_from_slice(&part[at..at + 2]));
        }
        Ok(out)
    }
}

/// What a tensor of a file is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    Weights,
    Scales,
    /// The dequantised matrix in bf16.
    Bf16,
}

/// One tensor of a file.
#[derive(Clone)]
struct Entry {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: u64,
    content: Content,
}

/// Where the bytes of a tensor come from.
#[derive(Clone)]
enum Content {
    Matrix(Matrix, Piece),
    /// These matrices of all experts, made one expert at a time.
    Stack(Box<Stack>, &'static [Part]),
}

/// A file and its tensors in the order of their bytes.
struct StockFile {
    plan: FilePlan,
    entries: Vec<Entry>,
}

/// Which of the two layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Colibri,
    Hf,
}

impl Form {
    /// Bytes of a matrix in this form.
    fn bytes(self, layout: &MatrixLayout) -> u64 {
        match self {
            Form::Colibri => layout.bytes() as u64,
            Form::Hf => 2 * layout.rows() as u64 * layout.cols() as u64,
        }
    }

    /// The tensors of a matrix.
    fn entries(self, matrix: &Matrix) -> Vec<Entry> {
        let layout = &matrix.layout;
        let entry = |name: String, dtype, shape, bytes: usize, piece| Entry {
            name,
            dtype,
            shape,
            bytes: bytes as u64,
            content: Content::Matrix(matrix.clone(), piece),
        };
        let name = matrix.name.clone();
        if self == Form::Hf {
            let shape = match layout.rows() {
                1 => vec![layout.cols()],
                rows => vec![rows, layout.cols()],
            };
            let bytes = layout.rows() * layout.cols() * 2;
            return vec![entry(name, "BF16", shape, bytes, Piece::Bf16)];
        }
        if layout.scale_bytes() == 0 {
            let shape = weights_shape(layout);
            return vec![entry(name, dtype(layout.format()), shape, layout.weight_bytes(), Piece::Weights)];
        }
        let scales = format!("{name}{SCALES_SUFFIX}");
        let (weight_bytes, scale_bytes) = (layout.weight_bytes(), layout.scale_bytes());
        vec![
            entry(name, "U8", vec![weight_bytes], weight_bytes, Piece::Weights),
            entry(scales, "F32", vec![scale_bytes / 4], scale_bytes, Piece::Scales),
        ]
    }
}

/// Place of a type in the stock writer's order: the widest alignment first.
fn rank(dtype: &str) -> u8 {
    match dtype {
        "F32" => 0,
        "BF16" => 1,
        "F16" => 2,
        _ => 3,
    }
}

/// All matrices, layer by layer.
fn units(inventory: &Inventory, layouts: &Layouts, form: Form) -> Result<Vec<Unit>, WriteError> {
    let draft_layers = inventory.draft_layers();
    let mut units = Vec::new();
    for spec in &inventory.tensors {
        let layout = layouts.dense(spec)?;
        units.push(Unit {
            layer: spec.layer,
            draft: spec.layer.is_some_and(|l| draft_layers.contains(&l)),
            // The indexer's norm has the role of a norm; its name tells it.
            indexer: matches!(spec.role, Role::Indexer | Role::IndexerWeights)
                || spec.name.contains(".indexer."),
            matrices: vec![Matrix { name: spec.name.clone(), role: spec.role, layout }],
            stack: None,
        });
    }
    for spec in &inventory.experts {
        let three = layouts.experts(spec)?;
        if let (Form::Hf, Some(names)) = (form, spec.stacked) {
            let stack = Some(Stack { spec: spec.clone(), names, layouts: three });
            let (layer, draft) = (Some(spec.layer), spec.draft);
            units.push(Unit { layer, draft, indexer: false, matrices: Vec::new(), stack });
            continue;
        }
        for expert in 0..spec.count {
            let matrices = Part::ALL
                .map(|part| Matrix {
                    name: spec.name(expert, part),
                    role: Role::DenseFfn,
                    layout: three[part as usize],
                })
                .to_vec();
            let (layer, draft) = (Some(spec.layer), spec.draft);
            units.push(Unit { layer, draft, indexer: false, matrices, stack: None });
        }
    }
    units.sort_by_key(|u| u.layer);
    Ok(units)
}

/// Spreads units over `count` shards of about the same size, in order; none is empty.
fn shards<'u>(units: &[&'u Unit], form: Form, count: u64) -> Vec<Vec<&'u Unit>> {
    let total: u64 = units.iter().map(|u| u.bytes(form)).sum();
    let mut shards: Vec<(u64, Vec<&Unit>)> = Vec::new();
    let mut before = 0u64;
    for &unit in units {
        let shard = (u128::from(before) * u128::from(count) / u128::from(total.max(1))) as u64;
        match shards.last_mut() {
            Some((last, list)) if *last == shard => list.push(unit),
            _ => shards.push((shard, vec![unit])),
        }
        before += unit.bytes(form);
    }
    shards.into_iter().map(|(_, list)| list).collect()
}

/// Plans a file in the stock writer's order: by type, then by name.
fn plan(
    name: String,
    units: &[&Unit],
    form: Form,
    metadata: &BTreeMap<&str, String>,
) -> Result<StockFile, WriteError> {
    let mut entries: Vec<Entry> = units.iter().flat_map(|unit| unit.entries(form)).collect();
    entries.sort_by(|a, b| (rank(a.dtype), &a.name).cmp(&(rank(b.dtype), &b.name)));
    let mut planner = FilePlanner::new(name);
    for entry in &entries {
        planner.push(&entry.name, entry.dtype, &entry.shape, entry.bytes)?;
    }
    Ok(StockFile { plan: planner.finish(metadata, STOCK_ALIGN), entries })
}

/// Plans all files of a form.
fn files(
    inventory: &Inventory,
    layouts: &Layouts,
    form: Form,
    count: u64,
) -> Result<Vec<StockFile>, WriteError> {
    let units = units(inventory, layouts, form)?;
    if form == Form::Hf {
        let shards = shards(&units.iter().collect::<Vec<_>>(), form, count);
        let metadata = BTreeMap::from([("format", "pt".to_owned())]);
        let total = shards.len();
        let name = |i: usize| match total {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{total:05}.safetensors", i + 1),
        };
        return shards.iter().enumerate().map(|(i, s)| plan(name(i), s, form, &metadata)).collect();
    }
    let of = |wanted: fn(&Unit) -> bool| units.iter().filter(|u| wanted(u)).collect::<Vec<_>>();
    let mut files = Vec::new();
    for (i, shard) in shards(&of(|u| !u.draft && !u.indexer), form, count).iter().enumerate() {
        files.push(plan(format!("out-{i:05}.safetensors"), shard, form, &BTreeMap::new())?);
    }
    for (name, units) in [("mtp", of(|u| u.draft)), ("idx", of(|u| !u.draft && u.indexer))] {
        if !units.is_empty() {
            files.push(plan(format!("out-{name}-00000.safetensors"), &units, form, &BTreeMap::new())?);
        }
    }
    Ok(files)
}

/// Planned files of one form.
pub(super) struct StockPlan {
    files: Vec<StockFile>,
    form: Form,
}

impl StockPlan {
    /// Plans about `shards` files, or as many as keep each near 5 GiB.
    pub(super) fn new(
        inventory: &Inventory,
        layouts: &Layouts,
        form: Form,
        shards: Option<u64>,
    ) -> Result<StockPlan, WriteError> {
        const SHARD: u64 = 5 << 30;
        let count = match shards {
            Some(count) => count,
            None => units(inventory, layouts, form)?
                .iter()
                .map(|u| u.bytes(form))
                .sum::<u64>()
                .div_ceil(SHARD)
                .max(1),
        };
        Ok(StockPlan { files: files(inventory, layouts, form, count)?, form })
    }

    /// Names and lengths.
    pub(super) fn sizes(&self) -> impl Iterator<Item = (&str, u64)> {
        self.files.iter().map(|f| (f.plan.name(), f.plan.bytes()))
    }

    /// Writes the files, and the index of a sharded Hugging Face checkpoint.
    pub(super) fn write(&self, dir: &Path, values: Values, meter: &mut Meter<'_>) -> Result<(), WriteError> {
        for file in &self.files {
            let mut writer = FileWriter::create(dir, &file.plan)?;
            let chunks: Vec<(&Entry, u32)> =
                file.entries.iter().flat_map(|e| (0..e.chunks()).map(move |chunk| (e, chunk))).collect();
            let make = |i: usize| chunks[i].0.make(chunks[i].1, values);
            in_order(chunks.len(), worker_threads(), make, |_, bytes: Vec<u8>| {
                writer.write(&bytes)?;
                meter.report(file.plan.name(), writer.written())
            })?;
            writer.finish()?;
            meter.close(file.plan.bytes());
        }
        sync_dir(dir)?;
        if self.form == Form::Hf && self.files.len() > 1 {
            let total: u64 = self.files.iter().flat_map(|f| &f.entries).map(|e| e.bytes).sum();
            let map: BTreeMap<&str, &str> = self
                .files
                .iter()
                .flat_map(|f| f.entries.iter().map(|e| (e.name.as_str(), f.plan.name())))
                .collect();
            let index = json!({"metadata": {"total_size": total}, "weight_map": map});
            write_atomic(dir, "model.safetensors.index.json", index.to_string().as_bytes())?;
        }
        Ok(())
    }
}

impl Entry {
    /// Pieces in which it is made, so that none is larger than a matrix or two.
    fn chunks(&self) -> u32 {
        match &self.content {
            Content::Matrix(..) => 1,
            Content::Stack(stack, _) => stack.spec.count,
        }
    }

    /// The bytes of one of them.
    fn make(&self, chunk: u32, values: Values) -> Result<Vec<u8>, WriteError> {
        match &self.content {
            Content::Matrix(matrix, piece) => matrix.bytes(*piece, values),
            Content::Stack(stack, parts) => stack.expert(parts, chunk, values),
        }
    }
}

impl Matrix {
    /// The bytes of a tensor that is made of it.
    fn bytes(&self, piece: Piece, values: Values) -> Result<Vec<u8>, WriteError> {
        let Matrix { name, role, layout } = self;
        let mut weights = Vec::new();
        if piece != Piece::Scales {
            weights.resize(layout.weight_bytes(), 0);
            values.weights(name, *role, *layout, &mut weights)?;
        }
        if piece == Piece::Weights {
            return Ok(weights);
        }
        let mut scales = vec![0; layout.scale_bytes()];
        values.scales(name, *role, *layout, &mut scales)?;
        if piece == Piece::Scales {
            return Ok(scales);
        }
        let stored = MatrixRef::new(*layout, &weights, &scales).map_err(WriteError::layout(name))?;
        let mut out = vec![0; layout.rows() * layout.cols() * 2];
        transcode(name, stored, Format::Bf16, &mut out, &mut [], 1)?;
        Ok(out)
    }
}
