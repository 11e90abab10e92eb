//! The usage profile of a loaded model: whose it is, where it lies, and who records it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use metaltail_container::{Checkpoint, JSON_CAP, Kind, read_regular};
use metaltail_model::{LayerPlan, Plan};
use metaltail_store::LayerExperts;
use metaltail_store::usage::{ColiModel, ColiUsage, UsageError, UsageIdentity, UsageProfile, UsageRecorder};

use crate::error::EngineError;
use crate::telemetry::{Event, Listener, Telemetry};

/// The history that colibrì keeps in a model's directory.
const COLI_FILE: &str = ".coli_usage";

/// Where a profile lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UsagePlace {
    /// In this file.
    File(PathBuf),
    /// In this directory, in a file named by the model's fingerprint.
    Directory(PathBuf),
}

impl UsagePlace {
    /// The file for a model.
    pub fn file(&self, identity: &UsageIdentity) -> PathBuf {
        match self {
            UsagePlace::File(path) => path.clone(),
            UsagePlace::Directory(directory) => {
                directory.join(format!("{:016x}.usage", identity.fingerprint()))
            }
        }
    }
}

/// What becomes of a usage profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum UsageMode {
    /// It is neither read nor written.
    #[default]
    Off,
    /// It is read and never written.
    ReadOnly(UsagePlace),
    /// It is read, recorded and saved.
    On(UsagePlace),
}

/// What identifies a checkpoint: shape, and a hash of configuration, manifest or index, and every file's
/// name and length. Weights are not read; copies and mirrors of a model have one identity.
///
/// # Errors
/// A model without sparse layers, or with more experts than a profile takes; files that cannot be looked at.
pub fn identity(
    checkpoint: &Checkpoint,
    plan: &Plan,
    places: &[LayerExperts],
) -> Result<UsageIdentity, UsageError> {
    let mut bytes = checkpoint.config().to_string().into_bytes();
    for name in ["manifest.json", "model.safetensors.index.json"] {
        // Small files that opening the checkpoint has read already; most directories have one of them.
        if let Ok(content) = read_regular(&checkpoint.dir().join(name), JSON_CAP) {
            bytes.push(0);
            bytes.extend(content);
        }
    }
    for file in checkpoint.files() {
        let read = |source| UsageError::Read { file: file.clone(), source };
        let length = std::fs::metadata(file).map_err(read)?.len();
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        bytes.extend(format!("\0{name}\0{length}").into_bytes());
    }
    let top_k = plan.layers.iter().filter_map(LayerPlan::moe).map(|moe| moe.top_k).max();
    UsageIdentity::new(places, top_k.unwrap_or(0), &bytes)
}

/// What a colibrì history must know of a model.
pub fn coli_model(plan: &Plan) -> ColiModel<'_> {
    let experts = plan.layers.iter().filter_map(LayerPlan::moe).map(|moe| moe.experts).max();
    // A configuration's dimensions are range-checked far below 2^32.
    ColiModel { layers: plan.layers.len() as u32, experts: experts.unwrap_or(0) as u32, family: &plan.family }
}

/// Reads a colibrì history.
///
/// # Errors
/// A file that cannot be read or is none.
pub fn read_coli(path: &Path) -> Result<ColiUsage, UsageError> {
    let read = |source| UsageError::ReadPins { file: path.into(), source };
    let bytes = read_regular(path, JSON_CAP).map_err(read)?;
    let text = String::from_utf8(bytes)
        .map_err(|error| read(io::Error::new(io::ErrorKind::InvalidData, error.utf8_error())))?;
    ColiUsage::parse(&text)
}

/// Records what routers choose, from the one stream of events.
struct Listening(Arc<UsageRecorder>);

impl Listener for Listening {
    fn on_event(&self, event: &Event<'_>) {
        if let Event::Selected(selected) = event {
            self.0.record(selected.layer, selected.rows);
        }
    }
}

/// Opens a model's profile and begins to record. What is wrong with it becomes a notice; without one that
/// can be read, a history that colibrì left in the model's directory is the beginning.
///
/// # Errors
/// A file was named that is something else, or cannot be read: nobody wants that overwritten. In the usual
/// place that is a notice, and nothing is recorded.
pub(crate) fn open(
    mode: &UsageMode,
    checkpoint: &Checkpoint,
    plan: &Plan,
    places: &[LayerExperts],
    telemetry: &Telemetry,
) -> Result<Option<Arc<UsageRecorder>>, EngineError> {
    let (place, writes) = match mode {
        UsageMode::Off => return Ok(None),
        UsageMode::ReadOnly(place) => (place, false),
        UsageMode::On(place) => (place, true),
    };
    // A model without experts has no use of them: nothing to say.
    if places.is_empty() {
        return Ok(None);
    }
    let identity = match identity(checkpoint, plan, places) {
        Ok(identity) => identity,
        Err(error) => {
            telemetry.notice(&error.to_string());
            return Ok(None);
        }
    };
    let path = place.file(&identity);
    let (mut recorder, problem) = match (UsageRecorder::open(&path, identity.clone(), writes), place) {
        (Ok(opened), _) => opened,
        (Err(error), UsagePlace::File(_)) => return Err(EngineError::Usage(error)),
        (Err(error), UsagePlace::Directory(_)) => {
            telemetry.notice(&format!("{error}; usage is not recorded until that is moved away"));
            return Ok(None);
        }
    };
    if let Some(problem) = &problem {
        let kept = "; it is begun anew, and the old file is kept beside it as .old, numbered if need be";
        let kept = if writes { kept } else { "" };
        telemetry.notice(&format!("{problem}{kept}"));
    }
    if problem.is_none() && !path.exists() && checkpoint.kind() == Kind::Colibri {
        let history = checkpoint.dir().join(COLI_FILE);
        if history.exists() {
            match begin_with(&history, identity, plan) {
                Ok(profile) => recorder = recorder.starting_from(profile),
                Err(error) => telemetry.notice(&format!("{} is not used: {error}", history.display())),
            }
        }
    }
    let recorder = Arc::new(recorder);
    if writes && !telemetry.attach(Arc::new(Listening(recorder.clone()))) {
        telemetry.notice("another engine reports here: the usage of this one is not recorded");
    }
    Ok(Some(recorder))
}

/// A new profile with a history found beside the model, which must be of the model's family.
fn begin_with(history: &Path, identity: UsageIdentity, plan: &Plan) -> Result<UsageProfile, UsageError> {
    let (usage, model) = (read_coli(history)?, coli_model(plan));
    if let Some(reason) = usage.other_engine(&model) {
        return Err(UsageError::History { reason });
    }
    let mut profile = UsageProfile::new(identity);
    profile.add_coli(&usage, &model)?;
    Ok(profile)
}
