//! Number formats: block layouts, packing and exact reference arithmetic.
//!
//! A matrix is `rows × cols`, row-major, where a row is one output and a column one input.
//! [`MatrixLayout`] says how many bytes such a matrix takes in a [`Format`];
//! [`MatrixRef`] is a checked view of those bytes. Pure: no I/O, no threads, no `unsafe`.
//! Byte layouts and rounding rules: `docs/design/formats.md`.
#![forbid(unsafe_code)]

mod activation;
mod dequantize;
mod format;
mod fp8;
mod gguf;
mod layout;
mod owned;
mod quantize;

pub use activation::{ACTIVATION_BLOCK, QuantizedRowMut, QuantizedRows};
pub use dequantize::{dequantize, dequantize_row, stored_row};
pub use format::{Format, GROUP_SIZES, ParseFormatError};
pub use fp8::{FP8_MAX, FP8_TABLE, fp8_encode};
pub use gguf::{E8M0_HALF, GGUF_UNIT, GgufFormat, GgufUnit, IQ4_VALUES, MXFP4_VALUES};
pub use layout::{LayoutError, MatrixLayout, MatrixRef};
pub use owned::OwnedMatrix;
pub use quantize::{QuantizeError, quantize};
