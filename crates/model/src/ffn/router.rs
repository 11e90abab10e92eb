//! From router logits to chosen experts.

use crate::plan::{RouterPlan, Scoring};

/// One row's experts, ascending by id, each with its weight.
pub(crate) type Choice = Vec<(u32, f32)>;

/// Chooses `top_k` experts of one row.
///
/// The greatest choices win, of equal ones the lowest id. Experts whose logit is not finite lose
/// against all others and weigh nothing, and the others are as if those were not there; the second
/// result says whether there were any.
pub(super) fn choose(
    plan: &RouterPlan,
    top_k: usize,
    logits: &[f32],
    bias: Option<&[f32]>,
) -> (Choice, bool) {
    let scores = score(plan.scoring, logits);
    let broken = scores.iter().any(|score| score.is_nan());
    let mut choices: Vec<f32> = match bias {
        Some(bias) => scores.iter().zip(bias).map(|(score, bias)| score + bias).collect(),
        None => scores.clone(),
    };
    for choice in &mut choices {
        if choice.is_nan() {
            *choice = f32::NEG_INFINITY;
        }
    }
    let allowed = match plan.groups {
        Some((groups, kept)) => best_groups(&choices, groups, kept),
        None => vec![true; choices.len()],
    };
    let mut order: Vec<u32> = (0..choices.len() as u32).filter(|expert| allowed[*expert as usize]).collect();
    let greatest_first =
        |a: &u32, b: &u32| choices[*b as usize].total_cmp(&choices[*a as usize]).then(a.cmp(b));
    if top_k < order.len() {
        order.select_nth_unstable_by(top_k, greatest_first);
        order.truncate(top_k);
    }
    // The sum below runs in this order, as the reference's does.
    order.sort_unstable_by(greatest_first);
    let mut chosen: Choice = order
        .into_iter()
        .map(|expert| {
            let score = scores[expert as usize];
            (expert, if score.is_nan() { 0.0 } else { score })
        })
        .collect();
    let sum: f32 = chosen.iter().map(|(_, weight)| weight).sum();
    for (_, weight) in &mut chosen {
        if plan.normalise {
            *weight /= sum + 1e-20;
        }
        *weight *= plan.scale;
    }
    chosen.sort_unstable_by_key(|(expert, _)| *expert);
    (chosen, broken)
}

/// Scores of all experts; a logit that is not finite comes from damaged weights and scores NaN.
fn score(scoring: Scoring, logits: &[f32]) -> Vec<f32> {
    let sound = |logit: &f32| if logit.is_finite() { *logit } else { f32::NAN };
    match scoring {
        Scoring::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-sound(logit)).exp())).collect(),
        Scoring::Softmax => {
            // `f32::max` passes over NaN; the sum must as well, or one would spoil every score.
            let max = logits.iter().map(sound).fold(f32::NEG_INFINITY, f32::max);
            let mut scores: Vec<f32> = logits.iter().map(|logit| (sound(logit) - max).exp()).collect();
            let sum: f32 = scores.iter().filter(|score| !score.is_nan()).sum();
            scores.iter_mut().for_each(|score| *score /= sum);
            scores
        }
    }
}

/// Which experts stay when only the best groups do; a group counts its two greatest choices.
fn best_groups(choices: &[f32], groups: usize, kept: usize) -> Vec<bool> {
    let size = choices.len() / groups;
    let strength: Vec<f32> = choices
        .chunks(size)
        .map(|group| {
            let (first, second) =
                group.iter().fold((f32::NEG_INFINITY, f32::NEG_INFINITY), |(a, b), &choice| {
                    if choice > a { (choice, a) } else { (a, b.max(choice)) }
                });
            if size == 1 { first } else { first + second }
        })
        .collect();
    let mut order: Vec<usize> = (0..groups).collect();
    order.sort_by(|a, b| strength[*b].total_cmp(&strength[*a]).then(a.cmp(b)));
    let mut allowed = vec![false; choices.len()];
    for group in &order[..kept] {
        allowed[group * size..(group + 1) * size].fill(true);
    }
    allowed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sigmoid(groups: Option<(usize, usize)>) -> RouterPlan {
        RouterPlan {
            scoring: Scoring::Sigmoid,
            bias: false,
            correction_bias: true,
            groups,
            normalise: true,
            scale: 2.5,
        }
    }

    #[test]
    fn the_bias_decides_the_choice_but_not_the_weight() {
        let bias = [0.0, 10.0, 0.0, 0.0];
        let (chosen, broken) = choose(&sigmoid(None), 2, &[2.0, -3.0, 1.0, 0.0], Some(&bias));
        assert!(!broken);
        let ids: Vec<u32> = chosen.iter().map(|c| c.0).collect();
        assert_eq!(ids, [0, 1]);
        let p = |x: f32| 1.0 / (1.0 + (-x).exp());
        let expected = 2.5 * p(-3.0) / (p(-3.0) + p(2.0));
        assert!((chosen[1].1 - expected).abs() < 1e-6);
    }

    #[test]
    fn only_experts_of_the_best_groups_are_chosen() {
        // Group 0 has the single best expert, group 1 the best pair.
        let logits = [5.0, -9.0, 2.0, 2.0, -9.0, -9.0];
        let (chosen, _) = choose(&sigmoid(Some((3, 1))), 2, &logits, Some(&[0.0; 6]));
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [2, 3]);
    }

    #[test]
    fn scores_that_are_not_numbers_choose_the_lowest_ids_with_weight_zero() {
        let (chosen, broken) = choose(&sigmoid(None), 3, &[f32::NAN; 8], Some(&[0.0; 8]));
        assert!(broken);
        assert_eq!(chosen, [(0, 0.0), (1, 0.0), (2, 0.0)]);
    }

    #[test]
    fn one_damaged_logit_costs_its_own_expert_alone() {
        let softmax = RouterPlan {
            scoring: Scoring::Softmax,
            bias: false,
            correction_bias: false,
            groups: None,
            normalise: false,
            scale: 1.0,
        };
        let sound = [0.5, 1.5, -1.0, 2.0];
        for plan in [softmax, sigmoid(None)] {
            let (expected, _) = choose(&plan, 2, &sound, None);
            for damage in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let logits = [&[damage], &sound[..]].concat();
                let (chosen, broken) = choose(&plan, 2, &logits, None);
                assert!(broken, "{damage}");
                let shifted: Choice = expected.iter().map(|(id, weight)| (id + 1, *weight)).collect();
                assert_eq!(chosen, shifted, "{damage}");
            }
        }
    }

    proptest! {
        #[test]
        fn ties_go_to_the_lowest_id(logits in prop::collection::vec(-2i8..3, 4..40), k in 1usize..5) {
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let k = k.min(logits.len());
            let mut order: Vec<u32> = (0..logits.len() as u32).collect();
            order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
            order.truncate(k);
            order.sort_unstable();
            let zeros = vec![0.0; logits.len()];
            let (chosen, _) = choose(&sigmoid(None), k, &logits, Some(&zeros));
            prop_assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), order);
        }
    }
}
