//! A loaded model with its store, its threads and its settings.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metaltail_container::Checkpoint;
use metaltail_device::residency::Difference;
use metaltail_kernels::ExpertCompute;
use metaltail_model::{
    CancelFlag, Experts, Foresight, KvCache, Model, ModelEvent, ModelObserver, Plan, Row, Selected,
};
use metaltail_store::usage::{Saved, UsageRecorder};
use metaltail_store::{Budget, ExpertStore, Machine};

use crate::device::{Device, DeviceFigures};
use crate::error::EngineError;
use crate::options::Resolved;
use crate::pins::Pins;
use crate::telemetry::Telemetry;
use crate::upkeep::Upkeep;

/// A loaded model; sessions run on it.
pub struct Engine {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) model: Model,
    // Before the store: a device forgets memory before it goes.
    pub(crate) compute: Mutex<Box<dyn ExpertCompute>>,
    pub(crate) device: Device,
    pub(crate) store: ExpertStore,
    pub(crate) telemetry: Arc<Telemetry>,
    pub(crate) budget: Budget,
    pub(crate) resolved: Resolved,
    pub(crate) upkeep: Mutex<Upkeep>,
    pub(crate) usage: Option<Arc<UsageRecorder>>,
    pub(crate) pins: Pins,
    pub(crate) compare_guesses: AtomicBool,
    /// Bits of an f32; 1 leaves nothing out.
    pub(crate) expert_top_p: AtomicU32,
}

impl Engine {
    /// The files it was loaded from.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// What the model computes.
    pub fn plan(&self) -> &Plan {
        self.model.plan()
    }

    /// Positions that a session may hold.
    pub fn context(&self) -> usize {
        self.resolved.context
    }

    /// Rows of a prefill step.
    pub fn prefill_chunk(&self) -> usize {
        self.resolved.prefill_chunk
    }

    /// Settings as they were resolved.
    pub fn resolved(&self) -> &Resolved {
        &self.resolved
    }

    /// The memory budget and its terms, with the cache as it is now.
    pub fn budget(&self) -> Budget {
        self.budget.clone().with_slots(self.store.capacity_bytes())
    }

    /// The expert store.
    pub fn store(&self) -> &ExpertStore {
        &self.store
    }

    /// Figures and notices.
    pub fn telemetry(&self) -> &Telemetry {
        &self.telemetry
    }

    /// The usage profile, unless it is off.
    pub fn usage(&self) -> Option<&UsageRecorder> {
        self.usage.as_deref()
    }

    /// From now on what the next layers will choose is guessed in every way and compared
    /// ([`ModelEvent::Foreseen`](metaltail_model::ModelEvent::Foreseen)), and nothing is loaded ahead.
    pub fn compare_guesses(&self) {
        self.compare_guesses.store(true, Ordering::Relaxed);
    }

    /// Share of a row's expert weights that is computed, where some may be left out.
    pub fn expert_top_p(&self) -> Option<f32> {
        let share = f32::from_bits(self.expert_top_p.load(Ordering::Relaxed));
        (share < 1.0).then_some(share)
    }

    /// Changes that share for the steps to come; `None` leaves nothing out. So one loaded model can be
    /// judged with and without.
    pub fn set_expert_top_p(&self, share: Option<f32>) {
        self.expert_top_p.store(share.unwrap_or(1.0).to_bits(), Ordering::Relaxed);
    }

    /// What is pinned, and why.
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// Saves what is new in the usage profile and waits for the drive; also done when the engine is
    /// dropped. A failure is a notice: the old file is as it was.
    pub fn save_usage(&self) {
        self.save_usage_by(true);
    }

    fn save_usage_by(&self, durable: bool) {
        let Some(usage) = &self.usage else { return };
        match usage.save(durable) {
            Ok(Saved::Nothing | Saved::Added) => {}
            Ok(Saved::Unlocked) => self.telemetry.notice(&format!(
                "another process keeps the directory of {} locked: the usage profile was saved without waiting any longer, and counts that are saved there at the same moment may be lost",
                usage.path().display()
            )),
            Err(error) => self.telemetry.notice(&error.to_string()),
        }
    }

    /// Name of what computes experts.
    pub fn device(&self) -> &'static str {
        self.compute.lock().unwrap_or_else(PoisonError::into_inner).name()
    }

    /// Figures of an accelerator; none of the processor.
    pub fn device_figures(&self) -> Option<DeviceFigures> {
        self.device.figures()
    }

    /// What an accelerator knows of the cache's memory otherwise than it should: nothing after a pass. None of the
    /// processor.
    pub fn device_difference(&self) -> Option<Difference> {
        self.device.difference()
    }

    /// Computes one step of any number of sequences and, after it, keeps memory within the budget.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn step(
        &self,
        rows: &[Row],
        caches: &mut [&mut KvCache],
        cancel: &CancelFlag,
    ) -> Result<Vec<f32>, EngineError> {
        let start = Instant::now();
        let felt = self.telemetry.felt_wait();
        let compare = self.compare_guesses.load(Ordering::Relaxed);
        let ahead = !compare && rows.len() == 1 && self.upkeep().loads_ahead();
        if ahead {
            self.telemetry.prefetching();
        }
        // One pass at a time uses the device; a panic in a pass leaves it usable, since `begin`
        // starts it anew.
        let mut compute = self.compute.lock().unwrap_or_else(PoisonError::into_inner);
        let foresight = match (compare, ahead) {
            (true, _) => Foresight::measure(),
            (false, true) => Foresight::on(),
            (false, false) => Foresight::off(),
        };
        let top_p = self.expert_top_p();
        let mut experts = Experts { store: &self.store, compute: compute.as_mut(), foresight, top_p };
        let hidden = self.model.forward(rows, caches, &mut experts, &Watch(self), cancel)?;
        drop(compute);
        let took = start.elapsed();
        if rows.len() == 1 {
            let felt = Duration::from_secs_f64((self.telemetry.felt_wait() - felt).max(0.0));
            self.upkeep().record(took, felt);
        }
        self.check_device()?;
        let anonymous = self.keep_budget();
        self.telemetry.step(rows.len(), took, anonymous);
        if self.usage.as_ref().is_some_and(|usage| usage.due()) {
            self.save_usage_by(false);
        }
        Ok(hidden)
    }

    /// Nothing is computed from now on.
    pub(crate) fn rest(&self) {
        self.telemetry.end();
        // Whatever was written to last must not go unseen.
        self.store.look_at_files();
    }

    /// Keeps memory within the budget; the process's anonymous memory before, where the system tells.
    fn keep_budget(&self) -> Option<u64> {
        let anonymous = Machine::own_anon_now().ok()?;
        self.upkeep().keep_budget(&self.store, &self.device, &self.telemetry, anonymous);
        Some(anonymous)
    }

    /// An accelerator that was asked for and computes nothing is an error, not a line in a report.
    fn check_device(&self) -> Result<(), EngineError> {
        let idle = self.device.figures().is_some_and(|figures| figures.experts == 0);
        match idle && self.telemetry.figures().io.bytes > 0 {
            true => Err(EngineError::DeviceIdle { device: self.resolved.device }),
            false => Ok(()),
        }
    }

    fn upkeep(&self) -> MutexGuard<'_, Upkeep> {
        // What is decided in it is plain numbers, right after a panic elsewhere too.
        self.upkeep.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logits of hidden states: n × vocabulary.
    ///
    /// # Errors
    /// [`EngineError::NotFinite`] if any is not a number or infinite: nothing can be chosen by them.
    pub fn logits(&self, hidden: &[f32]) -> Result<Vec<f32>, EngineError> {
        let mut compute = self.compute.lock().unwrap_or_else(PoisonError::into_inner);
        let logits = self.model.logits(hidden, compute.as_mut())?;
        drop(compute);
        match logits.iter().position(|logit| !logit.is_finite()) {
            None => Ok(logits),
            Some(at) => Err(EngineError::NotFinite { id: at % self.plan().vocab, value: logits[at] }),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.save_usage();
    }
}

/// Hears of a step under way and looks after memory between layers: a long prompt's step takes seconds, in which
/// others may need what the cache has.
struct Watch<'a>(&'a Engine);

impl ModelObserver for Watch<'_> {
    fn on_model(&self, event: &ModelEvent) {
        self.0.telemetry.on_model(event);
        if matches!(event, ModelEvent::SparseLayer { .. }) && self.0.upkeep().due() {
            self.0.keep_budget();
        }
    }

    fn on_selected(&self, selected: &Selected<'_>) {
        self.0.telemetry.on_selected(selected);
    }
}
