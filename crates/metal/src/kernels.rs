//! Kernels, compiled from source on the machine that runs them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::{NSObjectProtocol, ProtocolObject};
use objc2::sel;
use objc2_foundation::NSString;
use objc2_metal::{
    MTLCompileOptions, MTLComputePipelineState, MTLDevice, MTLLanguageVersion, MTLLibrary, MTLMathMode,
};

use crate::dispatch::KernelLimits;
use crate::error::MetalError;
use crate::gpu::{Gpu, words};

/// A file of kernels.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Its name in messages.
    pub name: &'a str,
    /// Its text.
    pub text: &'a str,
}

/// What the compiler may do to sums and functions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MathMode {
    /// As written: NaNs and infinities exist, sums keep their order.
    #[default]
    Safe,
    /// As the compiler sees fit.
    Fast,
}

/// A kernel that is ready to run.
pub(crate) struct Pipeline {
    pub(crate) state: Retained<ProtocolObject<dyn MTLComputePipelineState>>,
    pub(crate) limits: KernelLimits,
}

/// The kernels of some sources. A pipeline is made when a kernel is first asked for.
pub struct Kernels {
    gpu: Arc<Gpu>,
    library: Retained<ProtocolObject<dyn MTLLibrary>>,
    pipelines: Mutex<BTreeMap<String, Arc<Pipeline>>>,
}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernels").field("gpu", &self.gpu).finish_non_exhaustive()
    }
}

/// One text of all sources. `#line` makes messages name each file and its own lines.
fn join(sources: &[Source<'_>]) -> String {
    let mut all = String::new();
    for Source { name, text } in sources {
        let _ = writeln!(all, "#line 1 \"{name}\"");
        all.push_str(text);
        all.push('\n');
    }
    all
}

fn options(math: MathMode) -> Retained<MTLCompileOptions> {
    let options = MTLCompileOptions::new();
    // Metal 3.0 has addresses in buffers; a later one would shut out macOS 13.
    options.setLanguageVersion(MTLLanguageVersion::Version3_0);
    // macOS 15 has three modes, older systems a switch.
    if options.respondsToSelector(sel!(setMathMode:)) {
        options.setMathMode(match math {
            MathMode::Safe => MTLMathMode::Safe,
            MathMode::Fast => MTLMathMode::Fast,
        });
    } else {
        #[allow(deprecated)]
        options.setFastMathEnabled(math == MathMode::Fast);
    }
    options
}

impl Kernels {
    /// Compiles sources, joined in their order.
    ///
    /// # Safety
    /// A kernel reads and writes wherever its code and arguments lead, and memory is shared: who compiles it vouches
    /// for every [`crate::dispatch::Dispatch`] of it, that the bytes that it touches belong to the buffers
    /// it is given or to memory that is declared, and that it writes to buffers it is given alone.
    ///
    /// # Errors
    /// What Metal's compiler refuses, in its words.
    pub unsafe fn compile(
        gpu: &Arc<Gpu>,
        sources: &[Source<'_>],
        math: MathMode,
    ) -> Result<Arc<Kernels>, MetalError> {
        autoreleasepool(|_| {
            let source = NSString::from_str(&join(sources));
            let library = gpu.device().newLibraryWithSource_options_error(&source, Some(&options(math)));
            let library = library.map_err(|error| MetalError::Compile { message: words(&error) })?;
            Ok(Arc::new(Kernels { gpu: Arc::clone(gpu), library, pipelines: Mutex::default() }))
        })
    }

    /// Names of all kernels, sorted.
    pub fn names(&self) -> Vec<String> {
        autoreleasepool(|_| {
            let names = self.library.functionNames();
            let mut names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
            names.sort();
            names
        })
    }

    /// What a kernel can have; makes it ready to run.
    ///
    /// # Errors
    /// A name that there is not; a kernel that the device cannot run.
    pub fn limits(&self, kernel: &str) -> Result<KernelLimits, MetalError> {
        Ok(self.pipeline(kernel)?.limits)
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    pub(crate) fn pipeline(&self, kernel: &str) -> Result<Arc<Pipeline>, MetalError> {
        // Held while a pipeline is made: two threads do not make one twice.
        let mut pipelines = self.pipelines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = pipelines.get(kernel) {
            return Ok(Arc::clone(pipeline));
        }
        let made = Arc::new(self.make(kernel)?);
        pipelines.insert(kernel.into(), Arc::clone(&made));
        Ok(made)
    }

    fn make(&self, kernel: &str) -> Result<Pipeline, MetalError> {
        autoreleasepool(|_| {
            let function = self.library.newFunctionWithName(&NSString::from_str(kernel));
            let function = function.ok_or_else(|| MetalError::NoKernel { kernel: kernel.into() })?;
            let state = self.gpu.device().newComputePipelineStateWithFunction_error(&function);
            let state = state
                .map_err(|error| MetalError::Pipeline { kernel: kernel.into(), message: words(&error) })?;
            let limits = KernelLimits {
                threads: state.maxTotalThreadsPerThreadgroup(),
                width: state.threadExecutionWidth(),
                memory: state.staticThreadgroupMemoryLength(),
            };
            Ok(Pipeline { state, limits })
        })
    }
}
