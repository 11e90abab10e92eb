//! Where the time of a submission went.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What a command buffer says after its end, in seconds of the system's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stamps {
    /// The processor began to schedule it (`kernelStartTime`; the kernel meant is the system's).
    pub schedule_start: f64,
    /// It was scheduled (`kernelEndTime`).
    pub schedule_end: f64,
    /// The GPU began (`GPUStartTime`).
    pub gpu_start: f64,
    /// The GPU ended (`GPUEndTime`).
    pub gpu_end: f64,
}

/// The time of one submission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubmissionTimes {
    /// Encoding it, declarations included.
    pub encode: Duration,
    /// From handing it over to the notice of its end.
    pub wall: Duration,
    /// Of that, on the GPU.
    pub gpu: Duration,
    /// Of that, in the system's scheduling.
    pub schedule: Duration,
}

/// The time between two stamps. Zero where one is missing (zero, or no number) or they are in no order: a
/// command buffer that failed may have none.
fn between(start: f64, end: f64) -> Duration {
    if !(start > 0.0 && end > start) {
        return Duration::ZERO;
    }
    Duration::try_from_secs_f64(end - start).unwrap_or(Duration::ZERO)
}

impl SubmissionTimes {
    /// From what the host measured and the command buffer says.
    pub fn new(encode: Duration, wall: Duration, stamps: Stamps) -> SubmissionTimes {
        let gpu = between(stamps.gpu_start, stamps.gpu_end);
        let schedule = between(stamps.schedule_start, stamps.schedule_end);
        SubmissionTimes { encode, wall, gpu, schedule }
    }

    /// Time that the GPU did not compute although it had the work.
    pub fn stall(&self) -> Duration {
        self.wall.saturating_sub(self.gpu)
    }
}

/// Sums over submissions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Submissions that ended.
    pub submissions: u64,
    /// Dispatches in them.
    pub dispatches: u64,
    /// Sum of [`SubmissionTimes::encode`].
    pub encode: Duration,
    /// Sum of [`SubmissionTimes::wall`]. Submissions that overlap count twice.
    pub wall: Duration,
    /// Sum of [`SubmissionTimes::gpu`].
    pub gpu: Duration,
    /// Sum of [`SubmissionTimes::schedule`].
    pub schedule: Duration,
    /// Sum of [`SubmissionTimes::stall`].
    pub stall: Duration,
}

impl Figures {
    /// Adds a submission.
    pub fn add(&mut self, dispatches: u64, times: &SubmissionTimes) {
        self.submissions += 1;
        self.dispatches += dispatches;
        self.encode += times.encode;
        self.wall += times.wall;
        self.gpu += times.gpu;
        self.schedule += times.schedule;
        self.stall += times.stall();
    }
}

/// [`Figures`] that others look at while submissions come to an end.
#[derive(Clone, Debug, Default)]
pub struct SharedFigures(Arc<Mutex<Figures>>);

impl SharedFigures {
    /// As they are now.
    pub fn get(&self) -> Figures {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a submission.
    pub(crate) fn add(&self, dispatches: u64, times: &SubmissionTimes) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).add(dispatches, times);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn stall_is_what_the_gpu_did_not_compute() {
        let stamps = Stamps { schedule_start: 10.0, schedule_end: 10.25, gpu_start: 10.5, gpu_end: 12.5 };
        let times = SubmissionTimes::new(MS, Duration::from_secs(3), stamps);
        assert_eq!((times.gpu, times.schedule), (Duration::from_secs(2), 250 * MS));
        assert_eq!(times.stall(), Duration::from_secs(1));
        let mut figures = Figures::default();
        figures.add(4, &times);
        figures.add(3, &times);
        assert_eq!((figures.submissions, figures.dispatches, figures.encode), (2, 7, 2 * MS));
        assert_eq!((figures.stall, figures.gpu), (Duration::from_secs(2), Duration::from_secs(4)));
    }

    #[test]
    fn stamps_that_make_no_sense_count_as_none() {
        for (gpu_start, gpu_end) in [
            (0.0, 5.0),
            (5.0, 0.0),
            (5.0, 4.0),
            (f64::NAN, 5.0),
            (5.0, f64::NAN),
            (1.0, f64::INFINITY),
            (-3.0, 2.0),
        ] {
            let times = SubmissionTimes::new(MS, MS, Stamps { gpu_start, gpu_end, ..Stamps::default() });
            assert_eq!((times.gpu, times.stall()), (Duration::ZERO, MS), "{gpu_start} {gpu_end}");
        }
    }

    #[test]
    fn a_gpu_that_took_longer_than_the_wall_stalls_by_nothing() {
        let stamps = Stamps { gpu_start: 1.0, gpu_end: 9.0, ..Stamps::default() };
        assert_eq!(SubmissionTimes::new(MS, MS, stamps).stall(), Duration::ZERO);
    }
}
