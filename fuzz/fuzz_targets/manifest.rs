//! Any bytes as a slab manifest: an answer or an error.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = metaltail_container::parse_manifest(bytes);
});
