//! Experts of an engine on any [`KernelDevice`].

use metaltail_kernels::{Completion, ComputeError, ExpertCompute, ExpertTask};

use super::{ExpertPass, KernelDevice, KernelError};

/// [`ExpertCompute`] by a device's kernels on host memory: activations go there with each submit and results come
/// back. A check of kernels in their place, not a fast way.
pub struct KernelExperts<D> {
    device: D,
    x: Vec<f32>,
    hidden: usize,
    out: Vec<f32>,
}

impl<D: KernelDevice + Send> KernelExperts<D> {
    /// Experts on `device`.
    pub fn new(device: D) -> KernelExperts<D> {
        KernelExperts { device, x: Vec::new(), hidden: 1, out: Vec::new() }
    }
}

fn failed(error: KernelError) -> ComputeError {
    ComputeError::Device { device: "kernels", message: error.to_string() }
}

impl<D: KernelDevice + Send> ExpertCompute for KernelExperts<D> {
    fn name(&self) -> &'static str {
        "kernels"
    }

    fn begin(&mut self, x: &[f32], hidden: usize, outputs: usize) -> Result<(), ComputeError> {
        if hidden == 0 || !x.len().is_multiple_of(hidden) {
            return Err(ComputeError::Activations { numbers: x.len(), hidden });
        }
        let too_large =
            KernelError::TooLarge { what: "output rows", value: outputs, most: usize::MAX / hidden };
        let results = outputs.checked_mul(hidden).ok_or(too_large).map_err(failed)?;
        self.x.clear();
        self.x.extend_from_slice(x);
        self.hidden = hidden;
        self.out.clear();
        self.out.resize(results, 0.0);
        Ok(())
    }

    fn submit(&mut self, tasks: &[ExpertTask<'_>]) -> Result<Completion, ComputeError> {
        let pass = ExpertPass { x: &self.x, hidden: self.hidden, tasks };
        self.device.experts(&pass, &mut self.out).map_err(failed)?;
        Ok(Completion::Done)
    }

    fn finish(&mut self) -> Result<&[f32], ComputeError> {
        Ok(&self.out)
    }
}
