//! What the process may have: control groups, resource limits, io_uring.

use std::fs;

use metaltail_store::probe::uring_works;
use metaltail_store::{CgroupLevel, Machine};
use serde_json::{Value, json};

use crate::report::bytes as size;

/// A resource limit; `None` is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What holds now.
    pub soft: Option<u64>,
    /// What it can be raised to.
    pub hard: Option<u64>,
}

/// All limits.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Control groups with a memory limit, with what each leaves to this process.
    pub groups: Vec<(CgroupLevel, u64)>,
    /// RLIMIT_AS in bytes.
    pub address_space: Option<Limit>,
    /// RLIMIT_NOFILE.
    pub open_files: Option<Limit>,
    /// RLIMIT_MEMLOCK in bytes.
    pub locked_memory: Option<Limit>,
    /// Why io_uring does not work here; `None` where it does.
    pub uring_refused: Option<String>,
}

impl Limits {
    /// Looks at this process.
    pub fn probe(machine: &Machine) -> Limits {
        let text = fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let groups = machine.cgroups.iter().map(|level| {
            let others = level.used.saturating_sub(machine.own_anon);
            (level.clone(), level.limit.saturating_sub(others))
        });
        Limits {
            groups: groups.collect(),
            address_space: limit(&text, "Max address space"),
            open_files: limit(&text, "Max open files"),
            locked_memory: limit(&text, "Max locked memory"),
            uring_refused: uring_works().err(),
        }
    }

    /// As JSON.
    pub fn to_json(&self) -> Value {
        let limit = |limit: Option<Limit>| limit.map(|l| json!({"soft": l.soft, "hard": l.hard}));
        let groups = self.groups.iter().map(|(level, room)| {
            json!({"path": level.path.to_string_lossy(), "limit": level.limit, "used": level.used, "leaves": room})
        });
        json!({
            "cgroups": groups.collect::<Vec<_>>(),
            "address_space": limit(self.address_space),
            "open_files": limit(self.open_files),
            "locked_memory": limit(self.locked_memory),
            "io_uring": {"works": self.uring_refused.is_none(), "reason": self.uring_refused},
        })
    }

    /// Rows for people.
    pub fn rows(&self) -> Vec<[String; 2]> {
        let plain = |n: u64| n.to_string();
        let words = |limit: Option<Limit>, unit: &dyn Fn(u64) -> String| match limit {
            None => "not told".to_owned(),
            Some(limit) => {
                let one = |value: Option<u64>| value.map_or("unlimited".to_owned(), unit);
                format!("{} (at most {})", one(limit.soft), one(limit.hard))
            }
        };
        let mut rows: Vec<[String; 2]> = self
            .groups
            .iter()
            .map(|(level, room)| {
                let text =
                    format!("{} of {}, leaves {}", level.path.display(), size(level.limit), size(*room));
                ["cgroup".into(), text]
            })
            .collect();
        if rows.is_empty() {
            rows.push(["cgroup".into(), "none limits memory".into()]);
        }
        rows.push([
            "limits".into(),
            format!(
                "address space {}, open files {}, locked memory {}; --mlock on may lock that much unless privileged",
                words(self.address_space, &size),
                words(self.open_files, &plain),
                words(self.locked_memory, &size)
            ),
        ]);
        let uring = self.uring_refused.as_deref().map_or("works", |reason| reason);
        rows.push(["io_uring".into(), uring.to_owned()]);
        rows
    }
}

/// A line of /proc/self/limits: name, soft, hard, perhaps a unit.
fn limit(text: &str, name: &str) -> Option<Limit> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    let mut words = rest.split_whitespace();
    let value = |word: &str| match word {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    };
    Some(Limit { soft: value(words.next()?)?, hard: value(words.next()?)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_numbers_or_none() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max open files            1024                 524288               files     \n\
                    Max address space         unlimited            unlimited            bytes     \n";
        assert_eq!(limit(text, "Max open files"), Some(Limit { soft: Some(1024), hard: Some(524_288) }));
        assert_eq!(limit(text, "Max address space"), Some(Limit { soft: None, hard: None }));
        assert_eq!(limit(text, "Max locked memory"), None);
    }
}
