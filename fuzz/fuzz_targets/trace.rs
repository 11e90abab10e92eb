//! Any text as a routing trace: an answer or an error, and what is one can be replayed.
#![no_main]

use metaltail_store::PolicyKind;
use metaltail_store::trace::{Rule, Scope, Trace, replay};

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(trace) = Trace::parse(text) {
        let _ = replay(&trace, Rule::Policy(PolicyKind::Frecency), Scope::Pool, trace.token_bytes());
    }
});
