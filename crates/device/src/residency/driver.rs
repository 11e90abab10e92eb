//! What a device's driver must offer, so that memory can be declared to it.

use std::fmt;
use std::time::Duration;

/// Host memory as a driver sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// Address of its first byte.
    pub base: usize,
    /// Bytes.
    pub len: usize,
}

impl Span {
    /// Address behind its last byte; `None` where it exceeds the address space.
    pub fn end(self) -> Option<usize> {
        self.base.checked_add(self.len)
    }

    /// Whether all of `other` lies in it.
    pub fn contains(self, other: Span) -> bool {
        let (Some(end), Some(other_end)) = (self.end(), other.end()) else { return false };
        self.base <= other.base && other_end <= end
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.len, self.base)
    }
}

/// A residency set, by the number that its driver gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetId(pub u32);

/// What a device can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sets that can be attached to a queue; zero where the system has none.
    pub sets: usize,
    /// Bytes that may be resident at a time.
    pub working_set: u64,
    /// The system setting that raises `working_set`, where there is one.
    pub setting: Option<&'static str>,
    /// The largest allocation in bytes.
    pub allocation: u64,
}

/// A call that the driver refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device refused to {call}: {reason}")]
pub struct DriverError {
    /// What was asked of it.
    pub call: &'static str,
    /// What it said.
    pub reason: String,
}

/// The calls of a driver. None is made while a lock of the expert store is held ([`metaltail_store::rank`]).
///
/// Additions and removals take effect with the set's next commit, and only then.
pub trait ResidencyDriver: Send {
    /// What the device can take.
    fn limits(&self) -> Limits;

    /// The driver's clock: a real one, or a simulated device's.
    fn now(&self) -> Duration;

    /// Time has passed in which nothing was submitted: for drivers whose clock is no real one.
    fn idle(&mut self, _by: Duration) {}

    /// Makes host memory known to the device, once. It stays where it is.
    ///
    /// # Errors
    /// Memory that the device cannot use. Nothing is known of it then.
    fn wrap(&mut self, span: Span) -> Result<(), DriverError>;

    /// The device forgets host memory, which may then be freed.
    fn unwrap(&mut self, span: Span);

    /// Creates a set and attaches it to the queue.
    ///
    /// # Errors
    /// No sets on this system, or too many.
    fn create_set(&mut self) -> Result<SetId, DriverError>;

    /// Stages an addition, or takes back a removal that was not committed.
    ///
    /// # Errors
    /// As the driver says; nothing is staged then.
    fn add(&mut self, set: SetId, span: Span) -> Result<(), DriverError>;

    /// Stages a removal, or takes back an addition that was not committed.
    ///
    /// # Errors
    /// As the driver says; nothing is staged then.
    fn remove(&mut self, set: SetId, span: Span) -> Result<(), DriverError>;

    /// Makes what is staged take effect.
    ///
    /// # Errors
    /// As the driver says; everything stays staged then.
    fn commit(&mut self, set: SetId) -> Result<(), DriverError>;

    /// Makes a set resident now rather than with the next submission.
    ///
    /// # Errors
    /// As the driver says.
    fn request(&mut self, set: SetId) -> Result<(), DriverError>;

    /// Lets a set's memory be taken by others.
    ///
    /// # Errors
    /// As the driver says; the set stays resident then.
    fn release(&mut self, set: SetId) -> Result<(), DriverError>;

    /// Declares memory for the submission that is being encoded, and for no other.
    ///
    /// # Errors
    /// As the driver says.
    fn declare(&mut self, spans: &[Span]) -> Result<(), DriverError>;
}
