//! Loader threads: they take queued loads, read, verify, and report.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use crate::error::StoreError;
use crate::event::{LoadRank, StoreEvent};
use crate::geometry::segments;
use crate::io::{RunFault, Traffic, read_run};
use crate::policy::ExpertId;
use crate::store::Shared;
use crate::sync::thread::{self, JoinHandle};
use crate::table::{Ended, Job};

/// Threads that end with the value, after the reads they are in.
pub(crate) struct Loaders {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Loaders {
    pub(crate) fn start(shared: &Arc<Shared>, count: usize) -> Result<Loaders, StoreError> {
        let mut loaders = Loaders { shared: Arc::clone(shared), threads: Vec::with_capacity(count) };
        for number in 0..count {
            let shared = Arc::clone(shared);
            let thread = thread::Builder::new()
                .name(format!("mt-loader-{number}"))
                .spawn(move || {
                    while let Some(job) = shared.next_job() {
                        run(&shared, job);
                    }
                })
                .map_err(|e| StoreError::Spawn { number, source: Arc::new(e) })?;
            loaders.threads.push(thread);
        }
        Ok(loaders)
    }
}

impl Drop for Loaders {
    fn drop(&mut self) {
        self.shared.stop();
        for thread in self.threads.drain(..) {
            // A loader catches its panics; there is nothing to learn from the result.
            let _ = thread.join();
        }
    }
}

/// One load. Whatever happens in it, the table hears of its end.
fn run(shared: &Arc<Shared>, job: Job) {
    let caught = catch_unwind(AssertUnwindSafe(|| load(shared, job)));
    let result = caught.unwrap_or_else(|_| Err(StoreError::Internal("a loader panicked".into())));
    shared.complete(job.slot, result.unwrap_or_else(Ended::Failed));
}

/// Fills the job's slot.
fn load(shared: &Arc<Shared>, job: Job) -> Result<Ended, StoreError> {
    let (layer, expert) = (shared.layers[job.id.layer as usize].layer, job.id.expert);
    if job.rank != LoadRank::Demand && shared.should_stop(&job) {
        return Ok(Ended::Stopped);
    }
    shared.emit(&StoreEvent::ReadStarted { layer, expert, queued: job.queued.elapsed() });
    let mut slot = shared.arena.begin_write(job.slot).ok_or_else(|| {
        StoreError::Internal(format!("slot {} was free in the table and leased in the arena", job.slot))
    })?;
    let mut traffic = Traffic::default();
    let read = segments(shared.place(job.id)).try_for_each(|s| {
        let pages = &mut slot[s.start..s.start + s.span];
        read_run(&*shared.reader, s.run, pages, &mut traffic).map_err(|fault| {
            let (file, offset, wanted) = (shared.reader.path(s.run.file), s.run.offset, s.run.len);
            match fault {
                RunFault { got, source: Some(source) } => {
                    StoreError::Read { layer, expert, file, offset, wanted, got, source: Arc::new(source) }
                }
                RunFault { got, source: None } => {
                    StoreError::EndOfFile { layer, expert, file, offset, wanted, got }
                }
            }
        })
    });
    let Traffic { bytes, calls, service } = traffic;
    let (rank, ok) = (job.rank, read.is_ok());
    shared.emit(&StoreEvent::ReadFinished { layer, expert, bytes, calls, service, rank, ok });
    read?;
    verify(shared, job.id, &slot)?;
    Ok(Ended::Loaded { generation: slot.generation(), bytes })
}

/// Compares the checksum at an expert's first load.
fn verify(shared: &Shared, id: ExpertId, slot: &[u8]) -> Result<(), StoreError> {
    let place = shared.place(id);
    let Some(wanted) = place.checksum.filter(|_| shared.needs_check(id)) else {
        return Ok(());
    };
    let mut hash = Xxh3::new();
    for s in segments(place) {
        hash.update(&slot[s.data()]);
    }
    let got = hash.digest();
    let (layer, expert) = (shared.layers[id.layer as usize].layer, id.expert);
    if got != wanted {
        let first = place.runs.first().copied();
        let (file, offset) = first.map_or_else(Default::default, |r| (shared.reader.path(r.file), r.offset));
        return Err(StoreError::Checksum { layer, expert, file, offset, wanted, got });
    }
    shared.checked(id);
    shared.emit(&StoreEvent::Verified { layer, expert });
    Ok(())
}
