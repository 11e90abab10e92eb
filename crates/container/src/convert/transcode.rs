//! One matrix from one number format to another, band by band.

use std::thread;

use metaltail_quant::{Format, MatrixLayout, MatrixRef, QuantizeError, dequantize, quantize};

use crate::slab_writer::WriteError;

/// Rows handled at once: the block height of fp8, so that a band's scales are its own in every format.
const BAND: usize = 128;

/// One band of the output and the source rows that it is made from.
struct Band<'s, 'o> {
    source: MatrixRef<'s>,
    weights: &'o mut [u8],
    scales: &'o mut [u8],
}

/// Refuses, before anything is written, a format that nothing is quantised to.
pub(crate) fn check_target(tensor: &str, format: Format) -> Result<(), WriteError> {
    let Format::Gguf(gguf) = format else { return Ok(()) };
    Err(WriteError::Quantise {
        tensor: tensor.to_owned(),
        format: format.to_string(),
        reason: QuantizeError::NotATarget { format: gguf }.to_string(),
    })
}

/// Stores `source` in `format`, filling `weights` and `scales` exactly.
///
/// The same format is copied bit for bit; any other goes through f32, `BAND` rows at a time.
/// The result does not depend on `threads`.
pub(crate) fn transcode(
    tensor: &str,
    source: MatrixRef<'_>,
    format: Format,
    weights: &mut [u8],
    scales: &mut [u8],
    threads: usize,
) -> Result<(), WriteError> {
    if source.layout().format() == format {
        weights.copy_from_slice(source.weights());
        scales.copy_from_slice(source.scales());
        return Ok(());
    }
    let mut bands = bands(tensor, source, format, weights, scales)?;
    let share = bands.len().div_ceil(threads.max(1));
    if share == bands.len() {
        return encode(tensor, format, &mut bands);
    }
    thread::scope(|scope| {
        let workers: Vec<_> =
            bands.chunks_mut(share).map(|share| scope.spawn(move || encode(tensor, format, share))).collect();
        workers.into_iter().try_for_each(|worker| match worker.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

/// Cuts source and output into bands of whole rows.
fn bands<'s, 'o>(
    tensor: &str,
    source: MatrixRef<'s>,
    format: Format,
    mut weights: &'o mut [u8],
    mut scales: &'o mut [u8],
) -> Result<Vec<Band<'s, 'o>>, WriteError> {
    let all = source.layout();
    let layout =
        |format, rows| MatrixLayout::new(format, rows, all.cols()).map_err(WriteError::layout(tensor));
    let (mut source_weights, mut source_scales) = (source.weights(), source.scales());
    let mut bands = Vec::with_capacity(all.rows().div_ceil(BAND));
    for first in (0..all.rows()).step_by(BAND) {
        let rows = BAND.min(all.rows() - first);
        let from = layout(all.format(), rows)?;
        let to = layout(format, rows)?;
        let (w, rest) = source_weights.split_at(from.weight_bytes());
        source_weights = rest;
        let (s, rest) = source_scales.split_at(from.scale_bytes());
        source_scales = rest;
        let (out_w, rest) = weights.split_at_mut(to.weight_bytes());
        weights = rest;
        let (out_s, rest) = scales.split_at_mut(to.scale_bytes());
        scales = rest;
        let source = MatrixRef::new(from, w, s).map_err(WriteError::layout(tensor))?;
        bands.push(Band { source, weights: out_w, scales: out_s });
    }
    Ok(bands)
}

/// Dequantises and quantises bands one after another.
fn encode(tensor: &str, format: Format, bands: &mut [Band<'_, '_>]) -> Result<(), WriteError> {
    let mut values = Vec::new();
    for band in bands {
        let from = band.source.layout();
        values.resize(from.rows() * from.cols(), 0.0f32);
        dequantize(band.source, &mut values);
        let to = MatrixLayout::new(format, from.rows(), from.cols()).map_err(WriteError::layout(tensor))?;
        quantize(to, &values, band.weights, band.scales).map_err(|source| WriteError::Quantise {
            tensor: tensor.to_owned(),
            format: format.to_string(),
            reason: source.to_string(),
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use metaltail_quant::OwnedMatrix;
    use proptest::prelude::*;

    const FORMATS: [Format; 7] = [
        Format::F32,
        Format::F16,
        Format::Bf16,
        Format::Int8Row,
        Format::Int4Row,
        Format::Int4Group(32),
        Format::Fp8Block,
    ];

    proptest! {
        #[test]
        fn bands_and_threads_give_what_the_whole_matrix_would(
            rows in 1usize..400, cols in 1usize..70, from in 0usize..7, to in 0usize..7, threads in 1usize..5,
        ) {
            let (from, to) = (FORMATS[from], FORMATS[to]);
            let numbers: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919) % 1013) as f32 / 506.0 - 1.0).collect();
            let layout = |format| MatrixLayout::new(format, rows, cols).unwrap();
            let source = OwnedMatrix::quantize(layout(from), &numbers).unwrap();
            let mut weights = vec![0; layout(to).weight_bytes()];
            let mut scales = vec![0; layout(to).scale_bytes()];
            transcode("x", source.as_ref(), to, &mut weights, &mut scales, threads).unwrap();
            let wanted = if from == to {
                source
            } else {
                let mut values = vec![0.0; rows * cols];
                dequantize(source.as_ref(), &mut values);
                OwnedMatrix::quantize(layout(to), &values).unwrap()
            };
            prop_assert_eq!(weights, wanted.weights());
            prop_assert_eq!(scales, wanted.scales());
        }
    }

    #[test]
    fn a_number_that_the_format_cannot_hold_is_refused_with_its_tensor() {
        let layout = |format| MatrixLayout::new(format, 1, 2).unwrap();
        let source = OwnedMatrix::quantize(layout(Format::F32), &[1.0, f32::NAN]).unwrap();
        let (mut weights, mut scales) = ([0; 1], [0; 4]);
        let refused = transcode("x.weight", source.as_ref(), Format::Int4Row, &mut weights, &mut scales, 1);
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("x.weight") && message.contains("int4"), "{message}");
    }
}
