//! A checkpoint of one file, its tensors taken out and put back under other names and in other shapes.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

/// A tensor of bf16 numbers.
#[derive(Clone)]
pub struct Tensor {
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// Tensors by name.
pub type Tensors = BTreeMap<String, Tensor>;

impl Tensor {
    /// Bytes of one row, all dimensions but the first taken together.
    pub fn row(&self, row: usize) -> &[u8] {
        let len = self.bytes.len() / self.shape[0];
        &self.bytes[row * len..(row + 1) * len]
    }

    /// Rows of one or more tensors, one after another.
    pub fn of_rows<'a>(rows: impl Iterator<Item = &'a [u8]>, cols: usize) -> Tensor {
        let bytes = rows.collect::<Vec<_>>().concat();
        Tensor { shape: vec![bytes.len() / 2 / cols, cols], bytes }
    }
}

/// Tensors of `dir/model.safetensors`.
pub fn read(dir: &Path) -> Tensors {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let data = &bytes[8 + len..];
    header
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .map(|(name, entry)| {
            assert_eq!(entry["dtype"], "BF16");
            let at = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
            let shape = entry["shape"].as_array().unwrap().iter();
            let shape = shape.map(|dim| dim.as_u64().unwrap() as usize).collect();
            (name, Tensor { shape, bytes: data[at(0)..at(1)].to_vec() })
        })
        .collect()
}

/// Writes a checkpoint of these tensors and this configuration.
pub fn write(dir: &Path, config: &Value, tensors: &Tensors) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, tensor) in tensors {
        let start = data.len();
        data.extend_from_slice(&tensor.bytes);
        let entry = json!({"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, data.len()]});
        header.insert(name.clone(), entry);
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let file = [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat();
    std::fs::write(dir.join("model.safetensors"), file).unwrap();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}
