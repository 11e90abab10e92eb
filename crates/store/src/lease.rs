//! Leases: the only way to an expert's bytes.

use std::sync::Arc;

use crate::arena::SlotRead;
use crate::geometry::leased;
use crate::policy::ExpertId;
use crate::store::Shared;
use crate::sync::{AtomicUsize, Ordering};

/// Read access to one expert in memory. While it lives the slot is not evicted, moved or overwritten;
/// dropping it returns the slot. Outlives the store.
pub struct Lease {
    shared: Arc<Shared>,
    slot: u32,
    id: ExpertId,
    /// `Some` until dropped.
    bytes: Option<SlotRead>,
    /// Counts the in-flight slots that leases of one fetch hold; `None` where the slot is kept.
    in_flight: Option<Arc<AtomicUsize>>,
}

impl Lease {
    /// Takes over one hold of the table on `slot`.
    pub(crate) fn new(
        shared: Arc<Shared>,
        slot: u32,
        id: ExpertId,
        bytes: SlotRead,
        in_flight: Option<Arc<AtomicUsize>>,
    ) -> Lease {
        if let Some(count) = &in_flight {
            count.fetch_add(1, Ordering::Relaxed);
        }
        Lease { shared, slot, id, bytes: Some(bytes), in_flight }
    }

    /// Expert number in its layer.
    pub fn expert(&self) -> u32 {
        self.id.expert
    }

    /// The bytes of run `i` of the expert's place, exactly; run 0 is what its repack made, where it has one.
    ///
    /// They lie as aligned as in the file, up to 4096: `offset % 4096` is the same. What was repacked begins on a page.
    ///
    /// # Panics
    /// If the expert has no run `i`. The runs that its parts name were checked when the store was opened.
    pub fn run(&self, i: usize) -> &[u8] {
        let place = self.shared.place(self.id);
        match (leased(place, i), self.bytes.as_deref()) {
            (Some(range), Some(bytes)) => &bytes[range],
            _ => panic!("an expert of {} runs has no run {i}", place.runs.len()),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // First the arena's reader count, then the table's hold: whoever gets the slot next finds it free.
        drop(self.bytes.take());
        if let Some(count) = &self.in_flight {
            count.fetch_sub(1, Ordering::Relaxed);
        }
        self.shared.release([self.slot]);
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("id", &self.id).field("slot", &self.slot).finish_non_exhaustive()
    }
}
