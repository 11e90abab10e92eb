//! Threads with positioned reads: each carries one part at a time out.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::Carrier;
use super::load::Part;
use super::work::{Work, panicked};
use crate::error::StoreError;
use crate::io::{Traffic, read_run};
use crate::sync::thread::{self, JoinHandle};

pub(super) struct Threads {
    work: Arc<Work>,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    pub(super) fn start(work: &Arc<Work>, count: usize) -> Result<Threads, StoreError> {
        let mut all = Threads { work: Arc::clone(work), threads: Vec::with_capacity(count) };
        for number in 0..count {
            let work = Arc::clone(work);
            let thread = thread::Builder::new()
                .name(format!("mt-loader-{number}"))
                .spawn(move || {
                    while let Some(part) = work.wait_next() {
                        carry_out(&work, part);
                    }
                })
                .map_err(|e| StoreError::Spawn { number, source: Arc::new(e) })?;
            all.threads.push(thread);
        }
        Ok(all)
    }
}

impl Carrier for Threads {
    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            // A loader catches its panics; there is nothing to learn from the result.
            let _ = thread.join();
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // Of use only where a thread could not be started: those before it must not wait for ever.
        self.work.shared().stop();
        self.join();
    }
}

/// Reads a part, from as many drives as it takes, and ends it.
pub(super) fn carry_out(work: &Work, mut part: Part) {
    let caught = catch_unwind(AssertUnwindSafe(|| read(work, &mut part)));
    let outcome = caught.unwrap_or_else(|_| Err(panicked()));
    work.end(part, outcome);
}

/// The drive that the part came from.
fn read(work: &Work, part: &mut Part) -> Result<usize, StoreError> {
    let drives = &work.shared().drives;
    loop {
        let turn = work.choose(part)?;
        let mut traffic = Traffic::default();
        let read = read_run(drives.reader(turn.drive), part.segment.run, &mut part.pages, &mut traffic);
        if !work.settle(part, &turn, traffic, read.err())? {
            return Ok(turn.drive);
        }
    }
}
