//! Waiting for a device without spinning.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Opened once, by whoever learns that something has ended; others sleep until then.
#[derive(Debug, Default)]
pub struct Latch {
    opened: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Latch {
    /// Opens it. Only the first time counts.
    pub fn open(&self) {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        opened.get_or_insert_with(Instant::now);
        self.changed.notify_all();
    }

    /// When it was opened; `None` where that has not happened yet.
    pub fn opened(&self) -> Option<Instant> {
        *self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until it is open, `patience` at most. When it was opened; `None` where patience ended first.
    pub fn wait(&self, patience: Duration) -> Option<Instant> {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(opened, patience, |opened| opened.is_none());
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn who_waits_sleeps_until_it_is_open_or_patience_ends() {
        let latch = Arc::new(Latch::default());
        assert_eq!(latch.wait(Duration::from_millis(5)), None);
        let waiters: Vec<_> = (0..3)
            .map(|_| {
                let latch = Arc::clone(&latch);
                std::thread::spawn(move || latch.wait(Duration::from_secs(60)))
            })
            .collect();
        latch.open();
        let opened = latch.opened();
        assert!(opened.is_some());
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), opened);
        }
    }

    #[test]
    fn only_the_first_opening_counts() {
        let latch = Latch::default();
        latch.open();
        let first = latch.opened();
        std::thread::sleep(Duration::from_millis(2));
        latch.open();
        assert_eq!(latch.opened(), first);
        assert_eq!(latch.wait(Duration::ZERO), first);
    }
}
