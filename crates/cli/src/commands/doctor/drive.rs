//! How fast a model's drive delivers experts, by the ways there are to read it.

use std::time::Duration;

use metaltail_store::probe::{Limits, Measured, ProbeError, Target, Way, measure, uring_works};
use serde_json::{Value, json};

use super::findings::{Finding, Severity};
use crate::commands::plan::Planned;
use crate::report::bytes as size;
use crate::words::table;

/// How long each way is read.
const TIME: Duration = Duration::from_millis(250);
/// Bytes that each way reads at most.
const BYTES: u64 = 1 << 30;
/// Reads at a time.
const DEPTHS: [usize; 3] = [1, 4, 16];
/// How much faster another way must be to be worth a word: shorter than this is noise.
const FASTER: f64 = 1.3;

/// Every way with what it gave; one that cannot be had says why.
pub type Probed = Vec<(Way, Result<Measured, ProbeError>)>;

/// Measures all ways, each on other experts than the one before.
pub fn probe(planned: &Planned) -> Probed {
    let Some(checkpoint) = &planned.checkpoint else { return Vec::new() };
    let target = Target::experts(checkpoint.files(), &planned.places);
    if target.runs.is_empty() {
        return Vec::new();
    }
    let carriers: &[bool] = if uring_works().is_ok() { &[false, true] } else { &[false] };
    let direct = carriers.iter().flat_map(|&uring| DEPTHS.map(|depth| Way { direct: true, uring, depth }));
    let ways = direct.chain([Way { direct: false, uring: false, depth: 4 }]);
    (1..)
        .zip(ways)
        .map(|(seed, way)| (way, measure(&target, way, Limits { time: TIME, bytes: BYTES, seed })))
        .collect()
}

fn rate(measured: &Measured) -> f64 {
    measured.bytes_per_second() / 1e9
}

/// As JSON.
pub fn to_json(probed: &Probed) -> Value {
    let row = |(way, result): &(Way, Result<Measured, ProbeError>)| {
        let measured = result.as_ref().ok();
        json!({
            "direct": way.direct, "io": if way.uring { "uring" } else { "threads" }, "depth": way.depth,
            "gb_per_second": measured.map(rate),
            "bytes": measured.map(|m| m.bytes), "reads": measured.map(|m| m.reads),
            "p50_seconds": measured.map(|m| m.latency.p50.as_secs_f64()),
            "p99_seconds": measured.map(|m| m.latency.p99.as_secs_f64()),
            "reason": result.as_ref().err().map(ToString::to_string),
        })
    };
    json!(probed.iter().map(row).collect::<Vec<_>>())
}

/// For people.
pub fn to_words(probed: &Probed) -> String {
    let mut rows = vec![["way", "GB/s", "median", "99 of 100", "read"].map(str::to_owned).to_vec()];
    for (way, result) in probed {
        let ms = |time: Duration| format!("{:.2} ms", time.as_secs_f64() * 1e3);
        rows.push(match result {
            Ok(m) => vec![
                way.to_string(),
                format!("{:.2}", rate(m)),
                ms(m.latency.p50),
                ms(m.latency.p99),
                size(m.bytes),
            ],
            Err(error) => vec![way.to_string(), "–".into(), error.to_string()],
        });
    }
    table(&rows, &[false, true, true, true, true])
}

/// The time that half of the direct reads took at least where nothing else was read meanwhile.
pub fn half_took(probed: &Probed) -> Option<Duration> {
    let alone = probed.iter().find(|(way, _)| way.direct && way.depth == 1)?;
    alone.1.as_ref().ok().map(|measured| measured.latency.p50)
}

/// Whether another way than the default (direct, threads, four at a time) is clearly faster.
pub fn findings(probed: &Probed) -> Vec<Finding> {
    let rates = || probed.iter().filter_map(|(way, result)| Some((way, rate(result.as_ref().ok()?))));
    let usual = rates().find(|(way, _)| way.direct && !way.uring && way.depth == 4);
    let best = rates().filter(|(way, _)| way.direct).max_by(|a, b| a.1.total_cmp(&b.1));
    let (Some((_, usual)), Some((way, best))) = (usual, best) else { return Vec::new() };
    if best < FASTER * usual {
        return Vec::new();
    }
    let io = if way.uring { "uring" } else { "threads" };
    vec![Finding {
        severity: Severity::Hint,
        what: format!("{way} reads {best:.2} GB/s, four threads {usual:.2}"),
        why: "the drive delivers more when it is asked in this way".into(),
        action: format!("`--io {io} --loaders {}`; `metaltail bench io` measures longer", way.depth),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(uring: bool, depth: usize, bytes: u64) -> (Way, Result<Measured, ProbeError>) {
        let way = Way { direct: true, uring, depth };
        let time = Duration::from_secs(1);
        (way, Ok(Measured { way, bytes, reads: 1, time, latency: Default::default(), evicted: None }))
    }

    #[test]
    fn only_a_clearly_faster_way_is_recommended() {
        let slight = vec![measured(false, 4, 1000 << 20), measured(true, 4, 1200 << 20)];
        assert_eq!(findings(&slight), []);
        let clear = vec![measured(false, 4, 1000 << 20), measured(true, 16, 2000 << 20)];
        let found = findings(&clear);
        assert!(found[0].action.contains("--io uring --loaders 16"), "{found:?}");
        assert!(found[0].what.contains("2.10 GB/s, four threads 1.05"), "{found:?}");
        assert_eq!(findings(&vec![]), []);
    }

    #[test]
    fn a_read_alone_says_how_long_one_takes() {
        let mut probed = vec![measured(false, 4, 1000 << 20), measured(false, 1, 300 << 20)];
        assert_eq!(half_took(&probed[..1].to_vec()), None);
        if let Ok(measured) = &mut probed[1].1 {
            measured.latency.p50 = Duration::from_micros(90);
        }
        assert_eq!(half_took(&probed), Some(Duration::from_micros(90)));
    }
}
