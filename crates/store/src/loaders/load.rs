//! One load and its parts.

use std::sync::{Arc, PoisonError};

use crate::arena::{SlotPiece, SlotWrite};
use crate::error::StoreError;
use crate::geometry::Segment;
use crate::io::{Drives, RunFault, Traffic};
use crate::sync::{Mutex, MutexGuard};
use crate::table::Job;

/// What the parts of a load brought so far.
#[derive(Default)]
struct Sum {
    traffic: Traffic,
    /// The first failure; the parts that have not begun are then given up.
    fault: Option<StoreError>,
    /// Drives that parts came from, as bits.
    sources: u64,
}

/// An expert on its way into a slot.
pub(super) struct Load {
    pub(super) job: Job,
    /// Number of the layer.
    pub(super) layer: u32,
    sum: Mutex<Sum>,
}

/// A part of a load: pages of its own, and what is to lie in them.
pub(super) struct Part {
    pub(super) load: Arc<Load>,
    /// A run or a stretch of one, with its pages in the slot.
    pub(super) segment: Segment,
    pub(super) pages: SlotPiece,
    /// Drives that failed to deliver it, as bits.
    pub(super) tried: u64,
}

/// A load whose last part has ended.
pub(super) struct Landed {
    pub(super) load: Arc<Load>,
    pub(super) slot: SlotWrite,
    pub(super) traffic: Traffic,
    pub(super) fault: Option<StoreError>,
    pub(super) sources: u64,
}

impl Load {
    pub(super) fn new(job: Job, layer: u32) -> Load {
        Load { job, layer, sum: Mutex::default() }
    }

    fn sum(&self) -> MutexGuard<'_, Sum> {
        // Plain numbers: usable after a panic elsewhere.
        self.sum.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a part failed or the load was called off.
    pub(super) fn is_lost(&self) -> bool {
        self.sum().fault.is_some()
    }

    /// Adds what a read of a part took.
    pub(super) fn add(&self, traffic: Traffic) {
        let sum = &mut self.sum().traffic;
        sum.bytes += traffic.bytes;
        sum.calls += traffic.calls;
        sum.service += traffic.service;
    }

    /// The error that a fault of this load means.
    pub(super) fn error(&self, drives: &Drives, drive: usize, part: &Segment, fault: RunFault) -> StoreError {
        let (layer, expert) = (self.layer, self.job.id.expert);
        let file = drives.reader(drive).path(part.run.file);
        let (offset, wanted, got) = (part.run.offset, part.run.len, fault.got);
        match fault.source {
            Some(source) => {
                StoreError::Read { layer, expert, file, offset, wanted, got, source: Arc::new(source) }
            }
            None => StoreError::EndOfFile { layer, expert, file, offset, wanted, got },
        }
    }
}

impl Part {
    /// Ends the part: it arrived from a drive, or will not. The whole load comes back with the last one.
    pub(super) fn end(self, outcome: Result<usize, StoreError>) -> Option<Landed> {
        let Part { load, pages, .. } = self;
        let mut sum = load.sum();
        match outcome {
            Ok(drive) => sum.sources |= 1 << drive,
            Err(e) => {
                sum.fault.get_or_insert(e);
            }
        }
        drop(sum);
        let slot = pages.rejoin()?;
        let mut sum = load.sum();
        let (traffic, fault, sources) = (sum.traffic, sum.fault.take(), sum.sources);
        drop(sum);
        Some(Landed { load, slot, traffic, fault, sources })
    }
}
