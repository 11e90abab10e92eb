//! Weights that a device holds: copies in few large mappings, each declared once.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::MmapMut;
use metaltail_kernels::HeldMatrix;
use metaltail_quant::{MatrixLayout, MatrixRef};

use super::driver::{ResidencyDriver, Span};
use super::ledger::ResidencyError;
use super::shared::Residency;

/// Bytes of the first mapping that matrices share; later ones grow with what is held, so that neither their number nor
/// what stays empty of the last one does.
const FIRST: usize = 1 << 20;

/// Most bytes of a mapping that matrices share.
const CHUNK: usize = 512 << 20;

/// What a mapping's length is a multiple of: whole pages on every system.
const PAGES: usize = 1 << 16;

/// What a matrix's bytes begin at a multiple of.
const ALIGN: usize = 256;

/// Where matrices lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// One behind the other in mappings of what was announced ([`HeldWeights::announce`]), else of a quarter of what is
    /// held already, at most this many bytes; a larger matrix has one of its own.
    Chunks(usize),
    /// For tests: weights and scales in a mapping each, between so many other bytes, the last of which is followed by
    /// a page that is declared on its own and holds nothing. A launcher that takes away what a kernel does not reach
    /// stops one that runs over the end.
    Apart {
        /// Bytes before.
        before: usize,
        /// Bytes behind.
        behind: usize,
    },
}

/// Why a matrix cannot be held.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HoldError {
    /// The system gives no memory.
    #[error("no memory for {bytes} bytes of weights: {source}")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What the system says.
        source: io::Error,
    },
    /// The memory cannot be declared.
    #[error(transparent)]
    Residency(#[from] ResidencyError),
}

struct Chunk {
    memory: MmapMut,
    /// What was declared of it.
    declared: Vec<Span>,
    used: usize,
}

/// Bytes of a chunk.
#[derive(Clone, Debug)]
struct Part {
    chunk: usize,
    range: Range<usize>,
}

struct Held {
    layout: MatrixLayout,
    weights: Part,
    /// None in formats without.
    scales: Option<Part>,
}

/// What is declared for a device's weights, for those who compare it with the ledger.
#[derive(Clone, Debug, Default)]
pub struct WeightSpans(Arc<Mutex<Vec<Span>>>);

impl WeightSpans {
    /// All of it.
    pub fn all(&self) -> Vec<Span> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Span>)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Matrices of a device, for as long as this lives. Their mappings are removed from the ledger before they are freed.
pub struct HeldWeights<D: ResidencyDriver> {
    residency: Arc<Residency<D>>,
    placement: Placement,
    chunks: Vec<Chunk>,
    /// Bytes of matrices that were announced and are not held yet.
    announced: usize,
    matrices: Vec<Held>,
    spans: WeightSpans,
}

impl<D: ResidencyDriver> fmt::Debug for HeldWeights<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (matrices, bytes) = (self.matrices.len(), self.declared());
        f.debug_struct("HeldWeights")
            .field("matrices", &matrices)
            .field("declared", &bytes)
            .finish_non_exhaustive()
    }
}

fn whole(bytes: usize, unit: usize) -> Result<usize, HoldError> {
    bytes
        .checked_next_multiple_of(unit)
        .ok_or_else(|| HoldError::Memory { bytes, source: io::ErrorKind::OutOfMemory.into() })
}

impl<D: ResidencyDriver> HeldWeights<D> {
    /// None yet; what comes is declared to `residency`.
    pub fn new(residency: Arc<Residency<D>>) -> HeldWeights<D> {
        let placement = Placement::Chunks(CHUNK);
        HeldWeights {
            residency,
            placement,
            chunks: Vec::new(),
            announced: 0,
            matrices: Vec::new(),
            spans: WeightSpans::default(),
        }
    }

    /// Places matrices in another way from now on.
    pub fn with_placement(mut self, placement: Placement) -> HeldWeights<D> {
        self.placement = placement;
        self
    }

    /// Says what is to come: then chunks are as large as that, and nothing is left over.
    pub fn announce(&mut self, matrices: &[MatrixLayout]) {
        let aligned = |bytes: usize| bytes.checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX);
        let bytes = |layout: &MatrixLayout| {
            aligned(layout.weight_bytes()).saturating_add(aligned(layout.scale_bytes()))
        };
        self.announced = matrices.iter().map(bytes).fold(self.announced, usize::saturating_add);
    }

    /// What is declared for them, now and later.
    pub fn spans(&self) -> WeightSpans {
        self.spans.clone()
    }

    /// Takes a copy of a matrix.
    ///
    /// # Errors
    /// No memory, or more than may be resident; nothing is held then.
    pub fn hold(&mut self, matrix: MatrixRef<'_>) -> Result<HeldMatrix, HoldError> {
        let too_many = || HoldError::Memory { bytes: 0, source: io::ErrorKind::OutOfMemory.into() };
        let id = u32::try_from(self.matrices.len()).map_err(|_| too_many())?;
        let (weights, scales) = match self.placement {
            Placement::Chunks(bytes) => self.next_to_others(matrix, bytes)?,
            Placement::Apart { before, behind } => {
                let weights = self.apart(matrix.weights(), before, behind)?;
                let scales = match matrix.scales() {
                    [] => None,
                    scales => Some(self.apart(scales, before, behind)?),
                };
                (weights, scales)
            }
        };
        let layout = matrix.layout();
        self.matrices.push(Held { layout, weights, scales });
        Ok(HeldMatrix { id, layout })
    }

    /// Weights, then scales, at the next free places of a chunk.
    fn next_to_others(
        &mut self,
        matrix: MatrixRef<'_>,
        bytes: usize,
    ) -> Result<(Part, Option<Part>), HoldError> {
        let (weights, scales) = (matrix.weights(), matrix.scales());
        let places = [whole(weights.len(), ALIGN)?, whole(scales.len(), ALIGN)?];
        let wanted = places[0].saturating_add(places[1]);
        // Wherever there is room: what a large matrix left over is filled by small ones.
        let fits = |chunk: &Chunk| chunk.memory.len() - chunk.used >= wanted;
        let chunk = match self.chunks.iter().position(fits) {
            Some(chunk) => chunk,
            None => {
                let held: usize = self.chunks.iter().map(|chunk| chunk.memory.len()).sum();
                let usual = match self.announced {
                    0 => (held / 4).max(FIRST),
                    announced => announced,
                };
                self.map(whole(wanted.max(usual.min(bytes)), PAGES)?, None)?
            }
        };
        self.announced = self.announced.saturating_sub(wanted);
        let mut part = |bytes: &[u8], place: usize| {
            let Chunk { memory, used, .. } = &mut self.chunks[chunk];
            let range = *used..*used + bytes.len();
            memory[range.clone()].copy_from_slice(bytes);
            *used += place;
            Part { chunk, range }
        };
        let weights = part(weights, places[0]);
        Ok((weights, (!scales.is_empty()).then(|| part(scales, places[1]))))
    }

    /// Bytes in a mapping of their own, up to its end.
    fn apart(&mut self, bytes: &[u8], before: usize, behind: usize) -> Result<Part, HoldError> {
        let body = whole(bytes.len().saturating_add(before).saturating_add(behind), PAGES)?;
        let chunk = self.map(body, Some(PAGES))?;
        let start = body - behind - bytes.len();
        let Chunk { memory, used, .. } = &mut self.chunks[chunk];
        *used = memory.len();
        memory[start - before..body].fill(0xA5);
        memory[start..start + bytes.len()].copy_from_slice(bytes);
        Ok(Part { chunk, range: start..start + bytes.len() })
    }

    /// A mapping of zeros, declared; behind it another that is declared on its own.
    fn map(&mut self, bytes: usize, guard: Option<usize>) -> Result<usize, HoldError> {
        let memory = bytes.checked_add(guard.unwrap_or(0)).ok_or_else(|| io::ErrorKind::OutOfMemory.into());
        let memory =
            memory.and_then(MmapMut::map_anon).map_err(|source| HoldError::Memory { bytes, source })?;
        let body = Span { base: memory.as_ptr() as usize, len: bytes };
        let behind = guard.map(|len| Span { base: body.base + bytes, len });
        let mut chunk = Chunk { memory, declared: Vec::new(), used: 0 };
        for span in [body].into_iter().chain(behind) {
            if let Err(error) = self.residency.register(span) {
                forget(&self.residency, chunk);
                return Err(error.into());
            }
            chunk.declared.push(span);
        }
        self.spans.change(|spans| spans.extend_from_slice(&chunk.declared));
        self.chunks.push(chunk);
        Ok(self.chunks.len() - 1)
    }

    /// The copy of a matrix; none where there is no such matrix here.
    pub fn matrix(&self, held: HeldMatrix) -> Option<MatrixRef<'_>> {
        let of = self.matrices.get(held.id as usize).filter(|of| of.layout == held.layout)?;
        let bytes = |part: &Part| &self.chunks[part.chunk].memory[part.range.clone()];
        MatrixRef::new(of.layout, bytes(&of.weights), of.scales.as_ref().map_or(&[], bytes)).ok()
    }

    /// Matrices held.
    pub fn len(&self) -> usize {
        self.matrices.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.matrices.is_empty()
    }

    /// Bytes declared for them.
    pub fn declared(&self) -> u64 {
        self.chunks.iter().flat_map(|chunk| &chunk.declared).map(|span| span.len as u64).sum()
    }
}

/// Removes a chunk from the ledger and frees it. Where it cannot be removed it stays mapped: the device may read it.
fn forget<D: ResidencyDriver>(residency: &Residency<D>, chunk: Chunk) -> bool {
    let removed = chunk.declared.iter().all(|span| residency.unregister(*span).is_ok());
    if !removed {
        std::mem::forget(chunk.memory);
    }
    removed
}

impl<D: ResidencyDriver> Drop for HeldWeights<D> {
    fn drop(&mut self) {
        for chunk in self.chunks.drain(..) {
            let gone = chunk.declared.clone();
            if forget(&self.residency, chunk) {
                self.spans.change(|spans| spans.retain(|span| !gone.contains(span)));
            }
        }
    }
}

/// The bytes of a matrix as a device reaches them: weights, then scales where it has some.
pub fn spans_of(matrix: MatrixRef<'_>) -> impl Iterator<Item = Span> {
    let bytes = [matrix.weights(), matrix.scales()].into_iter().filter(|bytes| !bytes.is_empty());
    bytes.map(|bytes| Span { base: bytes.as_ptr() as usize, len: bytes.len() })
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use metaltail_quant::{Format, OwnedMatrix};

    use super::*;
    use crate::residency::{Ledger, Mode};
    use crate::sim::{Profile, SimDriver};

    fn residency() -> Arc<Residency<SimDriver>> {
        Arc::new(Residency::new(Ledger::new(SimDriver::new(Profile::m5max()), Mode::Set)))
    }

    fn matrix(format: Format, rows: usize, fill: u8) -> OwnedMatrix {
        let layout = MatrixLayout::new(format, rows, 64).unwrap();
        OwnedMatrix::new(layout, vec![fill; layout.weight_bytes()], vec![fill ^ 1; layout.scale_bytes()])
            .unwrap()
    }

    #[test]
    fn matrices_share_chunks_and_are_found_again() {
        let residency = residency();
        let mut weights = HeldWeights::new(Arc::clone(&residency)).with_placement(Placement::Chunks(1 << 16));
        let all: Vec<OwnedMatrix> =
            (0..40).map(|i| matrix([Format::F32, Format::Int8Row][i % 2], 10 + i, i as u8)).collect();
        let held: Vec<HeldMatrix> = all.iter().map(|m| weights.hold(m.as_ref()).unwrap()).collect();
        for (m, held) in all.iter().zip(&held) {
            let found = weights.matrix(*held).unwrap();
            assert_eq!((found.weights(), found.scales()), (m.as_ref().weights(), m.as_ref().scales()));
            for span in spans_of(found) {
                assert!(span.base.is_multiple_of(ALIGN));
                assert!(residency.ledger().find(span).is_some(), "{span} is not declared");
            }
        }
        let stats = residency.stats();
        assert!((2..8).contains(&stats.allocations), "{stats:?}");
        assert_eq!(weights.declared(), stats.allocations as u64 * (1 << 16));
        let other = HeldMatrix { layout: held[1].layout, ..held[0] };
        assert!(
            weights.matrix(other).is_none() && weights.matrix(HeldMatrix { id: 40, ..held[0] }).is_none()
        );
        drop(weights);
        assert_eq!(residency.stats().allocations, 0, "freed memory is declared");
    }

    #[test]
    fn chunks_grow_with_what_is_held_and_little_is_left_over() {
        let residency = residency();
        let mut weights = HeldWeights::new(Arc::clone(&residency));
        let m = matrix(Format::Int8Row, 5000, 3);
        let held = (0..100).map(|_| weights.hold(m.as_ref()).unwrap().layout.bytes() as u64).sum::<u64>();
        let stats = residency.stats();
        assert!(stats.allocations < 20 && stats.bytes < held + held / 3, "{held} of {stats:?}");
        assert!(residency.ledger().difference(&weights.spans().all()).is_empty());
        let spans = weights.spans();
        drop(weights);
        assert!(spans.all().is_empty());
    }

    #[test]
    fn what_was_announced_fits_without_a_rest() {
        let residency = residency();
        let mut weights = HeldWeights::new(Arc::clone(&residency));
        let sizes = [1000, 40_000, 3, 20_000, 500];
        let all: Vec<OwnedMatrix> = sizes.iter().map(|rows| matrix(Format::Int8Row, *rows, 3)).collect();
        let layouts: Vec<MatrixLayout> = all.iter().map(OwnedMatrix::layout).collect();
        weights.announce(&layouts);
        let aligned = |m: &OwnedMatrix| {
            m.layout().weight_bytes().next_multiple_of(ALIGN)
                + m.layout().scale_bytes().next_multiple_of(ALIGN)
        };
        let bytes: usize = all.iter().map(aligned).sum();
        for m in &all {
            weights.hold(m.as_ref()).unwrap();
        }
        let stats = residency.stats();
        assert_eq!((stats.allocations, stats.bytes), (1, bytes.next_multiple_of(PAGES) as u64));
        // What comes unannounced has room made for it.
        weights.hold(matrix(Format::Int8Row, 2000, 4).as_ref()).unwrap();
        assert_eq!(residency.stats().allocations, 2);
    }

    #[test]
    fn a_large_matrix_has_a_mapping_of_its_own() {
        let residency = residency();
        let mut weights = HeldWeights::new(Arc::clone(&residency)).with_placement(Placement::Chunks(1 << 16));
        weights.hold(matrix(Format::F32, 1, 1).as_ref()).unwrap();
        weights.hold(matrix(Format::F32, 300, 2).as_ref()).unwrap();
        weights.hold(matrix(Format::F32, 1, 3).as_ref()).unwrap();
        let spans: Vec<Span> = residency.ledger().spans().collect();
        assert_eq!(spans.len(), 2, "the third lies beside the first: {spans:?}");
        assert_eq!(spans.iter().map(|span| span.len).max(), Some(2 << 16));
    }

    #[test]
    fn what_the_device_does_not_take_is_not_held() {
        let mut profile = Profile::m5max();
        profile.working_set = 1 << 17;
        let ledger = Ledger::new(SimDriver::new(profile), Mode::Set);
        let residency = Arc::new(Residency::new(ledger));
        let mut weights = HeldWeights::new(Arc::clone(&residency));
        let refused = weights.hold(matrix(Format::F32, 1, 1).as_ref()).unwrap_err();
        assert!(matches!(refused, HoldError::Residency(ResidencyError::OverWorkingSet { .. })), "{refused}");
        assert!(weights.is_empty() && residency.stats().allocations == 0);
        let mut weights = weights.with_placement(Placement::Apart { before: 1, behind: 1 });
        let held = weights.hold(matrix(Format::F32, 1, 7).as_ref()).unwrap();
        assert_eq!(weights.matrix(held).unwrap().weights(), [7; 256]);
    }

    #[test]
    fn what_a_submission_may_read_is_not_freed() {
        let residency = Arc::new(
            Residency::new(Ledger::new(SimDriver::new(Profile::m5max()), Mode::Set))
                .with_patience(std::time::Duration::ZERO),
        );
        let mut weights = HeldWeights::new(Arc::clone(&residency));
        weights.hold(matrix(Format::F32, 1, 1).as_ref()).unwrap();
        let submission = residency.submit().unwrap();
        drop(weights);
        assert_eq!(residency.stats().allocations, 1, "it is in flight");
        residency.complete(submission).unwrap();
    }
}
