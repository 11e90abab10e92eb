//! This program beside another one on the same model: the same prompt ids, the same threads, in turn.
//!
//! Nothing is known of processes here; [`Programs`] answers. Numbers of two programs differ in their last
//! bits, so ids are compared and told, and never decide whether a run counts.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Spread;
use crate::harness::{Noise, Role, ab_order, apart};

/// Rows and the time that they took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Rows computed.
    pub tokens: u64,
    /// Seconds that they took.
    pub seconds: f64,
}

impl Phase {
    /// Rows a second, where any were computed in a time that can be told.
    pub fn rate(&self) -> Option<f64> {
        (self.tokens > 0 && self.seconds > 0.0).then(|| self.tokens as f64 / self.seconds)
    }
}

/// What a program says of one run. Keys that are not here are let be.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// The program.
    #[serde(default)]
    pub name: Option<String>,
    /// Its version.
    #[serde(default)]
    pub version: Option<String>,
    /// Ids of the prompt, as it used them.
    pub prompt_ids: Vec<u32>,
    /// Ids that it generated; the first follows from the prompt.
    pub ids: Vec<u32>,
    /// The prompt.
    pub prefill: Phase,
    /// What was decoded after it: a row an id, but for the last.
    pub decode: Phase,
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// This program.
    Metaltail,
    /// The other one.
    Peer,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Side::Metaltail { "metaltail" } else { "the peer" })
    }
}

/// What was measured around a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// What the program said.
    pub answer: Answer,
    /// Seconds from its start to its end, loading included.
    pub seconds: f64,
    /// Most bytes that its control group held, pages of files included; none without a group of its own.
    pub peak_bytes: Option<u64>,
    /// Share of the model's files that was in the page cache before it.
    pub page_cache: f64,
}

/// Runs either program in a fresh process.
pub trait Programs {
    /// One run.
    ///
    /// # Errors
    /// A sentence that says why there is no answer.
    fn run(&mut self, side: Side) -> Result<Measured, String>;
}

/// What both are told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerJob {
    /// Ids of the prompt.
    pub prompt_ids: Vec<u32>,
    /// Ids to generate.
    pub tokens: usize,
    /// Pairs of runs.
    pub pairs: usize,
    /// How far controls may lie apart, as a share.
    pub noise: f64,
}

/// A run as it went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerRun {
    /// Which program.
    pub side: Side,
    /// What for.
    pub role: Role,
    /// Which pair.
    pub pair: usize,
    /// Why it does not count.
    pub excluded: Option<String>,
    /// What came back.
    pub measured: Option<Measured>,
}

/// One figure of both programs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerFigure {
    /// Its key.
    pub key: String,
    /// This program's runs of pairs.
    pub metaltail: Option<Spread>,
    /// The other's.
    pub peer: Option<Spread>,
    /// This one over the other, pair by pair.
    pub ratio: Option<Spread>,
}

/// How the ids of the two compare.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerIds {
    /// Those of this program's first run.
    pub metaltail: Vec<u32>,
    /// Those of the other's first run.
    pub peer: Vec<u32>,
    /// How many are the same before the first that differs.
    pub same: usize,
    /// Whether every run of this program gave the same ids.
    pub metaltail_repeats: bool,
    /// Whether every run of the other one did.
    pub peer_repeats: bool,
}

/// A comparison as it went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peers {
    /// Rates of prefill and decode, and seconds of whole runs.
    pub figures: Vec<PeerFigure>,
    /// Ids.
    pub ids: PeerIds,
    /// What this program's runs before and after say of the machine, by their rate of decoding.
    pub noise: Noise,
    /// Why nothing follows from it.
    pub refused: Option<String>,
    /// Every run, in order.
    pub runs: Vec<PeerRun>,
}

/// A figure of a run.
type Of = fn(&Measured) -> Option<f64>;

/// What is told of both, by key.
const FIGURES: [(&str, Of); 4] = [
    ("prefill_tokens_per_second", |run| run.answer.prefill.rate()),
    ("decode_tokens_per_second", decode_rate),
    ("seconds", |run| Some(run.seconds)),
    ("peak_bytes", |run| run.peak_bytes.map(|bytes| bytes as f64)),
];

fn decode_rate(run: &Measured) -> Option<f64> {
    run.answer.decode.rate()
}

/// Runs both in turn: this program twice, then pairs with either first, then this program.
/// The first run that does not count ends everything.
pub fn peers(job: &PeerJob, programs: &mut dyn Programs, tell: &mut dyn FnMut(&PeerRun)) -> Peers {
    let mut runs: Vec<PeerRun> = Vec::new();
    for step in ab_order(job.pairs) {
        let side = if step.arm == 0 { Side::Metaltail } else { Side::Peer };
        let (measured, failed) = match programs.run(side) {
            Ok(measured) => (Some(measured), None),
            Err(reason) => (None, Some(reason)),
        };
        let excluded = failed.or_else(|| check(side, &measured.as_ref()?.answer, job).err());
        let run = PeerRun { side, role: step.role, pair: step.block, excluded, measured };
        tell(&run);
        let stop = run.excluded.is_some();
        runs.push(run);
        if stop {
            break;
        }
    }
    let noise = noise(&runs, job.noise);
    let failure = runs.iter().find_map(|run| Some(format!("{}: {}", run.side, run.excluded.as_ref()?)));
    Peers {
        figures: FIGURES.iter().map(|(key, of)| figure(key, *of, &runs, job.pairs)).collect(),
        ids: ids(&runs),
        refused: failure.or_else(|| noise.refusal()),
        noise,
        runs,
    }
}

/// What a run must satisfy.
fn check(side: Side, answer: &Answer, job: &PeerJob) -> Result<(), String> {
    if answer.prompt_ids != job.prompt_ids {
        return Err("it computed another prompt than it was given".to_owned());
    }
    if answer.prefill.tokens != job.prompt_ids.len() as u64 {
        let (got, wanted) = (answer.prefill.tokens, job.prompt_ids.len());
        return Err(format!("it says that it computed {got} rows of a prompt of {wanted}"));
    }
    // This program ends at a stop id, which is told; a peer is asked not to.
    let ended = side == Side::Metaltail && !answer.ids.is_empty() && answer.ids.len() < job.tokens;
    if answer.ids.len() != job.tokens && !ended {
        return Err(format!("{} ids came back, and {} were asked for", answer.ids.len(), job.tokens));
    }
    if answer.decode.tokens + 1 != answer.ids.len() as u64 {
        let (rows, ids) = (answer.decode.tokens, answer.ids.len());
        return Err(format!("it says that it decoded {rows} rows for {ids} ids"));
    }
    let timed = |phase: &Phase| phase.tokens == 0 || (phase.seconds.is_finite() && phase.seconds > 0.0);
    match timed(&answer.prefill) && timed(&answer.decode) {
        true => Ok(()),
        false => Err("it computed rows in no time".to_owned()),
    }
}

/// Runs that count, of one side.
fn counted(runs: &[PeerRun], side: Side) -> impl Iterator<Item = (&PeerRun, &Measured)> {
    let own = runs.iter().filter(move |run| run.side == side && run.excluded.is_none());
    own.filter_map(|run| Some((run, run.measured.as_ref()?)))
}

fn noise(runs: &[PeerRun], stated: f64) -> Noise {
    let controls = counted(runs, Side::Metaltail).filter(|(run, _)| run.role == Role::Control);
    // Of one id nothing is decoded: the prompt is then what there is.
    let rate = |run: &Measured| decode_rate(run).or_else(|| run.answer.prefill.rate());
    let controls: Vec<f64> = controls.filter_map(|(_, run)| rate(run)).collect();
    Noise { stated, spread: apart(&controls), controls }
}

fn figure(key: &str, of: Of, runs: &[PeerRun], pairs: usize) -> PeerFigure {
    let of_pair = |side, pair| {
        let mut measured =
            counted(runs, side).filter(|(run, _)| run.role == Role::Measured && run.pair == pair);
        of(measured.next()?.1)
    };
    let all = |side| {
        let values: Vec<f64> = (0..pairs).filter_map(|pair| of_pair(side, pair)).collect();
        Spread::of(&values)
    };
    let ratios: Vec<f64> = (0..pairs)
        .filter_map(|pair| Some(of_pair(Side::Metaltail, pair)? / of_pair(Side::Peer, pair)?))
        .filter(|ratio| ratio.is_finite())
        .collect();
    PeerFigure {
        key: key.to_owned(),
        metaltail: all(Side::Metaltail),
        peer: all(Side::Peer),
        ratio: Spread::of(&ratios),
    }
}

fn ids(runs: &[PeerRun]) -> PeerIds {
    let of = |side| counted(runs, side).map(|(_, run)| &run.answer.ids);
    let (ours, theirs) = (of(Side::Metaltail).next(), of(Side::Peer).next());
    let (ours, theirs) = (ours.cloned().unwrap_or_default(), theirs.cloned().unwrap_or_default());
    PeerIds {
        same: ours.iter().zip(&theirs).take_while(|(a, b)| a == b).count(),
        metaltail_repeats: of(Side::Metaltail).all(|ids| *ids == ours),
        peer_repeats: of(Side::Peer).all(|ids| *ids == theirs),
        metaltail: ours,
        peer: theirs,
    }
}
