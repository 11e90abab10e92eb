//! Questions of design that nobody published an answer to.

use std::time::Duration;

use metaltail_device::residency::{Mode, ResidencyError, SlabAllocation};
use metaltail_device::sim::Profile;
use metaltail_device::sim::replay::{Detail, Outcome, Pauses, Pressure, Run, replay};
use serde::Serialize;

/// Memory budget of the runs, in bytes: the one that collapsed. Machines that keep less resident have less.
const RAM: u64 = 90_000_000_000;
/// Slots a layer of a cache that is small against it.
const SMALL: usize = 16;
/// Tokens between two pauses, or two demands of others.
const EVERY: usize = 32;
/// How long a user thinks.
const PAUSE: Duration = Duration::from_secs(20);
/// How often sets are asked for again meanwhile.
const CADENCE: Duration = Duration::from_millis(400);
/// What others take at a time: less than a set of several.
const DEMAND: u64 = 4_000_000_000;

/// One way to do it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Arm {
    /// What is special about it.
    pub name: String,
    /// Tokens a second, pauses left out.
    pub tokens_per_second: f64,
    /// Stall in all, that of the first token after a pause included.
    pub stall_seconds: f64,
    /// Commits of additions, and asking for sets that were given up.
    pub flush_seconds: f64,
    /// Commits of removals.
    pub unregister_seconds: f64,
    /// Allocations at the end.
    pub allocations: usize,
    /// Sets at the end.
    pub sets: usize,
    /// Commits.
    pub commits: u64,
    /// Allocations declared with a submission, in the mean.
    pub declared_per_submit: f64,
}

/// A question and its arms; the first is what others are compared with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Question {
    /// The question.
    pub question: String,
    /// The arms.
    pub arms: Vec<Arm>,
    /// What the simulation cannot know.
    pub caution: &'static str,
}

/// What no published row decides, question by question.
const CAUTIONS: [&str; 5] = [
    "walked: the collapse is published for one size of the cache alone, and how it goes on beyond is a guess; arenas hold a little more than the experts in them",
    "no published run had arenas: that an allocation costs the same whatever its size is the simulation's assumption",
    "the price of asking for a set again is taken to be that of wiring memory in a walk, of which the rows say little",
    "nobody published the cost of a commit of a removal: it is taken to be that of an addition, and grows with the set's members as that does",
    "that idle sets are let go after a second is published, what wiring them costs is not: it is taken from the collapse",
];

/// Replays all questions.
///
/// # Errors
/// A machine that takes less memory than the runs have.
pub fn questions(profile: &Profile) -> Result<Vec<Question>, ResidencyError> {
    let room = profile.workload.room(RAM.min(profile.working_set));
    let large = (room / profile.workload.layers).max(1);
    let all = [
        (format!("What is one allocation? {large} slots a layer"), allocations(large)),
        (format!("What is one allocation? {SMALL} slots a layer"), allocations(SMALL.min(large))),
        (
            format!(
                "How many sets? Every {EVERY} tokens others take {} GB; {large} slots a layer, an allocation an expert",
                DEMAND / 1_000_000_000
            ),
            sets(large),
        ),
        (
            format!("What if evicted experts are freed? {large} slots a layer, an allocation an expert"),
            removals(large),
        ),
        (
            format!(
                "Is it worth keeping idle sets alive? A pause of {} s every {EVERY} tokens",
                PAUSE.as_secs()
            ),
            pauses(large),
        ),
    ];
    all.into_iter()
        .zip(CAUTIONS)
        .map(|((question, runs), caution)| {
            let arms = runs.into_iter().map(|(name, run)| arm(profile, name, &run));
            Ok(Question { question, arms: arms.collect::<Result<_, ResidencyError>>()?, caution })
        })
        .collect()
}

type Runs = Vec<(String, Run)>;

fn arm(profile: &Profile, name: String, run: &Run) -> Result<Arm, ResidencyError> {
    let replayed = replay(profile, run, Detail::Changes)?;
    let outcome = Outcome::of(profile, run, &replayed.device);
    let quantities = &replayed.quantities;
    Ok(Arm {
        name,
        tokens_per_second: outcome.tokens_per_second,
        stall_seconds: outcome.stall,
        flush_seconds: outcome.flush,
        unregister_seconds: outcome.unregister,
        allocations: replayed.allocations,
        sets: replayed.sets,
        commits: quantities.commits,
        declared_per_submit: quantities.declared as f64 / quantities.submissions.max(1) as f64,
    })
}

fn per_expert(slots: usize) -> Run {
    Run { slabs: SlabAllocation::PerExpert, ..Run::new(slots) }
}

fn allocations(slots: usize) -> Runs {
    let walk = |run: Run| Run { mode: Mode::Walk, ..run };
    vec![
        ("arenas, declared once".into(), Run::new(slots)),
        ("an expert each, declared once".into(), per_expert(slots)),
        ("arenas, walked".into(), walk(Run::new(slots))),
        ("an expert each, walked".into(), walk(per_expert(slots))),
    ]
}

fn sets(slots: usize) -> Runs {
    let pressure = Some(Pressure { every: EVERY, bytes: DEMAND });
    let mut runs = vec![("as many as 5 % each need, nobody takes any".to_owned(), per_expert(slots))];
    for sets in [1, 8, 32] {
        let run = Run { sets: Some(sets), pressure, ..per_expert(slots) };
        runs.push((format!("{sets} at most"), run));
    }
    runs
}

fn removals(slots: usize) -> Runs {
    let frees = |sets| Run { frees: true, sets: Some(sets), ..per_expert(slots) };
    let mut runs = vec![("slots are overwritten".to_owned(), per_expert(slots))];
    runs.extend([1, 8, 32].map(|sets| (format!("freed and allocated, {sets} sets at most"), frees(sets))));
    runs
}

fn pauses(slots: usize) -> Runs {
    let run = |keep_alive| Run {
        pauses: Some(Pauses { every: EVERY, length: PAUSE, keep_alive }),
        ..Run::new(slots)
    };
    vec![
        ("no pauses".into(), Run::new(slots)),
        ("kept alive".into(), run(Some(CADENCE))),
        ("not kept alive".into(), run(None)),
    ]
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;

    fn arms(n: usize) -> &'static [Arm] {
        // Replays of a few seconds, the same for each test.
        static ALL: LazyLock<Vec<Question>> = LazyLock::new(|| questions(&Profile::m5max()).unwrap());
        &ALL[n].arms
    }

    #[test]
    fn declared_once_nothing_follows_the_number_of_allocations_but_commits() {
        for question in [0, 1] {
            let arms = arms(question);
            assert!((arms[0].stall_seconds - arms[1].stall_seconds).abs() < 1e-3);
            assert!(arms[0].commits < arms[1].commits && arms[0].allocations * 40 < arms[1].allocations);
            assert!(arms[2].stall_seconds < arms[3].stall_seconds || question == 0);
            assert_eq!(arms[0].declared_per_submit, 0.0);
        }
    }

    #[test]
    fn more_sets_lose_less_under_pressure() {
        let arms = arms(2);
        assert_eq!((arms[1].sets, arms[2].sets), (1, 8));
        assert!(arms[1].flush_seconds > 5.0 * arms[3].flush_seconds - 4.0 * arms[0].flush_seconds);
        assert!(arms[3].sets > 8 && arms[2].flush_seconds >= arms[3].flush_seconds);
    }

    #[test]
    fn freeing_what_is_evicted_costs_a_commit_each() {
        let arms = arms(3);
        assert_eq!(arms[0].unregister_seconds, 0.0);
        for freed in &arms[1..] {
            assert!(freed.unregister_seconds > 10.0 && freed.commits > 20_000, "{freed:?}");
            assert_eq!(freed.allocations, arms[0].allocations);
        }
    }

    #[test]
    fn what_is_kept_alive_does_not_stall() {
        let arms = arms(4);
        assert!((arms[0].stall_seconds - arms[1].stall_seconds).abs() < 1e-6);
        assert!(arms[2].stall_seconds > arms[0].stall_seconds + 1.0, "{arms:?}");
    }
}
