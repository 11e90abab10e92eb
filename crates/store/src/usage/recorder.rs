//! Recording while a model runs, and saving.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{ColiModel, Pending, UsageError, UsageIdentity, UsageProfile, file, replace};

/// Longest time between two saves of a run that goes on.
const INTERVAL: Duration = Duration::from_secs(300);

/// Reads a profile, whoever's it is.
///
/// # Errors
/// A file that cannot be read or is no whole profile of this version.
pub fn read_profile(path: &Path) -> Result<UsageProfile, UsageError> {
    let read = |source| UsageError::Read { file: path.into(), source };
    let file = File::open(path).map_err(read)?;
    let mut bytes = Vec::new();
    // One byte more than any profile has, so that a larger file is refused for its length.
    file.take(file::MOST_BYTES + 1).read_to_end(&mut bytes).map_err(read)?;
    file::decode(path, &bytes)
}

/// Writes a profile in place of what is there, durably.
///
/// # Errors
/// [`UsageError::Write`]; what was there is unchanged.
pub fn write_profile(path: &Path, profile: &UsageProfile) -> Result<(), UsageError> {
    save(path, profile, true)
}

/// Writes a profile's counts as a colibrì history in place of what is there, durably.
///
/// # Errors
/// [`UsageError::Write`]; what was there is unchanged.
pub fn write_coli(path: &Path, profile: &UsageProfile, model: &ColiModel<'_>) -> Result<(), UsageError> {
    let write = |source| UsageError::Write { file: path.into(), source };
    replace::replace(path, profile.to_coli(model).as_bytes(), true).map_err(write)
}

fn save(path: &Path, profile: &UsageProfile, durable: bool) -> Result<(), UsageError> {
    let write = |source| UsageError::Write { file: path.into(), source };
    replace::replace(path, &file::encode(profile), durable).map_err(write)
}

/// Reads the profile of a model; `None` where there is no file.
///
/// # Errors
/// As [`read_profile`], and a profile of another model.
pub fn read_own(path: &Path, identity: &UsageIdentity) -> Result<Option<UsageProfile>, UsageError> {
    let profile = match read_profile(path) {
        Err(UsageError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Ok(None);
        }
        other => other?,
    };
    match identity.difference(&profile.identity) {
        Some(reason) => Err(UsageError::Identity { file: path.into(), reason }),
        None => Ok(Some(profile)),
    }
}

pub(super) struct State {
    pub(super) pending: Pending,
    saved: Instant,
}

/// Counts what a running model chooses and saves it.
///
/// What was used since the last save is kept apart. A save reads the file again, lets it fade and adds what
/// is new, so that several processes with one profile lose nothing of each other, unless they save in the
/// same milliseconds: then the later one wins.
pub struct UsageRecorder {
    path: PathBuf,
    writes: bool,
    first: Vec<usize>,
    /// The profile as it was at the beginning; what a save builds on when there is no file to read.
    base: UsageProfile,
    /// A file that cannot be used and is set aside before the first save.
    unusable: Mutex<bool>,
    state: Mutex<State>,
}

impl UsageRecorder {
    /// Opens the profile of a model. A file that is damaged, foreign or of another model is an error beside
    /// an empty profile; before the first save it is renamed to `<file>.old`. With `writes` off the file is
    /// never touched.
    pub fn open(path: &Path, identity: UsageIdentity, writes: bool) -> (UsageRecorder, Option<UsageError>) {
        let (base, problem) = match read_own(path, &identity) {
            Ok(found) => (found.unwrap_or_else(|| UsageProfile::new(identity.clone())), None),
            Err(error) => (UsageProfile::new(identity.clone()), Some(error)),
        };
        let recorder = UsageRecorder {
            path: path.into(),
            writes,
            first: identity.first(),
            unusable: Mutex::new(problem.is_some()),
            state: Mutex::new(State { pending: Pending::new(&identity), saved: Instant::now() }),
            base,
        };
        (recorder, problem)
    }

    /// Begins with this profile where there was no file.
    #[must_use]
    pub fn starting_from(mut self, profile: UsageProfile) -> UsageRecorder {
        self.base = profile;
        self
    }

    /// The profile as it was opened.
    pub fn base(&self) -> &UsageProfile {
        &self.base
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is ever written.
    pub fn writes(&self) -> bool {
        self.writes
    }

    /// Selections since the last save.
    pub fn unsaved(&self) -> u64 {
        self.lock().pending.selections
    }

    /// No code under this lock can leave counts half changed in a way that matters: a poisoned one is taken
    /// as it is.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what the rows of a step chose in a layer, as (expert, weight). A layer without a store is
    /// passed over.
    pub fn record(&self, layer: u32, rows: &[Vec<(u32, f32)>]) {
        let identity = &self.base.identity;
        let Some(at) = identity.index(layer) else { return };
        self.lock().pending.record(at, identity.layers[at].1, self.first[at], rows);
    }

    /// Whether a long run should save now.
    pub fn due(&self) -> bool {
        let state = self.lock();
        self.writes && state.pending.selections > 0 && state.saved.elapsed() >= INTERVAL
    }

    /// Saves what is new; without anything new, or where nothing is written, does nothing. `durable` waits
    /// for the drive: for the end of a run, not within it.
    ///
    /// # Errors
    /// [`UsageError::Write`]: the old file is as it was, and what is new is kept for the next save.
    pub fn save(&self, durable: bool) -> Result<(), UsageError> {
        if !self.writes {
            return Ok(());
        }
        // Held throughout: one save at a time.
        let mut unusable = self.unusable.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        state.saved = Instant::now();
        if state.pending.selections == 0 {
            return Ok(());
        }
        let mut fresh = Pending::new(&self.base.identity);
        // A save may come in the middle of a step.
        fresh.staging = std::mem::take(&mut state.pending.staging);
        let new = std::mem::replace(&mut state.pending, fresh);
        drop(state);
        let saved = self.write(&new, &mut unusable, durable);
        if saved.is_err() {
            self.lock().pending.restore(new);
        }
        saved
    }

    fn write(&self, new: &Pending, unusable: &mut bool, durable: bool) -> Result<(), UsageError> {
        let found = if *unusable { None } else { read_own(&self.path, &self.base.identity).ok().flatten() };
        let mut profile = found.unwrap_or_else(|| self.base.clone());
        profile.absorb(new);
        if *unusable {
            let mut old = self.path.clone().into_os_string();
            old.push(".old");
            fs::rename(&self.path, old)
                .map_err(|source| UsageError::Write { file: self.path.clone(), source })?;
            *unusable = false;
        }
        save(&self.path, &profile, durable)
    }
}
