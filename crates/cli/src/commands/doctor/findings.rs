//! What to change and why, each with its numbers.

use std::time::Duration;

use metaltail_container::{Kind as Container, Report as Census};
use metaltail_store::Machine;
use serde::Serialize;

use super::limits::Limits;
use super::machine::Hardware;
use super::storage::Storage;
use crate::accelerator::Accelerator;
use crate::commands::plan;
use crate::report::bytes as size;
use crate::words::count;
use Severity::{Hint, Warning};

/// How much a finding matters, most first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It does not run like this.
    Error,
    /// It runs badly.
    Warning,
    /// It could run better.
    Hint,
}

/// One thing to change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How much it matters.
    pub severity: Severity,
    /// What was found.
    pub what: String,
    /// Why it matters.
    pub why: String,
    /// What to do.
    pub action: String,
}

impl Finding {
    fn new(
        severity: Severity,
        what: impl Into<String>,
        why: impl Into<String>,
        action: impl Into<String>,
    ) -> Self {
        Finding { severity, what: what.into(), why: why.into(), action: action.into() }
    }
}

/// Share of time in percent at which waiting for memory is worth a word.
const PRESSURE: f64 = 1.0;
/// A drive below this many 10⁹ bytes a second is slow for streaming.
const SLOW_DRIVE: f64 = 0.5;
/// No head moves to another track and finds its sector in less.
const SEEK: Duration = Duration::from_millis(1);
/// Descriptors beside those of the model.
const OWN_FILES: u64 = 64;

/// Findings on the machine and what this process may have of it.
pub fn of_machine(hardware: &Hardware, limits: &Limits, machine: &Machine) -> Vec<Finding> {
    let mut found = Vec::new();
    if !hardware.optimised {
        found.push(Finding::new(
            Warning,
            "this is a debug build",
            "kernels run many times slower, and every rate here is that of the build, not of the machine",
            "build with `cargo build --release`",
        ));
    }
    if hardware.isa == "scalar" {
        found.push(Finding::new(
            Warning,
            "the processor has none of the instruction sets that there are kernels for",
            "plain code computes several times slower than AVX2 or NEON",
            "use a processor with AVX2 (x86-64, 2013 and later) or NEON (64-bit Arm); in a virtual machine, hand the host's processor through",
        ));
    }
    if let (Some(cores), Some(usable)) = (hardware.physical_cores, hardware.usable_processors)
        && hardware.default_threads < cores.min(usable)
    {
        found.push(Finding::new(
            Hint,
            match hardware.default_threads {
                1 => format!("1 thread computes, though {cores} cores are there"),
                threads => format!("{threads} threads compute, though {cores} cores are there"),
            },
            "a processor quota of a control group allows no more at a time",
            "raise the quota (cpu.max) where the rest of the machine is free",
        ));
    }
    if let Some(nodes) = hardware.numa_nodes.filter(|&nodes| nodes > 1) {
        found.push(Finding::new(
            Hint,
            format!("memory has {nodes} nodes"),
            "threads read experts from the other node's memory at a part of its rate",
            "compare a run with `numactl --interleave=all`, and one with `--cpunodebind=0 --membind=0` where the budget fits one node",
        ));
    }
    if let Some(pressure) = hardware.pressure.filter(|p| p.some_10.max(p.some_60) >= PRESSURE) {
        found.push(Finding::new(
            Warning,
            format!("tasks waited for memory {:.1} % of the last minute", pressure.some_60),
            "the system is short of memory already: what the cache takes is paid for elsewhere, perhaps by this program's own pages",
            "end what else uses memory, or give a smaller --ram than the default",
        ));
    }
    if let Some((level, room)) = machine.tightest()
        && room < machine.available
    {
        found.push(Finding::new(
            Hint,
            format!(
                "control group {} leaves {} of the {} available",
                level.path.display(),
                size(room),
                size(machine.available)
            ),
            "the budget follows the tightest group",
            "raise its limit (memory.max) where this program may have more",
        ));
    }
    if let Some(bytes) = limits.address_space.and_then(|limit| limit.soft) {
        found.push(Finding::new(
            Warning,
            format!("the address space is limited to {}", size(bytes)),
            "slots are mapped at once for the whole budget, and a map above the limit fails",
            "`ulimit -v unlimited`, and leave the limit to --ram",
        ));
    }
    found
}

/// A finding where the accelerator cannot be used.
pub fn of_accelerator(accelerator: &Accelerator) -> Option<Finding> {
    accelerator.refusal().map(|reason| Finding {
        severity: Severity::Error,
        what: "the accelerator cannot be used".into(),
        why: reason.to_owned(),
        action: "leave --device out to compute on the processor".into(),
    })
}

/// Findings on where a model lies: its drive's rate in 10⁹ bytes a second, and the time that half of the reads
/// of an expert took at least, where that was measured.
pub fn of_storage(storage: &Storage, read: &Result<f64, String>, half: Option<Duration>) -> Vec<Finding> {
    let mut found = Vec::new();
    // Virtual drives often call themselves turning: only one that is slow and seeks is believed.
    let slow = read.as_ref().map_or(true, |&rate| rate < SLOW_DRIVE);
    if storage.rotational == Some(true) && slow && half.is_none_or(|half| half >= SEEK) {
        let seen = half.map_or(String::new(), |half| {
            format!(" (half of the reads took {:.1} ms or more)", half.as_secs_f64() * 1e3)
        });
        found.push(Finding::new(
            Warning,
            format!("{} is a turning disk", storage.device.as_deref().unwrap_or("the drive")),
            format!("every expert costs a seek{seen}; the bound above is what remains"),
            "put the model on a solid-state drive",
        ));
    }
    if storage.remote() {
        found.push(Finding::new(
            Warning,
            format!("{} is a {} file system", storage.path, storage.file_system.as_deref().unwrap_or("remote")),
            "a server, a host or a program stands between the experts and this process, and direct reads may go through its cache",
            "copy the model to a local drive",
        ));
    }
    match read {
        Err(reason) => found.push(Finding::new(
            Warning,
            format!("the drive was not measured: {reason}"),
            "without direct reads the page cache holds experts a second time, and the bound says what memory allows only",
            "use a file system with direct reads (ext4, xfs, btrfs)",
        )),
        Ok(rate) if *rate < SLOW_DRIVE => found.push(Finding::new(
            Warning,
            format!("the drive delivers experts at {rate:.2} GB/s"),
            "each gigabyte that the cache misses takes this program seconds, whatever it does beside",
            "use a faster drive, more memory, or a model of fewer bytes a token",
        )),
        Ok(_) => {}
    }
    found
}

/// Findings on a model's files.
pub fn of_census(census: &Census, limits: &Limits) -> Vec<Finding> {
    let mut found = Vec::new();
    let layers = || census.census.layers.iter().filter(|layer| !layer.draft);
    let wide: Vec<String> = layers()
        .flat_map(|layer| layer.formats.iter().map(ToString::to_string))
        .filter(|format| ["bf16", "f16", "f32"].contains(&format.as_str()))
        .collect();
    let dir = crate::words::shell_word(&census.dir);
    if let Some(format) = wide.first() {
        let bytes: u64 = layers().map(|layer| layer.bytes).sum();
        let per_value = if format == "f32" { 4.0 } else { 2.0 };
        // int4 with a scale of 4 bytes for every 64 values.
        let smaller = (bytes as f64 / per_value * 0.5625) as u64;
        found.push(Finding::new(
            Hint,
            format!("experts are stored as {format}, {}", size(bytes)),
            format!("as int4-g64 they take about {}: that much less is read a token, and that many more fit the cache", size(smaller)),
            format!("`metaltail convert {dir} OUT --experts int4-g64`; `metaltail score` says what it costs"),
        ));
    } else if census.kind != Container::Slab && layers().any(|layer| layer.runs > 1) {
        let runs = layers().map(|layer| layer.runs).max().unwrap_or(0);
        found.push(Finding::new(
            Hint,
            format!("an expert lies in {runs} places"),
            "each is a read of its own; a slab container has one aligned run an expert, with a checksum",
            format!("`metaltail convert {dir} OUT --experts keep --rest keep`"),
        ));
    }
    let files = census.files.len() as u64;
    if let Some(soft) = limits.open_files.and_then(|limit| limit.soft)
        && soft < files.saturating_mul(2) + OWN_FILES
    {
        found.push(Finding::new(
            Warning,
            format!("{soft} open files are allowed, the model has {files}"),
            "every file is open twice, for headers and for reads past the page cache",
            format!("`ulimit -n {}`", (files * 2 + OWN_FILES).next_power_of_two()),
        ));
    }
    if census.census.unused > 0 {
        found.push(Finding::new(
            Hint,
            format!(
                "{} of this directory belong to no part that is computed",
                count(census.census.unused, "tensor")
            ),
            "they take room on the drive and nothing else",
            "nothing needs to be done; a converted model leaves them out",
        ));
    }
    found.extend(census.notices.iter().map(|notice| {
        Finding::new(
            Hint,
            notice.clone(),
            "it was decided for lack of a stamp, or looks odd",
            "`metaltail inspect --verify` reads everything",
        )
    }));
    found
}

/// Findings on memory and speed.
pub fn of_plan(report: &plan::Report) -> Vec<Finding> {
    let mut found = Vec::new();
    let (geometry, fit) = (&report.geometry, report.fit);
    let top_k = report.planned.plan.layers.iter().filter_map(|layer| layer.moe()).map(|moe| moe.top_k).max();
    let others = report.budget.total().saturating_sub(geometry.cached_bytes(fit.cap));
    let budget_for = |cap| others.saturating_add(geometry.cached_bytes(cap));
    let most = geometry.most_experts();
    if let Some(top_k) = top_k.filter(|&top_k| fit.cap < top_k) {
        found.push(Finding::new(
            Warning,
            format!("{} experts a layer are kept, a token uses {top_k}", fit.cap),
            "below one token's experts hits are chance, whatever the policy",
            format!(
                "give at least {} (--ram), shorten --context, or use a smaller format",
                size(budget_for(top_k))
            ),
        ));
    }
    if fit.cap < most && report.bound.resource == "drive" {
        let half = report.reads.expected / 2.0;
        // Under uniform routing reads fall in proportion to what is kept.
        let kept = most as f64 - half / report.reads.cost.routed_on_drive.max(1) as f64 * most as f64;
        let cap = (kept.ceil() as usize).clamp(fit.cap + 1, most);
        found.push(Finding::new(
            Hint,
            format!("the drive binds: {:.2} tokens/s at most", report.bound.tokens_per_second),
            format!(
                "{} a token are read under uniform routing, with {} of {most} experts a layer in memory",
                size(report.reads.expected as u64),
                fit.cap
            ),
            format!(
                "a budget of {} would halve that, {} hold everything; real routing repeats itself and reads less",
                size(budget_for(cap)),
                size(budget_for(most))
            ),
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::limits::Limit;
    use super::super::machine::Pressure;
    use super::*;
    use metaltail_store::CgroupLevel;

    fn sound() -> Hardware {
        Hardware { isa: "avx2".into(), optimised: true, default_threads: 4, ..Hardware::default() }
    }

    fn whats(found: &[Finding]) -> String {
        found.iter().map(|finding| format!("{}\n", finding.what)).collect()
    }

    #[test]
    fn a_sound_machine_has_no_findings() {
        let machine = Machine { total: 100, available: 90, ..Machine::default() };
        assert_eq!(of_machine(&sound(), &Limits::default(), &machine), []);
        assert_eq!(of_storage(&Storage::default(), &Ok(3.0), None), []);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_numbers() {
        let hardware = Hardware {
            isa: "scalar".into(),
            optimised: false,
            default_threads: 1,
            physical_cores: Some(8),
            usable_processors: Some(16),
            numa_nodes: Some(2),
            pressure: Some(Pressure { some_10: 0.0, some_60: 12.5, full_60: 3.0 }),
            ..sound()
        };
        let limits =
            Limits { address_space: Some(Limit { soft: Some(1 << 30), hard: None }), ..Limits::default() };
        let group = CgroupLevel { path: "/g".into(), limit: 2 << 20, used: 0 };
        let machine = Machine { total: 9 << 20, available: 8 << 20, own_anon: 0, cgroups: vec![group] };
        let found = whats(&of_machine(&hardware, &limits, &machine));
        for part in [
            "debug build",
            "none of the instruction sets",
            "1 thread computes, though 8",
            "2 nodes",
            "12.5 %",
            "/g leaves 2.0 MiB of the 8.0 MiB",
            "1.0 GiB",
        ] {
            assert!(found.contains(part), "{part}: {found}");
        }
        let storage = Storage {
            path: "m".into(),
            device: Some("sda".into()),
            rotational: Some(true),
            file_system: Some("nfs4".into()),
            ..Storage::default()
        };
        let found = of_storage(&storage, &Ok(0.1), Some(Duration::from_micros(8500)));
        for part in ["sda is a turning disk", "nfs4", "0.10 GB/s"] {
            assert!(whats(&found).contains(part), "{part}: {found:?}");
        }
        assert!(found[0].why.contains("half of the reads took 8.5 ms or more"), "{found:?}");
        assert!(
            whats(&of_storage(&Storage::default(), &Err("no direct reads".into()), None))
                .contains("no direct reads")
        );
    }

    #[test]
    fn a_drive_that_does_not_seek_is_no_turning_disk() {
        let storage = Storage { rotational: Some(true), ..Storage::default() };
        let found = |half| whats(&of_storage(&storage, &Ok(0.1), Some(Duration::from_micros(half))));
        assert!(!found(90).contains("turning") && found(90).contains("0.10 GB/s"), "{}", found(90));
        assert!(found(4000).contains("turning"), "{}", found(4000));
    }
}
