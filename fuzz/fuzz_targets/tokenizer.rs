//! Any bytes as a tokenizer: a tokenizer that encodes and decodes, or an error.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(tokenizer) = metaltail_model::text::Tokenizer::from_bytes(bytes)
        && let Ok(ids) = tokenizer.encode("A line, <|user|> and\u{301} 日本.")
    {
        let _ = tokenizer.decode(&ids, true);
    }
});
