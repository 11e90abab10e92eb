//! One run of the harness as one JSON object: everything that tables and plots are drawn from.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ab::{Ab, AbResult};
use crate::cap::{CapRow, Claim, Sweep};
use crate::harness::{Arm, Noise, Run};
use crate::io::{Io, IoRow, RawRead, Streaming};
use crate::job::Job;

/// Version of the form.
pub const VERSION: u32 = 1;

/// What was compared, and what came out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Outcome {
    /// Two arms.
    Ab {
        /// What came out.
        result: Box<AbResult>,
    },
    /// A sweep over caps.
    Cap {
        /// A row a cap.
        rows: Vec<CapRow>,
        /// What follows.
        claims: Vec<Claim>,
    },
    /// The drive.
    Io {
        /// A row a way to read.
        rows: Vec<IoRow>,
        /// Decoding beside it, where it was asked for.
        streaming: Option<Box<Streaming>>,
        /// Every measurement of the drive, in order.
        raw: Vec<RawRead>,
    },
}

/// The record of `bench ab` and `bench cap`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this form.
    pub version: u32,
    /// What came out.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Why nothing follows from it; null of a run that counts.
    pub refused: Option<String>,
    /// What the controls say.
    pub noise: Noise,
    /// The statistic of the rows.
    pub statistic: String,
    /// Program, commit and build.
    pub program: Value,
    /// Where it ran.
    pub machine: Value,
    /// The model.
    pub model: Value,
    /// Seed, prompts, tokens, states; given sequences are left out.
    pub job: Job,
    /// The arms with the settings that they were given.
    pub arms: Vec<Arm>,
    /// Names of the arms in the order in which they ran.
    pub order: Vec<String>,
    /// Every run, those that do not count with their reason.
    pub runs: Vec<Run>,
}

/// What surrounds a comparison.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// Program, commit and build.
    pub program: Value,
    /// Where it ran.
    pub machine: Value,
}

impl Record {
    /// The record of a comparison of two arms and, where there is one, the probe.
    pub fn of_ab(ab: Ab, arms: &[Arm], job: &Job, around: Surroundings) -> Record {
        let statistic = "a run's figure is the median over its rotating prompts, an arm's the median, minimum and maximum over its runs; ratios are formed pair by pair";
        let outcome = Outcome::Ab { result: Box::new(ab.result) };
        let order = order(&ab.runs, arms);
        Record {
            noise: ab.noise,
            refused: ab.refused,
            ..Record::of(outcome, statistic, ab.runs, arms, job, around, order)
        }
    }

    /// The record of a sweep.
    pub fn of_sweep(sweep: Sweep, arms: &[Arm], job: &Job, around: Surroundings) -> Record {
        let statistic = "median, minimum and maximum over all rotating prompts of all rounds";
        let outcome = Outcome::Cap { rows: sweep.rows, claims: sweep.claims };
        let order = order(&sweep.runs, arms);
        let record = Record::of(outcome, statistic, sweep.runs, arms, job, around, order);
        Record { noise: sweep.noise, refused: sweep.refused, ..record }
    }

    /// The record of a drive, and of decoding beside it. `model` is what the files belong to.
    pub fn of_io(io: Io, arm: Arm, job: &Job, model: Value, around: Surroundings) -> Record {
        let statistic = "median, minimum and maximum over rounds; ratios are formed round by round, over the mean of the raw reads before and after";
        let order = io.raw.iter().map(|row| row.way.clone()).collect();
        let outcome = Outcome::Io { rows: io.rows, streaming: io.streaming.map(Box::new), raw: io.raw };
        let record = Record::of(outcome, statistic, io.runs, &[arm], job, around, order);
        Record { noise: io.noise, refused: io.refused, model, ..record }
    }

    fn of(
        outcome: Outcome,
        statistic: &str,
        runs: Vec<Run>,
        arms: &[Arm],
        job: &Job,
        around: Surroundings,
        order: Vec<String>,
    ) -> Record {
        let record = runs.iter().find_map(|run| run.record.as_ref());
        Record {
            version: VERSION,
            outcome,
            refused: None,
            noise: Noise::default(),
            statistic: statistic.to_owned(),
            program: around.program,
            machine: around.machine,
            model: record.map(|record| record.model.clone()).unwrap_or_default(),
            job: Job { sequences: None, ..job.clone() },
            arms: arms.to_vec(),
            order,
            runs,
        }
    }
}

/// Names of the arms in the order of their runs.
fn order(runs: &[Run], arms: &[Arm]) -> Vec<String> {
    runs.iter().filter_map(|run| arms.get(run.arm)).map(|arm| arm.name.clone()).collect()
}
