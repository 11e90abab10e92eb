//! `metaltail trace`: which experts a model chooses, and what a cache would have had of them.

use std::fmt;
use std::io::BufWriter;
use std::str::FromStr;

use clap::ValueEnum;
use metaltail_store::PolicyKind;
use metaltail_store::trace::{Counts, PhaseSpec, Played, Rule, Scope, Trace, replay as play};
use serde_json::{Value, json};

use crate::args::{TraceRecordArgs, TraceReplayArgs, TraceSynthArgs};
use crate::exit::{Failure, Kind};
use crate::output::print;
use crate::report::bytes as size;
use crate::settings::Settings;
use crate::whole_file::WholeFile;
use crate::words::table;

mod recall;
mod recorder;

/// A policy and what shares its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contestant {
    rule: Rule,
    scope: Scope,
}

impl Contestant {
    const OPTIMUM: Contestant = Contestant { rule: Rule::Belady, scope: Scope::Pool };

    /// All policies, as one pool and by layers.
    fn all() -> Vec<Contestant> {
        let of = |scope| PolicyKind::ALL.map(|kind| Contestant { rule: Rule::Policy(kind), scope });
        [of(Scope::Pool), of(Scope::Layers)].concat()
    }
}

impl FromStr for Contestant {
    type Err = String;

    fn from_str(name: &str) -> Result<Contestant, String> {
        let (scope, name) = match name.strip_prefix("layer:") {
            Some(name) => (Scope::Layers, name),
            None => (Scope::Pool, name),
        };
        Ok(Contestant { rule: name.parse()?, scope })
    }
}

impl fmt::Display for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.scope {
            Scope::Pool => write!(f, "{}", self.rule),
            Scope::Layers => write!(f, "layer:{}", self.rule),
        }
    }
}

/// What a replay counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CountedPhase {
    /// Generated tokens
    Decode,
    /// Generated tokens and the prompt
    All,
}

impl CountedPhase {
    fn name(self) -> &'static str {
        match self {
            CountedPhase::Decode => "decode",
            CountedPhase::All => "all",
        }
    }

    fn of(self, Played { prefill, decode }: Played) -> Counts {
        match self {
            CountedPhase::Decode => decode,
            CountedPhase::All => Counts {
                selections: prefill.selections + decode.selections,
                hits: prefill.hits + decode.hits,
                missed_bytes: prefill.missed_bytes + decode.missed_bytes,
            },
        }
    }
}

/// Runs `trace replay`.
///
/// # Errors
/// A file that cannot be read or is no trace.
pub fn replay(args: &TraceReplayArgs, settings: &Settings) -> Result<(), Failure> {
    let mut contestants = if args.policies.is_empty() { Contestant::all() } else { args.policies.clone() };
    if !contestants.contains(&Contestant::OPTIMUM) {
        contestants.push(Contestant::OPTIMUM);
    }
    let (mut rows, mut text) = (Vec::new(), String::new());
    for file in &args.files {
        let trace = Trace::read(file).map_err(|error| {
            Failure::new(Kind::Usage, format!("{} cannot be replayed: {error}", file.display()))
        })?;
        let name = file.display().to_string();
        let token = trace.token_bytes();
        let caches = match args.caches.is_empty() {
            true => [1, 2, 4, 8, 16].map(|halves| token.saturating_mul(halves) / 2).to_vec(),
            false => args.caches.clone(),
        };
        let mut lines = vec![heading(&caches)];
        for contestant in &contestants {
            let mut line = vec![contestant.to_string()];
            for &cache in &caches {
                let counts = args.phase.of(play(&trace, contestant.rule, contestant.scope, cache));
                rows.push(row(&name, *contestant, cache, args.phase, counts));
                line.push(format!("{:.1}", 100.0 * counts.hit_rate()));
            }
            lines.push(line);
        }
        let numbers: Vec<bool> = (0..=caches.len()).map(|column| column > 0).collect();
        text.push_str(&format!(
            "{name}: hits in percent ({}); one token uses {}\n{}",
            args.phase.name(),
            size(token),
            table(&lines, &numbers)
        ));
        if let Some(cache) = caches.iter().filter(|&&cache| cache < token).max() {
            text.push_str(&format!(
                "{} and less cannot hold what one token uses: as one pool of that size lru finds nothing\n",
                size(*cache)
            ));
        }
    }
    match settings.json() {
        true => print(&format!("{}\n", json!({"rows": rows}))),
        false => print(&text),
    }
}

fn heading(caches: &[u64]) -> Vec<String> {
    std::iter::once("policy".to_owned()).chain(caches.iter().map(|&cache| size(cache))).collect()
}

fn row(trace: &str, contestant: Contestant, cache: u64, phase: CountedPhase, counts: Counts) -> Value {
    json!({
        "trace": trace,
        "policy": contestant.to_string(),
        "cache_bytes": cache,
        "phase": phase.name(),
        "selections": counts.selections,
        "hits": counts.hits,
        "hit_rate": counts.hit_rate(),
    })
}

/// Runs `trace record`.
///
/// # Errors
/// Whatever refuses or fails; an interrupted run ends with 130 and leaves a whole trace of what was
/// computed.
pub fn record(args: &TraceRecordArgs, settings: &Settings) -> Result<(), Failure> {
    let recorded = recorder::run(args, settings)?;
    let object = json!({
        "output": args.out.display().to_string(),
        "sequences": recorded.sequences,
        "rows": recorded.rows,
        "selections": recorded.selections,
        "guesses": recorded.recall.to_json(),
    });
    match settings.json() {
        true => print(&format!("{object}\n"))?,
        false => print(&format!(
            "{}: {} selections of {} rows\n{}",
            args.out.display(),
            recorded.selections,
            recorded.rows,
            recorded.recall.to_words()
        ))?,
    }
    match recorded.cancelled {
        true => Err(Failure::silent(Kind::Interrupted)),
        false => Ok(()),
    }
}

/// Runs `trace synth`.
///
/// # Errors
/// Numbers that contradict each other; a file that cannot be written.
pub fn synth(args: &TraceSynthArgs, settings: &Settings) -> Result<(), Failure> {
    // The parsers let through at most 2^20.
    let spec = PhaseSpec {
        layers: args.layers as u32,
        experts: args.experts as u32,
        top_k: args.top_k as u32,
        tokens: args.tokens as u32,
        phase_tokens: args.phase_tokens as u32,
        zipf: args.zipf,
        repeat: f64::from(args.repeat),
        after: args.after.map(|after| after as u32),
        expert_bytes: args.expert_bytes,
        seed: args.seed,
    };
    let trace = spec.generate().map_err(|error| Failure::from_error(Kind::Usage, &error))?;
    let failed = |error: std::io::Error| {
        Failure::new(Kind::Failed, format!("cannot write the trace {}: {error}", args.out.display()))
    };
    let (whole, file) = WholeFile::create(&args.out).map_err(failed)?;
    trace.write(BufWriter::new(file), "synthetic").and_then(|_| whole.keep()).map_err(failed)?;
    let (rows, selections) = (trace.rows.len(), trace.selections.len());
    let object = json!({
        "output": args.out.display().to_string(), "rows": rows, "selections": selections, "seed": args.seed,
    });
    match settings.json() {
        true => print(&format!("{object}\n")),
        false => print(&format!("{}: {selections} selections of {rows} rows\n", args.out.display())),
    }
}
