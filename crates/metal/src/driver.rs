//! Memory declared to Metal: the driver below the residency ledger.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::{Duration, Instant};

use metaltail_device::residency::{DriverError, Limits, ResidencyDriver, SetId, Span};
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::{
    MTLAllocation, MTLBuffer, MTLCommandQueue, MTLDevice, MTLResidencySet, MTLResidencySetDescriptor,
    MTLResourceOptions,
};

use crate::buffer::RawBuffer;
use crate::gpu::{Gpu, words};
use crate::memory::{Mapped, whole_pages};
use crate::room::Held;

type Set = ProtocolObject<dyn MTLResidencySet>;

/// Host memory that is a buffer where it lies.
struct Wrapped {
    raw: Retained<RawBuffer>,
    _held: Held,
}

/// [`ResidencyDriver`] on Metal. Host memory becomes buffers where it lies; sets are attached to the queue of the
/// device.
pub struct MetalDriver {
    gpu: Arc<Gpu>,
    buffers: Mapped<Wrapped>,
    sets: Vec<Retained<Set>>,
    /// For the submission that is encoded next.
    declared: Vec<Retained<RawBuffer>>,
    began: Instant,
}

// SAFETY: neither buffers nor sets belong to a thread, and reference counts are atomic. Calls on a set must not come
// from two threads at a time: all go through `&mut self`, and nobody else has the sets.
unsafe impl Send for MetalDriver {}

impl std::fmt::Debug for MetalDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MetalDriver")
            .field("buffers", &self.buffers.len())
            .field("sets", &self.sets.len())
            .finish_non_exhaustive()
    }
}

fn refuse(call: &'static str, reason: impl ToString) -> DriverError {
    DriverError { call, reason: reason.to_string() }
}

fn allocation(buffer: &RawBuffer) -> &ProtocolObject<dyn MTLAllocation> {
    ProtocolObject::from_ref(buffer)
}

impl MetalDriver {
    /// A driver that knows no memory yet.
    ///
    /// # Safety
    /// The GPU reads what is wrapped, at any time until it is unwrapped. Who wraps memory, through a ledger or
    /// directly, keeps it mapped and readable until then.
    pub unsafe fn new(gpu: Arc<Gpu>) -> MetalDriver {
        let (buffers, sets, declared) = (Mapped::default(), Vec::new(), Vec::new());
        MetalDriver { gpu, buffers, sets, declared, began: Instant::now() }
    }

    /// Where kernels find host memory; `None` where it is not known, or not in one piece.
    pub fn address(&self, span: Span) -> Option<u64> {
        let (buffer, offset) = self.buffers.find(span)?;
        buffer.raw.gpuAddress().checked_add(offset as u64)
    }

    /// What was declared for the submission that begins now.
    pub(crate) fn take_declared(&mut self) -> Vec<Retained<RawBuffer>> {
        std::mem::take(&mut self.declared)
    }

    fn buffer(&self, call: &'static str, span: Span) -> Result<&Retained<RawBuffer>, DriverError> {
        let known = self.buffers.get(span).map(|wrapped| &wrapped.raw);
        known.ok_or_else(|| refuse(call, format!("{span} are not known to the device")))
    }

    fn set(&self, call: &'static str, set: SetId) -> Result<&Retained<Set>, DriverError> {
        self.sets.get(set.0 as usize).ok_or_else(|| refuse(call, format!("there is no set {}", set.0)))
    }
}

impl ResidencyDriver for MetalDriver {
    fn limits(&self) -> Limits {
        self.gpu.facts().limits()
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn wrap(&mut self, span: Span) -> Result<(), DriverError> {
        const CALL: &str = "wrap memory";
        let facts = self.gpu.facts();
        let whole = whole_pages(span, facts.page, facts.buffer).map_err(|error| refuse(CALL, error))?;
        if self.buffers.find(Span { len: 1, ..span }).is_some() {
            return Err(refuse(CALL, format!("{span} are known already")));
        }
        let held = self.gpu.room().hold(whole.len as u64).map_err(|error| refuse(CALL, error))?;
        let base = ptr::with_exposed_provenance_mut::<c_void>(whole.base);
        let base = NonNull::new(base).ok_or_else(|| refuse(CALL, "there is no memory at address zero"))?;
        // Only read through addresses, and the ledger keeps loaders and submissions apart: no hazards to track.
        let options = MTLResourceOptions::StorageModeShared | MTLResourceOptions::HazardTrackingModeUntracked;
        // SAFETY: whole pages by `whole_pages`, which whoever made this driver promised to keep mapped until they
        // are unwrapped. Without a deallocator Metal leaves them alone.
        let raw = unsafe {
            let device = self.gpu.device();
            device.newBufferWithBytesNoCopy_length_options_deallocator(base, whole.len, options, None)
        };
        let raw = raw.ok_or_else(|| {
            let reason =
                "Metal gives no reason; the memory may be no mapping of its own, or the limit reached";
            refuse(CALL, format!("{span}: {reason}"))
        })?;
        match self.buffers.insert(span, Wrapped { raw, _held: held }) {
            true => Ok(()),
            false => Err(refuse(CALL, format!("{span} overlap what is known already"))),
        }
    }

    fn unwrap(&mut self, span: Span) {
        if let Some(gone) = self.buffers.remove(span) {
            // Left over where a submission was begun and never encoded.
            self.declared.retain(|buffer| !ptr::eq(&**buffer, &*gone.raw));
        }
    }

    fn create_set(&mut self) -> Result<SetId, DriverError> {
        const CALL: &str = "create a residency set";
        let number = u32::try_from(self.sets.len()).map_err(|error| refuse(CALL, error))?;
        if self.sets.len() >= self.limits().sets {
            return Err(refuse(CALL, format!("the system takes {} on a queue", self.limits().sets)));
        }
        let set = autoreleasepool(|_| {
            let descriptor = MTLResidencySetDescriptor::new();
            descriptor.setLabel(Some(&NSString::from_str(&format!("metaltail weights {number}"))));
            let made = self.gpu.device().newResidencySetWithDescriptor_error(&descriptor);
            made.map_err(|error| {
                let place = if self.gpu.facts().virtual_machine { " (in a virtual machine)" } else { "" };
                refuse(CALL, words(&error) + place)
            })
        })?;
        self.gpu.queue().addResidencySet(&set);
        // A set that is resident wires additions with their commit, where the time is counted, and not with the
        // first submission that needs them.
        set.requestResidency();
        self.sets.push(set);
        Ok(SetId(number))
    }

    fn add(&mut self, set: SetId, span: Span) -> Result<(), DriverError> {
        const CALL: &str = "add to a residency set";
        let buffer = self.buffer(CALL, span)?;
        self.set(CALL, set)?.addAllocation(allocation(buffer));
        Ok(())
    }

    fn remove(&mut self, set: SetId, span: Span) -> Result<(), DriverError> {
        const CALL: &str = "remove from a residency set";
        let (set, buffer) = (self.set(CALL, set)?, self.buffer(CALL, span)?);
        if !set.containsAllocation(allocation(buffer)) {
            return Err(refuse(CALL, format!("{span} are not in it")));
        }
        set.removeAllocation(allocation(buffer));
        Ok(())
    }

    fn commit(&mut self, set: SetId) -> Result<(), DriverError> {
        self.set("commit a residency set", set)?.commit();
        Ok(())
    }

    fn request(&mut self, set: SetId) -> Result<(), DriverError> {
        self.set("make a residency set resident", set)?.requestResidency();
        Ok(())
    }

    fn release(&mut self, set: SetId) -> Result<(), DriverError> {
        self.set("give up a residency set", set)?.endResidency();
        Ok(())
    }

    fn declare(&mut self, spans: &[Span]) -> Result<(), DriverError> {
        let declared = spans.iter().map(|&span| self.buffer("declare memory", span).cloned());
        self.declared = declared.collect::<Result<_, _>>()?;
        Ok(())
    }
}

impl Drop for MetalDriver {
    /// The queue may outlive it, and must not hold what is about to be freed.
    fn drop(&mut self) {
        for set in &self.sets {
            set.endResidency();
            self.gpu.queue().removeResidencySet(set);
            set.removeAllAllocations();
            set.commit();
        }
    }
}
