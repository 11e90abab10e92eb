//! A resident matrix and its product with rows of activations.

use metaltail_kernels::{Kernels, Pool};
use metaltail_quant::{MatrixRef, OwnedMatrix};

use crate::error::ModelError;
use crate::load::Loader;

/// A dense matrix that stays in memory.
pub(crate) struct Linear {
    matrix: OwnedMatrix,
}

impl Linear {
    /// Loads a matrix in its stored format.
    pub(crate) fn load(name: &str, loader: &Loader<'_>) -> Result<Self, ModelError> {
        Ok(Linear { matrix: loader.matrix(name)? })
    }

    /// Loads a matrix that is computed in f32 whatever its stored format (routers).
    pub(crate) fn load_f32(name: &str, rows: usize, loader: &Loader<'_>) -> Result<Self, ModelError> {
        Ok(Linear { matrix: loader.matrix_f32(name, rows)? })
    }

    pub(crate) fn view(&self) -> MatrixRef<'_> {
        self.matrix.as_ref()
    }

    pub(crate) fn rows(&self) -> usize {
        self.matrix.layout().rows()
    }

    /// `n` rows of activations times this matrix: `n × rows`.
    pub(crate) fn forward(&self, kernels: Kernels, pool: &Pool, x: &[f32], n: usize) -> Vec<f32> {
        let rows = self.rows();
        let mut out = vec![0.0; n * rows];
        kernels.matmul(pool, self.view(), 0..rows, x, n, &mut out, rows);
        out
    }
}
