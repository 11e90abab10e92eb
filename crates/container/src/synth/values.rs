//! Seeded numbers: a tensor's bytes depend on the seed, its name, role and layout and nothing else.

use metaltail_quant::{Format, MatrixLayout, OwnedMatrix};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use xxhash_rust::xxh3::xxh3_64;

use crate::Role;
use crate::slab_writer::WriteError;

/// ChaCha stream of a tensor's weights.
const WEIGHTS: u64 = 0;
/// ChaCha stream of a tensor's scales.
const SCALES: u64 = 1;

/// The generator of one model's numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Values {
    pub seed: u64,
}

/// Centre and greatest distance from it of uniformly distributed numbers.
pub(super) fn spread(role: Role, cols: usize) -> (f32, f32) {
    match role {
        Role::Norm => (1.0, 0.1),
        Role::Bias | Role::RouterBias => (0.0, 0.01),
        // Variance 1 / cols: a row's product with a normed input is about 1.
        _ => (0.0, (3.0 / cols as f32).sqrt()),
    }
}

impl Values {
    fn stream(self, tensor: &str, stream: u64) -> ChaCha8Rng {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&self.seed.to_le_bytes());
        key[8..16].copy_from_slice(&xxh3_64(tensor.as_bytes()).to_le_bytes());
        let mut rng = ChaCha8Rng::from_seed(key);
        rng.set_stream(stream);
        rng
    }

    /// The generator of one piece of a tensor that is made in pieces.
    pub(super) fn piece(self, tensor: &str, number: u64) -> ChaCha8Rng {
        self.stream(&format!("{tensor}/{number}"), WEIGHTS)
    }

    /// Fills the weight bytes of a tensor.
    pub(super) fn weights(
        self,
        tensor: &str,
        role: Role,
        layout: MatrixLayout,
        out: &mut [u8],
    ) -> Result<(), WriteError> {
        let mut rng = self.stream(tensor, WEIGHTS);
        match layout.format() {
            Format::Int4Row | Format::Int4Group(_) => {
                rng.fill_bytes(out);
                for byte in out.iter_mut() {
                    *byte = symmetric_nibbles(*byte);
                }
                if !layout.cols().is_multiple_of(2) {
                    // The nibble behind the last column holds 0.
                    for row in out.chunks_mut(layout.row_bytes()) {
                        row[layout.row_bytes() - 1] = row[layout.row_bytes() - 1] & 0x0F | 0x80;
                    }
                }
            }
            Format::Int8Row => {
                rng.fill_bytes(out);
                for byte in out.iter_mut() {
                    *byte = if *byte == 0x80 { 0 } else { *byte };
                }
            }
            _ => out.copy_from_slice(self.rounded(tensor, role, layout)?.weights()),
        }
        Ok(())
    }

    /// Fills the scale bytes of a tensor, of such a size that its weights have variance 1 / cols.
    pub(super) fn scales(
        self,
        tensor: &str,
        role: Role,
        layout: MatrixLayout,
        out: &mut [u8],
    ) -> Result<(), WriteError> {
        let deviation = match layout.format() {
            // Of the integers −7 … 7 with 0 twice as likely, and of −127 … 127 likewise.
            Format::Int4Row | Format::Int4Group(_) => 17.5f32.sqrt(),
            Format::Int8Row => 5397.5f32.sqrt(),
            _ => {
                out.copy_from_slice(self.rounded(tensor, role, layout)?.scales());
                return Ok(());
            }
        };
        let scale = 1.0 / (deviation * (layout.cols() as f32).sqrt());
        let mut rng = self.stream(tensor, SCALES);
        for bytes in out.as_chunks_mut::<4>().0 {
            *bytes = (scale * (1.0 + 0.25 * uniform(&mut rng))).to_le_bytes();
        }
        Ok(())
    }

    /// f32 numbers rounded to `layout`'s format; they hold in bf16, so that every form of the
    /// model has the same norms and routers.
    fn rounded(self, tensor: &str, role: Role, layout: MatrixLayout) -> Result<OwnedMatrix, WriteError> {
        let mut rng = self.stream(tensor, WEIGHTS);
        let (centre, reach) = spread(role, layout.cols());
        let numbers: Vec<f32> = (0..layout.rows() * layout.cols())
            .map(|_| half::bf16::from_f32(centre + reach * uniform(&mut rng)).to_f32())
            .collect();
        OwnedMatrix::quantize(layout, &numbers).map_err(|source| WriteError::Quantise {
            tensor: tensor.to_owned(),
            format: layout.format().to_string(),
            reason: source.to_string(),
        })
    }
}

/// A number in [−1, 1).
pub(super) fn uniform(rng: &mut ChaCha8Rng) -> f32 {
    rng.next_u32().cast_signed() as f32 / (1u32 << 31) as f32
}

/// Maps the nibble 0 (the number −8, which would pull the mean down) to 8 (the number 0).
fn symmetric_nibbles(byte: u8) -> u8 {
    let low = if byte & 0x0F == 0 { 0x08 } else { byte & 0x0F };
    let high = if byte & 0xF0 == 0 { 0x80 } else { byte & 0xF0 };
    low | high
}

#[cfg(test)]
mod tests {
    use super::*;
    use metaltail_quant::dequantize;

    fn matrix(seed: u64, tensor: &str, format: Format, rows: usize, cols: usize) -> Vec<f32> {
        let layout = MatrixLayout::new(format, rows, cols).unwrap();
        let values = Values { seed };
        let (mut weights, mut scales) = (vec![0; layout.weight_bytes()], vec![0; layout.scale_bytes()]);
        values.weights(tensor, Role::Attention, layout, &mut weights).unwrap();
        values.scales(tensor, Role::Attention, layout, &mut scales).unwrap();
        let owned = OwnedMatrix::new(layout, weights, scales).unwrap();
        let mut out = vec![0.0; rows * cols];
        dequantize(owned.as_ref(), &mut out);
        out
    }

    #[test]
    fn every_format_has_mean_0_and_variance_1_over_cols() {
        let all =
            [Format::F32, Format::F16, Format::Bf16, Format::Int8Row, Format::Int4Row, Format::Int4Group(64)];
        for format in all.into_iter().chain([Format::Fp8Block]) {
            let (rows, cols) = (200, 333);
            let numbers = matrix(1, "w", format, rows, cols);
            let n = numbers.len() as f32;
            let mean = numbers.iter().sum::<f32>() / n;
            let variance = numbers.iter().map(|v| v * v).sum::<f32>() / n;
            assert!((mean * (cols as f32).sqrt()).abs() < 0.02, "{format}: mean {mean}");
            assert!((0.9..1.15).contains(&(variance * cols as f32)), "{format}: variance {variance}");
        }
    }

    #[test]
    fn numbers_follow_from_seed_and_name() {
        let one = matrix(1, "a", Format::Int4Group(32), 8, 64);
        assert_eq!(one, matrix(1, "a", Format::Int4Group(32), 8, 64));
        assert_ne!(one, matrix(2, "a", Format::Int4Group(32), 8, 64));
        assert_ne!(one, matrix(1, "b", Format::Int4Group(32), 8, 64));
    }
}
