//! The measuring loop inside an arm's process: one engine, prompts in rotation.

use std::io;
use std::path::PathBuf;

use metaltail_engine::telemetry::Figures;
use metaltail_engine::{Engine, EngineError, Session};
use metaltail_model::CancelFlag;
use metaltail_store::page_cache;
use serde_json::Value;

use crate::arm::{DecodeFigures, PromptRow, hash_ids};
use crate::job::{Feed, Job, JobError, PageCache, Prompt};
use crate::numerics::log_sum;
use crate::system::SystemCounters;

/// Share of pages that may be on the wrong side of the declared state: a file's first pages come back
/// whenever anybody looks at it.
const SLACK: f64 = 0.01;

/// Rows of one prompt of which all logits are kept, about.
const KEPT: usize = 16;

/// Why an arm has no figures.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The ids do not suit.
    #[error(transparent)]
    Job(#[from] JobError),
    /// A step failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The page cache could not be asked or told.
    #[error("the page cache's state of the weight files cannot be set")]
    PageCache(#[source] io::Error),
    /// The page cache is not as declared.
    #[error(
        "--page-cache {wanted} is not true: {:.1} % of the weight files are in the page cache. {}", 100.0 * share, advice(*wanted)
    )]
    State {
        /// What was declared.
        wanted: PageCache,
        /// Share that is resident.
        share: f64,
    },
}

fn advice(wanted: PageCache) -> &'static str {
    match wanted {
        PageCache::Cold => {
            "Files in a memory file system, mapped by another program or owned by somebody else cannot be evicted: use --page-cache warm, or a copy on a drive"
        }
        PageCache::Warm => "They do not fit in the memory that is free: use --page-cache cold",
    }
}

/// What a prompt's row is drawn with beside what is gathered here.
pub type Stats<'a> = &'a dyn Fn(Figures, Option<u64>) -> Value;

/// Runs all prompts of a job. `stats` draws the figures of `run --json` from what was gathered and the
/// bytes that came from drives.
///
/// # Errors
/// What refuses a prompt or fails; a page cache that is not as declared.
pub fn serve(engine: &Engine, job: &Job, feed: Feed, stats: Stats<'_>) -> Result<Vec<PromptRow>, ServeError> {
    let prompts = job.prompts(feed, engine.plan().vocab)?;
    // Those of every drive: experts are read from wherever there is a copy.
    let drives = engine.checkpoint().drives();
    let files: Vec<PathBuf> = drives.iter().flat_map(|drive| drive.files.iter().flatten().cloned()).collect();
    let mut rows = Vec::with_capacity(prompts.len());
    for (at, prompt) in prompts.iter().enumerate() {
        let resident = make_true(job.page_cache, &files)?;
        let mut row = one_prompt(engine, job, prompt, at == job.warmup, stats)?;
        row.warmup = at < job.warmup;
        row.page_cache = resident;
        rows.push(row);
    }
    Ok(rows)
}

/// Brings the page cache into a state and verifies it: the share of the files that it holds.
///
/// # Errors
/// The system refuses; the state is not the one that was wanted.
pub fn make_true(wanted: PageCache, files: &[PathBuf]) -> Result<f64, ServeError> {
    let share = || page_cache::resident_share(files).map_err(ServeError::PageCache);
    let holds = |share: f64| match wanted {
        PageCache::Cold => share <= SLACK,
        PageCache::Warm => share >= 1.0 - SLACK,
    };
    let before = share()?;
    if holds(before) {
        return Ok(before);
    }
    match wanted {
        PageCache::Cold => page_cache::evict(files),
        PageCache::Warm => page_cache::warm(files),
    }
    .map_err(ServeError::PageCache)?;
    let after = share()?;
    if holds(after) { Ok(after) } else { Err(ServeError::State { wanted, share: after }) }
}

fn one_prompt(
    engine: &Engine,
    job: &Job,
    prompt: &Prompt,
    first: bool,
    stats: Stats<'_>,
) -> Result<PromptRow, ServeError> {
    let telemetry = engine.telemetry();
    let mappings = engine.store().mappings() as i64;
    let mut seen = Seen::new(job.numerics);
    if job.numerics && first {
        seen.keep_every = Some(job.tokens.div_ceil(KEPT).max(1));
    }
    let mut at_decode = None;
    telemetry.reset();
    let before = SystemCounters::now();
    Session::new(engine).follow(&prompt.ids, &CancelFlag::new(), &mut |logits| {
        at_decode.get_or_insert_with(|| (telemetry.figures(), SystemCounters::now()));
        let best = seen.look(logits);
        let row = seen.ids.len() - 1;
        let next = prompt.forced.as_ref().map_or(best, |forced| forced.get(row).copied().unwrap_or(best));
        (row < job.tokens).then(|| seen.feed(logits, next))
    })?;
    let after = SystemCounters::now();
    let figures = telemetry.figures();
    let (prefill, then) = at_decode.unwrap_or_default();
    let system = after.since(&before);
    Ok(PromptRow {
        warmup: false,
        prompt_tokens: prompt.ids.len(),
        tokens: seen.ids.len() - 1,
        ids_hash: hash_ids(&seen.ids),
        nll: seen.nll(),
        ids: seen.ids,
        margins: seen.margins,
        logits: seen.logits,
        page_cache: 0.0,
        decode: decode_figures(&figures, &prefill, after.since(&then).drive_bytes),
        system,
        mappings_added: engine.store().mappings() as i64 - mappings,
        stats: stats(figures, system.drive_bytes),
    })
}

/// Decode alone: phases are counted apart, reads as what came after prefill.
fn decode_figures(figures: &Figures, prefill: &Figures, drive_bytes: Option<u64>) -> DecodeFigures {
    let (io, then, decode) = (&figures.io, &prefill.io, &figures.decode);
    DecodeFigures {
        seconds: decode.seconds,
        bytes: io.bytes.saturating_sub(then.bytes),
        drive_bytes,
        reads: io.reads.saturating_sub(then.reads),
        lookups: decode.lookups,
        misses: decode.misses,
        felt_wait_seconds: decode.felt_wait_seconds,
        sparse_seconds: decode.sparse_seconds,
        busy_seconds: io.busy_seconds - then.busy_seconds,
        depth_seconds: io.depth_seconds - then.depth_seconds,
    }
}

/// What the logits said.
struct Seen {
    numerics: bool,
    /// Every how many rows all logits are kept.
    keep_every: Option<usize>,
    logits: Vec<Vec<f32>>,
    ids: Vec<u32>,
    margins: Vec<f32>,
    nll: f64,
    fed: usize,
}

impl Seen {
    fn new(numerics: bool) -> Seen {
        Seen {
            numerics,
            keep_every: None,
            logits: Vec::new(),
            ids: Vec::new(),
            margins: Vec::new(),
            nll: 0.0,
            fed: 0,
        }
    }

    /// The most likely id, the first of equals, as greedy sampling has it.
    fn look(&mut self, logits: &[f32]) -> u32 {
        let (mut best, mut first, mut second) = (0, f32::NEG_INFINITY, f32::NEG_INFINITY);
        for (id, &logit) in logits.iter().enumerate() {
            if logit > first {
                (best, second, first) = (id, first, logit);
            } else if logit > second {
                second = logit;
            }
        }
        if self.numerics {
            self.margins.push(first - second);
        }
        if self.keep_every.is_some_and(|every| self.ids.len().is_multiple_of(every)) {
            self.logits.push(logits.to_vec());
        }
        // A vocabulary is below 2^32.
        self.ids.push(best as u32);
        best as u32
    }

    /// Notes how likely the id was that comes next.
    fn feed(&mut self, logits: &[f32], id: u32) -> u32 {
        if self.numerics {
            let logit = logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
            self.nll += log_sum(logits) - f64::from(logit);
            self.fed += 1;
        }
        id
    }

    fn nll(&self) -> Option<f64> {
        (self.fed > 0).then(|| self.nll / self.fed as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_equals_is_the_most_likely() {
        let mut seen = Seen::new(true);
        assert_eq!(seen.look(&[0.0, 2.0, 2.0, 1.5]), 1);
        assert_eq!(seen.look(&[0.0, -1.0]), 0);
        assert_eq!(seen.margins, [0.0, 1.0]);
    }

    #[test]
    fn likelihood_is_that_of_the_fed_ids() {
        let mut seen = Seen::new(true);
        assert_eq!(seen.nll(), None);
        seen.feed(&[1.0, 1.0], 0);
        assert!((seen.nll().unwrap() - 2.0f64.ln()).abs() < 1e-12);
    }
}
