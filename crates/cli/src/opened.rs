//! A model that was looked at but not loaded, and how errors of writing one end the program.

use std::path::{Path, PathBuf};

use metaltail_container::convert::WriteError;
use metaltail_container::{Checkpoint, Inventory};
use metaltail_model::Plan;

use crate::exit::{Failure, Kind};
use crate::runtime::{container_kind, directories, model_dir};
use crate::settings::Settings;

/// A model directory with its plan; no tensor was read.
pub struct Opened {
    /// Files and headers.
    pub checkpoint: Checkpoint,
    /// What the model computes.
    pub plan: Plan,
    /// What it must hold.
    pub inventory: Inventory,
}

impl Opened {
    /// Opens a directory, or several (`DIR,DIR`), and derives the plan.
    ///
    /// # Errors
    /// A model that is missing, damaged or of a family that is not supported, or that cannot be read.
    pub fn at(dir: &Path) -> Result<Opened, Failure> {
        let (first, further) = directories(dir)?;
        let mut checkpoint = Checkpoint::open_with(&first, &further).map_err(|error| refused(&error))?;
        let plan = Plan::of(&mut checkpoint).map_err(|error| Failure::from_error(Kind::Model, &error))?;
        let inventory = plan.inventory();
        Ok(Opened { checkpoint, plan, inventory })
    }
}

/// The refusal of a model's files.
pub fn refused(error: &metaltail_container::Error) -> Failure {
    Failure::from_error(container_kind(error), error)
}

/// The path that a command was given by position, else what `--model` says, else the demo model.
///
/// # Errors
/// There is none of them.
pub fn chosen(positional: Option<&PathBuf>, settings: &Settings) -> Result<PathBuf, Failure> {
    match positional {
        Some(path) => Ok(path.clone()),
        None => model_dir(settings),
    }
}

/// How an error of writing a container ends the program.
pub fn write_failure(error: &WriteError) -> Failure {
    let kind = match error {
        WriteError::Source(error) => container_kind(error),
        WriteError::Damaged { .. } | WriteError::Overflow { .. } => Kind::Model,
        // Numbers of the source that the format cannot hold: the source is at fault.
        WriteError::Quantise { .. } => Kind::Model,
        WriteError::Layout { .. }
        | WriteError::Foreign { .. }
        | WriteError::NotEmpty { .. }
        | WriteError::SameDirectory { .. }
        | WriteError::Parameters { .. }
        | WriteError::SourceChanged { .. }
        | WriteError::Mixed { .. }
        | WriteError::GgufTensor { .. }
        | WriteError::Exists { .. }
        | WriteError::Synth(_) => Kind::Usage,
        WriteError::Interrupted { .. } => Kind::Interrupted,
        _ => Kind::Failed,
    };
    Failure::from_error(kind, error)
}
