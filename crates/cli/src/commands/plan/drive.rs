//! How fast the drive delivers experts: random ones, whole, several at a time, past the page cache.

use std::time::Duration;

use metaltail_store::probe::{Limits, Target, Way, measure};
use serde::Serialize;

use super::model::Planned;

/// How long the drive is read.
const TIME: Duration = Duration::from_millis(400);

/// What a probe found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DriveProbe {
    /// Rate in 10⁹ bytes a second.
    pub gb_per_second: f64,
    /// Bytes read.
    pub bytes: u64,
    /// Whole experts read.
    pub experts: u64,
    /// Bytes of an expert, the first one's.
    pub expert_bytes: u64,
    /// Experts read at a time.
    pub in_flight: usize,
    /// Time taken.
    pub seconds: f64,
}

impl DriveProbe {
    /// A remark for people.
    pub fn to_words(&self) -> String {
        format!(
            "measured: {} direct reads of {}, {} at a time, {:.1} s",
            self.experts,
            crate::report::bytes(self.expert_bytes),
            self.in_flight,
            self.seconds
        )
    }
}

/// Reads random experts of the model's own files with as many threads as the engine would use.
///
/// # Errors
/// Why there is no figure, as a clause: no files, or a file system without direct reads, where
/// the page cache would be measured instead of the drive.
pub fn probe(planned: &Planned, loaders: usize) -> Result<DriveProbe, String> {
    let checkpoint = planned.checkpoint.as_ref().ok_or("there are no weights yet")?;
    let first = planned.places.iter().flat_map(|layer| &layer.experts).next();
    let first = first.ok_or("the model has no routed experts")?;
    let target = Target::experts(checkpoint.files(), &planned.places);
    let way = Way { direct: true, uring: false, depth: loaders };
    let limits = Limits { time: TIME, bytes: u64::MAX, seed: 1 };
    let measured = measure(&target, way, limits).map_err(|error| error.to_string())?;
    Ok(DriveProbe {
        gb_per_second: measured.bytes_per_second() / 1e9,
        bytes: measured.bytes,
        experts: measured.reads / first.runs.len().max(1) as u64,
        expert_bytes: first.runs.iter().map(|run| run.len).sum(),
        in_flight: loaders,
        seconds: measured.time.as_secs_f64(),
    })
}
