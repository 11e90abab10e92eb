//! Every instruction set, batch width, thread count and alignment gives the bits of the scalar reference.

use std::ops::Range;

use metaltail_kernels::{Isa, Kernels, Pool};
use metaltail_quant::{Format, GROUP_SIZES, GgufFormat, MatrixLayout, MatrixRef, QuantizedRows, dequantize};
use proptest::prelude::*;

/// Seeded numbers (a linear congruential generator, upper bits).
struct Numbers(u64);

impl Numbers {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// In −2..2.
    fn float(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1 << 22) as f32 - 2.0
    }

    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }
}

/// A matrix in buffers that begin at any alignment.
struct Matrix {
    layout: MatrixLayout,
    weights: Vec<u8>,
    scales: Vec<u8>,
    shift: usize,
}

impl Matrix {
    /// Any bytes are weights; for the float formats they are random numbers, so that sums stay finite.
    fn new(format: Format, rows: usize, cols: usize, shift: usize, numbers: &mut Numbers) -> Matrix {
        let layout = MatrixLayout::new(format, rows, cols).unwrap();
        let mut weights = vec![0; shift];
        match format {
            Format::F32 => weights.extend(numbers.floats(rows * cols).iter().flat_map(|v| v.to_le_bytes())),
            Format::F16 => {
                weights.extend((0..rows * cols).flat_map(|_| (numbers.bits() as u16 & 0xBFFF).to_le_bytes()))
            }
            Format::Bf16 => weights.extend(
                numbers.floats(rows * cols).iter().flat_map(|v| [v.to_le_bytes()[2], v.to_le_bytes()[3]]),
            ),
            // One code in 128 is NaN: leave those to a test of their own.
            Format::Fp8Block => {
                weights.extend((0..layout.weight_bytes()).map(|_| numbers.bits() as u8 & 0xF7))
            }
            Format::Gguf(format) => {
                weights.extend((0..layout.weight_bytes()).map(|_| numbers.bits() as u8));
                for block in weights[shift..].chunks_mut(format.block_bytes()) {
                    moderate(format, block, numbers);
                }
            }
            _ => weights.extend((0..layout.weight_bytes()).map(|_| numbers.bits() as u8)),
        }
        let mut scales = vec![0; shift];
        scales.extend((0..layout.scale_bytes() / 4).flat_map(|_| (numbers.float() * 0.01).to_le_bytes()));
        Matrix { layout, weights, scales, shift }
    }

    fn view(&self) -> MatrixRef<'_> {
        MatrixRef::new(self.layout, &self.weights[self.shift..], &self.scales[self.shift..]).unwrap()
    }
}

/// Gives a block of random bytes scales of either sign, so that its values are below 2¹⁰.
fn moderate(format: GgufFormat, block: &mut [u8], numbers: &mut Numbers) {
    for at in format.halves() {
        // Exponents 0 (subnormal), 1, 8 and 9: below 2⁻⁵.
        let half = numbers.bits() as u16 & 0xA7FF;
        block[*at..at + 2].copy_from_slice(&half.to_le_bytes());
    }
    if format == GgufFormat::Mxfp4 {
        block[0] = 112 + (numbers.bits() % 16) as u8;
    }
}

/// The columns asked for, or as many more as make whole blocks.
fn whole(format: Format, cols: usize) -> usize {
    match format {
        Format::Gguf(format) => cols.next_multiple_of(format.block_values()),
        _ => cols,
    }
}

fn supported() -> Vec<Kernels> {
    Isa::ALL.into_iter().filter_map(|isa| Kernels::new(isa).ok()).collect()
}

fn reference() -> Kernels {
    Kernels::new(Isa::Scalar).unwrap()
}

/// Bits, with every NaN the same: which NaN comes out is the processor's affair.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
}

fn matmul(k: Kernels, pool: &Pool, m: MatrixRef<'_>, rows: Range<usize>, x: &[f32], n: usize) -> Vec<f32> {
    let stride = rows.len() + 1;
    let mut out = vec![-7.0; n * stride];
    k.matmul(pool, m, rows.clone(), x, n, &mut out, stride);
    assert!(out.iter().skip(rows.len()).step_by(stride).all(|v| *v == -7.0), "wrote past the row");
    out.chunks(stride).flat_map(|row| row[..rows.len()].to_vec()).collect()
}

fn matmul_q8(k: Kernels, pool: &Pool, m: MatrixRef<'_>, rows: Range<usize>, x: &QuantizedRows) -> Vec<f32> {
    let mut out = vec![-7.0; x.rows() * rows.len()];
    k.matmul_q8(pool, m, rows.clone(), x, &mut out, rows.len());
    out
}

fn matmul_t(k: Kernels, m: MatrixRef<'_>, rows: Range<usize>, x: &[f32]) -> Vec<f32> {
    let mut out = vec![-7.0; m.layout().cols()];
    k.matmul_t(m, rows, x, &mut out);
    out
}

fn any_format() -> impl Strategy<Value = Format> {
    prop_oneof![
        Just(Format::F32),
        Just(Format::F16),
        Just(Format::Bf16),
        Just(Format::Int8Row),
        Just(Format::Int4Row),
        Just(Format::Fp8Block),
        prop::sample::select(&GROUP_SIZES[..]).prop_map(Format::Int4Group),
        prop::sample::select(&GROUP_SIZES[..]).prop_map(Format::Int4Group),
        any_gguf(),
        any_gguf(),
        any_gguf(),
    ]
}

fn any_gguf() -> impl Strategy<Value = Format> {
    prop::sample::select(&GgufFormat::ALL[..]).prop_map(Format::Gguf)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_instruction_set_gives_the_bits_of_the_reference(
        format in any_format(), rows in 1usize..14, cols in 1usize..400, n in 1usize..10,
        cut in (0usize..14, 0usize..14), shift in 0usize..4, seed in any::<u64>(),
    ) {
        let (mut numbers, cols) = (Numbers(seed), whole(format, cols));
        let matrix = Matrix::new(format, rows, cols, shift, &mut numbers);
        let x = numbers.floats(n * cols);
        let (a, b) = (cut.0.min(rows), cut.1.min(rows));
        let range = a.min(b)..a.max(b);
        let pool = Pool::new(1);
        let quantized = QuantizedRows::new(&x, cols);
        let factors = &numbers.floats(rows)[range.clone()];

        let wanted = matmul(reference(), &pool, matrix.view(), range.clone(), &x, n);
        let wanted_t = matmul_t(reference(), matrix.view(), range.clone(), factors);
        for k in supported() {
            let got = matmul(k, &pool, matrix.view(), range.clone(), &x, n);
            prop_assert_eq!(bits(&got), bits(&wanted), "matmul {} {}", k.isa(), format);
            let got = matmul_t(k, matrix.view(), range.clone(), factors);
            prop_assert_eq!(bits(&got), bits(&wanted_t), "matmul_t {} {}", k.isa(), format);
        }
        if Kernels::has_integer_path(format) {
            let wanted = matmul_q8(reference(), &pool, matrix.view(), range.clone(), &quantized);
            for k in supported() {
                let got = matmul_q8(k, &pool, matrix.view(), range.clone(), &quantized);
                prop_assert_eq!(bits(&got), bits(&wanted), "matmul_q8 {} {}", k.isa(), format);
            }
        }
    }

    #[test]
    fn a_row_of_a_batch_has_the_bits_of_the_row_alone(
        format in any_format(), cols in 1usize..200, n in 1usize..10, threads in 1usize..4, seed in any::<u64>(),
    ) {
        let (mut numbers, cols) = (Numbers(seed), whole(format, cols));
        let rows = 37;
        let matrix = Matrix::new(format, rows, cols, 0, &mut numbers);
        let x = numbers.floats(n * cols);
        let (pool, alone) = (Pool::new(threads), Pool::new(1));
        for k in supported() {
            let batch = matmul(k, &pool, matrix.view(), 0..rows, &x, n);
            for (i, x) in x.chunks(cols).enumerate() {
                let single = matmul(k, &alone, matrix.view(), 3..rows, x, 1);
                prop_assert_eq!(bits(&batch[i * rows + 3..(i + 1) * rows]), bits(&single));
            }
            if Kernels::has_integer_path(format) {
                let batch = matmul_q8(k, &pool, matrix.view(), 0..rows, &QuantizedRows::new(&x, cols));
                for (i, x) in x.chunks(cols).enumerate() {
                    let single = matmul_q8(k, &alone, matrix.view(), 3..rows, &QuantizedRows::new(x, cols));
                    prop_assert_eq!(bits(&batch[i * rows + 3..(i + 1) * rows]), bits(&single));
                }
            }
        }
    }

    #[test]
    fn products_are_near_those_in_double_precision(
        format in any_format(), rows in 1usize..6, cols in 1usize..300, seed in any::<u64>(),
    ) {
        let (mut numbers, cols) = (Numbers(seed), whole(format, cols));
        let matrix = Matrix::new(format, rows, cols, 0, &mut numbers);
        let x = numbers.floats(cols);
        let mut plain = vec![0.0; rows * cols];
        dequantize(matrix.view(), &mut plain);
        let got = matmul(Kernels::best(), &Pool::new(1), matrix.view(), 0..rows, &x, 1);
        for (row, got) in plain.chunks(cols).zip(got) {
            let wanted: f64 = row.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            let size: f64 = row.iter().zip(&x).map(|(w, x)| f64::from(w.abs()) * f64::from(x.abs())).sum();
            prop_assert!((f64::from(got) - wanted).abs() <= 1e-5 * size, "{format}: {got} {wanted}");
        }
    }

    #[test]
    fn integer_products_are_those_of_the_quantised_activations(
        format in any_format(), cols in 1usize..300, seed in any::<u64>(),
    ) {
        prop_assume!(Kernels::has_integer_path(format));
        let (mut numbers, cols) = (Numbers(seed), whole(format, cols));
        let matrix = Matrix::new(format, 5, cols, 0, &mut numbers);
        let quantized = QuantizedRows::new(&numbers.floats(cols), cols);
        let mut x = vec![0.0; cols];
        quantized.dequantize_row(0, &mut x);
        let mut plain = vec![0.0; 5 * cols];
        dequantize(matrix.view(), &mut plain);
        let got = matmul_q8(Kernels::best(), &Pool::new(1), matrix.view(), 0..5, &quantized);
        for (row, got) in plain.chunks(cols).zip(got) {
            let wanted: f64 = row.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            let size: f64 = row.iter().zip(&x).map(|(w, x)| f64::from(w.abs()) * f64::from(x.abs())).sum();
            prop_assert!((f64::from(got) - wanted).abs() <= 1e-5 * size, "{format}: {got} {wanted}");
        }
    }

    #[test]
    fn the_integer_path_is_off_by_no_more_than_the_rounding_of_activations(
        format in any_gguf(), cols in 1usize..600, seed in any::<u64>(),
    ) {
        let (mut numbers, cols) = (Numbers(seed), whole(format, cols));
        let matrix = Matrix::new(format, 3, cols, 0, &mut numbers);
        let x = numbers.floats(cols);
        let quantized = QuantizedRows::new(&x, cols);
        let mut plain = vec![0.0; 3 * cols];
        dequantize(matrix.view(), &mut plain);
        let got = matmul_q8(Kernels::best(), &Pool::new(1), matrix.view(), 0..3, &quantized);
        for (row, got) in plain.chunks(cols).zip(got) {
            let (mut wanted, mut most) = (0.0, 0.0);
            for (col, (w, x)) in row.iter().zip(&x).enumerate() {
                let step = f64::from(quantized.scales(0)[col / 64]);
                wanted += f64::from(*w) * f64::from(*x);
                // Half a step of the activation, and the rounding of sums.
                most += f64::from(w.abs()) * (0.5001 * step + 1e-5 * f64::from(x.abs()));
            }
            prop_assert!((f64::from(got) - wanted).abs() <= most, "{format}: {got} {wanted}");
        }
    }

    #[test]
    fn dot_and_axpy_give_the_bits_of_the_reference(len in 0usize..100, alpha in -2.0f32..2.0, seed in any::<u64>()) {
        let mut numbers = Numbers(seed);
        let (a, b) = (numbers.floats(len), numbers.floats(len));
        let mut wanted = b.clone();
        reference().axpy(alpha, &a, &mut wanted);
        for k in supported() {
            prop_assert_eq!(k.dot(&a, &b).to_bits(), reference().dot(&a, &b).to_bits());
            let mut got = b.clone();
            k.axpy(alpha, &a, &mut got);
            prop_assert_eq!(bits(&got), bits(&wanted));
        }
    }
}

#[test]
fn inputs_that_outgrow_the_cache_keep_their_bits() {
    let mut numbers = Numbers(11);
    let (least, n) = (70_005, 9);
    let pool = Pool::new(2);
    for format in [Format::Bf16, Format::Int4Group(64), Format::Gguf(GgufFormat::Q4_1)] {
        let cols = whole(format, least);
        let x = numbers.floats(n * cols);
        let quantized = QuantizedRows::new(&x, cols);
        let matrix = Matrix::new(format, 5, cols, 1, &mut numbers);
        let wanted = matmul(reference(), &pool, matrix.view(), 0..5, &x, n);
        for k in supported() {
            let got = matmul(k, &pool, matrix.view(), 0..5, &x, n);
            assert_eq!(bits(&got), bits(&wanted), "{} {format}", k.isa());
        }
        if Kernels::has_integer_path(format) {
            let wanted = matmul_q8(reference(), &pool, matrix.view(), 0..5, &quantized);
            for k in supported() {
                let got = matmul_q8(k, &pool, matrix.view(), 0..5, &quantized);
                assert_eq!(bits(&got), bits(&wanted), "{} {format}", k.isa());
            }
        }
    }
}

#[test]
fn the_largest_bytes_do_not_saturate() {
    let cols = 256;
    let x = vec![3.0; cols];
    let minus: Vec<f32> = x.iter().map(|v| -v).collect();
    for (format, byte, value) in [
        (Format::Int8Row, 0x80, -128.0),
        (Format::Int8Row, 0x7F, 127.0),
        (Format::Int4Row, 0x00, -8.0),
        (Format::Int4Row, 0xFF, 7.0),
    ] {
        let layout = MatrixLayout::new(format, 1, cols).unwrap();
        let weights = vec![byte; layout.weight_bytes()];
        let scales = 1.0f32.to_le_bytes();
        let m = MatrixRef::new(layout, &weights, &scales).unwrap();
        for k in supported() {
            for x in [&x, &minus] {
                let got = matmul_q8(k, &Pool::new(1), m, 0..1, &QuantizedRows::new(x, cols))[0];
                let wanted = value * x[0] * cols as f32;
                assert!((got - wanted).abs() <= wanted.abs() * 1e-6, "{format} {} {got} {wanted}", k.isa());
            }
        }
    }
}

/// All three products of every instruction set against the reference, for 1 to 9 inputs of `cols` columns.
fn check_gguf(format: GgufFormat, matrix: &Matrix, cols: usize, numbers: &mut Numbers) {
    let pool = Pool::new(1);
    let rows = matrix.layout.rows();
    let factors = numbers.floats(rows);
    for n in [1, 2, 3, 4, 9] {
        let x = numbers.floats(n * cols);
        let quantized = QuantizedRows::new(&x, cols);
        let float = matmul(reference(), &pool, matrix.view(), 0..rows, &x, n);
        let integer = matmul_q8(reference(), &pool, matrix.view(), 0..rows, &quantized);
        let transposed = matmul_t(reference(), matrix.view(), 0..rows, &factors);
        for k in supported() {
            let what = format!("{} {format}, {n} × {cols}, shift {}", k.isa(), matrix.shift);
            let got = matmul(k, &pool, matrix.view(), 0..rows, &x, n);
            assert_eq!(bits(&got), bits(&float), "matmul {what}");
            let got = matmul_q8(k, &pool, matrix.view(), 0..rows, &quantized);
            assert_eq!(bits(&got), bits(&integer), "matmul_q8 {what}");
            let got = matmul_t(k, matrix.view(), 0..rows, &factors);
            assert_eq!(bits(&got), bits(&transposed), "matmul_t {what}");
        }
    }
}

#[test]
fn rows_of_few_blocks_at_any_alignment_keep_their_bits() {
    let mut numbers = Numbers(3);
    for format in GgufFormat::ALL {
        for cols in [32, 64, 96, 256, 288, 320, 512, 2880] {
            if cols % format.block_values() == 0 {
                for shift in [0, 1, 3] {
                    let matrix = Matrix::new(Format::Gguf(format), 7, cols, shift, &mut numbers);
                    check_gguf(format, &matrix, cols, &mut numbers);
                }
            }
        }
    }
}

#[test]
fn hostile_blocks_give_numbers_or_nan_and_never_panic() {
    let mut numbers = Numbers(4);
    for format in GgufFormat::ALL {
        for byte in [0x00, 0x7F, 0x80, 0x7C, 0xFC, 0xFF] {
            let layout = MatrixLayout::new(Format::Gguf(format), 5, 256).unwrap();
            let weights = vec![byte; layout.weight_bytes()];
            let matrix = Matrix { layout, weights, scales: Vec::new(), shift: 0 };
            check_gguf(format, &matrix, 256, &mut numbers);
        }
    }
}

#[test]
fn the_largest_codes_do_not_saturate() {
    let cols = 256;
    for format in GgufFormat::ALL {
        for byte in [0x00u8, 0x7F, 0x80, 0xFF] {
            let layout = MatrixLayout::new(Format::Gguf(format), 1, cols).unwrap();
            let mut weights = vec![byte; layout.weight_bytes()];
            for block in weights.chunks_mut(format.block_bytes()) {
                for at in format.halves() {
                    block[*at..at + 2].copy_from_slice(&[0x00, 0x3C]);
                }
                if format == GgufFormat::Mxfp4 {
                    block[0] = 128;
                }
            }
            let m = MatrixRef::new(layout, &weights, &[]).unwrap();
            let mut plain = vec![0.0; cols];
            dequantize(m, &mut plain);
            for x in [3.0f32, -3.0] {
                let quantized = QuantizedRows::new(&vec![x; cols], cols);
                let wanted: f32 = plain.iter().map(|w| w * x).sum();
                let size: f32 = plain.iter().map(|w| (w * x).abs()).sum();
                for k in supported() {
                    let got = matmul_q8(k, &Pool::new(1), m, 0..1, &quantized)[0];
                    assert!(
                        (got - wanted).abs() <= size * 1e-5,
                        "{format} {byte:#x} {}: {got} {wanted}",
                        k.isa()
                    );
                }
            }
        }
    }
}

#[test]
fn every_fp8_code_decodes_alike() {
    // One column: the product with 1 is the code's value times the scale.
    let layout = MatrixLayout::new(Format::Fp8Block, 256, 1).unwrap();
    let weights: Vec<u8> = (0..=255).collect();
    let scales: Vec<u8> = [1.0f32, 2.0].iter().flat_map(|s| s.to_le_bytes()).collect();
    let m = MatrixRef::new(layout, &weights, &scales).unwrap();
    let mut wanted = vec![0.0; 256];
    dequantize(m, &mut wanted);
    for k in supported() {
        let got = matmul(k, &Pool::new(1), m, 0..256, &[1.0], 1);
        for (code, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            assert!(
                got == wanted || got.is_nan() && wanted.is_nan(),
                "{} code {code:#x}: {got} {wanted}",
                k.isa()
            );
        }
        assert!(got[0x7F].is_nan() && got[0xFF].is_nan());
    }
}

#[test]
fn every_f16_and_bf16_decodes_alike() {
    for format in [Format::F16, Format::Bf16] {
        let layout = MatrixLayout::new(format, 4096, 16).unwrap();
        let weights: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let m = MatrixRef::new(layout, &weights, &[]).unwrap();
        let mut wanted = vec![0.0; 1 << 16];
        dequantize(m, &mut wanted);
        for k in supported() {
            for row in 0..4096 {
                // The transpose with one row is that row times the factor, plus the +0 it starts from.
                let got = matmul_t(k, m, row..row + 1, &[1.0]);
                let wanted: Vec<f32> = wanted[row * 16..][..16].iter().map(|v| v + 0.0).collect();
                assert_eq!(bits(&got), bits(&wanted), "{} {format} row {row}", k.isa());
            }
        }
    }
}

#[test]
fn a_tail_leaves_negative_zero_lanes_alone() {
    // Each product underflows to −0 in lanes 0..16; the tail of one column must not turn lanes 1..16 into +0.
    let tiny = f32::from_bits(1);
    let mut weights = [tiny; 17];
    weights[16] = -tiny;
    let bytes: Vec<u8> = weights.iter().flat_map(|v| v.to_le_bytes()).collect();
    let m = MatrixRef::new(MatrixLayout::new(Format::F32, 1, 17).unwrap(), &bytes, &[]).unwrap();
    let mut x = [-0.25f32; 17];
    x[16] = 0.25;
    for k in supported() {
        let got = matmul(k, &Pool::new(1), m, 0..1, &x, 1)[0];
        assert_eq!(got.to_bits(), (-0.0f32).to_bits(), "{}", k.isa());
    }
}

#[test]
fn activations_that_are_not_finite_show_and_stay_in_their_row() {
    let mut numbers = Numbers(5);
    let matrix = Matrix::new(Format::Int4Group(64), 8, 128, 0, &mut numbers);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = vec![1.0; 256];
        x[3] = bad;
        for k in supported() {
            let got = matmul_q8(k, &Pool::new(1), matrix.view(), 0..8, &QuantizedRows::new(&x, 128));
            assert!(got[..8].iter().all(|v| v.is_nan()));
            assert!(got[8..].iter().all(|v| v.is_finite()));
            let got = matmul(k, &Pool::new(1), matrix.view(), 0..8, &x, 2);
            assert!(got[..8].iter().all(|v| !v.is_finite()));
            assert!(got[8..].iter().all(|v| v.is_finite()));
        }
    }
}

#[test]
#[should_panic(expected = "output row")]
fn an_output_that_is_too_small_panics_and_is_not_overrun() {
    let mut numbers = Numbers(1);
    let matrix = Matrix::new(Format::Bf16, 8, 32, 0, &mut numbers);
    Kernels::best().matmul(&Pool::new(1), matrix.view(), 0..8, &[1.0; 64], 2, &mut [0.0; 15], 8);
}
