//! Any JSON as a configuration: a plan or an error.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(config) = serde_json::from_slice(bytes)
        && let Ok(plan) = metaltail_model::Plan::from_config(&config)
    {
        plan.inventory();
    }
});
