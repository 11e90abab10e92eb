//! OCP E4M3 (the "FN" variant): 1 sign, 4 exponent bits of bias 7, 3 mantissa bits.
//!
//! No infinities; only `0x7F` and `0xFF` are NaN; the largest finite value is 448.
//! Source: OCP 8-bit Floating Point Specification, revision 1.0, table 1.

/// Largest finite value of the format.
pub const FP8_MAX: f32 = 448.0;

const fn decode(code: u8) -> f32 {
    let exponent = (code >> 3) & 15;
    let mantissa = (code & 7) as u32;
    let magnitude = if code & 0x7F == 0x7F {
        f32::NAN
    } else if exponent == 0 {
        // Subnormal: mantissa · 2⁻⁹.
        mantissa as f32 / 512.0
    } else {
        f32::from_bits((exponent as u32 + 127 - 7) << 23 | mantissa << 20)
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

const fn table() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = decode(code as u8);
        code += 1;
    }
    values
}

/// The value of every E4M3 code.
pub static FP8_TABLE: [f32; 256] = table();

/// The E4M3 code nearest to `value`, ties to even; magnitudes above 448 become 448, NaN stays NaN.
pub fn fp8_encode(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | 0x7F;
    }
    let magnitude = value.abs().min(FP8_MAX);
    // Below the smallest normal, 2⁻⁶, codes are multiples of 2⁻⁹ (8 of them is that normal).
    if magnitude < 1.0 / 64.0 {
        return sign | (magnitude * 512.0).round_ties_even() as u8;
    }
    // Keep 3 of 23 mantissa bits; a carry runs into the exponent as it should.
    let bits = magnitude.to_bits();
    let rounded = bits + 0x7_FFFF + ((bits >> 20) & 1);
    let exponent = (rounded >> 23) - (127 - 7);
    sign | (exponent << 3) as u8 | ((rounded >> 20) & 7) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn table_equals_the_formula_of_the_specification() {
        for code in 0..=255u8 {
            let (e, m) = (i32::from(code >> 3 & 15), f64::from(code & 7));
            let sign = if code < 128 { 1.0 } else { -1.0 };
            let wanted = match (e, code & 7) {
                (15, 7) => f64::NAN,
                (0, _) => sign * 2f64.powi(-6) * (m / 8.0),
                _ => sign * 2f64.powi(e - 7) * (1.0 + m / 8.0),
            };
            let got = f64::from(FP8_TABLE[usize::from(code)]);
            assert!(got == wanted || got.is_nan() && wanted.is_nan(), "code {code:#x}: {got} {wanted}");
        }
        assert_eq!(FP8_TABLE[0x7E], FP8_MAX);
        assert_eq!(FP8_TABLE[0x01], 1.0 / 512.0);
    }

    #[test]
    fn every_code_encodes_to_itself() {
        for code in 0..=255u8 {
            assert_eq!(fp8_encode(FP8_TABLE[usize::from(code)]), code);
        }
    }

    #[test]
    fn ties_go_to_the_even_code_and_large_values_saturate() {
        assert_eq!(fp8_encode(1.0625), 0x38); // between 1.0 (0x38) and 1.125 (0x39)
        assert_eq!(fp8_encode(1.1875), 0x3A); // between 1.125 (0x39) and 1.25 (0x3A)
        assert_eq!(fp8_encode(0.5 / 512.0), 0x00);
        assert_eq!(fp8_encode(1.5 / 512.0), 0x02);
        assert_eq!(fp8_encode(1e9), 0x7E);
        assert_eq!(fp8_encode(f32::NEG_INFINITY), 0xFE);
    }

    proptest! {
        #[test]
        fn no_code_is_nearer_than_the_one_chosen(value in -460.0f32..460.0) {
            let chosen = (FP8_TABLE[usize::from(fp8_encode(value))] - value).abs();
            for code in FP8_TABLE.iter().filter(|v| !v.is_nan()) {
                prop_assert!((code - value).abs() >= chosen);
            }
        }
    }
}
