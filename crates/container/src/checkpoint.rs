//! A model directory, opened: its kind by content, its configuration, and where every byte lies.

use std::collections::BTreeSet;
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

use crate::colibri::{self, Stamps};
use crate::copies::{self, Original};
use crate::error::Error;
use crate::finite;
use crate::header::{self, Header, HeaderError};
use crate::hf;
use crate::index::TensorIndex;
use crate::inventory::{ExpertLayerSpec, Part, Role, TensorSpec};
use crate::listing::{Listing, open_plain, read_object};
use crate::place::{ExpertPlace, Extent, MatrixPlace, PartPlace, RunOffset};
use crate::slab::{self, Checksum, Manifest, SCALES_SUFFIX, Slab};
use crate::stacked::Stack;

/// Longest single read, in bytes, so that a failed one names its offset closely.
const READ_CHUNK: usize = 1 << 30;
/// Most notices that are kept.
const NOTICES_CAP: usize = 64;

/// What a model directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A Hugging Face safetensors checkpoint.
    Hf,
    /// A colibrì directory.
    Colibri,
    /// Our slab container.
    Slab,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Hf => "hf",
            Kind::Colibri => "colibri",
            Kind::Slab => "slab",
        })
    }
}

/// What only one kind of directory has.
#[derive(Debug)]
enum Detail {
    Hf,
    Colibri(Stamps),
    Slab(Box<Slab>),
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

    /// Joins the headers and finds out what the directory is.
    fn classify(&self, dir: &Path, manifest: Option<Manifest>) -> Result<(TensorIndex, Detail), Error> {
        let Opened { files, headers, lens, .. } = self;
        let padded = manifest.is_some();
        let keep = |name: &str| !(padded && name.starts_with(slab::PAD_PREFIX));
        let index = TensorIndex::new(dir, files, headers, keep)?;
        let detail = match manifest {
            Some(manifest) => {
                let slab = Slab::new(manifest, files, headers, lens)?;
                slab.check_dense(&index)?;
                Detail::Slab(Box::new(slab))
            }
            None if colibri::is_colibri(&index) => Detail::Colibri(Stamps::new(files, headers)?),
            None => Detail::Hf,
        };
        Ok((index, detail))
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

/// A model directory whose headers were read and checked. No tensor was read yet.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    drives: Vec<Drive>,
    config: Value,
    generation_config: Option<Value>,
    files: Vec<PathBuf>,
    handles: Vec<File>,
    index: TensorIndex,
    detail: Detail,
    notices: Mutex<BTreeSet<String>>,
    /// Whether dense tensors are held against the manifest's checksums.
    verify_dense: bool,
}

impl Checkpoint {
    /// Opens a directory: finds out what it is, reads config.json and every header.
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
        let mut listing = Listing::of(dir)?;
        further.iter().try_for_each(|dir| listing.add(dir))?;
        let manifest = listing.manifest(dir)?;
        if manifest.is_none() && listing.is_journaled() {
            return Err(Error::Unfinished { dir: dir.to_owned() });
        }
        if !listing.names.contains("config.json") {
            return Err(match listing.gguf(dir) {
                Some(path) => Error::Gguf { path },
                None => Error::NoConfig { dir: dir.to_owned() },
            });
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
        let (index, detail) = opened.classify(dir, manifest)?;
        let drives = opened.drives(dir, further)?;
        Ok(Checkpoint {
            dir: dir.to_owned(),
            drives,
            config,
            generation_config,
            files: opened.files,
            handles: opened.handles,
            index,
            detail,
            notices: Mutex::default(),
            verify_dense: true,
        })
    }

    /// Whether [`Self::read_matrix`] and [`Self::read_f32`] hold the tensors of a slab container
    /// against the checksums of its manifest; on unless switched off.
    pub fn verify_dense(&mut self, on: bool) {
        self.verify_dense = on;
    }

    /// What the directory is.
    pub fn kind(&self) -> Kind {
        match self.detail {
            Detail::Hf => Kind::Hf,
            Detail::Colibri(_) => Kind::Colibri,
            Detail::Slab(_) => Kind::Slab,
        }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// config.json, known to be an object.
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

    /// The safetensors files; [`Extent::file`] counts in this slice.
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
            Detail::Slab(slab) => Some(&slab.manifest),
            _ => None,
        }
    }

    /// Stored names of all tensors, in no order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.index.iter().map(|(name, _)| name)
    }

    /// What stands in place of `model.` in the stored names.
    pub fn prefix(&self) -> &str {
        self.index.prefix()
    }

    /// Whether a tensor of this canonical name is stored.
    pub fn has(&self, name: &str) -> bool {
        self.index.find(name).is_some()
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
        let (name, _) = self.index.require(&spec.name)?;
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
        if let Some(stack) = self.stack(layer) {
            return stack.expert(&self.index, expert);
        }
        let part = |part: Part| self.locate(&layer.name(expert, part), layer.shape(part));
        let parts = [part(Part::Gate)?, part(Part::Up)?, part(Part::Down)?];
        match &self.detail {
            Detail::Slab(slab) => slab.expert(&self.index, layer, expert, parts),
            _ => Ok(join_runs(parts)),
        }
    }

    /// The tensors that all experts of a layer share, where they do.
    pub(crate) fn stack<'l>(&self, layer: &'l ExpertLayerSpec) -> Option<Stack<'l>> {
        match self.detail {
            Detail::Hf => Stack::of(&self.index, layer),
            Detail::Colibri(_) | Detail::Slab(_) => None,
        }
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

    /// The tensors by name.
    pub(crate) fn index(&self) -> &TensorIndex {
        &self.index
    }

    fn locate(&self, canonical: &str, (rows, cols): (usize, usize)) -> Result<MatrixPlace, Error> {
        let (name, stored) = self.index.require(canonical)?;
        match &self.detail {
            Detail::Hf => hf::locate(&self.index, name, stored, rows, cols),
            Detail::Slab(slab) => slab.locate(&self.index, name, stored, (rows, cols)),
            Detail::Colibri(stamps) => {
                let notice = |text| self.notice(text);
                colibri::locate(&self.index, stamps, name, stored, (rows, cols), &notice)
            }
        }
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

/// Joins adjacent byte ranges of one expert, so that each run is one read.
fn join_runs(parts: [MatrixPlace; 3]) -> ExpertPlace {
    let mut extents: Vec<Extent> = parts.iter().flat_map(|p| [Some(p.weights), p.scales]).flatten().collect();
    extents.sort_unstable_by_key(|e| (e.file, e.offset));
    let mut runs: Vec<Extent> = Vec::with_capacity(3);
    for extent in extents {
        match runs.last_mut() {
            // Extents lie inside their file, so no end overflows.
            Some(run) if run.file == extent.file && run.offset + run.len == extent.offset => {
                run.len += extent.len;
            }
            _ => runs.push(extent),
        }
    }
    let within = |extent: Extent| {
        // The last run that begins at or before the extent is the one that swallowed it.
        let after = runs.partition_point(|run| (run.file, run.offset) <= (extent.file, extent.offset));
        let run = after.saturating_sub(1);
        RunOffset { run: run as u32, offset: extent.offset - runs[run].offset }
    };
    let parts = parts.map(|place| PartPlace {
        layout: place.layout,
        weights: within(place.weights),
        scales: place.scales.map(within),
    });
    ExpertPlace { runs, parts, checksum: None, repack: None }
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
