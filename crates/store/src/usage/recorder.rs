//! Recording while a model runs, and saving.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metaltail_container::read_regular;

use super::{ColiModel, Pending, ProfileLock, UsageError, UsageIdentity, UsageProfile, file, replace};

/// Longest time between two saves of a run that goes on.
const INTERVAL: Duration = Duration::from_secs(300);

/// Reads a profile, whoever's it is.
///
/// # Errors
/// A file that cannot be read or is no whole profile of this version.
pub fn read_profile(path: &Path) -> Result<UsageProfile, UsageError> {
    let read = |source| UsageError::Read { file: path.into(), source };
    let bytes = read_regular(path, file::MOST_BYTES).map_err(read)?;
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

/// How a save went that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Saved {
    /// There was nothing new.
    Nothing,
    /// What is new was added to what was there.
    Added,
    /// The same, but another process kept the directory locked for longer than a save waits: of what it
    /// saves at the same moment, or of this, something may be lost.
    Unlocked,
}

/// Counts what a running model chooses and saves it.
///
/// What was used since the last save is kept apart. A save reads the file again, lets it fade and adds what
/// is new, under a lock, so that several processes with one profile lose nothing of each other.
pub struct UsageRecorder {
    path: PathBuf,
    writes: bool,
    first: Vec<usize>,
    /// The profile as it was at the beginning; what a save builds on when there is no file to read.
    base: UsageProfile,
    /// Held by a save.
    saving: Mutex<()>,
    state: Mutex<State>,
}

impl UsageRecorder {
    /// Opens the profile of a model. A profile that is damaged, newer or of another model is an error
    /// beside an empty one; before the first save it is renamed to `<file>.old`, numbered where there is
    /// one. With `writes` off the file is never touched.
    ///
    /// # Errors
    /// What is there is no profile, or nobody can say: it is not to be touched.
    pub fn open(
        path: &Path,
        identity: UsageIdentity,
        writes: bool,
    ) -> Result<(UsageRecorder, Option<UsageError>), UsageError> {
        let (base, problem) = match read_own(path, &identity) {
            Ok(found) => (found.unwrap_or_else(|| UsageProfile::new(identity.clone())), None),
            Err(error) if error.is_profile() => (UsageProfile::new(identity.clone()), Some(error)),
            Err(error) => return Err(error),
        };
        let recorder = UsageRecorder {
            path: path.into(),
            writes,
            first: identity.first(),
            saving: Mutex::new(()),
            state: Mutex::new(State { pending: Pending::new(&identity), saved: Instant::now() }),
            base,
        };
        Ok((recorder, problem))
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
    /// [`UsageError::Write`], or what [`UsageRecorder::open`] refuses and was put there meanwhile: the old
    /// file is as it was, and what is new is kept for the next save.
    pub fn save(&self, durable: bool) -> Result<Saved, UsageError> {
        if !self.writes {
            return Ok(Saved::Nothing);
        }
        let _one_at_a_time = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        state.saved = Instant::now();
        if state.pending.selections == 0 {
            return Ok(Saved::Nothing);
        }
        let mut fresh = Pending::new(&self.base.identity);
        // A save may come in the middle of a step.
        fresh.staging = std::mem::take(&mut state.pending.staging);
        let new = std::mem::replace(&mut state.pending, fresh);
        drop(state);
        let saved = self.write(&new, durable);
        if saved.is_err() {
            self.lock().pending.restore(new);
        }
        saved
    }

    fn write(&self, new: &Pending, durable: bool) -> Result<Saved, UsageError> {
        let write = |source| UsageError::Write { file: self.path.clone(), source };
        let lock = ProfileLock::take(&self.path).map_err(write)?;
        let found = match read_own(&self.path, &self.base.identity) {
            Ok(found) => found,
            Err(error) if error.is_profile() => {
                replace::set_aside(&self.path).map_err(write)?;
                None
            }
            Err(error) => return Err(error),
        };
        let mut profile = found.unwrap_or_else(|| self.base.clone());
        profile.absorb(new);
        save(&self.path, &profile, durable)?;
        Ok(if lock.is_late() { Saved::Unlocked } else { Saved::Added })
    }
}
