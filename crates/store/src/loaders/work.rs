//! The loads under way: how they are cut, in which order their parts are read, and how they end.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};

use super::load::{Landed, Load, Part};
use super::mend;
use super::repack::Scratch;
use crate::error::StoreError;
use crate::event::{LoadRank, StoreEvent};
use crate::geometry::{Segment, segments};
use crate::io::{RunFault, Turn, cut};
use crate::policy::ExpertId;
use crate::store::Shared;
use crate::sync::{Mutex, MutexGuard};
use crate::table::{Ended, Job};

/// Length of parts where nothing was said and parts are of use: with several drives, so that all of them
/// read one expert; and in loads ahead of need, which are called off between parts.
const PART: u64 = 2 << 20;

/// Parts that wait to be read.
#[derive(Default)]
struct Queue {
    demanded: VecDeque<Part>,
    ahead: VecDeque<Part>,
}

/// What carriers take work from and report to.
pub(super) struct Work {
    shared: Arc<Shared>,
    chunk: Option<u64>,
    queue: Mutex<Queue>,
    scratch: Scratch,
}

impl Work {
    pub(super) fn new(shared: Arc<Shared>, chunk: Option<u64>) -> Work {
        Work { shared, chunk, queue: Mutex::default(), scratch: Scratch::default() }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next part to read, without waiting: of what is waited for the rest of a load, else a new one's first
    /// part; else the rest of a load ahead of need, and only when there is none a new one. `None` where there is
    /// none now, or the store closes. While `ahead` is false, loads ahead of need only queue.
    pub(super) fn next(&self, ahead: bool) -> Option<Part> {
        while !self.shared.stopping() {
            // In statements of their own: the lock is not held further down.
            let demanded = self.queue().demanded.pop_front();
            if let Some(part) = demanded {
                match part.load.is_lost() {
                    false => return Some(part),
                    // The load failed already, and says why.
                    true => self.give_up(part),
                }
                continue;
            }
            let begun = !self.queue().ahead.is_empty();
            if let Some(job) = self.shared.try_next_job(ahead && !begun) {
                match self.begin(job) {
                    None => continue,
                    part => return part,
                }
            }
            if !ahead {
                return None;
            }
            let rest = self.queue().ahead.pop_front();
            let part = match rest {
                Some(part) => part,
                // Another thread took it just now.
                None if begun => continue,
                None => return None,
            };
            match part.load.is_lost() || self.shared.should_stop(&part.load.job) {
                false => return Some(part),
                true => self.give_up(part),
            }
        }
        None
    }

    /// The next part to read; waits for one. `None` when the store closes.
    pub(super) fn wait_next(&self) -> Option<Part> {
        loop {
            let seen = self.shared.bell.count();
            if let Some(part) = self.next(true) {
                return Some(part);
            }
            if self.shared.stopping() {
                return None;
            }
            self.shared.bell.wait_past(seen);
        }
    }

    fn give_up(&self, part: Part) {
        let (layer, expert) = (part.load.layer, part.load.job.id.expert);
        self.end(part, Err(StoreError::Cancelled { layer, expert }));
    }

    /// Begins a load: its first part, the others queued. `None` when it ended at once, by an error.
    fn begin(&self, job: Job) -> Option<Part> {
        // Whatever happens in here, the table hears of the load's end.
        let parts = catch_unwind(AssertUnwindSafe(|| self.parts(job)));
        match parts.unwrap_or_else(|_| Err(panicked())) {
            Ok((first, rest)) => {
                let others = rest.len();
                if others > 0 {
                    let mut queue = self.queue();
                    if job.is_ahead() { &mut queue.ahead } else { &mut queue.demanded }.extend(rest);
                    drop(queue);
                    (0..others).for_each(|_| self.shared.bell.ring());
                }
                Some(first)
            }
            Err(e) => {
                self.shared.complete(job.slot, Ended::Failed(e));
                None
            }
        }
    }

    fn parts(&self, job: Job) -> Result<(Part, Vec<Part>), StoreError> {
        let shared = &self.shared;
        let (layer, expert) = (shared.layers[job.id.layer as usize].layer, job.id.expert);
        shared.emit(&StoreEvent::ReadStarted { layer, expert, queued: job.queued.elapsed() });
        let slot = shared.arena.begin_write(job.slot).ok_or_else(|| {
            StoreError::Internal(format!("slot {} was free in the table and leased in the arena", job.slot))
        })?;
        let several = shared.drives.len() > 1 || job.is_ahead();
        let longest = self.chunk.or(several.then_some(PART)).unwrap_or(u64::MAX);
        let cuts: Vec<Segment> = segments(shared.place(job.id)).flat_map(|s| stretches(s, longest)).collect();
        let ranges: Vec<Range<usize>> = cuts.iter().map(|s| s.start..s.start + s.span).collect();
        let load = Arc::new(Load::new(job, layer));
        let part = |(segment, pages)| Part { load: Arc::clone(&load), segment, pages, tried: 0 };
        let mut parts = cuts.into_iter().zip(slot.split(&ranges)?).map(part);
        let first = parts.next().ok_or_else(|| StoreError::Internal("an expert has no runs".into()))?;
        Ok((first, parts.collect()))
    }

    /// The drive to read a part from now.
    pub(super) fn choose(&self, part: &Part) -> Result<Turn, StoreError> {
        let turn = self.shared.drives.choose(part.segment.run, part.tried);
        turn.ok_or_else(|| StoreError::Internal("no drive has the file".into()))
    }

    /// Notes how a read of a part went. After a failure: whether another drive can be asked for it; if
    /// not, the error.
    pub(super) fn settle(
        &self,
        part: &mut Part,
        turn: &Turn,
        traffic: crate::io::Traffic,
        fault: Option<RunFault>,
    ) -> Result<bool, StoreError> {
        let drives = &self.shared.drives;
        part.load.add(traffic);
        let notice = drives.settle(turn, traffic.bytes, traffic.calls, fault.as_ref());
        if let Some(text) = notice {
            // Not here may a panic of an observer end: the part is in nobody's hands.
            let tell = AssertUnwindSafe(|| self.shared.emit(&StoreEvent::Notice(text)));
            let _ = catch_unwind(tell);
        }
        let Some(fault) = fault else { return Ok(false) };
        part.tried |= 1 << turn.drive;
        let file = part.segment.run.file;
        let left = (0..drives.len()).any(|d| part.tried & (1 << d) == 0 && drives.reader(d).has(file));
        if left { Ok(true) } else { Err(part.load.error(drives, turn.drive, &part.segment, fault)) }
    }

    /// Ends a part, and with the last one its load.
    pub(super) fn end(&self, part: Part, outcome: Result<usize, StoreError>) {
        if let Some(landed) = part.end(outcome) {
            self.finish(landed);
        }
    }

    /// Ends a load: tells, verifies, repacks, and hands the slot over.
    pub(super) fn finish(&self, landed: Landed) {
        let job = landed.load.job;
        let caught = catch_unwind(AssertUnwindSafe(|| self.deliver(landed)));
        self.shared.complete(job.slot, caught.unwrap_or_else(|_| Ended::Failed(panicked())));
    }

    /// Whether the end of this load takes long: its checksum is to be computed, or it is to be repacked.
    #[cfg(target_os = "linux")]
    pub(super) fn ends_slowly(&self, landed: &Landed) -> bool {
        let id = landed.load.job.id;
        let place = self.shared.place(id);
        let checked = || place.checksum.is_some() && self.shared.needs_check(id);
        landed.fault.is_none() && (place.repack.is_some() || checked())
    }

    fn deliver(&self, landed: Landed) -> Ended {
        let Landed { load, mut slot, traffic, fault, sources } = landed;
        let (layer, expert, rank) = (load.layer, load.job.id.expert, load.job.rank);
        let crate::io::Traffic { bytes, calls, service } = traffic;
        let ok = fault.is_none();
        self.shared.emit(&StoreEvent::ReadFinished { layer, expert, bytes, calls, service, rank, ok });
        match fault {
            Some(StoreError::Cancelled { .. }) if rank != LoadRank::Demand => Ended::Stopped,
            Some(e) => Ended::Failed(e),
            None => match self.prepare(load.job.id, &mut slot, sources) {
                Ok(()) => {
                    slot.keep_in_memory();
                    self.shared.tell_refused_lock();
                    Ended::Loaded { generation: slot.generation(), bytes }
                }
                Err(e) => Ended::Failed(e),
            },
        }
    }

    /// From the bytes of a drive to those that kernels read.
    fn prepare(&self, id: ExpertId, slot: &mut [u8], sources: u64) -> Result<(), StoreError> {
        mend::verify(&self.shared, id, slot, sources)?;
        self.scratch.repack(self.shared.place(id), slot)
    }
}

/// What a load ends with whose loader panicked.
pub(super) fn panicked() -> StoreError {
    StoreError::Internal("a loader panicked".into())
}

/// A segment cut into parts of at most `longest` bytes, each with whole pages of its own.
fn stretches(whole: Segment, longest: u64) -> impl Iterator<Item = Segment> {
    let first_page = whole.run.offset - whole.displacement as u64;
    cut(whole.run, longest).map(move |run| {
        let displacement = run.offset % crate::PAGE;
        let start = whole.start + (run.offset - displacement - first_page) as usize;
        let span = (displacement + run.len).next_multiple_of(crate::PAGE) as usize;
        Segment { run, start, displacement: displacement as usize, span }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::place;
    use metaltail_container::Extent;
    use proptest::prelude::*;

    proptest! {
        /// However a run is cut, each byte keeps its place in the slot, and no two parts share a page.
        #[test]
        fn parts_of_a_segment_keep_its_layout(
            offset in 0u64..20_000, len in 1u64..60_000, longest in prop_oneof![1u64..30_000, Just(u64::MAX)],
        ) {
            let expert = place(&[Extent { file: 0, offset: 5, len: 64 }, Extent { file: 0, offset, len }]);
            let whole = segments(&expert).last().unwrap();
            let mut page = whole.start;
            for s in stretches(whole, longest) {
                prop_assert_eq!(s.start, page);
                prop_assert_eq!(s.data().start - whole.data().start, (s.run.offset - offset) as usize);
                prop_assert!(s.data().end <= s.start + s.span);
                page += s.span;
            }
            prop_assert_eq!(page, whole.start + whole.span);
        }
    }
}
