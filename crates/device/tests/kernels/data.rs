//! Numbers to compute with, and how results are compared.

use metaltail_device::kernels::KernelDevice;
use metaltail_quant::{Format, MatrixLayout, OwnedMatrix, dequantize, quantize};

/// What a check says: nothing, or what is wrong.
pub type Outcome = Result<(), String>;

/// 2⁻²⁴: half the distance of neighbours around 1, the largest relative error of one rounding.
pub const ROUNDING: f64 = 1.0 / 16_777_216.0;

/// A NaN that no computation gives: stands where nothing was written.
const POISON: u32 = 0x7FC0_DEAD;

/// Numbers behind every result, to see that nothing is written there.
const MARGIN: usize = 19;

/// Formats, with partial and whole groups in the shapes that the checks use.
pub const FORMATS: [Format; 10] = [
    Format::F32,
    Format::F16,
    Format::Bf16,
    Format::Int8Row,
    Format::Int4Row,
    Format::Int4Group(16),
    Format::Int4Group(48),
    Format::Int4Group(64),
    Format::Int4Group(256),
    Format::Fp8Block,
];

/// A stream of numbers that depends on its seed alone.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Numbers {
        Numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// Below `end`.
    pub fn below(&mut self, end: u32) -> u32 {
        self.next() % end
    }

    /// Between −1 and 1.
    pub fn float(&mut self) -> f32 {
        (f64::from(self.next()) / f64::from(u32::MAX) * 2.0 - 1.0) as f32
    }

    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    /// A matrix of numbers between −1 and 1.
    pub fn matrix(&mut self, format: Format, rows: usize, cols: usize) -> OwnedMatrix {
        let layout = MatrixLayout::new(format, rows, cols).unwrap();
        let (mut weights, mut scales) = (vec![0; layout.weight_bytes()], vec![0; layout.scale_bytes()]);
        quantize(layout, &self.floats(rows * cols), &mut weights, &mut scales).unwrap();
        OwnedMatrix::new(layout, weights, scales).unwrap()
    }
}

/// The numbers of a matrix, as f64.
pub fn values(m: &OwnedMatrix) -> Vec<f64> {
    let mut values = vec![0.0; m.layout().rows() * m.layout().cols()];
    dequantize(m.as_ref(), &mut values);
    values.into_iter().map(f64::from).collect()
}

/// How far a sum of `terms` products can be from the exact one, as a share of the sum of their magnitudes.
///
/// Devices add in different orders. Whatever the order, a term goes through no more additions than the longest chain
/// has, and each rounds once: here the reference's 16 lanes, which is longer than a SIMD group's 32; the fold, scales
/// and products are the rest.
pub fn sum_error(terms: usize) -> f64 {
    ROUNDING * (terms as f64 / 16.0 + 32.0)
}

/// Runs `operation` on poisoned memory for `count` results: all must be written, and nothing behind them.
pub fn written(
    what: &str,
    count: usize,
    operation: impl FnOnce(&mut [f32]) -> Result<(), metaltail_device::kernels::KernelError>,
) -> Result<Vec<f32>, String> {
    let mut out = vec![f32::from_bits(POISON); count + MARGIN];
    operation(&mut out).map_err(|error| format!("{what}: {error}"))?;
    if let Some(at) = out[..count].iter().position(|v| v.to_bits() == POISON) {
        return Err(format!("{what}: number {at} of {count} was not written"));
    }
    if let Some(at) = out[count..].iter().position(|v| v.to_bits() != POISON) {
        return Err(format!("{what}: {at} numbers behind the result something was written"));
    }
    out.truncate(count);
    Ok(out)
}

/// Every number within its bound of the wanted one, NaN where that is NaN.
pub fn near(what: &str, got: &[f32], wanted: &[f32], bound: impl Fn(usize) -> f64) -> Outcome {
    if got.len() != wanted.len() {
        return Err(format!("{what}: {} numbers, wanted {}", got.len(), wanted.len()));
    }
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let distance = (f64::from(*got) - f64::from(*wanted)).abs();
        let good = if wanted.is_nan() { got.is_nan() } else { got == wanted || distance <= bound(i) };
        if !good {
            return Err(format!("{what}: number {i} is {got}, wanted {wanted} ± {:e}", bound(i)));
        }
    }
    Ok(())
}

/// The same bits, any NaN equal to any other.
pub fn same(what: &str, got: &[f32], wanted: &[f32]) -> Outcome {
    let bits = |v: &f32| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() };
    match got.iter().map(bits).ne(wanted.iter().map(bits)) {
        true => Err(format!("{what}: the bits differ")),
        false => Ok(()),
    }
}

/// A product on a device, every result written.
pub fn product(
    device: &mut dyn KernelDevice,
    what: &str,
    m: &OwnedMatrix,
    x: &[f32],
) -> Result<Vec<f32>, String> {
    let layout = m.layout();
    written(what, x.len() / layout.cols() * layout.rows(), |out| device.matmul(m.as_ref(), x, out))
}
