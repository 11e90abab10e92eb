//! A small writer of GGUF files, straight from the format's description, for tests.
#![allow(dead_code, reason = "each test file uses its own part")]

use metaltail_container::gguf::{Array, Scalar, Scalars, Strings, TensorType, Text, Value, ValueKind};

/// A file to be.
#[derive(Clone, Debug)]
pub struct File {
    pub version: u32,
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<(String, TensorType, Vec<u64>)>,
    pub alignment: u64,
}

impl File {
    /// Without metadata and tensors.
    pub fn new() -> File {
        File { version: 3, metadata: Vec::new(), tensors: Vec::new(), alignment: 32 }
    }

    pub fn key(mut self, key: &str, value: Value) -> File {
        self.metadata.push((key.to_owned(), value));
        self
    }

    pub fn tensor(mut self, name: &str, kind: &str, dims: &[u64]) -> File {
        let kind = TensorType::all().find(|known| known.name() == kind).unwrap();
        self.tensors.push((name.to_owned(), kind, dims.to_vec()));
        self
    }

    /// A part of a set.
    pub fn split(self, number: u16, count: u16, tensors: i32) -> File {
        self.key("split.no", Value::Scalar(Scalar::U16(number)))
            .key("split.count", Value::Scalar(Scalar::U16(count)))
            .key("split.tensors.count", Value::Scalar(Scalar::I32(tensors)))
    }

    /// Bytes of one tensor.
    pub fn len(kind: TensorType, dims: &[u64]) -> u64 {
        dims.iter().product::<u64>() / kind.block_elements() * kind.block_bytes()
    }

    /// The whole file, tensors of zeros.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut out, key.as_bytes());
            out.extend(number(value.kind()).to_le_bytes());
            match value {
                Value::Scalar(scalar) => put(&mut out, *scalar),
                Value::String(text) => string(&mut out, &text.0),
                Value::Array(items) => array(&mut out, items),
            }
        }
        let mut offset = 0u64;
        for (name, kind, dims) in &self.tensors {
            string(&mut out, name.as_bytes());
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(kind.number().to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset = (offset + File::len(*kind, dims)).next_multiple_of(self.alignment);
        }
        if !self.tensors.is_empty() {
            let data = (out.len() as u64).next_multiple_of(self.alignment);
            out.resize((data + offset) as usize, 0);
        }
        out
    }
}

pub fn text(text: &str) -> Value {
    Value::String(Text(text.as_bytes().into()))
}

pub fn u32_value(number: u32) -> Value {
    Value::Scalar(Scalar::U32(number))
}

pub fn strings(texts: &[&str]) -> Value {
    let mut strings = Strings::default();
    texts.iter().for_each(|text| strings.push(text.as_bytes()));
    Value::Array(Array::Strings(strings))
}

pub fn scalars(kind: ValueKind, bytes: Vec<u8>) -> Array {
    Array::Scalars(Scalars::new(kind, bytes).unwrap())
}

fn number(kind: ValueKind) -> u32 {
    match kind {
        ValueKind::U8 => 0,
        ValueKind::I8 => 1,
        ValueKind::U16 => 2,
        ValueKind::I16 => 3,
        ValueKind::U32 => 4,
        ValueKind::I32 => 5,
        ValueKind::F32 => 6,
        ValueKind::Bool => 7,
        ValueKind::String => 8,
        ValueKind::Array => 9,
        ValueKind::U64 => 10,
        ValueKind::I64 => 11,
        ValueKind::F64 => 12,
    }
}

fn string(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

fn array(out: &mut Vec<u8>, items: &Array) {
    out.extend(number(items.kind()).to_le_bytes());
    out.extend((items.len() as u64).to_le_bytes());
    match items {
        Array::Scalars(scalars) => scalars.iter().for_each(|scalar| put(out, scalar)),
        Array::Strings(strings) => strings.iter().for_each(|text| string(out, text)),
        Array::Arrays(arrays) => arrays.iter().for_each(|items| array(out, items)),
    }
}

fn put(out: &mut Vec<u8>, scalar: Scalar) {
    match scalar {
        Scalar::U8(n) => out.extend(n.to_le_bytes()),
        Scalar::I8(n) => out.extend(n.to_le_bytes()),
        Scalar::U16(n) => out.extend(n.to_le_bytes()),
        Scalar::I16(n) => out.extend(n.to_le_bytes()),
        Scalar::U32(n) => out.extend(n.to_le_bytes()),
        Scalar::I32(n) => out.extend(n.to_le_bytes()),
        Scalar::F32(n) => out.extend(n.to_le_bytes()),
        Scalar::Bool(n) => out.push(n.into()),
        Scalar::U64(n) => out.extend(n.to_le_bytes()),
        Scalar::I64(n) => out.extend(n.to_le_bytes()),
        Scalar::F64(n) => out.extend(n.to_le_bytes()),
    }
}
