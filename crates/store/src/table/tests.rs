//! The table against itself, under random interleavings.

use super::*;
use crate::geometry::LayerExperts;
use crate::policy::{PolicyKind, PolicyShape};
use crate::testing::place;
use metaltail_container::Extent;
use proptest::prelude::*;

const EXPERTS: u32 = 6;

/// Two layers of one size and one of another.
fn table(cap: usize, in_flight: usize) -> Table {
    table_with(Keep { cap, pool: false }, in_flight, PolicyKind::Lru)
}

fn table_with(keep: Keep, in_flight: usize, policy: PolicyKind) -> Table {
    let layer = |layer, len| LayerExperts {
        layer,
        experts: vec![place(&[Extent { file: 0, offset: 0, len }]); EXPERTS as usize],
    };
    let geometry = Geometry::new(&[layer(0, 4096), layer(1, 4096), layer(2, 65_536)]).unwrap();
    let slots: Vec<usize> = geometry.kept_slots(keep.cap).iter().map(|n| n + in_flight).collect();
    let experts = vec![EXPERTS as usize; 3];
    let shape = PolicyShape { scopes: keep.scopes(&geometry), slots: slots.iter().sum(), experts };
    Table::new(&geometry, &[0, 1, 2], &slots, keep, in_flight, policy.build(&shape))
}

/// What a random walk knows of the table.
#[derive(Default)]
struct Walk {
    holds: Vec<u32>,
    jobs: Vec<Job>,
    generation: u64,
    out: Vec<StoreEvent>,
}

impl Walk {
    fn step(&mut self, t: &mut Table, op: u8, pick: u32) {
        let id = ExpertId { layer: pick % 3, expert: pick / 3 % EXPERTS };
        let at = |len: usize| (len > 0).then(|| pick as usize % len.max(1));
        match op {
            0..=3 => {
                t.begin_step(id.layer, &[id.expert]);
                match t.look_up(id) {
                    Found::Ready(slot) | Found::Coming(slot) => self.holds.push(slot),
                    Found::Missing => self.holds.extend(t.start_load(id, Instant::now())),
                }
            }
            4 | 5 => self.jobs.extend(t.take_job()),
            6 | 7 => {
                if let Some(at) = at(self.jobs.len()) {
                    self.generation += 1;
                    let failed = pick.is_multiple_of(5);
                    let result =
                        if failed { Err(StoreError::Config("x".into())) } else { Ok(self.generation) };
                    t.complete(self.jobs.swap_remove(at).slot, result, &mut self.out);
                }
            }
            8..=10 => {
                if let Some(at) = at(self.holds.len()) {
                    t.release(self.holds.swap_remove(at), &mut self.out);
                }
            }
            _ => {
                for slot in t.shrink(u64::from(pick) * 512, &mut self.out) {
                    assert!(!self.holds.contains(&slot), "a held slot was taken");
                    t.given_back(slot, pick.is_multiple_of(2));
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn no_interleaving_makes_the_table_contradict_itself(
        cap in 0usize..4, in_flight in 1usize..4, pool: bool, policy in 0..PolicyKind::ALL.len(),
        ops in prop::collection::vec((0u8..12, any::<u16>()), 0..300),
    ) {
        let mut t = table_with(Keep { cap, pool }, in_flight, PolicyKind::ALL[policy]);
        let mut walk = Walk::default();
        for (op, pick) in ops {
            walk.step(&mut t, op, u32::from(pick));
            prop_assert_eq!(t.contradiction(), None);
        }
        // Everything given back: nothing is in flight, everything can be loaded again.
        walk.jobs.extend(std::iter::from_fn(|| t.take_job()));
        for job in walk.jobs.drain(..) {
            t.complete(job.slot, Ok(1), &mut walk.out);
        }
        for slot in walk.holds.drain(..) {
            t.release(slot, &mut walk.out);
        }
        prop_assert_eq!(t.contradiction(), None);
        prop_assert!(t.classes.iter().all(|c| c.in_flight == 0 && c.free.len() >= in_flight));
    }
}

#[test]
fn shrinking_takes_from_the_fullest_and_does_not_grow_back() {
    let mut t = table(4, 2);
    let mut out = Vec::new();
    let mut load = |t: &mut Table, layer, expert| {
        let slot = t.start_load(ExpertId { layer, expert }, Instant::now()).unwrap();
        t.take_job().unwrap();
        t.complete(slot, Ok(1), &mut Vec::new());
        t.release(slot, &mut out);
    };
    (0..4).for_each(|e| load(&mut t, 0, e));
    (0..2).for_each(|e| load(&mut t, 1, e));
    let mut events = Vec::new();
    // Two in-flight slots of the class stay touched for the next misses; the third eviction gives one page.
    let taken = t.shrink(4096, &mut events);
    assert_eq!(taken.len(), 1);
    assert_eq!((t.kept(0), t.kept(1)), (vec![2, 3], vec![1]), "{events:?}");
    assert_eq!(t.caps(), (1, 2));
}

#[test]
fn a_pool_gives_its_slots_to_the_layer_that_uses_them() {
    let mut t = table_with(Keep { cap: 2, pool: true }, 1, PolicyKind::Lru);
    let mut out = Vec::new();
    let mut load = |t: &mut Table, layer, expert| {
        t.begin_step(layer, &[expert]);
        let slot = t.start_load(ExpertId { layer, expert }, Instant::now()).unwrap();
        t.take_job().unwrap();
        t.complete(slot, Ok(1), &mut Vec::new());
        t.release(slot, &mut out);
    };
    load(&mut t, 1, 0);
    // Layers 0 and 1 share four slots; layer 2, of another size, has two of its own.
    (0..4).for_each(|e| load(&mut t, 0, e));
    (0..3).for_each(|e| load(&mut t, 2, e));
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
