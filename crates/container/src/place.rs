//! Where bytes lie on disk.

use metaltail_quant::MatrixLayout;

use crate::repack::Repack;

/// A run of bytes in one of a checkpoint's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Index into `Checkpoint::files`.
    pub file: u32,
    /// Byte offset in that file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// A dense matrix on disk; both runs were checked against the layout and the file's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixPlace {
    /// Format and shape.
    pub layout: MatrixLayout,
    /// Weight bytes.
    pub weights: Extent,
    /// Scale bytes, for formats that have them.
    pub scales: Option<Extent>,
}

/// A position inside one of an expert's runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunOffset {
    /// Index into [`ExpertPlace::runs`].
    pub run: u32,
    /// Byte offset from the beginning of that run.
    pub offset: u64,
}

/// One matrix of an expert inside its runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartPlace {
    /// Format and shape.
    pub layout: MatrixLayout,
    /// Where its weights begin.
    pub weights: RunOffset,
    /// Where its scales begin, for formats that have them.
    pub scales: Option<RunOffset>,
}

/// One expert on disk: the runs to read and where its matrices lie in them.
///
/// Adjacent byte ranges are joined: a slab container has one run an expert,
/// a colibrì directory two (weights, scales), a Hugging Face checkpoint one to four.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertPlace {
    /// Runs to read, each one read.
    pub runs: Vec<Extent>,
    /// Gate, up, down: in the runs or, where there is a repack, in its result.
    pub parts: [PartPlace; 3],
    /// XXH3-64 of the runs' bytes in order, where the container carries one.
    pub checksum: Option<u64>,
    /// What makes gate, up and down of the runs' bytes, where they are not stored as kernels read them.
    pub repack: Option<Box<Repack>>,
}
