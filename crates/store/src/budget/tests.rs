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
    let demand =
        |cap, in_flight| charged(150 * MIB).fit_cap(&g, Wanted { cap, in_flight, loaders: 2, staging: 0 });
    assert_eq!(demand(Some(0), None), Ok(Fit { cap: 0, in_flight: 8, staging: 0 }));
    assert_eq!(demand(Some(5), None), Ok(Fit { cap: 5, in_flight: 2, staging: 0 }), "the default gives way");
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

#[test]
fn an_accelerator_holds_the_limit_down_and_refuses_what_was_demanded_above() {
    let device = DeviceLimit { device: "metal", bytes: 700 * MIB, setting: Some("iogpu.wired_limit_mb") };
    let m = machine(2000 * MIB, 1900 * MIB, &[]);
    let mut budget = Budget::new(&m, None).unwrap();
    budget.charge(term::PROGRAM, 50 * MIB);
    budget.hold_to(device).unwrap();
    assert_eq!((budget.limit, budget.source.clone()), (750 * MIB, LimitSource::Device("metal")));
    // What fits is left alone.
    budget.hold_to(DeviceLimit { bytes: 800 * MIB, ..device }).unwrap();
    assert_eq!(budget.limit, 750 * MIB);
    let mut demanded = Budget::new(&m, Some(800 * MIB)).unwrap();
    demanded.charge(term::PROGRAM, 50 * MIB);
    let refused = demanded.hold_to(device).unwrap_err().to_string();
    for part in
        ["800.0 MiB of memory", "metal device keeps 700.0 MiB", "raise iogpu.wired_limit_mb", "--device cpu"]
    {
        assert!(refused.contains(part), "{refused}");
    }
}
