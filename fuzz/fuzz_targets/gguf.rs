//! Any bytes as a GGUF file: an answer or an error.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = metaltail_container::gguf::parse_gguf(bytes, bytes.len() as u64);
    // A file that is longer than what can be read of it.
    let _ = metaltail_container::gguf::parse_gguf(bytes, 1 << 30);
});
