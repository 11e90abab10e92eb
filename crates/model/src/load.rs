//! Dense tensors from a checkpoint into memory.

use std::collections::HashMap;

use metaltail_container::{Checkpoint, Inventory, Role, TensorSpec};
use metaltail_quant::{Format, MatrixLayout, OwnedMatrix};

use crate::error::ModelError;
use crate::plan::NormWeights;

/// Reads tensors by canonical name; shapes come from the inventory.
pub(crate) struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    specs: HashMap<&'a str, &'a TensorSpec>,
    norms: NormWeights,
    progress: &'a dyn Fn(u64),
}

impl<'a> Loader<'a> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        inventory: &'a Inventory,
        norms: NormWeights,
        progress: &'a dyn Fn(u64),
    ) -> Self {
        let specs = inventory.tensors.iter().map(|spec| (spec.name.as_str(), spec)).collect();
        Loader { checkpoint, specs, norms, progress }
    }

    fn spec(&self, name: &str) -> Result<&'a TensorSpec, ModelError> {
        self.specs.get(name).copied().ok_or_else(|| {
            // A name that the plan's parts ask for but its inventory lacks.
            crate::config::ConfigError::Inconsistent(format!("the plan has no tensor {name}")).into()
        })
    }

    /// A matrix in its stored format.
    pub(crate) fn matrix(&self, name: &str) -> Result<OwnedMatrix, ModelError> {
        let matrix = self.checkpoint.read_matrix(self.spec(name)?)?;
        (self.progress)(matrix.layout().bytes() as u64);
        Ok(matrix)
    }

    /// Layouts of all matrices that a model computes with, as they are held; `tied` for one whose embedding is its head.
    pub(crate) fn matrices(&self, tied: bool) -> Result<Vec<MatrixLayout>, ModelError> {
        let mut layouts = Vec::new();
        for spec in self.specs.values().filter(|spec| !spec.optional) {
            match spec.role {
                Role::Norm | Role::Bias | Role::RouterBias | Role::Convolution => {}
                Role::Embedding if !tied => {}
                role if role.keeps_f32() => {
                    layouts.push(MatrixLayout::new(Format::F32, spec.rows, spec.cols)?)
                }
                _ => layouts.push(self.checkpoint.matrix(spec)?.layout),
            }
        }
        Ok(layouts)
    }

    /// A matrix that is computed in f32 whatever its stored format (routers).
    pub(crate) fn matrix_f32(&self, name: &str, rows: usize) -> Result<OwnedMatrix, ModelError> {
        let values = self.floats(name)?;
        let layout = MatrixLayout::new(Format::F32, rows, values.len() / rows.max(1))?;
        let weights = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Ok(OwnedMatrix::new(layout, weights, Vec::new())?)
    }

    /// The factors of a norm of the residual stream, of queries or of keys, as the plan says that they are stored.
    pub(crate) fn norm(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let mut weights = self.floats(name)?;
        if self.norms == NormWeights::OnePlus {
            weights.iter_mut().for_each(|weight| *weight += 1.0);
        }
        Ok(weights)
    }

    /// A vector, or a matrix that is always computed in f32, widened.
    pub(crate) fn floats(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let values = self.checkpoint.read_f32(self.spec(name)?)?;
        (self.progress)(values.len() as u64 * 4);
        Ok(values)
    }
}
