//! A median and how far the values lay apart.

use serde::{Deserialize, Serialize};

/// Median, extremes and number of values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Middle value (mean of the two middle ones for an even number).
    pub median: f64,
    /// Smallest value.
    pub min: f64,
    /// Largest value.
    pub max: f64,
    /// Number of values.
    pub n: usize,
}

impl Spread {
    /// The spread of some values; none of no values.
    ///
    /// ```
    /// let spread = metaltail_bench::Spread::of(&[3.0, 1.0, 2.0]).unwrap();
    /// assert_eq!((spread.median, spread.min, spread.max, spread.n), (2.0, 1.0, 3.0, 3));
    /// ```
    pub fn of(values: &[f64]) -> Option<Spread> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let n = sorted.len();
        let median = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0;
        Some(Spread { median, min, max, n })
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} ({:.2}–{:.2}, n {})", self.median, self.min, self.max, self.n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_even_number_of_values_has_the_mean_of_the_middle_ones() {
        assert_eq!(Spread::of(&[4.0, 1.0, 3.0, 2.0]).map(|s| s.median), Some(2.5));
        assert_eq!(Spread::of(&[]), None);
    }
}
