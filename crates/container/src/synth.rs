//! Seeded synthetic models in every container form.
//!
//! The numbers of a tensor depend on the seed, its name and its format alone, so a slab container
//! and a colibrì directory of the same options hold the same quantised bytes, and a Hugging Face
//! checkpoint holds their values rounded to bf16. Quantised bytes are drawn directly rather than
//! quantised, so a gigabyte takes seconds. A GGUF file holds blocks of its own, and the same norms
//! and routers as the others.

mod blocks;
mod configs;
mod gguf;
mod stock;
mod tokenizer;
mod values;

use std::fmt;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::str::FromStr;

use metaltail_quant::{Format, MatrixLayout};
use serde::Serialize;
use serde_json::Value;
use thiserror::Error;

pub use configs::{Like, ParseLikeError, config};
pub use gguf::gguf_file;
use stock::{Form, StockPlan};
use values::Values;

use crate::convert::{OnProgress, Progress, check_target, free_bytes, layouts};
use crate::gguf::TensorType;
use crate::slab::Parameters;
pub use crate::slab_writer::WriteError;
use crate::slab_writer::directory::NewDirs;
use crate::slab_writer::file::write_atomic;
use crate::slab_writer::parallel::worker_threads;
use crate::slab_writer::{Blobs, DENSE_FILE, RunShape, SlabPlan, Weights, write_file, write_manifest};
use crate::{ExpertLayerSpec, Inventory, Part, Role, TensorSpec};

/// Which container form a synthetic model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SynthFormat {
    /// Our own container.
    Slab,
    /// The colibrì layout.
    Colibri,
    /// A Hugging Face checkpoint in bf16.
    Hf,
    /// One GGUF file.
    Gguf,
}

impl fmt::Display for SynthFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SynthFormat::Slab => "slab",
            SynthFormat::Colibri => "colibri",
            SynthFormat::Hf => "hf",
            SynthFormat::Gguf => "gguf",
        })
    }
}

/// A name that no form has.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("unknown container form {0:?}: expected slab, colibri, hf or gguf")]
pub struct ParseSynthFormatError(pub String);

impl FromStr for SynthFormat {
    type Err = ParseSynthFormatError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "slab" => Ok(SynthFormat::Slab),
            "colibri" => Ok(SynthFormat::Colibri),
            "hf" => Ok(SynthFormat::Hf),
            "gguf" => Ok(SynthFormat::Gguf),
            _ => Err(ParseSynthFormatError(name.to_owned())),
        }
    }
}

/// How a synthetic model is stored and seeded; its sizes are in its configuration ([`config`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SynthOptions {
    /// Container form.
    pub format: SynthFormat,
    /// Format of routed experts; the formats are those of every form but GGUF.
    pub experts: Format,
    /// Format of the other matrices, the draft layer's too.
    pub rest: Format,
    /// Format of the draft layer's experts.
    pub draft_experts: Format,
    /// Whether the experts of the second layer that has any are int8 instead.
    pub mixed: bool,
    /// Number of main weight files of the colibrì and Hugging Face forms; by default about 5 GiB each.
    pub shards: Option<u32>,
    /// Type of all matrices of the GGUF form, which only routers and vectors are not in.
    pub blocks: TensorType,
    /// Seed of all numbers.
    pub seed: u64,
}

impl SynthOptions {
    /// The usual options of a model: experts in `int4-g64` (`int4-g32` where the model is only 64
    /// wide, so that a row has more than one group), int8 for the rest, seed 0.
    pub fn new(like: Like, format: SynthFormat) -> SynthOptions {
        let (group, shards) = match like {
            Like::Tiny | Like::Wide => (32, Some(3)),
            Like::Fat => (64, Some(6)),
            _ => (64, None),
        };
        SynthOptions {
            format,
            experts: Format::Int4Group(group),
            rest: Format::Int8Row,
            draft_experts: Format::Int8Row,
            mixed: false,
            shards,
            blocks: blocks::DEFAULT,
            seed: 0,
        }
    }
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SynthReport {
    /// Weight files.
    pub files: usize,
    /// Bytes of the weight files.
    pub bytes: u64,
}

/// Chooses the layout of every matrix.
struct Layouts {
    options: SynthOptions,
    /// Layer whose experts are int8 in a mixed model.
    odd: Option<u32>,
}

impl Layouts {
    fn new(inventory: &Inventory, options: &SynthOptions) -> Layouts {
        let odd = inventory.experts.iter().filter(|e| !e.draft).nth(1).map(|e| e.layer);
        Layouts { options: *options, odd: odd.filter(|_| options.mixed) }
    }

    fn dense(&self, spec: &TensorSpec) -> Result<MatrixLayout, WriteError> {
        let f32 = spec.rows == 1 || spec.role.keeps_f32();
        let format = if f32 { Format::F32 } else { self.options.rest };
        check_target(&spec.name, format)?;
        MatrixLayout::new(format, spec.rows, spec.cols).map_err(WriteError::layout(&spec.name))
    }

    fn experts(&self, spec: &ExpertLayerSpec) -> Result<[MatrixLayout; 3], WriteError> {
        let format = match spec {
            _ if spec.draft => self.options.draft_experts,
            _ if self.odd == Some(spec.layer) => Format::Int8Row,
            _ => self.options.experts,
        };
        check_target(&spec.name(0, Part::Gate), format)?;
        layouts(spec, [format; 3])
    }
}

/// Adds up what was written and asks whether to go on.
struct Meter<'p> {
    progress: OnProgress<'p>,
    done: u64,
    total: u64,
}

impl Meter<'_> {
    /// `bytes` of the current file are written.
    fn report(&mut self, file: &str, bytes: u64) -> Result<(), WriteError> {
        let written = self.done + bytes;
        match (self.progress)(Progress { file, written, total: self.total }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(WriteError::Interrupted { written, total: self.total }),
        }
    }

    /// The current file, of this length, is complete.
    fn close(&mut self, bytes: u64) {
        self.done += bytes;
    }
}

impl Weights for Values {
    fn dense(&self, spec: &TensorSpec, layout: MatrixLayout) -> Result<Blobs, WriteError> {
        let mut blobs =
            Blobs { weights: vec![0; layout.weight_bytes()], scales: vec![0; layout.scale_bytes()] };
        self.weights(&spec.name, spec.role, layout, &mut blobs.weights)?;
        self.scales(&spec.name, spec.role, layout, &mut blobs.scales)?;
        Ok(blobs)
    }

    fn expert(
        &self,
        spec: &ExpertLayerSpec,
        expert: u32,
        shape: &RunShape,
        run: &mut [u8],
    ) -> Result<(), WriteError> {
        for part in Part::ALL {
            let (name, layout) = (spec.name(expert, part), shape.layouts[part as usize]);
            let (weights, scales) = shape.part_mut(run, part);
            self.weights(&name, Role::DenseFfn, layout, weights)?;
            self.scales(&name, Role::DenseFfn, layout, scales)?;
        }
        Ok(())
    }
}

/// Writes a synthetic model with this configuration into the new or empty directory `destination`.
///
/// `inventory` must be the one that the model room derives from `config`. A `destination` that ends in
/// `.gguf` is the file of the GGUF form itself; in a directory it is called `model.gguf` ([`gguf_file`]).
///
/// # Errors
/// A directory that is not empty, a file that is there; too little free space; I/O; a family or a shape
/// that the GGUF form does not take; [`WriteError::Interrupted`] if `progress` asked for it.
pub fn synth(
    destination: &Path,
    config: &Value,
    inventory: &Inventory,
    options: &SynthOptions,
    progress: OnProgress<'_>,
) -> Result<SynthReport, WriteError> {
    if options.format == SynthFormat::Gguf {
        return gguf::write(destination, config, inventory, options, progress);
    }
    let _made = empty_directory(destination)?;
    let layouts = Layouts::new(inventory, options);
    let values = Values { seed: options.seed };
    let form = match options.format {
        SynthFormat::Slab => {
            return slab(destination, config, inventory, &layouts, values, progress);
        }
        SynthFormat::Colibri => Form::Colibri,
        _ => Form::Hf,
    };
    let plan = StockPlan::new(inventory, &layouts, form, options.shards.map(u64::from))?;
    let sizes: Vec<u64> = plan.sizes().map(|(_, bytes)| bytes).collect();
    let report = begin(destination, config, &sizes)?;
    plan.write(destination, values, &mut Meter { progress, done: 0, total: report.bytes })?;
    Ok(report)
}

/// The directory, made where it is absent.
fn empty_directory(dir: &Path) -> Result<NewDirs, WriteError> {
    let made = NewDirs::make(dir)?;
    let mut entries = fs::read_dir(dir).map_err(WriteError::io("list", dir))?;
    match entries.next() {
        Some(_) => Err(WriteError::NotEmpty { dir: dir.to_owned() }),
        None => Ok(made),
    }
}

/// Refuses an output of `wanted` bytes that the drive cannot take.
fn check_space(dir: &Path, wanted: u64) -> Result<(), WriteError> {
    match free_bytes(dir)? {
        Some(free) if free < wanted => Err(WriteError::Space { dir: dir.to_owned(), wanted, free }),
        _ => Ok(()),
    }
}

/// Writes the slab form.
fn slab(
    destination: &Path,
    config: &Value,
    inventory: &Inventory,
    layouts: &Layouts,
    values: Values,
    progress: OnProgress<'_>,
) -> Result<SynthReport, WriteError> {
    let dense = inventory.tensors.iter().map(|spec| Ok((spec.clone(), layouts.dense(spec)?)));
    let experts = inventory.experts.iter().map(|spec| Ok((spec.clone(), layouts.experts(spec)?)));
    let plan = SlabPlan::new(
        dense.collect::<Result<_, WriteError>>()?,
        experts.collect::<Result<_, WriteError>>()?,
        DENSE_FILE,
    )?;
    let sizes: Vec<u64> = plan.files.iter().map(|f| f.plan.bytes()).collect();
    let report = begin(destination, config, &sizes)?;
    let mut meter = Meter { progress, done: 0, total: report.bytes };
    let mut finished = Vec::with_capacity(plan.files.len());
    for file in &plan.files {
        let name = file.plan.name();
        let report = &mut |bytes| meter.report(name, bytes);
        finished.push(write_file(destination, file, &values, worker_threads(), report)?);
        meter.close(file.plan.bytes());
    }
    let options = &layouts.options;
    let parameters = Parameters {
        experts: if options.mixed { "mixed".to_owned() } else { options.experts.to_string() },
        rest: options.rest.to_string(),
        draft_experts: options.draft_experts.to_string(),
        source: "synth".to_owned(),
    };
    write_manifest(destination, &plan.manifest(&inventory.family, &parameters, &finished))?;
    Ok(report)
}

/// Refuses an output that the drive cannot take, and writes the small files.
fn begin(destination: &Path, config: &Value, sizes: &[u64]) -> Result<SynthReport, WriteError> {
    let bytes = sizes.iter().fold(0u64, |sum, n| sum.saturating_add(*n));
    check_space(destination, bytes)?;
    let small = [
        ("config.json", config.clone()),
        ("generation_config.json", tokenizer::generation_config()),
        ("tokenizer.json", tokenizer::tokenizer_json()),
        ("tokenizer_config.json", tokenizer::tokenizer_config()),
    ];
    for (name, value) in small {
        let mut text = format!("{value:#}");
        text.push('\n');
        write_atomic(destination, name, text.as_bytes())?;
    }
    Ok(SynthReport { files: sizes.len(), bytes })
}
