//! Number formats: block layouts, packing and exact reference arithmetic.
//!
//! A matrix is `rows × cols`, row-major, where a row is one output and a column one input.
//! [`MatrixLayout`] says how many bytes such a matrix takes in a [`Format`];
//! [`MatrixRef`] is a checked view of those bytes. Pure: no I/O, no threads, no `unsafe`.
#![forbid(unsafe_code)]

mod format;
mod layout;

pub use format::{Format, ParseFormatError};
pub use layout::{LayoutError, MatrixLayout, MatrixRef};
