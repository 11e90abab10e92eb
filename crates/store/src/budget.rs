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
        LimitSource::Cgroup(_) | LimitSource::Memory => "Raise the limit".to_owned(),
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

    /// Adds a charge; zero is printed too.
    pub fn charge(&mut self, name: &'static str, bytes: u64) {
        self.terms.push(Term { name, bytes });
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
mod tests {
    use super::*;
    use crate::geometry::LayerExperts;
    use crate::machine::CgroupLevel;
    use crate::testing::place;
    use metaltail_container::Extent;
    use proptest::prelude::*;

    /// `(experts, bytes of a slot)` a layer.
    fn geometry(layers: &[(usize, u64)]) -> Geometry {
        let layers = (0u32..).zip(layers).map(|(layer, &(count, len))| LayerExperts {
            layer,
            experts: vec![place(&[Extent { file: 0, offset: 0, len }]); count],
        });
        Geometry::new(&layers.collect::<Vec<_>>()).unwrap()
    }

    fn machine(total: u64, available: u64, groups: &[(u64, u64)]) -> Machine {
        let group = |&(limit, used)| CgroupLevel { path: format!("/cg/{limit}").into(), limit, used };
        Machine { total, available, own_anon: 0, cgroups: groups.iter().map(group).collect() }
    }

    fn charged(limit: u64) -> Budget {
        let mut budget = Budget::new(&machine(1 << 40, 0, &[]), Some(limit)).unwrap();
        budget.charge(term::PROGRAM, 5 * MIB);
        budget.charge(term::DENSE, 100 * MIB);
        budget.charge(term::KV, 10 * MIB);
        budget
    }

    const FITTED: Wanted = Wanted { cap: None, in_flight: None, loaders: 2, staging: 0 };

    #[test]
    fn the_default_cap_takes_what_the_other_terms_leave() {
        // 3 layers × 8 experts × 2 MiB; 8 in flight = 16 MiB; 6 MiB a cap.
        let g = geometry(&[(8, 2 * MIB); 3]);
        let mut budget = charged(115 * MIB + 16 * MIB + 3 * 6 * MIB + 5 * MIB);
        assert_eq!(budget.fit_cap(&g, FITTED), Ok(Fit { cap: 3, in_flight: 8, staging: 0 }));
        assert_eq!(budget.rest(), Some(5 * MIB));
        let golden = "\
program                    5.0 MiB
dense                    100.0 MiB
kv                        10.0 MiB
in_flight                 16.0 MiB
staged                     0.0 MiB
cached                    18.0 MiB
sum                      149.0 MiB
limit                    154.0 MiB  (demanded)
left                       5.0 MiB";
        assert_eq!(budget.to_string(), golden);
        let mut vast = charged(1 << 30);
        assert_eq!(
            vast.fit_cap(&g, FITTED),
            Ok(Fit { cap: 8, in_flight: 8, staging: 0 }),
            "no more than there are"
        );
    }

    #[test]
    fn staged_slots_take_what_is_to_spare_and_none_where_all_experts_fit() {
        let g = geometry(&[(64, 2 * MIB); 3]);
        let fit = |limit, cap| {
            let wanted = Wanted { cap, staging: 8, ..FITTED };
            charged(limit).fit_cap(&g, wanted).unwrap()
        };
        // 131 MiB are other terms and in flight; a sixteenth of 96 MiB is three slots.
        let fitted = fit((131 + 96) * MIB, None);
        assert_eq!((fitted.staging, fitted.cap), (3, 15));
        assert_eq!(fit((131 + 10 * 6 + 6) * MIB, Some(10)).staging, 3, "what a demanded cap leaves");
        assert_eq!(fit((131 + 10 * 6) * MIB, Some(10)).staging, 0);
        assert_eq!(fit(1 << 40, None).staging, 0);
        assert_eq!(fit(1 << 40, Some(64)).staging, 0);
    }

    #[test]
    fn pins_come_out_of_a_fitted_cache_and_beside_a_demanded_one() {
        let g = geometry(&[(64, 2 * MIB); 3]);
        let mut budget = charged((131 + 60) * MIB);
        let mut fit = budget.fit_cap(&g, FITTED).unwrap();
        assert_eq!(fit.cap, 10);
        budget.pin(&g, &mut fit, false, 20 * MIB);
        assert_eq!((fit.cap, budget.rest()), (6, Some(4 * MIB)));
        let mut budget = charged((131 + 60) * MIB);
        let mut fit = budget.fit_cap(&g, Wanted { cap: Some(5), ..FITTED }).unwrap();
        budget.pin(&g, &mut fit, true, 20 * MIB);
        assert_eq!((fit.cap, budget.rest()), (5, Some(10 * MIB)));
    }

    #[test]
    fn a_budget_without_room_for_one_slot_is_refused_with_the_sum() {
        let g = geometry(&[(8, 2 * MIB), (8, 4 * MIB)]);
        let mut budget = charged(120 * MIB);
        let error = budget.fit_cap(&g, FITTED).unwrap_err();
        assert!(matches!(&error, BudgetError::TooSmall { slot, .. } if *slot == 6 * MIB), "{error}");
        let text = error.to_string();
        for part in ["too small", "6.0 MiB", "dense", "sum", "121.0 MiB", "limit", "missing", "1.0 MiB"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(text.contains("it needs 121 MiB, most of it for dense. Give --ram 121M,"), "{text}");
        assert!(charged(100 * MIB).fit_cap(&g, FITTED).is_err(), "other terms alone are over the limit");
        let mut least = charged(121 * MIB);
        assert_eq!(least.fit_cap(&g, FITTED), Ok(Fit { cap: 0, in_flight: 1, staging: 0 }));
    }

    #[test]
    fn the_sum_that_is_shown_is_that_of_the_bytes() {
        let mut budget = Budget::new(&machine(1 << 40, 0, &[]), Some(85 * MIB)).unwrap();
        assert_eq!(budget.to_string(), "limit                     85.0 MiB  (demanded)");
        // Each a little above a tenth; the four of them are not four tenths more.
        for name in [term::PROGRAM, term::DENSE, term::KV, term::SCRATCH] {
            budget.charge(name, 21 * MIB + MIB / 50);
        }
        let text = budget.to_string();
        for line in ["dense                     21.0 MiB", "sum                       84.1 MiB"] {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(text.ends_with("left                       0.9 MiB"), "{text}");
    }

    #[test]
    fn the_least_that_is_named_is_then_enough() {
        let g = geometry(&[(8, 2 * MIB + 4096)]);
        let charged = |limit| {
            let mut budget = charged(limit);
            budget.charge(term::SCRATCH, 123_456);
            budget.fit_cap(&g, FITTED)
        };
        for limit in [70 * MIB, 116 * MIB] {
            let text = charged(limit).unwrap_err().to_string();
            let (_, after) = text.split_once("--ram ").unwrap();
            let least: u64 = after.split_once("M,").unwrap().0.parse().unwrap();
            assert!(charged((least - 1) * MIB).is_err() && charged(least * MIB).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_refused_size_is_told_as_it_is_written() {
        let written = |value| demand("pin_size", value);
        assert_eq!(written(20 << 20), "--pin-size 20M");
        assert_eq!(
            [written(3 << 30), written((1 << 20) + 1024), written(1025), written(0)],
            ["--pin-size 3G", "--pin-size 1025K", "--pin-size 1025", "--pin-size 0"]
        );
        assert_eq!(demand("cap", 4096), "cap 4096");
    }

    #[test]
    fn demands_are_met_or_refused_never_clamped() {
        let g = geometry(&[(8, 2 * MIB); 3]);
        let demand = |cap, in_flight| {
            charged(150 * MIB).fit_cap(&g, Wanted { cap, in_flight, loaders: 2, staging: 0 })
        };
        assert_eq!(demand(Some(0), None), Ok(Fit { cap: 0, in_flight: 8, staging: 0 }));
        assert_eq!(
            demand(Some(5), None),
            Ok(Fit { cap: 5, in_flight: 2, staging: 0 }),
            "the default gives way"
        );
        assert_eq!(demand(None, Some(2)), Ok(Fit { cap: 5, in_flight: 2, staging: 0 }));
        let refused = |fit: Result<Fit, BudgetError>| match fit {
            Err(BudgetError::DoesNotFit { setting, value, budget }) => (setting, value, budget.rest()),
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(demand(Some(6), None)), ("cap", 6, None));
        assert_eq!(refused(demand(Some(5), Some(8))), ("cap", 5, None));
        assert_eq!(refused(demand(None, Some(18))), ("in_flight", 18, None));
    }

    #[test]
    fn an_explicit_limit_above_the_group_or_the_machine_is_refused() {
        let m = machine(1000 * MIB, 900 * MIB, &[(500 * MIB, 0), (700 * MIB, 0)]);
        let over = Budget::new(&m, Some(501 * MIB)).unwrap_err();
        assert!(over.to_string().contains("/cg/524288000"), "{over}");
        assert_eq!(Budget::new(&m, Some(500 * MIB)).unwrap().limit, 500 * MIB);
        let m = machine(1000 * MIB, 900 * MIB, &[]);
        assert!(matches!(Budget::new(&m, Some(1001 * MIB)), Err(BudgetError::AboveMachine { .. })));
    }

    #[test]
    fn the_default_limit_names_what_binds() {
        let m = machine(16_000 * MIB, 9_000 * MIB, &[(4_000 * MIB, 3_000 * MIB)]);
        let budget = Budget::new(&m, None).unwrap();
        assert_eq!((budget.limit, budget.source), (900 * MIB, LimitSource::Cgroup("/cg/4194304000".into())));
        let budget = Budget::new(&machine(16_000 * MIB, 9_000 * MIB, &[]), None).unwrap();
        assert_eq!((budget.limit, budget.source), (9_000 * MIB - 512 * MIB, LimitSource::Memory));
    }

    proptest! {
        /// What is fitted fits, and one more would not.
        #[test]
        fn the_fitted_cap_is_the_largest_that_fits(
            layers in prop::collection::vec((1usize..20, 1u64..40), 1..6),
            limit in 0u64..2000,
        ) {
            let layers: Vec<_> = layers.into_iter().map(|(n, pages)| (n, pages * 4096)).collect();
            let g = geometry(&layers);
            let mut budget = Budget::new(&machine(1 << 40, 0, &[]), Some(limit * 4096)).unwrap();
            if let Ok(fit) = budget.fit_cap(&g, FITTED) {
                prop_assert!(budget.total() <= budget.limit);
                let more = g.cached_bytes(fit.cap + 1) - g.cached_bytes(fit.cap);
                prop_assert!(fit.cap == g.most_experts() || more > budget.rest().unwrap());
            } else {
                prop_assert!(g.in_flight_bytes(1) > limit * 4096);
            }
        }
    }
}
