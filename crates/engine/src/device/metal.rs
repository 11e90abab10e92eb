//! A Mac's GPU.

use std::sync::Arc;

use metaltail_device::kernels::self_check;
use metaltail_device::residency::Ledger;
use metaltail_kernels::{AcceleratorExperts, ExpertCompute};
use metaltail_metal::{Gpu, MetalDriver, MetalError};
use metaltail_store::ExpertStore;

use super::open::{Accelerated, Device};
use super::{AcceleratorFacts, DeviceFigures, DeviceKind, DeviceOptions};
use crate::error::EngineError;

const NAME: &str = "metal";

fn refused(error: MetalError) -> EngineError {
    EngineError::NoDevice { device: NAME, reason: error.to_string() }
}

/// What the GPU says of itself.
pub(super) fn facts() -> Result<AcceleratorFacts, EngineError> {
    let gpu = Gpu::open(None).map_err(refused)?;
    let limits = gpu.facts().limits();
    let mut lines = vec![format!("system: {}", gpu.system())];
    lines.extend(gpu.facts().lines());
    Ok(AcceleratorFacts {
        device: DeviceKind::Metal.name(),
        machine: gpu.facts().name.clone(),
        working_set: limits.working_set,
        setting: limits.setting,
        allocation: limits.allocation,
        sets: limits.sets,
        lines,
    })
}

/// Opens the GPU for the experts of `store`, checks that it computes what the processor does, and declares memory as
/// the options say.
pub(super) fn open(
    options: &DeviceOptions,
    store: &ExpertStore,
) -> Result<(Device, Box<dyn ExpertCompute>), EngineError> {
    let gpu = Gpu::open(None).map_err(refused)?;
    let opened = gpu.accelerator(store, options.residency, options.slabs).map_err(refused)?;
    let arena = opened.arena;
    let accelerator = self_check(opened.accelerator, arena.residency())
        .map_err(|error| EngineError::NoDevice { device: NAME, reason: error.to_string() })?;
    let (weights, counts) = (accelerator.weights().spans(), accelerator.counts());
    let times = accelerator.launcher().figures();
    let machine = gpu.facts().name.clone();
    let figures = move |ledger: &Ledger<MetalDriver>| {
        let times = times.get();
        DeviceFigures {
            machine: machine.clone(),
            mode: ledger.mode(),
            experts: counts.get().experts,
            gpu_wall_seconds: times.wall.as_secs_f64(),
            kernel_seconds: times.gpu.as_secs_f64(),
            stall_seconds: times.stall.as_secs_f64(),
            coupled_seconds: 0.0,
            encode_seconds: Some(times.encode.as_secs_f64()),
            schedule_seconds: Some(times.schedule.as_secs_f64()),
            residency: ledger.stats(),
        }
    };
    let known = Accelerated { arena: Arc::clone(&arena), weights, figures };
    let compute = Box::new(AcceleratorExperts::new(accelerator));
    Ok((Device::keeping(options, &arena, known)?, compute))
}
