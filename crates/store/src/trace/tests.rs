//! Traces: reading, writing, replaying.

use super::*;
use crate::policy::PolicyKind;
use proptest::prelude::*;

const HEAD: &str = "# layer=0 expert_bytes=10\n# layer=1 expert_bytes=10\n\
                    turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";

const SIZES: [u64; 7] = [500, 1000, 1500, 2000, 3000, 4000, 6000];

fn policy(kind: PolicyKind) -> Rule {
    Rule::Policy(kind)
}

/// Decode hit rate in percent with a pool of this many MiB.
fn rate(trace: &Trace, rule: Rule, mib: u64) -> f64 {
    100.0 * replay(trace, rule, Scope::Pool, mib << 20).decode.hit_rate()
}

/// A real trace of the shared folder, or nothing where that is absent.
fn shared(name: &str) -> Option<Trace> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    if !dir.is_dir() {
        println!("SKIPPED: ../shared is absent");
        return None;
    }
    Some(Trace::read(&dir.join(format!("{name}.route.csv"))).unwrap())
}

/// Eight layers and forty decoded tokens of a real one, in the repository.
fn fixture() -> Trace {
    Trace::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qwen-cut.route.csv")).unwrap()
}

#[test]
fn published_rates_are_reproduced() {
    let near = |got: f64, wanted: f64, what: &str| {
        assert!((got - wanted).abs() <= 0.5, "{what}: {got:.1}, published {wanted}");
    };
    if let Some(qwen) = shared("qwen") {
        let lru = [0.0, 37.7, 47.0, 56.5, 70.6, 80.3, 92.1];
        let optimum = [45.3, 62.7, 72.7, 79.4, 87.8, 92.7, 96.6];
        for ((&mib, lru), optimum) in SIZES.iter().zip(lru).zip(optimum) {
            near(rate(&qwen, policy(PolicyKind::Lru), mib), lru, "LRU on qwen");
            near(rate(&qwen, Rule::Belady, mib), optimum, "Belady on qwen");
        }
    }
    for (name, lru, optimum) in [("gptoss", 44.8, 67.8), ("gemma", 73.1, 88.6)] {
        let Some(trace) = shared(name) else { return };
        near(rate(&trace, policy(PolicyKind::Lru), 3000), lru, name);
        near(rate(&trace, Rule::Belady, 3000), optimum, name);
    }
}

#[test]
fn frecency_beats_every_published_policy() {
    for name in ["qwen", "gptoss", "gemma"] {
        let Some(trace) = shared(name) else { return };
        for mib in SIZES {
            let frecency = rate(&trace, policy(PolicyKind::Frecency), mib);
            assert!(frecency > rate(&trace, policy(PolicyKind::Lru), mib), "{name} at {mib}: {frecency:.1}");
            assert!(frecency < rate(&trace, Rule::Belady, mib), "{name} at {mib}");
        }
    }
    let Some(qwen) = shared("qwen") else { return };
    assert!(rate(&qwen, policy(PolicyKind::Frecency), 1000) > 45.1);
    assert!(rate(&qwen, policy(PolicyKind::Frecency), 1500) > 55.2);
}

#[test]
fn no_policy_beats_the_optimum_and_frecency_has_no_cliff() {
    let trace = fixture();
    let token = trace.token_bytes();
    for share in [2, 3, 4, 6, 8, 12, 16] {
        let bytes = token * share / 4;
        let hits = |rule| replay(&trace, rule, Scope::Pool, bytes).decode.hits;
        let optimum = hits(Rule::Belady);
        for kind in PolicyKind::ALL {
            assert!(hits(policy(kind)) <= optimum, "{kind} with {share}/4 of a token's experts");
        }
        assert!(hits(policy(PolicyKind::Frecency)) > hits(policy(PolicyKind::Lru)), "{share}/4");
    }
    assert_eq!(replay(&trace, policy(PolicyKind::Lru), Scope::Pool, token / 2).decode.hits, 0);
    let frecency = replay(&trace, policy(PolicyKind::Frecency), Scope::Pool, token / 2).decode;
    assert!(frecency.hit_rate() > 0.15, "{frecency:?}");
}

#[test]
fn a_cache_of_everything_misses_each_expert_once() {
    let trace = fixture();
    let mut seen = std::collections::HashSet::new();
    for row in &trace.rows {
        seen.extend(trace.selections[row.selections.clone()].iter().map(|s| (row.layer, s.expert)));
    }
    for rule in PolicyKind::ALL.map(policy).into_iter().chain([Rule::Belady]) {
        for scope in [Scope::Pool, Scope::Layers] {
            let Played { prefill, decode } = replay(&trace, rule, scope, u64::MAX);
            let selections = prefill.selections + decode.selections;
            assert_eq!(selections, trace.selections.len() as u64);
            assert_eq!(selections - prefill.hits - decode.hits, seen.len() as u64, "{rule}");
        }
    }
}

#[test]
fn a_replay_by_hand() {
    // Three experts, room for two: LRU loses 0 to 2 and then finds nothing; Belady drops 1.
    let lines: String = [0, 1, 0, 2, 0, 1]
        .iter()
        .enumerate()
        .fold(String::new(), |text, (step, expert)| text + &format!("0,1,{step},0,0,{expert},1.0,0,0\n"));
    let trace = Trace::parse(&format!("{HEAD}{lines}")).unwrap();
    let hits = |rule| replay(&trace, rule, Scope::Pool, 20).decode.hits;
    assert_eq!((hits(policy(PolicyKind::Lru)), hits(Rule::Belady)), (2, 2));
    let tight = |rule| replay(&trace, rule, Scope::Pool, 10).decode;
    assert_eq!(tight(Rule::Belady), Counts { selections: 6, hits: 0, missed_bytes: 60 });
    assert_eq!(trace.token_bytes(), 10);
}

#[test]
fn experts_computed_together_never_make_room_for_each_other() {
    // Two rows of a prompt and layer use 0, 1 and 2 with room for one; all are still there for row 2.
    let lines =
        "0,0,0,0,0,0,1,0,0\n0,0,0,0,1,1,1,0,0\n0,0,1,0,0,2,1,0,0\n0,0,1,0,1,0,1,0,0\n0,0,2,0,0,1,1,0,0\n";
    let trace = Trace::parse(&format!("{HEAD}{lines}")).unwrap();
    assert!(trace.rows.iter().all(|row| row.group == 0) && trace.rows.len() == 3);
    for rule in PolicyKind::ALL.map(policy) {
        assert_eq!(
            replay(&trace, rule, Scope::Pool, 10).prefill,
            Counts { selections: 5, hits: 2, missed_bytes: 30 },
            "{rule}"
        );
    }
}

#[test]
fn what_is_written_is_read() {
    let mut writer = TraceWriter::new(Vec::new(), "a\nmodel", vec![(3, 100), (5, 200)]).unwrap();
    for (turn, phase, step, layer) in [
        (0, TracePhase::Prefill, 0, 3),
        (0, TracePhase::Prefill, 1, 3),
        (0, TracePhase::Prefill, 0, 5),
        (0, TracePhase::Decode, 0, 3),
        (0, TracePhase::Decode, 0, 5),
    ] {
        writer.row(turn, phase, step, layer, &[(7, 0.75), (step, 0.25)]).unwrap();
    }
    let trace = Trace::parse(std::str::from_utf8(&writer.finish().unwrap()).unwrap()).unwrap();
    let layer = |number, expert_bytes| TraceLayer { number, expert_bytes, experts: 8 };
    assert_eq!(trace.layers, [layer(3, 100), layer(5, 200)]);
    let groups: Vec<_> = trace.rows.iter().map(|row| (row.layer, row.group)).collect();
    assert_eq!(groups, [(0, 0), (0, 0), (1, 1), (0, 2), (1, 3)]);
    assert_eq!(trace.selections[0].share.in_256ths(), 384);
    assert_eq!(trace.token_bytes(), 600);
}

#[test]
fn damage_is_said_with_its_line() {
    let long = "x".repeat(1000);
    for (text, wanted) in [
        (String::new(), "no selections"),
        (HEAD.to_owned(), "no selections"),
        (format!("{HEAD}0,1,0,0,0,1\n"), "line 4 of the trace: field weight is missing"),
        (format!("{HEAD}0,2,0,0,0,1,1\n"), "line 4 of the trace: phase 2 is too large"),
        (format!("{HEAD}0,1,0,0,0,-1,1\n"), "line 4 of the trace: expert \"-1\" is no number"),
        (format!("{HEAD}0,1,0,0,0,1,x\n"), "line 4 of the trace: weight \"x\" is no number"),
        (format!("{HEAD}0,1,0,0,0,1,1,0,y\n"), "line 4 of the trace: expert_bytes \"y\""),
        (format!("{HEAD}0,1,0,99999,0,1,1\n"), "line 4 of the trace: layer 99999 is too large"),
        (format!("{HEAD}0,1,0,2,0,1,1,0,0\n"), "how large the experts of layer 2"),
        (format!("# layer=0 expert_bytes=99999999999999999\n{HEAD}"), "line 1 of the trace: an expert of"),
        (long, "line 1 of the trace: wanted the names"),
        (
            format!("{HEAD}0,1,0,0,0,1048575,1\n0,1,0,1,0,1048575,1\n"),
            "names 2097152 experts over all its layers",
        ),
    ] {
        let error = Trace::parse(&text).unwrap_err().to_string();
        assert!(error.contains(wanted) && error.len() < 300, "{error}");
    }
}

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in "[#a-z0-9=,.\\-\n ]{0,200}", noise in any::<Vec<u8>>()) {
        let _ = Trace::parse(&text);
        let _ = Trace::parse(&format!("{HEAD}{text}"));
        let _ = Trace::parse(&String::from_utf8_lossy(&noise));
    }

    /// Whatever parses can be replayed, and no policy finds more than there is.
    #[test]
    fn what_parses_replays(
        rows in prop::collection::vec((0u32..2, 0u32..2, 0u32..4, 0u32..2, 0u32..5, any::<f32>()), 1..80),
        bytes in 0u64..80,
    ) {
        let lines = rows.iter().fold(String::new(), |text, (turn, phase, step, layer, expert, weight)| {
            text + &format!("{turn},{phase},{step},{layer},0,{expert},{weight},0,0\n")
        });
        let trace = Trace::parse(&format!("{HEAD}{lines}")).unwrap();
        for rule in PolicyKind::ALL.map(policy).into_iter().chain([Rule::Belady]) {
            for scope in [Scope::Pool, Scope::Layers] {
                let Played { prefill, decode } = replay(&trace, rule, scope, bytes);
                prop_assert_eq!(prefill.selections + decode.selections, rows.len() as u64);
                prop_assert!(prefill.hits <= prefill.selections && decode.hits <= decode.selections);
            }
        }
    }
}

#[test]
fn what_is_pinned_is_always_found_and_takes_nothing_of_the_cache() {
    let lines: String = [0, 1, 2, 0, 1, 2]
        .iter()
        .enumerate()
        .fold(String::new(), |text, (step, expert)| text + &format!("0,1,{step},0,0,{expert},1.0,0,0\n"));
    let trace = Trace::parse(&format!("{HEAD}{lines}")).unwrap();
    for rule in PolicyKind::ALL.map(policy) {
        let pinned = [(0, 1), (0, 99), (7, 0)];
        let counts = replay_pinned(&trace, rule, Scope::Pool, 20, &pinned).decode;
        assert_eq!(counts, Counts { selections: 6, hits: 4, missed_bytes: 20 }, "{rule}");
    }
}

/// Sixteen layers of 64 experts, 8 a token, whose popular experts change every 128 tokens.
fn changing() -> PhaseSpec {
    PhaseSpec {
        layers: 16,
        experts: 64,
        top_k: 8,
        tokens: 1024,
        phase_tokens: 128,
        zipf: 1.0,
        repeat: 0.3,
        after: None,
        expert_bytes: 1 << 20,
        seed: 0,
    }
}

#[test]
fn synthetic_phases_are_what_their_spec_says() {
    let trace = changing().generate().unwrap();
    assert_eq!((trace.rows.len(), trace.selections.len()), (16 * 1024, 16 * 1024 * 8));
    assert_eq!(changing().generate().unwrap(), trace);
    assert_ne!(PhaseSpec { seed: 1, ..changing() }.generate().unwrap(), trace);
    for row in &trace.rows {
        let chosen = &trace.selections[row.selections.clone()];
        let distinct: std::collections::HashSet<u32> = chosen.iter().map(|s| s.expert).collect();
        assert_eq!(distinct.len(), 8);
    }
    // It is written and read as it is; share and group are the reader's.
    let mut bytes = Vec::new();
    trace.write(&mut bytes, "synthetic").unwrap();
    assert_eq!(Trace::parse(std::str::from_utf8(&bytes).unwrap()).unwrap(), trace);
    let counted = PhaseSpec { after: Some(10), ..changing() }.generate().unwrap();
    let decode = counted.rows.iter().filter(|row| row.phase == TracePhase::Decode).count();
    assert_eq!(decode, 16 * 10 * 7);
    // Popularity so steep that a token wants more than are likely at all.
    let steep = PhaseSpec { zipf: 400.0, repeat: 0.0, tokens: 2, ..changing() };
    assert_eq!(steep.generate().unwrap().selections.len(), 2 * 16 * 8);
    for bad in [
        PhaseSpec { top_k: 65, ..changing() },
        PhaseSpec { layers: 0, ..changing() },
        PhaseSpec { repeat: 1.5, ..changing() },
        PhaseSpec { zipf: f64::NAN, ..changing() },
        PhaseSpec { tokens: u32::MAX, ..changing() },
    ] {
        assert!(bad.generate().is_err(), "{bad:?}");
    }
}

#[test]
fn frecency_forgets_what_is_no_longer_popular() {
    let rates = |after, mib| {
        let trace = PhaseSpec { after, ..changing() }.generate().unwrap();
        (rate(&trace, policy(PolicyKind::Frecency), mib), rate(&trace, policy(PolicyKind::Lru), mib))
    };
    // Right after a change LRU has nothing old to unlearn; a point is what that may be worth to it, where the
    // cache is larger than a token's experts by half and more. Over whole phases it loses.
    for mib in [192, 256, 384, 512] {
        let (ours, lru) = rates(Some(32), mib);
        assert!(ours + 1.0 > lru, "after a change, {mib} MiB: frecency {ours:.1}, LRU {lru:.1}");
        let (ours, lru) = rates(None, mib);
        assert!(ours > lru, "{mib} MiB: frecency {ours:.1}, LRU {lru:.1}");
    }
}
