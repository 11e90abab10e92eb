//! Key-value rows in the memory of a device.

use std::sync::{Arc, Mutex, PoisonError};

use metaltail_kernels::{Accelerator, Buffer, Op};

use crate::error::ModelError;

/// Positions of the smallest buffer.
const LEAST: usize = 256;

#[derive(Clone, Copy, Debug)]
struct Stream {
    buffer: Buffer,
    positions: usize,
}

/// The streams of every layer of one sequence. Buffers double when they are full.
#[derive(Debug)]
pub(crate) struct DeviceCache {
    layers: Vec<Vec<Stream>>,
    /// Where its buffers go when it is dropped: only who has the device can release them.
    dropped: Arc<Mutex<Vec<Buffer>>>,
}

impl DeviceCache {
    pub(super) fn new(dropped: Arc<Mutex<Vec<Buffer>>>) -> DeviceCache {
        DeviceCache { layers: Vec::new(), dropped }
    }

    /// Makes room for `wanted` positions, of which `len` are there, in streams of these widths; never for more than
    /// `most`, unless they are wanted.
    pub(super) fn reserve(
        &mut self,
        device: &mut dyn Accelerator,
        slot: usize,
        widths: &[usize],
        (len, wanted, most): (usize, usize, usize),
    ) -> Result<(), ModelError> {
        if self.layers.len() <= slot {
            self.layers.resize_with(slot + 1, Vec::new);
        }
        let streams = &mut self.layers[slot];
        for (number, &width) in widths.iter().enumerate() {
            let old = streams.get(number).copied();
            if old.is_some_and(|old| old.positions >= wanted) {
                continue;
            }
            let positions = wanted.max(LEAST).next_power_of_two().min(most).max(wanted);
            let buffer = device.buffer(positions.saturating_mul(width))?;
            let new = Stream { buffer, positions };
            match (old, streams.get_mut(number)) {
                (Some(old), Some(place)) => {
                    let rows = len.min(old.positions);
                    let (from, to) = (old.buffer.rows(width), buffer.rows(width));
                    *place = new;
                    device.record(&Op::Copy { from, to, rows, width })?;
                    device.release(old.buffer);
                }
                _ => streams.push(new),
            }
        }
        Ok(())
    }

    pub(super) fn stream(&self, slot: usize, stream: usize) -> Option<Buffer> {
        Some(self.layers.get(slot)?.get(stream)?.buffer)
    }
}

impl Drop for DeviceCache {
    fn drop(&mut self) {
        let mut dropped = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
        dropped.extend(self.layers.iter().flatten().map(|stream| stream.buffer));
    }
}
