//! A machine in numbers.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::workload::{Streaming, Workload};

/// The most memory that a profile may have: addresses stay far below the end of the address space.
const MOST_MEMORY: u64 = 1 << 50;

/// The profile that is built in, and that others vary.
const M5MAX: &str = include_str!("../../profiles/m5max-128.json");

/// Physical parameters of a machine, as a data file. Times are in seconds, rates in bytes a second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Name, for reports.
    pub name: String,
    /// Where the numbers come from.
    pub source: String,
    /// The built-in profile that it varies; none for one of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub like: Option<String>,
    /// Memory of the machine in bytes.
    pub memory: u64,
    /// Bytes that the device keeps resident at most.
    pub working_set: u64,
    /// The system setting that raises it.
    pub working_set_setting: Option<String>,
    /// The largest allocation in bytes.
    pub allocation: u64,
    /// Sets that a queue takes; zero for a system without.
    pub sets: usize,
    /// Base cost of a submission.
    pub submit: f64,
    /// Cost of declaring one allocation for one submission.
    pub declare: f64,
    /// Share of the working set above which declaring for a submission makes the driver wire memory anew.
    pub rewire_share: f64,
    /// Cost of wiring a byte: a submission that declares more than the share wires what is above it, and one
    /// that comes after the removal of memory declared before wires all that it declares.
    pub rewire: f64,
    /// While the driver wires memory, everything else takes so much longer: seconds for each second of it.
    pub coupling: f64,
    /// Cost of making an allocation known to the device while it runs.
    pub register: f64,
    /// Cost of a commit.
    pub commit: f64,
    /// Cost of a commit for each member that its set then has.
    pub commit_member: f64,
    /// Bytes of weights that kernels read a second.
    pub kernel_rate: f64,
    /// Time after which a set that nothing used is no longer resident, in seconds; zero for never.
    pub unwire_after: f64,
    /// The drive, the page cache and the processor, for replays of whole runs.
    pub streaming: Streaming,
    /// How much longer everything takes on a machine of this class, by the machine's name; one where it is
    /// not named.
    pub sessions: BTreeMap<String, f64>,
    /// What replays run.
    pub workload: Workload,
}

/// A machine that is like another one but for some numbers.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Variation {
    name: String,
    source: String,
    like: String,
    /// Numbers by their place in the other's file, such as `streaming.drive_rate`.
    set: BTreeMap<String, Value>,
}

impl Variation {
    /// All numbers, as a profile has them.
    fn whole(self) -> Result<Value, ProfileError> {
        if self.like != "m5max-128" {
            return Err(ProfileError(format!("like is {}, and only m5max-128 is built in", self.like)));
        }
        let mut whole: Value = serde_json::from_str(M5MAX).map_err(ProfileError::of)?;
        for (place, value) in &self.set {
            let found = whole.pointer_mut(&format!("/{}", place.replace('.', "/")));
            let number = found.filter(|found| found.is_number() && value.is_number());
            let wrong = || ProfileError(format!("set has {place}: {value}, which is no number of it"));
            *number.ok_or_else(wrong)? = value.clone();
        }
        whole["name"] = self.name.into();
        whole["source"] = self.source.into();
        whole["like"] = self.like.into();
        Ok(whole)
    }
}

/// A profile that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a machine profile: {0}")]
pub struct ProfileError(String);

impl ProfileError {
    fn of(error: serde_json::Error) -> ProfileError {
        ProfileError(error.to_string())
    }
}

impl Profile {
    /// The profile that is built in.
    pub fn m5max() -> Profile {
        // A test reads it; see below.
        Profile::parse(M5MAX).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Reads a profile: all numbers of a machine, or `like` another one with some of them `set`.
    ///
    /// # Errors
    /// Text that is no JSON, lacks a key or has one too many, and numbers that no machine has.
    pub fn parse(text: &str) -> Result<Profile, ProfileError> {
        let mut value: Value = serde_json::from_str(text).map_err(ProfileError::of)?;
        if value.get("set").is_some() {
            value = serde_json::from_value::<Variation>(value).map_err(ProfileError::of)?.whole()?;
        }
        let profile: Profile = serde_json::from_value(value).map_err(ProfileError::of)?;
        match profile.flaw() {
            None => Ok(profile),
            Some(flaw) => Err(ProfileError(flaw)),
        }
    }

    /// What no machine is like.
    fn flaw(&self) -> Option<String> {
        let times = [
            ("submit", self.submit),
            ("declare", self.declare),
            ("rewire", self.rewire),
            ("rewire_share", self.rewire_share),
            ("coupling", self.coupling),
            ("register", self.register),
            ("commit", self.commit),
            ("commit_member", self.commit_member),
            ("unwire_after", self.unwire_after),
        ];
        if let Some((name, value)) = times.iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            return Some(format!("{name} is {value}, wanted zero or more"));
        }
        if !(self.kernel_rate.is_finite() && self.kernel_rate > 0.0) {
            return Some(format!("kernel_rate is {}, wanted more than zero", self.kernel_rate));
        }
        if self.memory > MOST_MEMORY {
            return Some(format!("memory is {}, wanted at most {MOST_MEMORY}", self.memory));
        }
        if self.working_set > self.memory {
            return Some(format!("working_set is {}, more than the memory", self.working_set));
        }
        if let Some((name, factor)) = self.sessions.iter().find(|(_, f)| !(f.is_finite() && **f > 0.0)) {
            return Some(format!("sessions.{name} is {factor}, wanted more than zero"));
        }
        self.streaming.flaw().or_else(|| self.workload.flaw())
    }

    /// Bytes that a submission may declare before the driver wires memory anew.
    pub(super) fn unwired(&self) -> f64 {
        self.rewire_share * self.working_set as f64
    }

    /// Seconds of a commit of a set that then has so many members.
    pub(super) fn commit_seconds(&self, members: usize) -> f64 {
        self.commit + self.commit_member * members as f64
    }

    /// How much longer everything takes on the machine of this name.
    pub fn session(&self, machine: &str) -> f64 {
        self.sessions.get(machine).copied().unwrap_or(1.0)
    }
}

/// A time in seconds as a duration: what overflows is the longest one, what is no time is none.
pub(super) fn time(seconds: f64) -> Duration {
    match seconds > 0.0 {
        true => Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX),
        false => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_profile_is_one_and_nonsense_is_not() {
        let profile = Profile::m5max();
        assert_eq!(profile.sets, 32);
        let text = serde_json::to_string(&profile).unwrap();
        assert_eq!(Profile::parse(&text).unwrap(), profile);
        for (from, to) in
            [("\"sets\":32,", ""), ("\"submit\":", "\"submit\":-"), ("\"sets\":32", "\"sets\":32,\"x\":1")]
        {
            assert!(text.contains(from), "{from}");
            assert!(Profile::parse(&text.replace(from, to)).is_err(), "{from} → {to}");
        }
        let refused = |change: &dyn Fn(&mut Profile)| {
            let mut changed = profile.clone();
            change(&mut changed);
            Profile::parse(&serde_json::to_string(&changed).unwrap()).unwrap_err().to_string()
        };
        assert!(refused(&|p| p.kernel_rate = 0.0).contains("kernel_rate"));
        assert!(refused(&|p| p.streaming.drive_rate = 0.0).contains("drive_rate"));
        assert!(refused(&|p| p.workload.experts = 1 << 30).contains("experts"));
        assert!(refused(&|p| p.workload.top_k = p.workload.experts + 1).contains("top_k"));
        assert!(refused(&|p| p.workload.hit_slots = 0.0).contains("hit_slots"));
        assert!(refused(&|p| p.memory = u64::MAX).contains("memory"));
        assert!(refused(&|p| p.sessions.insert("A".into(), 0.0).map_or((), drop)).contains("sessions.A"));
    }

    #[test]
    fn a_machine_is_described_by_what_differs() {
        let text = include_str!("../../profiles/half-m5max.json");
        let (half, whole) = (Profile::parse(text).unwrap(), Profile::m5max());
        assert_eq!((half.name.as_str(), half.like.as_deref()), ("half-m5max", Some("m5max-128")));
        assert_eq!(half.memory * 2, whole.memory);
        assert!(half.streaming.drive_rate < 0.6 * whole.streaming.drive_rate);
        assert_eq!((half.submit, half.workload.clone()), (whole.submit, whole.workload));
        // Written out it is the same machine, and says still what it is like.
        assert_eq!(Profile::parse(&serde_json::to_string(&half).unwrap()).unwrap(), half);
        let refused = |set: &str| {
            let text = format!(r#"{{"name": "x", "source": "y", "like": "m5max-128", "set": {set}}}"#);
            Profile::parse(&text).unwrap_err().to_string()
        };
        assert!(refused(r#"{"streaming.drive": 1}"#).contains("streaming.drive"));
        assert!(refused(r#"{"name": 1}"#).contains("name"));
        assert!(refused(r#"{"submit": "1"}"#).contains("submit"));
        assert!(refused(r#"{"submit": -1}"#).contains("submit is -1"));
        assert!(refused(r#"{"memory": 1000000000}"#).contains("working_set"));
        let text = text.replace("m5max-128", "m9");
        assert!(Profile::parse(&text).unwrap_err().to_string().contains("m9"));
    }
}
