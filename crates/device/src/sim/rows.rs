//! Published measurements, as a data file, and what is run to replay each of them.
//!
//! The rows do not say everything. What is filled in, and why, stands in [`Row::run`] and nowhere else.

use super::profile::Profile;
use super::replay::{Growth, Run};
use crate::residency::{Mode, SlabAllocation};

/// The file: others' measurements, none of this project.
const FILE: &str = include_str!("../../profiles/residency-rows.csv");

/// How a row's memory was declared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Declared {
    /// With every submission.
    PerSubmit,
    /// In a residency set.
    Once,
    /// Allocated from one heap, which is declared with every submission.
    OneHeap,
}

/// A published measurement. What was not published is none.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The machine, by a letter.
    pub machine: String,
    /// Memory budget in 10⁹ bytes.
    pub ram: u64,
    /// Slots a layer that were asked for.
    pub cap: Option<usize>,
    /// Whether the cache grew while decoding.
    pub growth: Option<bool>,
    /// Experts pinned.
    pub pinned: Option<usize>,
    /// Whether experts were loaded beside the computing.
    pub async_loaders: Option<bool>,
    /// How memory was declared.
    pub declared: Declared,
    /// Tokens a second.
    pub tokens_per_second: Option<f64>,
    /// Share of the selections that were in memory.
    pub hits: Option<f64>,
    /// Seconds in which the device had work and computed nothing.
    pub stall: Option<f64>,
    /// Seconds in kernels.
    pub kernel: Option<f64>,
    /// Seconds of waiting for experts.
    pub disk_wait: Option<f64>,
    /// Seconds in commits.
    pub flush: Option<f64>,
    /// What was said of it.
    pub note: String,
}

/// A file that holds no rows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a table of published rows: line {line}: {reason}")]
pub struct RowsError {
    line: usize,
    reason: String,
}

/// The rows that are built in.
pub fn published() -> Vec<Row> {
    // A test reads them.
    parse(FILE).unwrap_or_else(|error| panic!("{error}"))
}

const HEADER: &str = "machine,ram_gb,cap,growth,pinned_experts,async_loaders,declared,tok_s,hit_pct,stall_s,gpu_wall_s,kernel_s,disk_wait_s,flush_s,note";

/// Reads rows: comments begin with `#`, the first other line names the columns, empty cells were not published.
///
/// # Errors
/// Other columns, and cells that are no such values; the line is named.
pub fn parse(text: &str) -> Result<Vec<Row>, RowsError> {
    let lines = text.lines().enumerate().map(|(n, line)| (n + 1, line.trim_end()));
    let mut lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    match lines.next() {
        Some((_, HEADER)) => {}
        Some((line, _)) => return Err(RowsError { line, reason: format!("wanted the columns {HEADER}") }),
        None => return Err(RowsError { line: 1, reason: "it is empty".into() }),
    }
    lines.map(|(line, text)| row(text).map_err(|reason| RowsError { line, reason })).collect()
}

fn row(text: &str) -> Result<Row, String> {
    let cells: Vec<&str> = text.splitn(15, ',').collect();
    let [
        machine,
        ram,
        cap,
        growth,
        pinned,
        loaders,
        declared,
        speed,
        hits,
        stall,
        _,
        kernel,
        disk,
        flush,
        note,
    ] = cells[..]
    else {
        return Err(format!("{} cells, wanted 15", cells.len()));
    };
    Ok(Row {
        machine: machine.to_owned(),
        ram: cell("ram_gb", ram)?.ok_or("ram_gb is empty")?,
        cap: cell("cap", cap)?,
        growth: choice("growth", growth, [("off", false), ("on", true)])?,
        pinned: cell("pinned_experts", pinned)?,
        async_loaders: choice("async_loaders", loaders, [("no", false), ("yes", true)])?,
        declared: choice(
            "declared",
            declared,
            [("per_submit", Declared::PerSubmit), ("once", Declared::Once), ("one_heap", Declared::OneHeap)],
        )?
        .ok_or("declared is empty")?,
        tokens_per_second: positive("tok_s", speed)?,
        hits: positive("hit_pct", hits)?.map(|percent| percent / 100.0),
        stall: positive("stall_s", stall)?,
        kernel: positive("kernel_s", kernel)?,
        disk_wait: positive("disk_wait_s", disk)?,
        flush: positive("flush_s", flush)?,
        note: note.to_owned(),
    })
}

fn cell<T: std::str::FromStr>(name: &str, text: &str) -> Result<Option<T>, String> {
    match text {
        "" => Ok(None),
        _ => text.parse().map(Some).map_err(|_| format!("{name} is {text}")),
    }
}

fn positive(name: &str, text: &str) -> Result<Option<f64>, String> {
    match cell::<f64>(name, text)? {
        Some(value) if !(value.is_finite() && value > 0.0) => Err(format!("{name} is {text}")),
        value => Ok(value),
    }
}

fn choice<T: Copy, const N: usize>(name: &str, text: &str, all: [(&str, T); N]) -> Result<Option<T>, String> {
    let found = all.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
    match (found, text) {
        (None, "") => Ok(None),
        (None, _) => Err(format!("{name} is {text}")),
        (found, _) => Ok(found),
    }
}

/// Slots a layer of machine B's static cache, of which everything else about its memory follows.
const B_SLOTS: usize = 34;
/// Its usual memory budget in 10⁹ bytes.
const B_RAM: u64 = 113;
/// Share of its selections that were pinned.
const B_PINNED: f64 = 0.4;

impl Row {
    /// Its name in reports: machine, budget and cap.
    pub fn name(&self) -> String {
        let cap = self.cap.map_or("auto".to_owned(), |cap| cap.to_string());
        let words = [
            format!("{} {} GB, cap {cap}", self.machine, self.ram),
            if self.growth == Some(true) { ", growing".into() } else { String::new() },
            self.pinned.filter(|&n| n > 0).map_or(String::new(), |n| format!(", {n} pinned")),
            if self.async_loaders == Some(true) { ", async".into() } else { String::new() },
        ];
        words.concat()
    }

    /// How memory was declared, in words.
    pub fn declared_words(&self) -> &'static str {
        match self.declared {
            Declared::PerSubmit => "per submit",
            Declared::Once => "once",
            Declared::OneHeap => "one heap",
        }
    }

    /// Rows of one session, whose speeds are compared. Machine A ran its control twice, 2.09 tokens/s with
    /// one budget and 2.30 with the other: these are two sessions.
    pub fn same_session(&self, other: &Row) -> bool {
        self.machine == other.machine && (self.machine != "A" || self.ram == other.ram)
    }

    /// What is run to replay it; none for memory from one heap, which this project does not have. The
    /// published system had one set and an allocation an expert.
    ///
    /// What the rows leave open is taken to be so:
    /// * A cap that the budget does not allow is what the budget allows. An empty one too; nothing grows then.
    /// * Machine B pinned 40 % of its selections, in what its budget leaves beside 34 slots a layer. Its kernel
    ///   time is 0.6 of machine A's, and 98 GB declared would be past where machine A collapsed at 74: so
    ///   its pinned experts are taken to be neither declared nor computed on the device.
    /// * A cache that grows does so once, layer by layer, to 34 slots; the layer's slab is registered anew.
    pub fn run(&self, profile: &Profile) -> Option<Run> {
        let mode = match self.declared {
            Declared::PerSubmit => Mode::Walk,
            Declared::Once => Mode::Set,
            Declared::OneHeap => return None,
        };
        let workload = &profile.workload;
        let bytes = |gigabytes: u64| gigabytes.saturating_mul(1_000_000_000);
        let other = self.machine == "B";
        let apart =
            if other { workload.room(bytes(B_RAM)).saturating_sub(B_SLOTS * workload.layers) } else { 0 };
        let pinned = self.pinned.unwrap_or(0);
        let allowed = workload.room(bytes(self.ram)).saturating_sub(pinned + apart) / workload.layers;
        let slots = self.cap.unwrap_or(allowed).clamp(1, allowed.max(1));
        let grows = self.growth == Some(true) && self.cap.is_some() && slots < B_SLOTS.min(allowed);
        Some(Run {
            machine: self.machine.clone(),
            slots,
            growth: grows.then_some(Growth { after: 16, slots: B_SLOTS.min(allowed) }),
            pinned,
            apart,
            device_share: if other { 1.0 - B_PINNED } else { 1.0 },
            mode,
            slabs: SlabAllocation::PerExpert,
            sets: Some(1),
            async_loaders: self.async_loaders == Some(true),
            direct: other,
            hits: self.hits,
            ..Run::new(slots)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_rows_are_read() {
        let rows = published();
        assert_eq!(rows.len(), 26);
        assert_eq!(rows.iter().filter(|row| row.tokens_per_second.is_some()).count(), 25);
        let collapsed = &rows[4];
        assert_eq!((collapsed.cap, collapsed.declared), (Some(64), Declared::PerSubmit));
        assert_eq!((collapsed.tokens_per_second, collapsed.kernel), (Some(0.89), Some(15.5)));
    }

    #[test]
    fn what_is_no_table_is_refused_with_its_line() {
        for (text, wanted) in [
            (String::new(), "line 1: it is empty"),
            ("a,b".into(), "line 1: wanted the columns"),
            (format!("# x\n{HEADER}\nA,90,1"), "line 3: 3 cells"),
            (format!("{HEADER}\nA,90,x,off,0,no,once,,,,,,,,"), "line 2: cap is x"),
            (format!("{HEADER}\nA,90,1,up,0,no,once,,,,,,,,"), "line 2: growth is up"),
            (format!("{HEADER}\nA,90,1,off,0,no,,,,,,,,,"), "line 2: declared is empty"),
            (format!("{HEADER}\nA,90,1,off,0,no,once,-2,,,,,,,"), "line 2: tok_s is -2"),
            (format!("{HEADER}\nA,90,1,off,0,no,once,nan,,,,,,,"), "line 2: tok_s is nan"),
        ] {
            let error = parse(&text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error} for {wanted}");
        }
    }

    #[test]
    fn what_the_budget_does_not_allow_is_cut_to_it() {
        let profile = Profile::m5max();
        let slots = |row: usize| published()[row].run(&profile).unwrap().slots;
        // Machine A, cap 64 in 90 GB: 3,900 experts of the 3,800 to 4,100 that were estimated.
        assert_eq!(slots(4), 52);
        // Machine B, cap 64 in 113 GB, which was published to be 34.
        assert_eq!(slots(14), 34);
    }
}
