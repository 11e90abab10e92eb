//! Where a directory's bytes lie: file system and drive.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::machine::chosen;

/// A file system and the drive below it, as far as the system tells.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Storage {
    /// What was asked about.
    pub path: String,
    /// Kind of file system.
    pub file_system: Option<String>,
    /// Where it is mounted.
    pub mount: Option<String>,
    /// What is mounted.
    pub source: Option<String>,
    /// Name of the block device.
    pub device: Option<String>,
    /// Whether it has moving parts.
    pub rotational: Option<bool>,
    /// Its queue's scheduler.
    pub scheduler: Option<String>,
}

/// One line of mountinfo.
struct Mount {
    /// `major:minor`
    number: String,
    point: PathBuf,
    kind: String,
    source: String,
}

impl Storage {
    /// What a path lies on.
    pub fn of(path: &Path) -> Storage {
        let shown = path.to_string_lossy().into_owned();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let Some(mount) = path.canonicalize().ok().and_then(|path| mount_of(&mounts, &path)) else {
            return Storage { path: shown, ..Storage::default() };
        };
        let (device, queue) = device(Path::new("/sys/dev/block"), &mount.number);
        let setting = |name: &str| fs::read_to_string(queue.as_ref()?.join(name)).ok();
        Storage {
            path: shown,
            file_system: Some(mount.kind),
            mount: Some(mount.point.to_string_lossy().into_owned()),
            source: Some(mount.source),
            device,
            rotational: setting("rotational").map(|text| text.trim() == "1"),
            scheduler: setting("scheduler").and_then(|text| chosen(&text)),
        }
    }

    /// Whether a network, a virtual machine's host or a program stands between the files and a drive.
    pub fn remote(&self) -> bool {
        let kind = self.file_system.as_deref().unwrap_or_default();
        ["nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "fuse"].contains(&kind)
            || kind.starts_with("fuse.")
    }

    /// For people.
    pub fn to_words(&self) -> String {
        let known = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".into());
        let turning = match self.rotational {
            Some(true) => "turning disk by its own word",
            Some(false) => "no moving parts",
            None => "unknown kind",
        };
        format!(
            "{}: {} on {} at {}; device {}, {turning}, scheduler {}",
            self.path,
            known(&self.file_system),
            known(&self.source),
            known(&self.mount),
            known(&self.device),
            known(&self.scheduler)
        )
    }
}

/// The innermost mount that holds a path; of several at one place the last, which hides the others.
fn mount_of(mountinfo: &str, path: &Path) -> Option<Mount> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut mount = mount.split_whitespace().skip(2);
        let (number, point) = (mount.next()?.to_owned(), unescape(mount.nth(1)?));
        let mut filesystem = filesystem.split_whitespace();
        let (kind, source) = (filesystem.next()?.to_owned(), filesystem.next()?.to_owned());
        Some(Mount { number, point: point.into(), kind, source })
    });
    mounts.filter(|mount| path.starts_with(&mount.point)).max_by_key(|mount| mount.point.components().count())
}

/// Mountinfo writes blanks and backslashes as three octal digits.
fn unescape(text: &str) -> String {
    let codes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    codes.iter().fold(text.to_owned(), |text, (code, plain)| text.replace(code, plain))
}

/// Name and queue directory of a block device; a partition has its drive's queue.
fn device(devices: &Path, number: &str) -> (Option<String>, Option<PathBuf>) {
    let Ok(found) = devices.join(number).canonicalize() else { return (None, None) };
    let name = found.file_name().map(|name| name.to_string_lossy().into_owned());
    let queues = [found.join("queue"), found.join("../queue")];
    (name, queues.into_iter().find(|queue| queue.is_dir()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_mount_counts() {
        let mounts = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n\
                      2 1 0:40 / /data\\040x rw shared:1 - nfs4 host:/x rw\n\
                      3 1 8:2 / /data\\040x/fast rw - xfs /dev/sda2 rw\n";
        let of = |path: &str| mount_of(mounts, Path::new(path)).map(|mount| (mount.kind, mount.number));
        assert_eq!(of("/home/a"), Some(("ext4".into(), "8:1".into())));
        assert_eq!(of("/data x/m"), Some(("nfs4".into(), "0:40".into())));
        assert_eq!(of("/data x/fast/m"), Some(("xfs".into(), "8:2".into())));
        assert_eq!(of("/data xy"), Some(("ext4".into(), "8:1".into())));
        assert!(mount_of("nonsense\n", Path::new("/")).is_none());
    }

    #[test]
    fn a_partition_has_its_drives_queue() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("8:0/queue")).unwrap();
        fs::create_dir_all(dir.path().join("8:0/sda1")).unwrap();
        let (name, queue) = device(dir.path(), "8:0/sda1");
        assert_eq!(name.as_deref(), Some("sda1"));
        assert!(queue.is_some_and(|queue| queue.is_dir()));
        assert_eq!(device(dir.path(), "9:9"), (None, None));
        let remote = |kind: &str| Storage { file_system: Some(kind.into()), ..Storage::default() }.remote();
        assert!(remote("nfs4") && remote("fuse.sshfs") && !remote("ext4") && !remote("overlay"));
    }
}
