//! The header of one file: what it claims is checked against the file's length before anything is
//! allocated for it.

use std::collections::HashSet;
use std::io::Read;

use super::error::GgufError;
use super::types::TensorType;
use super::value::{Array, Scalar, Scalars, Strings, Text, Value, ValueKind};

/// Longest header (metadata and tensor infos) that is accepted, in bytes.
pub const HEADER_CAP: u64 = 128 << 20;
/// Most metadata keys that are accepted.
pub const KEYS_CAP: u64 = 1 << 16;
/// Most tensors of a file that are accepted.
pub const TENSORS_CAP: u64 = 1 << 20;
/// Longest key or tensor name that is accepted, in bytes.
pub const NAME_CAP: u64 = 65_535;
/// Deepest nesting of arrays that is accepted; one that holds no arrays has depth 1.
pub const DEPTH_CAP: u32 = 4;
/// Most dimensions of a tensor.
pub(super) const DIMENSIONS_CAP: u32 = 4;
/// Where tensors begin when the file does not say.
const DEFAULT_ALIGNMENT: u64 = 32;
/// The key that says so.
const ALIGNMENT: &str = "general.alignment";

/// Fewest bytes of a metadata entry: length and one byte of the key, kind, a value of one byte.
const ENTRY_MIN: u64 = 8 + 1 + 4 + 1;
/// Fewest bytes of a tensor info: length and one byte of the name, dimensions, type, offset.
const INFO_MIN: u64 = 8 + 1 + 4 + 4 + 8;
/// Fewest bytes of an array: kind and length.
const ARRAY_MIN: u64 = 4 + 8;

/// One tensor of a file; its bytes are known to lie inside the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// Its name.
    pub name: String,
    /// Element type.
    pub kind: TensorType,
    /// Dimensions, the fastest first: `[columns, rows, experts]`. None for a scalar.
    pub dims: Box<[u64]>,
    /// Offset of its first byte in the file (not in the data section).
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl GgufTensor {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        // Checked when it was read.
        self.dims.iter().product()
    }
}

/// A checked header.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufHeader {
    /// Version of the format: 2 or 3.
    pub version: u32,
    /// Keys and values, in the order of the file.
    pub metadata: Vec<(String, Value)>,
    /// Tensors in the order of their offsets.
    pub tensors: Vec<GgufTensor>,
    /// Offsets of tensors are multiples of this.
    pub alignment: u64,
    /// Offset of the data section in the file.
    pub data_start: u64,
}

impl GgufHeader {
    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }
}

/// Reads the header at the beginning of a file of `file_len` bytes; what follows is left unread.
///
/// Many small reads are made: hand over a buffered reader.
///
/// # Errors
/// Whatever is wrong with the header, and reads that fail.
pub fn parse_gguf(source: impl Read, file_len: u64) -> Result<GgufHeader, GgufError> {
    let mut cursor = Cursor { source, at: 0, file_len };
    let version = cursor.version()?;
    let tensors = cursor.count("tensors", TENSORS_CAP)?;
    let keys = cursor.count("metadata keys", KEYS_CAP)?;
    cursor.room("the metadata", keys.saturating_mul(ENTRY_MIN))?;
    let metadata = cursor.metadata(keys)?;
    let alignment = alignment(&metadata)?;
    cursor.room("the tensor infos", tensors.saturating_mul(INFO_MIN))?;
    let infos = cursor.infos(tensors)?;
    // The header's end is at most HEADER_CAP and the alignment at most 2^31.
    let data_start = cursor.at.next_multiple_of(alignment);
    let tensors = place(infos, alignment, data_start, file_len)?;
    Ok(GgufHeader { version, metadata, tensors, alignment, data_start })
}

/// A tensor info as written.
struct Info {
    name: String,
    kind: TensorType,
    dims: Box<[u64]>,
    offset: u64,
}

/// A metadata key and, for messages, its value in words.
struct Field<'a> {
    key: &'a str,
    what: String,
}

struct Cursor<R> {
    source: R,
    at: u64,
    file_len: u64,
}

impl<R: Read> Cursor<R> {
    /// Refuses what takes `wanted` more bytes than the file has, or passes the cap.
    fn room(&self, what: &str, wanted: u64) -> Result<(), GgufError> {
        let (what, at) = (|| what.to_owned(), self.at);
        let got = self.file_len.saturating_sub(at);
        if wanted > got {
            return Err(GgufError::PastEnd { what: what(), at, wanted, got });
        }
        if wanted > HEADER_CAP.saturating_sub(at) {
            return Err(GgufError::TooLarge { what: what(), at, wanted, cap: HEADER_CAP });
        }
        Ok(())
    }

    fn bytes(&mut self, what: &str, wanted: u64) -> Result<Vec<u8>, GgufError> {
        self.room(what, wanted)?;
        let mut bytes = vec![0; wanted as usize];
        self.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        self.room(what, N as u64)?;
        let mut bytes = [0; N];
        self.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, what: &str, bytes: &mut [u8]) -> Result<(), GgufError> {
        let read = self.source.read_exact(bytes);
        read.map_err(|source| GgufError::Read { what: what.to_owned(), at: self.at, source })?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn version(&mut self) -> Result<u32, GgufError> {
        let magic: [u8; 4] = self.array("the magic number")?;
        match &magic {
            b"GGUF" => {}
            b"FUGG" => return Err(GgufError::BigEndian),
            _ => return Err(GgufError::Magic { got: String::from_utf8_lossy(&magic).into_owned() }),
        }
        match self.u32("the version")? {
            version @ 2..=3 => Ok(version),
            // A small version the other way round: its low half is empty.
            swapped if swapped != 0 && swapped & 0xffff == 0 => Err(GgufError::BigEndian),
            got => Err(GgufError::Version { got }),
        }
    }

    fn count(&mut self, what: &'static str, cap: u64) -> Result<u64, GgufError> {
        match self.u64(what)? {
            got if got > cap => Err(GgufError::TooMany { what, got, cap }),
            got => Ok(got),
        }
    }

    /// The name of key or tensor `number`, which none before it has.
    fn name(
        &mut self,
        what: &'static str,
        number: u64,
        seen: &mut HashSet<String>,
    ) -> Result<String, GgufError> {
        let wrong = |got: String| GgufError::Name { what, number, got };
        let place = format!("the name of {what} {number}");
        let len = self.u64(&place)?;
        if len == 0 || len > NAME_CAP {
            return Err(wrong(format!("has {len} bytes, wanted 1 to {NAME_CAP}")));
        }
        let bytes = self.bytes(&place, len)?;
        let name = String::from_utf8(bytes).map_err(|error| {
            wrong(format!("is not UTF-8: {:?}", String::from_utf8_lossy(error.as_bytes())))
        })?;
        if !seen.insert(name.clone()) {
            return Err(GgufError::Duplicate { what, name });
        }
        Ok(name)
    }

    fn metadata(&mut self, keys: u64) -> Result<Vec<(String, Value)>, GgufError> {
        let mut seen = HashSet::new();
        let mut metadata = Vec::new();
        for number in 0..keys {
            let key = self.name("metadata key", number, &mut seen)?;
            let value = self.value(&key)?;
            metadata.push((key, value));
        }
        Ok(metadata)
    }

    fn kind(&mut self, field: &Field<'_>) -> Result<ValueKind, GgufError> {
        let got = self.u32(&field.what)?;
        ValueKind::from_number(got).ok_or_else(|| GgufError::ValueKind { key: field.key.to_owned(), got })
    }

    fn value(&mut self, key: &str) -> Result<Value, GgufError> {
        let field = Field { key, what: format!("the value of {key:?}") };
        let kind = self.kind(&field)?;
        match kind.width() {
            Some(width) => {
                let bytes = self.bytes(&field.what, width as u64)?;
                // The width is the kind's, so that only a bool can be wrong.
                let scalar = Scalar::from_le_bytes(kind, &bytes);
                scalar.map(Value::Scalar).ok_or_else(|| GgufError::Bool { key: key.to_owned() })
            }
            None if kind == ValueKind::String => {
                let len = self.u64(&field.what)?;
                Ok(Value::String(Text(self.bytes(&field.what, len)?.into_boxed_slice())))
            }
            None => self.items(&field, 1).map(Value::Array),
        }
    }

    /// An array at this depth, from the kind of its items on.
    fn items(&mut self, field: &Field<'_>, depth: u32) -> Result<Array, GgufError> {
        if depth > DEPTH_CAP {
            return Err(GgufError::Depth { key: field.key.to_owned(), cap: DEPTH_CAP });
        }
        let kind = self.kind(field)?;
        let len = self.u64(&field.what)?;
        if let Some(width) = kind.width() {
            let bytes = self.bytes(&field.what, len.saturating_mul(width as u64))?;
            return Scalars::new(kind, bytes)
                .map(Array::Scalars)
                .ok_or_else(|| GgufError::Bool { key: field.key.to_owned() });
        }
        if kind == ValueKind::String {
            self.room(&field.what, len.saturating_mul(8))?;
            let mut strings = Strings::default();
            for _ in 0..len {
                let len = self.u64(&field.what)?;
                strings.push(&self.bytes(&field.what, len)?);
            }
            return Ok(Array::Strings(strings));
        }
        self.room(&field.what, len.saturating_mul(ARRAY_MIN))?;
        let mut arrays = Vec::new();
        for _ in 0..len {
            arrays.push(self.items(field, depth + 1)?);
        }
        Ok(Array::Arrays(arrays))
    }

    fn infos(&mut self, tensors: u64) -> Result<Vec<Info>, GgufError> {
        let mut seen = HashSet::new();
        let mut infos = Vec::new();
        for number in 0..tensors {
            let tensor = self.name("tensor", number, &mut seen)?;
            let what = format!("the info of tensor {tensor:?}");
            let got = self.u32(&what)?;
            if got > DIMENSIONS_CAP {
                return Err(GgufError::Dimensions { tensor, got, cap: DIMENSIONS_CAP });
            }
            let dims = (0..got).map(|_| self.u64(&what)).collect::<Result<_, _>>()?;
            let number = self.u32(&what)?;
            let Some(kind) = TensorType::from_number(number) else {
                return Err(GgufError::Type { tensor, got: number });
            };
            let offset = self.u64(&what)?;
            infos.push(Info { name: tensor, kind, dims, offset });
        }
        Ok(infos)
    }
}

/// `general.alignment`: a power of two.
fn alignment(metadata: &[(String, Value)]) -> Result<u64, GgufError> {
    let Some((_, value)) = metadata.iter().find(|(key, _)| key == ALIGNMENT) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match value {
        Value::Scalar(Scalar::U32(alignment)) if alignment.is_power_of_two() => Ok((*alignment).into()),
        _ => Err(GgufError::value(ALIGNMENT, "a power of two (uint32)", value)),
    }
}

/// Finds each tensor its bytes; they lie inside the file, aligned, and no two share any.
fn place(
    infos: Vec<Info>,
    alignment: u64,
    data_start: u64,
    file_len: u64,
) -> Result<Vec<GgufTensor>, GgufError> {
    let mut tensors = Vec::with_capacity(infos.len());
    for info in infos {
        let len = info.bytes()?;
        let Info { name: tensor, kind, dims, offset } = info;
        if !offset.is_multiple_of(alignment) {
            return Err(GgufError::Unaligned { tensor, wanted: alignment, got: offset });
        }
        let begin = data_start.checked_add(offset);
        let end = begin.and_then(|begin| begin.checked_add(len)).filter(|end| *end <= file_len);
        match (begin, end) {
            (Some(offset), Some(_)) => tensors.push(GgufTensor { name: tensor, kind, dims, offset, len }),
            _ => {
                let wanted = data_start.saturating_add(offset).saturating_add(len);
                return Err(GgufError::TensorPastEnd { tensor, wanted, got: file_len });
            }
        }
    }
    tensors.sort_by_key(|tensor| tensor.offset);
    for (before, tensor) in tensors.iter().zip(tensors.iter().skip(1)) {
        let end = before.offset + before.len;
        if tensor.offset < end {
            return Err(GgufError::Overlap {
                tensor: tensor.name.clone(),
                before: before.name.clone(),
                wanted: end,
                got: tensor.offset,
            });
        }
    }
    Ok(tensors)
}

impl Info {
    /// Bytes of the tensor: whole blocks in every row.
    fn bytes(&self) -> Result<u64, GgufError> {
        let wrong =
            |reason| GgufError::Shape { tensor: self.name.clone(), shape: self.dims.to_vec(), reason };
        if self.dims.contains(&0) {
            return Err(wrong("has no elements"));
        }
        let elements = self.dims.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim));
        let elements = elements.ok_or_else(|| wrong("has more elements than 64 bits count"))?;
        let (row, block) = (self.dims.first().copied().unwrap_or(1), self.kind.block_elements());
        if !row.is_multiple_of(block) {
            return Err(GgufError::Row {
                tensor: self.name.clone(),
                kind: self.kind,
                wanted: block,
                got: row,
            });
        }
        let bytes = (elements / block).checked_mul(self.kind.block_bytes());
        bytes.ok_or_else(|| wrong("has more bytes than 64 bits count"))
    }
}
