//! The table against itself, under random interleavings.

use super::*;
use crate::arena::ChunkSlots;
use crate::geometry::LayerExperts;
use crate::policy::{PolicyKind, PolicyShape};
use crate::testing::place;
use metaltail_container::Extent;
use proptest::prelude::*;

const EXPERTS: u32 = 6;

fn limits(cap: usize, pool: bool, in_flight: usize) -> Limits {
    Limits { cap, pool, in_flight, staging: 0, pinned: Vec::new() }
}

/// Two layers of one size and one of another.
fn table(limits: &Limits, policy: PolicyKind) -> Table {
    let layer = |layer, len| LayerExperts {
        layer,
        experts: vec![place(&[Extent { file: 0, offset: 0, len }]); EXPERTS as usize],
    };
    let geometry = Geometry::new(&[layer(0, 4096), layer(1, 4096), layer(2, 65_536)]).unwrap();
    let slots = limits.slots(&geometry).unwrap();
    let experts = vec![EXPERTS as usize; 3];
    let shape = PolicyShape { scopes: limits.scopes(&geometry), slots: slots.iter().sum(), experts };
    Table::new(&geometry, &[0, 1, 2], &slots, limits, policy.build(&shape))
}

/// What a fetch of one expert tells the policy.
fn tell(t: &mut Table, id: ExpertId) {
    t.policy().step(id.layer);
    t.policy().requested(id, crate::policy::Share::EVEN);
}

fn loaded(generation: u64) -> Ended {
    Ended::Loaded { generation, bytes: 4096 }
}

/// What a random walk knows of the table.
#[derive(Default)]
struct Walk {
    holds: Vec<u32>,
    jobs: Vec<Job>,
    generation: u64,
    away: Vec<ChunkSlots>,
    out: Vec<StoreEvent>,
}

/// Three slots in a row and of one size are a chunk; those in use.
fn chunks(t: &Table) -> Vec<ChunkSlots> {
    let (mut found, mut start) = (Vec::new(), 0);
    while start + 3 <= t.slots.len() {
        let of = &t.slots[start..start + 3];
        let class = of[0].class;
        if of.iter().any(|slot| slot.class != class) {
            start += 1;
            continue;
        }
        if of.iter().all(|slot| slot.phase != Phase::Away) {
            let (number, slots) = (start, start as u32..start as u32 + 3);
            found.push(ChunkSlots { number, slots, slot_bytes: t.classes[class as usize].bytes as usize });
        }
        start += 3;
    }
    found
}

impl Walk {
    fn step(&mut self, t: &mut Table, op: u8, pick: u32) {
        let id = ExpertId { layer: pick % 3, expert: pick / 3 % EXPERTS };
        let at = |len: usize| (len > 0).then(|| pick as usize % len.max(1));
        match op {
            0..=3 => {
                tell(t, id);
                t.drop_others(id.layer, |expert| expert == id.expert);
                match t.look_up(id) {
                    Found::Ready(slot, _)
                    | Found::Joined(slot)
                    | Found::Late(slot, _)
                    | Found::Promoted(slot) => self.holds.push(slot),
                    Found::Missing => self.holds.extend(t.start_load(id, Instant::now())),
                }
            }
            4 | 5 => {
                let waited_for =
                    self.jobs.iter().any(|job| t.slots[job.slot as usize].rank == LoadRank::Demand);
                let job = t.take_job();
                let ahead = job.filter(|job| job.rank != LoadRank::Demand);
                assert!(!(waited_for && ahead.is_some()), "speculation while someone waits");
                self.jobs.extend(job);
            }
            6 | 7 => {
                if let Some(at) = at(self.jobs.len()) {
                    self.generation += 1;
                    let job = self.jobs.swap_remove(at);
                    let ended = match pick % 5 {
                        0 => Ended::Failed(StoreError::Config("x".into())),
                        _ if t.should_stop(job.slot) => Ended::Stopped,
                        _ => loaded(self.generation),
                    };
                    t.complete(job.slot, ended, &mut self.out);
                }
            }
            8..=10 => {
                if let Some(at) = at(self.holds.len()) {
                    t.release(self.holds.swap_remove(at), &mut self.out);
                }
            }
            11 => {
                let bytes = u64::from(pick / 2) * 1024;
                let before = t.capacity_bytes();
                let taken = match pick % 2 {
                    0 => t.shrink(bytes, &mut self.out),
                    _ => t.restrict(bytes, &mut self.out),
                };
                let all = t.cached_slots() == 0 && t.pinned.is_empty();
                assert!(pick.is_multiple_of(2) || all || before - t.capacity_bytes() >= bytes);
                for slot in taken {
                    assert!(!self.holds.contains(&slot), "a held slot was taken");
                    t.given_back(slot, pick.is_multiple_of(2));
                }
            }
            12..=14 => {
                let others = [pick / 7 % EXPERTS, pick / 11 % EXPERTS];
                t.expect(id.layer, &[id.expert, others[0], others[1]], Instant::now(), &mut self.out);
            }
            15 => {
                let class = pick as usize % 2;
                let room = t.room()[class].0;
                let count = match t.unused(class) {
                    0 => {
                        let count = room.min(2);
                        t.add_slots(class, count);
                        count
                    }
                    some => some.min(room),
                };
                assert_eq!(t.raise(class, count), count);
            }
            16 | 17 => self.take_chunk(t, pick),
            18 => {
                if let Some(at) = at(self.away.len()) {
                    let chunk = self.away.swap_remove(at);
                    t.chunk_back(&chunk.slots);
                    let class = t.slots[chunk.slots.start as usize].class as usize;
                    assert!(t.raise(class, pick as usize % 4) <= 3);
                }
            }
            _ => t.load_pins(Instant::now()),
        }
    }
}

impl Walk {
    fn take_chunk(&mut self, t: &mut Table, pick: u32) {
        let (before, spare) = (t.capacity_bytes(), [t.spare(0), t.spare(1)]);
        let want = if pick.is_multiple_of(2) { Want::Memory } else { Want::Room(u64::from(pick / 2) * 1024) };
        let Some(left) = t.take_chunk(&chunks(t), want, &mut self.out) else { return };
        assert!(!self.holds.iter().any(|held| left.chunk.slots.contains(held)), "a leased chunk left");
        assert!(
            !self.jobs.iter().any(|job| left.chunk.slots.contains(&job.slot)),
            "one that is being written"
        );
        assert_eq!(before - t.capacity_bytes(), left.lowered);
        match want {
            Want::Memory => assert!(left.touched > 0),
            Want::Room(most) => assert!(left.lowered > 0 && left.touched + left.lowered > 0 && most > 0),
        }
        // Whoever asks for an expert finds a slot as before.
        let class = t.slots[left.chunk.slots.start as usize].class as usize;
        assert!(t.spare(class) >= 0, "{spare:?} before");
        if pick.is_multiple_of(3) {
            t.chunk_back(&left.chunk.slots);
        } else {
            t.chunk_gone(&left.chunk.slots);
            self.away.push(left.chunk);
        }
    }
}

proptest! {
    #[test]
    fn no_interleaving_makes_the_table_contradict_itself(
        cap in 0usize..4, in_flight in 1usize..4, staging in 0usize..3, pool: bool,
        pins in prop::collection::hash_set((0u32..3, 0..EXPERTS), 0..4),
        policy in 0..PolicyKind::ALL.len(),
        ops in prop::collection::vec((0u8..20, any::<u16>()), 0..300),
    ) {
        let pinned: Vec<ExpertId> = pins.iter().map(|&(layer, expert)| ExpertId { layer, expert }).collect();
        let limits = Limits { staging, pinned, ..limits(cap, pool, in_flight) };
        let mut t = table(&limits, PolicyKind::ALL[policy]);
        let mut walk = Walk::default();
        for (op, pick) in ops {
            walk.step(&mut t, op, u32::from(pick));
            prop_assert_eq!(t.contradiction(), None);
        }
        // Everything given back: nothing is in flight, everything can be loaded again.
        loop {
            walk.jobs.extend(std::iter::from_fn(|| t.take_job()));
            if walk.jobs.is_empty() {
                break;
            }
            for job in walk.jobs.drain(..) {
                t.complete(job.slot, loaded(1), &mut walk.out);
            }
        }
        for slot in walk.holds.drain(..) {
            t.release(slot, &mut walk.out);
        }
        prop_assert_eq!(t.contradiction(), None);
        prop_assert!(t.classes.iter().all(|c| c.in_flight == 0 && c.free.len() >= in_flight));
        prop_assert!((0..2).all(|class| t.spare(class) >= 0), "a slot is missing");
        prop_assert!(t.demand.is_empty() && t.speculation.is_empty() && t.pins.is_empty() && t.ahead.is_empty());
    }
}

/// Loads an expert by demand and lets it go.
fn load(t: &mut Table, layer: u32, expert: u32) -> Vec<StoreEvent> {
    let (id, mut out) = (ExpertId { layer, expert }, Vec::new());
    tell(t, id);
    let slot = t.start_load(id, Instant::now()).unwrap();
    assert_eq!(t.take_job().map(|job| job.slot), Some(slot));
    t.complete(slot, loaded(1), &mut out);
    t.release(slot, &mut out);
    out
}

/// Loads what is expected, as an idle loader does.
fn load_ahead(t: &mut Table) -> Option<ExpertId> {
    let job = t.take_job()?;
    assert_eq!(job.rank, LoadRank::Speculation);
    t.complete(job.slot, loaded(1), &mut Vec::new());
    Some(job.id)
}

#[test]
fn speculation_never_takes_a_slot_from_demand() {
    let mut t = table(&Limits { staging: 2, ..limits(1, false, 1) }, PolicyKind::Lru);
    let mut out = Vec::new();
    load(&mut t, 0, 5);
    // Far more is expected than there are staged slots, over and over.
    for expert in 0..4 {
        t.expect(0, &[expert, (expert + 1) % 5], Instant::now(), &mut out);
        while load_ahead(&mut t).is_some() {}
    }
    assert_eq!(t.kept(0), [5], "what was used is still there");
    assert_eq!(t.classes[1].staged, 2);
    assert!(t.start_load(ExpertId { layer: 0, expert: 4 }, Instant::now()).is_some(), "demand has its slot");
}

#[test]
fn a_staged_expert_that_is_asked_for_is_a_hit_and_is_kept() {
    let mut t = table(&Limits { staging: 1, ..limits(1, false, 1) }, PolicyKind::Lru);
    let (id, mut out) = (ExpertId { layer: 0, expert: 3 }, Vec::new());
    t.expect(0, &[3], Instant::now(), &mut out);
    assert_eq!(load_ahead(&mut t), Some(id));
    assert!(t.kept(0).is_empty());
    let Found::Ready(slot, Tier::Staged) = t.look_up(id) else { panic!("not found") };
    for _ in 0..2 {
        assert!(matches!(t.deliver(slot, &mut out), Outcome::Ready { .. }));
    }
    t.release(slot, &mut out);
    assert_eq!((t.kept(0), t.classes[1].staged), (vec![3], 0));
    assert_eq!(out, [StoreEvent::SpeculationUsed { layer: 0, expert: 3, bytes: 4096 }]);
}

#[test]
fn speculation_waits_while_anyone_waits_and_stops_when_someone_begins_to() {
    let mut t = table(&Limits { staging: 2, ..limits(1, false, 1) }, PolicyKind::Lru);
    let mut out = Vec::new();
    t.expect(0, &[1, 2], Instant::now(), &mut out);
    let first = t.take_job().unwrap();
    assert!(!t.should_stop(first.slot));
    let slot = t.start_load(ExpertId { layer: 1, expert: 0 }, Instant::now()).unwrap();
    assert!(t.should_stop(first.slot), "someone waits");
    assert_eq!(t.take_job().map(|job| job.slot), Some(slot), "demand first");
    assert!(t.take_job().is_none(), "the other expected expert waits");
    t.complete(first.slot, Ended::Stopped, &mut out);
    t.complete(slot, loaded(1), &mut out);
    assert_eq!(load_ahead(&mut t).map(|id| id.expert), Some(2));
}

#[test]
fn a_wrong_guess_ends_and_a_right_one_becomes_demand() {
    let mut t = table(&Limits { staging: 2, ..limits(1, false, 2) }, PolicyKind::Lru);
    let mut out = Vec::new();
    t.expect(0, &[1, 2], Instant::now(), &mut out);
    let (wrong, right) = (t.take_job().unwrap(), t.take_job().unwrap());
    t.drop_others(0, |expert| expert == 2);
    assert!(matches!(t.look_up(right.id), Found::Late(_, Tier::Staged)));
    assert!(t.should_stop(wrong.slot) && !t.should_stop(right.slot));
    t.complete(wrong.slot, Ended::Stopped, &mut out);
    t.complete(right.slot, loaded(1), &mut out);
    t.release(right.slot, &mut out);
    assert_eq!((t.kept(0), t.contradiction()), (vec![2], None));
}

#[test]
fn pinned_experts_are_never_victims_until_memory_leaves_no_choice() {
    let pin = ExpertId { layer: 0, expert: 5 };
    let mut t = table(&Limits { pinned: vec![pin], ..limits(1, false, 1) }, PolicyKind::Lru);
    t.load_pins(Instant::now());
    let job = t.take_job().unwrap();
    assert_eq!((job.id, job.rank), (pin, LoadRank::Pin));
    t.complete(job.slot, loaded(1), &mut Vec::new());
    (0..4).for_each(|expert| drop(load(&mut t, 0, expert)));
    assert_eq!(t.kept(0), [3, 5]);
    assert!(matches!(t.look_up(pin), Found::Ready(slot, Tier::Pinned) if slot == job.slot));
    t.release(job.slot, &mut Vec::new());
    let taken = t.shrink(3 * 4096, &mut Vec::new());
    assert_eq!((taken.len(), t.kept(0)), (3, vec![]), "the cached one goes first, then the pinned one");
}

#[test]
fn a_shrunken_cache_grows_back_into_its_own_slots_first() {
    let mut t = table(&limits(4, true, 1), PolicyKind::Lru);
    (0..6).for_each(|expert| drop(load(&mut t, 0, expert)));
    let taken = t.shrink(3 * 4096, &mut Vec::new());
    taken.into_iter().for_each(|slot| t.given_back(slot, true));
    let (before, unused) = (t.caps(), t.unused(1));
    assert!(unused > 0 && t.unused(0) == 0);
    assert_eq!(t.raise(1, unused), unused);
    assert!(t.caps() > before && t.unused(1) == 0);
    let slots = t.slots.len();
    t.add_slots(1, 2);
    assert_eq!((t.raise(1, 2), t.slots.len(), t.contradiction()), (2, slots + 2, None));
}

#[test]
fn shrinking_takes_from_the_fullest_and_does_not_grow_back() {
    let mut t = table(&limits(4, false, 2), PolicyKind::Lru);
    (0..4).for_each(|e| drop(load(&mut t, 0, e)));
    (0..2).for_each(|e| drop(load(&mut t, 1, e)));
    let mut events = Vec::new();
    // Two in-flight slots of the class stay touched for the next misses; the third eviction gives one page.
    let taken = t.shrink(4096, &mut events);
    assert_eq!(taken.len(), 1);
    assert_eq!((t.kept(0), t.kept(1)), (vec![2, 3], vec![1]), "{events:?}");
    assert_eq!(t.caps(), (1, 2));
}

#[test]
fn a_pool_gives_its_slots_to_the_layer_that_uses_them() {
    let mut t = table(&limits(2, true, 1), PolicyKind::Lru);
    let mut out = load(&mut t, 1, 0);
    // Layers 0 and 1 share four slots; layer 2, of another size, has two of its own.
    (0..4).for_each(|e| out.extend(load(&mut t, 0, e)));
    (0..3).for_each(|e| out.extend(load(&mut t, 2, e)));
    assert_eq!((t.kept(0), t.kept(1), t.kept(2)), (vec![0, 1, 2, 3], vec![], vec![1, 2]));
    assert_eq!(t.caps(), (2, 2));
    let evicted: Vec<_> = out
        .iter()
        .filter_map(|event| match event {
            StoreEvent::Evicted { layer, expert, .. } => Some((*layer, *expert)),
            _ => None,
        })
        .collect();
    assert_eq!(evicted, [(1, 0), (2, 0)], "the event names the victim's layer");
}

#[test]
fn a_pin_that_is_given_up_while_it_loads_takes_no_slot_for_ever() {
    let pin = ExpertId { layer: 0, expert: 5 };
    for (cap, kept) in [(0, vec![]), (1, vec![5])] {
        let mut t = table(&Limits { pinned: vec![pin], ..limits(cap, false, 1) }, PolicyKind::Lru);
        t.load_pins(Instant::now());
        let job = t.take_job().unwrap();
        t.shrink(u64::MAX, &mut Vec::new());
        assert_eq!(t.raise(1, cap), cap, "room came back, but not for pins");
        t.complete(job.slot, loaded(1), &mut Vec::new());
        assert_eq!((t.kept(0), t.classes[1].pinned, t.contradiction()), (kept, 0, None));
    }
}

/// A table of a pool that is full in one size class: eight experts cached and a slot for loads.
fn filled() -> Table {
    let mut t = table(&limits(4, true, 1), PolicyKind::Lru);
    (0..8).for_each(|n| drop(load(&mut t, n / 4, n % 4)));
    t
}

#[test]
fn the_chunk_with_the_least_in_it_leaves_and_the_policy_chooses_the_other_victims() {
    let mut t = filled();
    let all = chunks(&t);
    let class = |chunk: &ChunkSlots| t.slots[chunk.slots.start as usize].class;
    let of: Vec<ChunkSlots> = all.iter().filter(|chunk| class(chunk) == 1).cloned().collect();
    assert_eq!((of.len(), t.cached_slots()), (3, 12));
    // The oldest three experts would be the policy's choice; those of the second chunk are younger.
    let mut out = Vec::new();
    let Found::Ready(held, Tier::Cached) = t.look_up(ExpertId { layer: 0, expert: 0 }) else { panic!() };
    let left = t.take_chunk(&of, Want::Memory, &mut out).unwrap();
    assert!(!left.chunk.slots.contains(&held), "a leased one");
    let evicted = out.iter().filter(|e| matches!(e, StoreEvent::Evicted { reason: EvictReason::Memory, .. }));
    assert_eq!((evicted.count(), left.lowered, t.contradiction()), (3, 3 * 4096, None));
    assert_eq!(t.kept(0).len() + t.kept(1).len(), 5);
    // Two more cannot go: one is leased, and loads need a slot.
    t.chunk_gone(&left.chunk.slots);
    let rest: Vec<ChunkSlots> = of.into_iter().filter(|chunk| *chunk != left.chunk).collect();
    let second = t.take_chunk(&rest, Want::Memory, &mut out).unwrap();
    let rest: Vec<ChunkSlots> = rest.into_iter().filter(|chunk| *chunk != second.chunk).collect();
    assert_eq!(t.take_chunk(&rest, Want::Memory, &mut out), None);
    t.release(held, &mut out);
    assert_eq!(t.take_chunk(&rest, Want::Memory, &mut out), None, "a slot is needed for loads");

    t.chunk_back(&second.chunk.slots);
    assert_eq!((t.raise(1, 3), t.contradiction()), (3, None));
    assert!(t.start_load(ExpertId { layer: 1, expert: 5 }, Instant::now()).is_some());
}

#[test]
fn a_pinned_expert_loses_its_place_and_not_its_pin() {
    let pin = ExpertId { layer: 0, expert: 5 };
    let mut t = table(&Limits { pinned: vec![pin], ..limits(4, true, 1) }, PolicyKind::Lru);
    t.load_pins(Instant::now());
    let job = t.take_job().unwrap();
    t.complete(job.slot, loaded(1), &mut Vec::new());
    let chunk = chunks(&t).into_iter().find(|chunk| chunk.slots.contains(&job.slot)).unwrap();
    let left = t.take_chunk(std::slice::from_ref(&chunk), Want::Memory, &mut Vec::new()).unwrap();
    assert_eq!((left.chunk, t.kept(0)), (chunk, vec![]));
    load(&mut t, 0, 5);
    assert_eq!((t.kept(0), t.classes[1].pinned, t.contradiction()), (vec![5], 1, None));
}
