//! What a device holds for this process, against what it may.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use metaltail_device::residency::ResidencyError;

use crate::limits::Facts;

/// One account for everything that the GPU must keep resident: wrapped memory and buffers of its own. The ledger
/// counts what is declared; buffers it does not see.
#[derive(Debug)]
pub struct Room {
    limit: u64,
    setting: Option<&'static str>,
    held: AtomicU64,
}

/// Bytes that are held while this lives.
#[derive(Debug)]
pub struct Held {
    room: Arc<Room>,
    bytes: u64,
}

impl Room {
    /// An empty account with the limits of a device.
    pub fn new(facts: &Facts) -> Arc<Room> {
        let limits = facts.limits();
        Arc::new(Room { limit: limits.working_set, setting: limits.setting, held: AtomicU64::new(0) })
    }

    /// Holds `bytes` more.
    ///
    /// # Errors
    /// [`ResidencyError::OverWorkingSet`] with the sum; nothing more is held then.
    pub fn hold(self: &Arc<Room>, bytes: u64) -> Result<Held, ResidencyError> {
        let more = |held: u64| held.checked_add(bytes).filter(|&sum| sum <= self.limit);
        // A sum and nothing else hangs on it: no order with other memory is needed.
        match self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(Held { room: Arc::clone(self), bytes }),
            Err(held) => Err(ResidencyError::OverWorkingSet {
                wanted: held.saturating_add(bytes),
                limit: self.limit,
                setting: self.setting,
            }),
        }
    }

    /// Bytes that are held.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Bytes that may be held.
    pub fn limit(&self) -> u64 {
        self.limit
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.room.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;
    use crate::limits::tests::facts;

    fn room(mib: u64) -> Arc<Room> {
        Room::new(&Facts { wired_limit_mib: Some(mib), ..facts() })
    }

    #[test]
    fn buffers_and_wrapped_memory_share_the_lower_of_the_two_limits() {
        let room = room(3);
        let first = room.hold(2 << 20).unwrap();
        let refused = room.hold((1 << 20) + 1).unwrap_err();
        let wanted = (3 << 20) + 1;
        assert_eq!(
            refused,
            ResidencyError::OverWorkingSet { wanted, limit: 3 << 20, setting: Some("iogpu.wired_limit_mb") }
        );
        let text = refused.to_string();
        assert!(text.contains("lower --ram, or raise iogpu.wired_limit_mb"), "{text}");
        assert_eq!(room.held(), 2 << 20, "what was refused is not held");
        let second = room.hold(1 << 20).unwrap();
        assert_eq!((room.held(), room.limit()), (3 << 20, 3 << 20));
        drop(first);
        assert_eq!(room.held(), 1 << 20);
        drop(second);
        assert_eq!(room.held(), 0);
    }

    #[test]
    fn a_sum_past_all_numbers_is_refused_and_said() {
        let room = room(1);
        let _one = room.hold(1).unwrap();
        assert!(matches!(room.hold(u64::MAX), Err(ResidencyError::OverWorkingSet { wanted: u64::MAX, .. })));
    }

    #[test]
    fn of_threads_that_ask_together_as_many_are_served_as_fit() {
        let (room, together) = (room(1), Barrier::new(4));
        // Two of them fit, a third does not.
        let served = || {
            let mut served = 0;
            for _ in 0..200 {
                together.wait();
                let held = room.hold(400 << 10);
                together.wait();
                served += usize::from(held.is_ok());
                drop(held);
            }
            served
        };
        let served: usize = thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(served)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        // At the barrier all have asked and none has given back.
        assert_eq!((served, room.held()), (400, 0));
    }
}
