//! What is planned: a checkpoint with its stored formats, or a configuration with assumed ones.

use std::path::{Path, PathBuf};

use metaltail_container::{
    Checkpoint, Error, ExpertLayerSpec, ExpertPlace, Extent, Inventory, JSON_CAP, Part, PartPlace, RunOffset,
    TensorSpec,
};
use metaltail_engine::memory::Demand;
use metaltail_model::{Plan, expert_places};
use metaltail_quant::{Format, LayoutError, MatrixLayout};
use metaltail_store::LayerExperts;
use serde_json::{Value, json};

use crate::exit::{Failure, Kind};
use crate::input;
use crate::opened::refused;
use crate::runtime::{directories, failure};
use crate::token_cost::{TokenCost, drive_bytes};

/// What `convert` makes of experts unless told otherwise.
const EXPERTS: Format = Format::Int4Group(64);

/// What `convert` makes of the other matrices.
const REST: Format = Format::Int8Row;

/// Alignment of a blob within an expert's run, and of the run, in bytes.
const BLOB_ALIGN: u64 = 64;
const RUN_ALIGN: u64 = 4096;

/// A model to plan for.
pub struct Planned {
    /// What was given.
    pub path: PathBuf,
    /// The files, where there are any.
    pub checkpoint: Option<Checkpoint>,
    /// What it computes.
    pub plan: Plan,
    /// What it must hold.
    pub inventory: Inventory,
    /// Experts of the main layers.
    pub places: Vec<LayerExperts>,
    /// What was assumed.
    pub notices: Vec<String>,
}

fn refuse(error: &(dyn std::error::Error + 'static)) -> Failure {
    Failure::from_error(Kind::Model, error)
}

impl Planned {
    /// Opens a directory, or reads a `config.json`: the file itself, or that of a directory that
    /// has no weights yet.
    ///
    /// # Errors
    /// A model that is missing, damaged or of a family that is not supported.
    pub fn at(path: &Path) -> Result<Planned, Failure> {
        if path.is_file() && path.extension().is_some_and(|extension| extension == "json") {
            return Planned::of_config(path, path);
        }
        let (first, further) = directories(path)?;
        match Checkpoint::open_with(&first, &further) {
            Ok(checkpoint) => Planned::of_checkpoint(path, checkpoint),
            Err(Error::NoTensors { .. }) => Planned::of_config(path, &first.join("config.json")),
            Err(error) => Err(refused(&error)),
        }
    }

    fn of_checkpoint(path: &Path, mut checkpoint: Checkpoint) -> Result<Planned, Failure> {
        let plan = Plan::of(&mut checkpoint).map_err(|error| refuse(&error))?;
        let inventory = plan.inventory();
        checkpoint.check(&inventory).map_err(|error| refused(&error))?;
        let places = expert_places(&checkpoint, &inventory, false).map_err(|error| refuse(&error))?;
        let notices = checkpoint.notices();
        let path = path.to_owned();
        Ok(Planned { path, checkpoint: Some(checkpoint), plan, inventory, places, notices })
    }

    fn of_config(path: &Path, file: &Path) -> Result<Planned, Failure> {
        let plan = Plan::from_config(&read_json(file)?).map_err(|error| refuse(&error))?;
        let inventory = plan.inventory();
        let main = inventory.experts.iter().filter(|layer| !layer.draft);
        let places: Result<Vec<LayerExperts>, LayoutError> = main.map(assumed_layer).collect();
        let places = places.map_err(|error| refuse(&error))?;
        let notices = vec![format!(
            "there are no weights to look at: experts are taken to be {EXPERTS}, the rest {REST}, as `metaltail convert` stores them"
        )];
        let path = path.to_owned();
        Ok(Planned { path, checkpoint: None, plan, inventory, places, notices })
    }

    /// `hf`, `colibri`, `slab` or `gguf`; none for a configuration alone.
    pub fn kind(&self) -> Option<String> {
        self.checkpoint.as_ref().map(|checkpoint| checkpoint.kind().to_string())
    }

    /// Formats that were assumed, as JSON; null for a checkpoint.
    pub fn assumed(&self) -> Value {
        match self.checkpoint {
            Some(_) => Value::Null,
            None => json!({"experts": EXPERTS.to_string(), "rest": REST.to_string()}),
        }
    }

    /// Bytes of all experts on the drive, padding included.
    pub fn drive_bytes(&self) -> u64 {
        self.places.iter().fold(0, |sum, layer| sum.saturating_add(drive_bytes(layer)))
    }

    /// Memory apart from expert slots.
    ///
    /// # Errors
    /// Tensors that cannot be located.
    pub fn demand(&self, context: usize, chunk: usize, threads: usize) -> Result<Demand, Failure> {
        let (plan, inventory) = (&self.plan, &self.inventory);
        if let Some(checkpoint) = &self.checkpoint {
            return Demand::of(checkpoint, plan, inventory, context, chunk, threads)
                .map_err(|error| failure(&error));
        }
        let beside = Demand::beside_weights(plan, inventory, context, chunk, threads);
        beside.with_weights(plan, inventory, assumed_bytes).map_err(|error| refuse(&error))
    }

    /// Bytes that a token reads.
    ///
    /// # Errors
    /// Tensors that cannot be located.
    pub fn cost(&self) -> Result<TokenCost, Failure> {
        let (plan, inventory, places) = (&self.plan, &self.inventory, &self.places);
        match &self.checkpoint {
            Some(checkpoint) => TokenCost::of(plan, inventory, places, |spec| {
                Ok::<_, Error>(checkpoint.matrix(spec)?.layout.bytes() as u64)
            })
            .map_err(|error| refuse(&error)),
            None => TokenCost::of(plan, inventory, places, assumed_bytes).map_err(|error| refuse(&error)),
        }
    }
}

/// Stored bytes of a dense tensor in the assumed format; vectors stay in f32.
fn assumed_bytes(spec: &TensorSpec) -> Result<u64, LayoutError> {
    let format = if spec.rows == 1 { Format::F32 } else { REST };
    Ok(MatrixLayout::new(format, spec.rows, spec.cols)?.bytes() as u64)
}

/// A layer's experts as the slab container would lay them out: one run an expert, its blobs at
/// multiples of 64 and its length a multiple of 4096.
fn assumed_layer(spec: &ExpertLayerSpec) -> Result<LayerExperts, LayoutError> {
    let mut end = 0u64;
    let mut put = |bytes: usize| {
        let offset = end.next_multiple_of(BLOB_ALIGN);
        end = offset + bytes as u64;
        RunOffset { run: 0, offset }
    };
    let layout = |part: Part| {
        let (rows, cols) = spec.shape(part);
        MatrixLayout::new(EXPERTS, rows, cols)
    };
    let layouts = [layout(Part::Gate)?, layout(Part::Up)?, layout(Part::Down)?];
    let weights = layouts.map(|layout| put(layout.weight_bytes()));
    let scales = layouts.map(|layout| put(layout.scale_bytes()));
    let parts: [PartPlace; 3] = std::array::from_fn(|i| PartPlace {
        layout: layouts[i],
        weights: weights[i],
        scales: Some(scales[i]),
    });
    let len = end.next_multiple_of(RUN_ALIGN);
    let place = |expert: u64| ExpertPlace {
        // Sizes come from a range-checked configuration, and an offset is never read here.
        runs: vec![Extent { file: 0, offset: expert.saturating_mul(len), len }],
        parts,
        checksum: None,
        repack: None,
    };
    let experts = (0..u64::from(spec.count)).map(place).collect();
    Ok(LayerExperts { layer: spec.layer, experts })
}

/// Reads a JSON file of at most [`JSON_CAP`] bytes.
fn read_json(path: &Path) -> Result<Value, Failure> {
    let refuse =
        |reason: String| Failure::new(Kind::Model, format!("cannot use {}: {reason}", path.display()));
    let text = input::regular(path)
        .and_then(|file| input::read_capped(file, JSON_CAP))
        .map_err(|error| refuse(error.to_string()))?;
    serde_json::from_slice(&text).map_err(|error| refuse(error.to_string()))
}
