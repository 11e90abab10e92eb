//! Whether a device still works, and who uses a buffer.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Failure, MetalError};

/// The first failure after which a device takes nothing any more.
#[derive(Debug, Default)]
pub struct Health {
    lost: Mutex<Option<Failure>>,
}

impl Health {
    /// Whether submissions are still taken.
    ///
    /// # Errors
    /// [`MetalError::Lost`] with the failure that lost the device.
    pub fn check(&self) -> Result<(), MetalError> {
        match &*self.lost.lock().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(()),
            Some(failure) => Err(MetalError::Lost(failure.clone())),
        }
    }

    /// Learns of a failure; only one that loses the device is kept, and only the first.
    pub fn note(&self, failure: &Failure) {
        if failure.kind.is_loss() {
            let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
            lost.get_or_insert_with(|| failure.clone());
        }
    }
}

/// How many submissions may use a buffer, from their encoding to the notice of their end.
#[derive(Debug, Default)]
pub struct Uses(Arc<AtomicUsize>);

/// While it lives, a buffer is in use by a submission.
#[derive(Debug)]
pub struct Use(Arc<AtomicUsize>);

impl Uses {
    /// One more.
    pub fn begin(&self) -> Use {
        self.0.fetch_add(1, Ordering::Relaxed);
        Use(Arc::clone(&self.0))
    }

    /// Whether the host may touch the buffer.
    ///
    /// # Errors
    /// [`MetalError::InUse`].
    pub fn none(&self) -> Result<(), MetalError> {
        // Acquire: pairs with the end of the last use.
        if self.0.load(Ordering::Acquire) == 0 { Ok(()) } else { Err(MetalError::InUse) }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        // Release: who sees the count go down sees what was done before the end was noticed.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::COMMAND_BUFFER_DOMAIN;

    #[test]
    fn the_first_failure_that_loses_the_device_is_kept() {
        let health = Health::default();
        let failure = |code| Failure::new(COMMAND_BUFFER_DOMAIN.into(), code, format!("message {code}"));
        for survived in [1, 2, 3, 8] {
            health.note(&failure(survived));
            assert_eq!(health.check(), Ok(()), "{survived}");
        }
        health.note(&failure(11));
        health.note(&failure(4));
        assert_eq!(health.check(), Err(MetalError::Lost(failure(11))));
    }

    #[test]
    fn a_buffer_is_free_when_its_last_use_has_ended() {
        let uses = Uses::default();
        let (first, second) = (uses.begin(), uses.begin());
        drop(first);
        assert_eq!(uses.none(), Err(MetalError::InUse));
        drop(second);
        assert_eq!(uses.none(), Ok(()));
    }
}
