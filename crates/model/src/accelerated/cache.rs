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

/// A buffer that a larger one took the place of, kept until its rows have arrived there.
#[derive(Clone, Copy, Debug)]
struct Outgrown {
    layer: usize,
    number: usize,
    stream: Stream,
}

/// The streams of every layer of one sequence. Buffers double when they are full.
#[derive(Debug)]
pub(crate) struct DeviceCache {
    layers: Vec<Vec<Stream>>,
    /// In the order in which they were replaced.
    outgrown: Vec<Outgrown>,
    /// Where its buffers go when it is dropped: only who has the device can release them.
    dropped: Arc<Mutex<Vec<Buffer>>>,
}

impl DeviceCache {
    pub(super) fn new(dropped: Arc<Mutex<Vec<Buffer>>>) -> DeviceCache {
        DeviceCache { layers: Vec::new(), outgrown: Vec::new(), dropped }
    }

    /// Makes room for `wanted` positions, of which `len` are there, in streams of these widths; never for more than
    /// `most`, unless they are wanted. What is outgrown is kept until [`DeviceCache::settle`].
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
                    self.outgrown.push(Outgrown { layer: slot, number, stream: old });
                    device.record(&Op::Copy { from, to, rows, width })?;
                }
                _ => streams.push(new),
            }
        }
        Ok(())
    }

    /// The device has ended and all went well: rows that moved have arrived.
    pub(super) fn settle(&mut self, device: &mut dyn Accelerator) {
        self.outgrown.drain(..).for_each(|old| device.release(old.stream.buffer));
    }

    /// The device has ended, and something failed: rows that moved may be lost where they moved to, but not where
    /// they came from.
    pub(super) fn restore(&mut self, device: &mut dyn Accelerator) {
        for Outgrown { layer, number, stream } in self.outgrown.drain(..).rev() {
            let place = self.layers.get_mut(layer).and_then(|streams| streams.get_mut(number));
            let other = place.map_or(stream, |place| std::mem::replace(place, stream));
            device.release(other.buffer);
        }
    }

    pub(super) fn stream(&self, slot: usize, stream: usize) -> Option<Buffer> {
        Some(self.layers.get(slot)?.get(stream)?.buffer)
    }
}

impl Drop for DeviceCache {
    fn drop(&mut self) {
        let mut dropped = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
        let outgrown = self.outgrown.iter().map(|old| old.stream.buffer);
        dropped.extend(self.layers.iter().flatten().map(|stream| stream.buffer).chain(outgrown));
    }
}
