//! Sizes, checked once for every device.

use metaltail_kernels::ComputeError;
use metaltail_quant::MatrixRef;
use thiserror::Error;

use super::{Combination, ExpertPass, Norm, Rope, Router, Strided};

/// Why a kernel did not run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A slice has another length than the operation needs.
    #[error("{what}: wanted {wanted}, got {got}")]
    Size {
        /// What was measured.
        what: &'static str,
        /// What fits.
        wanted: String,
        /// What it is.
        got: usize,
    },
    /// A number that the device's tables do not hold.
    #[error("{what} of {value} are too many for this device: at most {most}")]
    TooLarge {
        /// What was counted.
        what: &'static str,
        /// How many.
        value: usize,
        /// What fits.
        most: usize,
    },
    /// The device said no.
    #[error("the {device} device failed: {message}")]
    Device {
        /// Its name.
        device: &'static str,
        /// What it said.
        message: String,
    },
    /// An accelerator said no.
    #[error(transparent)]
    Accelerator(#[from] ComputeError),
}

pub(super) fn size<T>(what: &'static str, wanted: impl ToString, got: usize) -> Result<T, KernelError> {
    Err(KernelError::Size { what, wanted: wanted.to_string(), got })
}

/// Rows of `width` in `len` numbers.
pub(super) fn rows(what: &'static str, len: usize, width: usize) -> Result<usize, KernelError> {
    if width == 0 || !len.is_multiple_of(width) {
        return size(what, format!("whole rows of {width}"), len);
    }
    Ok(len / width)
}

/// `wanted` numbers or more.
pub(super) fn at_least(what: &'static str, wanted: Option<usize>, got: usize) -> Result<(), KernelError> {
    match wanted {
        Some(wanted) if wanted <= got => Ok(()),
        Some(wanted) => size(what, format!("at least {wanted}"), got),
        None => Err(KernelError::TooLarge { what, value: usize::MAX, most: usize::MAX }),
    }
}

/// What the sizes of an operation come to. Every device begins with one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Rows of the input.
    pub rows: usize,
    /// Numbers of the result.
    pub result: usize,
}

impl Sizes {
    /// Of [`super::KernelDevice::matmul`] and [`super::KernelDevice::gemm`].
    ///
    /// # Errors
    /// Sizes that do not fit together; so in all of these.
    pub fn matmul(m: MatrixRef<'_>, x: &[f32], out: &[f32]) -> Result<Sizes, KernelError> {
        let rows = rows("inputs of a product", x.len(), m.layout().cols())?;
        let result = rows.checked_mul(m.layout().rows());
        at_least("the output of a product", result, out.len())?;
        Ok(Sizes { rows, result: result.unwrap_or(0) })
    }

    /// Of [`super::KernelDevice::swiglu`].
    ///
    /// # Errors
    /// As above.
    pub fn swiglu(gate: &[f32], up: &[f32], out: &[f32]) -> Result<Sizes, KernelError> {
        if gate.len() != up.len() {
            return size("numbers to multiply by gates", gate.len(), up.len());
        }
        at_least("the output of gates", Some(gate.len()), out.len())?;
        Ok(Sizes { rows: 1, result: gate.len() })
    }

    /// Of [`super::KernelDevice::experts`]; `result` reaches to the last row that a pair names.
    ///
    /// # Errors
    /// As above.
    pub fn experts(pass: &ExpertPass<'_>, out: &[f32]) -> Result<Sizes, KernelError> {
        let rows = rows("activations", pass.x.len(), pass.hidden)?;
        let mut outputs = Vec::new();
        for task in pass.tasks {
            let (gate, up, down) =
                (task.weights.gate.layout(), task.weights.up.layout(), task.weights.down.layout());
            let shape = |what, wanted: usize, got: usize| {
                if wanted == got { Ok(()) } else { size(what, wanted, got) }
            };
            shape("columns of a gate projection", pass.hidden, gate.cols())?;
            shape("rows of an up projection", gate.rows(), up.rows())?;
            shape("columns of an up projection", pass.hidden, up.cols())?;
            shape("rows of a down projection", pass.hidden, down.rows())?;
            shape("columns of a down projection", gate.rows(), down.cols())?;
            for &(input, output) in task.pairs {
                if input as usize >= rows {
                    return size("the input row of a pair", format!("less than {rows}"), input as usize);
                }
                outputs.push(output as usize);
            }
        }
        outputs.sort_unstable();
        if let Some(twice) = outputs.windows(2).find(|pair| pair[0] == pair[1]) {
            return size("output rows of a pass", "a pair each", twice[0]);
        }
        let result = outputs.last().map_or(Some(0), |last| (last + 1).checked_mul(pass.hidden));
        at_least("the output of experts", result, out.len())?;
        Ok(Sizes { rows, result: result.unwrap_or(0) })
    }

    /// Of [`super::KernelDevice::copy`]; `result` reaches to the end of the last row.
    ///
    /// # Errors
    /// As above.
    pub fn copy(strided: &Strided, from: &[f32], to: &[f32]) -> Result<Sizes, KernelError> {
        let Strided { rows, width, .. } = *strided;
        if width == 0 {
            return size("width of a row", "above 0", width);
        }
        let reach = |what, stride: usize, len| {
            if rows > 1 && stride < width {
                return size("the stride of rows", format!("at least {width}"), stride);
            }
            let before = rows.saturating_sub(1).checked_mul(stride);
            let end = if rows == 0 { Some(0) } else { before.and_then(|before| before.checked_add(width)) };
            at_least(what, end, len).map(|()| end.unwrap_or(0))
        };
        reach("rows to read", strided.from, from.len())?;
        Ok(Sizes { rows, result: reach("rows to write", strided.to, to.len())? })
    }

    /// Of [`super::KernelDevice::rms_norm`], and with biases of [`super::KernelDevice::layer_norm`].
    ///
    /// # Errors
    /// As above.
    pub fn norm(norm: &Norm<'_>, bias: Option<&[f32]>, x: &[f32], out: &[f32]) -> Result<Sizes, KernelError> {
        let width = norm.strided.width;
        for numbers in [Some(norm.weight), bias].into_iter().flatten() {
            if numbers.len() != width {
                return size("weights of a norm", width, numbers.len());
            }
        }
        Sizes::copy(&norm.strided, x, out)
    }

    /// Of [`super::KernelDevice::add`].
    ///
    /// # Errors
    /// As above.
    pub fn add(from: &[f32], to: &[f32]) -> Result<Sizes, KernelError> {
        at_least("what is added to", Some(from.len()), to.len())?;
        Ok(Sizes { rows: 1, result: from.len() })
    }

    /// Of [`super::KernelDevice::combine`].
    ///
    /// # Errors
    /// As above.
    pub fn combine(combination: &Combination<'_>, x: &[f32]) -> Result<Sizes, KernelError> {
        let Combination { weights, top_k, products, shared, width } = *combination;
        let rows = rows("weights of experts", weights.len(), top_k)?;
        if width == 0 {
            return size("width of a row", "above 0", width);
        }
        at_least("products of experts", weights.len().checked_mul(width), products.len())?;
        let result = rows.checked_mul(width);
        if let Some(shared) = shared {
            at_least("products of shared experts", result, shared.len())?;
        }
        at_least("the residual stream", result, x.len())?;
        Ok(Sizes { rows, result: result.unwrap_or(0) })
    }

    /// Of [`super::KernelDevice::rope`]: the rows are those that there are angles for.
    ///
    /// # Errors
    /// As above.
    pub fn rope(rope: &Rope<'_>, x: &[f32]) -> Result<Sizes, KernelError> {
        if rope.dim == 0 || !rope.dim.is_multiple_of(2) {
            return size("width of a rotation", "an even number above 0", rope.dim);
        }
        let rows = rows("cosines", rope.cosines.len(), rope.dim / 2)?;
        if rope.sines.len() != rope.cosines.len() {
            return size("sines", rope.cosines.len(), rope.sines.len());
        }
        at_least("a head", rope.offset.checked_add(rope.dim), rope.head)?;
        let result = rows.checked_mul(rope.heads).and_then(|heads| heads.checked_mul(rope.head));
        at_least("heads to rotate", result, x.len())?;
        Ok(Sizes { rows, result: result.unwrap_or(0) })
    }

    /// Of [`super::KernelDevice::route`]; `result` counts chosen experts.
    ///
    /// # Errors
    /// As above.
    pub fn route(router: &Router<'_>, logits: &[f32]) -> Result<Sizes, KernelError> {
        let rows = rows("logits", logits.len(), router.experts)?;
        if router.top_k > router.experts {
            return size("experts to choose", format!("at most {}", router.experts), router.top_k);
        }
        if let Some(bias) = router.bias
            && bias.len() != router.experts
        {
            return size("biases", router.experts, bias.len());
        }
        if let Some((groups, kept)) = router.groups {
            if groups == 0 || !router.experts.is_multiple_of(groups) {
                return size("groups of experts", format!("a divisor of {}", router.experts), groups);
            }
            if kept == 0 || kept > groups {
                return size("groups that are kept", format!("1 to {groups}"), kept);
            }
        }
        match rows.checked_mul(router.top_k) {
            Some(result) => Ok(Sizes { rows, result }),
            None => Err(KernelError::TooLarge { what: "choices", value: usize::MAX, most: usize::MAX }),
        }
    }
}
