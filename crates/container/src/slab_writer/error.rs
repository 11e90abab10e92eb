//! What can go wrong while a container is written.

use std::io;
use std::path::{Path, PathBuf};

use metaltail_quant::LayoutError;
use thiserror::Error;

/// Why a conversion or a synthetic model could not be written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The operating system refused.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was being done.
        action: &'static str,
        /// Which file or directory.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The source could not be read.
    #[error(transparent)]
    Source(#[from] crate::Error),
    /// A tensor's shape has no size in the format asked for.
    #[error("tensor {tensor} has no size in the format asked for")]
    Layout {
        /// Name of the tensor.
        tensor: String,
        /// What does not fit.
        source: LayoutError,
    },
    /// A tensor's numbers cannot be stored in the format asked for.
    #[error("tensor {tensor} cannot be stored as {format}: {reason}")]
    Quantise {
        /// Name of the tensor.
        tensor: String,
        /// Format asked for.
        format: String,
        /// What the number formats' room said.
        reason: String,
    },
    /// Sizes add up to more than 64 bits hold.
    #[error("file {file}: its tensors add up to more than 2^64 bytes")]
    Overflow {
        /// File that was being planned.
        file: String,
    },
    /// The bytes written are not those planned.
    #[error(
        "file {file}: {planned} bytes were planned, {written} written; please report this fault of the program"
    )]
    Length {
        /// File that was being written.
        file: String,
        /// Bytes planned.
        planned: u64,
        /// Bytes written.
        written: u64,
    },
    /// The destination holds something else.
    #[error("{} is not empty and holds no conversion of this program: choose an empty or new directory", dir.display())]
    Foreign {
        /// The destination.
        dir: PathBuf,
    },
    /// A new model needs an empty place.
    #[error("{} is not empty: choose an empty or new directory", dir.display())]
    NotEmpty {
        /// The destination.
        dir: PathBuf,
    },
    /// The destination is the source.
    #[error("{} is the source itself: choose another directory for the output", dir.display())]
    SameDirectory {
        /// The directory named twice.
        dir: PathBuf,
    },
    /// The destination was begun or finished with other parameters.
    #[error("{} holds a conversion made with [{held}], but [{asked}] was asked for: repeat those parameters or choose another directory", dir.display())]
    Parameters {
        /// The destination.
        dir: PathBuf,
        /// Parameters of the conversion that it holds.
        held: String,
        /// Parameters asked for now.
        asked: String,
    },
    /// The destination was begun from another source.
    #[error("{} holds a conversion of another source ({held}), now given {asked}: choose another directory or give the first source", dir.display())]
    SourceChanged {
        /// The destination.
        dir: PathBuf,
        /// Source of the conversion that it holds.
        held: String,
        /// Source given now.
        asked: String,
    },
    /// Another process converts into the destination.
    #[error("another process is converting into {}: wait for it to end", dir.display())]
    Busy {
        /// The destination.
        dir: PathBuf,
    },
    /// The drive is too small.
    #[error("the output needs {wanted} bytes and {} has {free} free: free some or choose another drive", dir.display())]
    Space {
        /// The destination.
        dir: PathBuf,
        /// Bytes still to be written.
        wanted: u64,
        /// Bytes free.
        free: u64,
    },
    /// Experts of one layer are not stored alike, which the slab container requires.
    #[error(
        "layer {layer}: expert {expert} is stored as {got}, expert 0 as {wanted}; a slab container needs one format a layer: name a format for the experts instead of keep"
    )]
    Mixed {
        /// Layer index.
        layer: u32,
        /// Expert that differs.
        expert: u32,
        /// Formats of expert 0.
        wanted: String,
        /// Formats of this one.
        got: String,
    },
    /// An expert's bytes are not those that its container's checksum was taken from.
    #[error(
        "expert {expert} of layer {layer} is damaged: {} at offset {offset} should have checksum {wanted:016x}, has {got:016x}. Convert or copy the file again",
        file.display()
    )]
    Damaged {
        /// Layer index.
        layer: u32,
        /// Expert number.
        expert: u32,
        /// File of its first run.
        file: PathBuf,
        /// Offset of its first run.
        offset: u64,
        /// Checksum that the source carries.
        wanted: u64,
        /// Checksum of what was read.
        got: u64,
    },
    /// A tensor of a GGUF file that cannot be.
    #[error("tensor {tensor}: {reason}")]
    GgufTensor {
        /// Name of the tensor.
        tensor: String,
        /// What does not fit.
        reason: String,
    },
    /// A new file needs a free name.
    #[error("{} is there already: choose another name", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A synthetic model was asked for that cannot be.
    #[error("cannot make this synthetic model: {0}")]
    Synth(String),
    /// The caller stopped the work; a conversion run again goes on.
    #[error("stopped after {written} of {total} bytes")]
    Interrupted {
        /// Bytes of finished and unfinished files.
        written: u64,
        /// Bytes of the whole output.
        total: u64,
    },
}

impl WriteError {
    /// Wraps an I/O error with what was being done and where.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> WriteError {
        let path = path.to_owned();
        move |source| WriteError::Io { action, path, source }
    }

    /// Wraps a layout error with the tensor's name.
    pub(crate) fn layout(tensor: &str) -> impl FnOnce(LayoutError) -> WriteError {
        let tensor = tensor.to_owned();
        move |source| WriteError::Layout { tensor, source }
    }
}
