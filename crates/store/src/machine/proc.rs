//! What `/proc` says of memory: Linux, and systems that mimic it.

use std::io;

use super::kib_field;

/// Bytes of memory, and those available.
pub(super) fn memory() -> io::Result<(u64, u64)> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    let field = |name| {
        kib_field(&meminfo, name).ok_or_else(|| io::Error::other(format!("/proc/meminfo has no {name}")))
    };
    Ok((field("MemTotal")?, field("MemAvailable")?))
}

/// Anonymous memory of this process.
pub(super) fn own_anon() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    kib_field(&status, "RssAnon").ok_or_else(|| io::Error::other("/proc/self/status has no RssAnon"))
}
