//! The kernels that every accelerator has, as operations on host memory.
//!
//! This is the form in which kernels are tested: one suite (`tests/kernels`) runs on every [`KernelDevice`], so that
//! a kernel which exists on two devices is held to the same numbers. [`Reference`] is the oracle; [`HostKernels`] makes
//! a device of any accelerator, which is what an engine uses, with its activations on the device.

mod attention;
mod check;
mod host;
mod reference;
mod self_check;

pub use attention::{Indexer, LatentAttention, Positions};
pub use check::{KernelError, Sizes};
pub use host::HostKernels;
pub use reference::Reference;
pub use self_check::self_check;

use metaltail_kernels::ExpertTask;
use metaltail_quant::MatrixRef;

/// Operations of a device. Outputs may be longer than the result: what lies behind it is left as it is.
pub trait KernelDevice {
    /// Name for messages.
    fn name(&self) -> &str;

    /// `out[i · rows + r] = Σ_c m[r][c] · x[i · cols + c]` for every whole input i in `x`.
    ///
    /// # Errors
    /// Sizes that do not fit together, or a failure of the device.
    fn matmul(&mut self, m: MatrixRef<'_>, x: &[f32], out: &mut [f32]) -> Result<(), KernelError>;

    /// [`KernelDevice::matmul`] for many inputs, as in prefill. A device may add in another order here: then the bits
    /// differ from those of `matmul`, and the two are two classes of numerics.
    ///
    /// # Errors
    /// As [`KernelDevice::matmul`].
    fn gemm(&mut self, m: MatrixRef<'_>, x: &[f32], out: &mut [f32]) -> Result<(), KernelError>;

    /// `out[i] = silu(gate[i]) · up[i]`.
    ///
    /// # Errors
    /// As [`KernelDevice::matmul`].
    fn swiglu(&mut self, gate: &[f32], up: &[f32], out: &mut [f32]) -> Result<(), KernelError>;

    /// Output row o of `out` (`hidden` wide) is down(silu(gate x) · up x) of the pair that names it. Rows that no pair
    /// names are left as they are.
    ///
    /// # Errors
    /// As [`KernelDevice::matmul`].
    fn experts(&mut self, pass: &ExpertPass<'_>, out: &mut [f32]) -> Result<(), KernelError>;

    /// x / √(mean(x²) + eps) · weight for every row.
    ///
    /// # Errors
    /// As [`KernelDevice::matmul`].
    fn rms_norm(&mut self, norm: &Norm<'_>, x: &[f32], out: &mut [f32]) -> Result<(), KernelError>;

    /// (x − mean) / √(variance + eps) · weight + bias for every row.
    ///
    /// # Errors
    /// As [`KernelDevice::matmul`].
    fn layer_norm(
        &mut self,
        norm: &Norm<'_>,
        bias: &[f32],
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError>;

    /// Copies rows. What lies between them in `to` is left as it is.
    ///
    /// # Errors
    /// As [`KernelDevice::matmul`].
    fn copy(&mut self, strided: &Strided, from: &[f32], to: &mut [f32]) -> Result<(), KernelError>;

    /// `to[i] += from[i]` for every number of `from`.
    ///
    /// # Errors
    /// As [`KernelDevice::matmul`].
    fn add(&mut self, from: &[f32], to: &mut [f32]) -> Result<(), KernelError>;

    /// `x[r] += (Σ_k weights[r][k] · products[r · top_k + k]) + shared[r]`: fused terms, k ascending, the sum begun at
    /// zero. Of a weight of zero the product is not read.
    ///
    /// # Errors
    /// As [`KernelDevice::matmul`].
    fn combine(&mut self, combination: &Combination<'_>, x: &mut [f32]) -> Result<(), KernelError>;

    /// Rotates a part of every head of `x`, in place.
    ///
    /// # Errors
    /// As [`KernelDevice::matmul`].
    fn rope(&mut self, rope: &Rope<'_>, x: &mut [f32]) -> Result<(), KernelError>;

    /// Chooses experts for every whole row of logits.
    ///
    /// # Errors
    /// As [`KernelDevice::matmul`].
    fn route(&mut self, router: &Router<'_>, logits: &[f32]) -> Result<Routes, KernelError>;

    /// Attention of every row of `attention`: `queries` are rows × heads × (nope + rope), rotated; `out` is rows × heads
    /// × value. A row that attends to nothing gives zeros. A row's result does not depend on other rows.
    ///
    /// # Errors
    /// As [`KernelDevice::matmul`].
    fn attend(
        &mut self,
        attention: &LatentAttention<'_>,
        queries: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError>;

    /// Chooses the positions worth attending to: of every row the `top_k` of highest score, ascending, all where they
    /// are no more. `queries` are rows × heads × dim, rotated; `weights` rows × heads.
    ///
    /// # Errors
    /// As [`KernelDevice::matmul`].
    fn select(
        &mut self,
        indexer: &Indexer<'_>,
        queries: &[f32],
        weights: &[f32],
    ) -> Result<Vec<Vec<u32>>, KernelError>;
}

/// Rows that begin every so many numbers, in memory that is read and in memory that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided {
    /// Rows.
    pub rows: usize,
    /// Numbers of a row, above 0.
    pub width: usize,
    /// From the beginning of a row to that of the next, where they are read.
    pub from: usize,
    /// The same where they are written.
    pub to: usize,
}

impl Strided {
    /// Rows one behind the other.
    pub fn dense(rows: usize, width: usize) -> Strided {
        Strided { rows, width, from: width, to: width }
    }
}

/// A norm of rows.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// The rows, as wide as `weight`.
    pub strided: Strided,
    /// A weight for each number of a row.
    pub weight: &'a [f32],
    /// Added below the root.
    pub eps: f32,
}

/// A layer's experts for the residual stream.
#[derive(Clone, Copy, Debug)]
pub struct Combination<'a> {
    /// Rows × top_k.
    pub weights: &'a [f32],
    /// Experts of a row, above 0.
    pub top_k: usize,
    /// Rows × top_k × width.
    pub products: &'a [f32],
    /// Rows × width.
    pub shared: Option<&'a [f32]>,
    /// Width of a row, above 0.
    pub width: usize,
}

/// The experts of one layer of one step.
#[derive(Clone, Copy, Debug)]
pub struct ExpertPass<'a> {
    /// Activations, rows of `hidden`.
    pub x: &'a [f32],
    /// Width of a row.
    pub hidden: usize,
    /// Experts, each with the rows that chose it. No two pairs share an output row.
    pub tasks: &'a [ExpertTask<'a>],
}

/// A rotation of heads that lie one after another, row by row.
#[derive(Clone, Copy, Debug)]
pub struct Rope<'a> {
    /// Heads of a row.
    pub heads: usize,
    /// Floats of a head.
    pub head: usize,
    /// Where in a head the rotated part begins.
    pub offset: usize,
    /// Cosine of every pair, `dim / 2` a row; `dim` floats of a head are rotated.
    pub cosines: &'a [f32],
    /// Sine of every pair.
    pub sines: &'a [f32],
    /// Width of the rotated part, even.
    pub dim: usize,
    /// Whether a pair lies side by side (2j, 2j + 1) and not in two halves. Results are written as halves.
    pub interleaved: bool,
}

/// How experts are chosen; the rules are those of `model`'s router.
#[derive(Clone, Copy, Debug)]
pub struct Router<'a> {
    /// Experts of the layer.
    pub experts: usize,
    /// Experts of a row, at most `experts`.
    pub top_k: usize,
    /// Softmax over all experts, or else the sigmoid of each logit.
    pub softmax: bool,
    /// Added to the score for the choice, not for the weight; finite, one an expert.
    pub bias: Option<&'a [f32]>,
    /// `(groups, groups kept)`: only experts of the groups with the greatest sums of two are chosen.
    pub groups: Option<(usize, usize)>,
    /// Whether the weights of a row are divided by their sum.
    pub normalise: bool,
    /// Factor on the weights.
    pub scale: f32,
}

/// The id that stands where fewer than `top_k` experts were allowed; its weight is zero.
pub const NO_EXPERT: u32 = u32::MAX;

/// Chosen experts, `top_k` a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Routes {
    /// Ids, ascending in each row.
    pub ids: Vec<u32>,
    /// The weight of each.
    pub weights: Vec<f32>,
    /// Of each row whether one of its logits was not finite.
    pub broken: Vec<bool>,
}
