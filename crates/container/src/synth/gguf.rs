//! The GGUF form: one file with the names and keys of llama.cpp's own conversion, for the families whose
//! tensors it stores as checkpoints have them.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use super::values::Values;
use super::{Meter, SynthOptions, SynthReport, blocks, check_space, empty_directory, tokenizer};
use crate::convert::OnProgress;
use crate::gguf::{
    Array, GgufPlan, GgufTensorSpec, Scalar, Scalars, Strings, TensorType, Text, Value, ValueKind, written,
};
use crate::slab_writer::WriteError;
use crate::slab_writer::directory::NewDirs;
use crate::slab_writer::file::{FilePlan, FileWriter, PARTIAL, sync_dir};
use crate::slab_writer::parallel::{in_order, worker_threads};
use crate::{Inventory, Part, Role};

/// Bytes that one thread makes at a time.
const PIECE: u64 = 8 << 20;

/// The families, by `model_type` and by architecture.
const ARCHITECTURES: [(&str, &str); 2] = [("olmoe", "olmoe"), ("qwen3_moe", "qwen3moe")];

/// A file's tensor and what it is made of.
struct Tensor {
    spec: GgufTensorSpec,
    role: Role,
    /// Canonical names of the matrices that lie in it, one after another.
    matrices: Vec<String>,
}

/// Some rows of a matrix, made at once.
struct Piece<'t> {
    tensor: &'t Tensor,
    matrix: &'t str,
    /// Which piece of its matrix.
    number: u64,
    bytes: u64,
    /// What follows it: the padding behind a tensor's last piece.
    padding: &'static [u8],
}

/// The file that the GGUF form is written to.
pub fn gguf_file(destination: &Path) -> PathBuf {
    match destination.extension() == Some(OsStr::new("gguf")) {
        true => destination.to_owned(),
        false => destination.join("model.gguf"),
    }
}

/// Writes the file; what is not complete is removed again.
pub(super) fn write(
    destination: &Path,
    config: &Json,
    inventory: &Inventory,
    options: &SynthOptions,
    progress: OnProgress<'_>,
) -> Result<SynthReport, WriteError> {
    let path = gguf_file(destination);
    let tensors = tensors(inventory, options.blocks)?;
    let metadata = metadata(config, inventory, options.blocks)?;
    let specs: Vec<GgufTensorSpec> = tensors.iter().map(|tensor| tensor.spec.clone()).collect();
    let plan = GgufPlan::new(&metadata, &specs)?;
    let name = path.file_name().and_then(OsStr::to_str);
    let name = name.ok_or_else(|| WriteError::Synth("the name of a GGUF file must be UTF-8".to_owned()))?;
    let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let _made = match path == destination {
        true if fs::symlink_metadata(&path).is_ok() => return Err(WriteError::Exists { path }),
        true => NewDirs::make(parent)?,
        false => empty_directory(destination)?,
    };
    let file = FilePlan::new(name.to_owned(), plan.header().to_vec(), plan.data())?;
    check_space(parent, file.bytes())?;
    let pieces = pieces(&tensors, plan.tensors());
    let mut meter = Meter { progress, done: 0, total: file.bytes() };
    stream(parent, &file, &pieces, Values { seed: options.seed }, &mut meter)
        .inspect_err(|_| drop(fs::remove_file(parent.join(format!("{name}{PARTIAL}")))))?;
    Ok(SynthReport { files: 1, bytes: file.bytes() })
}

fn stream(
    dir: &Path,
    file: &FilePlan,
    pieces: &[Piece<'_>],
    values: Values,
    meter: &mut Meter<'_>,
) -> Result<(), WriteError> {
    let mut writer = FileWriter::create(dir, file)?;
    let make = |i: usize| pieces[i].make(values);
    in_order(pieces.len(), worker_threads(), make, |i, bytes: Vec<u8>| {
        writer.write(&bytes)?;
        writer.write(pieces[i].padding)?;
        meter.report(file.name(), writer.written())
    })?;
    writer.finish()?;
    sync_dir(dir)
}

impl Piece<'_> {
    fn make(&self, values: Values) -> Result<Vec<u8>, WriteError> {
        let Tensor { spec, role, .. } = self.tensor;
        let columns = spec.dims[0] as usize;
        let mut out = vec![0; self.bytes as usize];
        if role.keeps_f32() {
            // As in every other form.
            let rows = out.len() / (columns * 4);
            let layout = metaltail_quant::MatrixLayout::new(metaltail_quant::Format::F32, rows, columns);
            let layout = layout.map_err(WriteError::layout(self.matrix))?;
            values.weights(self.matrix, *role, layout, &mut out)?;
        } else {
            let rng = values.piece(self.matrix, self.number);
            blocks::fill(rng, spec.kind, *role, columns, &mut out);
        }
        Ok(out)
    }
}

/// Cuts tensors into whole rows of about [`PIECE`] bytes; what stays in f32 is small and is made whole.
fn pieces<'t>(tensors: &'t [Tensor], sizes: &[u64]) -> Vec<Piece<'t>> {
    let mut pieces = Vec::new();
    for (tensor, size) in tensors.iter().zip(sizes) {
        let matrix_bytes = size / tensor.matrices.len() as u64;
        let row = tensor.spec.dims[0] / tensor.spec.kind.block_elements() * tensor.spec.kind.block_bytes();
        let whole = tensor.role.keeps_f32() || row >= PIECE;
        let piece = if whole { matrix_bytes } else { PIECE / row * row };
        for matrix in &tensor.matrices {
            for number in 0..matrix_bytes.div_ceil(piece) {
                let bytes = piece.min(matrix_bytes - number * piece);
                pieces.push(Piece { tensor, matrix, number, bytes, padding: &[] });
            }
        }
        if let Some(last) = pieces.last_mut() {
            last.padding = GgufPlan::padding(*size);
        }
    }
    pieces
}

/// All tensors: those outside of layers, then layer by layer.
fn tensors(inventory: &Inventory, kind: TensorType) -> Result<Vec<Tensor>, WriteError> {
    if !blocks::makes(kind) {
        return Err(WriteError::Synth(format!("no blocks of type {kind} can be made")));
    }
    let mut all = Vec::new();
    for spec in &inventory.tensors {
        let (rows, columns) = (spec.rows as u64, spec.cols as u64);
        let f32 = rows == 1 || spec.role.keeps_f32();
        let tensor = GgufTensorSpec {
            name: name(&spec.name)?,
            kind: if f32 { TensorType::F32 } else { kind },
            dims: if rows == 1 { vec![columns] } else { vec![columns, rows] },
        };
        all.push((spec.layer, Tensor { spec: tensor, role: spec.role, matrices: vec![spec.name.clone()] }));
    }
    for spec in &inventory.experts {
        for part in Part::ALL {
            let (rows, columns) = spec.shape(part);
            let tensor = GgufTensorSpec {
                name: name(&spec.name(0, part))?,
                kind,
                dims: vec![columns as u64, rows as u64, spec.count.into()],
            };
            let matrices = (0..spec.count).map(|expert| spec.name(expert, part)).collect();
            all.push((Some(spec.layer), Tensor { spec: tensor, role: Role::DenseFfn, matrices }));
        }
    }
    all.sort_by_key(|(layer, _)| *layer);
    Ok(all.into_iter().map(|(_, tensor)| tensor).collect())
}

/// Where a canonical tensor goes.
fn name(canonical: &str) -> Result<String, WriteError> {
    written(canonical).ok_or_else(|| WriteError::Synth(format!("GGUF has no name for {canonical}")))
}

// ---- metadata ----

fn number(n: u32) -> Value {
    Value::Scalar(Scalar::U32(n))
}

fn text(string: &str) -> Value {
    Value::String(Text(string.as_bytes().into()))
}

/// The keys of the model and its tokenizer.
fn metadata(
    config: &Json,
    inventory: &Inventory,
    kind: TensorType,
) -> Result<Vec<(String, Value)>, WriteError> {
    let known = ARCHITECTURES.iter().find(|(family, _)| *family == inventory.family);
    let Some((_, architecture)) = known else {
        return Err(WriteError::Synth(format!(
            "the GGUF form is made of the shapes olmoe and qwen3-moe, not of the family {}",
            inventory.family
        )));
    };
    let get = |key: &str| config.get(key).and_then(Json::as_u64).and_then(|n| u32::try_from(n).ok());
    let float =
        |key: &str| config.get(key).and_then(Json::as_f64).map(|n| Value::Scalar(Scalar::F32(n as f32)));
    let head = get("head_dim").map(number);
    let keys = [
        ("block_count", get("num_hidden_layers").map(number)),
        ("context_length", get("max_position_embeddings").map(number)),
        ("embedding_length", get("hidden_size").map(number)),
        ("feed_forward_length", get("intermediate_size").map(number)),
        ("expert_feed_forward_length", get("moe_intermediate_size").map(number)),
        ("attention.head_count", get("num_attention_heads").map(number)),
        ("attention.head_count_kv", get("num_key_value_heads").map(number)),
        ("attention.key_length", head.clone()),
        ("attention.value_length", head),
        ("attention.layer_norm_rms_epsilon", float("rms_norm_eps")),
        ("rope.freq_base", float("rope_theta")),
        ("expert_count", get("num_experts").map(number)),
        ("expert_used_count", get("num_experts_per_tok").map(number)),
        ("vocab_size", get("vocab_size").map(number)),
    ];
    let mut all = vec![
        ("general.architecture".to_owned(), text(architecture)),
        ("general.type".to_owned(), text("model")),
        ("general.name".to_owned(), text(&format!("synthetic {}", inventory.family))),
        ("general.quantization_version".to_owned(), number(2)),
    ];
    all.extend(file_type(kind).map(|n| ("general.file_type".to_owned(), number(n))));
    all.extend(keys.into_iter().filter_map(|(key, value)| Some((format!("{architecture}.{key}"), value?))));
    all.extend(tokenizer_keys(get("vocab_size").unwrap_or(0)));
    Ok(all)
}

/// The file type of a model that is all of one type; of the K types, the small mixture's.
fn file_type(kind: TensorType) -> Option<u32> {
    let numbers = [
        ("F32", 0),
        ("F16", 1),
        ("Q4_0", 2),
        ("Q4_1", 3),
        ("Q8_0", 7),
        ("Q5_0", 8),
        ("Q5_1", 9),
        ("Q2_K", 10),
        ("Q3_K", 11),
        ("Q4_K", 14),
        ("Q5_K", 16),
        ("Q6_K", 18),
        ("IQ4_NL", 25),
        ("IQ4_XS", 30),
        ("BF16", 32),
        ("MXFP4", 38),
    ];
    numbers.iter().find(|(name, _)| *name == kind.name()).map(|(_, number)| *number)
}

/// Byte-level tokens without merges, so that every text can be encoded; ids behind them are unused.
fn tokenizer_keys(vocabulary: u32) -> Vec<(String, Value)> {
    const NORMAL: i32 = 1;
    const CONTROL: i32 = 3;
    const UNUSED: i32 = 5;
    let (mut tokens, mut kinds) = (Strings::default(), Vec::new());
    let known = tokenizer::tokens().map(|(token, special)| (token, if special { CONTROL } else { NORMAL }));
    let unused = (0u32..).map(|id| (format!("[PAD{id}]"), UNUSED));
    for (token, kind) in known.chain(unused).take(vocabulary as usize) {
        tokens.push(token.as_bytes());
        kinds.extend(kind.to_le_bytes());
    }
    let kinds = Scalars::new(ValueKind::I32, kinds).map(|kinds| Value::Array(Array::Scalars(kinds)));
    let [end, ..] = tokenizer::ASSISTANT_STOPS;
    let keys = [
        ("model", Some(text("gpt2"))),
        ("pre", Some(text("gpt-2"))),
        ("tokens", Some(Value::Array(Array::Strings(tokens)))),
        ("token_type", kinds),
        ("merges", Some(Value::Array(Array::Strings(Strings::default())))),
        ("eos_token_id", Some(number(end))),
        ("padding_token_id", Some(number(tokenizer::PAD))),
    ];
    let keys = keys.into_iter().filter_map(|(key, value)| Some((format!("tokenizer.ggml.{key}"), value?)));
    keys.chain([("tokenizer.chat_template".to_owned(), text(tokenizer::CHAT_TEMPLATE))]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_rows_and_make_up_every_tensor() {
        let tensor = |kind: &str, dims: &[u64], role, matrices: usize| {
            let kind = TensorType::from_name(kind).unwrap();
            let spec = GgufTensorSpec { name: "t".to_owned(), kind, dims: dims.to_vec() };
            Tensor { spec, role, matrices: (0..matrices).map(|m| format!("m{m}")).collect() }
        };
        let tensors = [
            tensor("Q4_0", &[2048, 50_304], Role::Embedding, 1),
            tensor("Q6_K", &[256, 3, 5], Role::DenseFfn, 5),
            tensor("F32", &[2048, 4096], Role::Router, 1),
            tensor("Q5_0", &[32, 3], Role::Attention, 1),
        ];
        let sizes: Vec<u64> = tensors.iter().map(|tensor| tensor.spec.bytes().unwrap()).collect();
        let pieces = pieces(&tensors, &sizes);
        for (tensor, size) in tensors.iter().zip(&sizes) {
            let own: Vec<&Piece> = pieces.iter().filter(|piece| std::ptr::eq(piece.tensor, tensor)).collect();
            assert_eq!(own.iter().map(|piece| piece.bytes).sum::<u64>(), *size);
            let row = size / tensor.spec.dims[1..].iter().product::<u64>();
            assert!(own.iter().all(|piece| piece.bytes % row == 0));
            let numbered: Vec<(&str, u64)> = own.iter().map(|piece| (piece.matrix, piece.number)).collect();
            assert!(numbered.is_sorted() && numbered.windows(2).all(|two| two[0] != two[1]), "{numbered:?}");
            let (last, before) = own.split_last().unwrap();
            assert!(before.iter().all(|piece| piece.padding.is_empty()));
            assert!((size + last.padding.len() as u64).is_multiple_of(32));
        }
        let counts = tensors.each_ref().map(|t| pieces.iter().filter(|p| std::ptr::eq(p.tensor, t)).count());
        assert_eq!(counts, [7, 5, 1, 1]);
    }
}
