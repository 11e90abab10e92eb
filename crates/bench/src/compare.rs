//! What two arms differ in, and whether what was asked for really happened.

use metaltail_engine::DEFAULT_POLICY;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::arm::{ArmRecord, PromptRow};

/// Keys of a configuration that say nothing about how the engine was set.
const NO_SETTINGS: [&str; 10] =
    ["origins", "json", "verbose", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop"];

/// Settings that follow from another one when nothing is said of them.
const FOLLOWS: [(&str, &[&str]); 5] = [
    ("cap", &["ram"]),
    ("exact", &["device"]),
    ("pool", &["cap", "policy"]),
    ("cap_growth", &["cap"]),
    ("pin_size", &["pin", "usage"]),
];

/// Settings that may change numbers: ids of such arms are compared, not held equal.
const NUMERICS: [&str; 4] = ["exact", "model", "device", "expert_top_p"];

/// Settings that change what is in the expert cache.
const CACHE: [&str; 2] = ["cap", "policy"];

/// A setting, the value with which it shows, and the counter that cannot be zero then. `None` stands
/// for every value but off, auto, none and all of it.
const ENGAGED: [(&str, Option<&str>, &str); 14] = [
    ("direct", Some("on"), "/io/total_reads"),
    ("io", None, "/io/total_reads"),
    ("checksums", Some("on"), "/experts/verified"),
    ("mlock", Some("on"), "/memory/locked_bytes"),
    ("prefetch", Some("on"), "/io/prefetch/issued_bytes"),
    ("cap_growth", Some("on"), "/experts/grown_bytes"),
    ("expert_top_p", None, "/experts/dropped"),
    ("pin", None, "/experts/hits/pinned"),
    ("draft", None, "/draft/proposed"),
    ("device", Some("sim"), "/device/submissions"),
    ("device", Some("metal"), "/device/submissions"),
    ("device", Some("cuda"), "/device/submissions"),
    ("residency", Some("walk"), "/residency/declared_per_submit"),
    ("slab_allocation", Some("per-expert"), "/device/submissions"),
];

/// Settings of which it is not known beforehand what a given value becomes: the profile's file, and how many
/// experts fill a size.
const OPEN: [&str; 2] = ["usage", "pin_size"];

/// A setting that has two values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// The setting, with underscores.
    pub key: String,
    /// Its value in A.
    pub a: Value,
    /// Its value in B.
    pub b: Value,
    /// Whether it only follows from another difference.
    pub follows: bool,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} → {}", self.key.replace('_', "-"), word(&self.a), word(&self.b))
    }
}

fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The resolved settings in which two configurations differ.
pub fn differences(a: &Value, b: &Value) -> Vec<Difference> {
    let none = Map::new();
    let (a, b) = (a.as_object().unwrap_or(&none), b.as_object().unwrap_or(&none));
    let mut keys: Vec<&String> = a.keys().collect();
    keys.extend(b.keys().filter(|key| !a.contains_key(*key)));
    let value = |map: &Map<String, Value>, key: &str| map.get(key).cloned().unwrap_or(Value::Null);
    let mut found: Vec<Difference> = keys
        .into_iter()
        .filter(|key| !NO_SETTINGS.contains(&key.as_str()))
        .map(|key| Difference { key: key.clone(), a: value(a, key), b: value(b, key), follows: false })
        .filter(|difference| difference.a != difference.b)
        .collect();
    let causes: Vec<String> = found.iter().map(|difference| difference.key.clone()).collect();
    for difference in &mut found {
        let of = FOLLOWS.iter().find(|(key, _)| *key == difference.key).map(|(_, of)| *of);
        let given = [a, b].iter().any(|map| was_given(map, &difference.key));
        difference.follows =
            !given && of.is_some_and(|of| causes.iter().any(|key| of.contains(&key.as_str())));
    }
    found
}

/// What two arms are known to differ in before any of them ran.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Foreseen {
    /// Settings that certainly come out differently.
    pub differences: Vec<Difference>,
    /// Whether all others certainly come out the same.
    pub complete: bool,
}

impl Foreseen {
    /// What given settings say.
    pub fn of(a: &Map<String, Value>, b: &Map<String, Value>) -> Foreseen {
        let mut foreseen = Foreseen { complete: true, ..Foreseen::default() };
        let more = b.keys().filter(|key| !a.contains_key(*key));
        for key in a.keys().chain(more).filter(|key| !NO_SETTINGS.contains(&key.as_str())) {
            if a.get(key) == b.get(key) {
                continue;
            }
            match (certain(a, key), certain(b, key)) {
                (Some(a), Some(b)) if same(&a, &b) => {}
                (Some(a), Some(b)) => {
                    foreseen.differences.push(Difference { key: key.clone(), a, b, follows: false });
                }
                _ => foreseen.complete = false,
            }
        }
        foreseen
    }
}

/// What a setting becomes, where neither the model nor the machine has a say in it.
fn certain(given: &Map<String, Value>, key: &str) -> Option<Value> {
    match given.get(key) {
        Some(_) if OPEN.contains(&key) => None,
        Some(value) if value == "auto" && key != "pin" => None,
        Some(value) => Some(value.clone()),
        None => usual(key),
    }
}

/// What a setting is where nothing is said of it.
fn usual(key: &str) -> Option<Value> {
    Some(match key {
        "policy" => DEFAULT_POLICY.name().into(),
        "prefetch" | "checksums" => "on".into(),
        "pin" => "auto".into(),
        "exact" => false.into(),
        "expert_top_p" => 1.0.into(),
        "device" => "cpu".into(),
        "residency" => "set".into(),
        "slab_allocation" => "arena".into(),
        "draft" | "mlock" => "off".into(),
        "chunk_size" => Value::Null,
        _ => return None,
    })
}

/// Whether two values are the same, however a number is written.
fn same(a: &Value, b: &Value) -> bool {
    a == b || (a.is_number() && a.as_f64() == b.as_f64())
}

/// Whether a configuration's value came from the user.
fn was_given(config: &Map<String, Value>, key: &str) -> bool {
    let origin = config.get("origins").and_then(|origins| origins.get(key)).and_then(Value::as_str);
    origin.is_some_and(|origin| origin != "default")
}

/// Whether given settings may change numbers where they are not the same in both arms.
pub fn may_change_numbers(a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
    NUMERICS.iter().any(|key| a.get(*key) != b.get(*key))
}

/// Whether one of the differences changes what is in the expert cache.
pub fn changes_cache(differences: &[Difference]) -> bool {
    differences.iter().any(|difference| CACHE.contains(&difference.key.as_str()))
}

/// A setting that was given and did not become what was given: an unexpected fallback.
pub fn fallback(given: &Map<String, Value>, config: &Value) -> Option<String> {
    // What is asked for as `auto`, names of places and upper bounds resolve to something else by right.
    let resolves = |key: &str, value: &Value| {
        NO_SETTINGS.contains(&key) || ["model", "usage", "pin", "pin_size"].contains(&key) || value == "auto"
    };
    given.iter().filter(|(key, value)| !resolves(key, value)).find_map(|(key, wanted)| {
        let got = config.get(key).unwrap_or(&Value::Null);
        let flag = key.replace('_', "-");
        (!same(got, wanted))
            .then(|| format!("--{flag} {} was asked for and {} was used", word(wanted), word(got)))
    })
}

/// Whether computation fell back from the device that was asked for.
pub fn device_fallback(row: &PromptRow) -> Option<String> {
    let count = row.stats.pointer("/device/fallbacks").and_then(Value::as_u64).filter(|count| *count > 0)?;
    Some(format!("{count} submissions fell back from the device"))
}

/// A tested setting whose counter is zero over a whole arm, warm-ups included: it did not engage.
pub fn not_engaged(key: &str, record: &ArmRecord) -> Option<String> {
    let value = word(record.config.get(key).unwrap_or(&Value::Null));
    let off = ["off", "auto", "none", "null", "1.0"].contains(&value.as_str());
    let applies = |wanted: &Option<&str>| wanted.map_or(!off, |wanted| wanted == value);
    let (_, _, pointer) = ENGAGED.iter().find(|(name, wanted, _)| *name == key && applies(wanted))?;
    let counts = record.rows.iter().filter_map(|row| row.stats.pointer(pointer).and_then(Value::as_f64));
    let flag = key.replace('_', "-");
    (counts.sum::<f64>() <= 0.0).then(|| {
        format!(
            "--{flag} {value} did not engage: its counter {} stayed zero",
            pointer.trim_start_matches('/')
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn keys(a: Value, b: Value) -> Vec<(String, bool)> {
        differences(&a, &b).into_iter().map(|difference| (difference.key, difference.follows)).collect()
    }

    #[test]
    fn what_follows_from_a_setting_is_no_second_one() {
        let a = json!({"ram": 1, "cap": 4, "pool": true, "origins": {"ram": "flag", "cap": "default"}});
        let b = json!({"ram": 2, "cap": 8, "pool": true, "origins": {"ram": "flag", "cap": "default"}});
        assert_eq!(keys(a, b), [("ram".into(), false), ("cap".into(), true)]);
        let a = json!({"ram": 1, "cap": 4, "origins": {"cap": "flag"}});
        let b = json!({"ram": 2, "cap": 8, "origins": {"cap": "flag"}});
        assert_eq!(keys(a, b), [("ram".into(), false), ("cap".into(), false)]);
    }

    #[test]
    fn growth_that_a_cap_turns_off_is_no_second_setting() {
        let a = json!({"cap": 4, "cap_growth": "off", "pool": false, "origins": {"cap": "flag"}});
        let b = json!({"cap": 9, "cap_growth": "on", "pool": true, "origins": {"cap": "default"}});
        let wanted = [("cap", false), ("cap_growth", true), ("pool", true)];
        assert_eq!(keys(a, b), wanted.map(|(key, follows)| (key.to_owned(), follows)));
    }

    #[test]
    fn the_activations_of_an_accelerator_are_no_second_setting() {
        let arm =
            |device, exact, origin| json!({"device": device, "exact": exact, "origins": {"exact": origin}});
        let found = keys(arm("cpu", false, "default"), arm("sim", true, "default"));
        assert_eq!(found, [("device".into(), false), ("exact".into(), true)]);
        let found = keys(arm("cpu", false, "flag"), arm("sim", true, "default"));
        assert_eq!(found, [("device".into(), false), ("exact".into(), false)]);
    }

    #[test]
    fn sampling_and_output_are_no_settings_of_the_engine() {
        assert!(keys(json!({"json": true, "seed": 1}), json!({"json": false, "seed": 2})).is_empty());
        assert_eq!(keys(json!({}), json!({"loaders": 2})), [("loaders".into(), false)]);
    }

    #[test]
    fn what_flags_alone_tell_is_foreseen() {
        let of = |a: Value, b: Value| {
            let foreseen = Foreseen::of(a.as_object().unwrap(), b.as_object().unwrap());
            let keys: Vec<String> = foreseen.differences.iter().map(|it| it.key.clone()).collect();
            (keys.join(" "), foreseen.complete)
        };
        let cases = [
            (json!({}), json!({}), "", true),
            (json!({"usage": "off"}), json!({"usage": "off"}), "", true),
            (json!({"cap": 4}), json!({"cap": 8, "policy": "lru"}), "cap policy", true),
            // Said, and what it is without a word.
            (json!({"policy": "frecency", "expert_top_p": 1}), json!({}), "", true),
            // What the other arm comes to depends on memory, or on a measurement.
            (json!({"cap": 4}), json!({}), "", false),
            (json!({"direct": "on"}), json!({"direct": "auto"}), "", false),
            (json!({"pin_size": 4096}), json!({"pin_size": 4097}), "", false),
            (json!({"pin": "off"}), json!({"seed": 3}), "pin", true),
        ];
        for (a, b, keys, complete) in cases {
            assert_eq!(of(a.clone(), b.clone()), (keys.to_owned(), complete), "{a} {b}");
            assert_eq!(of(b.clone(), a.clone()).1, complete, "{b} {a}");
        }
    }

    #[test]
    fn a_difference_names_the_row() {
        let [found] = &differences(&json!({"prefill_chunk": 8}), &json!({"prefill_chunk": 16}))[..] else {
            panic!("one difference")
        };
        assert_eq!(found.to_string(), "prefill-chunk 8 → 16");
    }

    #[test]
    fn what_was_asked_for_must_be_what_was_used() {
        let given = |value: Value| value.as_object().cloned().unwrap();
        let config = json!({"direct": "off", "cap": 4, "model": "there"});
        assert_eq!(fallback(&given(json!({"cap": 4, "model": "m", "direct": "auto"})), &config), None);
        let text = fallback(&given(json!({"direct": "on"})), &config).unwrap();
        assert!(text.contains("--direct on was asked for and off was used"), "{text}");
    }
}
