//! Progress bars.
//!
//! Standard output belongs to the result. Bars are drawn on standard error, and only where that is
//! a terminal and people read it: a log file or a program that asked for JSON never sees one.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar on standard error, or nothing.
pub struct Bar(ProgressBar);

impl Bar {
    /// A bar that counts bytes. A total that is not known yet is 0 until [`Bar::set_length`].
    pub fn bytes(what: &str, total: u64, json: bool) -> Bar {
        let template = "{msg} [{bar:30}] {bytes}/{total_bytes}, {bytes_per_sec}, {eta} left";
        Bar::styled(what, total, json, template)
    }

    /// A bar that counts things.
    pub fn items(what: &str, total: u64, json: bool) -> Bar {
        Bar::styled(what, total, json, "{msg} [{bar:30}] {pos}/{len}, {eta} left")
    }

    fn styled(what: &str, total: u64, json: bool, template: &str) -> Bar {
        let target = match io::stderr().is_terminal() && !json {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        // A template that does not parse only costs the looks.
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        Bar(bar)
    }

    /// Changes the total.
    pub fn set_length(&self, total: u64) {
        self.0.set_length(total);
    }

    /// Moves to `done`.
    pub fn set_position(&self, done: u64) {
        self.0.set_position(done);
    }

    /// Moves on by `more`.
    pub fn advance(&self, more: u64) {
        self.0.inc(more);
    }

    /// Says what is being worked on.
    pub fn say(&self, what: &str) {
        self.0.set_message(what.to_owned());
    }

    /// Takes the bar away; dropping it does the same.
    pub fn finish(self) {}
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
