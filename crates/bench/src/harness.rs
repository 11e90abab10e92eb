//! Running arms in order, and what every run must satisfy before it counts.

use std::ffi::OsString;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Spread;
use crate::arm::ArmRecord;
use crate::compare;
use crate::figures::{SPEED, figure};
use crate::job::Job;

/// A set of settings under test.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Arm {
    /// Its name in tables.
    pub name: String,
    /// The flags that a process of it gets.
    #[serde(skip)]
    pub words: Vec<OsString>,
    /// The settings that those flags give, with underscores.
    pub given: Map<String, Value>,
}

/// Runs an arm in a fresh process.
pub trait Runner {
    /// One run.
    ///
    /// # Errors
    /// A sentence that says why there is no record: the process failed, or what it wrote makes no sense.
    fn run(&mut self, arm: &Arm) -> Result<ArmRecord, String>;
}

/// What a run is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The same settings before and after everything else: how much the machine itself drifts.
    Control,
    /// What is compared.
    Measured,
    /// Whether the ids route as a cache comparison needs.
    Probe,
}

/// A place in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Which arm.
    pub arm: usize,
    /// What for.
    pub role: Role,
    /// Which pair, or which round of a sweep.
    pub block: usize,
}

/// A run as it went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Which arm.
    pub arm: usize,
    /// What for.
    pub role: Role,
    /// Which pair, or which round of a sweep.
    pub block: usize,
    /// Why it does not count.
    pub excluded: Option<String>,
    /// What came back.
    pub record: Option<ArmRecord>,
}

impl Run {
    /// The record, if it counts.
    pub fn counted(&self) -> Option<&ArmRecord> {
        if self.excluded.is_none() { self.record.as_ref() } else { None }
    }

    /// Median over the rotating prompts of a figure.
    pub fn median(&self, key: &str) -> Option<f64> {
        let of = figure(key)?.of;
        let values: Option<Vec<f64>> = self.counted()?.measured().map(of).collect();
        Some(Spread::of(&values?)?.median)
    }
}

fn step(arm: usize, role: Role, block: usize) -> Step {
    Step { arm, role, block }
}

/// A A, then A B, B A, A B, … for `pairs` pairs, then A.
pub fn ab_order(pairs: usize) -> Vec<Step> {
    let mut order = vec![step(0, Role::Control, 0), step(0, Role::Control, 0)];
    for pair in 0..pairs {
        let first = pair % 2;
        order.push(step(first, Role::Measured, pair));
        order.push(step(1 - first, Role::Measured, pair));
    }
    order.push(step(0, Role::Control, 1));
    order
}

/// The last arm twice, then all arms up, down, up, … for `rounds` rounds, then the last arm.
pub fn sweep_order(arms: usize, rounds: usize) -> Vec<Step> {
    let last = arms.saturating_sub(1);
    let mut order = vec![step(last, Role::Control, 0), step(last, Role::Control, 0)];
    for round in 0..rounds {
        let place = |at: usize| if round % 2 == 0 { at } else { last - at };
        order.extend((0..arms).map(|at| step(place(at), Role::Measured, round)));
    }
    order.push(step(last, Role::Control, 1));
    order
}

/// What a run must satisfy whatever is compared.
///
/// # Errors
/// A sentence: output that is cut short, a wrong number of tokens, a setting that was not used.
pub fn check(arm: &Arm, record: &ArmRecord, job: &Job) -> Result<(), String> {
    let wanted = job.warmup + job.prompts;
    if record.rows.len() != wanted {
        return Err(format!("{} prompts came back, and {wanted} were asked for", record.rows.len()));
    }
    if record.page_cache != job.page_cache {
        return Err(format!("the page cache was {}, and {} was declared", record.page_cache, job.page_cache));
    }
    for (at, row) in record.rows.iter().enumerate() {
        let told = row.stats.pointer("/decode/tokens").and_then(Value::as_u64);
        if row.tokens != job.tokens || told != Some(job.tokens as u64) {
            let told = told.map_or("none".to_owned(), |told| told.to_string());
            return Err(format!(
                "prompt {at}: {} tokens were decoded ({told} by the telemetry), and {} were asked for",
                row.tokens, job.tokens
            ));
        }
        if row.ids.len() != job.tokens + 1 {
            return Err(format!("prompt {at}: {} ids came back for {} rows", row.ids.len(), job.tokens + 1));
        }
        if let Some(reason) = compare::device_fallback(row) {
            return Err(reason);
        }
    }
    match compare::fallback(&arm.given, &record.config) {
        Some(reason) => Err(reason),
        None => Ok(()),
    }
}

/// Runs arms by a given order.
pub struct Harness<'a> {
    /// The arms.
    pub arms: &'a [Arm],
    /// What each of them does.
    pub job: &'a Job,
    /// Whether the ids of all of them must be the same.
    pub same_ids: bool,
    /// Whether the first run that does not count ends everything.
    pub stop_at_failure: bool,
}

impl Harness<'_> {
    /// Runs `order`; `tell` is told each finished run. An arm that failed once is not run again.
    pub fn run(&self, order: &[Step], runner: &mut dyn Runner, tell: &mut dyn FnMut(&Run)) -> Vec<Run> {
        self.resume(Vec::new(), order, runner, tell)
    }

    /// The same after earlier runs.
    pub fn resume(
        &self,
        mut runs: Vec<Run>,
        order: &[Step],
        runner: &mut dyn Runner,
        tell: &mut dyn FnMut(&Run),
    ) -> Vec<Run> {
        for step in order {
            let failed = |run: &Run| run.arm == step.arm && run.excluded.is_some();
            if runs.iter().any(failed) {
                continue;
            }
            let run = self.one(*step, &runs, runner);
            tell(&run);
            let stop = self.stop_at_failure && run.excluded.is_some();
            runs.push(run);
            if stop {
                break;
            }
        }
        runs
    }

    fn one(&self, step: Step, earlier: &[Run], runner: &mut dyn Runner) -> Run {
        let Step { arm, role, block } = step;
        let run = |excluded, record| Run { arm, role, block, excluded, record };
        let Some(settings) = self.arms.get(arm) else {
            return run(Some("there is no such arm".to_owned()), None);
        };
        let record = match runner.run(settings) {
            Ok(record) => record,
            Err(reason) => return run(Some(reason), None),
        };
        let excluded =
            check(settings, &record, self.job).err().or_else(|| self.other_ids(settings, &record, earlier));
        run(excluded, Some(record))
    }

    /// Why a record's ids are not those of the first run.
    fn other_ids(&self, arm: &Arm, record: &ArmRecord, earlier: &[Run]) -> Option<String> {
        let same_arm = |run: &&Run| self.arms.get(run.arm).is_some_and(|other| other.name == arm.name);
        // Where numbers may differ between arms, each must still repeat itself.
        let first = earlier.iter().find(|run| (self.same_ids || same_arm(run)) && run.counted().is_some())?;
        let reference = first.counted()?;
        let at = reference.measured().zip(record.measured()).position(|(a, b)| a.ids != b.ids)?;
        let (a, b) = reference.measured().zip(record.measured()).nth(at)?;
        let row = a.ids.iter().zip(&b.ids).position(|(a, b)| a != b).unwrap_or(a.ids.len().min(b.ids.len()));
        Some(format!(
            "its ids are not those of {}: prompt {at} differs from row {row} on, and settings that only move bytes must not change any",
            self.arms[first.arm].name
        ))
    }
}

/// What runs of the same settings say of the machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Noise {
    /// How far controls may lie apart, as a share.
    pub stated: f64,
    /// Tokens a second of each control, in order; of a drive, 10⁹ bytes a second.
    pub controls: Vec<f64>,
    /// How far they lie apart: the largest over the smallest, less one.
    pub spread: Option<f64>,
}

impl Noise {
    /// The noise of some runs.
    pub fn of(runs: &[Run], stated: f64) -> Noise {
        let controls = control_medians(runs, SPEED);
        Noise { stated, spread: apart(&controls), controls }
    }

    /// Why nothing can be said, if so.
    pub fn refusal(&self) -> Option<String> {
        let spread = self.spread.filter(|_| self.controls.len() > 2);
        match spread {
            Some(spread) if spread <= self.stated => None,
            Some(spread) => Some(format!(
                "runs of the same settings before and after differ by {:.1} %, more than the stated noise of {:.1} %: the machine drifts; end what else runs on it, measure longer, or state more with --noise",
                100.0 * spread,
                100.0 * self.stated
            )),
            None => {
                Some("there are no controls before and after: nothing bounds the machine's drift".to_owned())
            }
        }
    }
}

fn control_medians(runs: &[Run], key: &str) -> Vec<f64> {
    let controls = runs.iter().filter(|run| run.role == Role::Control);
    controls.filter_map(|run| run.median(key)).collect()
}

/// How far apart the controls are in a figure, as a share; none where one of them is zero and another not.
pub fn floor(runs: &[Run], key: &str) -> Option<f64> {
    apart(&control_medians(runs, key))
}

pub(crate) fn apart(values: &[f64]) -> Option<f64> {
    let Spread { min, max, .. } = Spread::of(values)?;
    match (min > 0.0, max == min) {
        (_, true) => Some(0.0),
        (true, false) => Some(max / min - 1.0),
        (false, false) => None,
    }
}

/// The largest share of decode's look-ups that a cache of one expert a layer may answer for a
/// comparison of caches to mean something.
pub const MOST_HITS_AT_CAP_1: f64 = 0.5;

/// Share of decode's look-ups that the cache answered in a run. What was read ahead or is pinned hits
/// too, and says nothing about the ids.
pub fn cache_hits(run: &Run) -> Option<f64> {
    run.median("cached_share")
}

/// Why runs at a cap of one cannot stand for text that routes as it should, if so.
pub fn degenerate(cache_hits: Option<f64>) -> Option<String> {
    match cache_hits {
        Some(share) if share <= MOST_HITS_AT_CAP_1 => None,
        Some(share) => Some(format!(
            "a cache of 1 expert a layer already answers {:.1} % of the look-ups, more than {:.0} %: successive tokens use the same experts, and any cache looks good; use other ids (--feed random, --ids FILE)",
            100.0 * share,
            100.0 * MOST_HITS_AT_CAP_1
        )),
        None => Some("the run at a cap of 1 has no look-ups: the model has no routed experts".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arms(order: &[Step]) -> Vec<usize> {
        order.iter().map(|step| step.arm).collect()
    }

    #[test]
    fn pairs_go_back_and_forth_between_controls() {
        let order = ab_order(3);
        assert_eq!(arms(&order), [0, 0, 0, 1, 1, 0, 0, 1, 0]);
        let controls: Vec<usize> = (0..order.len()).filter(|at| order[*at].role == Role::Control).collect();
        assert_eq!(controls, [0, 1, 8]);
        assert_eq!((order[4].block, order[5].block), (1, 1));
    }

    #[test]
    fn sweeps_go_up_and_down_between_controls() {
        assert_eq!(arms(&sweep_order(3, 2)), [2, 2, 0, 1, 2, 2, 1, 0, 2]);
    }

    #[test]
    fn values_that_begin_at_zero_are_infinitely_far_apart() {
        assert_eq!(
            (apart(&[2.0, 3.0]), apart(&[0.0, 0.0]), apart(&[0.0, 1.0])),
            (Some(0.5), Some(0.0), None)
        );
    }
}
