//! Any text as a history of another engine: an answer or an error.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| {
    let _ = metaltail_store::usage::ColiUsage::parse(text);
});
