//! What macOS says of memory. Type-checked and linked for it; never run by who wrote it.

/// Pages of memory by their use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pages {
    /// Of programs, not of files.
    pub(super) internal: u64,
    /// Of these, what a program has said may be dropped.
    pub(super) purgeable: u64,
    /// That must stay.
    pub(super) wired: u64,
    /// That hold compressed ones.
    pub(super) compressor: u64,
}

/// Bytes that programs may still have without anything being pushed out: all but what others than files hold. That
/// is what Linux calls available, and what Activity Monitor does not count as used.
pub(super) fn available(total: u64, pages: &Pages, page: u64) -> u64 {
    let kept = pages.internal.saturating_sub(pages.purgeable);
    let used = kept.saturating_add(pages.wired).saturating_add(pages.compressor);
    total.saturating_sub(used.saturating_mul(page))
}

#[cfg(target_os = "macos")]
mod system {
    use std::io;
    use std::ptr;

    use super::{Pages, available};

    fn total() -> io::Result<u64> {
        let mut bytes = 0u64;
        let mut len = size_of::<u64>();
        let name = c"hw.memsize".as_ptr();
        // SAFETY: the name ends with a zero byte, `bytes` has `len` bytes, and nothing is set.
        let code =
            unsafe { libc::sysctlbyname(name, (&raw mut bytes).cast(), &raw mut len, ptr::null_mut(), 0) };
        if code == 0 { Ok(bytes) } else { Err(io::Error::last_os_error()) }
    }

    fn pages() -> io::Result<Pages> {
        // SAFETY: the structure consists of numbers, for which zero is a value.
        let mut told: libc::vm_statistics64 = unsafe { std::mem::zeroed() };
        let mut count = libc::HOST_VM_INFO64_COUNT;
        let out = (&raw mut told).cast();
        #[allow(deprecated)] // libc sends its users to another crate for this name.
        // SAFETY: a name for this machine, which has no conditions.
        let host = unsafe { libc::mach_host_self() };
        // SAFETY: `told` has `count` integers, of which the call fills as many as the system knows.
        let code = unsafe { libc::host_statistics64(host, libc::HOST_VM_INFO64, out, &raw mut count) };
        if code != libc::KERN_SUCCESS {
            return Err(io::Error::other(format!("host_statistics64 says {code}")));
        }
        Ok(Pages {
            internal: told.internal_page_count.into(),
            purgeable: told.purgeable_count.into(),
            wired: told.wire_count.into(),
            compressor: told.compressor_page_count.into(),
        })
    }

    /// Bytes of memory, and those available.
    pub(in super::super) fn memory() -> io::Result<(u64, u64)> {
        let total = total()?;
        Ok((total, available(total, &pages()?, rustix::param::page_size() as u64)))
    }

    /// The process's footprint: its anonymous memory, compressed or swapped out as well.
    pub(in super::super) fn own_anon() -> io::Result<u64> {
        // SAFETY: as above.
        let mut told: libc::rusage_info_v4 = unsafe { std::mem::zeroed() };
        // SAFETY: the flavour is that of the structure, which the call fills.
        let code =
            unsafe { libc::proc_pid_rusage(libc::getpid(), libc::RUSAGE_INFO_V4, (&raw mut told).cast()) };
        if code == 0 { Ok(told.ri_phys_footprint) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(target_os = "macos")]
pub(super) use system::{memory, own_anon};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_what_may_be_dropped_count_as_available() {
        let pages = Pages { internal: 300, purgeable: 100, wired: 50, compressor: 25 };
        assert_eq!(available(1000 * 16384, &pages, 16384), (1000 - 275) * 16384);
        assert_eq!(available(1000, &Pages::default(), 16384), 1000);
    }

    #[test]
    fn more_used_than_there_is_leaves_nothing() {
        let pages = Pages { internal: u64::MAX, purgeable: 0, wired: 1, compressor: 1 };
        assert_eq!(available(1 << 40, &pages, 16384), 0);
    }
}
