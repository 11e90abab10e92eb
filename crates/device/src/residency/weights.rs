//! Dense weights, declared to a ledger.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapMut, MmapOptions};
use metaltail_kernels::HeldMatrix;
use metaltail_quant::{LayoutError, MatrixLayout, MatrixRef};

use super::driver::{ResidencyDriver, Span};
use super::ledger::ResidencyError;
use super::shared::Residency;

/// Bytes of the smallest and the largest usual chunk.
const CHUNK: Range<usize> = 1 << 20..512 << 20;
/// Chunks are whole pages on every system.
const PAGE: usize = 16 << 10;
/// Where parts of matrices begin.
const ALIGN: usize = 256;

/// Why weights are not held.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The system gave no memory.
    #[error("the system gave no {bytes} bytes for weights: {source}")]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// What it said.
        source: io::Error,
    },
    /// The device cannot keep them resident.
    #[error(transparent)]
    Residency(#[from] ResidencyError),
    /// A matrix that was never held, or of another shape.
    #[error("matrix {0} is not held")]
    Unknown(u32),
    /// More bytes than an address space has.
    #[error("a matrix larger than the address space")]
    TooLarge,
    /// A matrix that has not the bytes of its layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

struct Place {
    layout: MatrixLayout,
    chunk: usize,
    weights: Range<usize>,
    scales: Range<usize>,
}

/// What was declared, for those who compare it with the ledger.
#[derive(Clone, Debug, Default)]
pub struct WeightSpans(Arc<Mutex<Vec<Span>>>);

impl WeightSpans {
    /// All chunks.
    pub fn all(&self) -> Vec<Span> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Span>)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Copies of matrices that stay for as long as the device: one after another in few page-aligned chunks, each an
/// allocation that is declared once. Chunks grow with what is held, so that neither their number nor what is left
/// over in the last one does.
pub struct HeldWeights<D: ResidencyDriver> {
    residency: Arc<Residency<D>>,
    chunks: Vec<MmapMut>,
    /// Bytes used of the last chunk.
    used: usize,
    places: Vec<Place>,
    spans: WeightSpans,
}

impl<D: ResidencyDriver> fmt::Debug for HeldWeights<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldWeights").field("matrices", &self.places.len()).finish_non_exhaustive()
    }
}

fn span(chunk: &MmapMut) -> Span {
    Span { base: chunk.as_ptr() as usize, len: chunk.len() }
}

fn aligned(bytes: usize, to: usize) -> Result<usize, WeightsError> {
    bytes.checked_next_multiple_of(to).ok_or(WeightsError::TooLarge)
}

impl<D: ResidencyDriver> HeldWeights<D> {
    /// Nothing yet, to be declared to `residency`.
    pub fn new(residency: Arc<Residency<D>>) -> HeldWeights<D> {
        let spans = WeightSpans::default();
        HeldWeights { residency, chunks: Vec::new(), used: 0, places: Vec::new(), spans }
    }

    /// The ledger that they are declared to.
    pub fn residency(&self) -> &Arc<Residency<D>> {
        &self.residency
    }

    /// What is declared, now and later.
    pub fn spans(&self) -> WeightSpans {
        self.spans.clone()
    }

    /// Takes a copy of a matrix.
    ///
    /// # Errors
    /// No memory, or more than may be resident.
    pub fn hold(&mut self, m: MatrixRef<'_>) -> Result<HeldMatrix, WeightsError> {
        let id = u32::try_from(self.places.len()).map_err(|_| WeightsError::TooLarge)?;
        let (weights, scales) = (m.weights(), m.scales());
        let behind = aligned(weights.len(), ALIGN)?;
        let bytes = behind.checked_add(aligned(scales.len(), ALIGN)?).ok_or(WeightsError::TooLarge)?;
        let at = self.room(bytes)?;
        let chunk = self.chunks.len() - 1;
        let parts = [at..at + weights.len(), at + behind..at + behind + scales.len()];
        for (part, bytes) in parts.iter().zip([weights, scales]) {
            self.chunks[chunk][part.clone()].copy_from_slice(bytes);
        }
        self.used = at + bytes;
        let [weights, scales] = parts;
        self.places.push(Place { layout: m.layout(), chunk, weights, scales });
        Ok(HeldMatrix { id, layout: m.layout() })
    }

    /// A held matrix where it lies.
    ///
    /// # Errors
    /// One that is not held here.
    pub fn matrix(&self, held: HeldMatrix) -> Result<MatrixRef<'_>, WeightsError> {
        let place = self.places.get(held.id as usize).filter(|place| place.layout == held.layout);
        let place = place.ok_or(WeightsError::Unknown(held.id))?;
        let chunk = &self.chunks[place.chunk];
        Ok(MatrixRef::new(place.layout, &chunk[place.weights.clone()], &chunk[place.scales.clone()])?)
    }

    /// Where `bytes` begin in the last chunk: a new one, if the one before has not so many left.
    fn room(&mut self, bytes: usize) -> Result<usize, WeightsError> {
        let left = self.chunks.last().map_or(0, |chunk| chunk.len() - self.used);
        if !self.chunks.is_empty() && left >= bytes {
            return Ok(self.used);
        }
        let held: usize = self.chunks.iter().map(|chunk| chunk.len()).sum();
        let usual = (held / 4).clamp(CHUNK.start, CHUNK.end);
        let bytes = aligned(bytes.max(usual), PAGE)?;
        // The system's pages are zeros that nobody has touched: a chunk costs what is copied into it.
        let map = MmapOptions::new().len(bytes).no_reserve_swap().map_anon();
        let map = map.map_err(|source| WeightsError::Map { bytes, source })?;
        self.residency.register(span(&map))?;
        self.spans.change(|spans| spans.push(span(&map)));
        self.chunks.push(map);
        self.used = 0;
        Ok(0)
    }
}

impl<D: ResidencyDriver> Drop for HeldWeights<D> {
    fn drop(&mut self) {
        for chunk in self.chunks.drain(..) {
            match self.residency.unregister(span(&chunk)) {
                Ok(()) => self.spans.change(|spans| spans.retain(|known| *known != span(&chunk))),
                // The device may still read the memory: it is never freed.
                Err(_) => std::mem::forget(chunk),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use metaltail_quant::{Format, OwnedMatrix};

    use super::*;
    use crate::residency::{Ledger, Mode};
    use crate::sim::{Profile, SimDriver};

    fn residency(working_set: u64) -> Arc<Residency<SimDriver>> {
        let profile = Profile { working_set, ..Profile::m5max() };
        Arc::new(Residency::new(Ledger::new(SimDriver::new(profile), Mode::Set)))
    }

    fn matrix(rows: usize, fill: u8) -> OwnedMatrix {
        let layout = MatrixLayout::new(Format::Int8Row, rows, 1000).unwrap();
        OwnedMatrix::new(layout, vec![fill; layout.weight_bytes()], vec![fill; layout.scale_bytes()]).unwrap()
    }

    #[test]
    fn matrices_lie_in_few_declared_chunks_and_leave_with_them() {
        let residency = residency(1 << 40);
        let mut weights = HeldWeights::new(Arc::clone(&residency));
        let held: Vec<HeldMatrix> =
            (0..100u8).map(|n| weights.hold(matrix(333, n).as_ref()).unwrap()).collect();
        for (n, held) in (0u8..).zip(&held) {
            let m = weights.matrix(*held).unwrap();
            assert!(m.weights().iter().chain(m.scales()).all(|byte| *byte == n), "matrix {n}");
            assert_eq!(m.weights().as_ptr() as usize % ALIGN, 0);
        }
        let difference = residency.ledger().difference(&weights.spans().all());
        assert!(difference.is_empty(), "{difference:?}");
        let (declared, chunks) = (residency.stats().bytes, residency.stats().registered);
        assert!(chunks < 20 && declared < 42_000_000, "33 MB in {chunks} chunks of {declared} bytes");
        let spans = weights.spans();
        drop(weights);
        assert!(spans.all().is_empty());
        assert_eq!(residency.stats().bytes, 0);
    }

    #[test]
    fn a_large_matrix_gets_a_chunk_of_its_size() {
        let mut weights = HeldWeights::new(residency(1 << 40));
        let large = weights.hold(matrix(40_000, 1).as_ref()).unwrap();
        let small = weights.hold(matrix(3, 2).as_ref()).unwrap();
        assert_eq!(weights.matrix(large).unwrap().weights()[39_999_999], 1);
        assert_eq!(weights.matrix(small).unwrap().weights()[0], 2);
        let lens: Vec<usize> = weights.spans().all().iter().map(|span| span.len).collect();
        assert!(lens[0] >= 40_000_000 && lens[0] < 41_000_000, "{lens:?}");
    }

    #[test]
    fn what_may_not_be_resident_is_refused_and_nothing_of_it_stays() {
        let residency = residency(20 << 20);
        let mut weights = HeldWeights::new(Arc::clone(&residency));
        let first = weights.hold(matrix(1000, 1).as_ref()).unwrap();
        let refused = weights.hold(matrix(20_000, 2).as_ref()).unwrap_err().to_string();
        assert!(refused.contains("lower --ram"), "{refused}");
        assert_eq!(weights.matrix(first).unwrap().weights()[0], 1);
        let other = HeldMatrix { id: 7, ..first };
        assert!(matches!(weights.matrix(other), Err(WeightsError::Unknown(7))));
        assert!(residency.ledger().difference(&weights.spans().all()).is_empty());
    }
}
