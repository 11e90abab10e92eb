//! What the operating system counted for this process: the check on our own counters.

use serde::{Deserialize, Serialize};

/// Counters since the process began; what the system does not tell is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemCounters {
    /// Bytes read from drives.
    pub drive_bytes: Option<u64>,
    /// Bytes that read calls returned, from wherever.
    pub call_bytes: Option<u64>,
    /// Read calls.
    pub calls: Option<u64>,
    /// Page faults that had to read.
    pub major_faults: Option<u64>,
    /// Page faults that did not.
    pub minor_faults: Option<u64>,
}

impl SystemCounters {
    /// The counters of this process now.
    pub fn now() -> SystemCounters {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        SystemCounters::parse(&read("/proc/self/io"), &read("/proc/self/stat"))
    }

    fn parse(io: &str, stat: &str) -> SystemCounters {
        let field = |name: &str| {
            let line = io.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.trim().parse().ok()
        };
        // The program's name may hold blanks and brackets; after it come the state and, as the 10th
        // and 12th fields of the line, minor and major faults.
        let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let faults = |place: usize| after_name.split_whitespace().nth(place)?.parse().ok();
        SystemCounters {
            drive_bytes: field("read_bytes"),
            call_bytes: field("rchar"),
            calls: field("syscr"),
            major_faults: faults(9),
            minor_faults: faults(7),
        }
    }

    /// What was counted since `before`.
    pub fn since(&self, before: &SystemCounters) -> SystemCounters {
        let less = |now: Option<u64>, then: Option<u64>| Some(now?.saturating_sub(then?));
        SystemCounters {
            drive_bytes: less(self.drive_bytes, before.drive_bytes),
            call_bytes: less(self.call_bytes, before.call_bytes),
            calls: less(self.calls, before.calls),
            major_faults: less(self.major_faults, before.major_faults),
            minor_faults: less(self.minor_faults, before.minor_faults),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_behind_any_name() {
        let io = "rchar: 70\nwchar: 1\nsyscr: 3\nsyscw: 1\nread_bytes: 4096\n";
        let stat = "1 (a b) c) S 1 2 3 4 5 6 700 8 9 10 11\n";
        let counters = SystemCounters::parse(io, stat);
        assert_eq!(
            (counters.call_bytes, counters.calls, counters.drive_bytes),
            (Some(70), Some(3), Some(4096))
        );
        assert_eq!((counters.minor_faults, counters.major_faults), (Some(700), Some(9)));
        assert_eq!(SystemCounters::parse("", ""), SystemCounters::default());
    }

    #[test]
    fn differences_need_both_ends() {
        let after = SystemCounters { calls: Some(9), drive_bytes: Some(2), ..SystemCounters::default() };
        let before = SystemCounters { calls: Some(4), ..SystemCounters::default() };
        let difference = after.since(&before);
        assert_eq!((difference.calls, difference.drive_bytes), (Some(5), None));
    }
}
