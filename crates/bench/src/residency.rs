//! What declaring memory to an accelerator costs, by a simulation that was fitted to published rows.
//!
//! Nothing is measured here. The replay of `metaltail_device::sim::replay` drives the ledger that the engine
//! uses through runs that others published, and through some that nobody did. All that comes out is relative
//! and of that simulation: [`NOTE`] stands in every output.

mod questions;

use metaltail_device::residency::ResidencyError;
use metaltail_device::sim::fit::{self, Case, Comparison};
use metaltail_device::sim::replay::Outcome;
use metaltail_device::sim::rows::Row;
use metaltail_device::sim::{Profile, rows};
use serde::Serialize;

pub use questions::{Arm, Question, questions};

/// What every output says.
pub const NOTE: &str = "a simulation fitted to rows that others published; it explains them and says what a design would change, and is no evidence about hardware";

/// A profile whose tokens/s are off by a larger share for some row does not explain it.
pub const MOST_ERROR: f64 = 0.15;

/// Figures of a run; seconds are of the whole run, and none was not published.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Tokens a second.
    pub tokens_per_second: Option<f64>,
    /// The device had work and computed nothing.
    pub stall_seconds: Option<f64>,
    /// In kernels.
    pub kernel_seconds: Option<f64>,
    /// Waiting for experts.
    pub disk_wait_seconds: Option<f64>,
    /// Commits of additions.
    pub flush_seconds: Option<f64>,
}

impl From<&Row> for Figures {
    fn from(row: &Row) -> Figures {
        Figures {
            tokens_per_second: row.tokens_per_second,
            stall_seconds: row.stall,
            kernel_seconds: row.kernel,
            disk_wait_seconds: row.disk_wait,
            flush_seconds: row.flush,
        }
    }
}

impl From<&Outcome> for Figures {
    fn from(outcome: &Outcome) -> Figures {
        Figures {
            tokens_per_second: Some(outcome.tokens_per_second),
            stall_seconds: Some(outcome.stall),
            kernel_seconds: Some(outcome.kernel),
            disk_wait_seconds: Some(outcome.disk_wait),
            flush_seconds: Some(outcome.flush),
        }
    }
}

/// A published row beside its replay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplayedRow {
    /// Machine, budget, cap.
    pub name: String,
    /// How memory was declared.
    pub declared: &'static str,
    /// What was published.
    pub published: Figures,
    /// What the replay gives; none where it cannot be replayed.
    pub predicted: Option<Figures>,
    /// Why it cannot, where the machine refuses it.
    pub refused: Option<String>,
    /// How far predicted tokens/s are off, as a share; none for a machine that is not the published one.
    pub error: Option<f64>,
    /// The same by a fit that has not seen the row, nor others of the same run.
    pub error_left_out: Option<f64>,
    /// What was said of the row.
    pub note: String,
}

/// What of the published order comes out.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Order {
    /// Pairs of rows of one session whose published figures differ by more than 5 %.
    pub comparisons: usize,
    /// Of those, predicted in the same order.
    pub same: usize,
    /// The others, in words.
    pub different: Vec<String>,
}

/// Whether a profile explains the rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// Whether it does: fewer parameters than rows, the order of all tokens/s, and no error above
    /// [`MOST_ERROR`].
    pub holds: bool,
    /// Numbers of the profile that were fitted.
    pub parameters: Vec<&'static str>,
    /// Rows that they were fitted to.
    pub rows: usize,
    /// Order of tokens/s.
    pub order: Order,
    /// Order of stalls, which is not asked for: where memory is declared once they are small, and noise.
    pub order_of_stalls: Order,
    /// Largest error of a row's tokens/s, as a share.
    pub worst: f64,
    /// Largest error of a row that was left out.
    pub worst_left_out: f64,
}

/// All that `bench residency` says.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ResidencyReport {
    /// What all of it is.
    pub note: &'static str,
    /// Name of the profile.
    pub profile: String,
    /// Where its numbers come from.
    pub source: String,
    /// Published rows.
    pub rows: Vec<ReplayedRow>,
    /// What is to be thought of the profile; none for a variation, which is another machine than the rows'.
    pub check: Option<Check>,
    /// What nobody published.
    pub questions: Vec<Question>,
}

/// Replays everything on a machine.
///
/// # Errors
/// A machine that takes less memory than the questions need.
pub fn measure(profile: &Profile) -> Result<ResidencyReport, ResidencyError> {
    let published = rows::published();
    let replayed: Vec<Result<Option<Case>, ResidencyError>> =
        published.iter().map(|row| fit::case(profile, row)).collect();
    let mut rows: Vec<ReplayedRow> =
        published.iter().zip(&replayed).map(|(row, case)| replayed_row(row, case, profile)).collect();
    let cases: Vec<Case> = replayed.into_iter().filter_map(|case| case.ok().flatten()).collect();
    let check = profile.like.is_none().then(|| check(profile, &cases, &mut rows));
    Ok(ResidencyReport {
        note: NOTE,
        profile: profile.name.clone(),
        source: profile.source.clone(),
        check,
        questions: questions(profile)?,
        rows,
    })
}

fn replayed_row(row: &Row, case: &Result<Option<Case>, ResidencyError>, profile: &Profile) -> ReplayedRow {
    let case = case.as_ref();
    let outcome = case.ok().and_then(Option::as_ref).map(|case| case.outcome(profile));
    ReplayedRow {
        name: row.name(),
        declared: row.declared_words(),
        published: row.into(),
        predicted: outcome.as_ref().map(Figures::from),
        refused: case.err().map(ToString::to_string),
        error: None,
        error_left_out: None,
        note: row.note.clone(),
    }
}

/// Fills in the errors of rows, and judges them.
fn check(profile: &Profile, cases: &[Case], rows: &mut [ReplayedRow]) -> Check {
    let replayed = rows.iter_mut().filter(|row| row.predicted.is_some());
    for ((row, case), left_out) in replayed.zip(cases).zip(fit::without_each(profile, cases)) {
        let error = |speed: f64| case.row.tokens_per_second.map(|published| speed / published - 1.0);
        row.error = error(case.outcome(profile).tokens_per_second);
        row.error_left_out = error(left_out);
    }
    let worst =
        |of: fn(&ReplayedRow) -> Option<f64>| rows.iter().filter_map(of).map(f64::abs).fold(0.0, f64::max);
    let order_of = |comparisons: &[Comparison]| order(cases, comparisons);
    let order = order_of(&fit::comparisons(profile, cases));
    let parameters: Vec<&str> = fit::parameters().collect();
    let worst_error = worst(|row| row.error);
    Check {
        holds: parameters.len() < cases.len() && order.different.is_empty() && worst_error <= MOST_ERROR,
        parameters,
        rows: cases.len(),
        order,
        order_of_stalls: order_of(&fit::comparisons_of_stalls(profile, cases)),
        worst: worst_error,
        worst_left_out: worst(|row| row.error_left_out),
    }
}

fn order(cases: &[Case], comparisons: &[Comparison]) -> Order {
    let name = |n: usize| format!("{} {}", cases[n].row.name(), cases[n].row.declared_words());
    let wrong = comparisons.iter().filter(|comparison| !comparison.holds());
    let different: Vec<String> = wrong
        .map(|c| {
            let (less, more) = (name(c.less), name(c.more));
            format!("{more} over {less}: {:.2} published, {:.2} predicted", c.published, c.predicted)
        })
        .collect();
    Order { comparisons: comparisons.len(), same: comparisons.len() - different.len(), different }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_stands_beside_its_own_replay() {
        let profile = Profile::m5max();
        let report = measure(&profile).unwrap();
        assert_eq!(report.rows.len(), 26);
        let unreplayed: Vec<&str> =
            report.rows.iter().filter(|row| row.predicted.is_none()).map(|row| row.declared).collect();
        assert_eq!(unreplayed, ["one heap"]);
        for case in fit::cases(&profile, &rows::published()).unwrap() {
            let speed = case.outcome(&profile).tokens_per_second;
            let error = speed / case.row.tokens_per_second.unwrap() - 1.0;
            let found = report.rows.iter().any(|row| {
                row.published == Figures::from(&case.row)
                    && row.name == case.row.name()
                    && row.predicted.and_then(|figures| figures.tokens_per_second) == Some(speed)
                    && row.error == Some(error)
            });
            assert!(found, "{}", case.row.name());
        }
        let check = report.check.unwrap();
        assert!(check.holds, "{check:?}");
        assert_eq!((check.parameters.len(), check.rows), (17, 25));
        assert_eq!((check.order.comparisons, check.order.same), (36, 36), "{:?}", check.order.different);
        assert!(check.worst <= 0.15 && check.worst_left_out >= check.worst, "{check:?}");
    }

    #[test]
    fn a_profile_that_contradicts_the_rows_fails() {
        // A driver to which walking costs nothing: then nothing collapses, and sets are not worth their commits.
        let profile = Profile { declare: 0.0, rewire: 0.0, ..Profile::m5max() };
        let check = measure(&profile).unwrap().check.unwrap();
        assert!(!check.holds && check.worst > 0.5 && !check.order.different.is_empty(), "{check:?}");
    }

    #[test]
    fn another_machine_is_not_held_against_the_rows() {
        let text = include_str!("../../device/profiles/half-m5max.json");
        let report = measure(&Profile::parse(text).unwrap()).unwrap();
        assert_eq!(report.check, None);
        assert!(report.rows.iter().all(|row| row.error.is_none() && row.error_left_out.is_none()));
        // A cache of 52 slots a layer is more than it keeps resident; one of 16 is not.
        assert!(report.rows[2].predicted.is_some() && report.rows[2].refused.is_none());
        assert!(report.rows[5].predicted.is_none());
        assert!(report.rows[5].refused.as_ref().unwrap().contains("iogpu.wired_limit_mb"));
        assert!(report.questions.iter().all(|question| question.arms.len() > 2));
    }
}
