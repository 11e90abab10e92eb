//! GGUF files, read in place.
//!
//! [`Gguf::open`] reads the headers of a file, or of all files of a split set, and checks everything
//! that they claim; [`Gguf::report`] says what is in them, and [`Checkpoint`](crate::Checkpoint) finds
//! matrices and experts in them. Layout and what is refused: `docs/design/gguf.md`. [`GgufPlan`] is the header of
//! a file to be written.

mod error;
mod names;
mod parse;
mod report;
mod roles;
mod set;
mod tensors;
mod types;
mod value;
mod write;

pub use error::GgufError;
pub(crate) use names::written;
pub use parse::{DEPTH_CAP, GgufHeader, GgufTensor, HEADER_CAP, KEYS_CAP, NAME_CAP, TENSORS_CAP, parse_gguf};
pub use report::{
    FileType, GgufExpertLayer, GgufPartReport, GgufReport, Hyperparameters, MetadataEntry, TemplateReport,
    TokenizerReport, TypeCensus,
};
pub(crate) use set::models_among;
pub use set::{Gguf, GgufPart, is_gguf};
pub(crate) use tensors::GgufTensors;
pub use types::{Support, TensorType};
pub use value::{Array, Scalar, Scalars, Strings, Text, Value, ValueKind};
pub use write::{GgufPlan, GgufTensorSpec};
