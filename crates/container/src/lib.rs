//! Models on disk: safetensors checkpoints, colibrì directories, the slab container, GGUF; census, convert, synth.
//!
//! [`Checkpoint::open`] finds out what a directory is and reads its headers; [`Checkpoint::check`]
//! holds it against an [`Inventory`] before anything is allocated. Every size and offset of a file
//! is checked; a hostile file is an [`Error`], never a panic. Layouts: `docs/design/containers.md`
//! and `docs/design/slab.md`.
#![forbid(unsafe_code)]

mod census;
mod checkpoint;
mod colibri;
pub mod convert;
mod copies;
mod detail;
mod error;
mod finite;
pub mod gguf;
pub mod header;
mod hf;
mod index;
mod inspect;
mod inventory;
mod listing;
mod place;
mod regular;
mod repack;
pub mod slab;
mod slab_writer;
mod stacked;
pub mod synth;

pub use census::{Census, Draft, LayerCensus, LayerGap, Missing, RoleCensus, role_name};
pub use checkpoint::{Checkpoint, Drive, Kind};
pub use error::{Error, MissingShards, is_out_of_handles};
pub use header::{Dtype, Header, HeaderError, TensorInfo, parse_header};
pub use inspect::{Damage, FileReport, Progress, Report, Verification, inspect, verify};
pub use inventory::{ExpertLayerSpec, Inventory, Part, Role, StackedNames, TensorSpec};
pub use listing::JSON_CAP;
pub use place::{ExpertPlace, Extent, MatrixPlace, PartPlace, RunOffset};
pub use regular::{NotRegular, open_regular, read_capped, read_regular};
pub use repack::{Repack, RepackError, Stored};
pub use slab::{Checksum, Manifest, ManifestError, parse_manifest};
