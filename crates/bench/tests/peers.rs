//! Two programs side by side, played by a script.

use std::collections::VecDeque;

use metaltail_bench::harness::Role;
use metaltail_bench::peers::{Answer, Measured, PeerJob, Peers, Phase, Programs, Side, peers};

fn job(pairs: usize) -> PeerJob {
    PeerJob { prompt_ids: vec![5, 6, 7], tokens: 5, pairs, noise: 0.1 }
}

/// Decodes at `rate`, prefills ten times as fast.
fn at(rate: f64, ids: [u32; 5]) -> Measured {
    let answer = Answer {
        prompt_ids: vec![5, 6, 7],
        ids: ids.to_vec(),
        prefill: Phase { tokens: 3, seconds: 3.0 / (10.0 * rate) },
        decode: Phase { tokens: 4, seconds: 4.0 / rate },
        ..Answer::default()
    };
    Measured { answer, seconds: 1.0, ..Measured::default() }
}

#[derive(Default)]
struct Script {
    ours: VecDeque<Result<Measured, String>>,
    theirs: VecDeque<Result<Measured, String>>,
    asked: Vec<Side>,
}

impl Script {
    fn of(ours: &[f64], theirs: &[f64]) -> Script {
        let all = |rates: &[f64], last| rates.iter().map(|rate| Ok(at(*rate, [1, 2, 3, 4, last]))).collect();
        Script { ours: all(ours, 5), theirs: all(theirs, 9), asked: Vec::new() }
    }
}

impl Programs for Script {
    fn run(&mut self, side: Side) -> Result<Measured, String> {
        self.asked.push(side);
        let runs = if side == Side::Metaltail { &mut self.ours } else { &mut self.theirs };
        runs.pop_front().expect("no more runs than planned")
    }
}

fn compare(script: &mut Script, job: &PeerJob) -> Peers {
    peers(job, script, &mut |_| {})
}

fn near(got: f64, wanted: f64) {
    assert!((got - wanted).abs() < 1e-9 * wanted, "{got}, wanted {wanted}");
}

#[test]
fn pairs_alternate_between_controls_and_ratios_are_of_pairs() {
    // Controls 10 10 … 10.5; a machine that doubles its speed in the third pair changes no ratio.
    let mut script = Script::of(&[10.0, 10.0, 12.0, 9.0, 24.0, 10.5], &[6.0, 6.0, 12.0]);
    let found = compare(&mut script, &job(3));
    use Side::{Metaltail as M, Peer as P};
    assert_eq!(script.asked, [M, M, M, P, P, M, M, P, M]);
    assert_eq!(found.refused, None);
    assert_eq!(found.noise.controls.len(), 3);
    near(found.noise.spread.unwrap() + 1.0, 1.05);
    let figure = |key: &str| found.figures.iter().find(|figure| figure.key == key).unwrap();
    let decode = figure("decode_tokens_per_second");
    near(decode.metaltail.unwrap().median, 12.0);
    near(decode.peer.unwrap().median, 6.0);
    let ratio = decode.ratio.unwrap();
    assert_eq!(ratio.n, 3);
    near(ratio.median, 2.0);
    near(ratio.min, 1.5);
    near(figure("prefill_tokens_per_second").peer.unwrap().max, 120.0);
    assert_eq!(figure("peak_bytes").ratio, None);
    assert_eq!((found.ids.same, found.ids.metaltail_repeats, found.ids.peer_repeats), (4, true, true));
    assert_eq!(found.runs.iter().filter(|run| run.role == Role::Control).count(), 3);
}

#[test]
fn a_machine_that_drifts_concludes_nothing() {
    let mut script = Script::of(&[10.0, 10.0, 10.0, 12.0], &[6.0]);
    let found = compare(&mut script, &job(1));
    assert!(found.refused.unwrap().contains("the machine drifts"));
}

#[test]
fn ids_that_change_from_run_to_run_are_told() {
    let mut script = Script::of(&[10.0; 5], &[6.0; 2]);
    script.theirs[1].as_mut().unwrap().answer.ids[0] = 8;
    let found = compare(&mut script, &job(2));
    assert_eq!(found.refused, None);
    assert!(found.ids.metaltail_repeats && !found.ids.peer_repeats);
}

#[test]
fn answers_that_make_no_sense_end_the_comparison_with_their_reason() {
    type Change = fn(&mut Answer);
    let changes: [(Change, &str); 6] = [
        (|answer| answer.prompt_ids[1] = 0, "another prompt"),
        (|answer| answer.prefill.tokens = 2, "2 rows of a prompt of 3"),
        (|answer| answer.ids.truncate(4), "4 ids came back, and 5"),
        (|answer| answer.decode.tokens = 5, "decoded 5 rows for 5 ids"),
        (|answer| answer.decode.seconds = 0.0, "no time"),
        (|answer| answer.prefill.seconds = f64::NAN, "no time"),
    ];
    for (change, why) in changes {
        let mut script = Script::of(&[10.0; 4], &[6.0]);
        change(&mut script.theirs[0].as_mut().unwrap().answer);
        let found = compare(&mut script, &job(1));
        let refused = found.refused.unwrap();
        assert!(refused.starts_with("the peer: ") && refused.contains(why), "{refused}");
        assert_eq!(script.asked.len(), 4, "nothing is run after it");
    }
    let mut script = Script::of(&[10.0], &[]);
    script.ours[0] = Err("it cannot be started".to_owned());
    let found = compare(&mut script, &job(1));
    assert_eq!(found.refused.unwrap(), "metaltail: it cannot be started");
}

#[test]
fn metaltail_may_end_at_a_stop_id_and_the_peer_may_not() {
    let mut script = Script::of(&[10.0; 4], &[6.0]);
    for run in &mut script.ours {
        let answer = &mut run.as_mut().unwrap().answer;
        answer.ids.truncate(3);
        answer.decode = Phase { tokens: 2, seconds: 0.2 };
    }
    let found = compare(&mut script, &job(1));
    assert_eq!((found.refused, found.ids.same), (None, 3));
}

#[test]
fn one_id_is_all_of_prefill() {
    let mut script = Script::of(&[10.0; 4], &[6.0]);
    for run in script.ours.iter_mut().chain(&mut script.theirs) {
        let answer = &mut run.as_mut().unwrap().answer;
        answer.ids.truncate(1);
        answer.decode = Phase::default();
    }
    let found = compare(&mut script, &PeerJob { tokens: 1, ..job(1) });
    assert_eq!(found.refused, None);
    assert_eq!(found.figures[1].ratio, None);
    near(found.figures[0].ratio.unwrap().median, 10.0 / 6.0);
}
