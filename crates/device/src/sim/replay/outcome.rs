//! A run's figures.

use super::{DeviceSeconds, Run, Streams};
use crate::sim::profile::Profile;

/// Figures as they are published. Times are seconds of the whole run, the session's factor among them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Tokens a second.
    pub tokens_per_second: f64,
    /// The whole run, without pauses.
    pub seconds: f64,
    /// In kernels.
    pub kernel: f64,
    /// The device had work and computed nothing.
    pub stall: f64,
    /// Waiting for experts.
    pub disk_wait: f64,
    /// Commits of additions.
    pub flush: f64,
    /// Commits of removals.
    pub unregister: f64,
    /// Share of the selections in memory.
    pub hits: f64,
}

impl Outcome {
    /// Of a run whose device took so long.
    pub fn of(profile: &Profile, run: &Run, device: &DeviceSeconds) -> Outcome {
        let streams = Streams::of(profile, run);
        // Loads and the processor slow down alike while the driver wires memory.
        let busy = streams.disk + streams.host;
        let share = if busy > 0.0 { streams.disk / busy } else { 0.0 };
        let disk = streams.disk + device.coupled * share;
        let host = streams.host + device.coupled * (1.0 - share);
        let driver = device.stall + device.register + device.flush + device.unregister;
        let factor = profile.session(&run.machine);
        let seconds = factor * (device.kernel + driver + disk + host);
        Outcome {
            tokens_per_second: profile.workload.tokens as f64 / seconds,
            seconds,
            kernel: factor * device.kernel,
            stall: factor * device.stall,
            disk_wait: factor * disk,
            flush: factor * device.flush,
            unregister: factor * device.unregister,
            hits: streams.hits,
        }
    }
}
