//! Whether loading ahead of demand pays: decided by trying, again and again.
//!
//! A guess costs a router product, and a wrong one occupies the drive. So the steps of a trial take turns, in
//! blocks of A B B A, between loading ahead and not; it goes on only where the steps that did it waited less
//! for loads *and* took no longer. What lost is tried again after a pause that doubles.

use std::time::Duration;

/// Steps of a block.
const BLOCK: u32 = 2;
/// Blocks of a trial, half of them with prefetching.
const BLOCKS: u32 = 16;
/// Steps before the first trial, and between those that were won: what paid may cease to.
const WATCH: u32 = 8;
const RETRY_WON: u32 = 512;
/// Steps after the first trial that was lost, and the most.
const RETRY_LOST: u32 = 256;
const RETRY_MOST: u32 = 8192;
/// Below this share of a step's time there is nothing to gain.
const LEAST_WAIT: f64 = 0.02;
/// A step must be this much faster in the median, lest noise decides.
const LEAST_GAIN: f64 = 0.005;

/// Decides for one step after another.
#[derive(Debug)]
pub(crate) struct Controller {
    state: State,
    lost: u32,
}

#[derive(Debug)]
enum State {
    /// Never.
    Off,
    /// Not now; counts down to the next trial. Remembers what steps waited lately.
    Resting { left: u32, wait: f64, took: f64 },
    /// Steps taken with (`true`) and without.
    Trial { step: u32, with: Samples, without: Samples },
    /// On until the next trial.
    Going { left: u32 },
}

/// Steps of one kind.
#[derive(Debug, Default)]
struct Samples {
    took: Vec<f64>,
    felt: f64,
}

impl Samples {
    fn add(&mut self, took: f64, felt: f64) {
        self.took.push(took);
        self.felt += felt;
    }

    /// Middle of the times taken.
    fn median(&self) -> f64 {
        let mut sorted = self.took.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
    }
}

impl Controller {
    /// A controller that may try, or that never does.
    pub(crate) fn new(enabled: bool) -> Controller {
        let state = match enabled {
            true => State::Resting { left: WATCH, wait: 0.0, took: 0.0 },
            false => State::Off,
        };
        Controller { state, lost: 0 }
    }

    /// Whether the next step loads ahead.
    pub(crate) fn next(&self) -> bool {
        match &self.state {
            State::Off | State::Resting { .. } => false,
            State::Going { .. } => true,
            State::Trial { step, .. } => Self::with(*step),
        }
    }

    /// A B B A, block by block.
    fn with(step: u32) -> bool {
        matches!(step / BLOCK % 4, 1 | 2)
    }

    /// Takes what that step cost: its time, and the part of it that waited for loads.
    pub(crate) fn record(&mut self, took: Duration, felt: Duration) {
        let (took, felt) = (took.as_secs_f64(), felt.as_secs_f64());
        match &mut self.state {
            State::Off => {}
            State::Resting { left, wait, took: total } => {
                *left -= 1;
                *wait += felt;
                *total += took;
                if *left == 0 {
                    self.state = match *wait > LEAST_WAIT * *total {
                        true => {
                            State::Trial { step: 0, with: Samples::default(), without: Samples::default() }
                        }
                        false => State::Resting { left: WATCH, wait: 0.0, took: 0.0 },
                    };
                }
            }
            State::Going { left } => {
                *left -= 1;
                if *left == 0 {
                    self.state =
                        State::Trial { step: 0, with: Samples::default(), without: Samples::default() };
                }
            }
            State::Trial { step, with, without } => {
                let side = if Self::with(*step) { &mut *with } else { &mut *without };
                side.add(took, felt);
                *step += 1;
                if *step == BLOCK * BLOCKS {
                    let faster = with.median() < without.median() * (1.0 - LEAST_GAIN);
                    let won = faster && with.felt < without.felt;
                    self.end_trial(won);
                }
            }
        }
    }

    fn end_trial(&mut self, won: bool) {
        self.state = match won {
            true => {
                self.lost = 0;
                State::Going { left: RETRY_WON }
            }
            false => {
                let left = RETRY_LOST.saturating_mul(1 << self.lost.min(16)).min(RETRY_MOST);
                self.lost += 1;
                State::Resting { left, wait: 0.0, took: 0.0 }
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Runs `steps` steps whose cost depends on whether they load ahead; how many did.
    fn run(c: &mut Controller, steps: u32, cost: impl Fn(bool) -> (u32, u32)) -> u32 {
        let mut ahead = 0;
        for _ in 0..steps {
            let on = c.next();
            ahead += u32::from(on);
            let (took, felt) = cost(on);
            c.record(MS * took, MS * felt);
        }
        ahead
    }

    #[test]
    fn what_helps_is_switched_on_and_stays() {
        let mut c = Controller::new(true);
        let ahead = run(&mut c, 2000, |on| if on { (80, 30) } else { (100, 50) });
        assert!(ahead > 1800, "{ahead}");
    }

    #[test]
    fn what_does_not_help_is_tried_ever_more_rarely() {
        let mut c = Controller::new(true);
        let slower = |on| if on { (102, 49) } else { (100, 50) };
        assert_eq!(run(&mut c, WATCH + BLOCK * BLOCKS, slower), BLOCK * BLOCKS / 2);
        let early = run(&mut c, 2000, slower);
        let late = run(&mut c, 2000, slower);
        assert!(late < early && late <= BLOCK * BLOCKS / 2, "{early}, then {late}");
        let mut c = Controller::new(true);
        run(&mut c, 100, |on| if on { (90, 51) } else { (100, 50) });
        assert!(!c.next(), "less time, but no less waiting: something else was faster");
    }

    #[test]
    fn what_never_waits_is_never_tried() {
        let mut c = Controller::new(true);
        assert_eq!(run(&mut c, 1000, |_| (100, 1)), 0);
        assert_eq!(run(&mut Controller::new(false), 1000, |_| (100, 90)), 0);
    }

    #[test]
    fn what_paid_and_ceases_to_is_switched_off() {
        let mut c = Controller::new(true);
        run(&mut c, 100, |on| if on { (80, 30) } else { (100, 50) });
        assert!(c.next());
        run(&mut c, RETRY_WON + BLOCK * BLOCKS, |on| if on { (110, 60) } else { (100, 50) });
        assert!(!c.next());
    }

    #[test]
    fn a_drift_of_the_machine_favours_neither_side() {
        // Every step takes longer than the one before; both sides have the same mean position.
        let (with, without): (Vec<u32>, Vec<u32>) =
            (0..BLOCK * BLOCKS).partition(|&step| Controller::with(step));
        assert_eq!(with.iter().sum::<u32>(), without.iter().sum::<u32>());
    }
}
