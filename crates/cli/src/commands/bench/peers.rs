//! `metaltail bench peers`: this program beside another on the same model.

mod busy;
mod group;
mod programs;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use metaltail_bench::harness::ab_order;
use metaltail_bench::job::{Feed, Job, PageCache};
use metaltail_bench::peers::{PeerFigure, PeerIds, PeerJob, Peers, Side, peers};
use metaltail_container::gguf::{Gguf, is_gguf};
use metaltail_kernels::default_threads;
use serde_json::{Value, json};

use self::busy::Busy;
use self::group::Group;
use self::programs::{Processes, PromptFile, Words};
use super::{given, record_file, surroundings, tables};
use crate::args::BenchPeersArgs;
use crate::commands::run::IdsFile;
use crate::exit::{Failure, Kind};
use crate::input::read_ids;
use crate::opened::{Opened, refused};
use crate::output;
use crate::progress::Bar;
use crate::report::bytes as size;
use crate::runtime::model_dir;
use crate::settings::{Origin, Settings};
use crate::words::{count, table, unoptimised};

/// Ids where nothing is said.
const TOKENS: usize = 64;

/// Compares.
///
/// # Errors
/// A model that either cannot have, a group that cannot be made, and all that refuses the comparison.
pub fn execute(args: &BenchPeersArgs, settings: &Settings) -> Result<(), Failure> {
    let model = model_dir(settings)?;
    let opened = Opened::at(&model)?;
    opened.checkpoint.check(&opened.inventory).map_err(|error| refused(&error))?;
    let peer_model = peer_model(args, &model)?;
    let job = job(args, settings, opened.plan.vocab)?;
    if let Some(limit) = args.memory {
        // Said before anything is loaded.
        Group::make(limit).map_err(|reason| Failure::new(Kind::Failed, format!("--memory: {reason}")))?;
    }
    let threads = settings.threads.unwrap_or_else(default_threads);
    let page_cache = match args.page_cache {
        Some(state) => state.into(),
        None if args.memory.is_some() => PageCache::Cold,
        None => PageCache::Warm,
    };
    let prompt = PromptFile::write(&job.prompt_ids)?;
    let mut processes = Processes {
        metaltail: own_words(&job, prompt.path(), threads, settings)?,
        peer: peer_words(args, &job, prompt.path(), threads, &peer_model)?,
        memory: args.memory,
        page_cache,
        files: files(&opened, &peer_model)?,
    };
    let busy = Busy::start(args.busy)?;
    let bar = Bar::items("runs", ab_order(job.pairs).len() as u64, settings.json());
    let found = peers(&job, &mut processes, &mut |_| bar.advance(1));
    bar.finish();
    drop(busy);
    let conditions = Conditions { threads, page_cache, memory: args.memory, busy: args.busy };
    let record = record(args, &job, &conditions, &found, [&model, &peer_model]);
    finish(&record, &table_of(&job, &conditions, &found), args, settings, &found)
}

/// What holds for every run.
struct Conditions {
    threads: usize,
    page_cache: PageCache,
    memory: Option<u64>,
    busy: usize,
}

fn usage(text: impl Into<String>) -> Failure {
    Failure::new(Kind::Usage, text)
}

/// The other program's file.
fn peer_model(args: &BenchPeersArgs, model: &Path) -> Result<PathBuf, Failure> {
    match &args.peer_model {
        Some(path) if path.exists() => Ok(path.clone()),
        Some(path) => Err(usage(format!("--peer-model {}: there is no such file", path.display()))),
        None if is_gguf(model) => Ok(model.to_owned()),
        None => Err(usage(format!(
            "{} is no GGUF file: name the peer's file of the same model with --peer-model",
            model.display()
        ))),
    }
}

fn job(args: &BenchPeersArgs, settings: &Settings, vocab: usize) -> Result<PeerJob, Failure> {
    let given = |key: &str| settings.origin(key) == Origin::Flag;
    let tokens = settings.max_tokens.filter(|_| given("max_tokens")).unwrap_or(TOKENS);
    if tokens == 0 {
        return Err(usage("--max-tokens 0 generates nothing: use at least 1"));
    }
    let sequences = match &args.ids {
        Some(path) => Some(vec![read_ids::<IdsFile>(path, r#"{"ids": [id, …]}"#)?.ids]),
        None => None,
    };
    let one = Job {
        seed: settings.seed.filter(|_| given("seed")).unwrap_or(0),
        prompts: 1,
        warmup: 0,
        prompt_tokens: args.prompt_tokens,
        tokens,
        feed: Feed::Greedy,
        page_cache: PageCache::Warm,
        numerics: false,
        sequences,
    };
    let prompts =
        one.prompts(Feed::Greedy, vocab).map_err(|error| Failure::from_error(Kind::Usage, &error))?;
    let prompt_ids = prompts.into_iter().next().map(|prompt| prompt.ids).unwrap_or_default();
    Ok(PeerJob { prompt_ids, tokens, pairs: args.pairs, noise: args.noise })
}

/// `run --json` with the shared flags that were given.
fn own_words(job: &PeerJob, prompt: &Path, threads: usize, settings: &Settings) -> Result<Words, Failure> {
    let program = std::env::current_exe().map_err(|error| Failure::from_error(Kind::Failed, &error))?;
    let mut words: Vec<OsString> = ["run", "--json", "--temperature=0", "--ids"].map(OsString::from).to_vec();
    words.push(prompt.into());
    words.push(format!("--max-tokens={}", job.tokens).into());
    words.extend(given::arm("metaltail", "", settings)?.words);
    if settings.origin("threads") == Origin::Default {
        words.push(format!("--threads={threads}").into());
    }
    Ok(Words { program, words })
}

fn peer_words(
    args: &BenchPeersArgs,
    job: &PeerJob,
    prompt: &Path,
    threads: usize,
    model: &Path,
) -> Result<Words, Failure> {
    let further = shlex::split(&args.peer_args).ok_or_else(|| usage("--peer-args: a quote is not closed"))?;
    let mut words: Vec<OsString> = vec!["--model".into(), model.into(), "--ids".into(), prompt.into()];
    words.extend(["--tokens".into(), job.tokens.to_string().into()]);
    words.extend(["--threads".into(), threads.to_string().into()]);
    words.extend(further.into_iter().map(OsString::from));
    // A name without a directory is looked for on the path, as a shell does.
    Ok(Words { program: args.peer.clone(), words })
}

/// Files of the model that either program reads.
fn files(opened: &Opened, peer_model: &Path) -> Result<Vec<PathBuf>, Failure> {
    let drives = opened.checkpoint.drives();
    let mut files: Vec<PathBuf> =
        drives.iter().flat_map(|drive| drive.files.iter().flatten().cloned()).collect();
    let theirs = match is_gguf(peer_model) {
        true => {
            let set = Gguf::open(peer_model).map_err(|error| refused(&error))?;
            set.parts().iter().map(|part| part.path.clone()).collect()
        }
        false => vec![peer_model.to_owned()],
    };
    files.extend(theirs);
    files.sort();
    files.dedup();
    Ok(files)
}

/// Name and version of the peer, as it says.
fn peer_name(found: &Peers) -> (String, Option<String>) {
    let answers = found.runs.iter().filter(|run| run.side == Side::Peer);
    let answer = answers.filter_map(|run| Some(&run.measured.as_ref()?.answer)).next();
    let name = answer.and_then(|answer| answer.name.clone()).unwrap_or_else(|| "the peer".to_owned());
    (name, answer.and_then(|answer| answer.version.clone()))
}

fn record(
    args: &BenchPeersArgs,
    job: &PeerJob,
    conditions: &Conditions,
    found: &Peers,
    [model, peer_model]: [&Path; 2],
) -> Value {
    let (name, version) = peer_name(found);
    json!({
        "version": 1,
        "kind": "peers",
        "refused": found.refused,
        "noise": found.noise,
        "statistic": "median, minimum and maximum over the runs of pairs; ratios, metaltail over the peer, are formed pair by pair",
        "figures": found.figures,
        "ids": found.ids,
        "job": {
            "prompt_ids": job.prompt_ids,
            "tokens": job.tokens,
            "pairs": job.pairs,
            "threads": conditions.threads,
            "page_cache": conditions.page_cache,
            "memory_bytes": conditions.memory,
            "busy": conditions.busy,
        },
        "peer": {"name": name, "version": version, "program": args.peer.to_string_lossy(), "args": args.peer_args,
                 "model": peer_model.to_string_lossy()},
        "model": {"path": model.to_string_lossy(), "storage": surroundings::storage(model)},
        "program": surroundings::program(),
        "machine": surroundings::machine(),
        "runs": found.runs,
    })
}

fn finish(
    record: &Value,
    text: &str,
    args: &BenchPeersArgs,
    settings: &Settings,
    found: &Peers,
) -> Result<(), Failure> {
    let path =
        record_file::write(&format!("{record:#}\n"), args.record.as_deref(), "peers", settings.json())?;
    if settings.json() {
        output::print(&format!("{record}\n"))?;
    } else {
        let path = path.map_or(String::new(), |path| format!("record: {}\n", path.display()));
        output::print(&format!("{text}{path}"))?;
    }
    match &found.refused {
        None => Ok(()),
        Some(_) if settings.json() => Err(Failure::silent(Kind::Failed)),
        Some(reason) => Err(Failure::new(Kind::Failed, format!("nothing follows from this run: {reason}"))),
    }
}

// ---- for people ----

/// Nothing where no run of a pair counts.
fn table_of(job: &PeerJob, conditions: &Conditions, found: &Peers) -> String {
    if found.figures.iter().all(|figure| figure.metaltail.is_none()) {
        return String::new();
    }
    let (name, version) = peer_name(found);
    let version = version.map_or(String::new(), |version| format!(" ({version})"));
    let mut text = unoptimised().map_or(String::new(), |text| format!("note: {text}\n"));
    text.push_str(&format!(
        "metaltail ({}) beside {name}{version}: a prompt of {}, {} generated, {}, page cache {}",
        env!("CARGO_PKG_VERSION"),
        count(job.prompt_ids.len(), "id"),
        job.tokens,
        count(conditions.threads, "thread"),
        conditions.page_cache,
    ));
    if let Some(limit) = conditions.memory {
        text.push_str(&format!(", {} of memory each", size(limit)));
    }
    if conditions.busy > 0 {
        text.push_str(&format!(", {} beside", count(conditions.busy, "busy loop")));
    }
    let mut rows = vec![["", "metaltail", &name, "ratio"].map(str::to_owned).to_vec()];
    rows.extend(found.figures.iter().filter(|figure| figure.metaltail.is_some()).map(row));
    text.push_str(&format!(
        "\n\n{}\n{}",
        table(&rows, &[false, true, true, true]),
        ids_words(&found.ids, &name)
    ));
    text.push_str(&tables::noise(&found.noise));
    text
}

fn row(figure: &PeerFigure) -> Vec<String> {
    let what = match figure.key.as_str() {
        "prefill_tokens_per_second" => "prefill, tokens/s",
        "decode_tokens_per_second" => "decode, tokens/s",
        "seconds" => "whole run, s",
        "peak_bytes" => "most memory of its group",
        other => other,
    };
    let cell = |spread: &Option<metaltail_bench::Spread>| {
        spread.as_ref().map_or("–".to_owned(), |spread| tables::spread(&figure.key, spread))
    };
    vec![what.to_owned(), cell(&figure.metaltail), cell(&figure.peer), cell_of_ratio(figure)]
}

fn cell_of_ratio(figure: &PeerFigure) -> String {
    figure.ratio.as_ref().map_or("–".to_owned(), |ratio| tables::spread("ratio", ratio))
}

/// Nothing where one of them did not answer.
fn ids_words(ids: &PeerIds, name: &str) -> String {
    if ids.metaltail.is_empty() || ids.peer.is_empty() {
        return String::new();
    }
    let mut text = format!("metaltail: {:?}\n{name}: {:?}\n", ids.metaltail, ids.peer);
    let shorter = ids.metaltail.len().min(ids.peer.len());
    text.push_str(&match ids.same == shorter {
        true => format!("ids: all {shorter} that both generated are the same\n"),
        false => format!(
            "ids: the first {} are the same, then {} and {}\n",
            ids.same, ids.metaltail[ids.same], ids.peer[ids.same]
        ),
    });
    for (repeats, who) in [(ids.metaltail_repeats, "metaltail"), (ids.peer_repeats, name)] {
        if !repeats {
            text.push_str(&format!("note: {who} did not give the same ids in every run\n"));
        }
    }
    text
}
