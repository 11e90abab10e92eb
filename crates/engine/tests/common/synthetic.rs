//! Synthetic models in temporary directories, and ears for events.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use metaltail_container::synth::{Like, SynthFormat, SynthOptions, config, synth};
use metaltail_container::{Checkpoint, Extent, Inventory};
use metaltail_engine::telemetry::{Event, Listener, Telemetry};
use metaltail_engine::{Engine, EngineError, EngineOptions};
use metaltail_model::{CancelFlag, ModelEvent, Plan};
use tempfile::TempDir;

/// Positions that an indexer keeps in these models: few, so that short prompts select.
pub const INDEX_TOPK: usize = 24;

/// A model on disk and what it should hold.
pub struct Synthetic {
    dir: TempDir,
    pub plan: Plan,
    pub inventory: Inventory,
}

impl Synthetic {
    pub fn new(like: Like, options: &SynthOptions) -> Synthetic {
        Synthetic::sized(like, (None, None), options)
    }

    /// With so many layers and experts a layer.
    pub fn sized(
        like: Like,
        (layers, experts): (Option<u32>, Option<u32>),
        options: &SynthOptions,
    ) -> Synthetic {
        let mut config = config(like, layers, experts).unwrap();
        config["index_topk"] = INDEX_TOPK.into();
        let plan = Plan::from_config(&config).unwrap();
        let inventory = plan.inventory();
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let go_on = &mut |_: metaltail_container::convert::Progress<'_>| ControlFlow::Continue(());
        synth(dir.path(), &config, &inventory, options, go_on).unwrap();
        Synthetic { dir, plan, inventory }
    }

    /// `like` in `format` with its usual options.
    pub fn of(like: Like, format: SynthFormat) -> Synthetic {
        Synthetic::new(like, &SynthOptions::new(like, format))
    }

    /// `tiny` as a slab.
    pub fn tiny() -> Synthetic {
        Synthetic::of(Like::Tiny, SynthFormat::Slab)
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn open(&self, options: &EngineOptions) -> Engine {
        self.try_open(options).unwrap()
    }

    pub fn try_open(&self, options: &EngineOptions) -> Result<Engine, EngineError> {
        let telemetry = Arc::new(Telemetry::new(Vec::new()));
        Engine::open(self.path(), options, telemetry, &|_, _| {})
    }

    pub fn open_heard(&self, options: &EngineOptions, ear: Arc<dyn Listener>) -> Engine {
        let telemetry = Arc::new(Telemetry::new(vec![ear]));
        Engine::open(self.path(), options, telemetry, &|_, _| {}).unwrap()
    }

    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint::open(self.path()).unwrap()
    }

    /// Runs of one expert.
    pub fn runs(&self, layer: u32, expert: u32) -> Vec<Extent> {
        let spec = self.inventory.experts.iter().find(|spec| spec.layer == layer).unwrap();
        self.checkpoint().expert(spec, expert).unwrap().runs
    }

    /// Bytes of one expert of a layer.
    pub fn expert_bytes(&self, layer: u32) -> u64 {
        self.runs(layer, 0).iter().map(|run| run.len).sum()
    }

    /// Layers with routed experts, the draft layer apart.
    pub fn sparse_layers(&self) -> Vec<u32> {
        let layers = self.inventory.experts.iter().filter(|spec| !spec.draft);
        layers.map(|spec| spec.layer).collect()
    }
}

/// Settings that leave nothing to the machine.
pub fn settings() -> EngineOptions {
    EngineOptions {
        ram: Some(4 << 30),
        threads: Some(2),
        loaders: Some(2),
        cap: Some(4),
        ..EngineOptions::default()
    }
}

/// Ids without a pattern that a router could settle into, below `vocab`.
pub fn random_ids(count: usize, vocab: u32, seed: u32) -> Vec<u32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % vocab
    };
    (0..count).map(|_| next()).collect()
}

/// Counts routing events, and cancels at the one of this number (counted from 1; 0 never).
#[derive(Default)]
pub struct Router {
    pub flag: CancelFlag,
    pub cancel_at: usize,
    routed: AtomicUsize,
    distinct: AtomicUsize,
    notices: Mutex<Vec<String>>,
}

impl Router {
    pub fn cancelling_at(cancel_at: usize) -> Arc<Router> {
        Arc::new(Router { cancel_at, ..Router::default() })
    }

    /// Layers that routed so far.
    pub fn routed(&self) -> usize {
        self.routed.load(Ordering::SeqCst)
    }

    /// Sum of the distinct experts of each layer and step.
    pub fn distinct(&self) -> usize {
        self.distinct.load(Ordering::SeqCst)
    }

    pub fn notices(&self) -> Vec<String> {
        self.notices.lock().unwrap().clone()
    }
}

impl Listener for Router {
    fn on_event(&self, event: &Event<'_>) {
        match event {
            Event::Model(ModelEvent::Routed { distinct, .. }) => {
                self.distinct.fetch_add(*distinct, Ordering::SeqCst);
                if self.routed.fetch_add(1, Ordering::SeqCst) + 1 == self.cancel_at {
                    self.flag.cancel();
                }
            }
            Event::Notice(text) => self.notices.lock().unwrap().push((*text).to_owned()),
            _ => {}
        }
    }
}
