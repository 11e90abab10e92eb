//! What only one kind of model has: its tensors by name, and where their bytes lie.

use std::path::{Path, PathBuf};

use crate::colibri::{self, Stamps};
use crate::error::Error;
use crate::gguf::GgufTensors;
use crate::header::Header;
use crate::hf::{self, slices};
use crate::index::TensorIndex;
use crate::inventory::{ExpertLayerSpec, Part};
use crate::place::{ExpertPlace, Extent, MatrixPlace, PartPlace, RunOffset};
use crate::slab::{self, Manifest, Slab};
use crate::stacked::Stack;

/// The tensors of a model, by the kind of its files.
#[derive(Debug)]
pub(crate) enum Detail {
    Hf(TensorIndex),
    Colibri(TensorIndex, Stamps),
    Slab(TensorIndex, Box<Slab>),
    Gguf(Box<GgufTensors>),
}

impl Detail {
    /// Joins the headers of safetensors files and finds out what their directory is.
    pub(crate) fn of_safetensors(
        dir: &Path,
        (files, headers, lens): (&[PathBuf], &[Header], &[u64]),
        manifest: Option<Manifest>,
    ) -> Result<Detail, Error> {
        let padded = manifest.is_some();
        let keep = |name: &str| !(padded && name.starts_with(slab::PAD_PREFIX));
        let index = TensorIndex::new(dir, files, headers, keep)?;
        Ok(match manifest {
            Some(manifest) => {
                let slab = Slab::new(manifest, files, headers, lens)?;
                slab.check_dense(&index)?;
                Detail::Slab(index, Box::new(slab))
            }
            None if colibri::is_colibri(&index) => {
                let stamps = Stamps::new(files, headers)?;
                Detail::Colibri(index, stamps)
            }
            None => Detail::Hf(index),
        })
    }

    /// The tensors of safetensors files by name.
    fn index(&self) -> Option<&TensorIndex> {
        match self {
            Detail::Hf(index) | Detail::Colibri(index, _) | Detail::Slab(index, _) => Some(index),
            Detail::Gguf(_) => None,
        }
    }

    /// Number of stored tensors.
    pub(crate) fn len(&self) -> usize {
        match self {
            Detail::Gguf(tensors) => tensors.len(),
            Detail::Hf(index) | Detail::Colibri(index, _) | Detail::Slab(index, _) => index.len(),
        }
    }

    /// Stored names, in no order.
    pub(crate) fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        match self {
            Detail::Gguf(tensors) => Box::new(tensors.names()),
            Detail::Hf(index) | Detail::Colibri(index, _) | Detail::Slab(index, _) => {
                Box::new(index.iter().map(|(name, _)| name))
            }
        }
    }

    /// What stands in place of `model.` in the stored names.
    pub(crate) fn prefix(&self) -> &str {
        self.index().map_or("", TensorIndex::prefix)
    }

    /// The stored name of a canonical one, where it is there.
    pub(crate) fn stored_name(&self, canonical: &str) -> Option<&str> {
        match self {
            Detail::Gguf(tensors) => tensors.stored_name(canonical),
            Detail::Hf(index) => {
                let whole = index.find(canonical).map(|(name, _)| name);
                whole.or_else(|| slices::find(index, canonical).map(|slice| slice.name))
            }
            Detail::Colibri(index, _) | Detail::Slab(index, _) => index.find(canonical).map(|(name, _)| name),
        }
    }

    /// Where a matrix lies and in which format; `notice` hears what was decided for lack of a stamp.
    pub(crate) fn locate(
        &self,
        canonical: &str,
        shape: (usize, usize),
        notice: &dyn Fn(String),
    ) -> Result<MatrixPlace, Error> {
        match self {
            Detail::Gguf(tensors) => tensors.locate(canonical, shape),
            Detail::Hf(index) => {
                let slice = match index.find(canonical) {
                    None => slices::find(index, canonical),
                    Some(_) => None,
                };
                if let Some(slice) = slice {
                    return slice.locate(index, shape);
                }
                let (name, stored) = index.require(canonical)?;
                hf::locate(index, name, stored, shape.0, shape.1)
            }
            Detail::Slab(index, slab) => {
                let (name, stored) = index.require(canonical)?;
                slab.locate(index, name, stored, shape)
            }
            Detail::Colibri(index, stamps) => {
                let (name, stored) = index.require(canonical)?;
                colibri::locate(index, stamps, name, stored, shape, notice)
            }
        }
    }

    /// The tensors that all experts of a layer share, where they do.
    pub(crate) fn stack<'l>(&self, layer: &'l ExpertLayerSpec) -> Option<Stack<'l>> {
        match self {
            Detail::Hf(index) => Stack::of(index, layer),
            Detail::Colibri(..) | Detail::Slab(..) | Detail::Gguf(_) => None,
        }
    }

    /// The runs of one expert, whose matrices were located.
    pub(crate) fn expert(
        &self,
        layer: &ExpertLayerSpec,
        expert: u32,
        notice: &dyn Fn(String),
    ) -> Result<ExpertPlace, Error> {
        if let (Detail::Hf(index), Some(stack)) = (self, self.stack(layer)) {
            return stack.expert(index, expert);
        }
        let part = |part: Part| self.locate(&layer.name(expert, part), layer.shape(part), notice);
        let parts = [part(Part::Gate)?, part(Part::Up)?, part(Part::Down)?];
        match self {
            Detail::Slab(index, slab) => slab.expert(index, layer, expert, parts),
            _ => Ok(join_runs(parts)),
        }
    }
}

/// Joins adjacent byte ranges of one expert, so that each run is one read.
fn join_runs(parts: [MatrixPlace; 3]) -> ExpertPlace {
    let mut extents: Vec<Extent> = parts.iter().flat_map(|p| [Some(p.weights), p.scales]).flatten().collect();
    extents.sort_unstable_by_key(|e| (e.file, e.offset));
    let mut runs: Vec<Extent> = Vec::with_capacity(3);
    for extent in extents {
        match runs.last_mut() {
            // Extents lie inside their file, so no end overflows.
            Some(run) if run.file == extent.file && run.offset + run.len == extent.offset => {
                run.len += extent.len;
            }
            _ => runs.push(extent),
        }
    }
    let within = |extent: Extent| {
        // The last run that begins at or before the extent is the one that swallowed it.
        let after = runs.partition_point(|run| (run.file, run.offset) <= (extent.file, extent.offset));
        let run = after.saturating_sub(1);
        RunOffset { run: run as u32, offset: extent.offset - runs[run].offset }
    };
    let parts = parts.map(|place| PartPlace {
        layout: place.layout,
        weights: within(place.weights),
        scales: place.scales.map(within),
    });
    ExpertPlace { runs, parts, checksum: None, repack: None }
}
