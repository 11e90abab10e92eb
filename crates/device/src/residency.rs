//! What an accelerator may touch, declared once.
//!
//! Memory that a device reads through addresses must be resident. Declaring every cached expert with every
//! submission makes a larger cache a slower one; so allocations are few and large, are members of residency
//! sets that are attached to the queue, and a submission costs the same whatever is cached.
//!
//! * [`Ledger`] is the state machine: allocations, sets, staged additions, submissions in flight. It knows no
//!   driver but the trait [`ResidencyDriver`], and no thread.
//! * [`Residency`] is the ledger behind a lock, for loaders that add memory and a thread that submits. It waits
//!   where memory is to be removed that a submission may still read.
//! * [`DeclaredArena`] keeps the expert store's chunks declared, as they come and go.
//! * [`KeepAlive`] is a thread that keeps sets resident between a user's turns.
//! * [`HeldWeights`] are copies of a model's dense weights in few large mappings, each declared once.
//! * [`metaltail_store::rank`] keeps driver calls out of the expert store's lock.
//!
//! The points that the design must hold, and the tests named after them: `docs/design/residency.md`.

mod arena;
mod driver;
mod keeper;
mod ledger;
mod shared;
mod stats;
#[cfg(test)]
mod tests;
mod weights;

pub use arena::{DeclaredArena, SlabAllocation};
pub use driver::{DriverError, Limits, ResidencyDriver, SetId, Span};
pub use keeper::{KeepAlive, KeepAliveError, KeepAliveTimes};
pub use ledger::{Difference, Ledger, MOST_SETS, Mode, ResidencyError, Submission};
pub use shared::Residency;
pub use stats::ResidencyStats;
pub use weights::{HeldWeights, HoldError, Placement, WeightSpans, spans_of};
