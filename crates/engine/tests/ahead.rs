//! Loading ahead of demand moves bytes and nothing else: the same bits, every byte accounted for.

mod common;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::sync::Arc;
use std::time::Duration;

use metaltail_container::Checkpoint;
use metaltail_engine::telemetry::{Figures, Telemetry};
use metaltail_kernels::{
    Completion, ComputeError, CpuExperts, ExpertCompute, ExpertTask, Kernels, Numerics, Pool,
};
use metaltail_model::{
    CancelFlag, Experts, Foresight, KvCache, LoadOptions, Model, Phase, Row, expert_places,
};
use metaltail_store::{ExpertStore, StoreConfig};
use synthetic::{Synthetic, random_ids};

const TOKENS: usize = 60;

/// Computes slowly enough that the drive has time of its own.
struct Slow(CpuExperts);

impl ExpertCompute for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }
    fn begin(&mut self, x: &[f32], hidden: usize, outputs: usize) -> Result<(), ComputeError> {
        self.0.begin(x, hidden, outputs)
    }
    fn submit(&mut self, tasks: &[ExpertTask<'_>]) -> Result<Completion, ComputeError> {
        std::thread::sleep(Duration::from_millis(1));
        self.0.submit(tasks)
    }
    fn drain(&mut self) -> Result<(), ComputeError> {
        self.0.drain()
    }
    fn finish(&mut self) -> Result<&[f32], ComputeError> {
        self.0.finish()
    }
}

/// Hidden states of all tokens, one step each, with the figures.
fn run(synthetic: &Synthetic, staging: usize, foresight: fn() -> Foresight) -> (Vec<u32>, Figures) {
    let checkpoint = Checkpoint::open(synthetic.path()).unwrap();
    let places = expert_places(&checkpoint, &synthetic.inventory, false).unwrap();
    let config = StoreConfig { cap: 2, in_flight: 4, loaders: 2, staging, ..StoreConfig::default() };
    let telemetry = Arc::new(Telemetry::new(Vec::new()));
    let store = ExpertStore::open(checkpoint.files(), places.clone(), config, telemetry.clone()).unwrap();
    let pool = Arc::new(Pool::new(1));
    let options = LoadOptions {
        kernels: Kernels::best(),
        pool: pool.clone(),
        accelerator: None,
        draft: false,
        progress: &|_| {},
    };
    let model = Model::load(&checkpoint, synthetic.plan.clone(), &places, options).unwrap();
    let mut compute = Slow(CpuExperts::new(pool, Kernels::best(), Numerics::QuantizedActivations));
    let mut cache = KvCache::new(&synthetic.plan);
    let mut bits = Vec::new();
    for (position, token) in (0u32..).zip(random_ids(TOKENS, 256, 3)) {
        let rows = [Row { sequence: 0, position, token, phase: Phase::Prompt }];
        let mut experts =
            Experts { store: &store, compute: &mut compute, foresight: foresight(), top_p: None };
        let cancel = CancelFlag::new();
        let hidden = model.forward(&rows, &mut [&mut cache], &mut experts, &*telemetry, &cancel).unwrap();
        bits.extend(hidden.iter().map(|x| x.to_bits()));
    }
    // Loads that nobody waits for may still be under way; the store ends them when it closes.
    drop(store);
    (bits, telemetry.figures())
}

#[test]
fn prefetching_changes_no_bit_and_every_byte_is_accounted_for() {
    let synthetic = Synthetic::tiny();
    let (wanted, without) = run(&synthetic, 2, Foresight::off);
    let (found, with) = run(&synthetic, 2, Foresight::on);
    assert!(wanted == found, "loading ahead changed the result");
    let expert = synthetic.expert_bytes(1);
    for figures in [&without, &with] {
        let total = figures.prefill.plus(&figures.decode);
        assert_eq!(total.hits() + total.misses, total.lookups);
        let ahead = &figures.io.prefetch;
        assert_eq!(figures.io.bytes, total.misses * expert + ahead.issued_bytes);
        assert_eq!(ahead.useful_bytes, total.staged * expert);
        assert!(ahead.useful_bytes <= ahead.issued_bytes);
    }
    assert_eq!(without.io.prefetch.issued_bytes, 0);
    let total = with.prefill.plus(&with.decode);
    assert!(total.staged > 0 && with.io.prefetch.right > 0, "nothing was loaded ahead: {with:?}");
    assert!(total.misses < without.prefill.plus(&without.decode).misses);
}

#[test]
fn guesses_can_be_measured_without_loading_anything() {
    let synthetic = Synthetic::tiny();
    let (_, figures) = run(&synthetic, 2, Foresight::measure);
    let ahead = &figures.io.prefetch;
    assert!(ahead.chosen > 0 && ahead.right <= ahead.chosen && ahead.issued_bytes == 0, "{ahead:?}");
}
