//! Why a model directory is refused.

use std::io;
use std::path::{Path, PathBuf};

use metaltail_quant::LayoutError;
use thiserror::Error;

use crate::census::Missing;
use crate::gguf::GgufError;
use crate::header::{Dtype, HeaderError};
use crate::repack::RepackError;
use crate::slab::{Checksum, ManifestError};

/// A refusal, or a failed read, of a model directory.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The path does not exist.
    #[error("{} does not exist: give the directory of a model", path.display())]
    NotFound {
        /// Path given.
        path: PathBuf,
    },
    /// The path is a file.
    #[error("{} is not a directory: give a GGUF file, or the directory that holds config.json and the *.safetensors files", path.display())]
    NotDirectory {
        /// Path given.
        path: PathBuf,
    },
    /// A directory with more than one GGUF model.
    #[error("{} holds {} GGUF models ({}): name the file of one", dir.display(), names.len(), crate::census::some_of(names))]
    SeveralGguf {
        /// The directory.
        dir: PathBuf,
        /// The file of each, of a set the first.
        names: Vec<String>,
    },
    /// Tensors that the model of this architecture does not compute with.
    #[error("{} has tensors that a model of its architecture and metadata does not compute with here, so that leaving them out would change its answers: {}", file.display(), crate::census::some_of(names))]
    GgufUnused {
        /// The file.
        file: PathBuf,
        /// Their names.
        names: Vec<String>,
    },
    /// A tensor of a type that is not computed.
    #[error("cannot compute with {}: tensor {tensor:?} is of type {kind}, for which there is no arithmetic here; use a file in Q8_0, Q4_K_M or another common quantisation", file.display())]
    GgufType {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Name of the type.
        kind: &'static str,
    },
    /// A GGUF file whose header is refused.
    #[error("cannot use {}: its GGUF header is refused", path.display())]
    GgufFile {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: GgufError,
    },
    /// A part of a GGUF set whose name does not lead to the others.
    #[error("{} says that it is one of {count} files, but its name does not end in -NNNNN-of-{count:05}.gguf, so that the others cannot be found: give it back its name", path.display())]
    GgufPartName {
        /// The file.
        path: PathBuf,
        /// Parts of the set.
        count: u64,
    },
    /// A file in the place of a part of a GGUF set that is not that part.
    #[error("{} is not the part of the set that its name says: {key} is {got}, wanted {wanted}; fetch it again from the model's source", path.display())]
    GgufForeign {
        /// The file.
        path: PathBuf,
        /// The metadata key that tells.
        key: &'static str,
        /// What it should be.
        wanted: String,
        /// What it is.
        got: String,
    },
    /// A GGUF set that holds other than all of its tensors.
    #[error("the set of {} holds {got} tensors, but split.tensors.count is {wanted}: fetch all of its files again", path.display())]
    GgufTensorCount {
        /// The first part.
        path: PathBuf,
        /// Tensors that the first part promises.
        wanted: u64,
        /// Tensors of all parts.
        got: u64,
    },
    /// The operating system refused.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        #[source]
        source: io::Error,
    },
    /// The limit of open files is reached.
    #[error("cannot {action} {}: too many files are open; every weight file of a model stays open, so raise the limit with `ulimit -n` and try again", path.display())]
    OpenFiles {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        #[source]
        source: io::Error,
    },
    /// A file's name leads to something that may never end or never begin.
    #[error("{} is {found}, not a regular file; put the model's file in its place", path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
        /// What is there, with its article.
        found: &'static str,
    },
    /// A further directory whose file differs from the first's.
    #[error("{} is no copy of {}: {what}. Copy it again, or leave its directory out", path.display(), first.display())]
    CopiesDiffer {
        /// The file in the further directory.
        path: PathBuf,
        /// The file that it should equal.
        first: PathBuf,
        /// What differs.
        what: String,
    },
    /// A further directory that has no file of the model.
    #[error("{} holds no weight file of the model in {}: leave it out", dir.display(), first.display())]
    NothingShared {
        /// The further directory.
        dir: PathBuf,
        /// The model.
        first: PathBuf,
    },
    /// A link that leads nowhere.
    #[error("{} is a link to {}, which does not exist: fetch that file or remove the link", path.display(), target.display())]
    DanglingLink {
        /// The link.
        path: PathBuf,
        /// Where it leads.
        target: PathBuf,
    },
    /// A positional read failed or came back short.
    #[error("cannot read {wanted} bytes at offset {offset} of {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Offset of the read.
        offset: u64,
        /// Bytes wanted.
        wanted: u64,
        /// The operating system's reason.
        #[source]
        source: io::Error,
    },
    /// No config.json.
    #[error("{} has no config.json, so it is not a model directory: copy the file from the model's source", dir.display())]
    NoConfig {
        /// Directory given.
        dir: PathBuf,
    },
    /// A JSON file is larger than its cap.
    #[error("{} has {got} bytes, more than the cap of {cap}", path.display())]
    JsonTooLarge {
        /// The file.
        path: PathBuf,
        /// Cap in bytes.
        cap: u64,
        /// Its length.
        got: u64,
    },
    /// A JSON file does not parse.
    #[error("{} is not valid JSON of the kind it should be", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason, with line and column.
        #[source]
        source: serde_json::Error,
    },
    /// A JSON file is not an object.
    #[error("{} holds {got}, wanted a JSON object", path.display())]
    NotObject {
        /// The file.
        path: PathBuf,
        /// What it holds.
        got: &'static str,
    },
    /// No safetensors file.
    #[error("{} holds no *.safetensors file: fetch the model's weights into it", dir.display())]
    NoTensors {
        /// Directory given.
        dir: PathBuf,
    },
    /// More files than can be kept open.
    #[error("{} holds {got} *.safetensors files, more than the cap of {cap}", dir.display())]
    TooManyFiles {
        /// Directory given.
        dir: PathBuf,
        /// Cap.
        cap: usize,
        /// Number found.
        got: usize,
    },
    /// A safetensors header is refused.
    #[error("cannot use {}: its safetensors header is refused", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: HeaderError,
    },
    /// Two files hold a tensor of the same name.
    #[error("tensor {tensor:?} is in both {} and {}: remove the file that does not belong to this model", first.display(), second.display())]
    DuplicateTensor {
        /// Tensor name.
        tensor: String,
        /// First file.
        first: PathBuf,
        /// Second file.
        second: PathBuf,
    },
    /// A slab container that was not finished.
    #[error("{} is an unfinished slab container (no manifest.json): run the same convert again to resume", dir.display())]
    Unfinished {
        /// Directory given.
        dir: PathBuf,
    },
    /// manifest.json is refused.
    #[error("cannot use {}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: ManifestError,
    },
    /// Files that the index, the numbering or the manifest names are absent.
    #[error("{0}")]
    MissingShards(Box<MissingShards>),
    /// A shard's name in the index is not a plain file name.
    #[error("{}: tensor {tensor:?} is said to be in {shard:?}, which is not a plain file name", path.display())]
    IndexShardName {
        /// The index.
        path: PathBuf,
        /// Tensor name.
        tensor: String,
        /// Name as written.
        shard: String,
    },
    /// The index and the shards disagree.
    #[error("{}: tensor {tensor:?} is said to be in {wanted:?}, but it is in {got}: fetch the index and the shards from one source", path.display())]
    IndexDisagrees {
        /// The index.
        path: PathBuf,
        /// Tensor name.
        tensor: String,
        /// File that the index names.
        wanted: String,
        /// File that holds it, or `no shard`.
        got: String,
    },
    /// A file's length is not what the manifest says.
    #[error("{} has {got} bytes, the manifest says {wanted}: it is damaged, convert it again", path.display())]
    FileLength {
        /// The file.
        path: PathBuf,
        /// Length in the manifest.
        wanted: u64,
        /// Length found.
        got: u64,
    },
    /// Tensors that the configuration asks for are absent.
    #[error("{0}")]
    Incomplete(Box<Missing>),
    /// One tensor is absent.
    #[error("{} holds no tensor {tensor:?}: fetch the missing files, or see whether config.json belongs to them", dir.display())]
    MissingTensor {
        /// Directory.
        dir: PathBuf,
        /// Tensor name.
        tensor: String,
    },
    /// A tensor has another shape than the configuration asks for.
    #[error("{}: tensor {tensor:?} has the shape {got:?}, wanted {wanted:?}: config.json does not belong to these weights", file.display())]
    Shape {
        /// The file.
        file: PathBuf,
        /// Tensor name.
        tensor: String,
        /// Shape wanted.
        wanted: Vec<u64>,
        /// Shape stored.
        got: Vec<u64>,
    },
    /// A tensor has an element type that cannot stand there.
    #[error("{}: tensor {tensor:?} is stored as {got}, wanted {wanted}", file.display())]
    Dtype {
        /// The file.
        file: PathBuf,
        /// Tensor name.
        tensor: String,
        /// What can stand there.
        wanted: &'static str,
        /// What stands there.
        got: Dtype,
    },
    /// The number of weight bytes fits no format.
    #[error("{}: tensor {tensor:?} has {got} bytes, wanted {wanted}", file.display())]
    WeightBytes {
        /// The file.
        file: PathBuf,
        /// Tensor name.
        tensor: String,
        /// Counts that would do, in words.
        wanted: String,
        /// Bytes stored.
        got: u64,
    },
    /// The number of scale bytes does not fit the format.
    #[error("{}: scales {tensor:?} have {got} bytes, wanted {wanted}", file.display())]
    ScaleBytes {
        /// The file.
        file: PathBuf,
        /// Name of the scale tensor.
        tensor: String,
        /// Counts that would do, in words.
        wanted: String,
        /// Bytes stored.
        got: u64,
    },
    /// A format that is known by name and not supported.
    #[error("{}: tensor {tensor:?} is in the format {format}, which this version does not support", file.display())]
    UnsupportedFormat {
        /// The file.
        file: PathBuf,
        /// Tensor name.
        tensor: String,
        /// Name of the format.
        format: String,
    },
    /// A format stamp cannot be used.
    #[error("{}: the colibri.fmt stamp {reason}", file.display())]
    Stamp {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A slab tensor and its metadata, or an expert and the manifest, disagree.
    #[error("{}: {what} {reason}: the container is damaged, convert it again", file.display())]
    Slab {
        /// The file.
        file: PathBuf,
        /// Tensor, layer or expert.
        what: String,
        /// Wanted and got.
        reason: String,
    },
    /// The manifest and what it describes do not belong together.
    #[error("{} says that {what} is {says:?}, but in {place} it is {got:?}: the files do not belong together, copy or convert them again", path.display())]
    ManifestDisagrees {
        /// The manifest.
        path: PathBuf,
        /// What they disagree on.
        what: Box<str>,
        /// What the manifest says.
        says: Box<str>,
        /// Where something else stands: a file, or a tensor.
        place: Box<str>,
        /// What stands there.
        got: Box<str>,
    },
    /// The bytes of a dense tensor are not those that were written.
    #[error("{}: tensor {tensor:?} at offset {offset} has the checksum {got}, wanted {wanted}: the file is damaged, copy it or convert the model again", file.display())]
    Checksum {
        /// The file.
        file: PathBuf,
        /// Stored name of the tensor.
        tensor: String,
        /// Its offset in the file.
        offset: u64,
        /// Checksum in the manifest.
        wanted: Checksum,
        /// Checksum of what was read.
        got: Checksum,
    },
    /// A number that no result can be computed with.
    #[error("{}: {what} {index} of tensor {tensor:?} is {got}, wanted a finite number: the file is damaged, fetch it or convert the model again", file.display())]
    NotFinite {
        /// The file.
        file: PathBuf,
        /// Stored name of the tensor.
        tensor: String,
        /// `value` or `scale`.
        what: &'static str,
        /// Its index, row by row.
        index: usize,
        /// What stands there: NaN or an infinity.
        got: f32,
    },
    /// A matrix whose values do not fit in memory.
    #[error("tensor {tensor:?} of {rows} × {cols} does not fit in memory as f32")]
    Memory {
        /// Tensor name.
        tensor: String,
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },
    /// Experts that cannot be made of how they are stored.
    #[error("the experts in {tensor} cannot be made into matrices")]
    Repack {
        /// Names of the tensors.
        tensor: String,
        /// Why.
        source: RepackError,
    },
    /// An expert number that the layer does not have.
    #[error("layer {layer} has {count} experts, there is no expert {expert}")]
    NoSuchExpert {
        /// Layer index.
        layer: u32,
        /// Expert asked for.
        expert: u32,
        /// Experts of the layer.
        count: u32,
    },
    /// A size from the configuration does not fit.
    #[error("tensor {tensor:?} cannot have the size that config.json gives it")]
    Layout {
        /// Tensor name.
        tensor: String,
        /// Why.
        #[source]
        source: LayoutError,
    },
}

impl Error {
    /// A refusal of the operating system; one for lack of file handles says how to raise their limit.
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Error {
        let path = path.to_owned();
        match Fault::of(&source) {
            Some(Fault::Handles) => Error::OpenFiles { action, path, source },
            _ => Error::Io { action, path, source },
        }
    }

    /// Whether the machine lacks something (file handles, memory), so that the model may be whole.
    pub fn is_io(&self) -> bool {
        match self {
            Error::OpenFiles { .. } => true,
            Error::Io { source, .. }
            | Error::Read { source, .. }
            | Error::GgufFile { source: GgufError::Read { source, .. }, .. } => Fault::of(source).is_some(),
            _ => false,
        }
    }
}

/// What a machine can lack.
enum Fault {
    Handles,
    Memory,
}

impl Fault {
    fn of(error: &io::Error) -> Option<Fault> {
        match is_out_of_handles(error) {
            true => Some(Fault::Handles),
            false => (error.kind() == io::ErrorKind::OutOfMemory).then_some(Fault::Memory),
        }
    }
}

/// Whether the limit of open files, of the process or of the machine, is reached (`ulimit -n`).
pub fn is_out_of_handles(error: &io::Error) -> bool {
    #[cfg(unix)]
    if let Some(code) = error.raw_os_error() {
        use rustix::io::Errno;
        return [Errno::MFILE, Errno::NFILE].iter().any(|errno| errno.raw_os_error() == code);
    }
    false
}

/// Absent files: what is there, what is not, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingShards {
    /// Directory given.
    pub dir: PathBuf,
    /// How the expected files are known, e.g. `model.safetensors.index.json`.
    pub known_from: String,
    /// Files present.
    pub present: usize,
    /// Files expected.
    pub expected: usize,
    /// Names of the absent ones, ascending.
    pub names: Vec<String>,
    /// Tensors in them, where that is known.
    pub tensors: Option<usize>,
    /// Lowest and highest layer that have tensors in them, where that is known.
    pub layers: Option<(u32, u32)>,
    /// What to do next.
    pub hint: &'static str,
}

impl std::fmt::Display for MissingShards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} holds {} of {} files that {} names; missing: {}",
            self.dir.display(),
            self.present,
            self.expected,
            self.known_from,
            crate::census::some_of(&self.names)
        )?;
        if let Some(tensors) = self.tensors {
            write!(f, " with {tensors} tensors")?;
        }
        match self.layers {
            Some((first, last)) if first == last => write!(f, " of layer {first}")?,
            Some((first, last)) => write!(f, " of layers {first} to {last}")?,
            None => {}
        }
        write!(f, ". {}", self.hint)
    }
}
