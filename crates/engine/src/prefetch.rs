//! Whether loading ahead of demand pays: decided by trying, again and again.
//!
//! A guess costs a router product, and a wrong one occupies the drive. So the steps of a trial take turns, in
//! rounds of A B B A, between loading ahead and not; it goes on only where the steps that did it took less time,
//! beyond what chance explains, *and* waited less for loads. A trial ends as soon as that is plain either way.
//! What lost is tried again after a pause that doubles.

use std::time::Duration;

/// Steps of a block, of which a round has four.
const BLOCK: u32 = 2;
const ROUND: u32 = 4 * BLOCK;
/// Rounds after which a loss is believed, after which a gain is, and after which there is none.
const LOSS_ROUNDS: usize = 2;
const GAIN_ROUNDS: usize = 4;
const MOST_ROUNDS: usize = 12;
/// Steps before the first trial, and between those that were won: what paid may cease to.
const WATCH: u32 = 8;
const RETRY_WON: u32 = 512;
/// Steps after the first trial that was lost, and the most.
const RETRY_LOST: u32 = 256;
const RETRY_MOST: u32 = 8192;
/// Below this share of a step's time there is nothing to gain.
const LEAST_WAIT: f64 = 0.02;
/// Steps must be this much faster to be worth it.
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
    /// Steps taken with and without.
    Trial(Trial),
    /// On until the next trial.
    Going { left: u32 },
}

/// Steps of both kinds, compared round by round.
#[derive(Debug, Default)]
struct Trial {
    step: u32,
    /// Time of this round's steps, without and with.
    took: [f64; 2],
    /// Time that all steps waited, without and with.
    felt: [f64; 2],
    /// By round, the logarithm of the time with over the time without.
    ratios: Vec<f64>,
}

impl Trial {
    /// Whether a step loads ahead: A B B A, block by block.
    fn with(step: u32) -> bool {
        matches!(step / BLOCK % 4, 1 | 2)
    }

    /// Takes a step. Whether the trial was won, once that is known.
    fn record(&mut self, took: f64, felt: f64) -> Option<bool> {
        let side = usize::from(Self::with(self.step));
        self.took[side] += took;
        self.felt[side] += felt;
        self.step += 1;
        if !self.step.is_multiple_of(ROUND) {
            return None;
        }
        let [without, with] = std::mem::take(&mut self.took);
        self.ratios.push((with / without.max(f64::MIN_POSITIVE)).max(f64::MIN_POSITIVE).ln());
        self.verdict()
    }

    fn verdict(&self) -> Option<bool> {
        let n = self.ratios.len();
        let mean = self.ratios.iter().sum::<f64>() / n as f64;
        let squares = self.ratios.iter().map(|ratio| (ratio - mean).powi(2)).sum::<f64>();
        // Standard error of the mean; two rounds of one value say nothing of it.
        let error = (squares / (n.max(2) - 1) as f64 / n as f64).sqrt();
        let less_wait = self.felt[1] < self.felt[0];
        let gain = mean + error < -LEAST_GAIN && less_wait;
        match n {
            _ if n >= LOSS_ROUNDS && mean - error > 0.0 => Some(false),
            _ if n >= GAIN_ROUNDS && gain => Some(true),
            MOST_ROUNDS.. => Some(false),
            _ => None,
        }
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
            State::Trial(trial) => Trial::with(trial.step),
        }
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
                        true => State::Trial(Trial::default()),
                        false => State::Resting { left: WATCH, wait: 0.0, took: 0.0 },
                    };
                }
            }
            State::Going { left } => {
                *left -= 1;
                if *left == 0 {
                    self.state = State::Trial(Trial::default());
                }
            }
            State::Trial(trial) => {
                if let Some(won) = trial.record(took, felt) {
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
        // A plain loss ends the trial after two rounds, four steps of each kind in both.
        let slower = |on| if on { (110, 49) } else { (100, 50) };
        assert_eq!(run(&mut c, WATCH + 100, slower), ROUND);
        let early = run(&mut c, 2000, slower);
        let late = run(&mut c, 2000, slower);
        assert!(late < early && late <= ROUND, "{early}, then {late}");
        let mut c = Controller::new(true);
        run(&mut c, 200, |on| if on { (90, 51) } else { (100, 50) });
        assert!(!c.next(), "less time, but no less waiting: something else was faster");
    }

    #[test]
    fn noise_alone_wins_rarely() {
        // Step times that vary by a factor of two, whether they load ahead or not.
        let mut state = 1u32;
        let mut on = 0;
        for _ in 0..200 {
            let mut c = Controller::new(true);
            for _ in 0..WATCH + ROUND * MOST_ROUNDS as u32 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let took = 100 + (state >> 16) % 100;
                c.record(MS * took, MS * (took / 2));
            }
            on += u32::from(matches!(c.state, State::Going { .. }));
        }
        assert!(on < 70, "{on} of 200 trials of nothing were won");
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
        run(&mut c, RETRY_WON + ROUND * MOST_ROUNDS as u32, |on| if on { (110, 60) } else { (100, 50) });
        assert!(!c.next());
    }

    #[test]
    fn a_drift_of_the_machine_favours_neither_side() {
        // Every step takes longer than the one before; both sides have the same mean position.
        let (with, without): (Vec<u32>, Vec<u32>) = (0..ROUND).partition(|&step| Trial::with(step));
        assert_eq!(with.iter().sum::<u32>(), without.iter().sum::<u32>());
    }
}
