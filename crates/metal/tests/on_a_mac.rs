//! What only a GPU can show. Never run by who wrote it: nobody had a Mac (docs/design/metal-host.md).
#![cfg(target_os = "macos")]

use std::sync::Arc;
use std::time::Duration;

use memmap2::MmapOptions;
use metaltail_device::residency::{Ledger, Mode, Residency, ResidencyDriver, Span};
use metaltail_metal::check::{CheckSize, run};
use metaltail_metal::dispatch::{Argument, Dispatch, Encoder, Misfit, Shape};
use metaltail_metal::{
    Buffer, Gpu, Kernels, MathMode, MetalDriver, MetalEncoder, MetalError, MetalQueue, Source,
};

const FIT: Shape = Shape { groups: [1, 1, 1], threads: [32, 1, 1] };

/// Writes 7 to every word of a buffer, `rounds` times.
const SEVENS: Source<'static> = Source {
    name: "sevens.metal",
    text: "#include <metal_stdlib>
using namespace metal;
kernel void sevens(device uint* out [[buffer(0)]], constant uint& words [[buffer(1)]],
                   constant uint& rounds [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    for (uint round = 0; round < rounds; round++) {
        for (uint at = i; at < words; at += 32) out[at] = 7;
        threadgroup_barrier(mem_flags::mem_device);
    }
}
",
};

/// The GPU, or none with a word of it: some virtual machines have none.
fn gpu() -> Option<Arc<Gpu>> {
    match Gpu::open(None) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            println!("SKIPPED: {error}");
            None
        }
    }
}

fn queue(gpu: &Arc<Gpu>, sources: &[Source<'_>]) -> Result<MetalQueue, MetalError> {
    // SAFETY: every dispatch in this file stays within the buffers that it names.
    let kernels = unsafe { Kernels::compile(gpu, sources, MathMode::Safe)? };
    // SAFETY: what this file registers outlives the ledger.
    let driver = unsafe { MetalDriver::new(Arc::clone(gpu)) };
    Ok(MetalQueue::new(kernels, Arc::new(Residency::new(Ledger::new(driver, Mode::Set)))))
}

fn sevens(encoder: &mut MetalEncoder<'_>, out: &Buffer, rounds: u32) -> Result<(), MetalError> {
    let words = (out.len() as u32 / 4).to_le_bytes();
    let arguments = [
        Argument::Buffer { index: 0, buffer: out, offset: 0 },
        Argument::Bytes { index: 1, bytes: &words },
        Argument::Bytes { index: 2, bytes: &rounds.to_le_bytes() },
    ];
    encoder.dispatch(&Dispatch { kernel: "sevens", arguments: &arguments, shape: FIT })
}

#[test]
fn memory_that_is_declared_once_is_read_as_memory_that_is_walked() {
    let Some(gpu) = gpu() else { return };
    for mode in [Mode::Set, Mode::Walk] {
        for chunks in [1, 3, 40] {
            let row = run(&gpu, mode, CheckSize { chunks, bytes: 80 << 10, submissions: 5 }).unwrap();
            let declared = if row.mode == Mode::Walk { chunks as f64 } else { 0.0 };
            assert_eq!(row.residency.declared_per_submit(), Some(declared), "{}", row.line());
            assert_eq!((row.figures.submissions, row.figures.dispatches), (5, 10));
            assert!(
                row.figures.gpu > Duration::ZERO && row.figures.gpu <= row.figures.wall,
                "{}",
                row.line()
            );
            if row.mode != mode {
                println!("walked: {:?}", row.residency.fallback);
            }
        }
    }
}

#[test]
fn the_device_says_what_it_can_take() {
    let Some(gpu) = gpu() else { return };
    let facts = gpu.facts();
    println!("{}\n{}", gpu.system(), facts.lines().join("\n"));
    assert!(facts.unified && facts.working_set > 1 << 30 && facts.buffer > 1 << 28);
    assert!([4096, 16384].contains(&facts.page) && facts.groups.memory >= 16384);
    assert!(matches!(Gpu::open(Some("no such device")), Err(MetalError::NoSuchDevice { .. })));
}

#[test]
fn the_compilers_words_name_the_file_and_its_line() {
    let Some(gpu) = gpu() else { return };
    let bad =
        Source { name: "bad.metal", text: "#include <metal_stdlib>\nkernel void k() { no_such_call(); }\n" };
    let error = queue(&gpu, &[SEVENS, bad]).unwrap_err().to_string();
    assert!(error.contains("bad.metal:2") && error.contains("no_such_call"), "{error}");
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_runs() {
    let Some(gpu) = gpu() else { return };
    let queue = queue(&gpu, &[SEVENS]).unwrap();
    let out = gpu.buffer(256).unwrap();
    let dispatch = |kernel: &str, arguments: &[Argument<'_, Buffer>], shape| {
        queue.submit(|encoder| encoder.dispatch(&Dispatch { kernel, arguments, shape })).map(drop)
    };
    assert!(matches!(dispatch("eights", &[], FIT), Err(MetalError::NoKernel { .. })));
    let wide = Shape { groups: [1, 1, 1], threads: [4096, 1, 1] };
    assert!(matches!(dispatch("sevens", &[], wide), Err(MetalError::Dispatch(_))));
    let outside = [Argument::Buffer { index: 0, buffer: &out, offset: 256 }];
    match dispatch("sevens", &outside, FIT) {
        Err(MetalError::Dispatch(error)) => assert!(matches!(error.misfit, Misfit::Offset { .. })),
        other => panic!("{other:?}"),
    }
    assert!(matches!(gpu.buffer(0), Err(MetalError::BufferSize { .. })));
    let mut bytes = [1; 256];
    out.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 256]);
    assert!(matches!(out.read(4, &mut bytes), Err(MetalError::OutOfBuffer { .. })));
}

#[test]
fn a_buffer_in_flight_is_out_of_reach_until_its_end_was_noticed() {
    let Some(gpu) = gpu() else { return };
    let queue = queue(&gpu, &[SEVENS]).unwrap();
    let mut out = gpu.buffer(1 << 16).unwrap();
    let mut first = queue.submit(|encoder| sevens(encoder, &out, 200)).unwrap();
    let mut second = queue.submit(|encoder| sevens(encoder, &out, 1)).unwrap();
    let mut bytes = vec![0; 1 << 16];
    assert_eq!(out.read(0, &mut bytes), Err(MetalError::InUse));
    assert_eq!(out.write(0, &[1]), Err(MetalError::InUse));
    queue.finish(&mut first).unwrap();
    assert_eq!(out.read(0, &mut bytes), Err(MetalError::InUse), "the second one is not over");
    queue.finish(&mut second).unwrap();
    out.read(0, &mut bytes).unwrap();
    assert!(bytes.as_chunks::<4>().0.iter().all(|word| u32::from_le_bytes(*word) == 7));
    out.write(0, &[1]).unwrap();
    drop(queue.submit(|encoder| sevens(encoder, &out, 50)).unwrap());
    out.read(0, &mut bytes).unwrap();
    assert_eq!(bytes[0], 7, "dropping a submission waits for it");
}

#[test]
fn what_takes_too_long_is_said_and_waited_for_again() {
    let Some(gpu) = gpu() else { return };
    let queue = queue(&gpu, &[SEVENS]).unwrap().with_patience(Duration::ZERO);
    let out = gpu.buffer(1 << 20).unwrap();
    let mut submitted = queue.submit(|encoder| sevens(encoder, &out, 200)).unwrap();
    assert!(matches!(queue.finish(&mut submitted), Err(MetalError::TimedOut { .. })));
    let queue = queue.with_patience(Duration::from_secs(60));
    assert!(queue.finish(&mut submitted).unwrap().gpu > Duration::ZERO);
    assert_eq!(queue.figures().submissions, 1);
}

#[test]
fn memory_that_does_not_begin_with_a_page_is_refused() {
    let Some(gpu) = gpu() else { return };
    let map = MmapOptions::new().len(1 << 20).map_anon().unwrap();
    let base = map.as_ptr().expose_provenance();
    // SAFETY: the mapping outlives the driver.
    let mut driver = unsafe { MetalDriver::new(Arc::clone(&gpu)) };
    let at = |offset, len| Span { base: base + offset, len };
    assert!(driver.wrap(at(4096 / 2, 4096)).unwrap_err().reason.contains("page"));
    driver.wrap(at(0, 20_000)).unwrap();
    assert!(driver.wrap(at(0, 20_000)).is_err(), "known already");
    let (whole, inside) = (driver.address(at(0, 20_000)).unwrap(), driver.address(at(5000, 15_000)).unwrap());
    assert_eq!(inside - whole, 5000);
    assert_eq!(driver.address(at(5000, 15_001)), None);
    assert!(gpu.room().held() >= 20_000);
    driver.unwrap(at(0, 20_000));
    assert_eq!(driver.address(at(0, 1)), None);
    assert_eq!(gpu.room().held(), 0);
    drop(driver);
    drop(map);
}
