//! Recording: a listener that writes what the router chose.

use std::fs::File;
use std::io::{self, BufWriter};
use std::sync::{Arc, Mutex, PoisonError};

use metaltail_engine::telemetry::{Event, Listener, Phase};
use metaltail_engine::{EngineError, Finish, Flow, GenerateOptions, Session};
use metaltail_model::{CancelFlag, ModelError};
use metaltail_store::trace::{TracePhase, TraceWriter};
use serde::Deserialize;

use super::recall::Recall;
use crate::args::TraceRecordArgs;
use crate::exit::{Failure, Kind};
use crate::input::read_ids;
use crate::interrupt;
use crate::progress::Bar;
use crate::runtime::{Runtime, failure};
use crate::settings::Settings;
use crate::whole_file::WholeFile;

/// Form of an `--ids` file.
#[derive(Deserialize)]
#[serde(untagged)]
enum IdsFile {
    One { ids: Vec<u32> },
    Many { sequences: Vec<Vec<u32>> },
}

/// What was recorded.
pub struct Recorded {
    /// What could have been known before.
    pub recall: Arc<Recall>,
    /// Sequences computed, the last perhaps in part.
    pub sequences: usize,
    /// Rows computed.
    pub rows: u64,
    /// Selections written.
    pub selections: u64,
    /// Whether it was interrupted.
    pub cancelled: bool,
}

/// Hears the same events as the trace's writer.
struct Both(Arc<Recorder>, Arc<Recall>);

impl Listener for Both {
    fn on_event(&self, event: &Event<'_>) {
        self.0.on_event(event);
        self.1.on_event(event);
    }
}

type Out = BufWriter<File>;

/// What one layer chose for every row of a step.
type Chosen = (u32, Vec<Vec<(u32, f32)>>);

/// Gathers a step's choices and writes them when the step ended, since only then its phase is known
/// and an interrupted step leaves nothing.
#[derive(Default)]
struct Recorder(Mutex<State>);

#[derive(Default)]
struct State {
    writer: Option<TraceWriter<Out>>,
    step: Vec<Chosen>,
    turn: u32,
    /// Whether rows count as decode whatever the engine says.
    forced: bool,
    /// Rows of this turn's prefill and decode.
    counts: [u32; 2],
    rows: u64,
    selections: u64,
    failed: Option<io::Error>,
}

impl Recorder {
    fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Listener for Recorder {
    fn on_event(&self, event: &Event<'_>) {
        match event {
            Event::Selected(selected) => {
                self.with(|state| state.step.push((selected.layer, selected.rows.to_vec())));
            }
            Event::Step { phase, rows, .. } => self.with(|state| state.end_step(*phase, *rows)),
            _ => {}
        }
    }
}

impl State {
    fn end_step(&mut self, phase: Phase, rows: usize) {
        let phase = match phase {
            Phase::Prefill if !self.forced => TracePhase::Prefill,
            _ => TracePhase::Decode,
        };
        let count = &mut self.counts[usize::from(phase == TracePhase::Decode)];
        let first = *count;
        // A sequence is shorter than 2^32 rows: its ids were read from memory.
        *count = count.saturating_add(rows as u32);
        self.rows += rows as u64;
        let step = std::mem::take(&mut self.step);
        let Some(writer) = &mut self.writer else { return };
        for (layer, rows) in &step {
            for (row, chosen) in (first..).zip(rows) {
                self.selections += chosen.len() as u64;
                if let Err(error) = writer.row(self.turn, phase, row, *layer, chosen) {
                    self.failed.get_or_insert(error);
                }
            }
        }
    }

    fn begin_turn(&mut self, turn: u32) {
        self.turn = turn;
        self.counts = [0; 2];
        self.step.clear();
    }
}

/// The sequences that were given.
fn given(args: &TraceRecordArgs) -> Result<Vec<Vec<u32>>, Failure> {
    let form = "{\"ids\": [id, …]} or {\"sequences\": [[id, …], …]}";
    Ok(match read_ids(&args.ids, form)? {
        IdsFile::One { ids } => vec![ids],
        IdsFile::Many { sequences } => sequences,
    })
}

/// Says so where `--prompt` leaves nothing to compute one by one.
fn note_no_decode(runtime: &Runtime, prompt: Option<usize>, sequences: &[Vec<u32>]) {
    let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
    if let Some(prompt) = prompt.filter(|&prompt| prompt >= longest) {
        runtime.engine.telemetry().notice(&format!(
            "no sequence is longer than {longest} ids: behind --prompt {prompt} nothing is left to compute one by one, and no row counts as decode"
        ));
    }
}

/// Computes the sequences and records them. What is at `args.out` stays as it is until all of it was written.
///
/// # Errors
/// Ids, a model or settings that are refused; failed reads; a file that cannot be written.
pub fn run(args: &TraceRecordArgs, settings: &Settings) -> Result<Recorded, Failure> {
    let sequences = given(args)?;
    let recorder = Arc::new(Recorder::default());
    let recall = Arc::new(Recall::default());
    let runtime = Runtime::open_to_measure(settings, Some(Arc::new(Both(recorder.clone(), recall.clone()))))?;
    runtime.engine.compare_guesses();
    note_no_decode(&runtime, args.prompt, &sequences);
    let cancel = interrupt::listen();
    let engine = &runtime.engine;
    let unwritable = |error: &io::Error| {
        let out = args.out.display();
        Failure::new(Kind::Failed, format!("cannot write the trace {out}: {error}"))
    };
    let model = engine.checkpoint().dir().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (whole, file) = WholeFile::create(&args.out).map_err(|error| unwritable(&error))?;
    let writer = TraceWriter::new(BufWriter::new(file), &model, engine.store().expert_bytes());
    let writer = writer.map_err(|error| unwritable(&error))?;
    recorder.with(|state| state.writer = Some(writer));
    let bar = Bar::items("recording", sequences.len() as u64, settings.json());
    let (mut done, mut cancelled) = (0, false);
    for (turn, ids) in (0..).zip(&sequences) {
        recorder.with(|state| state.begin_turn(turn));
        recall.begin_sequence();
        done += 1;
        let finished = match args.prompt {
            Some(prompt) => forced(&runtime, &recorder, ids, prompt, &cancel),
            None => generated(&runtime, settings, ids, &cancel),
        };
        cancelled = finished.map_err(|error| failure(&error))?;
        if cancelled {
            break;
        }
        bar.advance(1);
    }
    bar.finish();
    recorder.with(|state| {
        let ended = state.writer.take().map(TraceWriter::finish);
        let failed = state.failed.take().map_or(Ok(()), Err);
        let written = failed.and_then(|()| ended.transpose()).and_then(|_| whole.keep());
        written.map_err(|error| unwritable(&error))?;
        let (rows, selections) = (state.rows, state.selections);
        Ok(Recorded { recall, sequences: done, rows, selections, cancelled })
    })
}

/// Computes the first `prompt` ids together and the others one by one. Returns whether it was cancelled.
fn forced(
    runtime: &Runtime,
    recorder: &Recorder,
    ids: &[u32],
    prompt: usize,
    cancel: &CancelFlag,
) -> Result<bool, EngineError> {
    let mut session = Session::new(&runtime.engine);
    let (prompt, rest) = ids.split_at(prompt.min(ids.len()));
    recorder.with(|state| state.forced = false);
    let mut computed = session.extend(prompt, cancel, &mut |_, _| Ok(()));
    recorder.with(|state| state.forced = true);
    for id in rest {
        computed = computed.and_then(|()| session.extend(&[*id], cancel, &mut |_, _| Ok(())));
    }
    match computed {
        Err(EngineError::Model(ModelError::Cancelled)) => Ok(true),
        other => other.map(|()| false),
    }
}

/// Continues the ids. Returns whether it was cancelled.
fn generated(
    runtime: &Runtime,
    settings: &Settings,
    ids: &[u32],
    cancel: &CancelFlag,
) -> Result<bool, EngineError> {
    let options = GenerateOptions {
        sampling: runtime.sampling,
        max_tokens: settings.max_tokens,
        stop_ids: runtime.stop_ids.as_slice().to_vec(),
    };
    let generation =
        Session::new(&runtime.engine).generate(ids, &options, cancel, &mut |_| Flow::Continue)?;
    Ok(generation.finish == Finish::Cancelled)
}
