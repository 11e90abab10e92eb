//! Where something was measured: program, machine, storage.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use metaltail_kernels::default_threads;
use metaltail_store::Machine;
use serde_json::{Value, json};

/// What the figures were measured on; null where the system does not say.
pub fn machine() -> Value {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    let memory = Machine::probe().ok();
    let group = memory.as_ref().and_then(|memory| memory.smallest_limit()).map(|level| level.limit);
    json!({
        "program": env!("CARGO_PKG_VERSION"),
        "optimised": !cfg!(debug_assertions),
        "system": std::env::consts::OS,
        "kernel": line_of("/proc/sys/kernel/osrelease"),
        "architecture": std::env::consts::ARCH,
        "processor": cpu,
        "logical_processors": std::thread::available_parallelism().ok().map(|n| n.get()),
        "physical_cores": default_threads(),
        "memory_nodes": line_of("/sys/devices/system/node/online"),
        "memory_bytes": memory.as_ref().map(|memory| memory.total),
        "memory_available_bytes": memory.as_ref().map(|memory| memory.available),
        "memory_limit_bytes": group,
    })
}

fn line_of(path: &str) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Version, commit and build of this program.
pub fn program() -> Value {
    let (commit, changed) = match option_env!("METALTAIL_COMMIT") {
        Some(commit) => (Some(commit.to_owned()), None),
        None => checkout().unwrap_or((None, None)),
    };
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "commit": commit,
        "changed": changed,
        "optimised": !cfg!(debug_assertions),
    })
}

/// The commit of the checkout that this program lies in or is run in, and whether files were changed
/// since. A checkout of something else says nothing.
fn checkout() -> Option<(Option<String>, Option<bool>)> {
    let beside_program = std::env::current_exe().ok().and_then(|path| Some(path.parent()?.to_owned()));
    let places = [beside_program, std::env::current_dir().ok()];
    let top = places.into_iter().flatten().find_map(|dir| {
        let top = PathBuf::from(git(&dir, &["rev-parse", "--show-toplevel"])?);
        top.join("crates/bench/src/harness.rs").exists().then_some(top)
    })?;
    let changed = git(&top, &["status", "--porcelain", "--untracked-files=no"]).map(|text| !text.is_empty());
    Some((git(&top, &["rev-parse", "HEAD"]), changed))
}

fn git(dir: &Path, words: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(dir).args(words).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

/// The file system that a directory lies in: kind and source.
pub fn storage(dir: &Path) -> Value {
    let found = std::fs::canonicalize(dir).ok().and_then(|dir| {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        mounted_at(&mounts, &dir)
    });
    match found {
        Some((kind, source)) => json!({"file_system": kind, "source": source}),
        None => Value::Null,
    }
}

/// Kind and source of the deepest mount above a path, the last of several.
fn mounted_at(mountinfo: &str, dir: &Path) -> Option<(String, String)> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (mount, system) = line.split_once(" - ")?;
        let point = mount.split_whitespace().nth(4)?.replace("\\040", " ");
        let mut fields = system.split_whitespace();
        let (kind, source) = (fields.next()?.to_owned(), fields.next()?.to_owned());
        dir.starts_with(&point).then_some((point.len(), (kind, source)))
    });
    mounts.max_by_key(|(depth, _)| *depth).map(|(_, found)| found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deepest_mount_counts() {
        let mounts = "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 8:2 / /data\\040b rw - xfs /dev/sdb rw\n";
        let found = |dir: &str| mounted_at(mounts, Path::new(dir)).map(|(kind, _)| kind);
        assert_eq!(found("/data b/model").as_deref(), Some("xfs"));
        assert_eq!(found("/data").as_deref(), Some("ext4"));
        assert_eq!(mounted_at("x", Path::new("/")), None);
    }
}
