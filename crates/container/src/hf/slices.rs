//! Experts of a layer stored as one tensor: `experts.gate_up_proj` (experts × 2 · width × hidden, of each expert the
//! gate over what it multiplies) and `experts.down_proj` (experts × hidden × width). A matrix is a slice of one.

use metaltail_quant::Format;

use super::layout;
use crate::error::Error;
use crate::header::Dtype;
use crate::index::{Stored, TensorIndex};
use crate::place::{Extent, MatrixPlace};

/// A matrix of one expert inside a stored tensor.
pub(crate) struct Slice<'a> {
    /// The tensor's stored name.
    pub name: &'a str,
    stored: &'a Stored,
    /// Its number, counted in matrices.
    number: u64,
    /// Matrices an expert.
    each: u64,
}

/// The slice that a canonical name such as `model.layers.3.mlp.experts.5.up_proj.weight` stands for, where the tensor
/// is there and has that expert.
pub(crate) fn find<'a>(index: &'a TensorIndex, canonical: &str) -> Option<Slice<'a>> {
    let (block, rest) = canonical.split_once(".experts.")?;
    let (expert, part) = rest.split_once('.')?;
    let expert: u64 = expert.parse().ok()?;
    let (tensor, each, within) = match part {
        "gate_proj.weight" => ("gate_up_proj", 2, 0),
        "up_proj.weight" => ("gate_up_proj", 2, 1),
        "down_proj.weight" => ("down_proj", 1, 0),
        _ => return None,
    };
    let (name, stored) = index.find(&format!("{block}.experts.{tensor}"))?;
    match *stored.info.shape {
        [experts, _, _] if expert < experts => {
            Some(Slice { name, stored, number: expert.checked_mul(each)? + within, each })
        }
        _ => None,
    }
}

impl Slice<'_> {
    /// A matrix of `rows × cols`.
    ///
    /// # Errors
    /// Another shape, and another type than f32, f16 or bf16.
    pub(crate) fn locate(
        &self,
        index: &TensorIndex,
        (rows, cols): (usize, usize),
    ) -> Result<MatrixPlace, Error> {
        let got = &self.stored.info.shape;
        let experts = got.first().copied().unwrap_or(0);
        let wanted = [Some(experts), (rows as u64).checked_mul(self.each), Some(cols as u64)];
        if !got.iter().map(|dim| Some(*dim)).eq(wanted) {
            return Err(Error::Shape {
                file: index.path(self.stored),
                tensor: self.name.to_owned(),
                wanted: wanted.into_iter().flatten().collect(),
                got: got.to_vec(),
            });
        }
        let format = match self.stored.info.dtype {
            Dtype::F32 => Format::F32,
            Dtype::F16 => Format::F16,
            Dtype::Bf16 => Format::Bf16,
            got => {
                return Err(Error::Dtype {
                    file: index.path(self.stored),
                    tensor: self.name.to_owned(),
                    wanted: "F32, F16 or BF16 where the experts of a layer are one tensor",
                    got,
                });
            }
        };
        let layout = layout(self.name, format, rows, cols)?;
        let whole = self.stored.extent();
        let len = layout.weight_bytes() as u64;
        // The number lies below that of the matrices that fill the tensor, so nothing overflows.
        let weights = Extent { offset: whole.offset + len * self.number, len, ..whole };
        Ok(MatrixPlace { layout, weights, scales: None })
    }
}
