//! A Mac's GPU, opened for a store of experts.

use std::sync::Arc;

use metaltail_device::metal::MetalAccelerator;
use metaltail_device::residency::{DeclaredArena, Ledger, Mode, Residency, SlabAllocation};
use metaltail_store::ExpertStore;

use crate::driver::MetalDriver;
use crate::error::MetalError;
use crate::gpu::Gpu;
use crate::kernels::{Kernels, MathMode, Source};
use crate::launcher::Launcher;
use crate::queue::Queue;

/// The accelerator of a Mac.
pub type Accelerator = MetalAccelerator<Launcher<Kernels>>;

/// An accelerator, and the memory that it knows.
#[derive(Debug)]
pub struct Opened {
    /// Computes.
    pub accelerator: Accelerator,
    /// The store's chunks, which are declared as they come and removed before they go.
    pub arena: Arc<DeclaredArena<MetalDriver>>,
}

impl Gpu {
    /// An accelerator on this device, with the kernels compiled for it, that reads the experts of `store` where they
    /// lie. From now on the store gives memory back by whole chunks, which leave the device first.
    ///
    /// # Errors
    /// What Metal's compiler refuses.
    pub fn accelerator(
        self: &Arc<Gpu>,
        store: &ExpertStore,
        mode: Mode,
        slabs: SlabAllocation,
    ) -> Result<Opened, MetalError> {
        let residency = Arc::new(Residency::new(Ledger::new(self.driver(), mode)));
        let arena = Arc::new(DeclaredArena::new(store.arena(), slabs, Arc::clone(&residency)));
        store.set_chunk_listener(Arc::clone(&arena) as _);
        let queue = Queue::new(self.kernels()?, residency);
        let accelerator = MetalAccelerator::new(Launcher::new(queue)).with_arena(Arc::clone(&arena));
        Ok(Opened { accelerator, arena })
    }

    /// An accelerator that reads no experts: for checks of kernels.
    ///
    /// # Errors
    /// What Metal's compiler refuses.
    pub fn bare_accelerator(self: &Arc<Gpu>, mode: Mode) -> Result<Accelerator, MetalError> {
        let residency = Arc::new(Residency::new(Ledger::new(self.driver(), mode)));
        Ok(MetalAccelerator::new(Launcher::new(Queue::new(self.kernels()?, residency))))
    }

    fn driver(self: &Arc<Gpu>) -> MetalDriver {
        // SAFETY: what is registered are held weights and a store's chunks. Both are unregistered before they are
        // unmapped, and stay mapped for ever where that is refused. Whoever registers more through the ledger keeps
        // it mapped until it is unregistered, as the ledger's documentation says.
        unsafe { MetalDriver::new(Arc::clone(self)) }
    }

    fn kernels(self: &Arc<Gpu>) -> Result<Arc<Kernels>, MetalError> {
        let source = metaltail_device::metal::source();
        let sources = [Source { name: "metaltail.metal", text: &source }];
        // SAFETY: only an accelerator launches these kernels, with operations that it has checked against their
        // buffers, and with addresses of declared memory. They write to their buffers alone: the kernels' tests stop
        // one that does not.
        unsafe { Kernels::compile(self, &sources, MathMode::Safe) }
    }
}
