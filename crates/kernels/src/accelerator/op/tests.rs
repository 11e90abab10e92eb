use metaltail_quant::{Format, MatrixLayout};

use super::*;

const A: Buffer = Buffer(0);
const B: Buffer = Buffer(1);

fn sizes(buffer: Buffer) -> Option<usize> {
    [100, 50].get(buffer.0 as usize).copied()
}

fn add(from: View, to: View, count: usize) -> Op {
    Op::Add { from, to, count }
}

#[test]
fn operations_stay_within_their_memory() {
    assert!(add(A.view(), B.view(), 50).check(sizes).is_ok());
    let over = add(A.view(), B.view(), 51).check(sizes).unwrap_err().to_string();
    assert!(over.contains("of a buffer of 50 numbers"), "{over}");
    assert!(add(A.view().plus(60), B.view(), 41).check(sizes).is_err());
    assert!(add(A.view(), Buffer(2).view(), 1).check(sizes).is_err());
    assert!(add(A.view().plus(usize::MAX), B.view(), 2).check(sizes).is_err());
}

#[test]
fn what_is_written_is_not_read_but_in_place() {
    let copy = |from, to| Op::Copy { from, to, rows: 2, width: 10 };
    assert!(copy(A.rows(10), B.rows(10)).check(sizes).is_ok());
    let shifted = Rows { view: A.view().plus(5), stride: 10 };
    assert!(copy(A.rows(10), shifted).check(sizes).is_err());
    assert!(copy(A.rows(9), B.rows(10)).check(sizes).is_err(), "rows that overlap");
    assert!(add(A.view(), A.view().plus(50), 50).check(sizes).is_ok(), "halves of one buffer");
    assert!(add(A.view(), A.view().plus(49), 50).check(sizes).is_err());
}

#[test]
fn a_rotation_changes_its_heads_and_reads_its_angles() {
    let (cosines, sines) = (B.view(), B.view().plus(10));
    let rope = Rope {
        x: A.view(),
        rows: 2,
        heads: 5,
        head: 10,
        offset: 2,
        dim: 8,
        interleaved: true,
        cosines,
        sines,
    };
    let footprint = Op::Rope(rope).check(sizes).unwrap();
    assert_eq!(footprint.changes, [A.view().extent(100).unwrap()]);
    assert_eq!(footprint.reads, [cosines.extent(8).unwrap(), sines.extent(8).unwrap()]);
    assert!(Op::Rope(Rope { offset: 3, ..rope }).check(sizes).is_err(), "behind the head");
    assert!(Op::Rope(Rope { cosines: A.view(), ..rope }).check(sizes).is_err(), "angles among the heads");
}

#[test]
fn a_row_that_is_written_conflicts_with_one_that_reads_it() {
    let layout = MatrixLayout::new(Format::F32, 5, 10).unwrap();
    let matrix = HeldMatrix { id: 0, layout };
    let product = |x: View, out: View| {
        Op::Product { matrix, x, inputs: 2, out, order: Order::Decode }.footprint().unwrap()
    };
    let first = product(A.view(), B.view());
    assert_eq!(first.reads[0].end, 20);
    assert_eq!(first.writes[0].end, 10);
    assert!(first.conflicts(&product(B.view(), A.view().plus(50))), "reads what was written");
    assert!(first.conflicts(&product(A.view().plus(50), B.view())), "writes the same");
    assert!(first.conflicts(&product(B.view().plus(20), A.view())), "writes what was read");
    assert!(!first.conflicts(&product(A.view(), B.view().plus(10))), "two readers, two results");
}

#[test]
fn strides_are_counted_to_the_end_of_the_last_row() {
    let rows = Rows { view: A.view().plus(3), stride: 20 };
    assert_eq!(rows.extent(3, 7).unwrap(), Extent { buffer: A, start: 3, end: 50 });
    assert_eq!(rows.extent(0, 7).unwrap().end, 3);
    assert!(rows.extent(usize::MAX, 7).is_err());
}
