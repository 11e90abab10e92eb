//! Checks this Mac's GPU: `cargo run --release -p metaltail-metal --example metal_check [device]`.
//!
//! Prints what the device says of itself, and what declaring memory once or with each submission costs as the number
//! of allocations grows. The output is what to send back (docs/design/metal-host.md). Ends with 0 where every
//! number was right, with 1 where not, and with 2 on other systems.

use std::process::ExitCode;

#[cfg(target_os = "macos")]
fn main() -> ExitCode {
    let wanted = std::env::args().nth(1);
    match checks(wanted.as_deref()) {
        Ok(()) => {
            println!("all numbers were right");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(target_os = "macos")]
fn checks(wanted: Option<&str>) -> Result<(), metaltail_metal::check::CheckError> {
    use metaltail_device::residency::Mode;
    use metaltail_metal::Gpu;
    use metaltail_metal::check::{CheckRow, CheckSize, kernels, run};

    let gpu = Gpu::open(wanted)?;
    println!("metaltail {} on {}", env!("CARGO_PKG_VERSION"), gpu.system());
    gpu.facts().lines().iter().for_each(|line| println!("{line}"));
    println!("{}", CheckRow::HEAD);
    for chunks in [1, 16, 256, 2048] {
        for mode in [Mode::Set, Mode::Walk] {
            let row = run(&gpu, mode, CheckSize { chunks, bytes: 1 << 20, submissions: 50 })?;
            println!("{}", row.line());
            if let Some(reason) = row.residency.fallback {
                println!("  walked although sets were asked for: {reason}");
            }
        }
    }
    let compiled = kernels(&gpu, Mode::Set)?;
    println!(
        "the engine's kernels were compiled in {:.1} s, and compute what the processor does",
        compiled.as_secs_f64()
    );
    Ok(())
}

#[cfg(not(target_os = "macos"))]
fn main() -> ExitCode {
    println!("Metal is on macOS alone: this check runs on a Mac.");
    ExitCode::from(2)
}
