//! Random prompts at little more than the smallest budget, for a long time: memory does not grow, no slot is
//! lost, nothing is read while it is there.
//!
//! A few seconds unless METALTAIL_SOAK_SECONDS says more; METALTAIL_SOAK_MODEL names another model than a small
//! synthetic one.

mod common;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use metaltail_container::synth::{Like, SynthFormat, SynthOptions};
use metaltail_engine::telemetry::{Event, Listener, Telemetry};
use metaltail_engine::{Engine, EngineError, EngineOptions, Session};
use metaltail_model::CancelFlag;
use metaltail_store::{BudgetError, LoadRank, Machine, StoreEvent};
use synthetic::{Synthetic, random_ids};

/// Experts that are being read, and complaints about reads that were not needed.
#[derive(Default)]
struct Reads {
    under_way: HashSet<(u32, u32)>,
    demanded: u64,
    twice: Vec<(u32, u32)>,
}

#[derive(Default)]
struct Ear(Mutex<Reads>);

impl Listener for Ear {
    fn on_event(&self, event: &Event<'_>) {
        let mut reads = self.0.lock().unwrap();
        match event {
            Event::Store(StoreEvent::ReadStarted { layer, expert, .. }) => {
                let fresh = reads.under_way.insert((*layer, *expert));
                reads.twice.extend((!fresh).then_some((*layer, *expert)));
            }
            Event::Store(StoreEvent::ReadFinished { layer, expert, rank, .. }) => {
                reads.demanded += u64::from(*rank == LoadRank::Demand);
                reads.under_way.remove(&(*layer, *expert));
            }
            _ => {}
        }
    }
}

fn open(dir: &Path, ram: u64, ear: Arc<Ear>) -> Result<Engine, EngineError> {
    let options =
        EngineOptions { ram: Some(ram), context: Some(512), threads: Some(2), ..EngineOptions::default() };
    Engine::open(dir, &options, Arc::new(Telemetry::new(vec![ear])), &|_, _| {})
}

/// The least that the model can be run in, as the refusal of less says.
fn smallest(dir: &Path) -> u64 {
    match open(dir, 1 << 20, Arc::default()) {
        Err(EngineError::Budget(BudgetError::TooSmall { budget, .. })) => budget.total(),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("a mebibyte was enough"),
    }
}

/// One prompt of random ids and forced tokens after it, as a user's session would be.
fn prompt(engine: &Engine, seed: u32) {
    let vocab = engine.plan().vocab as u32;
    let mut session = Session::new(engine);
    let cancel = CancelFlag::new();
    // The longest comes first.
    session.extend(&random_ids(80 - seed as usize % 50, vocab, seed), &cancel, &mut |_, _| Ok(())).unwrap();
    for id in random_ids(40, vocab, seed.wrapping_add(7)) {
        let logits = &mut |_: usize, hidden: &[f32]| engine.logits(hidden).map(drop);
        session.extend(&[id], &cancel, logits).unwrap();
    }
}

#[test]
fn a_long_run_in_little_memory_neither_grows_nor_loses_anything() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let time = Duration::from_secs(number("METALTAIL_SOAK_SECONDS").unwrap_or(6));
    let named = std::env::var_os("METALTAIL_SOAK_MODEL");
    let own = named.is_none().then(|| {
        let options = SynthOptions::new(Like::Fat, SynthFormat::Slab);
        Synthetic::sized(Like::Fat, (Some(3), Some(16)), &options)
    });
    let dir = named.as_deref().map_or_else(|| own.as_ref().unwrap().path(), Path::new);
    let ram = smallest(dir) / 20 * 21;
    let ear = Arc::new(Ear::default());
    let engine = open(dir, ram, ear.clone()).unwrap();
    let (began, mut seed) = (Instant::now(), 0);
    let (mut settled, mut tenths) = (0, [0; 10]);
    while began.elapsed() < time || seed < 6 {
        prompt(&engine, seed);
        seed += 1;
        // The cache may take what the budget leaves; whatever else is taken is lost.
        let grown = engine.telemetry().figures().grown_bytes;
        let now = Machine::own_anon_now().unwrap().saturating_sub(grown);
        if seed == 3 {
            settled = now;
        }
        let tenth = (10.0 * began.elapsed().as_secs_f64() / time.as_secs_f64()) as usize;
        let high = &mut tenths[tenth.min(9)];
        *high = now.max(*high);
        engine.store().audit().unwrap();
    }
    let figures = engine.telemetry().figures();
    let total = figures.prefill.plus(&figures.decode);
    assert!(total.misses > 100, "nothing was read: {figures:?}");
    println!(
        "{seed} prompts, budget {ram}, anonymous without growth {settled} after three, \
         at most by tenths of the time {tenths:?}, {} grown, peak {}",
        figures.grown_bytes, figures.peak_anonymous
    );
    let most_of = |tenths: &[u64]| tenths.iter().copied().max().unwrap_or(0);
    let (first_half, most) = (most_of(&tenths[..5]), most_of(&tenths));
    // After three prompts every slot has been used but some of those for experts that come or are expected.
    let terms = engine.budget().terms;
    let moving = terms.iter().filter(|term| ["staged", "in_flight"].contains(&term.name));
    let moving: u64 = moving.map(|term| term.bytes).sum();
    assert!(most <= settled + moving + (2 << 20), "anonymous memory grew from {settled} to {most}");
    if time >= Duration::from_secs(60) {
        assert!(most <= first_half + (1 << 20), "anonymous memory still grew: {first_half}, then {most}");
    }
    assert!(figures.peak_anonymous <= ram, "{} above the budget of {ram}", figures.peak_anonymous);
    drop(engine);
    let reads = ear.0.lock().unwrap();
    assert!(reads.twice.is_empty(), "read while being read: {:?}", reads.twice);
    assert!(reads.under_way.is_empty(), "begun and not ended: {:?}", reads.under_way);
    assert_eq!(reads.demanded, total.misses, "every miss is one read");
}
