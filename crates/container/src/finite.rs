//! NaN and infinity in stored values, found without decoding them.

use metaltail_quant::{Format, GgufFormat};

/// Index and value of the first NaN or infinity of values stored in f32, f16 or bf16; other
/// formats hold none to look for.
pub(crate) fn first_odd(format: Format, bytes: &[u8]) -> Option<(usize, f32)> {
    let halves = |exponent: u16, widen: fn(u16) -> f32| {
        let (halves, _) = bytes.as_chunks::<2>();
        let bits = halves.iter().map(|&half| u16::from_le_bytes(half));
        // All bits of the exponent are set in NaN and infinity, and in nothing else.
        let odd = |(index, bits): (usize, u16)| (bits & exponent == exponent).then(|| (index, widen(bits)));
        bits.enumerate().find_map(odd)
    };
    match format {
        Format::F32 => {
            let values = bytes.as_chunks::<4>().0.iter().map(|&value| f32::from_le_bytes(value));
            values.enumerate().find(|(_, value)| !value.is_finite())
        }
        Format::F16 => halves(0x7c00, |bits| half::f16::from_bits(bits).to_f32()),
        Format::Bf16 => halves(0x7f80, |bits| half::bf16::from_bits(bits).to_f32()),
        _ => None,
    }
}

/// Number of the block and value of the first scale within GGUF blocks that is NaN or infinite.
pub(crate) fn first_odd_scale(format: GgufFormat, bytes: &[u8]) -> Option<(usize, f32)> {
    let blocks = bytes.chunks_exact(format.block_bytes());
    blocks.enumerate().find_map(|(index, block)| {
        let scales =
            format.halves().iter().map(|&at| half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32());
        scales.into_iter().find(|scale| !scale.is_finite()).map(|scale| (index, scale))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn exactly_what_is_not_finite_is_found(
            bits in prop::collection::vec(prop_oneof![any::<u16>(), Just(0x7c00), Just(0x7f80), Just(0xffff)], 0..40)
        ) {
            let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
            let f16 = bits.iter().position(|&b| !half::f16::from_bits(b).is_finite());
            prop_assert_eq!(first_odd(Format::F16, &bytes).map(|odd| odd.0), f16);
            let bf16 = bits.iter().position(|&b| !half::bf16::from_bits(b).is_finite());
            prop_assert_eq!(first_odd(Format::Bf16, &bytes).map(|odd| odd.0), bf16);
            let f32 = bytes.chunks_exact(4).position(|c| !f32::from_le_bytes(c.try_into().unwrap()).is_finite());
            prop_assert_eq!(first_odd(Format::F32, &bytes).map(|odd| odd.0), f32);
        }
    }

    #[test]
    fn a_scale_within_a_block_is_found_by_its_block() {
        for format in GgufFormat::ALL {
            let mut bytes = vec![0; 3 * format.block_bytes()];
            assert_eq!(first_odd_scale(format, &bytes), None);
            // Codes of any value are no scales.
            bytes.fill(0x3C);
            assert_eq!(first_odd_scale(format, &bytes), None);
            for at in format.halves() {
                let at = 2 * format.block_bytes() + at;
                bytes[at..at + 2].copy_from_slice(&0xFC00u16.to_le_bytes());
                assert_eq!(first_odd_scale(format, &bytes), Some((2, f32::NEG_INFINITY)));
                bytes[at..at + 2].fill(0);
            }
        }
    }
}
