//! What is decided between steps: how large the cache may be, and whether the next step loads ahead.

use std::time::{Duration, Instant};

use metaltail_store::{Budget, ExpertStore, Governor, Machine, Order, Probe};

use crate::device::Device;
use crate::prefetch::Controller;
use crate::telemetry::Telemetry;

/// The state of these decisions.
pub(crate) struct Upkeep {
    governor: Governor,
    prefetch: Controller,
    began: Instant,
    /// Charges that are not slots of the store.
    others: u64,
}

impl Upkeep {
    /// For a process with this budget, whose cache may grow and whose steps may load ahead, or not.
    pub(crate) fn new(budget: &Budget, store: &ExpertStore, growth: bool, prefetch: bool) -> Upkeep {
        Upkeep {
            governor: Governor::new(budget, growth),
            prefetch: Controller::new(prefetch),
            began: Instant::now(),
            others: budget.total().saturating_sub(store.capacity_bytes()),
        }
    }

    /// Whether the next step loads ahead of demand.
    pub(crate) fn loads_ahead(&self) -> bool {
        self.prefetch.next()
    }

    /// Takes what that step cost.
    pub(crate) fn record(&mut self, took: Duration, felt: Duration) {
        self.prefetch.record(took, felt);
    }

    /// Gives memory back where there is too little, takes more where there is room. `anonymous` is the
    /// process's anonymous memory now, in bytes.
    pub(crate) fn keep_budget(
        &mut self,
        store: &ExpertStore,
        device: &Device,
        telemetry: &Telemetry,
        anonymous: u64,
    ) {
        let now = self.began.elapsed();
        let probe = match self.governor.wants_probe(now) {
            true => Machine::probe().ok(),
            false => None,
        };
        let probe = probe.map(|machine| Probe {
            headroom: machine.headroom(),
            pressure: Machine::memory_pressure(),
            swapped: Machine::own_swapped_now(),
        });
        let charged = self.others.saturating_add(store.capacity_bytes());
        match self.governor.judge(now, anonymous, charged, probe) {
            Order::Stay => {}
            Order::GiveBack { limit } => {
                // What a device holds resident cannot be given back.
                if let Err(error) = device.give_up(anonymous.saturating_sub(limit)) {
                    telemetry.notice(&error.to_string());
                }
                store.enforce(limit, anonymous);
            }
            Order::Take { bytes } => match store.grow(bytes) {
                Ok(0) => self.governor.took_nothing(now),
                Ok(_) => {}
                Err(error) => {
                    self.governor.took_nothing(now);
                    telemetry.notice(&format!("the cache stays as it is: {error}"));
                }
            },
        }
    }
}
