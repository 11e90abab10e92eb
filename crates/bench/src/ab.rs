//! Two arms against each other.

use serde::{Deserialize, Serialize};

use crate::Spread;
use crate::arm::ArmRecord;
use crate::compare::{self, Difference, Foreseen};
use crate::figures::FIGURES;
use crate::harness::{Arm, Harness, Noise, Role, Run, Runner, Step, ab_order, cache_hits, degenerate, floor};
use crate::job::Job;
use crate::numerics::Numerics;

/// How to compare.
#[derive(Clone, Debug)]
pub struct AbOptions {
    /// Pairs.
    pub pairs: usize,
    /// How far controls may lie apart, as a share.
    pub noise: f64,
    /// Whether more than one resolved setting may differ.
    pub several: bool,
    /// Arm A with a cap of one expert a layer, for comparisons of caches.
    pub probe: Arm,
}

/// One figure of both arms.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AbFigure {
    /// Its key.
    pub key: String,
    /// A's runs, each the median over its prompts.
    pub a: Spread,
    /// B's.
    pub b: Spread,
    /// B over A, pair by pair; none where A is zero.
    pub ratio: Option<Spread>,
    /// How far apart the controls are, as a share.
    pub noise: Option<f64>,
    /// What follows.
    pub verdict: Verdict,
}

/// What pairs say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// All runs gave the same.
    Same,
    /// The median ratio is no further from one than controls are from each other.
    WithinNoise,
    /// Some pairs say higher, some lower.
    PairsDisagree,
    /// B is higher.
    Higher,
    /// B is lower.
    Lower,
}

impl Verdict {
    fn of(a: &Spread, b: &Spread, ratio: Option<&Spread>, noise: Option<f64>) -> Verdict {
        if a.min == b.max && a.max == b.min {
            return Verdict::Same;
        }
        let Some(ratio) = ratio else {
            return if b.median > a.median { Verdict::Higher } else { Verdict::Lower };
        };
        match ratio.median {
            median if noise.is_none_or(|noise| (median - 1.0).abs() <= noise) => Verdict::WithinNoise,
            _ if ratio.min < 1.0 && ratio.max > 1.0 => Verdict::PairsDisagree,
            median if median > 1.0 => Verdict::Higher,
            _ => Verdict::Lower,
        }
    }

    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Verdict::Same => "same",
            Verdict::WithinNoise => "within noise",
            Verdict::PairsDisagree => "pairs disagree",
            Verdict::Higher => "B higher",
            Verdict::Lower => "B lower",
        }
    }
}

/// What came out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AbResult {
    /// The setting under test, as the row's name.
    pub name: String,
    /// Settings that differ.
    pub differences: Vec<Difference>,
    /// A row a figure.
    pub figures: Vec<AbFigure>,
    /// Hash of A's ids.
    pub ids_a: Option<String>,
    /// Hash of B's ids.
    pub ids_b: Option<String>,
    /// Where numbers may differ.
    pub numerics: Option<Numerics>,
    /// Share of decode's look-ups that the cache answers at a cap of 1, in a comparison of caches.
    pub hit_rate_at_cap_1: Option<f64>,
}

/// A comparison as it went.
#[derive(Clone, Debug)]
pub struct Ab {
    /// Every run.
    pub runs: Vec<Run>,
    /// What the controls say.
    pub noise: Noise,
    /// What came out; of a refused comparison, as far as it got.
    pub result: AbResult,
    /// Why nothing follows from it.
    pub refused: Option<String>,
}

/// Compares `arms[0]` (A) with `arms[1]` (B).
pub fn ab(
    arms: &[Arm; 2],
    job: &Job,
    options: &AbOptions,
    runner: &mut dyn Runner,
    tell: &mut dyn FnMut(&Run),
) -> Ab {
    let same_ids = !compare::may_change_numbers(&arms[0].given, &arms[1].given);
    let all = [arms[0].clone(), arms[1].clone(), options.probe.clone()];
    let harness = Harness { arms: &all, job, same_ids, stop_at_failure: true };
    // One run of each first: what cannot be compared is refused before hours of it.
    let order = ab_order(options.pairs);
    let mut runs = harness.run(&order[..order.len().min(4)], runner, tell);
    let mut result = AbResult::default();
    let mut refused = failure(&runs).or_else(|| {
        let (a, b) = (record(&runs, 0)?, record(&runs, 1)?);
        result.differences = compare::differences(&a.config, &b.config);
        result.name = name(&result.differences);
        unsuitable(&result.differences, options.several).or_else(|| not_engaged(&result.differences, a, b))
    });
    if refused.is_none() && compare::changes_cache(&result.differences) {
        let probe = Step { arm: 2, role: Role::Probe, block: 0 };
        runs = harness.resume(runs, &[probe], runner, tell);
        result.hit_rate_at_cap_1 = runs.last().and_then(cache_hits);
        refused = failure(&runs).or_else(|| degenerate(result.hit_rate_at_cap_1));
    }
    if refused.is_none() {
        runs = harness.resume(runs, &order[order.len().min(4)..], runner, tell);
        refused = failure(&runs);
    }
    let noise = Noise::of(&runs, options.noise);
    result.figures = figures(&runs);
    result.ids_a = record(&runs, 0).map(ArmRecord::ids_hash);
    result.ids_b = record(&runs, 1).map(ArmRecord::ids_hash);
    result.numerics = if same_ids { None } else { numerics(&runs) };
    refused = refused.or_else(|| noise.refusal());
    runs.iter_mut().filter_map(|run| run.record.as_mut()).for_each(ArmRecord::forget_ids);
    Ab { runs, noise, result, refused }
}

/// The first run that does not count.
fn failure(runs: &[Run]) -> Option<String> {
    let run = runs.iter().find(|run| run.excluded.is_some())?;
    let arm = ["arm A", "arm B", "the run at a cap of 1"].get(run.arm).copied().unwrap_or("an arm");
    Some(format!("{arm} failed: {}", run.excluded.as_deref().unwrap_or_default()))
}

fn record(runs: &[Run], arm: usize) -> Option<&ArmRecord> {
    runs.iter().filter(|run| run.arm == arm).find_map(Run::counted)
}

fn name(differences: &[Difference]) -> String {
    let own: Vec<String> =
        differences.iter().filter(|difference| !difference.follows).map(ToString::to_string).collect();
    own.join(", ")
}

/// Why two arms need not be run at all, as far as given settings tell.
pub fn refused_beforehand(a: &Arm, b: &Arm, several: bool) -> Option<String> {
    let foreseen = Foreseen::of(&a.given, &b.given);
    match foreseen.differences.len() {
        0 if !foreseen.complete => None,
        _ => unsuitable(&foreseen.differences, several),
    }
}

/// One variable a row.
fn unsuitable(differences: &[Difference], several: bool) -> Option<String> {
    let own = differences.iter().filter(|difference| !difference.follows).count();
    match own {
        0 => Some("the arms resolve to the same settings: there is nothing to compare".to_owned()),
        1 => None,
        _ if several => None,
        own => Some(format!(
            "{own} resolved settings differ ({}): give both arms the same value of all but one, or say --several",
            name(differences)
        )),
    }
}

fn not_engaged(differences: &[Difference], a: &ArmRecord, b: &ArmRecord) -> Option<String> {
    let mut arms = [("A", a), ("B", b)].into_iter();
    arms.find_map(|(name, record)| {
        let reason = differences.iter().find_map(|it| compare::not_engaged(&it.key, record))?;
        Some(format!("arm {name}: {reason}"))
    })
}

fn measured(runs: &[Run], arm: usize) -> impl Iterator<Item = &Run> {
    runs.iter().filter(move |run| run.role == Role::Measured && run.arm == arm)
}

fn figures(runs: &[Run]) -> Vec<AbFigure> {
    FIGURES.iter().filter_map(|figure| ab_figure(runs, figure.key)).collect()
}

fn ab_figure(runs: &[Run], key: &str) -> Option<AbFigure> {
    // Pairs that are whole.
    let pairs: Vec<(f64, f64)> = measured(runs, 0)
        .filter_map(|a| {
            let b = measured(runs, 1).find(|b| b.block == a.block)?;
            Some((a.median(key)?, b.median(key)?))
        })
        .collect();
    let (a, b): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
    let (a, b) = (Spread::of(&a)?, Spread::of(&b)?);
    let ratios: Vec<f64> = pairs.iter().filter(|(a, _)| *a > 0.0).map(|(a, b)| b / a).collect();
    let ratio = Spread::of(&ratios).filter(|ratio| ratio.n == pairs.len());
    let noise = floor(runs, key);
    let verdict = Verdict::of(&a, &b, ratio.as_ref(), noise);
    Some(AbFigure { key: key.to_owned(), a, b, ratio, noise, verdict })
}

fn numerics(runs: &[Run]) -> Option<Numerics> {
    let mut of_a = runs.iter().filter(|run| run.arm == 0).filter_map(Run::counted);
    let a = of_a.next()?;
    Some(Numerics::of(a, of_a.next(), record(runs, 1)?))
}
