//! The smallest value of a function, without its derivatives.

/// Searches by the simplex of Nelder and Mead (The Computer Journal 7, 1965) from `start`, whose first simplex
/// has edges of `step`, with at most so many evaluations. Deterministic.
pub(super) fn minimum(
    value: &dyn Fn(&[f64]) -> f64,
    start: &[f64],
    step: f64,
    evaluations: usize,
) -> (Vec<f64>, f64) {
    let n = start.len();
    let mut simplex: Vec<(Vec<f64>, f64)> = (0..=n)
        .map(|vertex| {
            let mut point = start.to_vec();
            if let Some(coordinate) = vertex.checked_sub(1) {
                point[coordinate] += step;
            }
            let found = value(&point);
            (point, found)
        })
        .collect();
    let mut spent = n + 1;
    while n > 0 && spent < evaluations {
        simplex.sort_by(|a, b| a.1.total_cmp(&b.1));
        let (best, worst) = (simplex[0].1, simplex[n].1);
        if (worst - best).abs() <= 1e-13 * best.abs() {
            break;
        }
        spent += improve(value, &mut simplex);
    }
    simplex.sort_by(|a, b| a.1.total_cmp(&b.1));
    simplex.swap_remove(0)
}

/// Replaces the worst of sorted vertices, or draws all of them to the best. Returns the evaluations it took.
fn improve(value: &dyn Fn(&[f64]) -> f64, simplex: &mut [(Vec<f64>, f64)]) -> usize {
    let n = simplex.len() - 1;
    let centre: Vec<f64> =
        (0..n).map(|k| simplex[..n].iter().map(|(point, _)| point[k]).sum::<f64>() / n as f64).collect();
    let along = |from: &[f64], by: f64| -> (Vec<f64>, f64) {
        let point: Vec<f64> = centre.iter().zip(from).map(|(c, x)| c + by * (x - c)).collect();
        let found = value(&point);
        (point, found)
    };
    let (worst, second, best) = (simplex[n].1, simplex[n - 1].1, simplex[0].1);
    let reflected = along(&simplex[n].0, -1.0);
    if reflected.1 < best {
        let expanded = along(&simplex[n].0, -2.0);
        simplex[n] = if expanded.1 < reflected.1 { expanded } else { reflected };
        return 2;
    }
    if reflected.1 < second {
        simplex[n] = reflected;
        return 1;
    }
    let contracted = along(&simplex[n].0, if reflected.1 < worst { -0.5 } else { 0.5 });
    if contracted.1 < worst.min(reflected.1) {
        simplex[n] = contracted;
        return 2;
    }
    let (first, others) = simplex.split_at_mut(1);
    for (point, found) in others {
        point.iter_mut().zip(&first[0].0).for_each(|(x, b)| *x = b + 0.5 * (*x - b));
        *found = value(point);
    }
    2 + n
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_finds_the_bottom_of_a_bent_valley() {
        let rosenbrock = |x: &[f64]| (1.0 - x[0]).powi(2) + 100.0 * (x[1] - x[0] * x[0]).powi(2);
        let (point, value) = minimum(&rosenbrock, &[-1.2, 1.0], 0.5, 2000);
        assert!(value < 1e-9 && (point[0] - 1.0).abs() < 1e-3, "{point:?} {value}");
    }

    #[test]
    fn it_stops_when_nothing_is_left_to_gain_or_to_spend() {
        let calls = std::cell::Cell::new(0);
        let flat = |_: &[f64]| {
            calls.set(calls.get() + 1);
            1.0
        };
        minimum(&flat, &[0.0, 0.0], 1.0, 1000);
        assert_eq!(calls.get(), 3);
        let slope = |x: &[f64]| {
            calls.set(calls.get() + 1);
            x[0]
        };
        calls.set(0);
        minimum(&slope, &[0.0], 1.0, 50);
        assert!((50..=53).contains(&calls.get()), "{}", calls.get());
    }
}
