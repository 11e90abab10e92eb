//! Chunks of the arena go back to the system as a whole, and come back.

use std::error::Error;
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::ExpertStore;
use crate::arena::{ArenaChunk, ChunkSlots};
use crate::event::StoreEvent;
use crate::rank;
use crate::table::{Left, Want};

/// After a refusal no chunk is asked for again for so long: what is asked for is evicted before.
const REST: Duration = Duration::from_secs(10);

/// Knows chunks of the arena by address, as a device does that reads experts there. It must let go of one before
/// its memory goes back to the system. Called under no lock of the slot table.
pub trait ChunkListener: Send + Sync {
    /// Nobody leases anything in `chunk` and nobody will. When this returns without an error nothing reads the
    /// memory any more, and it goes. It may take as long as work under way does.
    ///
    /// # Errors
    /// The listener could not let go. The memory stays, and the chunk is used as before.
    fn leaving(&self, chunk: ArenaChunk) -> Result<(), Box<dyn Error + Send + Sync>>;
}

/// What chunks are to go for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Goal {
    /// That so many bytes of memory are freed.
    Memory(u64),
    /// That up to so many bytes fewer may be kept.
    Room(u64),
}

/// A chunk that may come back.
pub(super) enum Returning {
    /// In use again.
    Chunk(ChunkSlots),
    /// There are some, all of them larger than what there is room for.
    TooLarge,
    /// None is away.
    None,
}

/// What is remembered of resizing.
#[derive(Debug, Default)]
pub(super) struct Resizing {
    /// When a chunk was last refused.
    refused: Option<Instant>,
}

impl ExpertStore {
    /// From now on the cache shrinks by whole chunks, which `listener` lets go of first. To be called before
    /// anything else than leases knows the memory. False for a second listener, which is not taken.
    pub fn set_chunk_listener(&self, listener: Arc<dyn ChunkListener>) -> bool {
        self.listener.set(listener).is_ok()
    }

    /// Gives chunks back until the goal is reached, none can go, or one is refused; the bytes of memory that went.
    pub(super) fn retire(
        &self,
        listener: &dyn ChunkListener,
        goal: Goal,
        events: &mut Vec<StoreEvent>,
    ) -> u64 {
        let mut resizing = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        if resizing.refused.is_some_and(|refused| refused.elapsed() < REST) {
            return 0;
        }
        let (mut given, mut lowered) = (0u64, 0u64);
        loop {
            let want = match goal {
                Goal::Memory(over) if given < over => Want::Memory,
                Goal::Room(over) if lowered < over => Want::Room(over - lowered),
                _ => break,
            };
            let chunks = self.shared.arena.in_use();
            let Some(left) = self.shared.lock().table.take_chunk(&chunks, want, events) else { break };
            let Left { chunk, touched, lowered: by } = left;
            let gone = self.let_go(listener, &chunk);
            let mut state = self.shared.lock();
            match gone {
                Ok(()) => state.table.chunk_gone(&chunk.slots),
                Err(_) => state.table.chunk_back(&chunk.slots),
            }
            drop(state);
            if let Err(error) = gone {
                resizing.refused = Some(Instant::now());
                events.push(StoreEvent::ChunkKept { bytes: touched, reason: error.to_string() });
                break;
            }
            given = given.saturating_add(touched);
            lowered = lowered.saturating_add(by);
        }
        given
    }

    /// Has the listener let go of a chunk that is out of the table, then gives its memory back.
    fn let_go(
        &self,
        listener: &dyn ChunkListener,
        chunk: &ChunkSlots,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        let withdrawn = self.shared.arena.withdraw(chunk.number);
        // The table has no leases and no loads there: this does not happen while it counts rightly.
        let withdrawn = withdrawn.ok_or_else(|| io::Error::other("a slot of it is in use"))?;
        rank::assert_free("have a device let go of memory");
        listener.leaving(withdrawn.describe())?;
        Ok(withdrawn.give_back()?)
    }

    /// Takes the largest chunk of such slots into use again of those that went and have no more than `fitting`.
    pub(super) fn returning(&self, slot_bytes: usize, fitting: usize) -> Returning {
        let arena = &self.shared.arena;
        let away = arena.away().into_iter().filter(|chunk| chunk.slot_bytes == slot_bytes);
        let away: Vec<ChunkSlots> = away.collect();
        let fits = away.iter().filter(|chunk| chunk.slots.len() <= fitting);
        match fits.max_by_key(|chunk| chunk.slots.len()) {
            Some(chunk) if arena.bring_back(chunk.number) => Returning::Chunk(chunk.clone()),
            None if away.is_empty() => Returning::None,
            _ => Returning::TooLarge,
        }
    }
}
