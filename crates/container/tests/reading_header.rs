//! Hostile headers and manifests are refused, and never anything worse.

#[path = "../../../fuzz/corpus.rs"]
mod corpus;

use corpus::corpus;
use metaltail_container::{HeaderError, parse_header, parse_manifest};
use proptest::prelude::*;

fn file(json: &str, data: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn refusal(json: &str, data: usize) -> HeaderError {
    let bytes = file(json, data);
    parse_header(&bytes, bytes.len() as u64).unwrap_err()
}

#[test]
fn header_corpus_is_refused_but_for_the_valid_ones() {
    for (name, bytes) in corpus("header") {
        let result = parse_header(&bytes, bytes.len() as u64);
        assert_eq!(result.is_ok(), name.starts_with("valid-"), "{name}: {result:?}");
    }
}

#[test]
fn manifest_corpus_is_refused_but_for_the_valid_ones() {
    for (name, bytes) in corpus("manifest") {
        let result = parse_manifest(&bytes);
        assert_eq!(result.is_ok(), name.starts_with("valid-"), "{name}: {result:?}");
    }
}

#[test]
fn a_shape_larger_than_its_bytes_is_refused_with_both_sizes() {
    // T04
    let error = refusal(r#"{"x":{"dtype":"BF16","shape":[8,4096],"data_offsets":[0,16]}}"#, 16);
    assert!(
        matches!(&error, HeaderError::Span { tensor, wanted: 65536, got: 16, .. } if tensor == "x"),
        "{error}"
    );
}

#[test]
fn a_shape_whose_product_overflows_is_refused() {
    // T05
    let json = r#"{"x":{"dtype":"F32","shape":[8589934592,8589934592],"data_offsets":[0,8]}}"#;
    assert!(matches!(refusal(json, 8), HeaderError::Overflow { .. }));
}

#[test]
fn a_key_without_a_quote_is_refused_with_its_place() {
    // T09
    let error = refusal(r#"{"x:{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 8);
    assert!(matches!(error, HeaderError::Json(_)));
    assert!(error.to_string().contains("column"), "{error}");
}

#[test]
fn a_file_cut_short_is_refused_by_the_first_tensor_that_is_lost() {
    let json = r#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    assert!(matches!(refusal(json, 7), HeaderError::PastEnd { wanted: 8, got: 7, .. }));
}

#[test]
fn a_length_field_past_the_cap_is_refused_before_anything_is_read() {
    let mut bytes = file("{}", 0);
    bytes[..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    assert!(matches!(parse_header(&bytes, 1 << 50), Err(HeaderError::TooLarge { .. })));
}

/// JSON that is near enough to a header to reach the checks behind the parser.
fn near_header() -> impl Strategy<Value = String> {
    let number = prop_oneof![0u64..32, Just(u64::MAX), Just(1 << 33), any::<u64>()];
    let dtype = prop_oneof![Just("F32"), Just("U8"), Just("BF16"), Just("Q4"), Just("F8_E8M0")];
    let tensor = ("[a-c]", dtype, prop::collection::vec(number.clone(), 0..4), number.clone(), number)
        .prop_map(|(name, dtype, shape, a, b)| {
            format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{a},{b}]}}"#)
        });
    prop::collection::vec(tensor, 0..4).prop_map(|tensors| format!("{{{}}}", tensors.join(",")))
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..256), len in any::<u64>()) {
        let _ = parse_header(&bytes, len);
        let _ = parse_header(&bytes, bytes.len() as u64);
        let _ = parse_manifest(&bytes);
    }

    #[test]
    fn what_is_accepted_lies_inside_the_file(json in near_header(), data in 0usize..64) {
        let bytes = file(&json, data);
        if let Ok(header) = parse_header(&bytes, bytes.len() as u64) {
            let mut end = header.data_start;
            for (_, info) in &header.tensors {
                prop_assert_eq!(info.offset, end);
                prop_assert_eq!(info.shape.iter().product::<u64>() * info.dtype.width(), info.len);
                end += info.len;
            }
            prop_assert_eq!(end, bytes.len() as u64);
        }
    }

    #[test]
    fn one_flipped_byte_never_panics(at in any::<prop::sample::Index>(), bit in 0u8..8) {
        for (_, mut bytes) in corpus("header").into_iter().filter(|(name, _)| name.starts_with("valid-")) {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            let _ = parse_header(&bytes, bytes.len() as u64);
        }
    }

    #[test]
    fn the_stock_writer_is_read_as_the_stock_reader_reads_it(
        shapes in prop::collection::vec(prop::collection::vec(0usize..5, 0..3), 1..6)
    ) {
        let data: Vec<Vec<u8>> = shapes.iter().map(|s| vec![7; s.iter().product::<usize>() * 2]).collect();
        let views = shapes.iter().zip(&data).enumerate().map(|(i, (shape, data))| {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, shape.clone(), data).unwrap();
            (format!("t{i}"), view)
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        let header = parse_header(&bytes, bytes.len() as u64).unwrap();
        let stock = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        prop_assert_eq!(header.tensors.len(), stock.len());
        for (name, info) in &header.tensors {
            let view = stock.tensor(name).unwrap();
            let shape: Vec<usize> = info.shape.iter().map(|&dim| dim as usize).collect();
            prop_assert_eq!(view.shape(), shape);
            let own = &bytes[info.offset as usize..][..info.len as usize];
            prop_assert_eq!(view.data(), own);
        }
    }
}
