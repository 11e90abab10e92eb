//! The measurement harness.
//!
//! Figures are medians with their smallest and largest value over `n` rounds; what is compared is
//! measured in turn within each round, and the ratio is formed round by round, so that a machine
//! whose speed drifts does not decide the result.
//!
//! [`kernels`] and [`mod@decode`] measure inside this process. Comparisons of settings ([`mod@ab`],
//! [`cap`]) and of programs ([`mod@peers`]) run each arm in a fresh process ([`harness::Runner`]); [`serve`] is what such a process
//! does. The rules they keep: `docs/design/bench.md`. [`residency`] measures nothing: it replays published runs.
#![forbid(unsafe_code)]

pub mod ab;
pub mod arm;
mod bandwidth;
pub mod cap;
mod compare;
pub mod decode;
pub mod figures;
pub mod harness;
pub mod io;
pub mod job;
pub mod kernels;
pub mod numerics;
pub mod peers;
pub mod plot;
pub mod record;
pub mod residency;
pub mod serve;
mod spread;
pub mod system;

pub use bandwidth::Bandwidth;
pub use compare::{Difference, may_change_numbers};
pub use record::Record;
pub use spread::Spread;
