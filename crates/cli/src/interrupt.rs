//! Ctrl-C: where a command listens, the first asks for an orderly end; everywhere else it ends the
//! program at once. The second always does. A request to terminate (SIGTERM) is not taken over.

use std::fs::File;
use std::io::{self, Write};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use metaltail_model::CancelFlag;

use crate::exit::{Failure, Kind};

static CANCEL: CancelFlag = CancelFlag::new();
static JSON: AtomicBool = AtomicBool::new(false);
static STATE: AtomicU8 = AtomicU8::new(WORKING);

/// Nobody looks at the flag.
const WORKING: u8 = 0;
/// A [`Listening`] exists.
const LISTENING: u8 = 1;
/// The handler ends the program and is the only one to print.
const ENDING: u8 = 2;

/// Takes over Ctrl-C for the whole program, and makes writes past `ulimit -f` errors. `json` says how the end
/// is told.
///
/// # Errors
/// The system refuses a handler.
pub fn install(json: bool) -> Result<(), Failure> {
    tell_as_json(json);
    metaltail_store::signals::fail_writes_past_the_limit();
    ctrlc::set_handler(pressed).map_err(|error| Failure::from_error(Kind::Failed, &error))
}

/// Says whether an end by Ctrl-C is told as JSON.
pub fn tell_as_json(json: bool) {
    JSON.store(json, Ordering::Relaxed);
}

/// While it lives, Ctrl-C sets the flag that it dereferences to.
pub struct Listening {
    /// The first of several that are nested: it ends the listening.
    outermost: bool,
}

/// Listens to Ctrl-C until the result is dropped; what listens already goes on.
pub fn listen() -> Listening {
    match STATE.compare_exchange(WORKING, LISTENING, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(_) => Listening { outermost: true },
        Err(LISTENING) => Listening { outermost: false },
        // Ctrl-C came first: the handler has the last word, and the program ends with it.
        Err(_) => loop {
            std::thread::park();
        },
    }
}

impl Deref for Listening {
    type Target = CancelFlag;

    fn deref(&self) -> &CancelFlag {
        &CANCEL
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if self.outermost {
            STATE.store(WORKING, Ordering::SeqCst);
        }
    }
}

/// Runs on the handler's own thread, so it may do what a signal handler may not.
fn pressed() {
    if CANCEL.is_cancelled() {
        end();
    }
    match STATE.compare_exchange(WORKING, ENDING, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(_) => {
            let failure = Failure::new(Kind::Interrupted, "interrupted before there was a result");
            if JSON.load(Ordering::Relaxed) {
                say(&format!("{}\n", failure.to_json()));
            } else {
                failure.print(false);
            }
            end();
        }
        Err(_) => CANCEL.cancel(),
    }
}

fn end() -> ! {
    std::process::exit(i32::from(Kind::Interrupted.code()))
}

/// Writes to standard output past its lock, which whoever was interrupted may hold.
fn say(text: &str) {
    use std::os::fd::AsFd;
    // When it cannot be written, the exit code is all that is left to say.
    let Ok(out) = io::stdout().as_fd().try_clone_to_owned() else { return };
    let _ = File::from(out).write_all(text.as_bytes());
}
