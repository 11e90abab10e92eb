//! Experts that are stored otherwise than they are computed with: made over in their slot, when they have been read
//! and before anyone can lease them.

use std::sync::PoisonError;

use metaltail_container::ExpertPlace;

use crate::error::StoreError;
use crate::geometry::{segments, stored_bytes};
use crate::sync::Mutex;

/// Copies of what was read, a buffer for each thread that repacks at the moment. No buffer is larger than the largest
/// expert as it is stored, so with [`Geometry::largest_repacked`](crate::Geometry::largest_repacked) and the number of
/// threads all of it can be charged beforehand.
#[derive(Default)]
pub(super) struct Scratch(Mutex<Vec<Vec<u8>>>);

impl Scratch {
    /// Makes gate, up and down of what was read into `slot`, in the same slot; where the place has no repack they are
    /// there already.
    pub(super) fn repack(&self, place: &ExpertPlace, slot: &mut [u8]) -> Result<(), StoreError> {
        let Some(repack) = &place.repack else { return Ok(()) };
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut copy = kept.unwrap_or_default();
        copy.clear();
        copy.reserve_exact(stored_bytes(place) as usize);
        segments(place).for_each(|segment| copy.extend_from_slice(&slot[segment.data()]));
        let mut rest = &copy[..];
        let mut run = |len: u64| {
            let (run, after) = rest.split_at(len as usize);
            rest = after;
            run
        };
        let runs: Vec<&[u8]> = place.runs.iter().map(|extent| run(extent.len)).collect();
        // Both lengths were checked when the store was opened.
        let made = repack.apply(&runs, &mut slot[..repack.bytes() as usize]);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(copy);
        made.map_err(|error| StoreError::Internal(format!("an expert that was read cannot be used: {error}")))
    }
}
