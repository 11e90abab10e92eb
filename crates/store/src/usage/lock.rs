//! One writer of a profile at a time.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use super::replace::{directory, target};

/// Longest wait for another process; a save takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time between two tries.
const PAUSE: Duration = Duration::from_millis(5);

/// Keeps other processes from saving to a profile's directory while it lives.
///
/// The lock is advisory and lies on the directory: a file for it would be left behind, or would be
/// somebody else's. Where the file system has no locks there is none, and nothing is said: nobody
/// could do anything about it.
#[derive(Debug)]
pub struct ProfileLock {
    _held: Option<File>,
    late: bool,
}

impl ProfileLock {
    /// Waits at most two seconds for the directory of this profile, which is made where it is absent.
    ///
    /// # Errors
    /// The directory cannot be made or opened, or the path leads to what is no file.
    pub fn take(path: &Path) -> io::Result<ProfileLock> {
        ProfileLock::take_within(path, PATIENCE)
    }

    pub(super) fn take_within(path: &Path, patience: Duration) -> io::Result<ProfileLock> {
        let (path, _) = target(path)?;
        let directory = directory(&path);
        fs::create_dir_all(directory)?;
        let file = File::open(directory)?;
        let begun = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(ProfileLock { _held: Some(file), late: false }),
                Err(TryLockError::WouldBlock) if begun.elapsed() < patience => std::thread::sleep(PAUSE),
                Err(TryLockError::WouldBlock) => return Ok(ProfileLock { _held: None, late: true }),
                Err(TryLockError::Error(_)) => return Ok(ProfileLock { _held: None, late: false }),
            }
        }
    }

    /// Whether another process did not let go of it in time, so that both may save at once.
    pub fn is_late(&self) -> bool {
        self.late
    }
}
