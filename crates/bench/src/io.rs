//! How fast a drive delivers experts: random reads of whole runs of a model's own files, direct and
//! through the page cache, by threads and by an io_uring, several at a time; and how much of that
//! decoding gets.

use metaltail_store::probe::{Latency, Limits, Measured, Target, Way, measure};
use serde::{Deserialize, Serialize};

use crate::Spread;
use crate::arm::ArmRecord;
use crate::harness::{Arm, Noise, Role, Run, Runner, apart, check};
use crate::job::Job;

/// Reads a drive in one way.
pub trait Drive {
    /// One measurement; another `round` reads other runs.
    ///
    /// # Errors
    /// A sentence that says why it cannot be read so.
    fn read(&mut self, way: Way, round: u64) -> Result<Measured, String>;
}

/// The files of a model.
#[derive(Clone, Debug)]
pub struct ModelDrive {
    /// What is read.
    pub target: Target,
    /// How much of it in each measurement.
    pub limits: Limits,
}

impl Drive for ModelDrive {
    fn read(&mut self, way: Way, round: u64) -> Result<Measured, String> {
        let limits = Limits { seed: self.limits.seed.wrapping_add(round), ..self.limits };
        measure(&self.target, way, limits).map_err(|error| error.to_string())
    }
}

/// How to measure.
#[derive(Clone, Debug)]
pub struct IoOptions {
    /// Ways to read.
    pub ways: Vec<Way>,
    /// Rounds over all of them.
    pub rounds: usize,
    /// How far controls may lie apart, as a share.
    pub noise: f64,
}

/// One measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RawRead {
    /// The way, in words.
    pub way: String,
    /// What for.
    pub role: Role,
    /// Which round.
    pub round: usize,
    /// 10⁹ bytes a second.
    pub gb_per_second: f64,
    /// Bytes read.
    pub bytes: u64,
    /// Reads.
    pub reads: u64,
    /// Wall time.
    pub seconds: f64,
    /// Milliseconds that half, nine tenths and 99 of a hundred reads took at most, and the longest took.
    pub latency_ms: [f64; 4],
    /// Why it does not count.
    pub excluded: Option<String>,
}

/// One way to read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IoRow {
    /// The way, in words.
    pub way: String,
    /// Whether reads go around the page cache.
    pub direct: bool,
    /// `uring` or `threads`.
    pub io: String,
    /// Reads at a time.
    pub depth: usize,
    /// 10⁹ bytes a second.
    pub gb_per_second: Option<Spread>,
    /// Milliseconds that half of the reads took at most.
    pub p50_ms: Option<Spread>,
    /// Milliseconds that 99 of a hundred reads took at most.
    pub p99_ms: Option<Spread>,
    /// Why it does not count.
    pub excluded: Option<String>,
}

/// Decoding against raw reads of the same runs in the same way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Streaming {
    /// The way that the engine reads, in words.
    pub way: String,
    /// Raw reads before and after each run, 10⁹ bytes a second.
    pub raw_gb_per_second: Option<Spread>,
    /// Bytes that decoding read over the time that it took.
    pub decode_gb_per_second: Option<Spread>,
    /// The same over the raw reads before and after it, round by round.
    pub of_raw: Option<Spread>,
    /// Bytes that decoding read over the time in which at least one read was under way, over the raw
    /// reads before and after it, round by round.
    pub busy_of_raw: Option<Spread>,
    /// Mean reads under way while decoding had any.
    pub mean_depth: Option<Spread>,
    /// Tokens a second.
    pub tokens_per_second: Option<Spread>,
    /// Hash of the ids.
    pub ids: Option<String>,
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct Io {
    /// A row a way.
    pub rows: Vec<IoRow>,
    /// Every measurement of the drive, in order.
    pub raw: Vec<RawRead>,
    /// Decoding, where it was asked for.
    pub streaming: Option<Streaming>,
    /// Every run of it.
    pub runs: Vec<Run>,
    /// What the controls say: the first way that works, before and after everything.
    pub noise: Noise,
    /// Why nothing follows from it.
    pub refused: Option<String>,
}

/// Measures all ways and, with an arm, decoding.
pub fn io(
    options: &IoOptions,
    drive: &mut dyn Drive,
    decode: Option<(&Arm, &Job, &mut dyn Runner)>,
    tell: &mut dyn FnMut(),
) -> Io {
    let mut raw: Vec<RawRead> = Vec::new();
    let mut serial = 0;
    let mut one = |raw: &mut Vec<RawRead>, way: Way, role: Role, round: usize| {
        serial += 1;
        let found = row_of(drive.read(way, serial), way, role, round);
        raw.push(found.clone());
        tell();
        found
    };
    // The deepest direct way says most about drift; where it does not work, the next one does.
    let control = options.ways.iter().rev().find(|way| {
        let first = one(&mut raw, **way, Role::Control, 0);
        first.excluded.is_none()
    });
    if let Some(way) = control {
        one(&mut raw, *way, Role::Control, 0);
    }
    for round in 0..options.rounds {
        let mut ways = options.ways.clone();
        if round % 2 == 1 {
            ways.reverse();
        }
        for way in ways {
            // What did not work once is not tried again.
            if !raw.iter().any(|row| row.way == way.to_string() && row.excluded.is_some()) {
                one(&mut raw, way, Role::Measured, round);
            }
        }
    }
    let (streaming, runs, failed) = match decode {
        Some((arm, job, runner)) => {
            let rounds = options.rounds;
            stream(arm, job, rounds, runner, &mut |way, round| one(&mut raw, way, Role::Probe, round))
        }
        None => (None, Vec::new(), None),
    };
    if let Some(way) = control {
        one(&mut raw, *way, Role::Control, 1);
    }
    let noise = noise(&raw, control, options.noise);
    let refused = failed.or_else(|| match control {
        Some(_) => noise.refusal(),
        None => Some("the drive can be read in none of the ways".to_owned()),
    });
    let rows = options.ways.iter().map(|way| io_row(&raw, *way)).collect();
    Io { rows, raw, streaming, runs, noise, refused }
}

fn row_of(measured: Result<Measured, String>, way: Way, role: Role, round: usize) -> RawRead {
    let empty = RawRead {
        way: way.to_string(),
        role,
        round,
        gb_per_second: 0.0,
        bytes: 0,
        reads: 0,
        seconds: 0.0,
        latency_ms: [0.0; 4],
        excluded: None,
    };
    let measured = match measured {
        Ok(measured) => measured,
        Err(reason) => return RawRead { excluded: Some(reason), ..empty },
    };
    let warm = measured.evicted.filter(|evicted| !evicted.is_cold()).map(|evicted| {
        let stayed = evicted.stayed.map_or("nobody knows how many".to_owned(), |bytes| bytes.to_string());
        format!(
            "{stayed} of {} bytes stayed in the page cache: memory was measured, not the drive",
            evicted.wanted
        )
    });
    let Latency { p50, p90, p99, max } = measured.latency;
    RawRead {
        gb_per_second: measured.bytes_per_second() / 1e9,
        bytes: measured.bytes,
        reads: measured.reads,
        seconds: measured.time.as_secs_f64(),
        latency_ms: [p50, p90, p99, max].map(|time| 1e3 * time.as_secs_f64()),
        excluded: warm,
        ..empty
    }
}

fn io_row(raw: &[RawRead], way: Way) -> IoRow {
    let name = way.to_string();
    let own: Vec<&RawRead> = raw.iter().filter(|row| row.way == name && row.role != Role::Probe).collect();
    let excluded = own.iter().find_map(|row| row.excluded.clone());
    let counted = own.iter().filter(|row| row.role == Role::Measured && row.excluded.is_none());
    let spread = |of: &dyn Fn(&RawRead) -> f64| {
        let values: Vec<f64> = counted.clone().map(|row| of(row)).collect();
        if excluded.is_some() { None } else { Spread::of(&values) }
    };
    IoRow {
        direct: way.direct,
        io: if way.uring { "uring" } else { "threads" }.to_owned(),
        depth: way.depth,
        gb_per_second: spread(&|row| row.gb_per_second),
        p50_ms: spread(&|row| row.latency_ms[0]),
        p99_ms: spread(&|row| row.latency_ms[2]),
        way: name,
        excluded,
    }
}

fn noise(raw: &[RawRead], control: Option<&Way>, stated: f64) -> Noise {
    let name = control.map(Way::to_string);
    let own = |row: &&RawRead| {
        row.role == Role::Control && row.excluded.is_none() && Some(&row.way) == name.as_ref()
    };
    let controls: Vec<f64> = raw.iter().filter(own).map(|row| row.gb_per_second).collect();
    Noise { stated, spread: apart(&controls), controls }
}

/// Decodes between raw reads of the way that the engine itself reads, and compares the two.
fn stream(
    arm: &Arm,
    job: &Job,
    rounds: usize,
    runner: &mut dyn Runner,
    raw: &mut dyn FnMut(Way, usize) -> RawRead,
) -> (Option<Streaming>, Vec<Run>, Option<String>) {
    // The first run says how the engine reads, and is its warm-up too.
    let mut runs = vec![one_run(arm, job, Role::Probe, 0, runner)];
    let way = runs[0].counted().and_then(way_of);
    let failed = |runs: &[Run]| runs.iter().find_map(|run| run.excluded.clone());
    let Some(way) = way else {
        let reason = failed(&runs).unwrap_or_else(|| "the arm does not say how it reads".to_owned());
        return (None, runs, Some(format!("decoding failed: {reason}")));
    };
    let mut rates = Rates::default();
    let mut reason = None;
    let mut before = raw(way, 0);
    for round in 0..rounds {
        let run = one_run(arm, job, Role::Measured, round, runner);
        let after = raw(way, round + 1);
        reason = run.excluded.clone().or_else(|| other_ids(&runs, &run));
        let unread = before.excluded.clone().or_else(|| after.excluded.clone());
        reason = reason.or_else(|| unread.map(|reason| format!("raw reads beside it: {reason}")));
        if let (None, Some(record)) = (&reason, run.counted()) {
            reason = rates.add(record, before.gb_per_second, after.gb_per_second).err();
        }
        runs.push(run);
        before = after;
        if reason.is_some() {
            break;
        }
    }
    let ids = runs.iter().find_map(Run::counted).map(ArmRecord::ids_hash);
    runs.iter_mut().filter_map(|run| run.record.as_mut()).for_each(ArmRecord::forget_ids);
    (Some(rates.streaming(way, ids)), runs, reason.map(|reason| format!("decoding failed: {reason}")))
}

fn one_run(arm: &Arm, job: &Job, role: Role, block: usize, runner: &mut dyn Runner) -> Run {
    match runner.run(arm) {
        Ok(record) => {
            Run { arm: 0, role, block, excluded: check(arm, &record, job).err(), record: Some(record) }
        }
        Err(reason) => Run { arm: 0, role, block, excluded: Some(reason), record: None },
    }
}

fn other_ids(runs: &[Run], run: &Run) -> Option<String> {
    let first = runs.iter().find_map(Run::counted)?.ids_hash();
    (run.counted()?.ids_hash() != first).then(|| "its ids are not those of the first run".to_owned())
}

/// How an arm read, as a way of raw reads. A thread has one read under way; an io_uring has as many as
/// there are experts to read, so there the mean of decoding counts, rounded up.
fn way_of(record: &ArmRecord) -> Option<Way> {
    let word = |key: &str| record.config.get(key)?.as_str();
    let uring = word("io")? == "uring";
    let loaders = || usize::try_from(record.config.get("loaders")?.as_u64()?).ok();
    let depth = if uring { (mean_depth(record)?.ceil() as usize).max(1) } else { loaders()? };
    Some(Way { direct: word("direct")? == "on", uring, depth })
}

/// Mean reads under way while decode had any.
fn mean_depth(record: &ArmRecord) -> Option<f64> {
    let busy: f64 = record.measured().map(|row| row.decode.busy_seconds).sum();
    let depth: f64 = record.measured().map(|row| row.decode.depth_seconds).sum();
    (busy > 0.0).then(|| depth / busy)
}

#[derive(Default)]
struct Rates {
    raw: Vec<f64>,
    decode: Vec<f64>,
    of_raw: Vec<f64>,
    busy_of_raw: Vec<f64>,
    tokens: Vec<f64>,
    depth: Vec<f64>,
}

impl Rates {
    fn add(&mut self, record: &ArmRecord, before: f64, after: f64) -> Result<(), String> {
        let sum = |of: fn(&crate::arm::PromptRow) -> f64| record.measured().map(of).sum::<f64>();
        let bytes = sum(|row| row.decode.bytes as f64) / 1e9;
        let (seconds, busy) = (sum(|row| row.decode.seconds), sum(|row| row.decode.busy_seconds));
        let raw = (before + after) / 2.0;
        if bytes <= 0.0 || seconds <= 0.0 || busy <= 0.0 || raw <= 0.0 {
            return Err(
                "nothing was read while decoding: lower --cap, so that experts are streamed".to_owned()
            );
        }
        self.raw.push(raw);
        self.decode.push(bytes / seconds);
        self.of_raw.push(bytes / seconds / raw);
        self.busy_of_raw.push(bytes / busy / raw);
        self.depth.extend(mean_depth(record));
        self.tokens.push(sum(|row| row.tokens as f64) / seconds);
        Ok(())
    }

    fn streaming(&self, way: Way, ids: Option<String>) -> Streaming {
        Streaming {
            way: way.to_string(),
            raw_gb_per_second: Spread::of(&self.raw),
            decode_gb_per_second: Spread::of(&self.decode),
            of_raw: Spread::of(&self.of_raw),
            busy_of_raw: Spread::of(&self.busy_of_raw),
            mean_depth: Spread::of(&self.depth),
            tokens_per_second: Spread::of(&self.tokens),
            ids,
        }
    }
}
