//! A control group with a memory limit for one process.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use metaltail_store::{Machine, MemoryGroup};

/// Begins the names of groups; the number of the process that made one follows.
const PREFIX: &str = "metaltail-bench-";

/// What puts a process into the group that the first word names, before it becomes the program.
pub const ENTER: &str = r#"echo $$ > "$0/cgroup.procs" && exec "$@""#;

/// A group that is removed when this is dropped.
pub struct Group {
    dir: PathBuf,
    unified: bool,
}

impl Group {
    /// Makes a group of `limit` bytes.
    ///
    /// # Errors
    /// A sentence that says what the system lacks or refuses.
    pub fn make(limit: u64) -> Result<Group, String> {
        let own = Machine::memory_group().ok_or("this system has no control groups that account memory")?;
        let above = place(&own).ok_or_else(|| {
            let dir = own.dir.display();
            format!(
                "no control group from {dir} upwards gives its groups a memory limit (cgroup.subtree_control)"
            )
        })?;
        sweep(&above);
        let dir = above.join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir(&dir)
            .map_err(|error| format!("the control group {} cannot be made: {error}", dir.display()))?;
        let group = Group { dir, unified: own.unified };
        let (file, swap) = match group.unified {
            true => ("memory.max", "memory.swap.max"),
            false => ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
        };
        group.set(file, limit)?;
        // Without an account of swap there is no such file, and often no swap either.
        let most = if group.unified { 0 } else { limit };
        if group.dir.join(swap).exists() {
            group.set(swap, most)?;
        }
        Ok(group)
    }

    fn set(&self, file: &str, value: u64) -> Result<(), String> {
        let path = self.dir.join(file);
        fs::write(&path, value.to_string())
            .map_err(|error| format!("{} cannot be set: {error}", path.display()))
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The most bytes that it held, where the system keeps that.
    pub fn peak(&self) -> Option<u64> {
        let file = if self.unified { "memory.peak" } else { "memory.max_usage_in_bytes" };
        fs::read_to_string(self.dir.join(file)).ok()?.trim().parse().ok()
    }

    /// Whether the system ended a process of it for want of memory, where it keeps count.
    pub fn killed(&self) -> bool {
        let file = if self.unified { "memory.events" } else { "memory.oom_control" };
        kills(&fs::read_to_string(self.dir.join(file)).unwrap_or_default()) > 0
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The last process of a group may take a moment to leave it.
        for _ in 0..100 {
            if fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            sleep(Duration::from_millis(10));
        }
    }
}

/// The count of processes ended, which both versions write as a line `oom_kill N`.
fn kills(text: &str) -> u64 {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok()).unwrap_or(0)
}

/// Where groups may be made: beneath our own, or in the unified hierarchy beneath the nearest that hands the
/// controller down, since a group with processes cannot.
fn place(own: &MemoryGroup) -> Option<PathBuf> {
    if !own.unified {
        return Some(own.dir.clone());
    }
    let hands_down = |dir: &&Path| {
        let names = fs::read_to_string(dir.join("cgroup.subtree_control")).unwrap_or_default();
        names.split_whitespace().any(|name| name == "memory")
    };
    own.dir.ancestors().take_while(|dir| dir.starts_with(&own.mount)).find(hands_down).map(Path::to_owned)
}

/// Removes groups of processes that ended without doing so.
fn sweep(above: &Path) {
    let Ok(entries) = fs::read_dir(above) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<u32>().ok());
        if maker.is_some_and(|maker| !Path::new(&format!("/proc/{maker}")).exists()) {
            // One that still has processes refuses to go.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_were_ended_are_counted_by_either_version() {
        assert_eq!(kills("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"), 2);
        assert_eq!(kills("low 0\nmax 9\noom 1\noom_kill 1\noom_group_kill 0\n"), 1);
        assert_eq!(kills("oom_kill_disable 1\nunder_oom 0\n"), 0);
    }
}
