//! Small model directories, built by hand, for the tests of the reading side.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::fs;
use std::path::Path;

use metaltail_container::{ExpertLayerSpec, Inventory, Part, Role, TensorSpec};
use metaltail_quant::{Format, MatrixLayout, quantize};

/// Model width.
pub const HIDDEN: usize = 64;
/// Expert width.
pub const WIDTH: usize = 32;
/// Routed experts a layer.
pub const EXPERTS: u32 = 4;

/// A safetensors file in the making; tensors follow one another.
#[derive(Clone, Default)]
pub struct Shard {
    tensors: Vec<(String, String, Vec<u64>, Vec<u8>)>,
    metadata: Vec<(String, String)>,
}

impl Shard {
    pub fn tensor(&mut self, name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>) -> &mut Self {
        let shape = shape.iter().map(|&dim| dim as u64).collect();
        self.tensors.push((name.to_owned(), dtype.to_owned(), shape, bytes));
        self
    }

    pub fn meta(&mut self, key: &str, value: &str) -> &mut Self {
        self.metadata.push((key.to_owned(), value.to_owned()));
        self
    }

    pub fn remove(&mut self, keep: impl Fn(&str) -> bool) -> &mut Self {
        self.tensors.retain(|(name, ..)| keep(name));
        self
    }

    pub fn rename(&mut self, rename: impl Fn(&str) -> String) -> &mut Self {
        self.tensors.iter_mut().for_each(|(name, ..)| *name = rename(name));
        self
    }

    /// Sorts as the stock writers do: element type, then name.
    pub fn sort(&mut self) -> &mut Self {
        self.tensors.sort_by(|a, b| (&a.1, &a.0).cmp(&(&b.1, &b.0)));
        self
    }

    pub fn names(&self) -> Vec<String> {
        self.tensors.iter().map(|(name, ..)| name.clone()).collect()
    }

    /// Splits off the tensors for which `second` says so.
    pub fn split(&self, second: impl Fn(&str) -> bool) -> (Shard, Shard) {
        let (mut a, mut b) = (self.clone(), self.clone());
        a.remove(|name| !second(name));
        b.remove(&second);
        (a, b)
    }

    /// The file's bytes; data begins at a multiple of `align`.
    pub fn bytes(&self, align: usize) -> Vec<u8> {
        let mut header = serde_json::Map::new();
        if !self.metadata.is_empty() {
            let map: serde_json::Map<_, _> =
                self.metadata.iter().map(|(k, v)| (k.clone(), v.clone().into())).collect();
            header.insert("__metadata__".to_owned(), map.into());
        }
        let mut at = 0;
        for (name, dtype, shape, bytes) in &self.tensors {
            let end = at + bytes.len();
            let entry = serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]});
            assert!(header.insert(name.clone(), entry).is_none(), "{name} twice");
            at = end;
        }
        let mut json = serde_json::to_vec(&header).unwrap();
        json.resize((8 + json.len()).next_multiple_of(align) - 8, b' ');
        let mut file = (json.len() as u64).to_le_bytes().to_vec();
        file.extend(json);
        self.tensors.iter().for_each(|(.., bytes)| file.extend(bytes));
        file
    }

    pub fn write(&self, path: &Path) {
        fs::write(path, self.bytes(8)).unwrap();
    }
}

/// Values of a tensor, told apart by its name.
pub fn values(name: &str, len: usize) -> Vec<f32> {
    let seed = name.bytes().fold(1u32, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
    (0..len as u32)
        .map(|i| ((seed.wrapping_add(i.wrapping_mul(2_654_435_761)) >> 16) % 256) as f32 / 64.0 - 2.0)
        .collect()
}

/// Weight and scale bytes of the named tensor's values in a format.
pub fn stored(name: &str, layout: MatrixLayout) -> (Vec<u8>, Vec<u8>) {
    let (mut weights, mut scales) = (vec![0; layout.weight_bytes()], vec![0; layout.scale_bytes()]);
    if let Format::Gguf(_) = layout.format() {
        // Nothing is quantised to these; any bytes are blocks, and below 0x40 their f16 scales are finite.
        for (byte, value) in weights.iter_mut().zip(values(name, layout.weight_bytes())) {
            *byte = (value.abs() * 24.0) as u8;
        }
        return (weights, scales);
    }
    quantize(layout, &values(name, layout.rows() * layout.cols()), &mut weights, &mut scales).unwrap();
    (weights, scales)
}

fn spec(name: &str, rows: usize, cols: usize, role: Role, layer: Option<u32>) -> TensorSpec {
    TensorSpec { name: name.to_owned(), rows, cols, role, layer, optional: false }
}

/// A dense layer, `sparse` layers with experts and, if asked for, a draft layer.
pub fn inventory(sparse: u32, draft: bool) -> Inventory {
    let mut inventory = Inventory { family: "tiny".to_owned(), ..Inventory::default() };
    let tensors = &mut inventory.tensors;
    tensors.push(spec("model.embed_tokens.weight", 16, HIDDEN, Role::Embedding, None));
    tensors.push(spec("lm_head.weight", 16, HIDDEN, Role::Head, None));
    tensors.push(spec("model.norm.weight", 1, HIDDEN, Role::Norm, None));
    for layer in 0..=sparse + u32::from(draft) {
        let is_draft = layer > sparse;
        let begin = tensors.len();
        let name = |rest: &str| format!("model.layers.{layer}.{rest}");
        tensors.push(spec(&name("input_layernorm.weight"), 1, HIDDEN, Role::Norm, Some(layer)));
        tensors.push(spec(
            &name("self_attn.o_proj.weight"),
            HIDDEN,
            2 * HIDDEN,
            Role::Attention,
            Some(layer),
        ));
        if layer == 0 {
            tensors.push(spec(&name("mlp.up_proj.weight"), 128, HIDDEN, Role::DenseFfn, Some(layer)));
            continue;
        }
        tensors.push(spec(&name("mlp.gate.weight"), EXPERTS as usize, HIDDEN, Role::Router, Some(layer)));
        if is_draft {
            tensors.push(spec(&name("eh_proj.weight"), HIDDEN, 2 * HIDDEN, Role::Draft, Some(layer)));
            tensors[begin..].iter_mut().for_each(|spec| spec.optional = true);
        }
        inventory.experts.push(ExpertLayerSpec {
            layer,
            count: EXPERTS,
            hidden: HIDDEN,
            width: WIDTH,
            draft: is_draft,
            prefix: name("mlp.experts."),
            suffixes: [".gate_proj.weight", ".up_proj.weight", ".down_proj.weight"],
            stacked: None,
        });
    }
    inventory
}

/// Every matrix of an inventory: name, rows, columns, whether it belongs to an expert.
fn matrices(inventory: &Inventory) -> Vec<(String, usize, usize, Option<Role>)> {
    let mut all: Vec<_> =
        inventory.tensors.iter().map(|t| (t.name.clone(), t.rows, t.cols, Some(t.role))).collect();
    for layer in &inventory.experts {
        for expert in 0..layer.count {
            for part in Part::ALL {
                let (rows, cols) = layer.shape(part);
                all.push((layer.name(expert, part), rows, cols, None));
            }
        }
    }
    all
}

fn shape(rows: usize, cols: usize) -> Vec<usize> {
    if rows == 1 { vec![cols] } else { vec![rows, cols] }
}

/// The inventory as a Hugging Face checkpoint in bf16.
pub fn hf_shard(inventory: &Inventory) -> Shard {
    let mut shard = Shard::default();
    for (name, rows, cols, _) in matrices(inventory) {
        let (weights, _) = stored(&name, MatrixLayout::new(Format::Bf16, rows, cols).unwrap());
        shard.tensor(&name, "BF16", &shape(rows, cols), weights);
    }
    shard.sort();
    shard
}

/// The inventory as a colibrì directory: experts in `experts`, the rest int8 a row.
pub fn colibri_shard(inventory: &Inventory, experts: Format) -> Shard {
    let mut shard = Shard::default();
    for (name, rows, cols, role) in matrices(inventory) {
        let format = match role {
            None => experts,
            Some(role) if role.keeps_f32() => Format::F32,
            Some(_) => Format::Int8Row,
        };
        let (weights, scales) = stored(&name, MatrixLayout::new(format, rows, cols).unwrap());
        if format == Format::F32 {
            shard.tensor(&name, "F32", &shape(rows, cols), weights);
        } else {
            shard.tensor(&name, "U8", &[weights.len()], weights);
            shard.tensor(&format!("{name}.qs"), "F32", &[scales.len() / 4], scales);
        }
    }
    shard.sort();
    shard
}

/// A directory with a config.json and one file.
pub fn model_dir(shard: &Shard) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    config(dir.path());
    shard.write(&dir.path().join("model.safetensors"));
    dir
}

pub fn config(dir: &Path) {
    fs::write(dir.join("config.json"), r#"{"model_type": "tiny"}"#).unwrap();
}
