//! Work on a stranger's template: on a thread of its own, with a stack for the worst and an end.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Stack of the thread, in bytes; pages that are not touched take no memory.
///
/// minijinja parses and drops expressions by recursion, and chains of operators have no limit of
/// depth. The worst, minus signs and calls, take 1.1 KiB a byte of source without optimisation:
/// 288 MiB for the largest template accepted. While it renders, the fuel lets a template put some
/// 450,000 lists into one another, and writing those as text (`~`) recurses too: more than 512 MiB
/// without optimisation, less with it.
pub(super) const STACK_BYTES: usize = if cfg!(debug_assertions) { 1 << 30 } else { 512 << 20 };

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// The system gave no thread.
    #[error("no thread could be started for it")]
    NoThread {
        /// The system's words.
        source: std::io::Error,
    },
    /// The time is up.
    #[error("it did not end within the time allowed")]
    Late,
    /// The work panicked.
    #[error("the template library panicked")]
    Panicked,
}

/// Runs `work` and waits for it for at most `patience`.
///
/// A thread cannot be ended from outside: one that is late is abandoned. It goes on using a core and
/// what memory it has until its work ends or the process does, so the caller should be on its way
/// out.
pub(super) fn run<T: Send + 'static>(
    patience: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let (sender, receiver) = sync_channel(1);
    // A failed `send` means that nobody waits any more, which is no fault here.
    let started = std::thread::Builder::new().name("chat template".to_owned()).stack_size(STACK_BYTES).spawn(
        move || {
            let _ = sender.send(work());
        },
    );
    started.map_err(|source| Failure::NoThread { source })?;
    receiver.recv_timeout(patience).map_err(|error| match error {
        RecvTimeoutError::Timeout => Failure::Late,
        RecvTimeoutError::Disconnected => Failure::Panicked,
    })
}
