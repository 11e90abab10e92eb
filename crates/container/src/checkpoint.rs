//! A model, opened: its kind by content, its configuration, and where every byte lies.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use metaltail_quant::{Format, OwnedMatrix, dequantize};
use serde::Serialize;
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::convert::COPIED;
use crate::copies::{self, Original};
use crate::detail::Detail;
use crate::error::Error;
use crate::finite;
use crate::gguf::{Gguf, GgufTensors, is_gguf};
use crate::header::{self, Header, HeaderError};
use crate::hf;
use crate::inventory::{ExpertLayerSpec, Role, TensorSpec};
use crate::listing::{Listing, open_plain, read_capped, read_object};
use crate::place::{ExpertPlace, Extent, MatrixPlace};
use crate::slab::{self, Checksum, Manifest, SCALES_SUFFIX};
use crate::stacked::Stack;

/// Longest single read, in bytes, so that a failed one names its offset closely.
const READ_CHUNK: usize = 1 << 30;
/// Most notices that are kept.
const NOTICES_CAP: usize = 64;

/// What a model's files are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A Hugging Face safetensors checkpoint.
    Hf,
    /// A colibrì directory.
    Colibri,
    /// Our slab container.
    Slab,
    /// A GGUF file or a split set of them.
    Gguf,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Hf => "hf",
            Kind::Colibri => "colibri",
            Kind::Slab => "slab",
            Kind::Gguf => "gguf",
        })
    }
}

/// The safetensors files of a directory, side by side.
struct Opened {
    files: Vec<PathBuf>,
    handles: Vec<File>,
    headers: Vec<Header>,
    lens: Vec<u64>,
}

impl Opened {
    /// Opens files and reads their headers.
    fn of(paths: Vec<PathBuf>) -> Result<Opened, Error> {
        let mut opened =
            Opened { files: Vec::new(), handles: Vec::new(), headers: Vec::new(), lens: Vec::new() };
        for path in paths {
            let (handle, header, len) = read_header(&path)?;
            opened.files.push(path);
            opened.handles.push(handle);
            opened.headers.push(header);
            opened.lens.push(len);
        }
        Ok(opened)
    }

    /// Where the files and their copies lie.
    fn drives(&self, dir: &Path, further: &[PathBuf]) -> Result<Vec<Drive>, Error> {
        let inside = |path: &PathBuf| (path.parent() == Some(dir)).then(|| path.clone());
        let mut drives = vec![Drive { dir: dir.to_owned(), files: self.files.iter().map(inside).collect() }];
        let each = self.files.iter().zip(&self.handles).zip(&self.lens);
        let originals: Vec<Original> =
            each.map(|((path, handle), &len)| Original { path, handle, len }).collect();
        for other in further {
            drives.push(Drive { dir: other.clone(), files: copies::find(dir, other, &originals)? });
        }
        Ok(drives)
    }
}

/// A directory that holds files of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// The directory.
    pub dir: PathBuf,
    /// Its file of each number that [`Extent::file`] has; gaps where it has none.
    pub files: Vec<Option<PathBuf>>,
}

/// A model whose headers were read and checked. No tensor was read yet.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    drives: Vec<Drive>,
    config: Value,
    generation_config: Option<Value>,
    files: Vec<PathBuf>,
    handles: Vec<File>,
    detail: Detail,
    /// Small files that stand in place of those beside the weights.
    companions: BTreeMap<&'static str, Vec<u8>>,
    notices: Mutex<BTreeSet<String>>,
    /// Whether dense tensors are held against the manifest's checksums.
    verify_dense: bool,
}

impl Checkpoint {
    /// Opens a directory, a GGUF file, or the directory of one GGUF model: finds out what it is, reads
    /// config.json and every header. A GGUF model has its configuration in the words of another program, and
    /// gets one from [`Checkpoint::adopt`].
    ///
    /// # Errors
    /// Refuses whatever is missing, unfinished, damaged or unsupported, by name.
    pub fn open(dir: &Path) -> Result<Checkpoint, Error> {
        Checkpoint::open_with(dir, &[])
    }

    /// As [`Checkpoint::open`], with further directories, as a rule on other drives, that hold copies of the
    /// weight files or files that the first lacks.
    ///
    /// # Errors
    /// As [`Checkpoint::open`]; a file that is no copy of the first of its name.
    pub fn open_with(dir: &Path, further: &[PathBuf]) -> Result<Checkpoint, Error> {
        if is_gguf(dir) {
            return Checkpoint::of_gguf(dir, further);
        }
        let mut listing = Listing::of(dir)?;
        if let Some(path) = listing.only_gguf(dir)? {
            return Checkpoint::of_gguf(&path, further);
        }
        further.iter().try_for_each(|dir| listing.add(dir))?;
        let manifest = listing.manifest(dir)?;
        if manifest.is_none() && listing.is_journaled() {
            return Err(Error::Unfinished { dir: dir.to_owned() });
        }
        if !listing.names.contains("config.json") {
            return Err(Error::NoConfig { dir: dir.to_owned() });
        }
        listing.refuse_dangling(dir)?;
        let config = read_object(&dir.join("config.json"))?;
        if let Some(manifest) = &manifest {
            refuse_other_family(dir, manifest, &config)?;
        }
        let generation_config = if listing.names.contains("generation_config.json") {
            Some(read_object(&dir.join("generation_config.json"))?)
        } else {
            None
        };
        let (names, shards) = listing.choose(dir, manifest.as_ref())?;
        let opened = Opened::of(names.iter().map(|name| listing.path(dir, name)).collect())?;
        let slab_files = opened.headers.iter().any(|h| h.metadata.contains_key(slab::META_SLAB));
        if manifest.is_none() && slab_files {
            return Err(Error::Unfinished { dir: dir.to_owned() });
        }
        if let Some(shards) = &shards {
            shards.check_tensors(&dir.join(hf::INDEX), &opened.files, &opened.headers)?;
        }
        let parts = (opened.files.as_slice(), opened.headers.as_slice(), opened.lens.as_slice());
        let detail = Detail::of_safetensors(dir, parts, manifest)?;
        let drives = opened.drives(dir, further)?;
        Ok(Checkpoint {
            dir: dir.to_owned(),
            drives,
            config,
            generation_config,
            files: opened.files,
            handles: opened.handles,
            detail,
            companions: BTreeMap::new(),
            notices: Mutex::default(),
            verify_dense: true,
        })
    }

    /// Opens a GGUF file or the set that it belongs to.
    fn of_gguf(path: &Path, further: &[PathBuf]) -> Result<Checkpoint, Error> {
        let gguf = Gguf::open(path)?;
        let files: Vec<PathBuf> = gguf.parts().iter().map(|part| part.path.clone()).collect();
        let mut handles = Vec::with_capacity(files.len());
        for part in gguf.parts() {
            let (handle, got) = open_plain(&part.path)?;
            if got != part.len {
                return Err(Error::FileLength { path: part.path.clone(), wanted: part.len, got });
            }
            handles.push(handle);
        }
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut drives =
            vec![Drive { dir: dir.to_owned(), files: files.iter().cloned().map(Some).collect() }];
        let each = gguf.parts().iter().zip(&handles);
        let originals: Vec<Original> =
            each.map(|(part, handle)| Original { path: &part.path, handle, len: part.len }).collect();
        for other in further {
            drives.push(Drive { dir: other.clone(), files: copies::find(path, other, &originals)? });
        }
        Ok(Checkpoint {
            dir: path.to_owned(),
            drives,
            config: Value::Object(serde_json::Map::new()),
            generation_config: None,
            files,
            handles,
            detail: Detail::Gguf(Box::new(GgufTensors::new(gguf))),
            companions: BTreeMap::new(),
            notices: Mutex::default(),
            verify_dense: true,
        })
    }

    /// The headers of a GGUF model.
    pub fn gguf(&self) -> Option<&Gguf> {
        match &self.detail {
            Detail::Gguf(tensors) => Some(tensors.gguf()),
            _ => None,
        }
    }

    /// Its tensors by canonical name.
    pub(crate) fn gguf_tensors(&self) -> Option<&GgufTensors> {
        match &self.detail {
            Detail::Gguf(tensors) => Some(tensors),
            _ => None,
        }
    }

    /// Gives a GGUF model the configuration that its metadata come to; both are objects.
    pub fn adopt(&mut self, config: Value, generation_config: Option<Value>) {
        (self.config, self.generation_config) = (config, generation_config);
    }

    /// Puts a small file, one of [`COPIED`], in the place of the one beside the weights.
    pub fn add_companion(&mut self, name: &'static str, bytes: Vec<u8>) {
        self.companions.insert(name, bytes);
    }

    /// A small file that goes with the weights, one of [`COPIED`]; `None` where there is none.
    ///
    /// # Errors
    /// A file that cannot be read or is too large.
    pub fn companion(&self, name: &str) -> Result<Option<Cow<'_, [u8]>>, Error> {
        debug_assert!(COPIED.contains(&name));
        if let Some(bytes) = self.companions.get(name) {
            return Ok(Some(Cow::Borrowed(bytes)));
        }
        if self.gguf().is_some() {
            let value = match name {
                "config.json" => Some(&self.config),
                "generation_config.json" => self.generation_config.as_ref(),
                _ => None,
            };
            return Ok(value.map(|value| Cow::Owned(format!("{value:#}\n").into_bytes())));
        }
        match read_capped(&self.dir.join(name)) {
            Ok(bytes) => Ok(Some(Cow::Owned(bytes))),
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether [`Self::read_matrix`] and [`Self::read_f32`] hold the tensors of a slab container
    /// against the checksums of its manifest; on unless switched off.
    pub fn verify_dense(&mut self, on: bool) {
        self.verify_dense = on;
    }

    /// What the directory is.
    pub fn kind(&self) -> Kind {
        match self.detail {
            Detail::Hf(_) => Kind::Hf,
            Detail::Colibri(..) => Kind::Colibri,
            Detail::Slab(..) => Kind::Slab,
            Detail::Gguf(_) => Kind::Gguf,
        }
    }

    /// The directory, or the GGUF file that was opened.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// config.json, known to be an object; of a GGUF model what was adopted, empty before.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// generation_config.json, where there is one; known to be an object.
    pub fn generation_config(&self) -> Option<&Value> {
        self.generation_config.as_ref()
    }

    /// `model_type` of the configuration, where it is a string.
    pub fn model_type(&self) -> Option<&str> {
        self.config.get("model_type")?.as_str()
    }

    /// The files with weights; [`Extent::file`] counts in this slice.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// The directories, the first one first, with what they have of [`Self::files`].
    pub fn drives(&self) -> &[Drive] {
        &self.drives
    }

    /// The manifest of a slab container.
    pub fn manifest(&self) -> Option<&Manifest> {
        match &self.detail {
            Detail::Slab(_, slab) => Some(&slab.manifest),
            _ => None,
        }
    }

    /// Stored names of all tensors, in no order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.detail.names()
    }

    /// What stands in place of `model.` in the stored names.
    pub fn prefix(&self) -> &str {
        self.detail.prefix()
    }

    /// Whether a tensor of this canonical name is stored.
    pub fn has(&self, name: &str) -> bool {
        self.detail.stored_name(name).is_some()
    }

    /// What was decided for lack of a stamp and what looks odd, in sentences; grows as matrices are
    /// located and with [`Self::check`].
    pub fn notices(&self) -> Vec<String> {
        let notices = self.notices.lock().unwrap_or_else(PoisonError::into_inner);
        notices.iter().cloned().collect()
    }

    /// Where a dense matrix lies and in which format.
    ///
    /// # Errors
    /// Refuses an absent tensor, another shape, and byte counts or types that fit no supported format.
    pub fn matrix(&self, spec: &TensorSpec) -> Result<MatrixPlace, Error> {
        self.locate(&spec.name, (spec.rows, spec.cols))
    }

    /// Reads a matrix in its stored format.
    ///
    /// # Errors
    /// As [`Self::matrix`], failed reads, bytes that are not those of the manifest's checksum, and
    /// NaN or infinity among the scales (those in GGUF blocks too) or in a tensor that is kept in f32 (routers apart).
    pub fn read_matrix(&self, spec: &TensorSpec) -> Result<OwnedMatrix, Error> {
        let place = self.matrix(spec)?;
        let name = self.detail.stored_name(&spec.name).unwrap_or(&spec.name);
        let weights = self.read_verified(name, place.weights)?;
        let scales = match place.scales {
            Some(extent) => self.read_verified(&format!("{name}{SCALES_SUFFIX}"), extent)?,
            None => Vec::new(),
        };
        let refuse = |what: &'static str, file: u32, (index, got): (usize, f32)| {
            let file = self.files.get(file as usize).unwrap_or(&self.dir).clone();
            Err(Error::NotFinite { file, tensor: name.to_owned(), what, index, got })
        };
        // A router may give scores that are no numbers: the model survives that and reports it.
        if (spec.role.keeps_f32() || spec.rows == 1)
            && spec.role != Role::Router
            && let Some(found) = finite::first_odd(place.layout.format(), &weights)
        {
            return refuse("value", place.weights.file, found);
        }
        if let (Some(extent), Some(found)) = (place.scales, finite::first_odd(Format::F32, &scales)) {
            return refuse("scale", extent.file, found);
        }
        if let Format::Gguf(format) = place.layout.format()
            && let Some(found) = finite::first_odd_scale(format, &weights)
        {
            return refuse("scale of block", place.weights.file, found);
        }
        OwnedMatrix::new(place.layout, weights, scales)
            .map_err(|source| Error::Layout { tensor: spec.name.clone(), source })
    }

    /// Reads a matrix as `rows × cols` f32 values, scales multiplied in.
    ///
    /// # Errors
    /// As [`Self::read_matrix`], and a matrix larger than memory.
    pub fn read_f32(&self, spec: &TensorSpec) -> Result<Vec<f32>, Error> {
        let matrix = self.read_matrix(spec)?;
        let too_large = || Error::Memory { tensor: spec.name.clone(), rows: spec.rows, cols: spec.cols };
        let len = spec.rows.checked_mul(spec.cols).ok_or_else(too_large)?;
        let mut values = Vec::new();
        values.try_reserve_exact(len).map_err(|_| too_large())?;
        values.resize(len, 0.0);
        dequantize(matrix.as_ref(), &mut values);
        Ok(values)
    }

    /// Where one expert lies: the runs to read and its matrices in them.
    ///
    /// # Errors
    /// As [`Self::matrix`], and an expert number that the layer does not have.
    pub fn expert(&self, layer: &ExpertLayerSpec, expert: u32) -> Result<ExpertPlace, Error> {
        if expert >= layer.count {
            return Err(Error::NoSuchExpert { layer: layer.layer, expert, count: layer.count });
        }
        self.detail.expert(layer, expert, &|text| self.notice(text))
    }

    /// The tensors that all experts of a layer share, where they do.
    pub(crate) fn stack<'l>(&self, layer: &'l ExpertLayerSpec) -> Option<Stack<'l>> {
        self.detail.stack(layer)
    }

    /// Reads bytes of one file into `out`, whose length counts (not [`Extent::len`]).
    ///
    /// # Errors
    /// A read that fails or comes back short, with its offset.
    pub fn read_at(&self, file: u32, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let (Some(handle), Some(path)) = (self.handles.get(file as usize), self.files.get(file as usize))
        else {
            let source = io::Error::new(io::ErrorKind::NotFound, format!("there is no file {file}"));
            return Err(Error::Read { path: self.dir.clone(), offset, wanted: out.len() as u64, source });
        };
        read_chunked(handle, path, offset, out)
    }

    /// Reads the bytes of an extent that this checkpoint gave.
    ///
    /// # Errors
    /// As [`Self::read_at`], and an extent larger than memory.
    pub fn read_extent(&self, extent: Extent) -> Result<Vec<u8>, Error> {
        let path = || self.files.get(extent.file as usize).unwrap_or(&self.dir).clone();
        let refuse = |source| Error::Read { path: path(), offset: extent.offset, wanted: extent.len, source };
        let len = usize::try_from(extent.len).map_err(|_| refuse(io::ErrorKind::OutOfMemory.into()))?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| refuse(io::ErrorKind::OutOfMemory.into()))?;
        bytes.resize(len, 0);
        self.read_at(extent.file, extent.offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads a dense tensor's bytes and holds them against its checksum, where it has one.
    fn read_verified(&self, name: &str, extent: Extent) -> Result<Vec<u8>, Error> {
        let bytes = self.read_extent(extent)?;
        let wanted = self.manifest().filter(|_| self.verify_dense).and_then(|m| m.dense.get(name).copied());
        if let Some(wanted) = wanted {
            let got = Checksum(xxh3_64(&bytes));
            if got != wanted {
                let file = self.files.get(extent.file as usize).unwrap_or(&self.dir).clone();
                let (tensor, offset) = (name.to_owned(), extent.offset);
                return Err(Error::Checksum { file, tensor, offset, wanted, got });
            }
        }
        Ok(bytes)
    }

    /// Keeps a sentence for [`Self::notices`].
    pub(crate) fn notice(&self, text: String) {
        let mut notices = self.notices.lock().unwrap_or_else(PoisonError::into_inner);
        if notices.len() < NOTICES_CAP {
            notices.insert(text);
        }
    }

    /// Length of one of [`Self::files`] now, in bytes.
    pub(crate) fn file_len(&self, file: u32) -> Result<u64, Error> {
        let path = self.files.get(file as usize).unwrap_or(&self.dir);
        let meta = fs::metadata(path);
        Ok(meta.map_err(|source| Error::Io { action: "look at", path: path.clone(), source })?.len())
    }

    /// The stored name of a canonical one, where it is there.
    pub(crate) fn stored_name(&self, canonical: &str) -> Option<&str> {
        self.detail.stored_name(canonical)
    }

    /// Number of stored tensors.
    pub(crate) fn stored(&self) -> usize {
        self.detail.len()
    }

    fn locate(&self, canonical: &str, shape: (usize, usize)) -> Result<MatrixPlace, Error> {
        self.detail.locate(canonical, shape, &|text| self.notice(text))
    }
}

/// Refuses a manifest that was written for another family than config.json names.
fn refuse_other_family(dir: &Path, manifest: &Manifest, config: &Value) -> Result<(), Error> {
    match config.get("model_type").and_then(Value::as_str) {
        Some(got) if got != manifest.model_type => Err(Error::ManifestDisagrees {
            path: dir.join(slab::MANIFEST),
            what: "model_type".into(),
            says: manifest.model_type.as_str().into(),
            place: "config.json".into(),
            got: got.into(),
        }),
        _ => Ok(()),
    }
}

/// Opens a safetensors file: the handle, its checked header and its length.
fn read_header(path: &Path) -> Result<(File, Header, u64), Error> {
    let refuse = |source| Error::Header { path: path.to_owned(), source };
    let (file, len) = open_plain(path)?;
    let mut field = [0; 8];
    if len < 8 {
        return Err(refuse(HeaderError::TooShort { got: len }));
    }
    read_chunked(&file, path, 0, &mut field)?;
    // At most HEADER_CAP and the file's own length, so this may be allocated.
    let json = header::header_length(field, len).map_err(refuse)? as usize;
    let mut bytes = vec![0; 8 + json];
    read_chunked(&file, path, 0, &mut bytes)?;
    let header = header::parse_header(&bytes, len).map_err(refuse)?;
    Ok((file, header, len))
}

/// Positional reads in chunks; interrupted ones are tried again by the standard library.
pub(crate) fn read_chunked(file: &File, path: &Path, offset: u64, out: &mut [u8]) -> Result<(), Error> {
    let mut at = offset;
    for chunk in out.chunks_mut(READ_CHUNK) {
        let wanted = chunk.len() as u64;
        file.read_exact_at(chunk, at).map_err(|source| Error::Read {
            path: path.to_owned(),
            offset: at,
            wanted,
            source,
        })?;
        at = at.saturating_add(wanted);
    }
    Ok(())
}
