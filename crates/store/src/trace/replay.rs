//! Replaying a trace on a policy.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use super::{Trace, TracePhase, TraceRow};
use crate::policy::{ExpertId, PolicyKind, PolicyShape, Replacement, Share};

/// What chooses the expert to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// A policy.
    Policy(PolicyKind),
    /// The expert whose next use is the farthest away (Belady, 1966): the best that can be done
    /// where all experts are of one size, and knowable only afterwards.
    Belady,
}

/// What shares a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All layers.
    Pool,
    /// Each layer has an equal part.
    Layers,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rule::Policy(kind) => f.write_str(kind.name()),
            Rule::Belady => f.write_str("belady"),
        }
    }
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(name: &str) -> Result<Rule, String> {
        match name {
            "belady" => Ok(Rule::Belady),
            name => name.parse().map(Rule::Policy).map_err(|error| format!("{error}, or belady")),
        }
    }
}

/// What a replay counted in one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Uses.
    pub selections: u64,
    /// Of these, found.
    pub hits: u64,
    /// Bytes of the experts that were not.
    pub missed_bytes: u64,
}

impl Counts {
    /// Hits a selection; 0 without any.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.selections.max(1) as f64
    }
}

/// What a replay counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Played {
    /// In prefill, which begins with an empty cache.
    pub prefill: Counts,
    /// In decode.
    pub decode: Counts,
}

/// Replays a trace: row by row, with a cache of `cache_bytes` that is empty at first.
///
/// Experts of the rows that are computed together are never victims until all of them were used: while
/// the limit is smaller than these, it is exceeded so long.
pub fn replay(trace: &Trace, rule: Rule, scope: Scope, cache_bytes: u64) -> Played {
    replay_pinned(trace, rule, scope, cache_bytes, &[])
}

/// [`replay`] beside experts that are always there, as (layer number, expert): they are found at every use,
/// the policy hears of their uses, and they take nothing of `cache_bytes`. Experts that the trace does not
/// name are passed over.
pub fn replay_pinned(
    trace: &Trace,
    rule: Rule,
    scope: Scope,
    cache_bytes: u64,
    always: &[(u32, u32)],
) -> Played {
    let layers = trace.layers.len();
    let (scopes, limit) = match scope {
        Scope::Pool => (1, cache_bytes),
        Scope::Layers => (layers, cache_bytes / layers.max(1) as u64),
    };
    let experts: Vec<usize> = trace.layers.iter().map(|layer| layer.experts).collect();
    let mut first = Vec::with_capacity(layers);
    let mut slots = 0;
    for &count in &experts {
        first.push(slots);
        slots += count;
    }
    let mut pinned = vec![false; slots];
    for &(number, expert) in always {
        let layer = trace.layers.iter().position(|layer| layer.number == number);
        if let Some(layer) = layer.filter(|&layer| (expert as usize) < experts[layer]) {
            pinned[first[layer] + expert as usize] = true;
        }
    }
    let policy: Box<dyn Replacement> = match rule {
        Rule::Policy(kind) => kind.build(&PolicyShape { scopes, slots, experts }),
        Rule::Belady => Box::new(Belady::new(trace, &first, scopes, slots)),
    };
    let cache = Cache {
        trace,
        policy,
        first,
        limit,
        kept: vec![false; slots],
        pinned,
        used: vec![0; scopes],
        groups: vec![None; slots],
    };
    cache.play()
}

/// The cache that is replayed on: expert `e` of layer `l` has slot `first[l] + e` to itself.
struct Cache<'t> {
    trace: &'t Trace,
    policy: Box<dyn Replacement>,
    first: Vec<usize>,
    limit: u64,
    kept: Vec<bool>,
    /// What is there without being kept.
    pinned: Vec<bool>,
    /// Bytes of each scope.
    used: Vec<u64>,
    /// The last group that a slot belonged to.
    groups: Vec<Option<u32>>,
}

impl Cache<'_> {
    fn play(mut self) -> Played {
        let mut played = Played::default();
        let trace = self.trace;
        for rows in trace.rows.chunk_by(|a, b| a.group == b.group) {
            self.protect(rows);
            for row in rows {
                self.policy.step(row.layer);
                let counts = match row.phase {
                    TracePhase::Prefill => &mut played.prefill,
                    TracePhase::Decode => &mut played.decode,
                };
                for selection in &trace.selections[row.selections.clone()] {
                    let id = ExpertId { layer: row.layer, expert: selection.expert };
                    counts.selections += 1;
                    match self.look_up(id, selection.share, row.group) {
                        true => counts.hits += 1,
                        false => counts.missed_bytes += trace.layers[row.layer as usize].expert_bytes,
                    }
                }
            }
            if let Some(row) = rows.first() {
                self.trim(self.scope(row.layer), None);
            }
        }
        played
    }

    fn scope(&self, layer: u32) -> u32 {
        if self.used.len() == 1 { 0 } else { layer }
    }

    fn protect(&mut self, rows: &[TraceRow]) {
        for row in rows {
            for selection in &self.trace.selections[row.selections.clone()] {
                self.groups[self.first[row.layer as usize] + selection.expert as usize] = Some(row.group);
            }
        }
    }

    /// Whether the expert was there; it is afterwards.
    fn look_up(&mut self, id: ExpertId, share: Share, group: u32) -> bool {
        let slot = self.first[id.layer as usize] + id.expert as usize;
        let scope = self.scope(id.layer);
        self.policy.requested(id, share);
        if self.pinned[slot] {
            return true;
        }
        if self.kept[slot] {
            self.policy.touched(scope, slot as u32);
            return true;
        }
        self.kept[slot] = true;
        self.policy.inserted(scope, slot as u32, id);
        self.used[scope as usize] += self.bytes(slot);
        self.trim(scope, Some(group));
        false
    }

    /// Evicts until the limit holds, but nothing of the group.
    fn trim(&mut self, scope: u32, group: Option<u32>) {
        while self.used[scope as usize] > self.limit {
            let groups = &self.groups;
            let evictable = |slot: u32| group.is_none() || groups[slot as usize] != group;
            let Some(victim) = self.policy.victim(scope, &evictable) else { return };
            self.policy.removed(scope, victim);
            self.kept[victim as usize] = false;
            self.used[scope as usize] -= self.bytes(victim as usize);
        }
    }

    fn bytes(&self, slot: usize) -> u64 {
        let layer = self.first.partition_point(|&first| first <= slot) - 1;
        self.trace.layers[layer].expert_bytes
    }
}

/// Belady's rule as a policy that knows the trace. A call takes O(log slots).
struct Belady {
    /// For each use in order: when its expert is used next.
    next: Vec<usize>,
    /// The use that is looked up.
    now: usize,
    /// When each slot is used next.
    dates: Vec<usize>,
    queues: Vec<BTreeSet<(usize, u32)>>,
}

impl Belady {
    fn new(trace: &Trace, first: &[usize], scopes: usize, slots: usize) -> Belady {
        let mut next = vec![usize::MAX; trace.selections.len()];
        let mut later = vec![usize::MAX; slots];
        for row in trace.rows.iter().rev() {
            for at in row.selections.clone().rev() {
                let slot = first[row.layer as usize] + trace.selections[at].expert as usize;
                next[at] = std::mem::replace(&mut later[slot], at);
            }
        }
        Belady { next, now: 0, dates: vec![0; slots], queues: vec![BTreeSet::new(); scopes] }
    }
}

impl Replacement for Belady {
    fn requested(&mut self, _id: ExpertId, _share: Share) {
        self.now += 1;
    }

    fn inserted(&mut self, scope: u32, slot: u32, _id: ExpertId) {
        let date = self.next[self.now - 1];
        self.dates[slot as usize] = date;
        self.queues[scope as usize].insert((date, slot));
    }

    fn touched(&mut self, scope: u32, slot: u32) {
        self.removed(scope, slot);
        self.inserted(scope, slot, ExpertId { layer: 0, expert: 0 });
    }

    fn removed(&mut self, scope: u32, slot: u32) {
        self.queues[scope as usize].remove(&(self.dates[slot as usize], slot));
    }

    fn grow(&mut self, slots: usize) {
        self.dates.resize(slots, 0);
    }

    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        self.queues[scope as usize].iter().rev().map(|&(_, slot)| slot).find(|&slot| evictable(slot))
    }
}
