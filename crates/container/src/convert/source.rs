//! A checkpoint as the source of a slab container's bytes.

use metaltail_quant::{MatrixLayout, MatrixRef};
use xxhash_rust::xxh3::Xxh3;

use super::transcode::transcode;
use crate::slab_writer::{Blobs, RunShape, Weights, WriteError};
use crate::{Checkpoint, ExpertLayerSpec, Extent, Part, Repack, RepackError, RunOffset, TensorSpec};

/// Reads from a checkpoint and stores in the planned formats.
pub(super) struct CheckpointWeights<'c> {
    pub checkpoint: &'c Checkpoint,
    /// Threads for one dense matrix; experts are spread by the caller.
    pub threads: usize,
}

impl CheckpointWeights<'_> {
    fn damaged(&self, layer: u32, expert: u32, run: Option<&Extent>, sums: (u64, u64)) -> WriteError {
        let file = run.and_then(|run| self.checkpoint.files().get(run.file as usize));
        let (file, offset) = (file.cloned().unwrap_or_default(), run.map_or(0, |run| run.offset));
        WriteError::Damaged { layer, expert, file, offset, wanted: sums.0, got: sums.1 }
    }
}

impl Weights for CheckpointWeights<'_> {
    fn dense(&self, spec: &TensorSpec, layout: MatrixLayout) -> Result<Blobs, WriteError> {
        let stored = self.checkpoint.read_matrix(spec)?;
        let mut weights = vec![0; layout.weight_bytes()];
        let mut scales = vec![0; layout.scale_bytes()];
        transcode(&spec.name, stored.as_ref(), layout.format(), &mut weights, &mut scales, self.threads)?;
        Ok(Blobs { weights, scales })
    }

    fn expert(
        &self,
        spec: &ExpertLayerSpec,
        expert: u32,
        shape: &RunShape,
        run: &mut [u8],
    ) -> Result<(), WriteError> {
        let place = self.checkpoint.expert(spec, expert)?;
        let runs = place
            .runs
            .iter()
            .map(|&extent| self.checkpoint.read_extent(extent))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(wanted) = place.checksum {
            let mut hash = Xxh3::new();
            runs.iter().for_each(|bytes| hash.update(bytes));
            let got = hash.digest();
            if got != wanted {
                return Err(self.damaged(spec.layer, expert, place.runs.first(), (wanted, got)));
            }
        }
        let runs = match &place.repack {
            None => runs,
            Some(repack) => vec![repacked(repack, &runs, &spec.name(expert, Part::Gate))?],
        };
        for part in Part::ALL {
            let tensor = spec.name(expert, part);
            let stored = &place.parts[part as usize];
            let blob = |at: RunOffset, len: usize| {
                let bytes = runs[at.run as usize].get(at.offset as usize..).unwrap_or_default();
                bytes.get(..len).unwrap_or(bytes)
            };
            let weights = blob(stored.weights, stored.layout.weight_bytes());
            let scales = stored.scales.map_or(&[][..], |at| blob(at, stored.layout.scale_bytes()));
            let source =
                MatrixRef::new(stored.layout, weights, scales).map_err(WriteError::layout(&tensor))?;
            let (weights, scales) = shape.part_mut(run, part);
            transcode(&tensor, source, shape.layouts[part as usize].format(), weights, scales, 1)?;
        }
        Ok(())
    }
}

/// Gate, up and down of an expert in one run, made of what was read.
fn repacked(repack: &Repack, runs: &[Vec<u8>], tensor: &str) -> Result<Vec<u8>, WriteError> {
    let refuse = |source| crate::Error::Repack { tensor: tensor.to_owned(), source };
    let mut out = vec![0; usize::try_from(repack.bytes()).map_err(|_| refuse(RepackError::Overflow))?];
    let runs: Vec<&[u8]> = runs.iter().map(Vec::as_slice).collect();
    repack.apply(&runs, &mut out).map_err(refuse)?;
    Ok(out)
}
