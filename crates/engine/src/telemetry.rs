//! One stream of events in, all figures out.
//!
//! The store and the model report events; the session adds phases and steps. The run summary and
//! every JSON record are drawn from the [`Figures`] gathered here, and from nothing else.

mod figures;

pub use figures::{Figures, IoFigures, PhaseFigures, PrefetchFigures, hidden_share};

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use metaltail_model::{ModelEvent, ModelObserver, Selected};
use metaltail_store::{LoadRank, Observer, StoreEvent};

/// What a step is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Computing the prompt.
    #[default]
    Prefill,
    /// Computing generated tokens.
    Decode,
}

/// Receives every event as it happens (progress lines, the live map).
pub trait Listener: Send + Sync {
    /// Takes one event; called from loader threads too, so it must be quick.
    fn on_event(&self, event: &Event<'_>);
}

/// All that is reported.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// From the expert store.
    Store(&'a StoreEvent),
    /// From the model.
    Model(&'a ModelEvent),
    /// What the rows of a step chose in a layer.
    Selected(&'a Selected<'a>),
    /// A step ended.
    Step {
        /// Its phase.
        phase: Phase,
        /// Rows computed.
        rows: usize,
        /// How long it took.
        took: Duration,
    },
    /// Something the user should read once.
    Notice(&'a str),
}

/// Reads under way, integrated over time.
#[derive(Debug)]
struct DepthGauge {
    depth: u32,
    since: Instant,
}

struct State {
    phase: Phase,
    since: Option<Instant>,
    figures: Figures,
    gauge: DepthGauge,
}

/// Gathers [`Figures`] from events and passes the events on.
pub struct Telemetry {
    state: Mutex<State>,
    listeners: Vec<Arc<dyn Listener>>,
    /// One that only an opened engine knows: the usage profile.
    late: OnceLock<Arc<dyn Listener>>,
}

impl Telemetry {
    /// Telemetry that also passes every event to `listeners`.
    pub fn new(listeners: Vec<Arc<dyn Listener>>) -> Self {
        let gauge = DepthGauge { depth: 0, since: Instant::now() };
        let state = State { phase: Phase::Prefill, since: None, figures: Figures::default(), gauge };
        Telemetry { state: Mutex::new(state), listeners, late: OnceLock::new() }
    }

    /// Adds the listener that an engine brings. False for a second one, which is not taken.
    pub(crate) fn attach(&self, listener: Arc<dyn Listener>) -> bool {
        self.late.set(listener).is_ok()
    }

    fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        // Figures stay usable after a panic elsewhere: they are plain numbers.
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn tell(&self, event: &Event<'_>) {
        self.listeners.iter().chain(self.late.get()).for_each(|listener| listener.on_event(event));
    }

    /// A copy of what was gathered.
    pub fn figures(&self) -> Figures {
        self.with(|state| state.figures.clone())
    }

    /// Forgets all figures but the notices.
    pub fn reset(&self) {
        self.with(|state| {
            let notices = std::mem::take(&mut state.figures.notices);
            state.figures = Figures { notices, ..Figures::default() };
        });
    }

    /// Says what the steps to come are for; its wall time counts from now.
    pub(crate) fn begin(&self, phase: Phase) {
        self.with(|state| {
            state.close_phase();
            // What was read before, as pins are while a model is opened, took no time of a phase.
            state.advance();
            state.phase = phase;
            state.since = Some(Instant::now());
        });
    }

    /// Nothing is computed from now on.
    pub(crate) fn end(&self) {
        self.with(State::close_phase);
    }

    /// Time that computing stood still for loads so far, in both phases.
    pub(crate) fn felt_wait(&self) -> f64 {
        self.with(|state| state.figures.prefill.felt_wait_seconds + state.figures.decode.felt_wait_seconds)
    }

    /// A step may load ahead of demand.
    pub(crate) fn prefetching(&self) {
        self.with(|state| state.figures.io.prefetch.steps += 1);
    }

    pub(crate) fn step(&self, rows: usize, took: Duration, anonymous: Option<u64>) {
        let phase = self.with(|state| {
            let peak = &mut state.figures.peak_anonymous;
            *peak = (*peak).max(anonymous.unwrap_or(0));
            state.phase_figures().rows += rows as u64;
            state.phase
        });
        self.tell(&Event::Step { phase, rows, took });
    }

    /// Reports something the user should read; repeated notices are dropped.
    pub fn notice(&self, text: &str) {
        let fresh = self.with(|state| {
            let fresh = !state.figures.notices.iter().any(|known| known == text);
            if fresh {
                state.figures.notices.push(text.to_owned());
            }
            fresh
        });
        if fresh {
            self.tell(&Event::Notice(text));
        }
    }
}

impl State {
    /// Counts the reads under way until now, while something is computed.
    fn advance(&mut self) {
        let (now, gauge) = (Instant::now(), &mut self.gauge);
        if self.since.is_some() && gauge.depth > 0 {
            let span = now.duration_since(gauge.since).as_secs_f64();
            self.figures.io.busy_seconds += span;
            self.figures.io.depth_seconds += span * f64::from(gauge.depth);
        }
        gauge.since = now;
    }

    fn close_phase(&mut self) {
        self.advance();
        if let Some(since) = self.since.take() {
            self.phase_figures().seconds += since.elapsed().as_secs_f64();
        }
    }

    fn phase_figures(&mut self) -> &mut PhaseFigures {
        match self.phase {
            Phase::Prefill => &mut self.figures.prefill,
            Phase::Decode => &mut self.figures.decode,
        }
    }

    fn store(&mut self, event: &StoreEvent) {
        match event {
            StoreEvent::Lookup { lookups, pinned, cached, staged, misses, .. } => {
                let figures = self.phase_figures();
                figures.lookups += u64::from(*lookups);
                figures.pinned += u64::from(*pinned);
                figures.cached += u64::from(*cached);
                figures.staged += u64::from(*staged);
                figures.misses += u64::from(*misses);
            }
            StoreEvent::Waited { layer, felt } => {
                self.phase_figures().felt_wait_seconds += felt.as_secs_f64();
                *self.figures.io.felt_wait_by_layer.entry(*layer).or_default() += felt.as_secs_f64();
            }
            StoreEvent::ReadStarted { .. } => {
                self.advance();
                self.gauge.depth += 1;
            }
            StoreEvent::ReadFinished { bytes, calls, rank, .. } => {
                self.advance();
                self.gauge.depth = self.gauge.depth.saturating_sub(1);
                let io = &mut self.figures.io;
                io.bytes += bytes;
                io.reads += u64::from(*calls);
                match rank {
                    LoadRank::Demand => {
                        io.demanded_bytes += bytes;
                        io.demanded_reads += u64::from(*calls);
                    }
                    LoadRank::Speculation => io.prefetch.issued_bytes += bytes,
                    LoadRank::Pin => io.pinned_bytes += bytes,
                }
            }
            StoreEvent::SpeculationUsed { bytes, .. } => self.figures.io.prefetch.useful_bytes += bytes,
            StoreEvent::Evicted { .. } => self.figures.evictions += 1,
            StoreEvent::Verified { .. } => self.figures.verified += 1,
            _ => {}
        }
    }
}

impl Observer for Telemetry {
    fn on(&self, event: &StoreEvent) {
        self.with(|state| state.store(event));
        self.tell(&Event::Store(event));
        match event {
            StoreEvent::Notice(text) => self.notice(text),
            StoreEvent::Shrunk { bytes, min_cap, max_cap, .. } => {
                let first = self.with(|state| {
                    state.figures.given_back_bytes += bytes;
                    state.figures.shrinks += 1;
                    state.figures.shrinks == 1
                });
                // Once: it may go on for as long as others take memory.
                if first {
                    self.notice(&format!(
                        "memory is short: the cache gives back what it must, at first {} MiB; a layer keeps {min_cap}–{max_cap} experts now",
                        bytes >> 20
                    ));
                }
            }
            StoreEvent::ChunkKept { bytes, reason } => {
                let first = self.with(|state| {
                    state.figures.chunks_kept += 1;
                    state.figures.chunks_kept == 1
                });
                if first {
                    self.notice(&format!(
                        "memory is short, and {} MiB of the cache stay that were to go back to the system: {reason}",
                        bytes.div_ceil(1 << 20)
                    ));
                }
            }
            StoreEvent::Grown { bytes, .. } => self.with(|state| state.figures.grown_bytes += bytes),
            _ => {}
        }
    }
}

impl ModelObserver for Telemetry {
    fn on_model(&self, event: &ModelEvent) {
        match event {
            ModelEvent::Routed { selections, .. } => {
                self.with(|state| state.phase_figures().selections += *selections as u64);
            }
            ModelEvent::SparseLayer { took, .. } => {
                self.with(|state| state.phase_figures().sparse_seconds += took.as_secs_f64());
            }
            ModelEvent::Foreseen { chosen, right, .. } => self.with(|state| {
                let prefetch = &mut state.figures.io.prefetch;
                prefetch.chosen += *chosen as u64;
                prefetch.right += *right as u64;
            }),
            ModelEvent::Dropped { selections, weight, .. } => self.with(|state| {
                let figures = state.phase_figures();
                figures.dropped += *selections as u64;
                figures.dropped_weight += weight;
            }),
            ModelEvent::RouterNotANumber { layer, .. } => self.notice(&format!(
                "the router of layer {layer} gave scores that are not numbers: the weights or the input are damaged; such experts were passed over, or used with weight zero where too few others were left"
            )),
            _ => {}
        }
        self.tell(&Event::Model(event));
    }

    fn on_selected(&self, selected: &Selected<'_>) {
        self.tell(&Event::Selected(selected));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_go_to_the_phase_they_happened_in() {
        let telemetry = Telemetry::new(Vec::new());
        let lookup = |cached, misses| StoreEvent::Lookup {
            layer: 1,
            lookups: cached + misses,
            pinned: 0,
            cached,
            staged: 0,
            misses,
            joined: 0,
        };
        telemetry.on(&lookup(3, 2));
        telemetry.begin(Phase::Decode);
        telemetry.on(&lookup(1, 0));
        telemetry.step(1, Duration::from_millis(5), Some(7));
        telemetry.step(1, Duration::from_millis(5), Some(3));
        let figures = telemetry.figures();
        assert_eq!((figures.prefill.lookups, figures.prefill.misses), (5, 2));
        assert_eq!((figures.decode.lookups, figures.decode.rows), (1, 2));
        assert_eq!(figures.peak_anonymous, 7);
    }

    #[test]
    fn drives_are_busy_no_longer_than_a_phase_lasts() {
        let telemetry = Telemetry::new(Vec::new());
        let wait = || std::thread::sleep(Duration::from_millis(20));
        let started = StoreEvent::ReadStarted { layer: 1, expert: 2, queued: Duration::ZERO };
        telemetry.on(&started);
        telemetry.on(&started);
        wait();
        assert_eq!(telemetry.figures().io.busy_seconds, 0.0, "nothing is computed yet");
        telemetry.begin(Phase::Prefill);
        wait();
        telemetry.begin(Phase::Decode);
        wait();
        telemetry.end();
        wait();
        telemetry.on(&StoreEvent::ReadFinished {
            layer: 1,
            expert: 2,
            bytes: 7,
            calls: 1,
            service: Duration::ZERO,
            rank: LoadRank::Pin,
            ok: true,
        });
        let figures = telemetry.figures();
        let (busy, computed) = (figures.io.busy_seconds, figures.prefill.seconds + figures.decode.seconds);
        assert!(busy > 0.0 && busy <= computed, "{busy} of {computed} s");
        assert!((figures.io.depth_seconds - 2.0 * busy).abs() < 1e-9);
        assert_eq!(figures.io.pinned_bytes, 7);
    }

    #[test]
    fn a_notice_is_kept_once_and_survives_a_reset() {
        let telemetry = Telemetry::new(Vec::new());
        telemetry.notice("read this");
        telemetry.notice("read this");
        telemetry.reset();
        assert_eq!(telemetry.figures().notices, ["read this"]);
    }
}
