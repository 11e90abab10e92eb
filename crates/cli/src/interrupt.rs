//! Ctrl-C: the first asks for an orderly end, the second ends at once.

use std::sync::atomic::{AtomicBool, Ordering};

use metaltail_model::CancelFlag;

use crate::exit::{Failure, Kind};

static CANCEL: CancelFlag = CancelFlag::new();
static INSTALLED: AtomicBool = AtomicBool::new(false);

/// Takes over Ctrl-C and returns the flag that the first one sets.
///
/// # Errors
/// The system refuses a handler.
pub fn install() -> Result<&'static CancelFlag, Failure> {
    if INSTALLED.swap(true, Ordering::Relaxed) {
        return Ok(&CANCEL);
    }
    let handler = || {
        if CANCEL.is_cancelled() {
            std::process::exit(i32::from(Kind::Interrupted.code()));
        }
        CANCEL.cancel();
    };
    ctrlc::set_handler(handler).map_err(|error| Failure::from_error(Kind::Failed, &error))?;
    Ok(&CANCEL)
}
