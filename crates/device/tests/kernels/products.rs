//! Products of matrices in every format.

use metaltail_device::kernels::{KernelDevice, Reference};
use metaltail_quant::{FP8_TABLE, Format, MatrixLayout, OwnedMatrix};

use crate::data::{FORMATS, Numbers, Outcome, ROUNDING, near, product, same, sum_error, values, written};

/// Rows and columns: single, odd, short of eight, whole and partial groups of every size, past a SIMD group's step of
/// 256 columns and past a block of 128 rows.
const SHAPES: [(usize, usize); 8] =
    [(1, 1), (3, 5), (5, 8), (7, 17), (9, 64), (33, 130), (131, 259), (6, 1024)];

/// Inputs at once: one, whole tiles, partial tiles, more than a tile.
const WIDTHS: [usize; 4] = [1, 4, 7, 9];

/// Σ|w·x| of every result.
pub fn magnitudes(m: &OwnedMatrix, x: &[f32]) -> Vec<f64> {
    let cols = m.layout().cols();
    let weights = values(m);
    let sum = |row: &[f64], x: &[f32]| row.iter().zip(x).map(|(w, x)| (w * f64::from(*x)).abs()).sum();
    x.chunks(cols).flat_map(|x| weights.chunks(cols).map(|row| sum(row, x)).collect::<Vec<f64>>()).collect()
}

pub fn agree_with_the_reference(device: &mut dyn KernelDevice) -> Outcome {
    let mut reference = Reference::new().unwrap();
    for (number, format) in FORMATS.into_iter().enumerate() {
        for (rows, cols) in SHAPES {
            for width in WIDTHS {
                let mut numbers = Numbers::new(number as u64 * 1000 + (rows + cols * width) as u64);
                let m = numbers.matrix(format, rows, cols);
                let x = numbers.floats(width * cols);
                let what = format!("{format} {rows} × {cols}, {width} inputs");
                let got = product(device, &what, &m, &x)?;
                let wanted = product(&mut reference, &what, &m, &x)?;
                let magnitudes = magnitudes(&m, &x);
                near(&what, &got, &wanted, |i| 2.0 * sum_error(cols) * magnitudes[i])?;
            }
        }
    }
    Ok(())
}

/// A draft's row and the same row in its verification must give the same logits.
pub fn do_not_depend_on_the_width(device: &mut dyn KernelDevice) -> Outcome {
    for format in FORMATS {
        let mut numbers = Numbers::new(5);
        let (m, x) = (numbers.matrix(format, 21, 333), numbers.floats(9 * 333));
        let all = product(device, "nine inputs", &m, &x)?;
        for (width, tile) in [(1, 0), (3, 2), (4, 1), (7, 0)] {
            let part = &x[tile * 333..][..width * 333];
            let got = product(device, "fewer inputs", &m, part)?;
            same(&format!("{format}, {width} of nine inputs"), &got, &all[tile * 21..][..width * 21])?;
        }
    }
    Ok(())
}

/// Rows, columns, inputs of products for many: nothing whole, whole tiles of 32, more than a tile, past a block.
const MANY: [(usize, usize, usize); 6] =
    [(1, 1, 1), (5, 13, 9), (32, 64, 32), (33, 130, 33), (150, 259, 40), (64, 96, 70)];

/// A product for many inputs on a device, every result written.
fn for_many(
    device: &mut dyn KernelDevice,
    what: &str,
    m: &OwnedMatrix,
    x: &[f32],
) -> Result<Vec<f32>, String> {
    let layout = m.layout();
    written(what, x.len() / layout.cols() * layout.rows(), |out| device.gemm(m.as_ref(), x, out))
}

pub fn for_many_agree_with_the_reference(device: &mut dyn KernelDevice) -> Outcome {
    let mut reference = Reference::new().unwrap();
    for (number, format) in FORMATS.into_iter().enumerate() {
        for (rows, cols, inputs) in MANY {
            let mut numbers = Numbers::new(number as u64 * 77 + (rows + cols * inputs) as u64);
            let (m, x) = (numbers.matrix(format, rows, cols), numbers.floats(inputs * cols));
            let what = format!("{format} {rows} × {cols}, {inputs} inputs in prefill");
            let (got, wanted) = (for_many(device, &what, &m, &x)?, product(&mut reference, &what, &m, &x)?);
            let magnitudes = magnitudes(&m, &x);
            // 8×8 products add one column after the other, so the chain is as long as the row.
            let error = ROUNDING * (cols + 32) as f64 + sum_error(cols);
            near(&what, &got, &wanted, |i| error * magnitudes[i])?;
        }
    }
    Ok(())
}

/// An input's result is the same alone and among others, damaged ones too.
pub fn for_many_do_not_depend_on_each_other(device: &mut dyn KernelDevice) -> Outcome {
    for format in [Format::F32, Format::Int4Group(48), Format::Fp8Block] {
        let mut numbers = Numbers::new(21);
        let (m, mut x) = (numbers.matrix(format, 45, 77), numbers.floats(50 * 77));
        x[7 * 77 + 30] = f32::NAN;
        let all = for_many(device, "fifty inputs", &m, &x)?;
        for (input, x) in x.chunks(77).enumerate().step_by(3).chain([(7, &x[7 * 77..8 * 77])]) {
            let what = format!("{format}, input {input} alone");
            same(&what, &for_many(device, &what, &m, x)?, &all[input * 45..][..45])?;
        }
    }
    Ok(())
}

/// Each code alone in a row, once where eight columns are read together and once at a ragged end.
pub fn know_every_fp8_code(device: &mut dyn KernelDevice) -> Outcome {
    for (cols, many) in [(1, false), (8, false), (13, false), (8, true), (13, true)] {
        let layout = MatrixLayout::new(Format::Fp8Block, 256, cols).unwrap();
        let mut weights = vec![0u8; layout.weight_bytes()];
        for code in 0..256 {
            weights[code * cols + (code * 5) % cols] = code as u8;
        }
        // Rows 0 to 127 have another scale than the rest; powers of two, so that the product is exact.
        let scales = [0.25f32, 8.0].iter().flat_map(|s| s.to_le_bytes()).collect();
        let m = OwnedMatrix::new(layout, weights, scales).unwrap();
        let run = if many { for_many } else { product };
        let got = run(device, "codes", &m, &vec![1.0; cols])?;
        let wanted: Vec<f32> =
            (0..256).map(|code| FP8_TABLE[code] * if code < 128 { 0.25 } else { 8.0 }).collect();
        near(&format!("fp8 codes in rows of {cols}"), &got, &wanted, |_| 0.0)?;
    }
    Ok(())
}

/// A NaN or an infinity in one input or one row shows there and nowhere else.
pub fn keep_what_is_not_finite_where_it_is(device: &mut dyn KernelDevice) -> Outcome {
    for format in FORMATS {
        for (bad, at) in [(f32::NAN, 3), (f32::INFINITY, 70), (f32::NEG_INFINITY, 99)] {
            let mut numbers = Numbers::new(11);
            let m = numbers.matrix(format, 9, 100);
            let mut x = numbers.floats(300);
            let sound = product(device, "sound inputs", &m, &x)?;
            x[100 + at] = bad;
            let got = product(device, "a damaged input", &m, &x)?;
            let what = format!("{format}, {bad} in the second input");
            same(&what, &got[..9], &sound[..9])?;
            same(&what, &got[18..], &sound[18..])?;
            if let Some(row) = got[9..18].iter().position(|v| v.is_finite()) {
                // An infinity times a weight of zero is NaN: nothing finite can come of either.
                return Err(format!("{what}: row {row} is finite"));
            }
        }
    }
    Ok(())
}
