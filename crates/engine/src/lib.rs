//! Sessions: loading, prefill and decode steps, sampling, stop rules, cancellation and telemetry.
