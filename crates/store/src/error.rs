//! What can go wrong, with the numbers needed to act on it.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Errors of the expert store. Cheap to clone: one failed load may end several fetches.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A file could not be opened.
    #[error("cannot open {}: {source}. Check that the model directory is complete and readable", file.display())]
    Open {
        /// The file.
        file: PathBuf,
        /// What the operating system said.
        source: Arc<io::Error>,
    },
    /// The limit of open files is reached.
    #[error(
        "cannot open {}: too many files are open; every weight file of a model stays open, so raise the limit with `ulimit -n` and try again",
        file.display()
    )]
    OpenFiles {
        /// The file.
        file: PathBuf,
        /// What the operating system said.
        source: Arc<io::Error>,
    },
    /// Direct reads were demanded but do not work.
    #[error(
        "direct reads of {} do not work: {source}. Use buffered reads (direct off) or another file system",
        file.display()
    )]
    Direct {
        /// The file that refused.
        file: PathBuf,
        /// What the operating system said.
        source: Arc<io::Error>,
    },
    /// A read failed.
    #[error(
        "reading expert {expert} of layer {layer} from {}: at offset {offset} wanted {wanted} bytes, got {got}: {source} (OS code {})",
        file.display(),
        code_text(source)
    )]
    Read {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// The file.
        file: PathBuf,
        /// First byte wanted, as an offset in the file.
        offset: u64,
        /// Bytes wanted from there.
        wanted: u64,
        /// Bytes of these that arrived before the failure.
        got: u64,
        /// What the operating system said.
        source: Arc<io::Error>,
    },
    /// The file ends before the expert does.
    #[error(
        "expert {expert} of layer {layer}: {} ends early: at offset {offset} wanted {wanted} bytes, got {got}. Fetch or convert the file again",
        file.display()
    )]
    EndOfFile {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// The file.
        file: PathBuf,
        /// First byte wanted, as an offset in the file.
        offset: u64,
        /// Bytes wanted from there.
        wanted: u64,
        /// Bytes of these that the file holds.
        got: u64,
    },
    /// The bytes are not those that were written at conversion.
    #[error(
        "expert {expert} of layer {layer} is damaged: {} at offset {offset} should have checksum {wanted:016x}, has {got:016x}. Convert or copy the file again",
        file.display()
    )]
    Checksum {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// File of its first run.
        file: PathBuf,
        /// Offset of its first run.
        offset: u64,
        /// Checksum in the container.
        wanted: u64,
        /// Checksum of the bytes read.
        got: u64,
    },
    /// An expert's place on disk is impossible.
    #[error("expert {expert} of layer {layer} cannot be placed: {reason}")]
    Place {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// What is wrong.
        reason: String,
    },
    /// A setting is impossible.
    #[error("store settings: {0}")]
    Config(String),
    /// A layer without routed experts was asked for.
    #[error("layer {layer} has no routed experts in this store")]
    NoSuchLayer {
        /// Layer asked for.
        layer: u32,
    },
    /// An expert number outside the layer was asked for.
    #[error("layer {layer} has {count} experts; expert {expert} was asked for")]
    NoSuchExpert {
        /// Layer.
        layer: u32,
        /// Expert asked for.
        expert: u32,
        /// Experts of the layer.
        count: usize,
    },
    /// A fetch must name distinct experts in ascending order.
    #[error(
        "a fetch of layer {layer} names expert {expert} after expert {before}; experts must be distinct and ascending"
    )]
    Order {
        /// Layer.
        layer: u32,
        /// The expert named first.
        before: u32,
        /// The expert named after it.
        expert: u32,
    },
    /// Leases fill every in-flight slot, so no load can begin. The fetch stays usable: drop leases, call again.
    #[error(
        "layer {layer}: {waiting} experts wait for a slot, but leases hold all {in_flight} in-flight slots. Drop leases before asking for more, or raise the in-flight setting"
    )]
    LeasesExhausted {
        /// Layer.
        layer: u32,
        /// Experts that wait.
        waiting: usize,
        /// In-flight slots of the layer's size class.
        in_flight: usize,
    },
    /// A load took longer than the store's patience.
    #[error("layer {layer}: no expert arrived in {waited:?}; is the drive alive? {dump}")]
    Stalled {
        /// Layer.
        layer: u32,
        /// Time waited.
        waited: Duration,
        /// Queue and slot state at that time.
        dump: String,
    },
    /// Memory for slots could not be mapped.
    #[error("cannot map {bytes} bytes for expert slots: {source}. Lower the cap or the in-flight setting")]
    Map {
        /// Bytes asked for.
        bytes: u64,
        /// What the operating system said.
        source: Arc<io::Error>,
    },
    /// A loader thread could not be started.
    #[error("cannot start loader thread {number}: {source}. Lower the loader count")]
    Spawn {
        /// Number of the thread.
        number: usize,
        /// What the operating system said.
        source: Arc<io::Error>,
    },
    /// Reads by io_uring were demanded but do not work.
    #[error("io_uring does not work here: {reason}. Use --io auto or threads")]
    Uring {
        /// Why.
        reason: String,
    },
    /// A load ahead of need was called off, so that the drive was free for what was needed.
    #[error("loading expert {expert} of layer {layer} ahead of need was called off")]
    Cancelled {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
    },
    /// The store contradicts itself; a fault of this program.
    #[error("internal fault of the expert store: {0}. Please report it")]
    Internal(String),
}

fn code_text(e: &io::Error) -> String {
    e.raw_os_error().map_or_else(|| "none".into(), |c| c.to_string())
}
