//! Bytes reported against the operating system's own count. One test, since the count is the
//! process's.
#![cfg(target_os = "linux")]

mod common;
#[path = "common/synthetic.rs"]
mod synthetic;

use metaltail_container::synth::{Like, SynthFormat};
use metaltail_engine::EngineOptions;
use metaltail_store::Direct;
use synthetic::{Synthetic, random_ids, settings};

/// Bytes that this process got from read calls, the page cache's among them.
fn read_by_this_process() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix("rchar:")?.trim().parse().ok())
}

#[test]
fn the_operating_system_counts_the_same_bytes() {
    if read_by_this_process().is_none() {
        println!("SKIPPED: /proc/self/io is absent");
        return;
    }
    for format in [SynthFormat::Slab, SynthFormat::Colibri] {
        let model = Synthetic::of(Like::Tiny, format);
        let options = EngineOptions { cap: Some(0), direct: Direct::Off, ..settings() };
        let engine = model.open(&options);
        let before = read_by_this_process().unwrap();
        common::greedy(&engine, &random_ids(20, 256, 6), 30);
        let counted = read_by_this_process().unwrap() - before;
        let reported = engine.telemetry().figures().io.bytes;
        // Each step also looks at its own memory in /proc, some 1.5 kB, and this test at the count.
        let slack = 4096 * 40;
        assert!(reported > 10 * slack, "{reported} bytes are too few to tell");
        assert!(
            (reported..=reported + slack).contains(&counted),
            "{format}: {reported} bytes reported, {counted} counted"
        );
    }
}
