//! What can go wrong, and what to do then.

use std::fmt;
use std::time::Duration;

use metaltail_device::residency::ResidencyError;

use crate::dispatch::DispatchError;

/// The domain of errors of command buffers (`MTLCommandBufferErrorDomain`).
pub const COMMAND_BUFFER_DOMAIN: &str = "MTLCommandBufferErrorDomain";

/// What the host side refuses, or was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MetalError {
    /// No Metal device on this system.
    #[error(
        "this system has no Metal device (over ssh without a login session, or in a container, there may be none)"
    )]
    NoDevice,
    /// A device that was asked for by name.
    #[error("no Metal device is called {wanted:?}; there are: {}", .found.join(", "))]
    NoSuchDevice {
        /// The name.
        wanted: String,
        /// Names of those there are.
        found: Vec<String>,
    },
    /// A device or system that lacks something without which nothing works.
    #[error("{device} cannot be used: {missing}")]
    Unusable {
        /// Its name.
        device: String,
        /// What it lacks.
        missing: &'static str,
    },
    /// Metal gave nothing and no reason.
    #[error("Metal did not make {what}")]
    NotMade {
        /// What was to be made.
        what: String,
    },
    /// A source that Metal's compiler refuses.
    #[error("Metal's compiler refuses the kernels: {message}")]
    Compile {
        /// What it said, with the lines of the joined source (`Kernels::compile` says which file they are).
        message: String,
    },
    /// A name that the sources do not have.
    #[error("no kernel is called {kernel:?}")]
    NoKernel {
        /// The name.
        kernel: String,
    },
    /// A kernel that the device cannot run.
    #[error("Metal makes no pipeline of {kernel}: {message}")]
    Pipeline {
        /// Its name.
        kernel: String,
        /// What Metal said.
        message: String,
    },
    /// A dispatch that does not fit its kernel or the device.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// Memory that cannot be declared.
    #[error(transparent)]
    Residency(#[from] ResidencyError),
    /// A buffer that is larger than the device takes, or empty.
    #[error("a buffer of {wanted} bytes: the device takes 1 to {limit}")]
    BufferSize {
        /// Its bytes.
        wanted: usize,
        /// The limit.
        limit: usize,
    },
    /// A range that leaves a buffer.
    #[error("bytes {offset} to {offset} + {len} of a buffer of {size}")]
    OutOfBuffer {
        /// Where it begins.
        offset: usize,
        /// Its bytes.
        len: usize,
        /// The buffer's bytes.
        size: usize,
    },
    /// A buffer that a submission in flight may read or write.
    #[error("a submission in flight uses this buffer: wait for it first")]
    InUse,
    /// A submission that did not end in time. It still runs, and its memory must stay.
    #[error(
        "the GPU did not end a submission within {:.1} s (it is {state}): another program may hold the GPU, or a kernel does not end",
        .waited.as_secs_f64()
    )]
    TimedOut {
        /// How long was waited.
        waited: Duration,
        /// How far it got.
        state: &'static str,
    },
    /// A submission that failed; what it was to write is not there.
    #[error("{0}")]
    Failed(Failure),
    /// An earlier submission lost the device: nothing can be submitted any more.
    #[error("the device was lost before: {0}")]
    Lost(Failure),
}

/// Why a submission failed, by the codes of `MTLCommandBufferError` and the system's names in their messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// A fault of the driver.
    Internal,
    /// The system's watchdog ended it.
    Timeout,
    /// It touched memory that is not there or not resident.
    PageFault,
    /// The system took this process's access to the GPU, after faults.
    AccessRevoked,
    /// The process may not use the GPU now.
    NotPermitted,
    /// Memory did not suffice to make everything resident.
    OutOfMemory,
    /// A resource was freed or made wrongly.
    InvalidResource,
    /// The GPU is gone.
    DeviceRemoved,
    /// A kernel's stack did not suffice.
    StackOverflow,
    /// The system ended it since the display had to wait.
    Interactivity,
    /// Another submission, perhaps of another program, failed and took it along.
    Victim,
    /// Another code, or another domain.
    Other,
}

/// Names that the system puts into messages, after `kIOGPUCommandBufferCallbackError`. Seen in others' reports.
const NAMES: [(&str, FailureKind); 6] = [
    ("ErrorImpactingInteractivity", FailureKind::Interactivity),
    ("ErrorInnocentVictim", FailureKind::Victim),
    ("ErrorSubmissionsIgnored", FailureKind::AccessRevoked),
    ("ErrorHang", FailureKind::Timeout),
    ("ErrorPageFault", FailureKind::PageFault),
    ("ErrorOutOfMemory", FailureKind::OutOfMemory),
];

impl FailureKind {
    /// The kind of an error's domain and code, and of the system's name for it in the message: some of them have no
    /// public code.
    pub fn of(domain: &str, code: i64, message: &str) -> FailureKind {
        if domain != COMMAND_BUFFER_DOMAIN {
            return FailureKind::Other;
        }
        let named = NAMES.iter().find(|(name, _)| message.contains(name));
        if let Some((_, kind)) = named {
            return *kind;
        }
        match code {
            1 => FailureKind::Internal,
            2 => FailureKind::Timeout,
            3 => FailureKind::PageFault,
            4 => FailureKind::AccessRevoked,
            7 => FailureKind::NotPermitted,
            8 => FailureKind::OutOfMemory,
            9 => FailureKind::InvalidResource,
            11 => FailureKind::DeviceRemoved,
            12 => FailureKind::StackOverflow,
            _ => FailureKind::Other,
        }
    }

    /// Whether the queue takes nothing any more after it.
    pub fn is_loss(self) -> bool {
        matches!(self, FailureKind::AccessRevoked | FailureKind::DeviceRemoved)
    }

    /// What it means to a user.
    fn advice(self) -> &'static str {
        match self {
            FailureKind::Internal => {
                "the driver had a fault of its own; start again, and report it if it returns"
            }
            FailureKind::Timeout => {
                "the system ended it since it ran for too long; smaller prefill chunks make shorter submissions"
            }
            FailureKind::PageFault => {
                "it touched memory that is not resident or gone: a fault of metaltail's; --residency walk may avoid it, please report it"
            }
            FailureKind::AccessRevoked => {
                "the system took the GPU from this process after faults; start again"
            }
            FailureKind::NotPermitted => "the system does not let this process use the GPU now",
            FailureKind::OutOfMemory => {
                "memory did not suffice to make it resident: lower --ram, or raise iogpu.wired_limit_mb"
            }
            FailureKind::InvalidResource => {
                "memory was freed under it: a fault of metaltail's; please report it"
            }
            FailureKind::DeviceRemoved => "the GPU is gone",
            FailureKind::StackOverflow => {
                "a kernel's stack did not suffice: a fault of metaltail's; please report it"
            }
            FailureKind::Interactivity => {
                "the display had to wait for it; smaller prefill chunks make shorter submissions"
            }
            FailureKind::Victim => {
                "another submission, perhaps of another program, failed and took it along; start again"
            }
            FailureKind::Other => "no reason is known for it",
        }
    }
}

/// A submission's failure as Metal told it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Its kind.
    pub kind: FailureKind,
    /// The error's domain.
    pub domain: String,
    /// The error's code.
    pub code: i64,
    /// Metal's own words.
    pub message: String,
}

impl Failure {
    /// A failure by what the error says.
    pub fn new(domain: String, code: i64, message: String) -> Failure {
        Failure { kind: FailureKind::of(&domain, code, &message), domain, code, message }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { kind, domain, code, message } = self;
        write!(f, "the GPU failed a submission: {message} ({domain} {code}): {}", kind.advice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_told_apart_and_only_two_of_them_lose_the_device() {
        let of = |code| FailureKind::of(COMMAND_BUFFER_DOMAIN, code, "a message");
        let lost: Vec<i64> = (0..20).filter(|&code| of(code).is_loss()).collect();
        assert_eq!(lost, [4, 11]);
        let known: Vec<i64> = (0..20).filter(|&code| of(code) != FailureKind::Other).collect();
        assert_eq!(known, [1, 2, 3, 4, 7, 8, 9, 11, 12]);
        assert_eq!(FailureKind::of("NSPOSIXErrorDomain", 4, "ErrorHang"), FailureKind::Other);
    }

    #[test]
    fn the_systems_name_for_an_error_counts_more_than_its_code() {
        let of = |code, message: &str| FailureKind::of(COMMAND_BUFFER_DOMAIN, code, message);
        // Messages as macOS writes them.
        let display =
            "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)";
        let victim = "Discarded (victim of GPU error/recovery) (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)";
        let ignored = "Ignored (for causing prior/excessive GPU errors) \
                       (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)";
        let hang = "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)";
        let fault = "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)";
        let full = "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)";
        assert_eq!(of(1, display), FailureKind::Interactivity);
        assert_eq!(of(1, victim), FailureKind::Victim);
        assert!(of(4, ignored).is_loss() && of(1, ignored).is_loss());
        assert_eq!(of(1, hang), FailureKind::Timeout);
        assert_eq!((of(3, fault), of(8, full)), (FailureKind::PageFault, FailureKind::OutOfMemory));
        assert!(!of(1, victim).is_loss(), "the next submission may well run");
    }

    #[test]
    fn a_failure_says_metals_words_and_what_to_do() {
        let failure = Failure::new(COMMAND_BUFFER_DOMAIN.into(), 8, "Insufficient Memory".into());
        let text = MetalError::Failed(failure.clone()).to_string();
        for part in ["Insufficient Memory", "MTLCommandBufferErrorDomain 8", "--ram", "iogpu.wired_limit_mb"]
        {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert!(MetalError::Lost(failure).to_string().starts_with("the device was lost before"));
    }
}
