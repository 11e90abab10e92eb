//! How many threads compute should take.

use std::collections::BTreeSet;
use std::path::Path;

/// Physical cores that this process may run on: those of the affinity mask it was started with,
/// two hyper-threads counting as one, and no more than the cgroup's CPU quota (rounded up).
///
/// Where the system does not tell, [`std::thread::available_parallelism`].
pub fn default_threads() -> usize {
    let fallback = || std::thread::available_parallelism().map_or(1, usize::from);
    // Systems without these files have no mask either, and no quota.
    let cores =
        physical_cores(Path::new("/sys/devices/system/cpu"), &allowed_cpus()).unwrap_or_else(fallback);
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    cores.min(cgroup_quota(Path::new("/sys/fs/cgroup"), &own).unwrap_or(usize::MAX)).max(1)
}

/// Numbers of the CPUs in this thread's affinity mask; empty where it cannot be read.
#[cfg(target_os = "linux")]
fn allowed_cpus() -> Vec<usize> {
    // 8192 CPUs: the kernel refuses a mask smaller than its own.
    let mut mask = [0u64; 128];
    // SAFETY: the pointer and the byte count describe `mask`, which the call fills.
    let rc = unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) };
    if rc != 0 {
        return Vec::new();
    }
    (0..mask.len() * 64).filter(|cpu| mask[cpu / 64] >> (cpu % 64) & 1 == 1).collect()
}

/// Other systems have no such mask.
#[cfg(not(target_os = "linux"))]
fn allowed_cpus() -> Vec<usize> {
    Vec::new()
}

/// Distinct (package, core) among `cpus`; `None` where the topology cannot be read.
fn physical_cores(sys: &Path, cpus: &[usize]) -> Option<usize> {
    let number = |cpu: &usize, what: &str| -> Option<i64> {
        let text = std::fs::read_to_string(sys.join(format!("cpu{cpu}/topology/{what}"))).ok()?;
        text.trim().parse().ok()
    };
    let cores: Option<BTreeSet<_>> =
        cpus.iter().map(|cpu| Some((number(cpu, "physical_package_id")?, number(cpu, "core_id")?))).collect();
    cores.map(|cores| cores.len()).filter(|count| *count > 0)
}

/// The smallest CPU quota of the process's cgroup and its parents, in whole CPUs, at least 1.
///
/// `own` is `/proc/self/cgroup`: `0::/path` for version 2, `N:cpu,cpuacct:/path` for version 1.
fn cgroup_quota(root: &Path, own: &str) -> Option<usize> {
    let mut least = None;
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let v1 = controllers.split(',').any(|c| c == "cpu");
        if !v1 && !controllers.is_empty() {
            continue;
        }
        let base = if v1 { root.join("cpu") } else { root.to_path_buf() };
        // Inside a container the path may not exist below the root: its parents still do.
        let mut dir = Path::new(path.trim_start_matches('/'));
        loop {
            let quota = if v1 { quota_v1(&base.join(dir)) } else { quota_v2(&base.join(dir)) };
            least = quota.into_iter().chain(least).min();
            match dir.parent() {
                Some(parent) => dir = parent,
                None => break,
            }
        }
    }
    least
}

fn whole_cpus(quota: i64, period: i64) -> Option<usize> {
    (quota > 0 && period > 0)
        .then(|| usize::try_from(quota.saturating_add(period - 1) / period).unwrap_or(usize::MAX))
}

/// `cpu.max`: `max 100000` or `quota period`, in microseconds.
fn quota_v2(dir: &Path) -> Option<usize> {
    let text = std::fs::read_to_string(dir.join("cpu.max")).ok()?;
    let (quota, period) = text.trim().split_once(' ')?;
    whole_cpus(quota.parse().ok()?, period.parse().ok()?)
}

fn quota_v1(dir: &Path) -> Option<usize> {
    let number = |name: &str| std::fs::read_to_string(dir.join(name)).ok()?.trim().parse::<i64>().ok();
    whole_cpus(number("cpu.cfs_quota_us")?, number("cpu.cfs_period_us")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, text: &str) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn hyper_threads_count_once_and_the_mask_is_respected() {
        let dir = tempfile::tempdir().unwrap();
        for cpu in 0..8 {
            write(
                &dir.path().join(format!("cpu{cpu}/topology/physical_package_id")),
                &format!("{}\n", cpu / 4),
            );
            write(&dir.path().join(format!("cpu{cpu}/topology/core_id")), &format!("{}\n", cpu % 2));
        }
        assert_eq!(physical_cores(dir.path(), &[0, 1, 2, 3, 4, 5, 6, 7]), Some(4));
        assert_eq!(physical_cores(dir.path(), &[0, 2]), Some(1));
        assert_eq!(physical_cores(dir.path(), &[0, 99]), None);
        assert_eq!(physical_cores(dir.path(), &[]), None);
    }

    #[test]
    fn the_tightest_quota_of_the_nesting_counts() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("a/cpu.max"), "250000 100000\n");
        write(&dir.path().join("a/b/cpu.max"), "max 100000\n");
        assert_eq!(cgroup_quota(dir.path(), "0::/a/b\n"), Some(3));
        write(&dir.path().join("a/b/cpu.max"), "50000 100000\n");
        assert_eq!(cgroup_quota(dir.path(), "0::/a/b\n"), Some(1));
        assert_eq!(cgroup_quota(dir.path(), "0::/\n"), None);
        assert_eq!(cgroup_quota(dir.path(), "garbage"), None);
    }

    #[test]
    fn version_one_quota_is_read_and_minus_one_is_none() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("cpu/job/cpu.cfs_quota_us"), "400000\n");
        write(&dir.path().join("cpu/job/cpu.cfs_period_us"), "100000\n");
        write(&dir.path().join("cpu/cpu.cfs_quota_us"), "-1\n");
        write(&dir.path().join("cpu/cpu.cfs_period_us"), "100000\n");
        assert_eq!(cgroup_quota(dir.path(), "4:memory:/x\n3:cpu,cpuacct:/job\n"), Some(4));
    }

    #[test]
    fn there_is_always_a_thread() {
        assert!(default_threads() >= 1);
    }
}
