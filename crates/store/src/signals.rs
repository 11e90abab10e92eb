//! Signals that stand for an error of a system call.

/// From now on a write past the limit on file sizes (`ulimit -f`) fails with an error, as one on a full drive
/// does; without this it ends the process. Processes that this one starts inherit it.
#[cfg(unix)]
pub fn fail_writes_past_the_limit() {
    // SAFETY: the call takes plain numbers, and to ignore a signal runs no code of ours.
    let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    // It fails for a signal that there is not, and this one is in POSIX.
    debug_assert_ne!(before, libc::SIG_ERR);
}
