//! The measurement's reads by one thread through an io_uring.

use std::os::fd::AsRawFd;
use std::time::Instant;

use metaltail_container::Extent;

use super::{Plan, ProbeError, Sample, failed};
use crate::arena::SlotPiece;
use crate::error::StoreError;
use crate::io::ring::Ring;
use crate::io::{ExpertReader, FileReader, Window, retried};

/// One run under way.
struct Flight {
    run: Extent,
    window: Window,
    began: Instant,
    tries: u32,
}

pub(super) fn by_uring(
    reader: &FileReader,
    plan: &Plan,
    pieces: Vec<SlotPiece>,
    ends: Instant,
) -> Result<Sample, ProbeError> {
    let files = (0..reader.files() as u32).map(|file| reader.handle(file).map(|f| f.as_raw_fd()));
    let mut ring = Ring::new(pieces.len(), files.collect()).map_err(ProbeError::Uring)?;
    let mut sample = Sample::default();
    for pages in pieces {
        begin_next(&mut ring, reader, plan, pages, ends)?;
    }
    let mut done = Vec::new();
    while ring.under_way() > 0 {
        ring.wait(&mut done).map_err(|e| ProbeError::Uring(format!("it broke: {e}")))?;
        for (pages, mut flight, result) in done.drain(..) {
            let fault = match result {
                Ok(n) => {
                    sample.bytes += n as u64;
                    flight.window.advance(n).err()
                }
                Err(e) if retried(&e, &mut flight.tries) => None,
                Err(e) => Some(flight.window.fault(Some(e))),
            };
            if let Some(fault) = fault {
                return Err(failed(reader, flight.run, &fault));
            }
            if flight.window.next().is_some() {
                submit(&mut ring, pages, flight)?;
            } else {
                sample.times.push(flight.began.elapsed());
                begin_next(&mut ring, reader, plan, pages, ends)?;
            }
        }
    }
    Ok(sample)
}

fn begin_next(
    ring: &mut Ring<Flight>,
    reader: &FileReader,
    plan: &Plan,
    pages: SlotPiece,
    ends: Instant,
) -> Result<(), ProbeError> {
    match plan.take(ends) {
        Some(run) => {
            let window = Window::new(run, reader.alignment());
            submit(ring, pages, Flight { run, window, began: Instant::now(), tries: 0 })
        }
        None => Ok(()),
    }
}

fn submit(ring: &mut Ring<Flight>, pages: SlotPiece, flight: Flight) -> Result<(), ProbeError> {
    let file = flight.run.file as usize;
    let full = || StoreError::Internal("the io_uring took no read".into());
    let (offset, range) = flight.window.next().ok_or_else(full)?;
    ring.read(file, offset, pages, range, flight).map_err(|_| full().into())
}
