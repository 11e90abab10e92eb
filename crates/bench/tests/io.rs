//! `bench io` over drives and arms by script.

#[path = "support/fake.rs"]
mod fake;

use std::time::Duration;

use fake::{Fake, Script, arm, job};
use metaltail_bench::harness::{Role, Runner};
use metaltail_bench::io::{Drive, Io, IoOptions, io};
use metaltail_store::probe::{Eviction, Latency, Measured, Way};
use serde_json::json;

const DIRECT: Way = Way { direct: true, uring: false, depth: 4 };
const BUFFERED: Way = Way { direct: false, uring: false, depth: 4 };
const RING: Way = Way { direct: true, uring: true, depth: 4 };

/// A drive with a rate for the n-th measurement, and what stays in the page cache.
struct FakeDrive<F> {
    rate: F,
    stayed: u64,
    asked: Vec<Way>,
}

impl<F: FnMut(Way, usize) -> Result<f64, String>> Drive for FakeDrive<F> {
    fn read(&mut self, way: Way, _round: u64) -> Result<Measured, String> {
        self.asked.push(way);
        let rate = (self.rate)(way, self.asked.len())?;
        Ok(Measured {
            way,
            bytes: (rate * 1e9) as u64,
            reads: 10,
            time: Duration::from_secs(1),
            latency: Latency { p50: Duration::from_millis(2), ..Latency::default() },
            evicted: (!way.direct).then_some(Eviction { wanted: 1000, stayed: Some(self.stayed) }),
        })
    }
}

fn options() -> IoOptions {
    IoOptions { ways: vec![BUFFERED, DIRECT], rounds: 2, noise: 0.1 }
}

fn drive(
    rate: impl FnMut(Way, usize) -> Result<f64, String>,
    stayed: u64,
) -> FakeDrive<impl FnMut(Way, usize) -> Result<f64, String>> {
    FakeDrive { rate, stayed, asked: Vec::new() }
}

fn measured(rate: impl FnMut(Way, usize) -> Result<f64, String>, stayed: u64) -> Io {
    io(&options(), &mut drive(rate, stayed), None, &mut || {})
}

#[test]
fn ways_alternate_between_controls() {
    let mut drive = drive(|way, _| Ok(if way.direct { 2.0 } else { 1.0 }), 0);
    let found = io(&options(), &mut drive, None, &mut || {});
    assert_eq!(drive.asked, [DIRECT, DIRECT, BUFFERED, DIRECT, DIRECT, BUFFERED, DIRECT]);
    assert_eq!(found.refused, None);
    let rates: Vec<_> = found.rows.iter().map(|row| row.gb_per_second.unwrap()).collect();
    assert_eq!((rates[0].median, rates[1].median, rates[1].n), (1.0, 2.0, 2));
    assert_eq!(found.rows[0].p50_ms.unwrap().median, 2.0);
}

#[test]
fn memory_that_was_measured_instead_of_the_drive_does_not_count() {
    let found = measured(|_, _| Ok(1.0), 500);
    assert!(found.rows[0].excluded.as_ref().unwrap().contains("stayed in the page cache"));
    assert_eq!(found.rows[0].gb_per_second, None);
    assert!(found.rows[1].excluded.is_none());
    assert_eq!(found.refused, None);
}

#[test]
fn a_way_that_does_not_work_is_left_out_with_its_reason() {
    let only_buffered =
        |way: Way, _| if way.direct { Err("direct reads are refused".to_owned()) } else { Ok(1.0) };
    let found = measured(only_buffered, 0);
    assert_eq!(found.refused, None, "the other one bounds the drift");
    assert_eq!(found.rows[1].excluded.as_deref(), Some("direct reads are refused"));
    assert_eq!(found.raw.iter().filter(|row| row.way == DIRECT.to_string()).count(), 1);
    let none = measured(|_, _| Err("gone".to_owned()), 0);
    assert!(none.refused.unwrap().contains("in none of the ways"));
}

#[test]
fn a_drive_that_drifts_is_refused() {
    let found = measured(|_, at| Ok(if at == 7 { 1.0 } else { 2.0 }), 0);
    assert!(found.refused.unwrap().contains("drifts"));
}

fn streamed(runner: &mut dyn Runner) -> Io {
    let arm = arm("decode", json!({}));
    let job = job();
    io(&options(), &mut drive(|_, _| Ok(0.00005), 0), Some((&arm, &job, runner)), &mut || {})
}

fn streaming_script(io: &str) -> Script {
    Script::new(1.0, json!({"direct": "on", "io": io, "loaders": 4}))
}

#[test]
fn decoding_is_held_against_raw_reads_of_its_own_way() {
    let found = streamed(&mut Fake::new(|_: &str, _| Ok(streaming_script("threads").record())));
    assert_eq!(found.refused, None);
    let streaming = found.streaming.unwrap();
    assert_eq!(streaming.way, DIRECT.to_string());
    // 75,000 bytes in 4 seconds, two of them busy, against 50,000 bytes a second.
    let ratio = streaming.of_raw.unwrap();
    assert!((ratio.median - 0.375).abs() < 1e-9 && ratio.n == 2, "{ratio}");
    assert!((streaming.busy_of_raw.unwrap().median - 0.75).abs() < 1e-9);
    let beside = found.raw.iter().filter(|row| row.role == Role::Probe).count();
    assert_eq!(beside, 3, "raw reads before, between and after two rounds");

    // An io_uring has as many reads under way as decoding had: two in the mean.
    let found = streamed(&mut Fake::new(|_: &str, _| Ok(streaming_script("uring").record())));
    assert_eq!(found.streaming.unwrap().way, Way { depth: 2, ..RING }.to_string());
}

#[test]
fn decoding_that_reads_nothing_is_no_measure_of_a_drive() {
    let found = streamed(&mut Fake::new(|_: &str, _| {
        let mut script = streaming_script("threads");
        script.hit_rate = 1.0;
        Ok(script.record())
    }));
    assert!(found.refused.unwrap().contains("nothing was read while decoding"));
}

#[test]
fn an_arm_that_fails_or_changes_its_ids_refuses_the_run() {
    let found = streamed(&mut Fake::new(|_: &str, at| match at {
        0 => Ok(streaming_script("threads").record()),
        _ => Err("it ended with signal 9".to_owned()),
    }));
    assert_eq!(found.refused.as_deref(), Some("decoding failed: it ended with signal 9"));
    let found = streamed(&mut Fake::new(|_: &str, at| {
        let mut script = streaming_script("threads");
        script.ids[1] = at as u32;
        Ok(script.record())
    }));
    assert!(found.refused.unwrap().contains("ids"));
}
