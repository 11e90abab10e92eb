//! The measurement harness.
