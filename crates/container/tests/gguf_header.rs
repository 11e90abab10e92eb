//! Hostile GGUF headers are refused, and never anything worse; what is written is read back.

#[path = "../../../fuzz/corpus.rs"]
mod corpus;
#[path = "support/gguf.rs"]
mod support;

use corpus::corpus;
use metaltail_container::gguf::{
    Array, DEPTH_CAP, GgufError, GgufHeader, HEADER_CAP, Scalar, Strings, TensorType, Text, Value, ValueKind,
    parse_gguf,
};
use proptest::prelude::*;
use support::{File, scalars, text, u32_value};

fn parsed(bytes: &[u8]) -> Result<GgufHeader, GgufError> {
    parse_gguf(bytes, bytes.len() as u64)
}

fn refusal(file: &File) -> GgufError {
    parsed(&file.bytes()).unwrap_err()
}

/// Every tensor inside the file, aligned, sharing no byte with another.
fn assert_sound(header: &GgufHeader, file_len: u64) {
    let mut end = header.data_start;
    for tensor in &header.tensors {
        assert!(tensor.offset >= end && (tensor.offset - header.data_start).is_multiple_of(header.alignment));
        assert_eq!(tensor.len, File::len(tensor.kind, &tensor.dims));
        end = tensor.offset + tensor.len;
        assert!(end <= file_len);
    }
}

#[test]
fn the_corpus_is_refused_but_for_the_valid_ones() {
    for (name, bytes) in corpus("gguf") {
        let result = parsed(&bytes);
        assert_eq!(result.is_ok(), name.starts_with("valid-"), "{name}: {result:?}");
        if let Ok(header) = result {
            assert_sound(&header, bytes.len() as u64);
        }
    }
}

#[test]
fn refusals_name_what_wanted_and_got() {
    let one =
        |name: &str| parsed(&corpus("gguf").into_iter().find(|(n, _)| n == name).unwrap().1).unwrap_err();
    for (name, parts) in [
        ("version-1", &["version 1", "2 or 3"][..]),
        ("version-big-endian", &["big-endian"]),
        ("magic-swapped", &["big-endian"]),
        ("magic-other", &["\"GGML\""]),
        ("keys-max", &["metadata keys", "cap"]),
        ("tensors-past-end", &["tensor infos", "25000 bytes"]),
        ("key-twice", &["metadata key \"a\"", "twice"]),
        ("tensor-twice", &["tensor \"x\"", "twice"]),
        ("key-not-utf8", &["metadata key 0", "UTF-8"]),
        ("array-very-deep", &["\"a\"", "deeper than 4"]),
        ("string-past-end", &["the value of \"a\"", "9 bytes", "8 are left"]),
        ("alignment-48", &["general.alignment", "48", "power of two"]),
        ("alignment-u64", &["general.alignment", "uint64", "power of two (uint32)"]),
        ("dimensions-5", &["\"x\"", "5 dimensions", "at most 4"]),
        ("dimension-zero", &["\"x\"", "[8, 0]", "no elements"]),
        ("elements-overflow-to-zero", &["\"x\"", "64 bits"]),
        ("row-no-whole-block", &["\"x\"", "33", "32", "Q4_0"]),
        ("type-4-withdrawn", &["\"x\"", "unknown element type 4"]),
        ("offset-unaligned", &["\"x\"", "byte 4", "alignment 32"]),
        ("data-cut", &["\"x\"", "96", "95", "fetch it again"]),
        ("overlap", &["\"y\"", "\"x\""]),
    ] {
        let words = one(name).to_string();
        for part in parts {
            assert!(words.contains(part), "{name}: {part:?} is not in {words:?}");
        }
    }
}

#[test]
fn claims_are_held_against_the_file_before_anything_is_allocated() {
    // A file as long as the claims, of which nothing is there: the cap holds where the length does not.
    let claim = |kind: u32, rest: &[u8]| {
        let mut bytes = File::new().bytes();
        bytes[16..24].copy_from_slice(&1u64.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
        bytes.push(b'a');
        bytes.extend(kind.to_le_bytes());
        bytes.extend(rest);
        parse_gguf(&bytes[..], u64::MAX).unwrap_err()
    };
    let long = (HEADER_CAP + 1).to_le_bytes();
    let array = |kind: u32, len: u64| [&kind.to_le_bytes()[..], &len.to_le_bytes()].concat();
    for error in [
        claim(8, &long),
        claim(9, &array(0, HEADER_CAP)),
        claim(9, &array(10, 1 << 50)),
        claim(9, &array(8, HEADER_CAP / 8)),
        claim(9, &array(9, HEADER_CAP / 12)),
    ] {
        assert!(matches!(error, GgufError::TooLarge { cap: HEADER_CAP, .. }), "{error}");
    }
}

#[test]
fn a_file_shorter_than_its_length_is_a_failed_read() {
    let bytes = File::new().key("a", text("b")).bytes();
    let error = parse_gguf(&bytes[..bytes.len() - 1], bytes.len() as u64).unwrap_err();
    assert!(matches!(error, GgufError::Read { .. }), "{error}");
}

#[test]
fn arrays_may_nest_to_the_cap_and_no_deeper() {
    let nested = |depth: u32| {
        let mut array = scalars(ValueKind::U8, vec![1]);
        for _ in 1..depth {
            array = Array::Arrays(vec![array]);
        }
        File::new().key("a", Value::Array(array))
    };
    assert!(parsed(&nested(DEPTH_CAP).bytes()).is_ok());
    assert!(matches!(refusal(&nested(DEPTH_CAP + 1)), GgufError::Depth { cap: DEPTH_CAP, .. }));
}

#[test]
fn the_header_alone_is_read() {
    // What is behind the header would fail to be read.
    let file = File::new().key("a", u32_value(1)).tensor("x", "F32", &[1024]);
    let bytes = file.bytes();
    let header = parsed(&bytes).unwrap();
    let cut = &bytes[..header.data_start as usize];
    assert_eq!(parse_gguf(cut, bytes.len() as u64).unwrap(), header);
}

fn scalar() -> impl Strategy<Value = Scalar> {
    prop_oneof![
        any::<u8>().prop_map(Scalar::U8),
        any::<i8>().prop_map(Scalar::I8),
        any::<u16>().prop_map(Scalar::U16),
        any::<i16>().prop_map(Scalar::I16),
        any::<u32>().prop_map(Scalar::U32),
        any::<i32>().prop_map(Scalar::I32),
        (-1e30f32..1e30).prop_map(Scalar::F32),
        any::<bool>().prop_map(Scalar::Bool),
        any::<u64>().prop_map(Scalar::U64),
        any::<i64>().prop_map(Scalar::I64),
        (-1e300f64..1e300).prop_map(Scalar::F64),
    ]
}

fn array() -> impl Strategy<Value = Array> {
    let numbers = (prop::collection::vec(any::<u64>(), 0..5), prop::sample::select(ValueKind::ALL.to_vec()))
        .prop_filter_map("a kind of fixed width", |(items, kind)| {
            let width = kind.width()?;
            let mask = if kind == ValueKind::Bool { 1 } else { u64::MAX };
            let bytes = items.iter().flat_map(|n| (n & mask).to_le_bytes()[..width].to_vec()).collect();
            Some(scalars(kind, bytes))
        });
    let bytes = prop::collection::vec(prop::collection::vec(any::<u8>(), 0..5), 0..5);
    let texts = bytes.prop_map(|texts| {
        let mut strings = Strings::default();
        texts.iter().for_each(|text| strings.push(text));
        Array::Strings(strings)
    });
    prop_oneof![numbers, texts].prop_recursive(DEPTH_CAP - 1, 8, 3, |inner| {
        prop::collection::vec(inner, 0..3).prop_map(Array::Arrays)
    })
}

fn value() -> impl Strategy<Value = Value> {
    let bytes = prop::collection::vec(any::<u8>(), 0..9);
    prop_oneof![
        scalar().prop_map(Value::Scalar),
        bytes.prop_map(|bytes| Value::String(Text(bytes.into()))),
        array().prop_map(Value::Array),
    ]
}

fn tensor() -> impl Strategy<Value = (TensorType, Vec<u64>)> {
    let kind = prop::sample::select(TensorType::all().collect::<Vec<_>>());
    (kind, 1u64..3, prop::collection::vec(1u64..4, 0..4)).prop_map(|(kind, blocks, rest)| {
        let mut dims = vec![blocks * kind.block_elements()];
        dims.extend(rest);
        (kind, dims)
    })
}

fn file() -> impl Strategy<Value = File> {
    let metadata = prop::collection::btree_map("[a-zä.]{1,9}", value(), 0..5);
    let tensors = prop::collection::btree_map("[a-zä.]{1,9}", tensor(), 0..5);
    (2u32..4, metadata, tensors, 0u32..9).prop_map(|(version, metadata, tensors, shift)| {
        let mut file = File { version, alignment: 1 << shift, ..File::new() };
        file.metadata = metadata.into_iter().collect();
        file.tensors = tensors.into_iter().map(|(name, (kind, dims))| (name, kind, dims)).collect();
        if shift != 5 {
            file = file.key("general.alignment", u32_value(1 << shift));
        }
        file
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(file in file()) {
        let bytes = file.bytes();
        let header = parsed(&bytes).unwrap();
        prop_assert_eq!(header.version, file.version);
        prop_assert_eq!(header.alignment, file.alignment);
        prop_assert_eq!(&header.metadata, &file.metadata);
        let read: Vec<_> =
            header.tensors.iter().map(|t| (t.name.clone(), t.kind, t.dims.to_vec())).collect();
        prop_assert_eq!(read, file.tensors);
        assert_sound(&header, bytes.len() as u64);
    }

    #[test]
    fn a_cut_file_is_refused(file in file(), at in any::<prop::sample::Index>()) {
        let bytes = file.bytes();
        let needed = match parsed(&bytes).unwrap() {
            header if header.tensors.is_empty() => File { tensors: Vec::new(), alignment: 1, ..file }.bytes().len(),
            header => header.tensors.last().map(|t| t.offset + t.len).unwrap() as usize,
        };
        prop_assert!(parsed(&bytes[..needed]).is_ok());
        prop_assert!(parsed(&bytes[..at.index(needed)]).is_err());
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..256), len in any::<u64>()) {
        let with_magic = [b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0", &bytes[..]].concat();
        for bytes in [&bytes, &with_magic] {
            let _ = parse_gguf(&bytes[..], len);
            let _ = parsed(bytes);
        }
    }

    #[test]
    fn flipped_bits_never_panic_and_what_is_accepted_is_sound(
        file in file(), flips in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 1..4)
    ) {
        let mut bytes = file.bytes();
        for (at, bit) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        if let Ok(header) = parsed(&bytes) {
            assert_sound(&header, bytes.len() as u64);
        }
    }
}
