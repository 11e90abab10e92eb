//! What memory there is: the system's, the control groups' (v1 and v2, nested), and our own share of it.
//!
//! All parsers are pure functions; only [`Machine`]'s calls without `self` read the system.

use std::io;
use std::path::{Path, PathBuf};

use metaltail_container::is_out_of_handles;

#[cfg(any(target_os = "macos", test))]
mod darwin;
mod pressure;
#[cfg(not(target_os = "macos"))]
mod proc;

#[cfg(target_os = "macos")]
use darwin as system;
#[cfg(not(target_os = "macos"))]
use proc as system;

/// One control group with a memory limit, the process's own or an ancestor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupLevel {
    /// Its directory.
    pub path: PathBuf,
    /// Limit in bytes.
    pub limit: u64,
    /// Bytes in use that cannot be reclaimed: usage without file pages.
    pub used: u64,
}

/// A directory of the hierarchy that accounts memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryGroup {
    /// The process's own directory.
    pub dir: PathBuf,
    /// Where the hierarchy is mounted.
    pub mount: PathBuf,
    /// Whether it is the unified hierarchy (v2).
    pub unified: bool,
}

/// Memory as it is now, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// All of it (Linux: `MemTotal`).
    pub total: u64,
    /// What programs may still have without anything being pushed out (Linux: `MemAvailable`).
    pub available: u64,
    /// Anonymous memory of this process (Linux: `RssAnon`; macOS: the footprint, in which compressed memory
    /// counts): current, not the peak, and without file pages.
    pub own_anon: u64,
    /// Control groups with a limit, the process's own first, then its ancestors.
    pub cgroups: Vec<CgroupLevel>,
}

impl Machine {
    /// Reads the system's state.
    ///
    /// # Errors
    /// When the system does not say what memory there is.
    pub fn probe() -> io::Result<Machine> {
        Machine::read().map_err(|error| match is_out_of_handles(&error) {
            true => io::Error::new(error.kind(), format!("{error}: raise the limit with `ulimit -n`")),
            false => error,
        })
    }

    fn read() -> io::Result<Machine> {
        let read = |path: &Path| std::fs::read_to_string(path).ok();
        let (total, available) = system::memory()?;
        // Systems without control groups have neither file.
        let own = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
        let mounts = read(Path::new("/proc/self/mountinfo")).unwrap_or_default();
        let cgroups = cgroup_levels(&own, &mounts, &read);
        Ok(Machine { total, available, own_anon: Machine::own_anon_now()?, cgroups })
    }

    /// Share of the last ten seconds, in percent, in which some of the processes that share this one's memory
    /// limit waited for memory: of its control group (v2) where that is told, else of the machine.
    /// `None` where the system keeps no such account.
    pub fn memory_pressure() -> Option<f64> {
        let read = |path: &Path| std::fs::read_to_string(path).ok();
        let own = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
        let mounts = read(Path::new("/proc/self/mountinfo")).unwrap_or_default();
        let groups = mounts.lines().filter_map(|line| hierarchy(line, &own));
        let group = groups.filter(|h| h.version == Version::V2).map(|h| h.own.join("memory.pressure"));
        let files = group.chain([PathBuf::from("/proc/pressure/memory")]);
        files.into_iter().find_map(|file| pressure::some_avg10(&read(&file)?))
    }

    /// This process's place in the hierarchy that accounts memory, where there is one.
    pub fn memory_group() -> Option<MemoryGroup> {
        let read = |path: &Path| std::fs::read_to_string(path).ok();
        let own = read(Path::new("/proc/self/cgroup"))?;
        memory_group(&own, &read(Path::new("/proc/self/mountinfo"))?, &read)
    }

    /// This process's anonymous memory now, for [`crate::ExpertStore::enforce`].
    ///
    /// # Errors
    /// When the system does not say.
    pub fn own_anon_now() -> io::Result<u64> {
        system::own_anon()
    }

    /// Anonymous memory of this process that the system has swapped out or compressed, in bytes; zero where
    /// the system does not say.
    pub fn own_swapped_now() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        kib_field(&status, "VmSwap").unwrap_or(0)
    }

    /// The group that lets this process have least, and how much in all: its limit less what others use.
    pub fn tightest(&self) -> Option<(&CgroupLevel, u64)> {
        let room = |level: &CgroupLevel| level.limit.saturating_sub(level.used.saturating_sub(self.own_anon));
        self.cgroups.iter().map(|level| (level, room(level))).min_by_key(|&(_, room)| room)
    }

    /// The smallest limit of any group, which no explicit limit may exceed.
    pub fn smallest_limit(&self) -> Option<&CgroupLevel> {
        self.cgroups.iter().min_by_key(|level| level.limit)
    }

    /// Bytes of anonymous memory that this process may have in all without anything being pushed out.
    pub fn headroom(&self) -> u64 {
        let memory = self.available.saturating_add(self.own_anon).min(self.total);
        self.tightest().map_or(memory, |(_, room)| room.min(memory))
    }
}

/// The value of `name:` in bytes, from a line such as `RssAnon:     1234 kB`.
fn kib_field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The value of `name` in a `memory.stat`.
fn stat_field(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(|l| l.split_whitespace());
    lines.find_map(|mut words| (words.next()? == name).then(|| words.next()?.parse().ok())?)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// A mounted hierarchy and our directory in it.
struct Hierarchy {
    version: Version,
    mount: PathBuf,
    own: PathBuf,
}

/// Our path in the hierarchy: `id:controllers:path`, where v2 has no controllers.
fn own_path(cgroup: &str, version: Version) -> Option<&str> {
    cgroup.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let ours = match version {
            Version::V1 => controllers.split(',').any(|c| c == "memory"),
            Version::V2 => controllers.is_empty(),
        };
        ours.then_some(path)
    })
}

/// One line of mountinfo: `id parent dev root mount options… - type source super-options`.
fn hierarchy(line: &str, cgroup: &str) -> Option<Hierarchy> {
    let (mount, filesystem) = line.split_once(" - ")?;
    let mut filesystem = filesystem.split_whitespace();
    let version = match filesystem.next()? {
        "cgroup2" => Version::V2,
        "cgroup" if filesystem.last()?.split(',').any(|o| o == "memory") => Version::V1,
        _ => return None,
    };
    let mut fields = mount.split_whitespace().skip(3);
    let (root, point) = (unescape(fields.next()?), PathBuf::from(unescape(fields.next()?)));
    // In a container the mount often shows a part of the hierarchy. A path outside that part, or one
    // relative to another namespace (`/../x`), is out of sight: the mount's top is the nearest ancestor.
    let path = Path::new(own_path(cgroup, version)?);
    let inside = path.strip_prefix(&root).ok().filter(|p| p.components().all(|c| c.as_os_str() != ".."));
    let own = inside.map_or_else(|| point.clone(), |p| point.join(p));
    Some(Hierarchy { version, mount: point, own })
}

/// Mountinfo writes blanks and backslashes as three octal digits.
fn unescape(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_string(), |text, (code, plain)| text.replace(code, plain))
}

/// All groups with a limit from our own up to the mount, of every hierarchy that accounts memory.
fn cgroup_levels(cgroup: &str, mountinfo: &str, read: &dyn Fn(&Path) -> Option<String>) -> Vec<CgroupLevel> {
    let hierarchies = mountinfo.lines().filter_map(|line| hierarchy(line, cgroup));
    let mut levels = Vec::new();
    for Hierarchy { version, mount, own } in hierarchies {
        let within = own.ancestors().take_while(|dir| dir.starts_with(&mount));
        levels.extend(within.filter_map(|dir| level(version, dir, read)));
    }
    levels
}

/// The hierarchy whose groups have a memory controller: where both versions are mounted, only one has.
fn memory_group(
    cgroup: &str,
    mountinfo: &str,
    read: &dyn Fn(&Path) -> Option<String>,
) -> Option<MemoryGroup> {
    let mut hierarchies = mountinfo.lines().filter_map(|line| hierarchy(line, cgroup));
    let found = hierarchies.find(|h| {
        let controllers = || read(&h.mount.join("cgroup.controllers")).unwrap_or_default();
        h.version == Version::V1 || controllers().split_whitespace().any(|name| name == "memory")
    })?;
    Some(MemoryGroup { dir: found.own, mount: found.mount, unified: found.version == Version::V2 })
}

/// A v1 group without limit has the largest multiple of a page below 2^63.
const UNLIMITED: u64 = 1 << 62;

fn level(version: Version, dir: &Path, read: &dyn Fn(&Path) -> Option<String>) -> Option<CgroupLevel> {
    let number = |name: &str| read(&dir.join(name))?.trim().parse::<u64>().ok();
    let stat = read(&dir.join("memory.stat")).unwrap_or_default();
    let field = |name: &str| stat_field(&stat, name);
    let (limit, usage, cache) = match version {
        Version::V1 => {
            // Ancestors above the mount show in the hierarchical limit only.
            let limits = [number("memory.limit_in_bytes"), field("hierarchical_memory_limit")];
            let cache = [field("total_inactive_file"), field("total_active_file")];
            (limits.into_iter().flatten().min(), number("memory.usage_in_bytes"), cache)
        }
        Version::V2 => {
            // `memory.max` is a number or "max".
            let cache = [field("inactive_file"), field("active_file")];
            (number("memory.max"), number("memory.current"), cache)
        }
    };
    let limit = limit.filter(|&l| l < UNLIMITED)?;
    let cache = cache.into_iter().flatten().fold(0u64, u64::saturating_add);
    let used = usage.unwrap_or(0).saturating_sub(cache);
    Some(CgroupLevel { path: dir.to_path_buf(), limit, used })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn levels(cgroup: &str, mounts: &str, files: &[(&str, &str)]) -> Vec<CgroupLevel> {
        let read =
            |path: &Path| files.iter().find(|(p, _)| Path::new(p) == path).map(|(_, text)| text.to_string());
        cgroup_levels(cgroup, mounts, &read)
    }

    #[test]
    fn memory_is_accounted_by_one_hierarchy() {
        let v1 = "3 1 0:9 / /cg/memory rw - cgroup cgroup rw,memory\n";
        let v2 = "2 1 0:8 / /cg/unified rw - cgroup2 cgroup2 rw\n";
        let own = "4:memory:/a\n0::/b\n";
        let group = |mounts: &str, controllers: &str| {
            let read = |path: &Path| {
                (path == Path::new("/cg/unified/cgroup.controllers")).then(|| controllers.to_owned())
            };
            memory_group(own, mounts, &read).map(|group| (group.dir, group.unified))
        };
        assert_eq!(group(&format!("{v2}{v1}"), "pids"), Some(("/cg/memory/a".into(), false)));
        assert_eq!(group(v2, "cpu memory pids"), Some(("/cg/unified/b".into(), true)));
        assert_eq!(group(v2, "cpu"), None);
    }

    fn level(path: &str, limit: u64, used: u64) -> CgroupLevel {
        CgroupLevel { path: path.into(), limit, used }
    }

    #[test]
    fn nested_v2_groups_are_all_seen() {
        let mounts = "24 1 0:22 / /proc rw - proc proc rw\n\
                      30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let found = levels(
            "0::/user.slice/job.scope\n",
            mounts,
            &[
                ("/sys/fs/cgroup/user.slice/job.scope/memory.max", "max\n"),
                ("/sys/fs/cgroup/user.slice/memory.max", "8388608000\n"),
                ("/sys/fs/cgroup/user.slice/memory.current", "5000\n"),
                (
                    "/sys/fs/cgroup/user.slice/memory.stat",
                    "anon 1000\nfile 4000\ninactive_file 1500\nactive_file 500\n",
                ),
            ],
        );
        assert_eq!(found, [level("/sys/fs/cgroup/user.slice", 8_388_608_000, 3000)]);
    }

    #[test]
    fn v1_counts_hierarchical_limits_and_skips_unlimited_groups() {
        let mounts = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        let cgroup = "5:cpu:/elsewhere\n4:memory:/job/inner\n0::/\n";
        let found = levels(
            cgroup,
            mounts,
            &[
                ("/sys/fs/cgroup/memory/job/inner/memory.limit_in_bytes", "9223372036854771712\n"),
                ("/sys/fs/cgroup/memory/job/inner/memory.usage_in_bytes", "700\n"),
                (
                    "/sys/fs/cgroup/memory/job/inner/memory.stat",
                    "hierarchical_memory_limit 104857600\ntotal_inactive_file 100\ntotal_active_file 200\n",
                ),
                ("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "104857600\n"),
                ("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "900\n"),
                ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ],
        );
        let base = "/sys/fs/cgroup/memory/job";
        assert_eq!(found, [level(&format!("{base}/inner"), 100 * MIB, 400), level(base, 100 * MIB, 900)]);
    }

    #[test]
    fn a_container_sees_its_part_of_the_hierarchy() {
        let files = [
            ("/cg/memory.max", "1048576\n"),
            ("/cg/memory.current", "10\n"),
            ("/cg/sub/memory.max", "4096\n"),
        ];
        let mounts = "30 24 0:26 /docker/abc /cg rw - cgroup2 cgroup2 rw\n";
        assert_eq!(levels("0::/docker/abc\n", mounts, &files), [level("/cg", MIB, 10)]);
        assert_eq!(
            levels("0::/docker/abc/sub\n", mounts, &files),
            [level("/cg/sub", 4096, 0), level("/cg", MIB, 10)]
        );
        assert_eq!(levels("0::/../other\n", mounts, &files), [level("/cg", MIB, 10)]);
    }

    #[test]
    fn broken_texts_give_no_limit() {
        assert_eq!(levels("", "", &[]), []);
        assert_eq!(levels("nonsense\n0::", "x y - cgroup2\n1 2 3 / - cgroup2 a b\n", &[]), []);
        assert_eq!(kib_field("RssAnon: 12 kB", "RssAnon"), Some(12_288));
        assert_eq!(kib_field("RssAnon: many kB", "RssAnon"), None);
        assert_eq!(kib_field("RssAnonX: 12 kB", "RssAnon"), None);
    }

    #[test]
    fn the_tightest_group_is_not_always_the_smallest_limit() {
        let machine = Machine {
            total: 64 * MIB,
            available: 50 * MIB,
            own_anon: MIB,
            cgroups: vec![level("/a/b", 20 * MIB, 2 * MIB), level("/a", 30 * MIB, 26 * MIB)],
        };
        // /a/b leaves 20 - (2 - 1); /a leaves 30 - (26 - 1).
        assert_eq!(machine.tightest().map(|(l, room)| (l.limit, room)), Some((30 * MIB, 5 * MIB)));
        assert_eq!(machine.smallest_limit().map(|l| l.limit), Some(20 * MIB));
        assert_eq!(machine.headroom(), 5 * MIB);
        let free = Machine { cgroups: vec![], ..machine };
        assert_eq!(free.headroom(), 51 * MIB);
    }

    #[test]
    fn the_probe_finds_this_machine() {
        if !cfg!(any(target_os = "linux", target_os = "macos")) {
            return;
        }
        let machine = Machine::probe().unwrap();
        assert!(machine.total > 0 && machine.available <= machine.total && machine.own_anon > 0);
        assert!(machine.headroom() > 0);
    }
}
