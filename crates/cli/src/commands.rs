//! What each command does.

pub mod completions;
pub mod man;
