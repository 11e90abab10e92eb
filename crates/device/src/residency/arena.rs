//! The expert store's arena, declared to a ledger.

use std::error::Error;
use std::fmt;
use std::mem;
use std::sync::{Arc, PoisonError};
#[cfg(not(shuttle))]
use std::sync::{Mutex, MutexGuard};

use metaltail_store::{ArenaChunk, ArenaView, ChunkListener};
#[cfg(shuttle)]
use shuttle::sync::{Mutex, MutexGuard};

use super::driver::{ResidencyDriver, Span};
use super::ledger::{Difference, ResidencyError};
use super::shared::Residency;

/// What is one allocation to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SlabAllocation {
    /// A chunk of the expert store's arena: few and large.
    #[default]
    Arena,
    /// Each slot: as many as experts can be cached. The measured alternative.
    PerExpert,
}

impl SlabAllocation {
    /// Name in flags and reports.
    pub fn name(self) -> &'static str {
        match self {
            SlabAllocation::Arena => "arena",
            SlabAllocation::PerExpert => "per-expert",
        }
    }

    /// The allocations of a chunk.
    fn spans(self, chunk: ArenaChunk) -> Vec<Span> {
        match self {
            SlabAllocation::Arena => vec![Span { base: chunk.base, len: chunk.len }],
            SlabAllocation::PerExpert => {
                let slots = (0..chunk.len / chunk.slot_bytes.max(1)).map(|slot| slot * chunk.slot_bytes);
                slots.map(|offset| Span { base: chunk.base + offset, len: chunk.slot_bytes }).collect()
            }
        }
    }
}

/// The chunks of an arena, known to the device behind a ledger: new ones are declared before the next submission,
/// and as the store's [`ChunkListener`] it removes one before its memory goes.
///
/// Whoever submits calls [`DeclaredArena::declare_new`] first. The device must have finished when this is dropped:
/// it forgets all chunks then.
pub struct DeclaredArena<D: ResidencyDriver> {
    arena: ArenaView,
    slabs: SlabAllocation,
    residency: Arc<Residency<D>>,
    /// State of the arena's chunks that was declared. Locked while chunks are looked at and declared, never while a
    /// removal waits: work under way, for which it waits, may want to declare.
    declared: Mutex<Option<u64>>,
}

impl<D: ResidencyDriver> fmt::Debug for DeclaredArena<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeclaredArena").field("slabs", &self.slabs).finish_non_exhaustive()
    }
}

impl<D: ResidencyDriver> DeclaredArena<D> {
    /// An arena of which nothing is declared yet.
    pub fn new(arena: ArenaView, slabs: SlabAllocation, residency: Arc<Residency<D>>) -> DeclaredArena<D> {
        DeclaredArena { arena, slabs, residency, declared: Mutex::new(None) }
    }

    /// The ledger that it is declared to.
    pub fn residency(&self) -> &Arc<Residency<D>> {
        &self.residency
    }

    fn declared(&self) -> MutexGuard<'_, Option<u64>> {
        // A number that is old makes the next call look again.
        self.declared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocations of the chunks in use.
    fn spans(&self) -> Vec<Span> {
        let chunks = (0..self.arena.chunks()).filter_map(|number| self.arena.chunk(number));
        chunks.flat_map(|chunk| self.slabs.spans(chunk)).collect()
    }

    /// Declares chunks that came, came back, or stayed after all: nothing to do in all but a few calls.
    ///
    /// # Errors
    /// As [`Ledger::register`](super::Ledger::register); the next call tries again.
    pub fn declare_new(&self) -> Result<(), ResidencyError> {
        let mut declared = self.declared();
        // Before the chunks: one that comes while they are looked at is found by the next call.
        let changes = self.arena.changes();
        if *declared == Some(changes) {
            return Ok(());
        }
        for span in self.spans() {
            self.residency.register(span)?;
        }
        *declared = Some(changes);
        Ok(())
    }

    /// Removes allocations; what was never declared needs no removal.
    fn remove(&self, spans: Vec<Span>) -> Result<(), ResidencyError> {
        for span in spans {
            match self.residency.unregister(span) {
                Ok(()) | Err(ResidencyError::Unknown(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The device forgets all chunks, which the next submission would declare anew. Waits for submissions.
    ///
    /// # Errors
    /// As [`Residency::unregister`]; the memory must stay then.
    pub fn forget(&self) -> Result<(), ResidencyError> {
        *self.declared() = None;
        self.remove(self.spans())
    }

    /// What is declared otherwise than it should be, where `others` are declared beside the arena: nothing after
    /// [`DeclaredArena::declare_new`], but for chunks that are about to go.
    pub fn difference(&self, others: &[Span]) -> Difference {
        self.residency.ledger().difference(&[&self.spans()[..], others].concat())
    }
}

impl<D: ResidencyDriver> ChunkListener for DeclaredArena<D> {
    fn leaving(&self, chunk: ArenaChunk) -> Result<(), Box<dyn Error + Send + Sync>> {
        // Whoever saw the chunk before it was withdrawn has declared it now; nobody else will.
        drop(self.declared());
        Ok(self.remove(self.slabs.spans(chunk))?)
    }
}

impl<D: ResidencyDriver> Drop for DeclaredArena<D> {
    fn drop(&mut self) {
        if self.forget().is_err() {
            // The device may still read the memory: it is never freed.
            mem::forget(self.arena.clone());
        }
    }
}

#[cfg(test)]
mod tests;
