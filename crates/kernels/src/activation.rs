//! What stands between the two halves of an expert: gate and up products become the input of the down projection.

use crate::silu_mul_in_place;

/// How gate and up products are joined.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Activation {
    /// silu(gate) · up.
    #[default]
    SwiGlu,
    /// g · sigmoid(alpha · g) · (u + 1), with g = min(gate, limit) and u = up held between −limit and limit.
    ClampedSwiGlu {
        /// Steepness of the sigmoid.
        alpha: f32,
        /// Greatest gate, and greatest magnitude of up. Positive.
        limit: f32,
    },
}

impl Activation {
    /// gate = the joined products. What is not a number stays so.
    ///
    /// # Panics
    /// If the two lengths differ.
    pub fn join_in_place(self, gate: &mut [f32], up: &[f32]) {
        match self {
            Activation::SwiGlu => silu_mul_in_place(gate, up),
            Activation::ClampedSwiGlu { alpha, limit } => {
                assert_eq!(gate.len(), up.len(), "lengths of gate and up");
                for (gate, up) in gate.iter_mut().zip(up) {
                    // Comparisons and not `min`, which would turn NaN into the limit.
                    let g = if *gate > limit { limit } else { *gate };
                    let u = if *up > limit { limit } else { *up };
                    let u = if u < -limit { -limit } else { u };
                    *gate = (u + 1.0) * (g / (1.0 + (-alpha * g).exp()));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLAMPED: Activation = Activation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };

    fn joined(gate: f32, up: f32) -> f32 {
        let mut out = [gate];
        CLAMPED.join_in_place(&mut out, &[up]);
        out[0]
    }

    #[test]
    fn known_values_of_the_clamped_unit() {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        for (gate, up, g, u) in [
            (0.5, -0.25, 0.5f64, -0.25f64),
            (9.0, 9.0, 7.0, 7.0),
            // The gate has no lower limit, up has.
            (-9.0, -9.0, -9.0, -7.0),
        ] {
            let wanted = (u + 1.0) * g * sigmoid(1.702 * g);
            assert!((f64::from(joined(gate, up)) - wanted).abs() < 1e-5, "{gate}, {up}");
        }
        assert_eq!(joined(0.0, 3.0), 0.0);
        assert_eq!(joined(-1e30, 1.0), -0.0, "far below, the unit is shut");
    }

    #[test]
    fn what_is_no_number_shows() {
        assert!(joined(f32::NAN, 1.0).is_nan());
        assert!(joined(1.0, f32::NAN).is_nan());
    }

    #[test]
    fn the_usual_unit_is_silu_times_up() {
        let mut gate = [0.5, -2.0];
        let mut wanted = gate;
        Activation::default().join_in_place(&mut gate, &[3.0, -1.0]);
        silu_mul_in_place(&mut wanted, &[3.0, -1.0]);
        assert_eq!(gate, wanted);
    }
}
