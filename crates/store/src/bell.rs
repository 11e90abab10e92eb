//! What loaders sleep on, so that nothing rung while they look for work is lost.

use std::sync::PoisonError;

use crate::sync::{Condvar, Mutex};

/// A counter of rings. Whoever waits names the last count it knows.
#[derive(Default)]
pub(crate) struct Bell {
    rings: Mutex<u64>,
    rung: Condvar,
    /// Also signalled by each ring, for a thread that waits in the kernel.
    #[cfg(target_os = "linux")]
    event: std::sync::OnceLock<std::os::fd::OwnedFd>,
}

impl Bell {
    /// The count of rings: to be taken before looking for work, and waited past when there was none.
    pub(crate) fn count(&self) -> u64 {
        *self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes one that waits.
    pub(crate) fn ring(&self) {
        self.ring_with(Condvar::notify_one);
    }

    /// Wakes all that wait.
    pub(crate) fn ring_all(&self) {
        self.ring_with(Condvar::notify_all);
    }

    fn ring_with(&self, notify: fn(&Condvar)) {
        *self.rings.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        notify(&self.rung);
        #[cfg(target_os = "linux")]
        if let Some(event) = self.event.get() {
            // It fails only when the event's counter is full, and then it is signalled already.
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
    }

    /// Waits until it has rung more often than `seen`.
    pub(crate) fn wait_past(&self, seen: u64) {
        let rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.rung.wait_while(rings, |rings| *rings <= seen).unwrap_or_else(PoisonError::into_inner));
    }

    /// A descriptor that is readable after a ring, until [`Bell::hush`].
    ///
    /// # Errors
    /// The process has no descriptor left.
    #[cfg(target_os = "linux")]
    pub(crate) fn event(&self) -> std::io::Result<std::os::fd::BorrowedFd<'_>> {
        use rustix::event::{EventfdFlags, eventfd};
        use std::os::fd::AsFd;
        if self.event.get().is_none() {
            let made = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
            // A second one, made by another thread meanwhile, is closed again.
            let _ = self.event.set(made);
        }
        self.event.get().map(AsFd::as_fd).ok_or_else(|| std::io::ErrorKind::NotFound.into())
    }

    /// Makes the descriptor unreadable until the next ring.
    #[cfg(target_os = "linux")]
    pub(crate) fn hush(&self) {
        if let Some(event) = self.event.get() {
            // Nothing to read means nothing rang.
            let _ = rustix::io::read(event, &mut [0u8; 8]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_between_looking_and_waiting_is_not_lost() {
        let bell = Bell::default();
        let seen = bell.count();
        bell.ring();
        bell.wait_past(seen);
        assert_eq!(bell.count(), seen + 1);
    }

    #[test]
    fn a_ring_reaches_one_that_waits() {
        let bell = Bell::default();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| bell.wait_past(0));
            bell.ring();
            waiting.join().unwrap();
        });
    }
}
