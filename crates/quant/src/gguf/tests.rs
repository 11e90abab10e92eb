use super::*;

/// A line a format: name, bytes, and the bits of the wanted values, in hexadecimal.
const VECTORS: &str = include_str!("../../../../fixtures/gguf/blocks.txt");

fn bytes(hex: &str) -> Vec<u8> {
    let pairs = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

#[test]
fn values_are_those_of_the_independent_package_to_the_bit() {
    let mut seen = Vec::new();
    for line in VECTORS.lines() {
        let [name, stored, wanted] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let format = GgufFormat::ALL.into_iter().find(|format| format.name() == name).unwrap();
        let (stored, wanted) = (bytes(stored), bytes(wanted));
        let wanted: Vec<u32> = wanted.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let mut out = vec![f32::NAN; wanted.len()];
        format.dequantize(&stored, &mut out);
        let bits: Vec<u32> = out.iter().map(|value| value.to_bits()).collect();
        assert_eq!(bits, wanted, "{format}");
        seen.push(format);
    }
    assert_eq!(seen, GgufFormat::ALL);
}

#[test]
fn halves_of_a_byte_are_sixteen_values_apart() {
    // d = 1; byte 0 is 0xF0, all else zero.
    let mut block = [0u8; 18];
    block[..3].copy_from_slice(&[0x00, 0x3C, 0xF0]);
    let mut out = [0.0; 32];
    GgufFormat::Q4_0.dequantize(&block, &mut out);
    assert_eq!((out[0], out[1], out[16]), (-8.0, -8.0, 7.0));
}

#[test]
fn a_scale_of_mxfp4_is_a_power_of_two_and_the_smallest_are_subnormal() {
    for (code, half) in E8M0_HALF.iter().enumerate() {
        assert_eq!(f64::from(*half), 2f64.powi(code as i32 - 128), "{code}");
    }
    // 0x7F is 2⁰; the codes 7 and 15 are ±6.
    let mut block = [0u8; 17];
    block[..2].copy_from_slice(&[0x7F, 0xF7]);
    let mut out = [0.0; 32];
    GgufFormat::Mxfp4.dequantize(&block, &mut out);
    assert_eq!((out[0], out[1], out[16]), (6.0, 0.0, -6.0));
}

#[test]
fn values_are_finite_exactly_where_the_halves_are() {
    let infinite = 0x7C00u16.to_le_bytes();
    for format in GgufFormat::ALL {
        // Every scale 1 (0x3C3C in f16), every small scale something.
        let block = vec![0x3C; format.block_bytes()];
        let mut out = vec![0.0; format.block_values()];
        format.dequantize(&block, &mut out);
        assert!(out.iter().all(|value| value.is_finite()), "{format}");
        for at in format.halves() {
            let mut block = block.clone();
            block[*at..at + 2].copy_from_slice(&infinite);
            format.dequantize(&block, &mut out);
            assert!(out.iter().all(|value| !value.is_finite()), "{format} {at}");
        }
    }
}

#[test]
fn rows_are_whole_blocks() {
    assert_eq!(GgufFormat::Q5_1.row_bytes(64), Some(48));
    assert_eq!(GgufFormat::Q5_1.row_bytes(33), None);
    assert_eq!(GgufFormat::Q8_0.row_bytes(0), Some(0));
    assert_eq!(GgufFormat::Q8_0.row_bytes(usize::MAX - 31), None);
    assert_eq!(GgufFormat::Q6K.row_bytes(512), Some(420));
    assert_eq!(GgufFormat::Q6K.row_bytes(288), None);
}

#[test]
fn any_bytes_have_values() {
    for format in GgufFormat::ALL {
        for byte in [0x00, 0x80, 0xFF] {
            let mut out = vec![0.0; 512];
            format.dequantize(&vec![byte; format.row_bytes(512).unwrap()], &mut out);
        }
    }
}

#[test]
#[should_panic(expected = "bytes of 32 values in Q8_0")]
fn a_block_that_is_cut_is_refused() {
    GgufFormat::Q8_0.dequantize(&[0; 33], &mut [0.0; 32]);
}
