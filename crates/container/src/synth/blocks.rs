//! Seeded blocks of GGUF's types.
//!
//! All bytes of a block are drawn, but for its scales, which give the values mean 0 and variance
//! 1 / columns. Codes need not lie evenly around 0 (those of four bits go from −8 to 7), so the sign of
//! a block's scale is drawn too: over the blocks of a row the mean is 0 in every type. Where a block has
//! a minimum beside its scale, the minimum is as far from 0 as the codes' centre.

use half::{bf16, f16};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::values::{spread, uniform};
use crate::Role;
use crate::gguf::TensorType;

/// The type where nothing is said.
pub(super) const DEFAULT: TensorType = TensorType::Q4_0;

/// Where the scales of a block lie, and what its values are without them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scale {
    /// Numbers without a scale: f32, f16, bf16.
    None,
    /// `f16` at this byte.
    Half { at: usize },
    /// `f16` scale and `f16` minimum at these bytes; the minimum is `centre` times the scale.
    WithMinimum { at: usize, minimum: usize, centre: f32 },
    /// A power of two with the exponent's bias 127, as one byte in front.
    Exponent,
}

/// How blocks of `kind` are made: their scale, and the root of the mean square of its multiples where all
/// other bytes are uniformly distributed. Codes, sub-scales (`s`) and sub-minima are independent of each other.
fn recipe(kind: TensorType) -> Option<(Scale, f32)> {
    let half = |at| Scale::Half { at };
    let with = |at, minimum, centre| Scale::WithMinimum { at, minimum, centre };
    Some(match kind.name() {
        "F32" | "F16" | "BF16" => (Scale::None, 1.0),
        // −128 … 127.
        "Q8_0" => (half(0), 5461.5f32.sqrt()),
        // −8 … 7 and 0 … 15 less 7.5; −16 … 15 and 0 … 31 less 15.5.
        "Q4_0" => (half(0), 21.5f32.sqrt()),
        "Q4_1" => (with(0, 2, -7.5), 21.25f32.sqrt()),
        "Q5_0" => (half(0), 85.5f32.sqrt()),
        "Q5_1" => (with(0, 2, -15.5), 85.25f32.sqrt()),
        // s q − 1.5 m: s and m 0 … 15, q 0 … 3.
        "Q2_K" => (with(80, 82, 1.5), 192.5f32.sqrt()),
        // s −32 … 31, q −4 … 3.
        "Q3_K" => (half(108), (341.5f32 * 5.5).sqrt()),
        // s q − 7.5 m and s q − 15.5 m: s and m 0 … 63.
        "Q4_K" => (with(0, 2, 7.5), 66_727.0f32.sqrt()),
        "Q5_K" => (with(0, 2, 15.5), 277_639.0f32.sqrt()),
        // s −128 … 127, q −32 … 31.
        "Q6_K" => (half(208), (5461.5f32 * 341.5).sqrt()),
        // The 16 numbers of the table; times s −32 … 31.
        "IQ4_NL" => (half(0), 4548.0f32.sqrt()),
        "IQ4_XS" => (half(0), (4548.0f32 * 341.5).sqrt()),
        // ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}.
        "MXFP4" => (Scale::Exponent, 8.5625f32.sqrt()),
        _ => return None,
    })
}

/// Whether a model can be made in `kind`.
pub(super) fn makes(kind: TensorType) -> bool {
    recipe(kind).is_some()
}

/// Fills whole rows of `columns` values; `out` is a whole number of blocks.
pub(super) fn fill(mut rng: ChaCha8Rng, kind: TensorType, role: Role, columns: usize, out: &mut [u8]) {
    let Some((scale, multiples)) = recipe(kind) else { return };
    if scale == Scale::None {
        return numbers(&mut rng, kind, spread(role, columns), out);
    }
    rng.fill_bytes(out);
    let usual = 1.0 / (multiples * (columns as f32).sqrt());
    for block in out.chunks_exact_mut(kind.block_bytes() as usize) {
        let drawn = usual * (1.0 + 0.25 * uniform(&mut rng));
        let scaled = if rng.next_u32() & 1 == 0 { drawn } else { -drawn };
        let mut put = |at: usize, number: f32| {
            block[at..at + 2].copy_from_slice(&f16::from_f32(number).to_le_bytes());
        };
        match scale {
            Scale::None => {}
            Scale::Half { at } => put(at, scaled),
            Scale::WithMinimum { at, minimum, centre } => {
                put(at, scaled);
                put(minimum, scaled * centre);
            }
            // Half a doubling up or down keeps the mean; models are never so wide that it leaves a byte.
            Scale::Exponent => block[0] = (127.0 + drawn.log2().round()).clamp(0.0, 254.0) as u8,
        }
    }
}

/// Uniformly distributed numbers around a centre.
fn numbers(rng: &mut ChaCha8Rng, kind: TensorType, (centre, reach): (f32, f32), out: &mut [u8]) {
    let mut next = || centre + reach * uniform(rng);
    match kind.block_bytes() {
        4 => out.as_chunks_mut::<4>().0.iter_mut().for_each(|v| *v = next().to_le_bytes()),
        _ if kind.name() == "BF16" => {
            out.as_chunks_mut::<2>().0.iter_mut().for_each(|v| *v = bf16::from_f32(next()).to_le_bytes());
        }
        _ => out.as_chunks_mut::<2>().0.iter_mut().for_each(|v| *v = f16::from_f32(next()).to_le_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metaltail_quant::GgufFormat;
    use rand::SeedableRng;

    #[test]
    fn values_have_mean_0_and_variance_1_over_columns() {
        for format in GgufFormat::ALL {
            let kind = TensorType::all().find(|kind| kind.name() == format.name()).unwrap();
            let (rows, columns) = (64, 1024);
            let mut bytes = vec![0; rows * format.row_bytes(columns).unwrap()];
            fill(ChaCha8Rng::seed_from_u64(1), kind, Role::Attention, columns, &mut bytes);
            let mut values = vec![0.0; rows * columns];
            format.dequantize(&bytes, &mut values);
            let n = values.len() as f32;
            let (mean, square) =
                (values.iter().sum::<f32>() / n, values.iter().map(|v| v * v).sum::<f32>() / n);
            assert!((mean * (columns as f32).sqrt()).abs() < 0.03, "{format}: mean {mean}");
            // A power of two for a scale is up to half a doubling off, so its square up to one.
            let wanted = if kind.name() == "MXFP4" { 0.5..2.0 } else { 0.9..1.15 };
            assert!(wanted.contains(&(square * columns as f32)), "{format}: variance {square}");
        }
    }

    #[test]
    fn every_computed_type_can_be_made_and_no_other() {
        use crate::gguf::Support;
        for kind in TensorType::all() {
            assert_eq!(makes(kind), kind.support() == Support::Computed, "{kind}");
        }
    }

    #[test]
    fn scales_lie_inside_the_block_and_apart() {
        for (kind, (scale, _)) in TensorType::all().filter_map(|kind| Some((kind, recipe(kind)?))) {
            let bytes = kind.block_bytes() as usize;
            match scale {
                Scale::Half { at } => assert!(at + 2 <= bytes, "{kind}"),
                Scale::WithMinimum { at, minimum, .. } => {
                    assert!(at + 2 == minimum && minimum + 2 <= bytes, "{kind}")
                }
                Scale::None | Scale::Exponent => {}
            }
        }
    }
}
