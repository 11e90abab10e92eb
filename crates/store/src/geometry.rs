//! Where an expert's runs lie in a slot, and how many bytes slots take.

use std::ops::Range;

use metaltail_container::{ExpertPlace, Extent, Repack};

use crate::arena::PAGE;
use crate::error::StoreError;

/// The routed experts of one layer: expert `e` lies at `experts[e]`.
#[derive(Clone, Debug)]
pub struct LayerExperts {
    /// Layer number, unique in the store.
    pub layer: u32,
    /// Places of its experts.
    pub experts: Vec<ExpertPlace>,
}

/// Slot sizes more than a 64th apart are different classes; smaller differences are padded away,
/// so that layers differing in a few rounded-up pages still share their slots.
const CLASS_SLACK: u64 = 64;

/// One layer's demands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerSize {
    pub(crate) experts: usize,
    pub(crate) class: usize,
}

/// Size classes of a model's slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub(crate) layers: Vec<LayerSize>,
    /// Bytes of a slot of each class, descending.
    pub(crate) classes: Vec<u64>,
    largest_repacked: u64,
}

impl Geometry {
    /// Sizes slots for `layers`.
    ///
    /// # Errors
    /// [`StoreError::Place`] when a run is empty, overflows, or a matrix names a run that is absent;
    /// [`StoreError::Config`] when a layer is named twice or has too many experts.
    pub fn new(layers: &[LayerExperts]) -> Result<Geometry, StoreError> {
        let mut needs = Vec::with_capacity(layers.len());
        let mut numbers = std::collections::HashSet::new();
        for layer in layers {
            if !numbers.insert(layer.layer) {
                return Err(StoreError::Config(format!("layer {} is given twice", layer.layer)));
            }
            if layer.experts.len() >= u32::MAX as usize {
                return Err(StoreError::Config(format!("layer {} has too many experts", layer.layer)));
            }
            let mut most = 0;
            for (expert, place) in (0u32..).zip(&layer.experts) {
                let place_error = |reason| StoreError::Place { layer: layer.layer, expert, reason };
                most = most.max(slot_bytes(place).map_err(place_error)?);
            }
            needs.push(most);
        }
        let classes = classes_of(&needs);
        // The smallest class that holds the layer; a layer without experts takes the last.
        let class_of = |need: u64| classes.iter().rposition(|&c| c >= need).unwrap_or(0);
        let size = |(layer, &need): (&LayerExperts, &u64)| LayerSize {
            experts: layer.experts.len(),
            class: class_of(need),
        };
        let sizes = layers.iter().zip(&needs).map(size).collect();
        let repacked = layers.iter().flat_map(|layer| &layer.experts).filter(|place| place.repack.is_some());
        let largest_repacked = repacked.map(stored_bytes).max().unwrap_or(0);
        Ok(Geometry { layers: sizes, classes, largest_repacked })
    }

    /// Slots of each class that `cap` kept slots a layer need.
    pub(crate) fn kept_slots(&self, cap: usize) -> Vec<usize> {
        let mut slots = vec![0usize; self.classes.len()];
        for layer in &self.layers {
            if let Some(n) = slots.get_mut(layer.class) {
                *n = n.saturating_add(cap.min(layer.experts));
            }
        }
        slots
    }

    /// Bytes that `cap` kept slots a layer take (saturating).
    pub fn cached_bytes(&self, cap: usize) -> u64 {
        let per_class = self.kept_slots(cap).into_iter().zip(&self.classes);
        per_class.fold(0, |sum, (n, &bytes)| sum.saturating_add((n as u64).saturating_mul(bytes)))
    }

    /// Bytes of a slot of each layer, in the layers' order.
    pub fn slot_bytes(&self) -> Vec<u64> {
        self.layers.iter().map(|layer| self.classes.get(layer.class).copied().unwrap_or(0)).collect()
    }

    /// Bytes that `in_flight` slots of each class take (saturating).
    pub fn in_flight_bytes(&self, in_flight: usize) -> u64 {
        let one = self.classes.iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
        one.saturating_mul(in_flight as u64)
    }

    /// Bytes of the runs of the largest expert that is repacked when it has been read; 0 where none is.
    pub fn largest_repacked(&self) -> u64 {
        self.largest_repacked
    }

    /// Most experts that a layer has; a larger cap keeps no more.
    pub fn most_experts(&self) -> usize {
        self.layers.iter().map(|l| l.experts).max().unwrap_or(0)
    }
}

fn classes_of(needs: &[u64]) -> Vec<u64> {
    let mut sizes: Vec<u64> = needs.iter().copied().filter(|&n| n > 0).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let mut classes: Vec<u64> = Vec::new();
    for size in sizes {
        if classes.last().is_none_or(|&last| last - size > last / CLASS_SLACK) {
            classes.push(size);
        }
    }
    classes
}

/// Bytes a slot must have for `place`, wherever in a page its runs begin.
fn slot_bytes(place: &ExpertPlace) -> Result<u64, String> {
    let mut sum = 0u64;
    for (i, run) in place.runs.iter().enumerate() {
        if run.len == 0 {
            return Err(format!("run {i} is empty"));
        }
        // A displaced run may touch one page more than its length says. Charging that page to every
        // displaced run gives all experts of a shape one slot size.
        let displaced = if run.offset.is_multiple_of(PAGE) { 0 } else { PAGE };
        let room = run.len.checked_next_multiple_of(PAGE).and_then(|n| n.checked_add(displaced));
        run.offset.checked_add(run.len).and_then(|end| end.checked_next_multiple_of(PAGE)).ok_or_else(
            || format!("run {i} of {} bytes at offset {} ends beyond 2^64", run.len, run.offset),
        )?;
        sum = room.and_then(|room| sum.checked_add(room)).ok_or("its runs exceed 2^64 bytes")?;
    }
    if place.runs.is_empty() {
        return Err("it has no runs".into());
    }
    if sum > isize::MAX as u64 {
        return Err(format!("its {sum} bytes exceed the address space"));
    }
    let made = place.repack.as_deref().map(|repack| made_bytes(repack, &place.runs)).transpose()?;
    for part in &place.parts {
        let scales = part.scales.map(|at| (at, part.layout.scale_bytes()));
        for (at, bytes) in [Some((part.weights, part.layout.weight_bytes())), scales].into_iter().flatten() {
            let end = at.offset.checked_add(bytes as u64);
            let len = match made {
                Some(bytes) => (at.run == 0).then_some(bytes),
                None => place.runs.get(at.run as usize).map(|run| run.len),
            };
            if len.is_none_or(|len| end.is_none_or(|end| end > len)) {
                return Err(format!(
                    "{bytes} bytes of a matrix at byte {} of run {} lie outside it",
                    at.offset, at.run
                ));
            }
        }
    }
    Ok(sum.max(made.map_or(0, |bytes| bytes.next_multiple_of(PAGE))))
}

/// Bytes of what a repack makes of runs, which have what it needs.
fn made_bytes(repack: &Repack, runs: &[Extent]) -> Result<u64, String> {
    let lens: Vec<u64> = runs.iter().map(|run| run.len).collect();
    repack.check(&lens).map_err(|error| error.to_string())?;
    let bytes = repack.bytes();
    if bytes > isize::MAX as u64 - PAGE {
        return Err(format!("the {bytes} bytes that are made of it exceed the address space"));
    }
    Ok(bytes)
}

/// Bytes of all runs of a place that has a size.
pub(crate) fn stored_bytes(place: &ExpertPlace) -> u64 {
    place.runs.iter().map(|run| run.len).sum()
}

/// Where one run lies in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// The run.
    pub(crate) run: Extent,
    /// First byte of the run's pages in the slot; a multiple of [`PAGE`].
    pub(crate) start: usize,
    /// Displacement of the run in its first page.
    pub(crate) displacement: usize,
    /// Whole pages that hold the run, in bytes.
    pub(crate) span: usize,
}

impl Segment {
    /// The run's bytes in the slot.
    pub(crate) fn data(&self) -> Range<usize> {
        let from = self.start + self.displacement;
        from..from + self.run.len as usize
    }
}

/// Where the bytes of run `i` of a place lie in its slot once it can be leased: a repack leaves one run, at the beginning.
pub(crate) fn leased(place: &ExpertPlace, i: usize) -> Option<Range<usize>> {
    match &place.repack {
        // No larger than a slot, which is in memory.
        Some(repack) => (i == 0).then_some(0..repack.bytes() as usize),
        None => segments(place).nth(i).map(|segment| segment.data()),
    }
}

/// The segments of a place that `Geometry::new` accepted. The layout is the same for direct and buffered
/// reads: a run keeps its displacement in the page, and with it the alignment that it has in the file.
pub(crate) fn segments(place: &ExpertPlace) -> impl Iterator<Item = Segment> + '_ {
    place.runs.iter().scan(0usize, |start, &run| {
        let displacement = run.offset % PAGE;
        let span = (displacement + run.len).next_multiple_of(PAGE) as usize;
        let segment = Segment { run, start: *start, displacement: displacement as usize, span };
        *start += span;
        Some(segment)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::place;
    use metaltail_container::{RunOffset, Stored};
    use metaltail_quant::{Format, MatrixLayout};
    use proptest::prelude::*;

    fn run(offset: u64, len: u64) -> Extent {
        Extent { file: 0, offset, len }
    }

    #[test]
    fn layers_of_nearly_one_size_share_a_class() {
        let layer = |layer, len| LayerExperts { layer, experts: vec![place(&[run(4096, len)]); 4] };
        let g = Geometry::new(&[layer(0, 1 << 20), layer(1, (1 << 20) - 4096), layer(2, 2 << 20)]).unwrap();
        assert_eq!(g.classes, [2 << 20, 1 << 20]);
        assert_eq!(g.layers.iter().map(|l| l.class).collect::<Vec<_>>(), [1, 1, 0]);
        assert_eq!(g.cached_bytes(3), 3 * (4 << 20));
        assert_eq!(g.cached_bytes(9), g.cached_bytes(4), "a layer keeps no more than it has");
        assert_eq!(g.in_flight_bytes(2), 6 << 20);
    }

    #[test]
    fn impossible_places_are_refused() {
        let refused = |runs: &[Extent]| {
            let layer = LayerExperts { layer: 5, experts: vec![place(&[run(0, 64)]), place(runs)] };
            match Geometry::new(&[layer]) {
                Err(StoreError::Place { layer: 5, expert: 1, reason }) => reason,
                other => panic!("{other:?}"),
            }
        };
        assert!(refused(&[]).contains("no runs"));
        assert!(refused(&[run(8, 0)]).contains("empty"));
        assert!(refused(&[run(u64::MAX - 8, 9)]).contains("beyond 2^64"));
        assert!(refused(&[run(0, u64::MAX - 4096)]).contains("address space"));
        let mut bad = place(&[run(0, 64)]);
        bad.parts[1].weights.run = 1;
        let bad = LayerExperts { layer: 0, experts: vec![bad] };
        assert!(matches!(Geometry::new(&[bad]), Err(StoreError::Place { .. })));
    }

    /// Gate, up and down of `rows` × `cols` bf16 numbers, each transposed at the beginning of run 0.
    fn repacked(runs: &[Extent], rows: usize, cols: usize) -> ExpertPlace {
        let layout = MatrixLayout::new(Format::Bf16, rows, cols).unwrap();
        let at = RunOffset { run: 0, offset: 0 };
        let stored = Stored::Transposed { at, pitch: rows, first: 0, step: 1 };
        let repack = Repack::new([layout; 3], [stored; 3]).unwrap();
        ExpertPlace { parts: repack.parts(), repack: Some(Box::new(repack)), ..place(runs) }
    }

    #[test]
    fn a_slot_holds_what_is_read_and_what_is_made_of_it() {
        let geometry = |place: ExpertPlace| Geometry::new(&[LayerExperts { layer: 0, experts: vec![place] }]);
        // 4000 bytes are read, and three matrices made of them.
        let larger = geometry(repacked(&[run(4096, 4000)], 50, 40)).unwrap();
        assert_eq!((&larger.classes[..], larger.largest_repacked()), (&[3 * 4096][..], 4000));
        let smaller = geometry(repacked(&[run(100, 40_000)], 1, 2)).unwrap();
        assert_eq!((&smaller.classes[..], smaller.largest_repacked()), (&[45_056][..], 40_000));
        assert_eq!(geometry(place(&[run(100, 40_000)])).unwrap().largest_repacked(), 0);
        let refused = |place| geometry(place).unwrap_err().to_string();
        assert!(
            refused(repacked(&[run(0, 3999)], 50, 40)).contains("end at byte 4000 of run 0, which has 3999")
        );
        let mut bad = repacked(&[run(0, 4000)], 50, 40);
        bad.parts[2].weights.offset += 1;
        assert!(refused(bad.clone()).contains("lie outside it"));
        bad.parts[2].weights = RunOffset { run: 1, offset: 0 };
        assert!(refused(bad).contains("lie outside it"), "a repack leaves one run");
    }

    proptest! {
        #[test]
        fn segments_hold_their_runs_inside_the_slot(
            runs in prop::collection::vec((0u64..100_000, 1u64..50_000), 1..4),
        ) {
            let runs: Vec<_> = runs.into_iter().map(|(offset, len)| run(offset, len)).collect();
            let place = place(&runs);
            let room = slot_bytes(&place).unwrap() as usize;
            let mut end = 0;
            for s in segments(&place) {
                prop_assert_eq!(s.start, end);
                prop_assert_eq!(s.start % 4096, 0);
                prop_assert_eq!(s.data().start as u64 % 4096, s.run.offset % 4096);
                end = s.start + s.span;
                prop_assert!(s.data().end <= end);
            }
            prop_assert!(end <= room);
        }
    }
}
