//! Giving memory back to the system while its addresses stay, and keeping it from being swapped out.

use std::ffi::c_void;
use std::io;
use std::ops::Range;

/// The whole pages of the system between two addresses: theirs may be larger than slots are aligned to.
fn whole(base: usize, len: usize, page: usize) -> Range<usize> {
    let end = base.saturating_add(len) / page * page;
    let start = base.checked_next_multiple_of(page).unwrap_or(end);
    start.min(end)..end
}

/// Gives the whole pages within `len` bytes from `base` on back; they read as zeros then. Returns their bytes.
///
/// # Safety
/// The range lies in private anonymous memory of this process, and nobody else uses it.
pub(super) unsafe fn give_back(base: *mut u8, len: usize) -> io::Result<u64> {
    let pages = whole(base.addr(), len, rustix::param::page_size());
    if pages.is_empty() {
        return Ok(0);
    }
    // SAFETY: the pages lie in the range that the caller vouches for.
    unsafe { drop_pages(base.with_addr(pages.start).cast(), pages.len())? };
    Ok(pages.len() as u64)
}

/// Bytes of the whole pages of the system in a range.
pub(super) fn bytes(base: *mut u8, len: usize) -> u64 {
    whole(base.addr(), len, rustix::param::page_size()).len() as u64
}

/// Locks the whole pages within `len` bytes from `base` on; on Linux those that do not exist yet when they come
/// into being. Returns their bytes.
///
/// # Safety
/// The range lies in memory of this process that is mapped.
pub(super) unsafe fn lock(base: *mut u8, len: usize) -> io::Result<u64> {
    let pages = whole(base.addr(), len, rustix::param::page_size());
    if !pages.is_empty() {
        // SAFETY: the caller vouches for the range.
        unsafe { lock_pages(base.with_addr(pages.start).cast(), pages.len())? };
    }
    Ok(pages.len() as u64)
}

#[cfg(target_os = "linux")]
unsafe fn lock_pages(start: *mut c_void, len: usize) -> io::Result<()> {
    // SAFETY: the caller vouches for the range.
    unsafe { rustix::mm::mlock_with(start, len, rustix::mm::MlockFlags::ONFAULT)? };
    Ok(())
}

/// Elsewhere all pages of the range are brought into being: it has been filled, but for the rest of its last ones.
#[cfg(any(not(target_os = "linux"), test))]
unsafe fn lock_now(start: *mut c_void, len: usize) -> io::Result<()> {
    // SAFETY: the caller vouches for the range.
    unsafe { rustix::mm::mlock(start, len)? };
    Ok(())
}

#[cfg(not(target_os = "linux"))]
use lock_now as lock_pages;

/// Unlocks the whole pages within `len` bytes from `base` on. Returns their bytes.
///
/// # Safety
/// As [`lock`].
pub(super) unsafe fn unlock(base: *mut u8, len: usize) -> io::Result<u64> {
    let pages = whole(base.addr(), len, rustix::param::page_size());
    if !pages.is_empty() {
        // SAFETY: the caller vouches for the range.
        unsafe { rustix::mm::munlock(base.with_addr(pages.start).cast(), pages.len())? };
    }
    Ok(pages.len() as u64)
}

#[cfg(target_os = "linux")]
unsafe fn drop_pages(start: *mut c_void, len: usize) -> io::Result<()> {
    // SAFETY: of private anonymous memory that nobody else uses this makes zeros.
    unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxDontNeed)? };
    Ok(())
}

#[cfg(not(target_os = "linux"))]
use map_anew as drop_pages;

/// Elsewhere the same advice drops nothing: new memory takes the place of the old. Not for memory that a GPU knows,
/// which would go on with the old.
#[cfg(any(not(target_os = "linux"), test))]
unsafe fn map_anew(start: *mut c_void, len: usize) -> io::Result<()> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    // SAFETY: the caller vouches for what is replaced.
    unsafe { mmap_anonymous(start, len, ProtFlags::READ | ProtFlags::WRITE, flags)? };
    Ok(())
}

#[cfg(test)]
mod tests {
    use memmap2::MmapOptions;

    use super::*;

    #[test]
    fn only_whole_pages_of_the_system_are_meant() {
        assert_eq!(whole(0x4000, 0x8000, 0x4000), 0x4000..0xC000);
        assert_eq!(whole(0x5000, 0x8000, 0x4000), 0x8000..0xC000);
        assert!(whole(0x5000, 0x2000, 0x4000).is_empty(), "a slot within a page");
        assert!(whole(0x5000, 0x4000, 0x4000).is_empty(), "a slot across a border of two");
        assert!(whole(usize::MAX - 10, 100, 0x4000).is_empty());
    }

    #[test]
    fn a_range_that_is_locked_as_it_is_elsewhere_can_be_unlocked_and_given_back() {
        let page = rustix::param::page_size();
        let mut map = MmapOptions::new().len(2 * page).map_anon().unwrap();
        map.fill(7);
        let start = map.as_mut_ptr();
        // SAFETY: a private mapping that this test alone uses.
        unsafe {
            lock_now(start.cast(), 2 * page).unwrap();
            assert_eq!(unlock(start, 2 * page).unwrap(), 2 * page as u64);
            assert_eq!(give_back(start, 2 * page).unwrap(), 2 * page as u64);
        }
        assert!(map.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn new_memory_takes_the_place_of_the_old_and_of_nothing_beside_it() {
        let page = rustix::param::page_size();
        let mut map = MmapOptions::new().len(4 * page).map_anon().unwrap();
        map.fill(7);
        let start = map.as_mut_ptr().wrapping_add(page);
        // SAFETY: two pages of a private mapping that this test alone uses.
        unsafe { map_anew(start.cast(), 2 * page).unwrap() };
        let first_of_each: Vec<u8> = map.iter().copied().step_by(page).collect();
        assert_eq!(first_of_each, [7, 0, 0, 7]);
        assert_eq!(map.iter().filter(|&&byte| byte == 0).count(), 2 * page);
        map.fill(3);
    }
}
