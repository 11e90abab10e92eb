//! `bench ab` over arms by script: what is refused, and what follows from what is not.

#[path = "support/fake.rs"]
mod fake;

use fake::{Fake, Script, TOKENS, arm, job};
use metaltail_bench::ab::{Ab, AbFigure, AbOptions, Verdict, ab};
use metaltail_bench::arm::ArmRecord;
use metaltail_bench::harness::Role;
use metaltail_bench::job::{Job, PageCache};
use serde_json::{Value, json};

/// A has 4 loaders and B has 8, unless the script says otherwise.
fn config(name: &str) -> Value {
    json!({"loaders": if name == "B" { 8 } else { 4 }, "origins": {}})
}

fn compare(pairs: usize, script: impl FnMut(&str, usize) -> Result<ArmRecord, String>) -> (Ab, Vec<String>) {
    compare_as(&job(), pairs, json!({}), script)
}

fn compare_as(
    job: &Job,
    pairs: usize,
    given_b: Value,
    script: impl FnMut(&str, usize) -> Result<ArmRecord, String>,
) -> (Ab, Vec<String>) {
    let arms = [arm("A", json!({})), arm("B", given_b)];
    let options = AbOptions { pairs, noise: 0.1, several: false, probe: arm("A at cap 1", json!({})) };
    let mut runner = Fake::new(script);
    let result = ab(&arms, job, &options, &mut runner, &mut |_| {});
    (result, runner.ran)
}

fn figure<'a>(ab: &'a Ab, key: &str) -> &'a AbFigure {
    ab.result.figures.iter().find(|figure| figure.key == key).unwrap()
}

#[test]
fn arms_alternate_between_controls() {
    let (result, ran) = compare(3, |name, _| Ok(Script::new(10.0, config(name)).record()));
    assert_eq!(ran.concat(), "AAABBAABA");
    assert_eq!(result.refused, None);
    assert_eq!(result.result.name, "loaders 4 → 8");
    assert_eq!(figure(&result, "tokens_per_second").verdict, Verdict::Same);
}

#[test]
fn an_effect_is_a_ratio_of_pairs() {
    // The machine slows down; B is always a fifth faster than the A beside it.
    let (result, _) = compare(3, |name, at| {
        let machine = 10.0 - 0.05 * at as f64;
        let rate = if name == "B" { 1.2 * machine } else { machine };
        Ok(Script::new(rate, config(name)).record())
    });
    assert_eq!(result.refused, None);
    let speed = figure(&result, "tokens_per_second");
    let ratio = speed.ratio.unwrap();
    assert!((ratio.median - 1.2).abs() < 0.01 && ratio.n == 3, "{ratio}");
    assert_eq!(speed.verdict, Verdict::Higher);
}

#[test]
fn an_effect_below_the_spread_of_controls_is_noise() {
    let (result, _) = compare(2, |name, at| {
        let rate = if name == "B" { 10.3 } else { [10.0, 10.5][at % 2] };
        Ok(Script::new(rate, config(name)).record())
    });
    assert_eq!(result.refused, None);
    assert_eq!(figure(&result, "tokens_per_second").verdict, Verdict::WithinNoise);
}

#[test]
fn pairs_that_contradict_each_other_decide_nothing() {
    let (result, _) = compare(3, |name, at| {
        let rate = if name == "B" { [10.0, 10.0, 10.0, 8.0, 15.0, 10.0, 10.0, 15.0][at] } else { 10.0 };
        Ok(Script::new(rate, config(name)).record())
    });
    assert_eq!(figure(&result, "tokens_per_second").verdict, Verdict::PairsDisagree);
}

#[test]
fn controls_that_drift_apart_refuse_the_run() {
    let (result, ran) = compare(2, |name, at| {
        let rate = if at == 6 { 8.0 } else { 10.0 };
        Ok(Script::new(rate, config(name)).record())
    });
    assert_eq!(ran.len(), 7, "all of it was measured and is in the record");
    let refused = result.refused.unwrap();
    assert!(refused.contains("25.0 %") && refused.contains("10.0 %"), "{refused}");
    assert_eq!(result.runs.len(), 7);
}

#[test]
fn one_other_id_disqualifies() {
    let (result, _) = compare(2, |name, _| {
        let mut script = Script::new(10.0, config(name));
        if name == "B" {
            script.ids[2] = 8;
        }
        Ok(script.record())
    });
    let refused = result.refused.unwrap();
    assert!(
        refused.starts_with("arm B failed: its ids") && refused.contains("prompt 2 differs from row 2"),
        "{refused}"
    );
    let excluded = result.runs.iter().find(|run| run.excluded.is_some()).unwrap();
    assert_eq!(excluded.arm, 1);
    assert!(excluded.record.is_some(), "an excluded run stays in the record");
}

#[test]
fn an_arm_that_does_not_repeat_itself_disqualifies_too() {
    let (result, _) = compare(2, |name, at| {
        let mut script = Script::new(10.0, config(name));
        script.ids[0] = u32::from(at == 1);
        Ok(script.record())
    });
    assert!(result.refused.unwrap().starts_with("arm A failed: its ids are not those of A"));
}

#[test]
fn a_failing_arm_ends_the_run() {
    let (result, ran) = compare(2, |name, _| match name {
        "B" => Err("it ended with signal 11".to_owned()),
        _ => Ok(Script::new(10.0, config(name)).record()),
    });
    assert_eq!(ran.concat(), "AAAB");
    assert_eq!(result.refused.unwrap(), "arm B failed: it ended with signal 11");
}

#[test]
fn what_is_cut_short_fails_the_run() {
    type Damage = fn(&mut ArmRecord);
    let damages: [(Damage, &str); 5] = [
        (|record| drop(record.rows.pop()), "3 prompts came back"),
        (|record| record.rows[1].tokens = 3, "3 tokens were decoded"),
        (|record| record.rows[1].stats["decode"]["tokens"] = json!(5), "(5 by the telemetry)"),
        (|record| record.rows[2].ids.truncate(4), "4 ids came back for 5 rows"),
        (|record| record.rows[3].stats["device"] = json!({"fallbacks": 2}), "2 submissions fell back"),
    ];
    for (damage, words) in damages {
        let (result, _) = compare(1, |name, _| {
            let mut record = Script::new(10.0, config(name)).record();
            damage(&mut record);
            Ok(record)
        });
        let refused = result.refused.unwrap();
        assert!(refused.contains(words), "{refused}");
    }
    let cold = Job { page_cache: PageCache::Cold, ..job() };
    let (result, _) = compare_as(&cold, 1, json!({}), |name, _| Ok(Script::new(10.0, config(name)).record()));
    assert!(result.refused.unwrap().contains("the page cache was warm, and cold was declared"));
}

#[test]
fn a_setting_that_was_not_used_fails_the_run() {
    let (result, _) =
        compare_as(&job(), 1, json!({"loaders": 16}), |name, _| Ok(Script::new(10.0, config(name)).record()));
    let refused = result.refused.unwrap();
    assert!(refused.contains("--loaders 16 was asked for and 8 was used"), "{refused}");
}

#[test]
fn one_setting_may_differ_unless_several_are_asked_for() {
    let two = |name: &str, _| {
        let b = name == "B";
        let config = json!({"loaders": if b { 8 } else { 4 }, "checksums": if b { "off" } else { "on" }});
        Ok(Script::new(10.0, config).record())
    };
    let (result, ran) = compare(2, two);
    assert_eq!(ran.concat(), "AAAB", "it is refused before hours of it");
    assert!(
        result.refused.unwrap().contains("2 resolved settings differ (loaders 4 → 8, checksums on → off)")
    );

    let arms = [arm("A", json!({})), arm("B", json!({}))];
    let options = AbOptions { pairs: 2, noise: 0.1, several: true, probe: arm("probe", json!({})) };
    // A's checksums are on, and engage.
    let script = |name: &str, at| {
        let mut record: ArmRecord = two(name, at)?;
        record.rows.iter_mut().for_each(|row| row.stats["experts"] = json!({"verified": 1}));
        Ok(record)
    };
    let result = ab(&arms, &job(), &options, &mut Fake::new(script), &mut |_| {});
    assert_eq!(result.refused, None);
}

#[test]
fn what_flags_alone_refuse_need_not_run() {
    let refused =
        |a, b, several| metaltail_bench::ab::refused_beforehand(&arm("A", a), &arm("B", b), several);
    let two = || (json!({"cap": 4}), json!({"cap": 8, "policy": "lru"}));
    let reason = refused(two().0, two().1, false).unwrap();
    assert!(reason.contains("2 resolved settings differ (cap 4 → 8, policy frecency → lru)"), "{reason}");
    assert_eq!(refused(two().0, two().1, true), None);
    assert!(refused(json!({}), json!({}), true).unwrap().contains("nothing to compare"));
    assert_eq!(refused(json!({}), json!({"cap": 8}), false), None, "memory says what A's cap is");
}

#[test]
fn left_out_experts_are_not_counted_as_used() {
    let (result, _) = compare_as(&job(), 1, json!({"expert_top_p": 0.8}), |name, _| {
        let b = name == "B";
        let mut script = Script::new(10.0, json!({"expert_top_p": if b { 0.8 } else { 1.0 }}));
        let dropped = if b { 50 } else { 0 };
        let decode = json!({"selections": 200, "dropped": dropped, "hits": {"cached": 25}});
        script.stats = json!({"experts": {"selections": 900, "dropped": dropped, "decode": decode}});
        Ok(script.record())
    });
    assert_eq!(result.refused, None);
    let medians = |key: &str| (figure(&result, key).a.median, figure(&result, key).b.median);
    // Of 200 in four rows a quarter is left out.
    assert_eq!(medians("selections_per_token"), (50.0, 50.0));
    assert_eq!(medians("used_per_token"), (50.0, 37.5));
    assert_eq!(medians("left_out_share"), (0.0, 0.25));
}

#[test]
fn a_way_to_declare_memory_needs_a_device() {
    let walk = |declared: Value| {
        move |name: &str, _: usize| {
            let b = name == "B";
            let mut script = Script::new(10.0, json!({"residency": if b { "walk" } else { "set" }}));
            script.stats =
                json!({"residency": {"declared_per_submit": if b { declared.clone() } else { Value::Null }}});
            Ok(script.record())
        }
    };
    let refused = compare(1, walk(Value::Null)).0.refused.unwrap();
    assert!(refused.starts_with("arm B: --residency walk did not engage"), "{refused}");
    assert_eq!(compare(1, walk(json!(3.5))).0.refused, None);
}

#[test]
fn arms_that_resolve_to_the_same_have_nothing_to_compare() {
    let (result, _) = compare(2, |_, _| Ok(Script::new(10.0, json!({"loaders": 4})).record()));
    assert!(result.refused.unwrap().contains("nothing to compare"));
}

#[test]
fn a_feature_that_did_not_engage_fails_its_arm() {
    let prefetch = |issued: u64| {
        move |name: &str, _: usize| {
            let on = name == "B";
            let mut script = Script::new(10.0, json!({"prefetch": if on { "on" } else { "off" }}));
            script.stats = json!({"io": {"prefetch": {"issued_bytes": if on { issued } else { 0 }}}});
            Ok(script.record())
        }
    };
    let (result, _) = compare(1, prefetch(0));
    let refused = result.refused.unwrap();
    assert!(refused.starts_with("arm B: --prefetch on did not engage"), "{refused}");
    assert_eq!(compare(1, prefetch(5)).0.refused, None);
}

#[test]
fn a_comparison_of_caches_needs_ids_that_miss_at_a_cap_of_1() {
    let caches = |hit_rate: f64| {
        move |name: &str, _: usize| {
            let mut script = Script::new(10.0, json!({"cap": if name == "B" { 8 } else { 4 }}));
            script.hit_rate = if name == "A at cap 1" { hit_rate } else { 0.7 };
            Ok(script.record())
        }
    };
    let (result, ran) = compare(1, caches(0.51));
    assert_eq!(ran.last().unwrap(), "A at cap 1");
    assert!(result.refused.unwrap().contains("51.0 %"));
    let (result, _) = compare(1, caches(0.2));
    assert_eq!(result.refused, None);
    assert_eq!(result.result.hit_rate_at_cap_1, Some(0.2));
    assert_eq!(result.runs.iter().filter(|run| run.role == Role::Probe).count(), 1);
}

#[test]
fn where_numbers_may_change_they_are_compared() {
    let (result, _) = compare_as(&job(), 1, json!({"exact": true}), |name, _| {
        let b = name == "B";
        let mut script = Script::new(10.0, json!({"exact": b}));
        script.nll = Some(if b { 2.25 } else { 2.0 });
        script.ids[3] = if b { 9 } else { 7 };
        script.logits = if b { vec![0.0, 0.0] } else { vec![0.0, -200.0] };
        Ok(script.record())
    });
    assert_eq!(result.refused, None);
    let numerics = result.result.numerics.unwrap();
    let rows = 3.0 * (TOKENS + 1) as f64;
    assert!((numerics.agreement - (rows - 1.0) / rows).abs() < 1e-12);
    let at = numerics.divergence.unwrap();
    assert_eq!((at.prompt, at.row, at.a, at.b, at.margin), (2, 3, 7, 9, Some(0.5)));
    let kl = numerics.kl.unwrap();
    assert!((kl - 2.0f64.ln()).abs() < 1e-9 && numerics.kl_max == Some(kl), "{kl}");
    assert_eq!(numerics.kl_noise, Some(0.0));
    assert_eq!((numerics.nll_a, numerics.nll_b, numerics.nll_noise), (Some(2.0), Some(2.25), Some(0.0)));
}
