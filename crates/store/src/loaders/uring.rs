//! One thread with an io_uring: it begins reads as far as there is room and takes what ended. Checksums are
//! computed and experts repacked by other threads, so that reads never wait for them.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::load::{Landed, Load, Part};
use super::work::Work;
use super::{Carrier, threads};
use crate::arena::SlotPiece;
use crate::error::StoreError;
use crate::event::StoreEvent;
use crate::geometry::Segment;
use crate::io::ring::{Done, Ring};
use crate::io::{RunFault, Traffic, Turn, Window, retried};
use crate::table::Ended;

/// Reads at a time; more parts than that wait in the queue, where demand still overtakes speculation.
const DEPTH: usize = 32;
/// Of these, parts of loads ahead of need, so that a demand does not wait for many of them.
const MOST_AHEAD: usize = 4;

pub(super) struct Uring {
    work: Arc<Work>,
    threads: Vec<JoinHandle<()>>,
}

/// A read under way; its pages are the ring's.
struct Flight {
    load: Arc<Load>,
    segment: Segment,
    tried: u64,
    turn: Turn,
    window: Window,
    traffic: Traffic,
    tries: u32,
}

impl Uring {
    /// `helpers` threads at most end loads whose end takes long: one where there are only checksums, which are computed
    /// once an expert, and all of them where experts are repacked at every load.
    pub(super) fn start(work: Arc<Work>, helpers: usize) -> Result<Uring, StoreError> {
        let ring = Ring::new(DEPTH, descriptors(&work)).map_err(|reason| StoreError::Uring { reason })?;
        let descriptor = |e| StoreError::Uring {
            reason: format!("there is no descriptor to wake it by (`ulimit -n`): {e}"),
        };
        work.shared().bell.event().map_err(descriptor)?;
        let mut all = Uring { work: Arc::clone(&work), threads: Vec::new() };
        let repacks =
            work.shared().layers.iter().flat_map(|l| &l.experts).any(|place| place.repack.is_some());
        let helpers = if repacks { helpers.max(1) } else { 1 };
        let (slow, landed) = mpsc::channel();
        let landed = Arc::new(Mutex::new(landed));
        for number in 0..helpers {
            let (work, landed) = (Arc::clone(&work), Arc::clone(&landed));
            all.spawn("mt-verify", number, move || end_slow(&work, &landed))?;
        }
        all.spawn("mt-ring", helpers, move || Loop { work, ring, ahead: 0, slow }.run())?;
        Ok(all)
    }

    fn spawn(
        &mut self,
        name: &str,
        number: usize,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<(), StoreError> {
        let spawned = std::thread::Builder::new().name(name.into()).spawn(body);
        self.threads.push(spawned.map_err(|e| StoreError::Spawn { number, source: Arc::new(e) })?);
        Ok(())
    }
}

/// Ends loads as they come, until the ring's thread has gone.
fn end_slow(work: &Work, landed: &Mutex<Receiver<Landed>>) {
    // One waits for the next, the others for their turn.
    let next = || landed.lock().unwrap_or_else(PoisonError::into_inner).recv();
    while let Ok(landed) = next() {
        work.finish(landed);
    }
}

/// Descriptors of all files of all drives, as [`Flight`]s number them.
fn descriptors(work: &Work) -> Vec<Option<RawFd>> {
    let drives = &work.shared().drives;
    let of = |drive| {
        let reader = drives.reader(drive);
        (0..reader.files() as u32).map(|file| reader.handle(file).map(|f| f.as_raw_fd()))
    };
    (0..drives.len()).flat_map(of).collect()
}

impl Carrier for Uring {
    fn join(&mut self) {
        for thread in self.threads.drain(..).rev() {
            // All catch what observers throw; there is nothing to learn from the result.
            let _ = thread.join();
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // Of use only where a thread could not be started: the others must not wait for ever.
        self.work.shared().stop();
        self.join();
    }
}

struct Loop {
    work: Arc<Work>,
    ring: Ring<Flight>,
    /// Parts of loads ahead of need under way.
    ahead: usize,
    /// Loads whose end takes long.
    slow: Sender<Landed>,
}

impl Loop {
    /// Until the store closes and the last read is over.
    fn run(mut self) {
        let mut done = Vec::new();
        loop {
            while self.ring.has_room()
                && let Some(part) = self.work.next(self.ahead < MOST_AHEAD)
            {
                self.begin(part);
            }
            if self.work.shared().stopping() && self.ring.under_way() == 0 {
                return;
            }
            if let Ok(event) = self.work.shared().bell.event() {
                self.ring.watch(event);
            }
            if let Err(e) = self.ring.wait(&mut done) {
                return self.go_on_without(&e);
            }
            // Before the queue is looked at again: what rings from here on is not lost.
            self.work.shared().bell.hush();
            done.drain(..).for_each(|ended| self.ended(ended));
        }
    }

    /// Begins to read a part from the drive that is best now.
    fn begin(&mut self, part: Part) {
        self.ahead += usize::from(part.load.job.is_ahead());
        match self.work.choose(&part) {
            Ok(turn) => {
                let align = self.work.shared().drives.reader(turn.drive).alignment();
                let window = Window::new(part.segment.run, align);
                let Part { load, segment, pages, tried } = part;
                let traffic = Traffic::default();
                self.submit(pages, Flight { load, segment, tried, turn, window, traffic, tries: 0 });
            }
            Err(e) => self.end(part, Err(e)),
        }
    }

    fn submit(&mut self, pages: SlotPiece, flight: Flight) {
        let drives = &self.work.shared().drives;
        let before: usize = (0..flight.turn.drive).map(|d| drives.reader(d).files()).sum();
        let file = before + flight.segment.run.file as usize;
        let next = flight.window.next().unwrap_or((0, 0..0));
        if let Err((pages, flight)) = self.ring.read(file, next.0, pages, next.1, flight) {
            // It has room, and the file is one of its own.
            let part = Part { load: flight.load, segment: flight.segment, pages, tried: flight.tried };
            self.end(part, Err(StoreError::Internal("the io_uring took no read".into())));
        }
    }

    /// Continues a part, asks another drive for it, or ends it.
    fn ended(&mut self, (pages, mut flight, result): Done<Flight>) {
        flight.traffic.calls += 1;
        #[cfg(test)]
        let result = self.bent(&flight, result);
        let fault = match result {
            Ok(n) => {
                flight.traffic.bytes += n as u64;
                flight.window.advance(n).err()
            }
            Err(e) if retried(&e, &mut flight.tries) => None,
            Err(e) => Some(flight.window.fault(Some(e))),
        };
        if fault.is_none() && flight.window.next().is_some() {
            return self.submit(pages, flight);
        }
        self.settle(pages, flight, fault);
    }

    /// What a double makes of a completion.
    #[cfg(test)]
    fn bent(&self, flight: &Flight, result: std::io::Result<usize>) -> std::io::Result<usize> {
        let (offset, range) = flight.window.next().unwrap_or_default();
        let reader = self.work.shared().drives.reader(flight.turn.drive);
        reader.completed(flight.segment.run.file, offset, range.len(), result)
    }

    fn settle(&mut self, pages: SlotPiece, flight: Flight, fault: Option<RunFault>) {
        let Flight { load, segment, tried, turn, mut traffic, .. } = flight;
        traffic.service = turn.began().elapsed();
        let mut part = Part { load, segment, pages, tried };
        match self.work.settle(&mut part, &turn, traffic, fault) {
            Ok(true) => {
                self.ahead -= usize::from(part.load.job.is_ahead());
                self.begin(part);
            }
            Ok(false) => self.end(part, Ok(turn.drive)),
            Err(e) => self.end(part, Err(e)),
        }
    }

    fn end(&mut self, part: Part, outcome: Result<usize, StoreError>) {
        self.ahead -= usize::from(part.load.job.is_ahead());
        let Some(landed) = part.end(outcome) else { return };
        if !self.work.ends_slowly(&landed) {
            return self.work.finish(landed);
        }
        if let Err(mpsc::SendError(landed)) = self.slow.send(landed) {
            // The other threads are gone: late is better than never.
            self.work.finish(landed);
        }
    }

    /// The ring is broken: reads under way are given up with their memory, and this thread reads by itself.
    fn go_on_without(self, why: &std::io::Error) {
        let Loop { work, mut ring, slow, .. } = self;
        drop(slow);
        // A load is lost once, however many of its parts are.
        let slots: BTreeSet<u32> = ring.abandon().iter().map(|flight| flight.load.job.slot).collect();
        let text = format!("io_uring broke ({why}): expert reads go on one at a time. Use --io threads");
        work.shared().emit(&StoreEvent::Notice(text));
        for slot in slots {
            let lost = StoreError::Uring { reason: format!("it broke while it read: {why}") };
            work.shared().complete(slot, Ended::Failed(lost));
        }
        while let Some(part) = work.wait_next() {
            threads::carry_out(&work, part);
        }
    }
}
