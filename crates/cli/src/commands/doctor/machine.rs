//! The machine as far as it matters here. Parsers are functions of text.

use std::collections::BTreeSet;
use std::fs;

use metaltail_kernels::{Isa, default_threads};
use metaltail_store::Machine;
use serde::Serialize;

use crate::report::bytes as size;
use crate::words::count;

/// Processor and memory.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Hardware {
    /// As the system names it.
    pub processor: Option<String>,
    /// Physical cores of the machine.
    pub physical_cores: Option<usize>,
    /// Processors of the machine, hyper-threads counted apart.
    pub logical_processors: Option<usize>,
    /// Processors that this process may use.
    pub usable_processors: Option<usize>,
    /// Threads that compute where nothing is said.
    pub default_threads: usize,
    /// The best instruction set that this program has kernels for.
    pub isa: String,
    /// All such that the processor has.
    pub isas: Vec<String>,
    /// Memory nodes.
    pub numa_nodes: Option<usize>,
    /// Bytes of memory.
    pub memory: u64,
    /// Of these, available.
    pub available: u64,
    /// Bytes of swap.
    pub swap: Option<u64>,
    /// Of these, in use.
    pub swap_used: Option<u64>,
    /// When the system uses huge pages by itself: always, madvise or never.
    pub transparent_huge_pages: Option<String>,
    /// Share of time in percent, over the last 10 and 60 seconds, in which some task waited for memory.
    pub pressure: Option<Pressure>,
    /// Whether this program was built with optimisation.
    pub optimised: bool,
}

/// Memory pressure (PSI), in percent of time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Pressure {
    /// Some task waited, of the last 10 seconds.
    pub some_10: f64,
    /// Some task waited, of the last 60 seconds.
    pub some_60: f64,
    /// All tasks waited, of the last 60 seconds.
    pub full_60: f64,
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

impl Hardware {
    /// Looks at this machine.
    pub fn probe(machine: &Machine) -> Hardware {
        let cpuinfo = read("/proc/cpuinfo").unwrap_or_default();
        let meminfo = read("/proc/meminfo").unwrap_or_default();
        let swap = kib(&meminfo, "SwapTotal");
        Hardware {
            processor: value(&cpuinfo, "model name").map(str::to_owned),
            physical_cores: cores(&cpuinfo),
            logical_processors: Some(cpuinfo.lines().filter(|line| line.starts_with("processor")).count())
                .filter(|&n| n > 0),
            usable_processors: std::thread::available_parallelism().ok().map(usize::from),
            default_threads: default_threads(),
            isa: Isa::detect().to_string(),
            isas: Isa::ALL.into_iter().filter(|isa| isa.is_supported()).map(|isa| isa.to_string()).collect(),
            numa_nodes: read("/sys/devices/system/node/online").and_then(|text| listed(&text)),
            memory: machine.total,
            available: machine.available,
            swap,
            swap_used: swap.zip(kib(&meminfo, "SwapFree")).map(|(all, free)| all.saturating_sub(free)),
            transparent_huge_pages: read("/sys/kernel/mm/transparent_hugepage/enabled")
                .and_then(|text| chosen(&text)),
            pressure: read("/proc/pressure/memory").and_then(|text| pressure(&text)),
            optimised: !cfg!(debug_assertions),
        }
    }

    /// Rows for people.
    pub fn rows(&self) -> Vec<[String; 2]> {
        let known = |n: Option<usize>| n.map_or("?".to_owned(), |n| n.to_string());
        let some = |n: Option<usize>, noun: &str| n.map_or(format!("? {noun}s"), |n| count(n, noun));
        let mut rows = vec![
            [
                "processor".into(),
                format!(
                    "{}; {}, {}, {} usable; {}",
                    self.processor.as_deref().unwrap_or("unknown"),
                    some(self.physical_cores, "core"),
                    some(self.logical_processors, "processor"),
                    known(self.usable_processors),
                    count(self.default_threads, "compute thread")
                ),
            ],
            ["kernels".into(), format!("{} (of {})", self.isa, self.isas.join(", "))],
            [
                "memory".into(),
                format!(
                    "{} of {} available; swap {} of {} used; {}; huge pages {}",
                    size(self.available),
                    size(self.memory),
                    self.swap_used.map_or("?".to_owned(), size),
                    self.swap.map_or("?".to_owned(), size),
                    some(self.numa_nodes, "memory node"),
                    self.transparent_huge_pages.as_deref().unwrap_or("unknown")
                ),
            ],
        ];
        let pressure = self.pressure.map_or("not told by this system".to_owned(), |p| {
            format!(
                "some {:.1} % of 10 s, {:.1} % of 60 s; all {:.1} % of 60 s",
                p.some_10, p.some_60, p.full_60
            )
        });
        rows.push(["pressure".into(), pressure]);
        rows
    }
}

/// What stands behind `name:` first.
fn value<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
}

fn kib(meminfo: &str, name: &str) -> Option<u64> {
    value(meminfo, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Distinct (package, core) of a cpuinfo.
fn cores(cpuinfo: &str) -> Option<usize> {
    let blocks = cpuinfo.split("\n\n").filter(|block| value(block, "processor").is_some());
    let pairs: Option<BTreeSet<_>> =
        blocks.map(|block| Some((value(block, "physical id")?, value(block, "core id")?))).collect();
    pairs.map(|pairs| pairs.len()).filter(|&n| n > 0)
}

/// Members of a list such as `0-3,8`.
fn listed(text: &str) -> Option<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        last.checked_sub(first)?.checked_add(1)
    };
    text.trim().split(',').map(range).sum()
}

/// The word in brackets.
pub(super) fn chosen(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

fn pressure(text: &str) -> Option<Pressure> {
    let figure = |kind: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(kind))?;
        let word = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))?;
        word.parse().ok()
    };
    Some(Pressure {
        some_10: figure("some", "avg10")?,
        some_60: figure("some", "avg60")?,
        full_60: figure("full", "avg60")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hyper_threads_of_a_core_count_once() {
        let block = |cpu, core| format!("processor\t: {cpu}\nphysical id\t: 0\ncore id\t\t: {core}\n");
        let text = [block(0, 0), block(1, 0), block(2, 1)].join("\n");
        assert_eq!(cores(&text), Some(2));
        assert_eq!(cores("processor : 0\n"), None);
        assert_eq!(cores(""), None);
    }

    #[test]
    fn lists_brackets_and_pressure_are_read() {
        assert_eq!(
            (listed("0\n"), listed("0-3,8\n"), listed("x"), listed("3-1")),
            (Some(1), Some(5), None, None)
        );
        assert_eq!(chosen("always [madvise] never\n").as_deref(), Some("madvise"));
        let text = "some avg10=1.50 avg60=0.25 avg300=0 total=1\nfull avg10=0 avg60=0.05 avg300=0 total=1\n";
        assert_eq!(pressure(text), Some(Pressure { some_10: 1.5, some_60: 0.25, full_60: 0.05 }));
        assert_eq!(pressure("some avg10=x"), None);
        assert_eq!(kib("SwapTotal:  12 kB\n", "SwapTotal"), Some(12_288));
    }
}
