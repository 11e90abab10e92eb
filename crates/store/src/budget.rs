//! The memory budget: one limit, every term charged and printed, refusals with the sum.

use std::fmt;
use std::path::PathBuf;

use crate::geometry::Geometry;
use crate::machine::Machine;
use crate::store::StoreConfig;

/// Names of the usual terms. Callers may charge others.
pub mod term {
    /// Resident dense weights.
    pub const DENSE: &str = "dense";
    /// Key-value cache.
    pub const KV: &str = "kv";
    /// Activations and other scratch.
    pub const SCRATCH: &str = "scratch";
    /// Kept expert slots.
    pub const CACHED: &str = "cached";
    /// Slots of experts on their way.
    pub const IN_FLIGHT: &str = "in_flight";
    /// Slots of experts that stay since earlier runs used them most.
    pub const PINNED: &str = "pinned";
    /// Slots of experts that are loaded ahead of demand.
    pub const STAGED: &str = "staged";
    /// The program itself, as measured before anything was loaded.
    pub const PROGRAM: &str = "program";
}

/// Where a limit comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitSource {
    /// The user said so.
    Explicit,
    /// This control group leaves least.
    Cgroup(PathBuf),
    /// Memory available on the machine.
    Memory,
    /// What this accelerator keeps resident.
    Device(&'static str),
}

/// What an accelerator keeps resident at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimit {
    /// Its name.
    pub device: &'static str,
    /// Bytes.
    pub bytes: u64,
    /// The system setting that raises them, where there is one.
    pub setting: Option<&'static str>,
}

/// One charge against the budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    /// What for.
    pub name: &'static str,
    /// Bytes.
    pub bytes: u64,
}

/// A limit and what is charged to it; its `Display` is a table of every term.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Anonymous memory that the process may have, in bytes.
    pub limit: u64,
    /// Where the limit comes from.
    pub source: LimitSource,
    /// Charges, in the order made.
    pub terms: Vec<Term>,
}

/// What the user demands of the expert cache; `None` is fitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Slots kept a layer.
    pub cap: Option<usize>,
    /// In-flight slots a size class.
    pub in_flight: Option<usize>,
    /// Loader threads, from which the default of `in_flight` follows.
    pub loaders: usize,
    /// Staged slots a size class, as far as memory allows.
    pub staging: usize,
}

/// What fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    /// Slots kept a layer, at most the experts of the largest layer unless demanded.
    pub cap: usize,
    /// In-flight slots a size class.
    pub in_flight: usize,
    /// Staged slots a size class; none where every expert can be cached.
    pub staging: usize,
}

/// A budget that cannot be met. Demands are refused, never clamped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BudgetError {
    /// The demanded limit exceeds a control group's.
    #[error(
        "{} of memory were demanded, but control group {} allows {}. Demand less, or raise the group's limit",
        Size(*wanted), path.display(), Size(*limit)
    )]
    AboveCgroup {
        /// Bytes demanded.
        wanted: u64,
        /// Bytes allowed.
        limit: u64,
        /// The group.
        path: PathBuf,
    },
    /// The demanded limit exceeds the machine's memory.
    #[error("{} of memory were demanded, but the machine has {}. Demand less, or leave --ram out to have it fitted", Size(*wanted), Size(*total))]
    AboveMachine {
        /// Bytes demanded.
        wanted: u64,
        /// Bytes of memory.
        total: u64,
    },
    /// The demanded limit exceeds what an accelerator keeps resident.
    #[error(
        "{} of memory were demanded, but the {} device keeps {} resident, the program apart. Demand less{}, or use --device cpu",
        Size(*wanted), limit.device, Size(limit.bytes),
        limit.setting.map(|name| format!(", raise {name}")).unwrap_or_default()
    )]
    AboveDevice {
        /// Bytes demanded.
        wanted: u64,
        /// The device's limit.
        limit: DeviceLimit,
    },
    /// A demanded cap or in-flight count does not fit, though smaller ones would.
    #[error(
        "{} does not fit the memory budget; lower it or leave it out to have it fitted\n{budget}",
        demand(setting, *value)
    )]
    DoesNotFit {
        /// `cap`, `in_flight` or `pin_size`.
        setting: &'static str,
        /// Its value; bytes of `pin_size`.
        value: usize,
        /// The sum, the demand included.
        budget: Budget,
    },
    /// Not one expert slot fits.
    #[error("{}\n{budget}", too_small(budget))]
    TooSmall {
        /// Bytes of one slot of each size class.
        slot: u64,
        /// The sum, that slot included.
        budget: Budget,
    },
}

const MIB: u64 = 1 << 20;

/// What was demanded, as it is written.
fn demand(setting: &str, value: usize) -> String {
    if setting != "pin_size" {
        return format!("{setting} {value}");
    }
    // The largest unit that loses nothing.
    let units = [(30, "G"), (20, "M"), (10, "K")];
    let unit = units.into_iter().find(|(shift, _)| value.trailing_zeros() >= *shift && value > 0);
    let (shift, unit) = unit.unwrap_or((0, ""));
    format!("--pin-size {}{unit}", value >> shift)
}

/// What is too small, and the least that is enough. In whole mebibytes, so that it can be typed.
fn too_small(budget: &Budget) -> String {
    let least = budget.total().div_ceil(MIB);
    let largest = budget.terms.iter().max_by_key(|t| t.bytes).map_or("", |t| t.name);
    // Where the limit is not the user's, a larger --ram would only be refused for it.
    let raise = match budget.source {
        LimitSource::Explicit => format!("Give --ram {least}M"),
        LimitSource::Cgroup(_) | LimitSource::Memory | LimitSource::Device(_) => "Raise the limit".to_owned(),
    };
    format!(
        "memory is too small for this model: with one expert slot of each size it needs {least} MiB, most of \
         it for {largest}. {raise}, use a smaller model, or lower --context (kv), --prefill-chunk (scratch) \
         or --threads (program)"
    )
}

/// The limit where none is demanded: what there is, less a tenth or 512 MiB.
pub(crate) fn usual_limit(headroom: u64) -> u64 {
    headroom - (headroom / 10).min(512 * MIB)
}

impl Budget {
    /// A budget without charges. Without an explicit limit it is what control groups and available memory
    /// leave to this process (its present anonymous memory included), less a tenth or 512 MiB.
    ///
    /// # Errors
    /// An explicit limit above the smallest control group's or the machine's memory.
    pub fn new(machine: &Machine, explicit: Option<u64>) -> Result<Budget, BudgetError> {
        if let Some(wanted) = explicit {
            if let Some(group) = machine.smallest_limit().filter(|g| wanted > g.limit) {
                return Err(BudgetError::AboveCgroup {
                    wanted,
                    limit: group.limit,
                    path: group.path.clone(),
                });
            }
            if wanted > machine.total {
                return Err(BudgetError::AboveMachine { wanted, total: machine.total });
            }
            return Ok(Budget { limit: wanted, source: LimitSource::Explicit, terms: Vec::new() });
        }
        let headroom = machine.headroom();
        let source = match machine.tightest() {
            Some((group, room)) if room == headroom => LimitSource::Cgroup(group.path.clone()),
            _ => LimitSource::Memory,
        };
        Ok(Budget { limit: usual_limit(headroom), source, terms: Vec::new() })
    }

    /// Holds the budget to what an accelerator keeps resident: all but the program, which is charged already.
    ///
    /// # Errors
    /// A limit that was demanded and is above that.
    pub fn hold_to(&mut self, device: DeviceLimit) -> Result<(), BudgetError> {
        let most = device.bytes.saturating_add(self.bytes(term::PROGRAM));
        if self.limit <= most {
            return Ok(());
        }
        if self.source == LimitSource::Explicit {
            return Err(BudgetError::AboveDevice { wanted: self.limit, limit: device });
        }
        (self.limit, self.source) = (most, LimitSource::Device(device.device));
        Ok(())
    }

    /// Adds a charge; zero is printed too.
    pub fn charge(&mut self, name: &'static str, bytes: u64) {
        self.terms.push(Term { name, bytes });
    }

    /// Charges of a name.
    fn bytes(&self, name: &str) -> u64 {
        let of_name = self.terms.iter().filter(|term| term.name == name);
        of_name.fold(0, |sum, term| sum.saturating_add(term.bytes))
    }

    /// Sum of all charges (saturating).
    pub fn total(&self) -> u64 {
        self.terms.iter().fold(0, |sum, t| sum.saturating_add(t.bytes))
    }

    /// Bytes left; `None` when over the limit.
    pub fn rest(&self) -> Option<u64> {
        self.limit.checked_sub(self.total())
    }

    /// Fits the expert cache into what the other terms leave, and charges it. Charge all of those first.
    ///
    /// A default in-flight count shrinks, down to 1, where it must; a default cap is the largest that fits,
    /// 0 at least.
    ///
    /// # Errors
    /// [`BudgetError::TooSmall`] when not one slot of each size fits, [`BudgetError::DoesNotFit`] when a
    /// demanded value does not.
    pub fn fit_cap(&mut self, geometry: &Geometry, wanted: Wanted) -> Result<Fit, BudgetError> {
        let slot = geometry.in_flight_bytes(1);
        let rest = match self.rest() {
            Some(rest) if slot <= rest => rest,
            _ => {
                let budget = self.with(geometry, Fit { cap: 0, in_flight: 1, staging: 0 });
                return Err(BudgetError::TooSmall { slot, budget });
            }
        };
        let does_not_fit = |setting, value, fit| {
            Err(BudgetError::DoesNotFit { setting, value, budget: self.with(geometry, fit) })
        };
        if let Some(n) = wanted.in_flight.filter(|&n| n == 0 || geometry.in_flight_bytes(n) > rest) {
            return does_not_fit(
                "in_flight",
                n,
                Fit { cap: wanted.cap.unwrap_or(0), in_flight: n, staging: 0 },
            );
        }
        let demanded = geometry.cached_bytes(wanted.cap.unwrap_or(0));
        let least = wanted.in_flight.unwrap_or(1);
        if let Some(cap) = wanted.cap
            && demanded.saturating_add(geometry.in_flight_bytes(least)) > rest
        {
            return does_not_fit("cap", cap, Fit { cap, in_flight: least, staging: 0 });
        }
        let usual = StoreConfig::default_in_flight(wanted.loaders);
        let in_flight = wanted.in_flight.unwrap_or_else(|| {
            let free = rest - demanded;
            usual.min(usize::try_from(free / slot.max(1)).unwrap_or(usize::MAX)).max(1)
        });
        let left = rest - geometry.in_flight_bytes(in_flight);
        let staging = staging(geometry, wanted, left - demanded);
        let left = left - geometry.in_flight_bytes(staging);
        let cap = wanted.cap.unwrap_or_else(|| largest_cap(geometry, left));
        let fit = Fit { cap, in_flight, staging };
        *self = self.with(geometry, fit);
        Ok(fit)
    }

    /// Charges `bytes` of pinned slots. A fitted cache makes room for them, so that its cap falls; a demanded
    /// one (`asked`) does not.
    pub fn pin(&mut self, geometry: &Geometry, fit: &mut Fit, asked: bool, bytes: u64) {
        self.terms.retain(|term| term.name != term::CACHED);
        self.charge(term::PINNED, bytes);
        if !asked {
            fit.cap = largest_cap(geometry, self.rest().unwrap_or(0));
        }
        self.charge(term::CACHED, geometry.cached_bytes(fit.cap));
    }

    /// The same with a cache that grew or shrank, so that all expert slots take `slots` bytes.
    pub fn with_slots(mut self, slots: u64) -> Budget {
        let moving = [term::IN_FLIGHT, term::STAGED, term::PINNED];
        let others: u64 = self.terms.iter().filter(|t| moving.contains(&t.name)).map(|t| t.bytes).sum();
        if let Some(cached) = self.terms.iter_mut().find(|t| t.name == term::CACHED) {
            cached.bytes = slots.saturating_sub(others);
        }
        self
    }

    fn with(&self, geometry: &Geometry, fit: Fit) -> Budget {
        let mut budget = self.clone();
        budget.charge(term::IN_FLIGHT, geometry.in_flight_bytes(fit.in_flight));
        budget.charge(term::STAGED, geometry.in_flight_bytes(fit.staging));
        budget.charge(term::CACHED, geometry.cached_bytes(fit.cap));
        budget
    }
}

/// Staged slots out of `free` bytes: a demanded cap leaves all of them, a fitted one a sixteenth. Where every
/// expert can be cached there is nothing to expect.
fn staging(geometry: &Geometry, wanted: Wanted, free: u64) -> usize {
    let all = geometry.most_experts();
    let (complete, share) = match wanted.cap {
        Some(cap) => (cap >= all, free),
        None => (geometry.cached_bytes(all) <= free, free / 16),
    };
    if complete {
        return 0;
    }
    let slot = geometry.in_flight_bytes(1).max(1);
    wanted.staging.min(usize::try_from(share / slot).unwrap_or(usize::MAX))
}

/// The largest cap whose slots take at most `left` bytes; bytes grow with the cap.
fn largest_cap(geometry: &Geometry, left: u64) -> usize {
    let (mut fits, mut above) = (0, geometry.most_experts() + 1);
    while above - fits > 1 {
        let middle = fits + (above - fits) / 2;
        if geometry.cached_bytes(middle) <= left {
            fits = middle;
        } else {
            above = middle;
        }
    }
    fits
}

/// Bytes as people read them: to the nearest tenth of a mebibyte, like every other size that is printed.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:.1} MiB", self.0 as f64 / MIB as f64))
    }
}

impl fmt::Display for LimitSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LimitSource::Explicit => f.write_str("demanded"),
            LimitSource::Cgroup(path) => write!(f, "control group {}", path.display()),
            LimitSource::Memory => f.write_str("available memory"),
            LimitSource::Device(name) => write!(f, "what the {name} device keeps resident"),
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.terms.is_empty() {
            return write!(f, "{:<20}{:>14}  ({})", "limit", Size(self.limit), self.source);
        }
        for term in &self.terms {
            writeln!(f, "{:<20}{:>14}", term.name, Size(term.bytes))?;
        }
        // Of the bytes: rounded terms would add up to something else.
        let sum = self.total();
        writeln!(f, "{:<20}{:>14}", "sum", Size(sum))?;
        writeln!(f, "{:<20}{:>14}  ({})", "limit", Size(self.limit), self.source)?;
        match self.rest() {
            Some(left) => write!(f, "{:<20}{:>14}", "left", Size(left)),
            None => write!(f, "{:<20}{:>14}", "missing", Size(sum.saturating_sub(self.limit))),
        }
    }
}

#[cfg(test)]
mod tests;
