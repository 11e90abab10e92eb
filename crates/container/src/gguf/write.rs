//! The header of a GGUF file to be written, with the place of every tensor.
//!
//! [`GgufPlan::new`] checks every size before a byte is written; what [`parse_gguf`](super::parse_gguf)
//! reads of the header is what was given.

use super::parse::{DIMENSIONS_CAP, NAME_CAP};
use super::types::TensorType;
use super::value::{Array, Scalar, Value};
use crate::convert::WriteError;

/// Version of the format that is written.
const VERSION: u32 = 3;
/// Tensors begin at multiples of this, as readers assume where `general.alignment` is absent.
const ALIGNMENT: u64 = 32;

/// A tensor that a file is to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensorSpec {
    /// Its name.
    pub name: String,
    /// Element type.
    pub kind: TensorType,
    /// Dimensions, the fastest first: `[columns, rows, experts]`.
    pub dims: Vec<u64>,
}

impl GgufTensorSpec {
    /// Bytes of its data, without padding.
    ///
    /// # Errors
    /// No dimension, or more than four, one that is zero, a row that is no whole number of blocks, more
    /// than 2^64 bytes.
    pub fn bytes(&self) -> Result<u64, WriteError> {
        let refuse = |reason: String| WriteError::GgufTensor { tensor: self.name.clone(), reason };
        let (elements, block) = (self.kind.block_elements(), self.kind.block_bytes());
        let Some((columns, rest)) = self.dims.split_first() else {
            return Err(refuse("it has no dimension".to_owned()));
        };
        if self.dims.len() > DIMENSIONS_CAP as usize {
            return Err(refuse(format!("{} dimensions, at most {DIMENSIONS_CAP}", self.dims.len())));
        }
        if self.dims.contains(&0) {
            return Err(refuse("a dimension is 0".to_owned()));
        }
        if !columns.is_multiple_of(elements) {
            return Err(refuse(format!(
                "rows of {columns} values, which are no whole number of the {elements} that a block of {} has",
                self.kind
            )));
        }
        let row = (columns / elements).checked_mul(block);
        rest.iter()
            .try_fold(row, |bytes, dim| Some(bytes?.checked_mul(*dim)))
            .flatten()
            .ok_or_else(|| refuse("more than 2^64 bytes".to_owned()))
    }
}

/// A file whose every byte position is fixed.
#[derive(Clone, Debug)]
pub struct GgufPlan {
    header: Vec<u8>,
    /// Bytes of each tensor's data.
    tensors: Vec<u64>,
    data: u64,
}

impl GgufPlan {
    /// Plans a file of these keys and tensors, in their order.
    ///
    /// # Errors
    /// A tensor without a size ([`GgufTensorSpec::bytes`]), a key or name that is empty or too long,
    /// sizes past 64 bits. Names that occur twice are the caller's fault and are not looked for.
    pub fn new(metadata: &[(String, Value)], tensors: &[GgufTensorSpec]) -> Result<GgufPlan, WriteError> {
        let mut header = b"GGUF".to_vec();
        header.extend(VERSION.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((metadata.len() as u64).to_le_bytes());
        for (key, value) in metadata {
            name(&mut header, key)?;
            header.extend((value.kind() as u32).to_le_bytes());
            put(&mut header, value);
        }
        let (mut sizes, mut offset) = (Vec::with_capacity(tensors.len()), 0u64);
        for tensor in tensors {
            let bytes = tensor.bytes()?;
            name(&mut header, &tensor.name)?;
            header.extend((tensor.dims.len() as u32).to_le_bytes());
            for dim in &tensor.dims {
                header.extend(dim.to_le_bytes());
            }
            header.extend(tensor.kind.number().to_le_bytes());
            header.extend(offset.to_le_bytes());
            let end = bytes.checked_next_multiple_of(ALIGNMENT).and_then(|len| offset.checked_add(len));
            offset = end.ok_or_else(|| WriteError::Overflow { file: tensor.name.clone() })?;
            sizes.push(bytes);
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
        Ok(GgufPlan { header, tensors: sizes, data: offset })
    }

    /// The header's bytes, padded to where the data begins.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Bytes of each tensor's data, in their order.
    pub fn tensors(&self) -> &[u64] {
        &self.tensors
    }

    /// Bytes behind the header, the padding of each tensor included.
    pub fn data(&self) -> u64 {
        self.data
    }

    /// Zeros that follow the data of a tensor of `bytes`.
    pub fn padding(bytes: u64) -> &'static [u8] {
        const ZEROS: [u8; ALIGNMENT as usize] = [0; ALIGNMENT as usize];
        &ZEROS[..(bytes.wrapping_neg() % ALIGNMENT) as usize]
    }
}

/// A key or tensor name.
fn name(out: &mut Vec<u8>, name: &str) -> Result<(), WriteError> {
    if name.is_empty() || name.len() as u64 > NAME_CAP {
        let reason = format!("names have 1 to {NAME_CAP} bytes, this has {}", name.len());
        return Err(WriteError::GgufTensor { tensor: name.chars().take(64).collect(), reason });
    }
    text(out, name.as_bytes());
    Ok(())
}

fn text(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

fn put(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Scalar(scalar) => put_scalar(out, *scalar),
        Value::String(string) => text(out, &string.0),
        Value::Array(items) => put_array(out, items),
    }
}

fn put_scalar(out: &mut Vec<u8>, scalar: Scalar) {
    match scalar {
        Scalar::U8(n) => out.push(n),
        Scalar::I8(n) => out.push(n.cast_unsigned()),
        Scalar::U16(n) => out.extend(n.to_le_bytes()),
        Scalar::I16(n) => out.extend(n.to_le_bytes()),
        Scalar::U32(n) => out.extend(n.to_le_bytes()),
        Scalar::I32(n) => out.extend(n.to_le_bytes()),
        Scalar::F32(n) => out.extend(n.to_le_bytes()),
        Scalar::Bool(yes) => out.push(yes.into()),
        Scalar::U64(n) => out.extend(n.to_le_bytes()),
        Scalar::I64(n) => out.extend(n.to_le_bytes()),
        Scalar::F64(n) => out.extend(n.to_le_bytes()),
    }
}

fn put_array(out: &mut Vec<u8>, items: &Array) {
    out.extend((items.kind() as u32).to_le_bytes());
    out.extend((items.len() as u64).to_le_bytes());
    match items {
        Array::Scalars(scalars) => scalars.iter().for_each(|scalar| put_scalar(out, scalar)),
        Array::Strings(strings) => strings.iter().for_each(|string| text(out, string)),
        Array::Arrays(arrays) => arrays.iter().for_each(|array| put_array(out, array)),
    }
}
