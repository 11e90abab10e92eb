//! The simulated accelerator: the processor's ids, an accelerator's rules for memory.

mod common;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::time::{Duration, Instant};

use metaltail_device::sim::Profile;
use metaltail_engine::{
    DeviceFigures, DeviceKind, DeviceOptions, Engine, EngineError, EngineOptions, KeepAliveTimes, PinMode,
    ResidencyMode, SlabAllocation,
};
use synthetic::{Synthetic, random_ids, settings};

const PROMPT: usize = 24;
const TOKENS: usize = 12;

fn sim(residency: ResidencyMode, slabs: SlabAllocation) -> DeviceOptions {
    DeviceOptions { kind: DeviceKind::Sim, residency, slabs, ..DeviceOptions::default() }
}

/// Greedy ids after a random prompt, and the device's figures.
fn answer(model: &Synthetic, options: &EngineOptions) -> (Vec<u32>, Option<DeviceFigures>) {
    let engine = model.open(options);
    let ids = common::greedy(&engine, &random_ids(PROMPT, 256, 4), TOKENS);
    engine.store().audit().unwrap();
    (ids, engine.device_figures())
}

#[test]
fn ids_are_those_of_the_processor_whatever_is_declared_cached_grown_or_loaded() {
    let model = Synthetic::tiny();
    let pins = tempfile::tempdir().unwrap();
    let list = pins.path().join("pins");
    std::fs::write(&list, "1 0\n2 3\n3 7\n").unwrap();
    let cpu = EngineOptions { exact: true, ..settings() };
    let (wanted, none) = answer(&model, &cpu);
    assert_eq!(none, None);
    let mut walked = 0;
    for residency in [ResidencyMode::Set, ResidencyMode::Walk] {
        for slabs in [SlabAllocation::Arena, SlabAllocation::PerExpert] {
            for cap in [1, 6, 64] {
                for (growth, loaders, prefetch, pin) in
                    [(true, 1, false, PinMode::Off), (false, 4, true, PinMode::File(list.clone()))]
                {
                    let options = EngineOptions {
                        device: sim(residency, slabs),
                        cap: Some(cap),
                        cap_growth: Some(growth),
                        loaders: Some(loaders),
                        prefetch: Some(prefetch),
                        pin,
                        ..settings()
                    };
                    let (found, figures) = answer(&model, &options);
                    let arm = format!("{residency:?} {slabs:?} cap {cap} growth {growth} loaders {loaders}");
                    assert_eq!(found, wanted, "{arm}");
                    let figures = figures.unwrap();
                    assert!(figures.experts > 0 && figures.residency.submissions > 0, "{arm}");
                    assert_eq!(figures.mode, residency, "{arm}");
                    walked += figures.residency.declared;
                    assert_eq!(residency == ResidencyMode::Set, figures.residency.declared == 0, "{arm}");
                }
            }
        }
    }
    assert!(walked > 0);
}

/// Point 1 of the design: what the cache does is none of the device's business.
#[test]
fn evictions_register_and_unregister_nothing() {
    let model = Synthetic::tiny();
    let options = EngineOptions {
        device: sim(ResidencyMode::Set, SlabAllocation::Arena),
        cap: Some(1),
        cap_growth: Some(false),
        prefetch: Some(false),
        ..settings()
    };
    let engine = model.open(&options);
    let first = |n| {
        common::greedy(&engine, &random_ids(PROMPT, 256, n), TOKENS);
        (engine.telemetry().figures().evictions, engine.device_figures().unwrap().residency)
    };
    let (few, before) = first(1);
    let (many, after) = first(2);
    assert!(many > few + 50, "{few}, then {many} evictions");
    assert!(after.submissions > before.submissions);
    for (what, before, after) in [
        ("registered", before.registered, after.registered),
        ("unregistered", before.unregistered, after.unregistered),
        ("commits", before.commits, after.commits),
        ("declared", before.declared, after.declared),
    ] {
        assert_eq!(before, after, "{what}");
    }
    assert!(after.allocations <= 4 && after.registered == after.allocations as u64, "{after:?}");
}

/// Case T33: an accelerator that shares the machine's memory has no tier of its own. Its experts lie in the cache's
/// slots, and its dense weights where the processor would have them: both are charged once, and what is declared is
/// no more than that (chunks of weights have some room left).
#[test]
fn an_integrated_accelerator_is_charged_once() {
    let model = Synthetic::tiny();
    let open = |device| {
        let options =
            EngineOptions { device, cap: Some(4), cap_growth: Some(false), exact: true, ..settings() };
        let engine = model.open(&options);
        common::greedy(&engine, &random_ids(PROMPT, 256, 4), TOKENS);
        engine
    };
    let cpu = open(DeviceOptions::default());
    for slabs in [SlabAllocation::Arena, SlabAllocation::PerExpert] {
        let device = open(sim(ResidencyMode::Set, slabs));
        // A device takes memory for activations that the processor does not.
        let but_scratch = |engine: &Engine| {
            let terms = engine.budget().terms.into_iter();
            terms.filter(|term| term.name != "scratch").collect::<Vec<_>>()
        };
        assert_eq!(but_scratch(&device), but_scratch(&cpu));
        assert!(device.budget().total() - cpu.budget().total() <= 20 << 20);
        let held = ["cached", "in_flight", "staged", "pinned", "dense"];
        let terms = device.budget().terms;
        let charged: u64 = terms.iter().filter(|t| held.contains(&t.name)).map(|t| t.bytes).sum();
        let declared = device.device_figures().unwrap().residency.bytes;
        let most = charged + charged / 4 + (1 << 20);
        assert!(declared > 0 && declared <= most, "{declared} bytes declared of {charged} charged");
    }
}

#[test]
fn an_allocation_is_a_chunk_or_a_slot() {
    let model = Synthetic::tiny();
    let allocations = |slabs| {
        let options = EngineOptions {
            device: sim(ResidencyMode::Walk, slabs),
            cap: Some(6),
            cap_growth: Some(false),
            ..settings()
        };
        let (_, figures) = answer(&model, &options);
        let residency = figures.unwrap().residency;
        (residency.allocations, residency.declared_per_submit().unwrap())
    };
    let (chunks, declared) = allocations(SlabAllocation::Arena);
    let (slots, declared_slots) = allocations(SlabAllocation::PerExpert);
    assert!(slots >= 18 && slots > 4 * chunks, "{chunks} chunks, {slots} slots");
    assert_eq!((declared, declared_slots), (chunks as f64, slots as f64));
}

/// Case T42: the cost of a submission must not follow the cache's size.
#[test]
fn a_submission_costs_the_same_with_any_cap_once_declared_and_not_while_walking() {
    let model = Synthetic::tiny();
    let stall = |residency, cap| {
        let options = EngineOptions {
            device: sim(residency, SlabAllocation::PerExpert),
            cap: Some(cap),
            cap_growth: Some(false),
            prefetch: Some(false),
            loaders: Some(1),
            ..settings()
        };
        let (_, figures) = answer(&model, &options);
        let figures = figures.unwrap();
        figures.stall_seconds / figures.residency.submissions as f64
    };
    let (small, large) = (stall(ResidencyMode::Set, 1), stall(ResidencyMode::Set, 64));
    assert!((small - large).abs() < 1e-9, "{small} and {large} s a submission");
    assert!(stall(ResidencyMode::Walk, 64) > stall(ResidencyMode::Walk, 1) + 1e-6);
}

/// Point 8 of the design: under pressure sets are given up, and come back with the next submission.
#[test]
fn a_device_gives_memory_up_when_it_is_short_and_asks_for_it_again() {
    let model = Synthetic::tiny();
    let options = EngineOptions {
        device: sim(ResidencyMode::Set, SlabAllocation::Arena),
        ram: Some(200 << 20),
        prefetch: Some(false),
        ..settings()
    };
    let engine = model.open(&options);
    let wanted = common::greedy(&engine, &random_ids(PROMPT, 256, 4), TOKENS);
    assert_eq!(engine.device_figures().unwrap().residency.given_up, 0);
    // Something else in the process takes more than the budget.
    let ballast = vec![1u8; 300 << 20];
    let found = common::greedy(&engine, &random_ids(PROMPT, 256, 4), TOKENS);
    assert_eq!(found, wanted);
    let residency = engine.device_figures().unwrap().residency;
    assert!(residency.given_up > 0 && residency.rebuilt > 0, "{residency:?}");
    assert!(residency.unregistered > 0 && engine.device_difference().unwrap().is_empty(), "{residency:?}");
    assert_eq!(std::hint::black_box(&ballast)[299 << 20], 1);
}

/// What a pass leaves behind: the ledger knows exactly the chunks that there are.
fn pass(engine: &Engine) -> Vec<u32> {
    let ids = common::greedy(engine, &random_ids(PROMPT, 256, 4), TOKENS);
    let difference = engine.device_difference().unwrap();
    assert!(difference.is_empty(), "{difference:?}");
    engine.store().audit().unwrap();
    ids
}

/// Points 4 and 7 of the design: a chunk is removed before its memory goes, and declared when it comes back.
#[test]
fn a_cache_shrinks_by_chunks_that_were_removed_first_and_grows_again() {
    let model = Synthetic::tiny();
    for residency in [ResidencyMode::Set, ResidencyMode::Walk] {
        for slabs in [SlabAllocation::Arena, SlabAllocation::PerExpert] {
            for cap in [None, Some(6)] {
                let options = EngineOptions {
                    device: sim(residency, slabs),
                    cap,
                    cap_growth: Some(false),
                    prefetch: Some(cap.is_none()),
                    ..settings()
                };
                let engine = model.open(&options);
                let wanted = pass(&engine);
                let figures = || engine.device_figures().unwrap().residency;
                let (before, slots) = (figures(), engine.store().cached_slots());
                assert_eq!(before.unregistered, 0);
                // A byte too many costs a chunk, a limit of nothing all but what loads need.
                for over in [1, u64::MAX] {
                    let unregistered = figures().unregistered;
                    assert!(engine.store().enforce(0, over) > 0);
                    assert!(figures().unregistered > unregistered && figures().bytes < before.bytes);
                    assert!(engine.device_difference().unwrap().is_empty());
                    assert_eq!(pass(&engine), wanted, "{residency:?} {slabs:?} {cap:?}");
                }
                assert!(engine.store().cached_slots() < slots);
                while engine.store().grow(u64::MAX).unwrap() > 0 {}
                assert_eq!(pass(&engine), wanted, "{residency:?} {slabs:?} {cap:?}");
                assert!(engine.store().cached_slots() >= slots && figures().bytes >= before.bytes);
            }
        }
    }
}

/// Somebody else resizes the cache while a pass is under way.
#[test]
fn ids_stay_the_same_while_chunks_come_and_go() {
    let model = Synthetic::tiny();
    for residency in [ResidencyMode::Set, ResidencyMode::Walk] {
        let options = EngineOptions {
            device: sim(residency, SlabAllocation::Arena),
            cap: Some(6),
            cap_growth: Some(false),
            ..settings()
        };
        let engine = model.open(&options);
        let wanted = pass(&engine);
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    engine.store().enforce(0, 1);
                    engine.store().grow(u64::MAX).unwrap();
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            for _ in 0..8 {
                let found = common::greedy(&engine, &random_ids(PROMPT, 256, 4), TOKENS);
                assert_eq!(found, wanted);
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert_eq!(pass(&engine), wanted);
        let residency = engine.device_figures().unwrap().residency;
        assert!(residency.unregistered > 0 && residency.registered > residency.unregistered, "{residency:?}");
    }
}

/// Point 8 of the design: between passes the engine keeps sets alive, and stops when nobody comes back.
#[test]
fn sets_are_kept_alive_between_passes_and_not_for_ever() {
    let model = Synthetic::tiny();
    let open = |residency, keep_alive| {
        let device = DeviceOptions { keep_alive, ..sim(residency, SlabAllocation::Arena) };
        model.open(&EngineOptions { device, ..settings() })
    };
    let kept = |engine: &Engine| engine.device_figures().unwrap().residency.kept_alive;
    let pass = |engine: &Engine| common::greedy(engine, &random_ids(PROMPT, 256, 4), TOKENS);
    let times = KeepAliveTimes { cadence: Duration::from_millis(5), idle: Duration::from_millis(300) };

    let engine = open(ResidencyMode::Set, Some(times));
    let ids = pass(&engine);
    let began = Instant::now();
    while kept(&engine) < 3 {
        assert!(began.elapsed() < Duration::from_secs(60), "nothing is kept alive");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Whatever the thread does meanwhile: the same ids.
    assert_eq!(pass(&engine), ids);
    let mut last = u64::MAX;
    while kept(&engine) != last {
        assert!(began.elapsed() < Duration::from_secs(60), "it never stops");
        last = kept(&engine);
        std::thread::sleep(Duration::from_millis(600));
    }
    drop(engine);

    for (residency, keep_alive) in [(ResidencyMode::Set, None), (ResidencyMode::Walk, Some(times))] {
        let engine = open(residency, keep_alive);
        pass(&engine);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(kept(&engine), 0, "{residency:?}");
    }
}

#[test]
fn a_cadence_that_keeps_nothing_alive_is_refused() {
    let model = Synthetic::tiny();
    let times = KeepAliveTimes { cadence: Duration::from_secs(2), ..KeepAliveTimes::default() };
    let device = DeviceOptions { keep_alive: Some(times), ..sim(ResidencyMode::Set, SlabAllocation::Arena) };
    let refused = model.try_open(&EngineOptions { device, ..settings() }).err().unwrap();
    assert!(matches!(refused, EngineError::KeepAlive(_)), "{refused}");
}

/// Point 8 of the design: what may be resident bounds the budget, and what was demanded above it is refused with the
/// setting that raises it.
#[test]
fn the_cache_is_held_to_what_the_device_keeps_resident() {
    let model =
        Synthetic::of(metaltail_container::synth::Like::Wide, metaltail_container::synth::SynthFormat::Slab);
    let open = |working_set: u64, ram: Option<u64>| {
        let profile = Some(Profile { working_set, ..Profile::m5max() });
        let device = DeviceOptions { profile, ..sim(ResidencyMode::Set, SlabAllocation::Arena) };
        let options = EngineOptions { device, ram, cap: None, context: Some(256), ..settings() };
        model.try_open(&options)
    };
    let whole = open(1 << 40, None).unwrap();
    let wanted = common::greedy(&whole, &random_ids(PROMPT, 256, 4), TOKENS);
    let term = |budget: &metaltail_store::Budget, name: &str| {
        budget.terms.iter().filter(|term| term.name == name).map(|term| term.bytes).sum::<u64>()
    };
    let budget = whole.budget();
    let small = budget.total() - term(&budget, "program") - term(&budget, "cached") / 2;
    let held = open(small, None).unwrap();
    assert!(held.budget().to_string().contains("what the sim device keeps resident"), "{}", held.budget());
    assert!(held.store().cached_slots() < whole.store().cached_slots());
    assert_eq!(common::greedy(&held, &random_ids(PROMPT, 256, 4), TOKENS), wanted);
    let refused = open(small, Some(4 << 30)).err().unwrap().to_string();
    for part in ["the sim device keeps", "raise iogpu.wired_limit_mb", "--device cpu", "the model needs"] {
        assert!(refused.contains(part), "{refused}");
    }
}

/// A trained model, against an independent implementation. (Where the code is not optimised, one arm stands for
/// all.)
#[test]
fn the_demo_model_continues_as_the_oracle_says() {
    let full = !cfg!(debug_assertions);
    for residency in [ResidencyMode::Set, ResidencyMode::Walk] {
        for slabs in [SlabAllocation::Arena, SlabAllocation::PerExpert] {
            for cap in [1, 6, 64] {
                if full || (cap == 6 && slabs == SlabAllocation::PerExpert && residency == ResidencyMode::Set)
                {
                    let prompts = if full { 0..3 } else { 0..1 };
                    common::continues_as_the_oracle_says(sim(residency, slabs), cap, (prompts, usize::MAX));
                }
            }
        }
    }
}
