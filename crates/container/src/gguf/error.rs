//! Why a GGUF header is refused.

use std::io;

use thiserror::Error;

use super::types::TensorType;
use super::value::ValueKind;

/// Why a GGUF header is refused. The file is named by [`Error::GgufFile`](crate::Error::GgufFile) around it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file does not begin as one.
    #[error("the file begins with {got:?}, wanted \"GGUF\"")]
    Magic {
        /// The first four bytes, as text.
        got: String,
    },
    /// Numbers are stored the other way round.
    #[error("the file is big-endian, and only little-endian files are read: fetch the little-endian one")]
    BigEndian,
    /// A version that is not read.
    #[error("the file has GGUF version {got}, wanted 2 or 3: convert the model again with newer tools")]
    Version {
        /// Version of the file.
        got: u32,
    },
    /// Something reaches past the end of the file.
    #[error(
        "{what} at byte {at} takes {wanted} bytes, but {got} are left in the file: it is cut short or damaged, fetch it again"
    )]
    PastEnd {
        /// What was to be read.
        what: String,
        /// Where it begins in the file.
        at: u64,
        /// Bytes (at least) that it takes.
        wanted: u64,
        /// Bytes from there to the end.
        got: u64,
    },
    /// The header is longer than any honest one.
    #[error("{what} at byte {at} takes {wanted} bytes and passes the cap of {cap} bytes of header")]
    TooLarge {
        /// What was to be read.
        what: String,
        /// Where it begins in the file.
        at: u64,
        /// Bytes (at least) that it takes.
        wanted: u64,
        /// [`HEADER_CAP`](super::HEADER_CAP).
        cap: u64,
    },
    /// More keys or tensors than any honest file has.
    #[error("the header claims {got} {what}, more than the cap of {cap}")]
    TooMany {
        /// `metadata keys` or `tensors`.
        what: &'static str,
        /// Number claimed.
        got: u64,
        /// Most that are accepted.
        cap: u64,
    },
    /// The file could not be read to where its length says that it reaches.
    #[error("cannot read {what} at byte {at}")]
    Read {
        /// What was to be read.
        what: String,
        /// Where it begins in the file.
        at: u64,
        /// The operating system's reason.
        #[source]
        source: io::Error,
    },
    /// A key or a tensor's name is empty, too long or no text.
    #[error("{what} {number} has a name that {got}")]
    Name {
        /// `metadata key` or `tensor`.
        what: &'static str,
        /// Which, from 0.
        number: u64,
        /// What is wrong with its name.
        got: String,
    },
    /// A name occurs twice.
    #[error("{what} {name:?} occurs twice")]
    Duplicate {
        /// `metadata key` or `tensor`.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A kind of value that is not known.
    #[error("metadata key {key:?} has a value of the unknown kind {got}, wanted 0 to 12")]
    ValueKind {
        /// The key.
        key: String,
        /// Kind as written.
        got: u32,
    },
    /// A bool that is neither 0 nor 1.
    #[error("metadata key {key:?} holds a bool that is neither 0 nor 1")]
    Bool {
        /// The key.
        key: String,
    },
    /// Arrays in arrays without end.
    #[error("metadata key {key:?} holds arrays nested deeper than {cap}")]
    Depth {
        /// The key.
        key: String,
        /// Deepest nesting that is accepted.
        cap: u32,
    },
    /// A key that the reading depends on has a value of another kind.
    #[error("metadata key {key:?} is {got}, wanted {wanted}")]
    Value {
        /// The key.
        key: String,
        /// What it should be.
        wanted: &'static str,
        /// What it is.
        got: String,
    },
    /// More dimensions than tensors have.
    #[error("tensor {tensor:?} has {got} dimensions, wanted at most {cap}")]
    Dimensions {
        /// Tensor name.
        tensor: String,
        /// Number of dimensions.
        got: u32,
        /// Most that are accepted.
        cap: u32,
    },
    /// An element type that is not known.
    #[error("tensor {tensor:?} has the unknown element type {got}")]
    Type {
        /// Tensor name.
        tensor: String,
        /// Type as written.
        got: u32,
    },
    /// A shape without elements, or with more than 63 bits count.
    #[error("tensor {tensor:?} has the shape {shape:?}, which {reason}")]
    Shape {
        /// Tensor name.
        tensor: String,
        /// Dimensions, the fastest first.
        shape: Vec<u64>,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A row is not a whole number of blocks.
    #[error(
        "tensor {tensor:?} has rows of {got} elements, wanted a multiple of the {wanted} in a block of {kind}"
    )]
    Row {
        /// Tensor name.
        tensor: String,
        /// Its type.
        kind: TensorType,
        /// Elements of a block.
        wanted: u64,
        /// Elements of a row.
        got: u64,
    },
    /// A tensor begins where none may.
    #[error(
        "tensor {tensor:?} begins at byte {got} of the data, wanted a multiple of the alignment {wanted}"
    )]
    Unaligned {
        /// Tensor name.
        tensor: String,
        /// The file's alignment.
        wanted: u64,
        /// Its offset in the data.
        got: u64,
    },
    /// A tensor reaches past the end of the file.
    #[error(
        "tensor {tensor:?} ends at byte {wanted} of the file, which has {got}: it is cut short, fetch it again"
    )]
    TensorPastEnd {
        /// Tensor name.
        tensor: String,
        /// Its end in the file (the largest number, where it passes 64 bits).
        wanted: u64,
        /// Length of the file.
        got: u64,
    },
    /// Two tensors share bytes.
    #[error("tensor {tensor:?} begins at byte {got} of the file, but tensor {before:?} ends at {wanted}")]
    Overlap {
        /// Tensor name.
        tensor: String,
        /// The one before it.
        before: String,
        /// End of the one before it.
        wanted: u64,
        /// Its own begin.
        got: u64,
    },
}

impl GgufError {
    pub(super) fn value(key: &str, wanted: &'static str, got: &super::Value) -> GgufError {
        let got = match got.as_u64() {
            Some(number) => format!("{number} ({})", got.kind()),
            None => described(got.kind()),
        };
        GgufError::Value { key: key.to_owned(), wanted, got }
    }
}

fn described(kind: ValueKind) -> String {
    format!("of the kind {kind}")
}
