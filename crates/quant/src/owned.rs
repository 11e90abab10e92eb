//! A matrix that owns its bytes.

use crate::{LayoutError, MatrixLayout, MatrixRef};

/// A layout with exactly the bytes it needs.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnedMatrix {
    layout: MatrixLayout,
    weights: Vec<u8>,
    scales: Vec<u8>,
}

impl OwnedMatrix {
    /// Joins a layout with its bytes.
    ///
    /// # Errors
    /// Refuses any other number of bytes than the layout's.
    pub fn new(layout: MatrixLayout, weights: Vec<u8>, scales: Vec<u8>) -> Result<Self, LayoutError> {
        MatrixRef::new(layout, &weights, &scales)?;
        Ok(OwnedMatrix { layout, weights, scales })
    }

    /// Format and shape.
    pub fn layout(&self) -> MatrixLayout {
        self.layout
    }

    /// All weight bytes, row-major.
    pub fn weights(&self) -> &[u8] {
        &self.weights
    }

    /// All scale bytes (little-endian `f32`); empty for formats without scales.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// A view of the matrix.
    pub fn as_ref(&self) -> MatrixRef<'_> {
        MatrixRef::of_owned(self.layout, &self.weights, &self.scales)
    }
}
