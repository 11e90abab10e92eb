//! The device and its queue.

use std::sync::Arc;

use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::{NSObjectProtocol, ProtocolObject};
use objc2::sel;
use objc2_foundation::{NSError, NSString};
use objc2_metal::{
    MTLBuffer, MTLCaptureManager, MTLCommandQueue, MTLCopyAllDevices, MTLCreateSystemDefaultDevice,
    MTLDevice, MTLGPUFamily, MTLResourceOptions,
};

use crate::buffer::Buffer;
use crate::error::MetalError;
use crate::health::Health;
use crate::limits::{Candidate, Facts, Families, GroupLimits, choose};
use crate::room::Room;
use crate::sysctl;

// Without it a program that draws nothing gets no default device.
#[link(name = "CoreGraphics", kind = "framework")]
unsafe extern "C" {}

pub(crate) type Device = ProtocolObject<dyn MTLDevice>;
pub(crate) type Queue = ProtocolObject<dyn MTLCommandQueue>;

/// A device with one command queue.
pub struct Gpu {
    device: Retained<Device>,
    queue: Retained<Queue>,
    facts: Facts,
    room: Arc<Room>,
    health: Arc<Health>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("facts", &self.facts).finish_non_exhaustive()
    }
}

/// Metal's words for what went wrong.
pub(crate) fn words(error: &NSError) -> String {
    autoreleasepool(|_| error.localizedDescription().to_string())
}

fn found() -> Vec<Retained<Device>> {
    // The default device first: of equal ones it is the one that the user's system prefers.
    let mut devices: Vec<_> = MTLCreateSystemDefaultDevice().into_iter().collect();
    for device in MTLCopyAllDevices().to_vec() {
        if devices.iter().all(|known| known.registryID() != device.registryID()) {
            devices.push(device);
        }
    }
    devices
}

/// Whether a buffer has an address: older systems do not know the call, and nothing lies at zero.
fn gives_addresses(device: &Device) -> bool {
    let trial = device.newBufferWithLength_options(16, MTLResourceOptions::StorageModeShared);
    trial.is_some_and(|buffer| buffer.respondsToSelector(sel!(gpuAddress)) && buffer.gpuAddress() != 0)
}

fn facts_of(device: &Device) -> Facts {
    let most = device.maxThreadsPerThreadgroup();
    let has_architecture = device.respondsToSelector(sel!(architecture));
    // SAFETY: asks for a constant of the system.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    Facts {
        name: device.name().to_string(),
        architecture: has_architecture.then(|| device.architecture().name().to_string()),
        unified: device.hasUnifiedMemory(),
        working_set: device.recommendedMaxWorkingSetSize(),
        buffer: device.maxBufferLength() as u64,
        wired_limit_mib: sysctl::integer(c"iogpu.wired_limit_mb"),
        page: usize::try_from(page).unwrap_or(16384),
        // The class of the descriptor is there wherever the device knows the call, and only there.
        set_calls: device.respondsToSelector(sel!(newResidencySetWithDescriptor:error:)),
        addresses: gives_addresses(device),
        virtual_machine: sysctl::integer(c"kern.hv_vmm_present") == Some(1),
        families: Families {
            apple6: device.supportsFamily(MTLGPUFamily::Apple6),
            metal3: device.supportsFamily(MTLGPUFamily::Metal3),
        },
        groups: GroupLimits {
            threads: [most.width, most.height, most.depth],
            memory: device.maxThreadgroupMemoryLength(),
        },
    }
}

impl Gpu {
    /// Opens the device called `wanted`, or the one to take ([`choose`]), with a queue.
    ///
    /// # Errors
    /// No such device, or one that cannot be used.
    pub fn open(wanted: Option<&str>) -> Result<Arc<Gpu>, MetalError> {
        autoreleasepool(|_| {
            let mut devices = found();
            let candidates: Vec<Candidate> = devices
                .iter()
                .map(|device| Candidate {
                    name: device.name().to_string(),
                    unified: device.hasUnifiedMemory(),
                    removable: device.isRemovable(),
                })
                .collect();
            let device = devices.swap_remove(choose(&candidates, wanted)?);
            let facts = facts_of(&device);
            facts.check()?;
            let no_queue = || MetalError::NotMade { what: "a command queue".into() };
            let queue = device.newCommandQueue().ok_or_else(no_queue)?;
            queue.setLabel(Some(&NSString::from_str("metaltail")));
            let room = Room::new(&facts);
            Ok(Arc::new(Gpu { device, queue, facts, room, health: Arc::default() }))
        })
    }

    /// What it says of itself.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The machine and system it is in: model, version of macOS.
    pub fn system(&self) -> String {
        let told = |name| sysctl::text(name).unwrap_or_else(|| "not told".into());
        let [model, version, build] = [c"hw.model", c"kern.osproductversion", c"kern.osversion"].map(told);
        format!("{model}, macOS {version} ({build})")
    }

    /// The account of what it holds resident.
    pub fn room(&self) -> &Arc<Room> {
        &self.room
    }

    /// Bytes of this process's resources in Metal's own count.
    pub fn allocated(&self) -> u64 {
        self.device.currentAllocatedSize() as u64
    }

    /// Memory for what is written and read by both sides: activations, tables, results. Zeros at first.
    ///
    /// # Errors
    /// No bytes, or more than the device takes or has.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer, MetalError> {
        Buffer::new(self, bytes)
    }

    /// Whether a capture for Xcode's debugger runs: then the walk is wanted, since a capture sees only what is named.
    pub fn is_capturing(&self) -> bool {
        // SAFETY: the shared object lives as long as the process and may be asked from any thread.
        unsafe { MTLCaptureManager::sharedCaptureManager() }.isCapturing()
    }

    /// Whether it still works.
    pub fn health(&self) -> &Arc<Health> {
        &self.health
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }
}
