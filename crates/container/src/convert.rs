//! Conversion of a checkpoint into a slab container.
//!
//! [`ConvertPlan`] says what will be written, to the byte, before anything is; [`convert`] writes
//! it. Every file gets its name only when it is whole and synced, and `convert.json` lists the
//! finished ones, so a conversion killed at any point goes on from its last whole file and ends
//! with the bytes that an undisturbed one would have written.

mod journal;
mod source;
mod space;
pub(crate) mod transcode;

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::str::FromStr;

use metaltail_quant::{Format, MatrixLayout, ParseFormatError};
use serde::Serialize;

use journal::{Destination, Journal, Lock, SourceIdentity};
pub use space::free_bytes;
pub(crate) use transcode::check_target;

use crate::listing::read_capped;
use crate::slab::{Manifest, Parameters};
pub use crate::slab_writer::WriteError;
use crate::slab_writer::directory::NewDirs;
use crate::slab_writer::file::write_atomic;
use crate::slab_writer::parallel::worker_threads;
use crate::slab_writer::{DENSE_FILE, Finished, SlabFile, SlabPlan, write_file, write_manifest};
use crate::{Checkpoint, ExpertLayerSpec, Inventory, Part, TensorSpec};

/// Small files that a container takes over from its source, where present.
pub const COPIED: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// The format that matrices are to be stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// As the source has them, bit for bit.
    Keep,
    /// This format; a matrix that has it already is copied bit for bit.
    Format(Format),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Keep => f.write_str("keep"),
            Target::Format(format) => format.fmt(f),
        }
    }
}

impl FromStr for Target {
    type Err = ParseFormatError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "keep" => Ok(Target::Keep),
            _ => name.parse().map(Target::Format),
        }
    }
}

/// What a conversion is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvertOptions {
    /// Routed experts of the main layers.
    pub experts: Target,
    /// Every other matrix that is not kept in f32 (`Role::keeps_f32`), the draft layer's too.
    pub rest: Target,
    /// Routed experts of the draft layer.
    pub draft_experts: Target,
}

impl Default for ConvertOptions {
    /// `int4-g64` experts, `int8` for the rest and for the draft layer.
    fn default() -> Self {
        ConvertOptions {
            experts: Target::Format(Format::Int4Group(64)),
            rest: Target::Format(Format::Int8Row),
            draft_experts: Target::Format(Format::Int8Row),
        }
    }
}

/// How far a conversion or a synthetic model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    /// File that is being written.
    pub file: &'a str,
    /// Bytes of the output that are written, those of an earlier run included.
    pub written: u64,
    /// Bytes of the whole output.
    pub total: u64,
}

/// Hears of progress after every tensor or expert, and while the files of an earlier run are read
/// again; `Break` stops the work with
/// [`WriteError::Interrupted`], and a later run goes on.
pub type OnProgress<'a> = &'a mut dyn FnMut(Progress<'_>) -> ControlFlow<()>;

/// What a conversion did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConvertReport {
    /// Files of the container.
    pub files: usize,
    /// Bytes of the container.
    pub bytes: u64,
    /// Weight files that an earlier run had finished.
    pub skipped: usize,
    /// Whether the container was complete before, so that nothing was done.
    pub already_complete: bool,
}

/// What a conversion will write, known before it begins.
#[derive(Clone, Debug)]
pub struct ConvertPlan {
    slab: SlabPlan,
    copies: Vec<(&'static str, Vec<u8>)>,
    parameters: Parameters,
    model_type: String,
    manifest_bytes: u64,
}

impl ConvertPlan {
    /// Checks the source against the inventory and fixes every output file.
    ///
    /// # Errors
    /// An incomplete or damaged source; with [`Target::Keep`], a layer whose experts are not stored alike.
    pub fn new(
        source: &Checkpoint,
        inventory: &Inventory,
        options: &ConvertOptions,
    ) -> Result<ConvertPlan, WriteError> {
        source.check(inventory)?;
        // An incomplete draft layer cannot be used, so the container leaves it out.
        let absent = match source.draft_complete(inventory) {
            true => BTreeSet::new(),
            false => inventory.draft_layers(),
        };
        let mut dense = Vec::new();
        for spec in &inventory.tensors {
            let dropped = spec.layer.is_some_and(|l| absent.contains(&l));
            if dropped || (spec.optional && !source.has(&spec.name)) {
                continue;
            }
            dense.push((spec.clone(), dense_layout(source, spec, options.rest)?));
        }
        let mut experts = Vec::new();
        for spec in &inventory.experts {
            if absent.contains(&spec.layer) {
                continue;
            }
            let target = if spec.draft { options.draft_experts } else { options.experts };
            experts.push((spec.clone(), expert_layouts(source, spec, target)?));
        }
        let slab = SlabPlan::new(dense, experts, DENSE_FILE)?;
        let parameters = Parameters {
            experts: options.experts.to_string(),
            rest: options.rest.to_string(),
            draft_experts: options.draft_experts.to_string(),
            source: source.kind().to_string(),
        };
        let model_type = inventory.family.clone();
        let manifest_bytes = slab.manifest_bytes(&model_type, &parameters);
        Ok(ConvertPlan { slab, copies: read_copies(source.dir())?, parameters, model_type, manifest_bytes })
    }

    /// Every output file with its length in bytes, in the order of writing; the manifest is last.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        let copies = self.copies.iter().map(|(name, bytes)| (*name, bytes.len() as u64));
        let weights = self.slab.files.iter().map(|f| (f.plan.name(), f.plan.bytes()));
        copies.chain(weights).chain([(crate::slab::MANIFEST, self.manifest_bytes)])
    }

    /// Bytes of the whole output.
    pub fn total_bytes(&self) -> u64 {
        self.files().fold(0, |sum, (_, bytes)| sum.saturating_add(bytes))
    }

    /// What was asked for, as the manifest will say it.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Whether a finished container is what this plan would have written.
    fn matches(&self, manifest: &Manifest) -> bool {
        let weights = self.slab.files.iter().map(|f| (f.plan.name(), f.plan.bytes()));
        manifest.model_type == self.model_type
            && weights.eq(manifest.files.iter().map(|f| (f.name.as_str(), f.bytes)))
    }
}

/// Converts `source` into the directory `destination`, or goes on with a conversion begun there.
///
/// # Errors
/// A destination that holds something else, other parameters or another source; too little free
/// space; a source that cannot be read; [`WriteError::Interrupted`] if `progress` asked for it.
pub fn convert(
    source: &Checkpoint,
    inventory: &Inventory,
    destination: &Path,
    options: &ConvertOptions,
    progress: OnProgress<'_>,
) -> Result<ConvertReport, WriteError> {
    let plan = ConvertPlan::new(source, inventory, options)?;
    let identity = SourceIdentity::of(source)?;
    // Dropped after the lock, whose file is in the directory.
    let _made = NewDirs::make(destination)?;
    refuse_same(source.dir(), destination)?;
    // Looked at before the lock, so that a foreign directory is left untouched, and after it.
    journal::examine(destination)?;
    let _lock = Lock::take(destination)?;
    let mut journal = match journal::examine(destination)? {
        Destination::Complete(manifest) => return complete(&plan, &manifest, destination),
        Destination::Begun(journal) => {
            refuse_other(destination, &journal, &plan, &identity)?;
            journal
        }
        Destination::Empty => {
            Journal { parameters: plan.parameters.clone(), source: identity, finished: Vec::new() }
        }
    };
    refuse_full(destination, &plan, &journal)?;
    journal.save(destination)?;
    for (name, bytes) in &plan.copies {
        write_atomic(destination, name, bytes)?;
    }
    let (finished, skipped) = write_weights(source, destination, &plan, &mut journal, progress)?;
    let manifest = plan.slab.manifest(&plan.model_type, &plan.parameters, &finished);
    write_manifest(destination, &manifest)?;
    journal::clean_up(destination)?;
    Ok(ConvertReport {
        files: plan.files().count(),
        bytes: plan.total_bytes(),
        skipped,
        already_complete: false,
    })
}

/// Writes the weight files that the journal does not list; returns all, and how many it listed.
fn write_weights(
    source: &Checkpoint,
    destination: &Path,
    plan: &ConvertPlan,
    journal: &mut Journal,
    progress: OnProgress<'_>,
) -> Result<(Vec<Finished>, usize), WriteError> {
    let threads = worker_threads();
    let weights = source::CheckpointWeights { checkpoint: source, threads };
    let total = plan.total_bytes();
    let mut done: u64 = plan.copies.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    let mut finished = Vec::with_capacity(plan.slab.files.len());
    let mut skipped = 0;
    for file in &plan.slab.files {
        let report = &mut |bytes| {
            let written = done + bytes;
            match progress(Progress { file: file.plan.name(), written, total }) {
                ControlFlow::Continue(()) => Ok(()),
                ControlFlow::Break(()) => Err(WriteError::Interrupted { written, total }),
            }
        };
        if let Some(entry) = kept(destination, file, journal, report)? {
            finished.push(entry);
            skipped += 1;
        } else {
            let entry = write_file(destination, file, &weights, threads, report)?;
            journal.finished.retain(|f| f.name != entry.name);
            journal.finished.push(entry.clone());
            journal.save(destination)?;
            finished.push(entry);
        }
        done += file.plan.bytes();
    }
    Ok((finished, skipped))
}

/// A file of an earlier run whose bytes are still those that it wrote; a damaged one is removed.
fn kept(
    destination: &Path,
    file: &SlabFile,
    journal: &Journal,
    progress: &mut dyn FnMut(u64) -> Result<(), WriteError>,
) -> Result<Option<Finished>, WriteError> {
    let Some(entry) = journal.finished(destination, file) else {
        return Ok(None);
    };
    if journal::is_unharmed(destination, entry, progress)? {
        return Ok(Some(entry.clone()));
    }
    let path = destination.join(&entry.name);
    fs::remove_file(&path).map_err(WriteError::io("remove", &path))?;
    Ok(None)
}

/// The end of a run into a directory that has its manifest.
fn complete(plan: &ConvertPlan, manifest: &Manifest, dir: &Path) -> Result<ConvertReport, WriteError> {
    if manifest.parameters != plan.parameters {
        return Err(other_parameters(dir, &manifest.parameters, &plan.parameters));
    }
    if !plan.matches(manifest) {
        let sum = |files: &mut dyn Iterator<Item = u64>| files.fold(0u64, u64::saturating_add);
        let held = sum(&mut manifest.files.iter().map(|f| f.bytes));
        let asked = sum(&mut plan.slab.files.iter().map(|f| f.plan.bytes()));
        return Err(WriteError::SourceChanged {
            dir: dir.to_owned(),
            held: format!("{}, {} weight files of {held} bytes", manifest.model_type, manifest.files.len()),
            asked: format!("{}, {} weight files of {asked} bytes", plan.model_type, plan.slab.files.len()),
        });
    }
    journal::clean_up(dir)?;
    let files = plan.files().count();
    let skipped = plan.slab.files.len();
    Ok(ConvertReport { files, bytes: plan.total_bytes(), skipped, already_complete: true })
}

/// Refuses a begun conversion of another source or with other parameters.
fn refuse_other(
    dir: &Path,
    held: &Journal,
    plan: &ConvertPlan,
    asked: &SourceIdentity,
) -> Result<(), WriteError> {
    if held.parameters != plan.parameters {
        return Err(other_parameters(dir, &held.parameters, &plan.parameters));
    }
    if held.source != *asked {
        return Err(WriteError::SourceChanged {
            dir: dir.to_owned(),
            held: held.source.describe(),
            asked: asked.describe(),
        });
    }
    Ok(())
}

fn other_parameters(dir: &Path, held: &Parameters, asked: &Parameters) -> WriteError {
    let text = |p: &Parameters| {
        format!(
            "experts {}, rest {}, draft experts {}, source {}",
            p.experts, p.rest, p.draft_experts, p.source
        )
    };
    WriteError::Parameters { dir: dir.to_owned(), held: text(held), asked: text(asked) }
}

/// Refuses to write into the source.
fn refuse_same(source: &Path, destination: &Path) -> Result<(), WriteError> {
    let canonical = |dir: &Path| fs::canonicalize(dir).map_err(WriteError::io("resolve", dir));
    if canonical(source)? == canonical(destination)? {
        return Err(WriteError::SameDirectory { dir: destination.to_owned() });
    }
    Ok(())
}

/// Refuses an output that the drive cannot take.
fn refuse_full(dir: &Path, plan: &ConvertPlan, journal: &Journal) -> Result<(), WriteError> {
    let kept = plan
        .slab
        .files
        .iter()
        .filter_map(|f| journal.finished(dir, f))
        .fold(0u64, |sum, f| sum.saturating_add(f.bytes));
    let wanted = plan.total_bytes().saturating_sub(kept);
    match free_bytes(dir)? {
        Some(free) if free < wanted => Err(WriteError::Space { dir: dir.to_owned(), wanted, free }),
        _ => Ok(()),
    }
}

/// The layout of a dense tensor: f32 for vectors and for what the role keeps, else the target.
fn dense_layout(source: &Checkpoint, spec: &TensorSpec, target: Target) -> Result<MatrixLayout, WriteError> {
    let format = match target {
        _ if spec.rows == 1 || spec.role.keeps_f32() => Format::F32,
        Target::Format(format) => {
            check_target(&spec.name, format)?;
            format
        }
        Target::Keep => source.matrix(spec)?.layout.format(),
    };
    MatrixLayout::new(format, spec.rows, spec.cols).map_err(WriteError::layout(&spec.name))
}

/// The layouts of a layer's gate, up and down.
fn expert_layouts(
    source: &Checkpoint,
    spec: &ExpertLayerSpec,
    target: Target,
) -> Result<[MatrixLayout; 3], WriteError> {
    let stored = |expert| -> Result<[Format; 3], WriteError> {
        Ok(source.expert(spec, expert)?.parts.map(|part| part.layout.format()))
    };
    let formats = match target {
        Target::Format(format) => {
            check_target(&spec.name(0, Part::Gate), format)?;
            [format; 3]
        }
        Target::Keep => {
            let wanted = stored(0)?;
            let text = |f: [Format; 3]| f.map(|f| f.to_string()).join("/");
            for expert in 1..spec.count {
                let got = stored(expert)?;
                if got != wanted {
                    return Err(WriteError::Mixed {
                        layer: spec.layer,
                        expert,
                        wanted: text(wanted),
                        got: text(got),
                    });
                }
            }
            wanted
        }
    };
    layouts(spec, formats)
}

/// Layouts of gate, up and down in these formats.
pub(crate) fn layouts(spec: &ExpertLayerSpec, formats: [Format; 3]) -> Result<[MatrixLayout; 3], WriteError> {
    let layout = |part: Part| {
        let (rows, cols) = spec.shape(part);
        MatrixLayout::new(formats[part as usize], rows, cols).map_err(WriteError::layout(&spec.name(0, part)))
    };
    Ok([layout(Part::Gate)?, layout(Part::Up)?, layout(Part::Down)?])
}

/// Reads the small files that are taken over.
fn read_copies(dir: &Path) -> Result<Vec<(&'static str, Vec<u8>)>, WriteError> {
    let mut copies = Vec::new();
    for name in COPIED {
        let path = dir.join(name);
        match read_capped(&path) {
            Ok(bytes) => copies.push((name, bytes)),
            Err(crate::Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(copies)
}
