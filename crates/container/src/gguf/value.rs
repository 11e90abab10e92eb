//! Metadata values. Long arrays are kept as the file has them: one allocation, not one an item.

use std::fmt;

/// Kind of a value: the number that stands before it in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each variant is the format's own name for the kind")]
pub enum ValueKind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueKind {
    /// In the order of their numbers.
    pub const ALL: [ValueKind; 13] = {
        use ValueKind::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64]
    };

    /// The kind of this number, if there is one.
    pub fn from_number(number: u32) -> Option<ValueKind> {
        ValueKind::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// Its name, as the format writes it.
    pub fn name(self) -> &'static str {
        match self {
            ValueKind::U8 => "uint8",
            ValueKind::I8 => "int8",
            ValueKind::U16 => "uint16",
            ValueKind::I16 => "int16",
            ValueKind::U32 => "uint32",
            ValueKind::I32 => "int32",
            ValueKind::F32 => "float32",
            ValueKind::Bool => "bool",
            ValueKind::String => "string",
            ValueKind::Array => "array",
            ValueKind::U64 => "uint64",
            ValueKind::I64 => "int64",
            ValueKind::F64 => "float64",
        }
    }

    /// Bytes of one value; none for strings and arrays.
    pub fn width(self) -> Option<usize> {
        match self {
            ValueKind::U8 | ValueKind::I8 | ValueKind::Bool => Some(1),
            ValueKind::U16 | ValueKind::I16 => Some(2),
            ValueKind::U32 | ValueKind::I32 | ValueKind::F32 => Some(4),
            ValueKind::U64 | ValueKind::I64 | ValueKind::F64 => Some(8),
            ValueKind::String | ValueKind::Array => None,
        }
    }
}

impl fmt::Display for ValueKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A value of fixed width.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs, reason = "each variant is the format's own name for the kind")]
pub enum Scalar {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Scalar {
    /// Reads one from exactly as many little-endian bytes as its kind has; `None` for another
    /// number of bytes, a kind without a width, and a bool that is neither 0 nor 1.
    pub fn from_le_bytes(kind: ValueKind, bytes: &[u8]) -> Option<Scalar> {
        Some(match kind {
            ValueKind::U8 => Scalar::U8(u8::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::I8 => Scalar::I8(i8::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::U16 => Scalar::U16(u16::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::I16 => Scalar::I16(i16::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::U32 => Scalar::U32(u32::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::I32 => Scalar::I32(i32::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::F32 => Scalar::F32(f32::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::Bool => match bytes {
                [0] => Scalar::Bool(false),
                [1] => Scalar::Bool(true),
                _ => return None,
            },
            ValueKind::U64 => Scalar::U64(u64::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::I64 => Scalar::I64(i64::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::F64 => Scalar::F64(f64::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::String | ValueKind::Array => return None,
        })
    }

    /// A whole number that is not negative, of any width.
    pub fn as_u64(self) -> Option<u64> {
        match self {
            Scalar::U8(n) => Some(n.into()),
            Scalar::U16(n) => Some(n.into()),
            Scalar::U32(n) => Some(n.into()),
            Scalar::U64(n) => Some(n),
            Scalar::I8(n) => n.try_into().ok(),
            Scalar::I16(n) => n.try_into().ok(),
            Scalar::I32(n) => n.try_into().ok(),
            Scalar::I64(n) => n.try_into().ok(),
            Scalar::F32(_) | Scalar::F64(_) | Scalar::Bool(_) => None,
        }
    }
}

/// Text as stored. Values need not be UTF-8: a tokenizer's token may be a piece of a character.
/// (Keys and tensor names must be.)
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Text(pub Box<[u8]>);

impl Text {
    /// The text, if it is UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        std::str::from_utf8(&self.0).ok()
    }

    /// The text with U+FFFD in place of what is not UTF-8.
    pub fn to_lossy(&self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_lossy())
    }
}

/// Many strings in one allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strings {
    bytes: Vec<u8>,
    /// Where each ends in `bytes`.
    ends: Vec<usize>,
}

impl Strings {
    /// Their number.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of one.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)?;
        let begin = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        self.bytes.get(begin..end)
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    /// Adds one at the end.
    pub fn push(&mut self, text: &[u8]) {
        self.bytes.extend_from_slice(text);
        self.ends.push(self.bytes.len());
    }
}

/// Many values of one fixed-width kind, as their little-endian bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scalars {
    kind: ValueKind,
    width: usize,
    bytes: Vec<u8>,
}

impl Scalars {
    /// `None` when the kind has no width, the bytes are no whole number of values, or a bool is
    /// neither 0 nor 1.
    pub fn new(kind: ValueKind, bytes: Vec<u8>) -> Option<Scalars> {
        let width = kind.width()?;
        let sound =
            bytes.len().is_multiple_of(width) && (kind != ValueKind::Bool || bytes.iter().all(|b| *b < 2));
        sound.then_some(Scalars { kind, width, bytes })
    }

    /// Kind of each.
    pub fn kind(&self) -> ValueKind {
        self.kind
    }

    /// Their number.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.width
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// One of them.
    pub fn get(&self, index: usize) -> Option<Scalar> {
        let begin = index.checked_mul(self.width)?;
        Scalar::from_le_bytes(self.kind, self.bytes.get(begin..begin.checked_add(self.width)?)?)
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = Scalar> {
        self.bytes.chunks_exact(self.width).filter_map(|bytes| Scalar::from_le_bytes(self.kind, bytes))
    }
}

/// An array; its items are of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Array {
    /// Of numbers or bools.
    Scalars(Scalars),
    /// Of strings.
    Strings(Strings),
    /// Of arrays, each of a kind of its own.
    Arrays(Vec<Array>),
}

impl Array {
    /// Number of items.
    pub fn len(&self) -> usize {
        match self {
            Array::Scalars(scalars) => scalars.len(),
            Array::Strings(strings) => strings.len(),
            Array::Arrays(arrays) => arrays.len(),
        }
    }

    /// Whether there is no item.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Kind of its items.
    pub fn kind(&self) -> ValueKind {
        match self {
            Array::Scalars(scalars) => scalars.kind(),
            Array::Strings(_) => ValueKind::String,
            Array::Arrays(_) => ValueKind::Array,
        }
    }
}

/// The value of a metadata key.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A number or bool.
    Scalar(Scalar),
    /// A string.
    String(Text),
    /// An array.
    Array(Array),
}

impl Value {
    /// Its kind.
    pub fn kind(&self) -> ValueKind {
        match self {
            Value::String(_) => ValueKind::String,
            Value::Array(_) => ValueKind::Array,
            Value::Scalar(scalar) => match scalar {
                Scalar::U8(_) => ValueKind::U8,
                Scalar::I8(_) => ValueKind::I8,
                Scalar::U16(_) => ValueKind::U16,
                Scalar::I16(_) => ValueKind::I16,
                Scalar::U32(_) => ValueKind::U32,
                Scalar::I32(_) => ValueKind::I32,
                Scalar::F32(_) => ValueKind::F32,
                Scalar::Bool(_) => ValueKind::Bool,
                Scalar::U64(_) => ValueKind::U64,
                Scalar::I64(_) => ValueKind::I64,
                Scalar::F64(_) => ValueKind::F64,
            },
        }
    }

    /// A whole number that is not negative, of any width.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Value::Scalar(scalar) => scalar.as_u64(),
            _ => None,
        }
    }

    /// A string that is UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(text) => text.as_str(),
            _ => None,
        }
    }

    /// An array.
    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }
}
