//! Writing to the standard streams, any of which may be closed or full.
//!
//! The `print!` family panics there, so nothing in this crate uses it. Results go to standard output,
//! and text that does not arrive there is an error; everything else goes to standard error, whose
//! loss leaves no one to tell.

use std::io::{self, Write};

use crate::exit::{Failure, Kind};
use crate::interrupt;

/// Why text did not arrive at standard output.
#[derive(Debug)]
pub enum Lost {
    /// The reader went away, as behind `| head`: it has all that it wanted.
    ReaderGone,
    /// Anything else, such as a full disk.
    Failed(io::Error),
}

impl From<io::Error> for Lost {
    fn from(error: io::Error) -> Lost {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Lost::ReaderGone,
            _ => Lost::Failed(error),
        }
    }
}

impl Lost {
    /// How this ends a command: a reader that went away is no failure.
    ///
    /// # Errors
    /// Everything else, with exit code 1.
    pub fn outcome(self) -> Result<(), Failure> {
        match self {
            Lost::ReaderGone => Ok(()),
            Lost::Failed(error) => {
                let message = format!("cannot write to standard output: {error}");
                Err(Failure::new(Kind::Failed, message).without_stdout())
            }
        }
    }
}

/// Writes to standard output at once.
///
/// # Errors
/// The text did not arrive.
pub fn show(text: &str) -> Result<(), Lost> {
    let mut out = io::stdout().lock();
    Ok(out.write_all(text.as_bytes()).and_then(|()| out.flush())?)
}

/// Prints a command's result. Ctrl-C does not cut it short unless it is pressed twice, and a reader
/// that has gone away (`metaltail man | head`) is no failure.
///
/// # Errors
/// Standard output cannot be written.
pub fn print(text: &str) -> Result<(), Failure> {
    let _whole = interrupt::listen();
    show(text).or_else(Lost::outcome)
}

/// Writes a line to standard error.
pub fn notice(text: &str) {
    // A closed or full standard error leaves no one to tell.
    let _ = io::stderr().lock().write_all(format!("{text}\n").as_bytes());
}
