//! `metaltail bench ab`: two sets of settings against each other.

use metaltail_bench::ab::{AbOptions, ab, refused_beforehand};
use metaltail_bench::harness::ab_order;
use metaltail_bench::job::Feed;
use metaltail_bench::record::Surroundings;
use metaltail_bench::{Record, may_change_numbers};

use super::process::Processes;
use super::{check_plot, finish, given, surroundings, tables};
use crate::args::BenchAbArgs;
use crate::exit::{Failure, Kind};
use crate::progress::Bar;
use crate::settings::Settings;

/// Compares.
///
/// # Errors
/// Arms without sense, and all that refuses the comparison.
pub fn execute(args: &BenchAbArgs, settings: &Settings) -> Result<(), Failure> {
    check_plot(args.protocol.plot.as_ref())?;
    let mut job = given::job(&args.protocol, settings)?;
    let arms = [given::arm("A", &args.a, settings)?, given::arm("B", &args.b, settings)?];
    if let Some(reason) = refused_beforehand(&arms[0], &arms[1], args.several) {
        return Err(Failure::new(Kind::Usage, reason));
    }
    given::check_models(&arms, settings)?;
    job.numerics = may_change_numbers(&arms[0].given, &arms[1].given);
    if job.numerics && job.feed == Feed::Auto {
        // Logits can be compared row by row only where both arms were fed the same.
        job.feed = if job.sequences.is_some() { Feed::Ids } else { Feed::Random };
    }
    let probe = given::arm("A at cap 1", &with_cap(&args.a, 1), settings)?;
    let options = AbOptions {
        pairs: args.pairs,
        noise: args.protocol.noise,
        several: args.several,
        probe: probe.clone(),
    };
    let around = Surroundings { program: surroundings::program(), machine: surroundings::machine() };
    let mut processes = Processes::new(&job)?;
    let bar = Bar::items("runs", ab_order(args.pairs).len() as u64, settings.json());
    let compared = ab(&arms, &job, &options, &mut processes, &mut |_| bar.advance(1));
    bar.finish();
    let [a, b] = arms;
    let record = Record::of_ab(compared, &[a, b, probe], &job, around);
    let table = |record: &Record| tables::ab(record, &args.a, &args.b);
    finish(&record, "ab", table, &args.protocol, settings)
}

/// The flags of an arm with another cap.
fn with_cap(flags: &str, cap: usize) -> String {
    let words = shlex::split(flags).unwrap_or_default();
    let mut kept = Vec::new();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            // Its value is the next word.
            "--cap" => drop(words.next()),
            _ if word.starts_with("--cap=") => {}
            _ => kept.push(word),
        }
    }
    kept.push(format!("--cap={cap}"));
    shlex::try_join(kept.iter().map(String::as_str)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cap_is_replaced_however_it_was_written() {
        for flags in ["--cap 4 --direct on", "--direct on --cap=4", "--direct on"] {
            let words = shlex::split(&with_cap(flags, 1)).unwrap();
            assert_eq!(words, ["--direct", "on", "--cap=1"], "{flags}");
        }
    }
}
