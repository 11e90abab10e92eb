//! A device that fails: what was computed before stays as it was, and so does what the device may still read.

mod common;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::collections::BTreeMap;
use std::sync::Arc;

use metaltail_container::{Checkpoint, Role};
use metaltail_device::residency::{DeclaredArena, Ledger, Mode, Residency, SlabAllocation};
use metaltail_device::sim::{Profile, SimAccelerator, SimDriver};
use metaltail_engine::EngineOptions;
use metaltail_kernels::{
    Accelerator, Buffer, Completion, ComputeError, ExpertCompute, ExpertRows, ExpertTask, Extent, HeldMatrix,
    Kernels, Op, Pool, View,
};
use metaltail_model::{
    CancelFlag, Experts, Foresight, KvCache, LoadOptions, Model, ModelError, Phase, Row, Silent,
    expert_places,
};
use metaltail_quant::{MatrixLayout, MatrixRef};
use metaltail_store::budget::term;
use metaltail_store::{ExpertStore, StoreConfig};
use synthetic::{Synthetic, random_ids, settings};

/// What fails next, counted from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// A wait; of what was handed over nothing may be read then.
    Wait(usize),
    /// A submission of experts, which are recorded.
    Submit,
    /// A product with so many rows, behind which something was recorded.
    Product(usize),
}

/// The simulated accelerator, but it fails when it is told to.
struct Failing {
    inner: SimAccelerator,
    store: Arc<ExpertStore>,
    sizes: BTreeMap<Buffer, usize>,
    fault: Option<Fault>,
    /// Written since the last wait.
    written: Vec<Extent>,
    /// Whether experts were recorded since.
    experts: bool,
    /// Whether a submission of them was refused.
    refused: bool,
    /// Of a wait after that: whether they were still leased.
    leased: Option<bool>,
}

fn broken() -> ComputeError {
    ComputeError::Device { device: "failing", message: "as it was told".into() }
}

impl Failing {
    /// Whether what the fault counts has come.
    fn due(&mut self, is: impl Fn(Fault) -> bool) -> bool {
        let due = self.fault.is_some_and(is);
        if due {
            self.fault = None;
        }
        due
    }

    /// Whether slots are held that no load holds: leases on experts that the device may read.
    fn leased(&self) -> bool {
        let dump = self.store.dump();
        let number = |before: &str, after: &str| -> usize {
            let end = dump.find(after).unwrap();
            dump[..end].rsplit(before).next().unwrap().trim().parse().unwrap()
        };
        number("free,", " of 2 in flight") > number("(", " loading)")
    }
}

impl Accelerator for Failing {
    fn name(&self) -> &'static str {
        "failing"
    }

    fn announce(&mut self, matrices: &[MatrixLayout]) {
        self.inner.announce(matrices);
    }

    fn hold(&mut self, matrix: MatrixRef<'_>) -> Result<HeldMatrix, ComputeError> {
        self.inner.hold(matrix)
    }

    fn buffer(&mut self, numbers: usize) -> Result<Buffer, ComputeError> {
        let buffer = self.inner.buffer(numbers)?;
        self.sizes.insert(buffer, numbers);
        Ok(buffer)
    }

    fn release(&mut self, buffer: Buffer) {
        assert!(self.sizes.remove(&buffer).is_some(), "{buffer:?} is given up twice");
        self.inner.release(buffer);
    }

    fn write(&mut self, to: View, numbers: &[f32]) -> Result<(), ComputeError> {
        self.inner.write(to, numbers)
    }

    fn read(&mut self, from: View, numbers: &mut [f32]) -> Result<(), ComputeError> {
        self.inner.read(from, numbers)
    }

    fn read_ids(&mut self, from: View, ids: &mut [u32]) -> Result<(), ComputeError> {
        self.inner.read_ids(from, ids)
    }

    fn record(&mut self, op: &Op) -> Result<(), ComputeError> {
        self.inner.record(op)?;
        self.written.extend(op.check(|buffer| self.sizes.get(&buffer).copied())?.written());
        let Op::Product { matrix, .. } = op else { return Ok(()) };
        match self.due(|fault| fault == Fault::Product(matrix.layout.rows())) {
            true => Err(broken()),
            false => Ok(()),
        }
    }

    fn experts(&mut self, rows: &ExpertRows, tasks: &[ExpertTask<'_>]) -> Result<(), ComputeError> {
        self.inner.experts(rows, tasks)?;
        self.written.extend(rows.footprint()?.written());
        self.experts = true;
        Ok(())
    }

    fn submit(&mut self) -> Result<(), ComputeError> {
        let experts = self.experts;
        match self.due(|fault| experts && fault == Fault::Submit) {
            true => {
                self.refused = true;
                Err(broken())
            }
            false => self.inner.submit(),
        }
    }

    fn wait(&mut self) -> Result<(), ComputeError> {
        if std::mem::take(&mut self.refused) {
            self.leased = Some(self.leased());
        }
        self.experts = false;
        self.inner.wait()?;
        let written = std::mem::take(&mut self.written);
        if let Some(Fault::Wait(left)) = &mut self.fault {
            *left = left.wrapping_sub(1);
        }
        if !self.due(|fault| fault == Fault::Wait(usize::MAX)) {
            return Ok(());
        }
        for extent in written.iter().filter(|extent| self.sizes.contains_key(&extent.buffer)) {
            let numbers = vec![f32::NAN; extent.end - extent.start];
            self.inner.write(View { buffer: extent.buffer, at: extent.start }, &numbers)?;
        }
        Err(broken())
    }
}

/// It computes whole layers and no experts alone.
struct Whole(Failing);

impl ExpertCompute for Whole {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn accelerator(&mut self) -> Option<&mut dyn Accelerator> {
        Some(&mut self.0)
    }

    fn begin(&mut self, _: &[f32], _: usize, _: usize) -> Result<(), ComputeError> {
        Err(broken())
    }

    fn submit(&mut self, _: &[ExpertTask<'_>]) -> Result<Completion, ComputeError> {
        Err(broken())
    }

    fn drain(&mut self) -> Result<(), ComputeError> {
        self.0.wait()
    }

    fn finish(&mut self) -> Result<&[f32], ComputeError> {
        Err(broken())
    }
}

/// A model whose dense weights lie on such a device.
struct Setup {
    model: Model,
    store: Arc<ExpertStore>,
    compute: Whole,
}

impl Setup {
    fn new(synthetic: &Synthetic, config: StoreConfig) -> Setup {
        let checkpoint = Checkpoint::open(synthetic.path()).unwrap();
        let places = expert_places(&checkpoint, &synthetic.inventory, false).unwrap();
        let observer = Arc::new(metaltail_store::Silent);
        let store =
            Arc::new(ExpertStore::open(checkpoint.files(), places.clone(), config, observer).unwrap());
        let residency = Arc::new(Residency::new(Ledger::new(SimDriver::new(Profile::m5max()), Mode::Set)));
        let arena = Arc::new(DeclaredArena::new(store.arena(), SlabAllocation::Arena, residency));
        store.set_chunk_listener(Arc::clone(&arena) as _);
        let (kernels, pool) = (Kernels::best(), Arc::new(Pool::new(1)));
        let mut compute = Whole(Failing {
            inner: SimAccelerator::new(arena, kernels, &pool),
            store: Arc::clone(&store),
            sizes: BTreeMap::new(),
            fault: None,
            written: Vec::new(),
            experts: false,
            refused: false,
            leased: None,
        });
        let accelerator = compute.accelerator();
        let options = LoadOptions { kernels, pool, accelerator, draft: false, progress: &|_| {} };
        let model = Model::load(&checkpoint, synthetic.plan.clone(), &places, options).unwrap();
        Setup { model, store, compute }
    }

    fn device(&mut self) -> &mut Failing {
        &mut self.compute.0
    }

    fn step(&mut self, cache: &mut KvCache, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        let first = cache.len() as u32;
        let row =
            |(i, &token): (u32, &u32)| Row { sequence: 0, position: first + i, token, phase: Phase::Prompt };
        let rows: Vec<Row> = (0u32..).zip(ids).map(row).collect();
        let compute = &mut self.compute;
        let mut experts = Experts { store: &self.store, compute, foresight: Foresight::off(), top_p: None };
        self.model.forward(&rows, &mut [cache], &mut experts, &Silent, &CancelFlag::new())
    }
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// Rows move to larger buffers in the step that fails, in whichever layer: they are not lost.
#[test]
fn rows_of_a_cache_survive_a_failure_while_their_buffers_grow() {
    let synthetic = Synthetic::tiny();
    let text = random_ids(270, 256, 4);
    let mut setup = Setup::new(&synthetic, StoreConfig { cap: 64, ..StoreConfig::default() });
    let plain = |setup: &mut Setup| {
        let mut cache = KvCache::new(&synthetic.plan);
        setup.step(&mut cache, &text[..250]).unwrap();
        bits(&setup.step(&mut cache, &text[250..]).unwrap())
    };
    let wanted = plain(&mut setup);
    let held = |setup: &mut Setup| setup.device().sizes.len();
    let before = held(&mut setup);
    let mut failures = 0;
    // The first wait of a step ends what came before it.
    for wait in 1..=synthetic.sparse_layers().len() + 1 {
        let mut cache = KvCache::new(&synthetic.plan);
        setup.step(&mut cache, &text[..250]).unwrap();
        setup.device().fault = Some(Fault::Wait(wait));
        let ended = setup.step(&mut cache, &text[250..]);
        failures += usize::from(ended.is_err());
        assert_eq!(cache.len(), 250, "{ended:?}");
        assert!(bits(&setup.step(&mut cache, &text[250..]).unwrap()) == wanted, "wait {wait}");
    }
    assert_eq!(failures, synthetic.sparse_layers().len() + 1);
    // What the last cache left behind goes with the next step, and nothing else is left.
    assert!(plain(&mut setup) == wanted);
    assert!(held(&mut setup) <= 2 * before, "{} buffers, {before} at first", held(&mut setup));
    plain(&mut setup);
    let settled = held(&mut setup);
    plain(&mut setup);
    assert_eq!(held(&mut setup), settled, "buffers are lost with every sequence");
}

/// Experts that were recorded are read until the wait, whatever the submission said.
#[test]
fn experts_stay_in_place_when_their_submission_fails() {
    let synthetic = Synthetic::tiny();
    let config = StoreConfig { cap: 0, in_flight: 2, loaders: 2, ..StoreConfig::default() };
    let mut setup = Setup::new(&synthetic, config);
    let text = random_ids(6, 256, 4);
    let wanted = bits(&setup.step(&mut KvCache::new(&synthetic.plan), &text).unwrap());
    setup.device().fault = Some(Fault::Submit);
    let mut cache = KvCache::new(&synthetic.plan);
    setup.step(&mut cache, &text).unwrap_err();
    assert_eq!(setup.device().leased, Some(true), "slots were given away under the device");
    assert!(bits(&setup.step(&mut cache, &text).unwrap()) == wanted);
}

/// Between steps memory comes and goes, which must not have to wait for work that nobody will hand over.
#[test]
fn nothing_is_in_flight_after_logits_that_failed() {
    let synthetic = Synthetic::tiny();
    let mut setup = Setup::new(&synthetic, StoreConfig { cap: 64, ..StoreConfig::default() });
    let hidden = setup.step(&mut KvCache::new(&synthetic.plan), &random_ids(1, 256, 4)).unwrap();
    setup.device().fault = Some(Fault::Product(synthetic.plan.vocab));
    setup.model.logits(&hidden, &mut setup.compute).unwrap_err();
    assert!(setup.device().written.is_empty(), "an operation was left behind");
    setup.model.logits(&hidden, &mut setup.compute).unwrap();
}

/// The processor looks rows of an embedding up, the device multiplies by it: where both are one matrix there are two
/// copies, and both are charged.
#[test]
fn a_head_that_is_the_embedding_is_charged_twice_on_a_device() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let source = common::root().join("fixtures/oracles/glm_moe_dsa");
    std::fs::copy(source.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let mut config = common::json(&source.join("config.json"));
    config["tie_word_embeddings"] = true.into();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let engine = |kind| {
        let device = metaltail_engine::DeviceOptions { kind, ..Default::default() };
        let options = EngineOptions { device, exact: true, ..settings() };
        let telemetry = Arc::new(metaltail_engine::telemetry::Telemetry::new(Vec::new()));
        metaltail_engine::Engine::open(folder.path(), &options, telemetry, &|_, _| {}).unwrap()
    };
    let [processor, device] =
        [metaltail_engine::DeviceKind::Cpu, metaltail_engine::DeviceKind::Sim].map(engine);
    let dense = |engine: &metaltail_engine::Engine| {
        engine.budget().terms.iter().find(|charge| charge.name == term::DENSE).unwrap().bytes
    };
    let spec = processor.plan().inventory();
    let spec = spec.tensors.iter().find(|spec| spec.role == Role::Embedding).unwrap();
    let copy = Checkpoint::open(folder.path()).unwrap().matrix(spec).unwrap().layout.bytes() as u64;
    assert_eq!(dense(&device), dense(&processor) + copy);
    let prompt = random_ids(9, 256, 1);
    assert_eq!(common::greedy(&device, &prompt, 8), common::greedy(&processor, &prompt, 8));
}
