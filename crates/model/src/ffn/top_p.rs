//! Leaving out the experts that weigh least: `--expert-top-p`. It changes results.

use crate::ffn::router::Choice;

/// What was left out of a step's choices.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Dropped {
    /// Selections.
    pub(super) selections: usize,
    /// Their weights, each as a share of its row's sum, added up.
    pub(super) weight: f64,
}

/// Keeps of each row the smallest set of its experts, by weight descending and of equal ones the lowest id,
/// whose weights reach `share` of the row's sum, and scales their weights so that the sum stays. A row whose
/// weights have no positive finite sum keeps all.
pub(super) fn keep(choices: &[Choice], share: f32) -> (Vec<Choice>, Dropped) {
    let mut dropped = Dropped::default();
    let rows = choices.iter().map(|choice| keep_row(choice, share, &mut dropped)).collect();
    (rows, dropped)
}

fn keep_row(choice: &Choice, share: f32, dropped: &mut Dropped) -> Choice {
    let sum: f64 = choice.iter().map(|&(_, weight)| f64::from(weight)).sum();
    if !(sum.is_finite() && sum > 0.0) {
        return choice.clone();
    }
    let mut order: Vec<(u32, f32)> = choice.clone();
    order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let wanted = f64::from(share) * sum;
    let (mut reached, mut kept) = (0.0, 0);
    for &(_, weight) in &order {
        if reached >= wanted && kept > 0 {
            break;
        }
        reached += f64::from(weight);
        kept += 1;
    }
    if kept == order.len() {
        return choice.clone();
    }
    dropped.selections += order.len() - kept;
    dropped.weight += 1.0 - reached / sum;
    order.truncate(kept);
    let scale = sum / reached;
    for (_, weight) in &mut order {
        *weight = (f64::from(*weight) * scale) as f32;
    }
    order.sort_unstable_by_key(|&(expert, _)| expert);
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kept(choice: &[(u32, f32)], share: f32) -> (Choice, Dropped) {
        let (mut rows, dropped) = keep(&[choice.to_vec()], share);
        (rows.remove(0), dropped)
    }

    #[test]
    fn the_smallest_set_that_reaches_the_share_stays() {
        let choice = [(1, 0.1), (4, 0.5), (7, 0.1), (9, 0.3)];
        let (row, dropped) = kept(&choice, 0.79);
        assert_eq!(row.iter().map(|c| c.0).collect::<Vec<_>>(), [4, 9]);
        assert!((row[0].1 - 0.625).abs() < 1e-6 && (row[1].1 - 0.375).abs() < 1e-6, "{row:?}");
        assert_eq!(dropped.selections, 2);
        assert!((dropped.weight - 0.2).abs() < 1e-6);
        // Of equal ones the lowest id.
        let (row, _) = kept(&choice, 0.85);
        assert_eq!(row.iter().map(|c| c.0).collect::<Vec<_>>(), [1, 4, 9]);
        assert_eq!(kept(&choice, 0.01).0, [(4, 1.0)]);
    }

    #[test]
    fn a_row_without_a_sum_keeps_all() {
        for weight in [0.0, f32::NAN, f32::INFINITY, -1.0] {
            let choice = [(0, weight), (1, weight)];
            let (row, dropped) = kept(&choice, 0.5);
            assert_eq!((row.len(), dropped.selections), (2, 0), "{weight}");
        }
    }

    proptest! {
        #[test]
        fn the_sum_stays_and_what_is_dropped_is_counted(
            weights in prop::collection::vec(0.001f32..1.0, 1..12),
            share in 0.01f32..1.0,
        ) {
            let choice: Choice = (0..).zip(weights).collect();
            let (row, dropped) = kept(&choice, share);
            let sum = |row: &Choice| row.iter().map(|c| f64::from(c.1)).sum::<f64>();
            prop_assert!((sum(&row) - sum(&choice)).abs() < 1e-4);
            prop_assert_eq!(row.len() + dropped.selections, choice.len());
            prop_assert!(dropped.weight <= 1.0 - f64::from(share) + 1e-6);
            prop_assert!(row.is_sorted_by_key(|c| c.0) && !row.is_empty());
            // One fewer would not have reached it.
            let least = row.iter().map(|c| f64::from(c.1)).fold(f64::INFINITY, f64::min);
            if dropped.selections > 0 {
                let reached = 1.0 - dropped.weight;
                prop_assert!(reached * (1.0 - least / sum(&row)) < f64::from(share) + 1e-6);
            }
        }
    }
}
