//! Every policy against a plain reference, under random calls.

use super::*;
use proptest::prelude::*;

/// Layers, which are the scopes too.
const LAYERS: u32 = 2;
const EXPERTS: u32 = 6;
const SLOTS: u32 = LAYERS * EXPERTS;

/// A policy told plainly. `order` lists a scope's kept slots, those to evict first at the front.
trait Plain {
    fn step(&mut self, _layer: u32) {}
    fn requested(&mut self, _id: ExpertId, _share: Share) {}
    fn inserted(&mut self, slot: u32);
    fn touched(&mut self, slot: u32);
    fn removed(&mut self, slot: u32);
    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32>;
}

/// Slot `s` keeps expert `s / 2` of layer `s % 2`, in scope `s % scopes`.
fn id(slot: u32) -> ExpertId {
    ExpertId { layer: slot % LAYERS, expert: slot / LAYERS }
}

fn shape(scopes: usize) -> PolicyShape {
    PolicyShape { scopes, slots: SLOTS as usize, experts: vec![EXPERTS as usize; LAYERS as usize] }
}

fn compare(
    kind: PolicyKind,
    scopes: u32,
    mut plain: impl Plain,
    ops: &[(u8, u32, u32)],
) -> Result<(), TestCaseError> {
    let mut policy = kind.build(&shape(scopes as usize));
    let mut kept = [false; SLOTS as usize];
    for &(op, slot, share) in ops {
        let scope = slot % scopes;
        match op {
            0..3 => {
                let share = Share(share);
                policy.requested(id(slot), share);
                plain.requested(id(slot), share);
                if std::mem::replace(&mut kept[slot as usize], true) {
                    policy.touched(scope, slot);
                    plain.touched(slot);
                } else {
                    policy.inserted(scope, slot, id(slot));
                    plain.inserted(slot);
                }
            }
            3 => {
                let wanted = plain.victim(scope, &|s| s % 5 != share % 5);
                let got = policy.victim(scope, &|s| s % 5 != share % 5);
                prop_assert_eq!(got, wanted);
                let Some(slot) = got else { continue };
                prop_assert!(kept[slot as usize] && slot % scopes == scope);
                kept[slot as usize] = false;
                policy.removed(scope, slot);
                plain.removed(slot);
            }
            4 if kept[slot as usize] => {
                kept[slot as usize] = false;
                policy.removed(scope, slot);
                plain.removed(slot);
            }
            _ => {
                // Short and long pauses.
                for _ in 0..if share % 16 == 0 { share } else { 1 } {
                    policy.step(slot % LAYERS);
                    plain.step(slot % LAYERS);
                }
            }
        }
    }
    // Everything leaves, in the same order.
    for scope in 0..scopes {
        while let Some(slot) = policy.victim(scope, &|_| true) {
            prop_assert_eq!(Some(slot), plain.victim(scope, &|_| true));
            policy.removed(scope, slot);
            plain.removed(slot);
            kept[slot as usize] = false;
        }
    }
    prop_assert!(kept.iter().all(|&kept| !kept), "a kept slot was never named");
    Ok(())
}

/// Kept slots of each scope in an order; what LRU, SLRU and SIEVE are made of.
struct Rows {
    scopes: u32,
    rows: Vec<Vec<u32>>,
}

impl Rows {
    fn new(scopes: u32) -> Rows {
        Rows { scopes, rows: vec![Vec::new(); scopes as usize] }
    }
    fn of(&mut self, slot: u32) -> &mut Vec<u32> {
        &mut self.rows[(slot % self.scopes) as usize]
    }
}

struct PlainLru(Rows);

impl Plain for PlainLru {
    fn inserted(&mut self, slot: u32) {
        self.0.of(slot).push(slot);
    }
    fn touched(&mut self, slot: u32) {
        self.removed(slot);
        self.inserted(slot);
    }
    fn removed(&mut self, slot: u32) {
        self.0.of(slot).retain(|&s| s != slot);
    }
    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        self.0.of(scope).iter().copied().find(|&s| evictable(s))
    }
}

struct PlainSlru {
    probation: Rows,
    protected: Rows,
}

impl PlainSlru {
    fn balance(&mut self, slot: u32) {
        let kept = self.probation.of(slot).len() + self.protected.of(slot).len();
        while self.protected.of(slot).len() > kept * 4 / 5 {
            let fallen = self.protected.of(slot).remove(0);
            self.probation.of(slot).push(fallen);
        }
    }
}

impl Plain for PlainSlru {
    fn inserted(&mut self, slot: u32) {
        self.probation.of(slot).push(slot);
    }
    fn touched(&mut self, slot: u32) {
        self.probation.of(slot).retain(|&s| s != slot);
        self.protected.of(slot).retain(|&s| s != slot);
        self.protected.of(slot).push(slot);
        self.balance(slot);
    }
    fn removed(&mut self, slot: u32) {
        self.probation.of(slot).retain(|&s| s != slot);
        self.protected.of(slot).retain(|&s| s != slot);
        self.balance(slot);
    }
    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        let mut all = self.probation.of(scope).clone();
        all.extend(self.protected.of(scope).iter());
        all.into_iter().find(|&s| evictable(s))
    }
}

/// The hand is the number of slots in the row that it has passed.
struct PlainSieve {
    rows: Rows,
    used: [bool; SLOTS as usize],
    hands: Vec<usize>,
}

impl Plain for PlainSieve {
    fn inserted(&mut self, slot: u32) {
        self.rows.of(slot).push(slot);
        self.used[slot as usize] = false;
    }
    fn touched(&mut self, slot: u32) {
        self.used[slot as usize] = true;
    }
    fn removed(&mut self, slot: u32) {
        let row = self.rows.of(slot);
        let Some(at) = row.iter().position(|&s| s == slot) else { return };
        row.remove(at);
        let (length, hand) = (row.len(), &mut self.hands[(slot % self.rows.scopes) as usize]);
        if at < *hand {
            *hand -= 1;
        }
        if *hand >= length {
            *hand = 0;
        }
    }
    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        let row = self.rows.of(scope).clone();
        let hand = self.hands[scope as usize];
        for step in 0..2 * row.len() {
            let at = (hand + step) % row.len();
            if evictable(row[at]) {
                if !self.used[row[at] as usize] {
                    self.hands[scope as usize] = at;
                    return Some(row[at]);
                }
                self.used[row[at] as usize] = false;
            }
        }
        None
    }
}

/// Two rows, uses of each slot, and which experts left the first row, in order.
struct PlainS3Fifo {
    small: Rows,
    main: Rows,
    uses: [u8; SLOTS as usize],
    left: Vec<Vec<u32>>,
}

impl Plain for PlainS3Fifo {
    fn inserted(&mut self, slot: u32) {
        let kept = self.small.of(slot).len() + self.main.of(slot).len();
        // A slot stands for its expert here.
        let left = &mut self.left[(slot % self.small.scopes) as usize];
        let known = left.iter().rev().take(kept).any(|&s| s == slot);
        left.iter_mut().filter(|s| **s == slot).for_each(|s| *s = u32::MAX);
        self.uses[slot as usize] = 0;
        if known { self.main.of(slot).push(slot) } else { self.small.of(slot).push(slot) }
    }
    fn touched(&mut self, slot: u32) {
        self.uses[slot as usize] = (self.uses[slot as usize] + 1).min(3);
    }
    fn removed(&mut self, slot: u32) {
        if self.small.of(slot).contains(&slot) {
            self.left[(slot % self.small.scopes) as usize].push(slot);
        }
        self.small.of(slot).retain(|&s| s != slot);
        self.main.of(slot).retain(|&s| s != slot);
    }
    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        loop {
            let (small, main) = (self.small.of(scope).clone(), self.main.of(scope).clone());
            let first = |row: &[u32]| row.iter().copied().find(|&s| evictable(s));
            let crowded = small.len() * 10 > small.len() + main.len() || main.is_empty();
            if crowded && let Some(slot) = first(&small) {
                if self.uses[slot as usize] < 2 {
                    return Some(slot);
                }
                self.uses[slot as usize] = 0;
                self.small.of(scope).retain(|&s| s != slot);
                self.main.of(scope).push(slot);
                continue;
            }
            let Some(slot) = first(&main) else { return first(&small) };
            if self.uses[slot as usize] == 0 {
                return Some(slot);
            }
            self.uses[slot as usize] -= 1;
            self.main.of(scope).retain(|&s| s != slot);
            self.main.of(scope).push(slot);
        }
    }
}

/// All uses of every expert: values are computed from them anew each time.
#[derive(Default)]
struct History {
    ticks: [u32; LAYERS as usize],
    uses: Vec<(ExpertId, u32, Share)>,
}

impl History {
    fn of(&self, id: ExpertId) -> impl Iterator<Item = (u32, Share)> + '_ {
        self.uses.iter().filter(move |u| u.0 == id).map(|u| (u.1, u.2))
    }
    fn now(&self, id: ExpertId) -> u32 {
        self.ticks[id.layer as usize]
    }
}

/// Decayed counts; the place of a slot is its logarithm at the last use, plus that tick.
struct PlainLfu {
    scopes: u32,
    history: History,
    /// (place, serial, slot)
    kept: Vec<(u32, u32, u32)>,
    serial: u32,
}

impl PlainLfu {
    fn place(&self, slot: u32) -> u32 {
        let (count, at) = self.history.of(id(slot)).fold((0u64, 0), |(count, at), (tick, _)| {
            let decayed = decay::Decay::new(4).after(count, tick - at);
            ((decayed + (1 << 16)).min(32 << 16), tick)
        });
        lfu::steps(count) + at
    }
}

impl Plain for PlainLfu {
    fn step(&mut self, layer: u32) {
        self.history.ticks[layer as usize] += 1;
    }
    fn requested(&mut self, id: ExpertId, share: Share) {
        self.history.uses.push((id, self.history.now(id), share));
    }
    fn inserted(&mut self, slot: u32) {
        self.serial += 1;
        self.kept.push((self.place(slot), self.serial, slot));
    }
    fn touched(&mut self, slot: u32) {
        self.removed(slot);
        self.inserted(slot);
    }
    fn removed(&mut self, slot: u32) {
        self.kept.retain(|k| k.2 != slot);
    }
    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        let scopes = self.scopes;
        let of_scope = self.kept.iter().filter(|k| k.2 % scopes == scope && evictable(k.2));
        of_scope.min().map(|k| k.2)
    }
}

/// Values from the whole history; dates in one plain list.
struct PlainFrecency {
    scopes: u32,
    history: History,
    /// (slot, bucket, serial), the serial of the last time it was put into the bucket.
    kept: Vec<(u32, u32, u32)>,
    /// (slot, date), in the order in which they were noted.
    dates: Vec<(u32, u32)>,
    serial: u32,
}

impl PlainFrecency {
    fn value(&self, id: ExpertId, tick: u32) -> u64 {
        let one = 1u64 << 24;
        let (fast, slow) = (decay::Decay::new(2), decay::Decay::new(5));
        let sum = |decay: &decay::Decay| {
            self.history.of(id).fold((0u64, 0), |(rate, at), (tick, share)| {
                let root = (u64::from(share.0) << 40).isqrt().isqrt();
                let more = ((one - decay.after(one, 1)) * root) >> 12;
                ((decay.after(rate, tick - at) + more).min(1 << 27), tick)
            })
        };
        let ((f, at), (s, _)) = (sum(&fast), sum(&slow));
        let recent = if tick == at && at > 0 { self.repeats() / 2 } else { 0 };
        (4 * fast.after(f, tick - at) + 6 * slow.after(s, tick - at)) / 10 + recent
    }

    fn repeats(&self) -> u64 {
        let mut last = std::collections::HashMap::new();
        self.history.uses.iter().fold((1u64 << 24) * 3 / 10, |repeats, &(id, now, _)| {
            let before = last.insert(id, now);
            let repeat = before.is_some_and(|before| before > 0 && before + 1 == now);
            match now > 1 {
                true => repeats - (repeats >> 11) + if repeat { 1 << 13 } else { 0 },
                false => repeats,
            }
        })
    }

    fn sort(&mut self, slot: u32) {
        let now = self.history.now(id(slot));
        let bucket = |tick| frecency::bucket(self.value(id(slot), tick));
        let here = bucket(now);
        let date = (now + 1..now + 63).find(|&tick| bucket(tick) != here).unwrap_or(now + 63);
        let known = self.kept.iter().position(|k| k.0 == slot);
        if known.is_none_or(|at| self.kept[at].1 != here) {
            known.map(|at| self.kept.remove(at));
            self.serial += 1;
            self.kept.push((slot, here, self.serial));
        }
        if here > 0 {
            self.dates.push((slot, date));
        }
    }
}

impl Plain for PlainFrecency {
    fn step(&mut self, layer: u32) {
        self.history.ticks[layer as usize] += 1;
        let now = self.history.ticks[layer as usize];
        let due = |&(slot, date): &(u32, u32)| slot % LAYERS == layer && date == now;
        let (due, rest): (Vec<_>, Vec<_>) = self.dates.iter().partition(|d| due(d));
        self.dates = rest;
        due.into_iter().for_each(|(slot, _)| self.sort(slot));
    }
    fn requested(&mut self, id: ExpertId, share: Share) {
        self.history.uses.push((id, self.history.now(id), share));
    }
    fn inserted(&mut self, slot: u32) {
        self.sort(slot);
    }
    fn touched(&mut self, slot: u32) {
        self.removed(slot);
        self.sort(slot);
    }
    fn removed(&mut self, slot: u32) {
        self.kept.retain(|k| k.0 != slot);
        self.dates.retain(|d| d.0 != slot);
    }
    fn victim(&mut self, scope: u32, evictable: &dyn Fn(u32) -> bool) -> Option<u32> {
        let scopes = self.scopes;
        let of_scope = self.kept.iter().filter(|k| k.0 % scopes == scope && evictable(k.0));
        of_scope.min_by_key(|k| (k.1, std::cmp::Reverse(k.2))).map(|k| k.0)
    }
}

fn ops() -> impl Strategy<Value = Vec<(u8, u32, u32)>> {
    prop::collection::vec((0u8..7, 0..SLOTS, 1u32..2048), 0..160)
}

proptest! {
    #[test]
    fn lru_is_a_row_by_last_use(ops in ops(), scopes in 1u32..3) {
        compare(PolicyKind::Lru, scopes, PlainLru(Rows::new(scopes)), &ops)?;
    }

    #[test]
    fn slru_is_two_rows(ops in ops(), scopes in 1u32..3) {
        let plain = PlainSlru { probation: Rows::new(scopes), protected: Rows::new(scopes) };
        compare(PolicyKind::Slru, scopes, plain, &ops)?;
    }

    #[test]
    fn sieve_is_a_row_and_a_hand(ops in ops(), scopes in 1u32..3) {
        let (rows, hands) = (Rows::new(scopes), vec![0; scopes as usize]);
        compare(PolicyKind::Sieve, scopes, PlainSieve { rows, used: [false; SLOTS as usize], hands }, &ops)?;
    }

    #[test]
    fn s3_fifo_is_two_rows_and_who_left(ops in ops(), scopes in 1u32..3) {
        let (small, main) = (Rows::new(scopes), Rows::new(scopes));
        let left = vec![Vec::new(); scopes as usize];
        let plain = PlainS3Fifo { small, main, uses: [0; SLOTS as usize], left };
        compare(PolicyKind::S3Fifo, scopes, plain, &ops)?;
    }

    #[test]
    fn lfu_is_the_smallest_decayed_count(ops in ops(), scopes in 1u32..3) {
        // Without pauses long enough for counts to leave the ring: those lose their order.
        let ops: Vec<_> = ops.into_iter().map(|(op, slot, share)| (op, slot, share % 16 + 1)).collect();
        let plain = PlainLfu { scopes, history: History::default(), kept: Vec::new(), serial: 0 };
        compare(PolicyKind::Lfu, scopes, plain, &ops)?;
    }

    #[test]
    fn lfu_names_every_slot_after_any_pause(ops in ops()) {
        let mut lfu = Lfu::new(&shape(1));
        let mut kept = [false; SLOTS as usize];
        for (op, slot, pause) in ops {
            (0..if op == 0 { pause } else { 1 }).for_each(|_| lfu.step(slot % LAYERS));
            lfu.requested(id(slot), Share::EVEN);
            match std::mem::replace(&mut kept[slot as usize], true) {
                true => lfu.touched(0, slot),
                false => lfu.inserted(0, slot, id(slot)),
            }
        }
        while let Some(slot) = lfu.victim(0, &|_| true) {
            prop_assert!(std::mem::take(&mut kept[slot as usize]));
            lfu.removed(0, slot);
        }
        prop_assert!(!kept.contains(&true));
    }

    #[test]
    fn frecency_is_the_lowest_bucket_of_values(ops in ops(), scopes in 1u32..3) {
        let (kept, dates) = (Vec::new(), Vec::new());
        let plain = PlainFrecency { scopes, history: History::default(), kept, dates, serial: 0 };
        compare(PolicyKind::Frecency, scopes, plain, &ops)?;
    }

    /// The fixed point follows the formula of the documentation.
    #[test]
    fn frecency_values_are_rates(gaps in prop::collection::vec((1u32..40, 26u32..1000), 1..40), idle in 0u32..50) {
        let mut policy = Frecency::new(&shape(1));
        let who = id(0);
        let (mut fast, mut slow) = (0.0f64, 0.0f64);
        let decay = |half_life: f64, ticks: u32| (-f64::from(ticks) / half_life).exp2();
        for &(gap, share) in &gaps {
            (0..gap).for_each(|_| policy.step(0));
            policy.requested(who, Share(share));
            let use_ = (f64::from(share) / 256.0).powf(0.25);
            fast = fast * decay(4.0, gap) + (1.0 - decay(4.0, 1)) * use_;
            slow = slow * decay(32.0, gap) + (1.0 - decay(32.0, 1)) * use_;
        }
        (0..idle).for_each(|_| policy.step(0));
        let repeats = gaps.iter().enumerate().fold(0.3f64, |repeats, (n, &(gap, _))| match n {
            0 if gap == 1 => repeats,
            0 => repeats * (1.0 - 1.0 / 2048.0),
            _ => repeats + (f64::from(gap == 1) - repeats) / 2048.0,
        });
        let recent = if idle == 0 { repeats / 2.0 } else { 0.0 };
        let wanted = 0.4 * fast * decay(4.0, idle) + 0.6 * slow * decay(32.0, idle) + recent;
        let got = policy.value(who) as f64 / f64::from(1 << 24);
        prop_assert!((got - wanted).abs() <= wanted * 2e-3 + 1e-6, "{got} {wanted}");
    }
}

#[test]
fn names_and_kinds_correspond() {
    for kind in PolicyKind::ALL {
        assert_eq!(kind.name().parse(), Ok(kind));
    }
    assert!("mru".parse::<PolicyKind>().unwrap_err().contains("frecency"));
}

#[test]
fn a_share_is_relative_to_its_companions() {
    assert_eq!(Share::of(0.25, 1.0, 4), Share::EVEN);
    assert_eq!(Share::of(0.5, 1.0, 4).in_256ths(), 512);
    for (weight, sum) in [(0.0, 0.0), (f32::NAN, 1.0), (1.0, f32::INFINITY * 0.0)] {
        assert_eq!(Share::of(weight, sum, 2), Share::EVEN);
    }
    assert_eq!((Share::of(-1.0, 1.0, 2).in_256ths(), Share::of(1e30, 1e-30, 2).in_256ths()), (1, 1 << 16));
}
