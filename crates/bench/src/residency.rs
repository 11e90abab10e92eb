//! What declaring memory to an accelerator costs, by a simulation that was fitted to published rows.
//!
//! Nothing is measured here. The replay of `metaltail_device::sim::replay` drives the ledger that the engine
//! uses through runs that others published, and through some that nobody did. All that comes out is relative
//! and of that simulation: [`NOTE`] stands in every output.

mod questions;

use metaltail_device::residency::ResidencyError;
use metaltail_device::sim::fit::{self, Case};
use metaltail_device::sim::replay::Outcome;
use metaltail_device::sim::rows::Row;
use metaltail_device::sim::{Profile, rows};
use serde::Serialize;

pub use questions::{Arm, Question, questions};

/// What every output says.
pub const NOTE: &str = "a simulation fitted to rows that others published; it explains them and says what a design would change, and is no evidence about hardware";

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
    /// How far predicted tokens/s are off, as a share.
    pub error: Option<f64>,
    /// The same by a fit that has not seen the row, nor others of the same run.
    pub error_left_out: Option<f64>,
    /// What was said of the row.
    pub note: String,
}

/// What of the published order comes out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Order {
    /// Pairs of one machine and budget whose published tokens/s differ by more than 5 %.
    pub comparisons: usize,
    /// Of those, predicted in the same order.
    pub same: usize,
    /// The others, in words.
    pub different: Vec<String>,
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
    /// Numbers of it that are fitted to tokens/s.
    pub parameters: Vec<&'static str>,
    /// Published rows.
    pub rows: Vec<ReplayedRow>,
    /// Their order.
    pub order: Order,
    /// Largest error of a row's tokens/s, as a share.
    pub worst: f64,
    /// Largest error of a row that was left out.
    pub worst_left_out: f64,
    /// What nobody published.
    pub questions: Vec<Question>,
}

/// Replays everything on a machine.
///
/// # Errors
/// A profile of a machine that refuses a row: it takes less memory than was published.
pub fn measure(profile: &Profile) -> Result<ResidencyReport, ResidencyError> {
    let published = rows::published();
    let cases = fit::cases(profile, &published)?;
    let left_out = fit::without_each(profile, &cases);
    let mut replayed = cases.iter().zip(&left_out);
    // Cases are the rows that can be replayed, in the same order.
    let rows: Vec<ReplayedRow> = published
        .iter()
        .map(|row| match row.tokens_per_second.and(row.run(profile)) {
            Some(_) => replayed_row(row, replayed.next(), profile),
            None => replayed_row(row, None, profile),
        })
        .collect();
    let worst =
        |of: fn(&ReplayedRow) -> Option<f64>| rows.iter().filter_map(of).map(f64::abs).fold(0.0, f64::max);
    Ok(ResidencyReport {
        note: NOTE,
        profile: profile.name.clone(),
        source: profile.source.clone(),
        parameters: fit::parameters().collect(),
        worst: worst(|row| row.error),
        worst_left_out: worst(|row| row.error_left_out),
        order: order(profile, &cases),
        questions: questions(profile)?,
        rows,
    })
}

fn replayed_row(row: &Row, replayed: Option<(&Case, &f64)>, profile: &Profile) -> ReplayedRow {
    let outcome = replayed.map(|(case, _)| case.outcome(profile));
    let error = |predicted: f64| row.tokens_per_second.map(|published| predicted / published - 1.0);
    ReplayedRow {
        name: row.name(),
        declared: row.declared_words(),
        published: row.into(),
        predicted: outcome.as_ref().map(Figures::from),
        error: outcome.and_then(|outcome| error(outcome.tokens_per_second)),
        error_left_out: replayed.and_then(|(_, predicted)| error(*predicted)),
        note: row.note.clone(),
    }
}

fn order(profile: &Profile, cases: &[Case]) -> Order {
    let comparisons = fit::comparisons(profile, cases);
    let name = |n: usize| format!("{} {}", cases[n].row.name(), cases[n].row.declared_words());
    let wrong = comparisons.iter().filter(|comparison| !comparison.holds());
    let different: Vec<String> = wrong
        .map(|c| {
            let (slower, faster) = (name(c.slower), name(c.faster));
            format!("{faster} over {slower}: {:.2} published, {:.2} predicted", c.published, c.predicted)
        })
        .collect();
    Order { comparisons: comparisons.len(), same: comparisons.len() - different.len(), different }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_stands_beside_its_own_replay() {
        let report = measure(&Profile::m5max()).unwrap();
        assert_eq!(report.rows.len(), 26);
        let unreplayed: Vec<&str> =
            report.rows.iter().filter(|row| row.predicted.is_none()).map(|row| row.declared).collect();
        assert_eq!(unreplayed, ["one heap"]);
        let profile = Profile::m5max();
        let cases = fit::cases(&profile, &rows::published()).unwrap();
        for case in &cases {
            let speed = case.outcome(&profile).tokens_per_second;
            let found = report.rows.iter().filter(|row| {
                row.published == Figures::from(&case.row)
                    && row.name == case.row.name()
                    && row.predicted.and_then(|figures| figures.tokens_per_second) == Some(speed)
            });
            assert!(found.count() >= 1, "{}", case.row.name());
        }
        assert_eq!(report.order.same, report.order.comparisons, "{:?}", report.order.different);
        assert!(report.worst <= 0.15 && report.worst_left_out >= report.worst);
    }

    #[test]
    fn a_profile_that_contradicts_the_rows_is_shown_to() {
        // A driver that never wires anew: then nothing collapses.
        let profile = Profile { rewire_share: 1.0, ..Profile::m5max() };
        let report = measure(&profile).unwrap();
        assert!(report.worst > 0.5, "{}", report.worst);
        assert!(!report.order.different.is_empty());
    }
}
