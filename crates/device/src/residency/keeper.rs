//! A thread that keeps sets resident while work is expected.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(not(shuttle))]
use std::thread;
use std::time::{Duration, Instant};

#[cfg(shuttle)]
use shuttle::thread;

use super::driver::ResidencyDriver;
use super::ledger::{Ledger, Submission};
use super::shared::{Next, Residency};

/// Systems let go of an idle set after about a second: asking less often is of no use, and asking more often
/// than this costs more than it keeps.
const CADENCES: RangeInclusive<Duration> = Duration::from_millis(5)..=Duration::from_millis(500);

/// When sets that nothing uses are asked for again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAliveTimes {
    /// Between two requests: 5 to 500 ms.
    pub cadence: Duration,
    /// After the last submission no work is expected any more.
    pub idle: Duration,
}

impl Default for KeepAliveTimes {
    /// Four times a second, for three minutes.
    fn default() -> KeepAliveTimes {
        KeepAliveTimes { cadence: Duration::from_millis(250), idle: Duration::from_secs(180) }
    }
}

/// Why sets are not kept resident.
#[derive(Debug, thiserror::Error)]
pub enum KeepAliveError {
    /// A cadence that no system needs.
    #[error("sets would be asked for every {0:?}: wanted {least:?} to {most:?}", least = CADENCES.start(), most = CADENCES.end())]
    Cadence(Duration),
    /// There is no thread for it.
    #[error("no thread can be started that keeps memory resident: {0}")]
    Thread(#[from] std::io::Error),
}

/// What is to be done at a time; it waits for nothing itself.
#[derive(Debug)]
pub(super) struct Keeper {
    times: KeepAliveTimes,
    /// The last submission that was seen, and when it was new.
    seen: Option<(Submission, Duration)>,
    looked: Duration,
}

impl Keeper {
    pub(super) fn new(times: KeepAliveTimes) -> Keeper {
        Keeper { times, seen: None, looked: Duration::ZERO }
    }

    /// Looks after the sets at a time of the caller's clock, and says when to look again.
    pub(super) fn look<D: ResidencyDriver>(&mut self, ledger: &mut Ledger<D>, now: Duration) -> Next {
        let passed = now.saturating_sub(std::mem::replace(&mut self.looked, now));
        let Some(last) = ledger.last() else { return Next::Submission };
        let since = match self.seen {
            Some((seen, since)) if seen == last => {
                ledger.driver_mut().idle(passed);
                since
            }
            _ => now,
        };
        self.seen = Some((last, since));
        if now.saturating_sub(since) >= self.times.idle {
            return Next::Submission;
        }
        match ledger.keep_alive(self.times.cadence, self.times.idle) {
            Ok(_) => Next::After(self.times.cadence),
            // The ledger counts it. The next submission wires what is not resident, or fails and says so.
            Err(_) => Next::Submission,
        }
    }
}

/// Asks for a device's sets again and again while work is expected, so that the first token after a pause finds
/// them wired. Its thread sleeps in between, and wakes no more once nothing was submitted for
/// [`KeepAliveTimes::idle`], until something is. It ends when this is dropped.
pub struct KeepAlive {
    end: Box<dyn Fn() + Send + Sync>,
    thread: Option<thread::JoinHandle<()>>,
}

impl fmt::Debug for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeepAlive").finish_non_exhaustive()
    }
}

impl KeepAlive {
    /// Starts to look after the sets of `residency`.
    ///
    /// # Errors
    /// A cadence that is too short or too long; no thread.
    pub fn start<D>(residency: &Arc<Residency<D>>, times: KeepAliveTimes) -> Result<KeepAlive, KeepAliveError>
    where
        D: ResidencyDriver + 'static,
    {
        if !CADENCES.contains(&times.cadence) {
            return Err(KeepAliveError::Cadence(times.cadence));
        }
        let ended = Arc::new(AtomicBool::new(false));
        let body = {
            let (residency, ended) = (Arc::clone(residency), Arc::clone(&ended));
            let (mut keeper, began) = (Keeper::new(times), Instant::now());
            move || {
                residency.keep(|ledger| match ended.load(Ordering::Relaxed) {
                    true => Next::End,
                    false => keeper.look(ledger, began.elapsed()),
                });
            }
        };
        let thread = thread::Builder::new().name("keep-alive".into()).spawn(body)?;
        let residency = Arc::clone(residency);
        let end = Box::new(move || residency.rouse(|| ended.store(true, Ordering::Relaxed)));
        Ok(KeepAlive { end, thread: Some(thread) })
    }
}

impl Drop for KeepAlive {
    fn drop(&mut self) {
        (self.end)();
        if let Some(thread) = self.thread.take() {
            // What a driver's panic left undone is not asked for again.
            let _ = thread.join();
        }
    }
}
