//! What each command does.

pub mod bench;
pub mod chat;
pub mod completions;
pub mod convert;
pub mod doctor;
pub mod inspect;
pub mod man;
pub mod plan;
pub mod run;
pub mod score;
pub mod synth;
pub mod trace;
pub mod usage;
