//! GGUF files, read in place as far as describing them.
//!
//! [`Gguf::open`] reads the headers of a file, or of all files of a split set, and checks everything
//! that they claim; [`Gguf::report`] says what is in them. No tensor is read. Layout and what is
//! refused: `docs/design/gguf.md`.

mod error;
mod parse;
mod report;
mod roles;
mod set;
mod types;
mod value;

pub use error::GgufError;
pub use parse::{DEPTH_CAP, GgufHeader, GgufTensor, HEADER_CAP, KEYS_CAP, NAME_CAP, TENSORS_CAP, parse_gguf};
pub use report::{
    FileType, GgufExpertLayer, GgufPartReport, GgufReport, Hyperparameters, MetadataEntry, TemplateReport,
    TokenizerReport, TypeCensus,
};
pub use set::{Gguf, GgufPart, is_gguf};
pub use types::{Support, TensorType};
pub use value::{Array, Scalar, Scalars, Strings, Text, Value, ValueKind};
