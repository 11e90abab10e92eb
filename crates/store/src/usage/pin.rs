//! Which experts to pin, and how many: what a replay of the usage profile's sample says.
//!
//! Pinned experts and the cache share one room. For each of nine shares of it the hottest experts are pinned
//! and the sample is replayed with the rest as cache; the share with the fewest bytes read wins, of equal
//! ones the least pinned. Nothing looks ahead: the first half of the sample warms the cache, the second is
//! judged, and the experts that are pinned for the judgement are ranked by counts without that second half.
//! The experts that are then really pinned are ranked by all counts.

use super::{ONE, UsageIdentity, UsageProfile};
use crate::policy::PolicyKind;
use crate::trace::{Rule, Scope, replay_pinned};

/// Shares of the room that are tried, in sixteenths.
pub const SHARES: [u64; 9] = [0, 1, 2, 4, 6, 8, 10, 12, 14];

/// Tokens that must be judged for a choice to mean anything.
pub const LEAST_JUDGED: usize = 32;

/// What pinned experts and the cache have together.
#[derive(Clone, Debug)]
pub struct PinRoom {
    /// Bytes of an expert's slot in each of the profile's layers.
    pub slot_bytes: Vec<u64>,
    /// Bytes that pinned and cached slots may take together.
    pub room: u64,
    /// The policy of the cache.
    pub policy: PolicyKind,
    /// Whether the cache is one pool for all layers.
    pub pool: bool,
}

/// What a share of the room would have given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Bytes pinned.
    pub bytes: u64,
    /// Experts pinned.
    pub experts: usize,
    /// Uses that were judged.
    pub selections: u64,
    /// Of these, found pinned or cached.
    pub hits: u64,
    /// Bytes of the others.
    pub missed_bytes: u64,
}

/// Experts to pin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PinPlan {
    /// (layer number, expert), hottest first.
    pub pinned: Vec<(u32, u32)>,
    /// Bytes of their slots.
    pub bytes: u64,
    /// What was tried, the least pinned first; empty where nothing was.
    pub candidates: Vec<Candidate>,
    /// Tokens that were judged.
    pub judged: usize,
}

/// Chooses what to pin by replaying the profile's sample. With fewer than [`LEAST_JUDGED`] tokens to judge
/// on, nothing is pinned.
pub fn choose(profile: &UsageProfile, room: &PinRoom) -> PinPlan {
    let tokens = profile.sample.tokens.len();
    let from = tokens / 2;
    let judged = tokens - from;
    if judged < LEAST_JUDGED || room.slot_bytes.len() != profile.identity.layers.len() {
        return PinPlan { judged, ..PinPlan::default() };
    }
    let trace = profile.sample.trace(&profile.identity, &room.slot_bytes, from);
    let mut known = profile.counts.clone();
    for (layer, expert) in profile.sample.uses(from) {
        let count = &mut known[profile.first[layer] + expert as usize];
        // The sample may be older than the last save, and so have faded: then this takes a little much.
        *count = count.saturating_sub(ONE);
    }
    let ranking = ranked(&profile.identity, &known, &room.slot_bytes);
    let scope = if room.pool { Scope::Pool } else { Scope::Layers };
    let candidate = |share: u64| {
        let limit = (u128::from(room.room) * u128::from(share) / 16) as u64;
        let (pinned, bytes) = fill(&profile.identity, &ranking, &room.slot_bytes, limit);
        let rule = Rule::Policy(room.policy);
        let counts = replay_pinned(&trace, rule, scope, room.room - bytes, &pinned).decode;
        let (selections, hits, missed_bytes) = (counts.selections, counts.hits, counts.missed_bytes);
        Candidate { bytes, experts: pinned.len(), selections, hits, missed_bytes }
    };
    let candidates: Vec<Candidate> = SHARES.into_iter().map(candidate).collect();
    // The first of equal ones, which is the least pinned.
    let best = candidates.iter().min_by_key(|candidate| candidate.missed_bytes).map_or(0, |best| best.bytes);
    let ranking = ranked(&profile.identity, &profile.counts, &room.slot_bytes);
    let (pinned, bytes) = fill(&profile.identity, &ranking, &room.slot_bytes, best);
    PinPlan { pinned, bytes, candidates, judged }
}

/// Of a ranking, as many of the first as fit `limit`, with their bytes. An expert that does not fit any more
/// is passed over: one of another layer may be smaller.
pub fn fill(
    identity: &UsageIdentity,
    ranking: &[(u32, u32)],
    slot_bytes: &[u64],
    limit: u64,
) -> (Vec<(u32, u32)>, u64) {
    let mut pinned = Vec::new();
    let mut sum = 0u64;
    for &(number, expert) in ranking {
        let bytes = identity.index(number).and_then(|at| slot_bytes.get(at));
        let Some(new) = bytes.and_then(|&bytes| sum.checked_add(bytes)).filter(|&new| new <= limit) else {
            continue;
        };
        sum = new;
        pinned.push((number, expert));
    }
    (pinned, sum)
}

/// Experts with a count, by count a byte, the greatest first.
pub(super) fn ranked(identity: &UsageIdentity, counts: &[u64], slot_bytes: &[u64]) -> Vec<(u32, u32)> {
    let layers = identity.layers.iter().zip(identity.first()).zip(slot_bytes);
    let mut experts: Vec<(u64, u64, u32, u32)> = layers
        .flat_map(|((&(number, experts), first), &bytes)| {
            (0..experts).map(move |expert| (counts[first + expert as usize], bytes.max(1), number, expert))
        })
        .filter(|&(count, ..)| count > 0)
        .collect();
    experts.sort_unstable_by(|a, b| {
        let (left, right) = (u128::from(a.0) * u128::from(b.1), u128::from(b.0) * u128::from(a.1));
        right.cmp(&left).then((a.2, a.3).cmp(&(b.2, b.3)))
    });
    experts.into_iter().map(|(_, _, number, expert)| (number, expert)).collect()
}
