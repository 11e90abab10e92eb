//! Settings of the system, by name.

use std::ffi::CStr;
use std::ptr;

use crate::limits::integer_setting;

/// The bytes of a setting, 256 at most; `None` where the system does not know it.
fn bytes(name: &CStr) -> Option<Vec<u8>> {
    let mut value = vec![0u8; 256];
    let mut len = value.len();
    // SAFETY: the name ends with a zero byte, `value` has `len` bytes, and nothing is set.
    let code = unsafe {
        libc::sysctlbyname(name.as_ptr(), value.as_mut_ptr().cast(), &raw mut len, ptr::null_mut(), 0)
    };
    (code == 0).then(|| {
        value.truncate(len);
        value
    })
}

/// A setting that is a number.
pub(crate) fn integer(name: &CStr) -> Option<u64> {
    integer_setting(&bytes(name)?)
}

/// A setting that is text.
pub(crate) fn text(name: &CStr) -> Option<String> {
    let bytes = bytes(name)?;
    let text = bytes.split(|&byte| byte == 0).next()?;
    Some(String::from_utf8_lossy(text).into_owned())
}
