//! What to pin: the setting, the profile and the room become a list of experts.

use std::path::{Path, PathBuf};

use metaltail_store::usage::pin::{self, PinPlan, PinRoom};
use metaltail_store::usage::{ColiModel, PinFile, UsageError, UsageIdentity, UsageProfile};
use metaltail_store::{Budget, BudgetError, Geometry};

use crate::error::EngineError;
use crate::options::EngineOptions;

/// What is pinned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PinMode {
    /// Nothing.
    #[default]
    Off,
    /// The hottest experts of the usage profile, as many as a replay of its sample finds best.
    Auto,
    /// What this file says: experts, a usage profile, or a colibrì history.
    File(PathBuf),
}

/// What was decided, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins {
    /// Experts, bytes, and what a replay found of other sizes.
    pub plan: PinPlan,
    /// Why these, in words.
    pub reason: String,
}

/// The memory that there is for pins and the cache, and the model's shape.
pub(crate) struct Ground<'a> {
    pub(crate) budget: &'a Budget,
    /// None for a model whose shape no profile takes.
    pub(crate) identity: Option<UsageIdentity>,
    pub(crate) profile: Option<&'a UsageProfile>,
    pub(crate) model: ColiModel<'a>,
    pub(crate) room: PinRoom,
    /// Bytes of slots for all experts.
    pub(crate) all: u64,
}

/// Decides what to pin.
///
/// # Errors
/// A file that cannot be read or does not fit the model; a size that does not fit the room (with the sum):
/// what was demanded is met or refused.
pub(crate) fn decide(options: &EngineOptions, ground: &Ground<'_>) -> Result<Pins, EngineError> {
    let nothing = |reason: &str| Ok(Pins { plan: PinPlan::default(), reason: reason.into() });
    let size = options.pin_size;
    match &options.pin {
        PinMode::Off if size.is_some_and(|size| size > 0) => {
            Err(EngineError::Setting("--pin-size says how much to pin and --pin off that nothing is".into()))
        }
        PinMode::Off => nothing("off"),
        _ if size == Some(0) => nothing("--pin-size 0"),
        PinMode::Auto if options.cap.is_some() && size.is_none() => {
            nothing("--cap says what is kept of each layer; --pin-size pins beside it")
        }
        PinMode::Auto if size.is_none() && ground.room.room >= ground.all => {
            nothing("there is a slot for every expert")
        }
        PinMode::Auto => match ground.profile {
            None => nothing("there is no usage profile"),
            Some(profile) if profile.weight() == 0 => nothing("the usage profile is empty as yet"),
            Some(profile) => counted(profile, size, ground),
        },
        PinMode::File(path) => {
            let Some(identity) = ground.identity.clone() else { return nothing("the model has no experts") };
            match PinFile::read(path).map_err(|error| of_list(path, error))? {
                PinFile::Experts(list) => listed(&list, size, &identity, ground),
                PinFile::Profile(profile) => {
                    let found = profile.identity();
                    // Another checkpoint of the same shape may be meant: the path was typed.
                    let here = UsageIdentity { checkpoint: found.checkpoint, ..identity };
                    match here.difference(found) {
                        Some(reason) => Err(EngineError::Setting(format!(
                            "{} is of another model: {reason}",
                            path.display()
                        ))),
                        None => counted(&profile, size, ground),
                    }
                }
                PinFile::History(history) => {
                    let mut profile = UsageProfile::new(identity);
                    profile.add_coli(&history, &ground.model).map_err(|error| of_list(path, error))?;
                    counted(&profile, size, ground)
                }
            }
        }
    }
}

/// The refusal of the file that `--pin` names, whatever it holds.
fn of_list(path: &Path, error: UsageError) -> EngineError {
    let path = path.display();
    match error {
        UsageError::ReadPins { source, .. } => {
            EngineError::Setting(format!("cannot read the list of pins {path}: {source}"))
        }
        error @ (UsageError::Line { .. } | UsageError::History { .. }) => {
            EngineError::Setting(format!("the list of pins {path}: {error}"))
        }
        error => EngineError::Usage(error),
    }
}

/// By counts: as many as asked for, else as a replay of the sample says.
fn counted(profile: &UsageProfile, size: Option<u64>, ground: &Ground<'_>) -> Result<Pins, EngineError> {
    let bytes = &ground.room.slot_bytes;
    if let Some(size) = size {
        fits(size, ground.room.room, ground.budget)?;
        let (pinned, bytes) = pin::fill(profile.identity(), &profile.hottest(bytes), bytes, size);
        let plan = PinPlan { pinned, bytes, ..PinPlan::default() };
        return Ok(Pins { plan, reason: "--pin-size".into() });
    }
    let plan = pin::choose(profile, &ground.room);
    let reason = match (plan.candidates.is_empty(), plan.bytes) {
        (true, _) => format!(
            "{} tokens are too few to judge by (at least {} are needed); --pin-size decides",
            plan.judged,
            pin::LEAST_JUDGED
        ),
        (false, 0) => format!("no pins would have read less in the last {} tokens", plan.judged),
        (false, _) => format!("so the last {} tokens would have read least", plan.judged),
    };
    Ok(Pins { plan, reason })
}

/// By a list: all of it, or its beginning.
fn listed(
    list: &[(u32, u32)],
    size: Option<u64>,
    identity: &UsageIdentity,
    ground: &Ground<'_>,
) -> Result<Pins, EngineError> {
    for &(layer, expert) in list {
        let known = identity.layers.iter().find(|&&(number, _)| number == layer);
        if known.is_none_or(|&(_, experts)| expert >= experts) {
            let has = known.map_or(0, |&(_, experts)| experts);
            return Err(EngineError::Setting(format!(
                "--pin names expert {expert} of layer {layer}, which has {has} routed experts"
            )));
        }
    }
    let limit = size.unwrap_or(u64::MAX);
    let (pinned, bytes) = pin::fill(identity, list, &ground.room.slot_bytes, limit);
    fits(bytes, ground.room.room, ground.budget)?;
    Ok(Pins { plan: PinPlan { pinned, bytes, ..PinPlan::default() }, reason: "the list".into() })
}

/// Whether pins of this size fit into the room that there is for them.
pub(crate) fn fits(bytes: u64, room: u64, budget: &Budget) -> Result<(), EngineError> {
    if bytes <= room {
        return Ok(());
    }
    let mut budget = budget.clone();
    budget.charge("pinned", bytes);
    let value = usize::try_from(bytes).unwrap_or(usize::MAX);
    Err(BudgetError::DoesNotFit { setting: "pin_size", value, budget }.into())
}

/// Bytes that pins and cache have together: what the fitted cache takes and what is left; beside a cache
/// that was asked for, what is left alone.
pub(crate) fn room(budget: &Budget, geometry: &Geometry, cap: usize, asked: bool) -> u64 {
    let left = budget.rest().unwrap_or(0);
    if asked { left } else { left.saturating_add(geometry.cached_bytes(cap)) }
}
