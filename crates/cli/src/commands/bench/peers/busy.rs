//! Processes that compute beside what is measured.

use std::process::{Child, Command, Stdio};

use crate::exit::{Failure, Kind};

/// Counts in rounds, and ends by itself when the process that the first word numbers is gone.
const LOOP: &str =
    r#"while kill -0 "$0" 2>/dev/null; do i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; done"#;

/// They are ended when this is dropped.
pub struct Busy(Vec<Child>);

impl Busy {
    /// Starts `count` of them.
    ///
    /// # Errors
    /// There is no shell.
    pub fn start(count: usize) -> Result<Busy, Failure> {
        let mut busy = Busy(Vec::with_capacity(count));
        let own = std::process::id().to_string();
        for _ in 0..count {
            let mut command = Command::new("sh");
            command.args(["-c", LOOP, &own]);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let child = command.spawn().map_err(|error| {
                Failure::new(Kind::Failed, format!("--busy: a shell cannot be started: {error}"))
            })?;
            busy.0.push(child);
        }
        Ok(busy)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // One that has ended already is what is wanted.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
