//! A device that answers before it has computed: leases stay alive until it is done, and a store
//! with fewer slots than the step has experts still gets through.

mod common;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::sync::Arc;

use metaltail_container::Checkpoint;
use metaltail_kernels::{
    Completion, ComputeError, CpuExperts, ExpertCompute, ExpertTask, Kernels, Numerics, Pool,
};
use metaltail_model::{
    CancelFlag, Experts, Foresight, KvCache, LoadOptions, Model, Phase, Row, Silent, expert_places,
};
use metaltail_store::{ExpertStore, StoreConfig};
use synthetic::{Synthetic, random_ids};

/// Bytes that a queued task will read, and what they were when it was queued.
struct Watched {
    start: *const u8,
    then: Vec<u8>,
}

// SAFETY: the pointer is only read on the thread that runs the step.
unsafe impl Send for Watched {}

/// Computes at once but says that it has not, and looks at the bytes again when it is waited for.
struct Late {
    inner: CpuExperts,
    watched: Vec<Watched>,
    drains: usize,
    changed: usize,
}

impl Late {
    fn look(&mut self) {
        for watched in self.watched.drain(..) {
            // SAFETY: the slot lies in an arena that outlives the step, and the caller keeps the
            // lease until now; that this is so is what the test finds out.
            let now = unsafe { std::slice::from_raw_parts(watched.start, watched.then.len()) };
            self.changed += usize::from(now != watched.then);
        }
    }
}

impl ExpertCompute for Late {
    fn name(&self) -> &'static str {
        "late"
    }

    fn begin(&mut self, x: &[f32], hidden: usize, outputs: usize) -> Result<(), ComputeError> {
        self.inner.begin(x, hidden, outputs)
    }

    fn submit(&mut self, tasks: &[ExpertTask<'_>]) -> Result<Completion, ComputeError> {
        for task in tasks {
            let bytes = task.weights.gate.weights();
            self.watched.push(Watched { start: bytes.as_ptr(), then: bytes.to_vec() });
        }
        self.inner.submit(tasks)?;
        Ok(Completion::InFlight)
    }

    fn drain(&mut self) -> Result<(), ComputeError> {
        self.drains += 1;
        self.look();
        Ok(())
    }

    fn finish(&mut self) -> Result<&[f32], ComputeError> {
        self.look();
        self.inner.finish()
    }
}

#[test]
fn experts_of_a_late_device_stay_in_place_until_it_is_waited_for() {
    let synthetic = Synthetic::tiny();
    let checkpoint = Checkpoint::open(synthetic.path()).unwrap();
    let places = expert_places(&checkpoint, &synthetic.inventory, false).unwrap();
    // Two slots for a step that wants up to eight experts, and none is kept.
    let config = StoreConfig { cap: 0, in_flight: 2, loaders: 2, ..StoreConfig::default() };
    let observer = Arc::new(metaltail_store::Silent);
    let store = ExpertStore::open(checkpoint.files(), places.clone(), config, observer).unwrap();
    let pool = Arc::new(Pool::new(1));
    let options = LoadOptions {
        kernels: Kernels::best(),
        pool: pool.clone(),
        accelerator: None,
        draft: false,
        progress: &|_| {},
    };
    let model = Model::load(&checkpoint, synthetic.plan.clone(), &places, options).unwrap();
    let ids = random_ids(40, 256, 3);
    let row = |(position, &token): (u32, &u32)| Row { sequence: 0, position, token, phase: Phase::Prompt };
    let rows: Vec<Row> = (0u32..).zip(&ids).map(row).collect();
    let forward = |compute: &mut dyn ExpertCompute| {
        let mut cache = KvCache::new(&synthetic.plan);
        let mut experts = Experts { store: &store, compute, foresight: Foresight::off(), top_p: None };
        model.forward(&rows, &mut [&mut cache], &mut experts, &Silent, &CancelFlag::new()).unwrap()
    };
    let cpu = || CpuExperts::new(pool.clone(), Kernels::best(), Numerics::QuantizedActivations);
    let wanted = forward(&mut cpu());
    let mut late = Late { inner: cpu(), watched: Vec::new(), drains: 0, changed: 0 };
    let found = forward(&mut late);
    assert_eq!(late.changed, 0, "a slot was overwritten under the device");
    assert!(late.drains > 0, "the slots sufficed: this test shows nothing");
    assert!(wanted.iter().map(|x| x.to_bits()).eq(found.iter().map(|x| x.to_bits())));
}
