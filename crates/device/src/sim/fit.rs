//! A machine's numbers from published rows.
//!
//! The same start gives the same profile: a simplex search over the logarithms of few parameters. What is
//! minimised is the sum of squares of the relative errors of tokens/s. Stall, waiting and kernels count by the
//! share of the run that they are wrong by, and commits by a little of their own relative error, so that a time
//! goes where it was measured. Each parameter is drawn a little to the value that it starts with, so that one
//! that no row decides stays a physical number.

use super::minimum::minimum;
use super::profile::Profile;
use super::replay::{Detail, Outcome, Quantities, Run, replay};
use super::rows::Row;
use crate::residency::ResidencyError;

/// Weight of a figure that is not tokens/s, by its share of the run, against one.
const OTHER: f64 = 0.5;
/// Weight of commits by their own relative error, against one.
const COMMITS: f64 = 0.005;
/// Weight of a parameter's distance from its start, in powers of e, against one.
const PRIOR: f64 = 0.002;
/// Evaluations of a search, and how often it begins anew around what it found.
const EVALUATIONS: usize = 6_000;
const ROUNDS: usize = 12;
/// The same where a row was left out: it begins with the fit to all.
const EVALUATIONS_WITHOUT: usize = 2_000;
const ROUNDS_WITHOUT: usize = 3;

/// A parameter of the fit.
struct Parameter {
    /// As the profile's file has it.
    name: &'static str,
    /// Where the search begins: what such a thing costs by its order of magnitude.
    start: f64,
    of: fn(&mut Profile) -> &mut f64,
    /// Shares end at one.
    share: bool,
}

const fn parameter(name: &'static str, start: f64, of: fn(&mut Profile) -> &mut f64) -> Parameter {
    Parameter { name, start, of, share: false }
}

const fn share(name: &'static str, start: f64, of: fn(&mut Profile) -> &mut f64) -> Parameter {
    Parameter { name, start, of, share: true }
}

/// What is fitted. The machine "A" is the one that others are compared with: its factor is one.
const PARAMETERS: [Parameter; 15] = [
    // A stall of 2.8 s over 19,200 submissions.
    parameter("submit", 1.4e-4, |p| &mut p.submit),
    // 6 s more with 1,200 allocations.
    parameter("declare", 2e-7, |p| &mut p.declare),
    // 63 GB declared do not collapse, 74 GB do, of 127.
    share("rewire_share", 0.57, |p| &mut p.rewire_share),
    // 16 KiB pages at some 80 ns.
    parameter("rewire", 5e-12, |p| &mut p.rewire),
    // 51 s of stall came with 75 s of waiting and 38 s elsewhere, a part of it without wiring.
    parameter("coupling", 2.5, |p| &mut p.coupling),
    parameter("register", 5e-4, |p| &mut p.register),
    parameter("commit", 1e-3, |p| &mut p.commit),
    parameter("commit_member", 2e-7, |p| &mut p.commit_member),
    // 2.9 TB of experts in 15.5 s.
    parameter("kernel_rate", 1.9e11, |p| &mut p.kernel_rate),
    parameter("streaming.drive_rate", 1.2e10, |p| &mut p.streaming.drive_rate),
    parameter("streaming.page_rate", 1.5e11, |p| &mut p.streaming.page_rate),
    // 28 s of 256 tokens are neither waiting nor device.
    parameter("streaming.host", 0.11, |p| &mut p.streaming.host),
    share("streaming.async_wait", 0.9, |p| &mut p.streaming.async_wait),
    parameter("sessions.B", 1.0, |p| p.sessions.entry("B".into()).or_insert(1.0)),
    parameter("sessions.C", 1.0, |p| p.sessions.entry("C".into()).or_insert(1.0)),
];

/// Where the search for the curve of hits begins: [`super::Workload::hits`].
const HITS: [f64; 2] = [10.0, 0.7];
/// Names of what it has.
const HIT_PARAMETERS: [&str; 2] = ["workload.hit_slots", "workload.hit_power"];

/// Names of all that is fitted, as the profile's file has them.
pub fn parameters() -> impl Iterator<Item = &'static str> {
    PARAMETERS.iter().map(|parameter| parameter.name).chain(HIT_PARAMETERS)
}

/// A published row with its replay.
#[derive(Clone, Debug)]
pub struct Case {
    /// The row.
    pub row: Row,
    /// What is run for it.
    pub run: Run,
    /// What that did.
    pub quantities: Quantities,
}

impl Case {
    /// Its figures at a machine's prices.
    pub fn outcome(&self, profile: &Profile) -> Outcome {
        Outcome::of(profile, &self.run, &self.quantities.price(profile))
    }

    fn loss(&self, profile: &Profile) -> f64 {
        let found = self.outcome(profile);
        let ratio = |published: Option<f64>, found: f64| {
            published.map_or(0.0, |value| (found.max(1e-9) / value).ln().powi(2))
        };
        let speed = self.row.tokens_per_second;
        let run = profile.workload.tokens as f64 / speed.unwrap_or(found.tokens_per_second);
        let part = |published: Option<f64>, found: f64| {
            published.map_or(0.0, |value| ((found - value) / run).powi(2))
        };
        let parts = part(self.row.stall, found.stall)
            + part(self.row.kernel, found.kernel)
            + part(self.row.disk_wait, found.disk_wait);
        ratio(speed, found.tokens_per_second) + OTHER * parts + COMMITS * ratio(self.row.flush, found.flush)
    }
}

/// Replays a row; none for one without tokens/s, or with a way to declare memory that there is not here.
///
/// # Errors
/// What the ledger refuses of it.
pub fn case(profile: &Profile, row: &Row) -> Result<Option<Case>, ResidencyError> {
    let Some(run) = row.tokens_per_second.and(row.run(profile)) else { return Ok(None) };
    let quantities = replay(profile, &run, Detail::Changes)?.quantities;
    Ok(Some(Case { row: row.clone(), run, quantities }))
}

/// Replays all rows that can be.
///
/// # Errors
/// What the ledger refuses of one.
pub fn cases(profile: &Profile, rows: &[Row]) -> Result<Vec<Case>, ResidencyError> {
    rows.iter().filter_map(|row| case(profile, row).transpose()).collect()
}

/// Fits a machine to published rows. Of `like` is kept what is not fitted: memory, limits, the workload.
///
/// # Errors
/// What the ledger refuses of a row.
pub fn fit(like: &Profile, rows: &[Row]) -> Result<Profile, ResidencyError> {
    let start = start(&hits(like, rows));
    let fitted = search(&start, &start, cases(&start, rows)?.iter(), EVALUATIONS, ROUNDS);
    Ok(Profile {
        like: None,
        source: format!(
            "fitted to {} published rows of others' machines; a simulation, no evidence about hardware",
            rows.iter().filter(|row| row.tokens_per_second.is_some()).count()
        ),
        ..rounded(fitted)
    })
}

/// The profile with all that is fitted to tokens/s where the search begins.
fn start(like: &Profile) -> Profile {
    let mut start = like.clone();
    start.sessions.insert("A".into(), 1.0);
    PARAMETERS.iter().for_each(|parameter| *(parameter.of)(&mut start) = parameter.start);
    start
}

/// Fits the curve of hits to the hit rates published, and to nothing else.
fn hits(like: &Profile, rows: &[Row]) -> Profile {
    let mut points: Vec<(f64, f64)> = Vec::new();
    for row in rows {
        let (Some(run), Some(hits)) = (row.run(like), row.hits) else { continue };
        let point = (run.slots as f64 + run.pinned_a_layer(&like.workload), hits);
        if !points.contains(&point) {
            points.push(point);
        }
    }
    let with = |logs: &[f64]| {
        let mut fitted = like.clone();
        (fitted.workload.hit_slots, fitted.workload.hit_power) = (logs[0].exp(), logs[1].exp());
        fitted
    };
    let value = |logs: &[f64]| -> f64 {
        let workload = with(logs).workload;
        points.iter().map(|(slots, hits)| (workload.hits(*slots) - hits).powi(2)).sum()
    };
    rounded(with(&minimum(&value, &HITS.map(f64::ln), 0.2, 2_000).0))
}

/// Four digits of all that was fitted: more say nothing, and fewer differ between machines' logarithms.
fn rounded(mut profile: Profile) -> Profile {
    let round = |value: &mut f64| *value = format!("{value:.3e}").parse().unwrap_or(*value);
    PARAMETERS.iter().for_each(|parameter| round((parameter.of)(&mut profile)));
    round(&mut profile.workload.hit_slots);
    round(&mut profile.workload.hit_power);
    profile
}

/// What the fit predicts of a row that it has not seen: tokens/s of each case, in order. Rows that replay the
/// same run on the same machine are left out with it.
pub fn without_each(fitted: &Profile, cases: &[Case]) -> Vec<f64> {
    left_out(&start(fitted), fitted, cases, (EVALUATIONS_WITHOUT, ROUNDS_WITHOUT))
}

/// The same where no search begins with numbers that have seen the row.
#[cfg(test)]
pub(super) fn without_each_from_scratch(like: &Profile, cases: &[Case]) -> Vec<f64> {
    let start = start(like);
    left_out(&start, &start, cases, (EVALUATIONS, ROUNDS))
}

fn left_out(prior: &Profile, start: &Profile, cases: &[Case], effort: (usize, usize)) -> Vec<f64> {
    let mut found: Vec<(&Run, f64)> = Vec::new();
    for left in cases {
        if !found.iter().any(|(run, _)| *run == &left.run) {
            let others = cases.iter().filter(|case| case.run != left.run);
            let profile = search(prior, start, others, effort.0, effort.1);
            found.push((&left.run, left.outcome(&profile).tokens_per_second));
        }
    }
    let of = |case: &Case| found.iter().find(|(run, _)| *run == &case.run).map(|(_, speed)| *speed);
    cases.iter().filter_map(of).collect()
}

fn search<'a>(
    prior: &Profile,
    start: &Profile,
    cases: impl Iterator<Item = &'a Case>,
    evaluations: usize,
    rounds: usize,
) -> Profile {
    let cases: Vec<&Case> = cases.collect();
    let logs = |profile: &Profile| -> Vec<f64> {
        let mut profile = profile.clone();
        PARAMETERS.iter().map(|parameter| (parameter.of)(&mut profile).max(1e-30).ln()).collect()
    };
    let with = |point: &[f64]| {
        let mut profile = start.clone();
        for (parameter, log) in PARAMETERS.iter().zip(point) {
            let most = if parameter.share { 1.0 } else { f64::MAX };
            *(parameter.of)(&mut profile) = log.exp().min(most);
        }
        profile
    };
    let prior = logs(prior);
    let value = |point: &[f64]| {
        let profile = with(point);
        let far: f64 = point.iter().zip(&prior).map(|(a, b)| (a - b).powi(2)).sum();
        cases.iter().map(|case| case.loss(&profile)).sum::<f64>() + PRIOR * far
    };
    let mut point = logs(start);
    for round in 0..rounds {
        // A simplex that has become flat in some direction is drawn anew around its best vertex.
        let step = if round % 2 == 0 { 0.25 } else { -0.1 };
        point = minimum(&value, &point, step, evaluations).0;
    }
    with(&point)
}

/// Two rows of one session that differ by more than 5 %.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The one with less, as an index of the cases.
    pub less: usize,
    /// The one with more.
    pub more: usize,
    /// Published ratio of their figures, above one.
    pub published: f64,
    /// Predicted ratio.
    pub predicted: f64,
}

impl Comparison {
    /// Whether the prediction has them in the published order.
    pub fn holds(&self) -> bool {
        self.predicted > 1.0
    }
}

/// All comparisons of tokens/s, which a profile must get right.
pub fn comparisons(profile: &Profile, cases: &[Case]) -> Vec<Comparison> {
    compared(profile, cases, |row| row.tokens_per_second, |outcome| outcome.tokens_per_second)
}

/// All comparisons of stalls. They are not what the fit is for: a stall is a small part of most runs.
pub fn comparisons_of_stalls(profile: &Profile, cases: &[Case]) -> Vec<Comparison> {
    compared(profile, cases, |row| row.stall, |outcome| outcome.stall)
}

fn compared(
    profile: &Profile,
    cases: &[Case],
    published: fn(&Row) -> Option<f64>,
    predicted: fn(&Outcome) -> f64,
) -> Vec<Comparison> {
    let figures: Vec<(Option<f64>, f64)> =
        cases.iter().map(|case| (published(&case.row), predicted(&case.outcome(profile)))).collect();
    let mut all = Vec::new();
    for (less, a) in cases.iter().enumerate() {
        for (more, b) in cases.iter().enumerate() {
            let (Some(least), Some(most)) = (figures[less].0, figures[more].0) else { continue };
            if a.row.same_session(&b.row) && most / least > 1.05 {
                let predicted = figures[more].1 / figures[less].1;
                all.push(Comparison { less, more, published: most / least, predicted });
            }
        }
    }
    all
}
