//! The safetensors header: a strict parser with a typed refusal for every fault.
//!
//! A file is a little-endian `u64` header length, that many bytes of JSON, and the data.
//! The JSON text is read by `serde_json`; everything it claims is checked here against the
//! file's length before anybody allocates or reads a tensor.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use thiserror::Error;

/// Longest header that is accepted, in bytes.
pub const HEADER_CAP: u64 = 512 << 20;

/// Key of the header's string-to-string map.
const METADATA: &str = "__metadata__";

/// Element types of safetensors whose width is a whole number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each variant is the format's own name for the type")]
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    U16,
    I16,
    F16,
    Bf16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

impl Dtype {
    /// Bytes of one element.
    pub fn width(self) -> u64 {
        match self {
            Dtype::Bool | Dtype::U8 | Dtype::I8 | Dtype::F8E4M3 | Dtype::F8E5M2 | Dtype::F8E8M0 => 1,
            Dtype::U16 | Dtype::I16 | Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::U32 | Dtype::I32 | Dtype::F32 => 4,
            Dtype::U64 | Dtype::I64 | Dtype::F64 => 8,
        }
    }

    /// Name as written in headers.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bool => "BOOL",
            Dtype::U8 => "U8",
            Dtype::I8 => "I8",
            Dtype::F8E4M3 => "F8_E4M3",
            Dtype::F8E5M2 => "F8_E5M2",
            Dtype::F8E8M0 => "F8_E8M0",
            Dtype::U16 => "U16",
            Dtype::I16 => "I16",
            Dtype::F16 => "F16",
            Dtype::Bf16 => "BF16",
            Dtype::U32 => "U32",
            Dtype::I32 => "I32",
            Dtype::F32 => "F32",
            Dtype::U64 => "U64",
            Dtype::I64 => "I64",
            Dtype::F64 => "F64",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dtype {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        Ok(match name {
            "BOOL" => Dtype::Bool,
            "U8" => Dtype::U8,
            "I8" => Dtype::I8,
            "F8_E4M3" | "F8_E4M3FN" => Dtype::F8E4M3,
            "F8_E5M2" => Dtype::F8E5M2,
            "F8_E8M0" => Dtype::F8E8M0,
            "U16" => Dtype::U16,
            "I16" => Dtype::I16,
            "F16" => Dtype::F16,
            "BF16" => Dtype::Bf16,
            "U32" => Dtype::U32,
            "I32" => Dtype::I32,
            "F32" => Dtype::F32,
            "U64" => Dtype::U64,
            "I64" => Dtype::I64,
            "F64" => Dtype::F64,
            _ => return Err(()),
        })
    }
}

/// One tensor of a file; its bytes are known to lie inside the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: Dtype,
    /// Shape as stored.
    pub shape: Box<[u64]>,
    /// Offset of its first byte in the file (not in the data section).
    pub offset: u64,
    /// Length in bytes: elements × width.
    pub len: u64,
}

/// A checked header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Tensors in the order of their offsets.
    pub tensors: Vec<(String, TensorInfo)>,
    /// The `__metadata__` map.
    pub metadata: BTreeMap<String, String>,
    /// Offset of the data section in the file.
    pub data_start: u64,
}

/// Why a header is refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file has no room for the length field.
    #[error("the file has {got} bytes, fewer than the 8 of a safetensors length field")]
    TooShort {
        /// Length of the file.
        got: u64,
    },
    /// The length field asks for more than the cap.
    #[error("the header claims {got} bytes, more than the cap of {cap}")]
    TooLarge {
        /// [`HEADER_CAP`].
        cap: u64,
        /// Claimed length.
        got: u64,
    },
    /// The header reaches past the end of the file.
    #[error("the header claims {wanted} bytes but only {got} follow the length field")]
    Truncated {
        /// Claimed length.
        wanted: u64,
        /// Bytes after the length field.
        got: u64,
    },
    /// Not the JSON that the format asks for.
    #[error("the header is not the JSON that safetensors asks for: {0}")]
    Json(serde_json::Error),
    /// A name occurs twice.
    #[error("{name:?} occurs twice in the header")]
    Duplicate {
        /// Tensor name or metadata key.
        name: String,
    },
    /// An element type that is not known.
    #[error("tensor {tensor:?} has the unknown element type {got:?}")]
    Dtype {
        /// Tensor name.
        tensor: String,
        /// Type as written.
        got: String,
    },
    /// The product of a shape, in bytes, passes 64 bits.
    #[error("tensor {tensor:?} has the shape {shape:?}, whose size overflows 64 bits")]
    Overflow {
        /// Tensor name.
        tensor: String,
        /// Shape as written.
        shape: Vec<u64>,
    },
    /// `data_offsets` does not span elements × width bytes.
    #[error("tensor {tensor:?}: {dtype} of shape {shape:?} takes {wanted} bytes, but its offsets span {got}")]
    Span {
        /// Tensor name.
        tensor: String,
        /// Element type.
        dtype: Dtype,
        /// Shape as written.
        shape: Vec<u64>,
        /// Elements × width.
        wanted: u64,
        /// End minus begin.
        got: u64,
    },
    /// `data_offsets` runs backwards.
    #[error("tensor {tensor:?} ends at {end}, before it begins at {begin}")]
    Backwards {
        /// Tensor name.
        tensor: String,
        /// First offset.
        begin: u64,
        /// Second offset.
        end: u64,
    },
    /// A tensor reaches past the end of the file.
    #[error(
        "tensor {tensor:?} ends at byte {wanted} of the data, but the file holds {got}: it is cut short, fetch it again"
    )]
    PastEnd {
        /// Tensor name.
        tensor: String,
        /// Its end in the data section.
        wanted: u64,
        /// Bytes in the data section.
        got: u64,
    },
    /// Tensors overlap, or bytes between them belong to none.
    #[error("tensor {tensor:?} begins at byte {got} of the data, but the one before it ends at {wanted}")]
    NotAdjacent {
        /// Tensor name.
        tensor: String,
        /// End of the tensor before it.
        wanted: u64,
        /// Its own begin.
        got: u64,
    },
    /// Bytes after the last tensor.
    #[error("the tensors end at byte {wanted} of the data, but the file holds {got}")]
    Trailing {
        /// End of the last tensor.
        wanted: u64,
        /// Bytes in the data section.
        got: u64,
    },
}

impl From<serde_json::Error> for HeaderError {
    /// The message holds the parser's words, so they are not its source too.
    fn from(error: serde_json::Error) -> Self {
        HeaderError::Json(error)
    }
}

/// Reads the length field of a file of `file_len` bytes: the bytes of JSON that follow it.
pub fn header_length(field: [u8; 8], file_len: u64) -> Result<u64, HeaderError> {
    let wanted = u64::from_le_bytes(field);
    if wanted > HEADER_CAP {
        return Err(HeaderError::TooLarge { cap: HEADER_CAP, got: wanted });
    }
    let got = file_len.checked_sub(8).ok_or(HeaderError::TooShort { got: file_len })?;
    if wanted > got {
        return Err(HeaderError::Truncated { wanted, got });
    }
    Ok(wanted)
}

/// Parses the beginning of a safetensors file (length field and JSON; further bytes are ignored)
/// and checks it against the length of the whole file.
pub fn parse_header(bytes: &[u8], file_len: u64) -> Result<Header, HeaderError> {
    let Some((field, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(HeaderError::TooShort { got: bytes.len() as u64 });
    };
    let wanted = header_length(*field, file_len)?;
    let json = usize::try_from(wanted)
        .ok()
        .and_then(|n| rest.get(..n))
        .ok_or(HeaderError::Truncated { wanted, got: rest.len() as u64 })?;
    let raw: RawHeader = serde_json::from_slice(json)?;
    raw.check(8 + wanted, file_len - 8 - wanted)
}

/// The header as written, duplicates included.
struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    metadata: Vec<RawMap>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// A string-to-string map that keeps duplicates.
struct RawMap(Vec<(String, String)>);

impl RawHeader {
    fn check(self, data_start: u64, data_len: u64) -> Result<Header, HeaderError> {
        let metadata = self.check_metadata()?;
        let mut seen = HashSet::with_capacity(self.tensors.len());
        for (name, _) in &self.tensors {
            if !seen.insert(name.as_str()) {
                return Err(HeaderError::Duplicate { name: name.clone() });
            }
        }
        let mut tensors = Vec::with_capacity(self.tensors.len());
        for (name, raw) in self.tensors {
            let info = raw.check(&name, data_start, data_len)?;
            tensors.push((name, info));
        }
        tensors.sort_by_key(|(_, info)| (info.offset, info.len));
        let mut end = data_start;
        for (name, info) in &tensors {
            if info.offset != end {
                return Err(HeaderError::NotAdjacent {
                    tensor: name.clone(),
                    wanted: end - data_start,
                    got: info.offset - data_start,
                });
            }
            end = info.offset + info.len;
        }
        if end - data_start != data_len {
            return Err(HeaderError::Trailing { wanted: end - data_start, got: data_len });
        }
        Ok(Header { tensors, metadata, data_start })
    }

    fn check_metadata(&self) -> Result<BTreeMap<String, String>, HeaderError> {
        if self.metadata.len() > 1 {
            return Err(HeaderError::Duplicate { name: METADATA.to_owned() });
        }
        let mut map = BTreeMap::new();
        for (key, value) in self.metadata.iter().flat_map(|m| &m.0) {
            if map.insert(key.clone(), value.clone()).is_some() {
                return Err(HeaderError::Duplicate { name: key.clone() });
            }
        }
        Ok(map)
    }
}

impl RawTensor {
    /// Checks one tensor against a data section of `data_len` bytes.
    fn check(self, name: &str, data_start: u64, data_len: u64) -> Result<TensorInfo, HeaderError> {
        let tensor = || name.to_owned();
        let (begin, end) = self.data_offsets;
        let dtype: Dtype = self
            .dtype
            .parse()
            .map_err(|()| HeaderError::Dtype { tensor: tensor(), got: self.dtype.clone() })?;
        let wanted = self.shape.iter().try_fold(dtype.width(), |bytes, &dim| bytes.checked_mul(dim));
        let Some(wanted) = wanted else {
            return Err(HeaderError::Overflow { tensor: tensor(), shape: self.shape });
        };
        let Some(got) = end.checked_sub(begin) else {
            return Err(HeaderError::Backwards { tensor: tensor(), begin, end });
        };
        if wanted != got {
            return Err(HeaderError::Span { tensor: tensor(), dtype, shape: self.shape, wanted, got });
        }
        if end > data_len {
            return Err(HeaderError::PastEnd { tensor: tensor(), wanted: end, got: data_len });
        }
        // begin ≤ end ≤ data_len, and data_start + data_len is the file's length.
        Ok(TensorInfo { dtype, shape: self.shape.into_boxed_slice(), offset: data_start + begin, len: got })
    }
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader { tensors: Vec::new(), metadata: Vec::new() };
                while let Some(key) = map.next_key::<String>()? {
                    if key == METADATA {
                        header.metadata.push(map.next_value()?);
                    } else {
                        header.tensors.push((key, map.next_value()?));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

impl<'de> Deserialize<'de> for RawMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = RawMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawMap, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(RawMap(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}
