//! Elementwise pieces of a transformer. Plain code: the same bits on every instruction set.

/// Lanes of the sums here, as in the products: element i goes to lane i mod 16.
const LANES: usize = 16;

/// Sum of f(x) over `x`, in double precision, in 16 lanes folded by halves.
fn sum(x: &[f32], f: impl Fn(f64) -> f64) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let (whole, tail) = x.as_chunks::<LANES>();
    for chunk in whole {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += f(f64::from(*x));
        }
    }
    for (lane, x) in lanes.iter_mut().zip(tail) {
        *lane += f(f64::from(*x));
    }
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
    }
    lanes[0]
}

/// out = x / rms(x) · weight, rms = √(mean(x²) + eps).
///
/// # Panics
/// If the three lengths differ.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == out.len(), "lengths of a norm");
    let factor = inverse_rms(x, eps);
    for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
        *o = x * factor * w;
    }
}

/// [`rms_norm`] in place.
///
/// # Panics
/// If the two lengths differ.
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len(), "lengths of a norm");
    let factor = inverse_rms(x, eps);
    for (x, w) in x.iter_mut().zip(weight) {
        *x = *x * factor * w;
    }
}

fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mean = sum(x, |v| v * v) / x.len().max(1) as f64;
    (1.0 / (mean + f64::from(eps)).sqrt()) as f32
}

/// out = (x − mean) / √(variance + eps) · weight + bias, variance over n.
///
/// # Panics
/// If the four lengths differ.
pub fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == bias.len() && x.len() == out.len(), "lengths of a norm");
    let count = x.len().max(1) as f64;
    let mean = sum(x, |v| v) / count;
    let variance = sum(x, |v| (v - mean) * (v - mean)) / count;
    let factor = 1.0 / (variance + f64::from(eps)).sqrt();
    for (((o, x), w), b) in out.iter_mut().zip(x).zip(weight).zip(bias) {
        *o = ((f64::from(*x) - mean) * factor) as f32 * w + b;
    }
}

/// The sigmoid-weighted unit: x / (1 + e⁻ˣ).
#[inline]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// 1 / (1 + e⁻ˣ).
#[inline]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// out = silu(gate) · up.
///
/// # Panics
/// If the three lengths differ.
pub fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == up.len() && gate.len() == out.len(), "lengths of gate, up and output");
    for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
        *o = silu(*g) * u;
    }
}

/// gate = silu(gate) · up.
///
/// # Panics
/// If the two lengths differ.
pub fn silu_mul_in_place(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "lengths of gate and up");
    for (g, u) in gate.iter_mut().zip(up) {
        *g = silu(*g) * u;
    }
}

/// x = eˣ / Σ eˣ, with the largest taken off first. Of an empty slice: nothing.
///
/// A NaN, or +∞, makes the whole result NaN. Where all are −∞ (everything masked), the result is NaN too:
/// a caller that masks must leave one element.
pub fn softmax_in_place(x: &mut [f32]) {
    let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for v in x.iter_mut() {
        *v = (*v - most).exp();
    }
    let total = sum(x, |v| v) as f32;
    for v in x.iter_mut() {
        *v /= total;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rms_norm_of_known_numbers() {
        let mut out = [0.0; 2];
        rms_norm(&[3.0, 4.0], &[1.0, 2.0], 0.0, &mut out);
        let rms = 12.5f64.sqrt();
        assert_eq!(out, [(3.0 / rms) as f32, (8.0 / rms) as f32]);
        let mut same = [3.0, 4.0];
        rms_norm_in_place(&mut same, &[1.0, 2.0], 0.0);
        assert_eq!(same, out);
    }

    #[test]
    fn layer_norm_of_known_numbers() {
        let mut out = [0.0; 2];
        layer_norm(&[1.0, 3.0], &[2.0, 1.0], &[10.0, 0.5], 0.0, &mut out);
        assert_eq!(out, [8.0, 1.5]);
    }

    #[test]
    fn softmax_sums_to_one_and_stands_large_scores() {
        let mut x = [1000.0, 1000.0, f32::NEG_INFINITY];
        softmax_in_place(&mut x);
        assert_eq!(x, [0.5, 0.5, 0.0]);
        let mut x: Vec<f32> = (0..1000).map(|i| (i as f32).sin() * 5.0).collect();
        softmax_in_place(&mut x);
        assert!((x.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        softmax_in_place(&mut []);
    }

    #[test]
    fn softmax_shows_nan() {
        let mut x = [1.0, f32::NAN];
        softmax_in_place(&mut x);
        assert!(x.iter().all(|v| v.is_nan()));
    }

    #[test]
    fn silu_stands_extremes() {
        assert_eq!(silu(-1000.0), -0.0);
        assert_eq!(silu(1000.0), 1000.0);
        let mut out = [0.0];
        silu_mul(&[0.0], &[3.0], &mut out);
        assert_eq!(out, [0.0]);
    }
}
