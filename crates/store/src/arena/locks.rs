//! Slots that the system may neither swap out nor compress.
//!
//! A slot is locked when it has been filled, since its pages exist then: locking brings nothing into being that the
//! budget does not have. It stays locked while experts come and go, and is unlocked before its pages go back.

use std::io;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{Arena, SlotWrite, pages};
use crate::sync::Mutex;

/// What is locked.
#[derive(Default)]
pub(super) struct Locks {
    /// Whether filled slots are to be locked: until the system refuses it once.
    wanted: AtomicBool,
    /// Bytes of slots that are.
    bytes: AtomicU64,
    /// What the system said when it refused, until somebody hears of it.
    refused: Mutex<Option<io::Error>>,
}

impl Arena {
    /// From now on slots are locked when they have been filled.
    pub(crate) fn lock_what_is_filled(&self) {
        self.locks.wanted.store(true, Ordering::Relaxed);
    }

    /// Bytes of slots that are locked.
    pub(crate) fn locked_bytes(&self) -> u64 {
        self.locks.bytes.load(Ordering::Relaxed)
    }

    /// What the system said when it refused to lock more; once.
    pub(crate) fn take_refused_lock(&self) -> Option<io::Error> {
        self.locks.refused.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The pages of these slots are about to go, or have gone: they are not locked any more.
    pub(super) fn unlocked(&self, bytes: u64) {
        self.locks.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl SlotWrite {
    /// Locks the slot, which has been filled, where that is wanted.
    pub(crate) fn keep_in_memory(&self) {
        let locks = &self.arena.locks;
        let (chunk, index) = self.arena.locate(self.slot);
        if !locks.wanted.load(Ordering::Relaxed) || chunk.locked[index].load(Ordering::Relaxed) {
            return;
        }
        let (base, len) = self.arena.place(self.slot);
        // SAFETY: the range is one slot of a mapping that the arena keeps; locking changes no byte of it.
        match unsafe { pages::lock(base, len) } {
            Ok(0) => {}
            Ok(bytes) => {
                chunk.locked[index].store(true, Ordering::Relaxed);
                locks.bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            // Asked once: the limit does not rise for a process that runs.
            Err(error) if locks.wanted.swap(false, Ordering::Relaxed) => {
                *locks.refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
            Err(_) => {}
        }
    }

    /// Unlocks the slot if it is locked.
    pub(super) fn unlock(&self) -> io::Result<()> {
        let (chunk, index) = self.arena.locate(self.slot);
        if chunk.locked[index].load(Ordering::Relaxed) {
            let (base, len) = self.arena.place(self.slot);
            // SAFETY: as when it was locked.
            let bytes = unsafe { pages::unlock(base, len)? };
            chunk.locked[index].store(false, Ordering::Relaxed);
            self.arena.unlocked(bytes);
        }
        Ok(())
    }
}
