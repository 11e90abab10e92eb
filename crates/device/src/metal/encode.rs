//! From operations to launches: kernel names, arguments, grid shapes.

mod attention;

pub(super) use attention::{AttentionBuffers, attend, select};

use metaltail_quant::MatrixLayout;

use super::launch::{Argument, Launch};
use super::layout::{format_name, narrow, words};
use crate::kernels::{KernelError, Rope, Router};

/// Threads of a SIMD group.
const SIMD: u32 = 32;

/// SIMD groups of a threadgroup where each takes rows of a matrix.
const ROW_SIMDS: u32 = 4;

/// Threadgroup memory of an Apple GPU, less what kernels declare themselves.
const THREADGROUP_BYTES: usize = 32 * 1024 - 256;

/// How large grids may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    /// The most threadgroups of a launch in x, and in y. Kernels loop over what is left.
    pub(super) most: u32,
}

impl Grid {
    fn cap(self, wanted: u32) -> u32 {
        wanted.clamp(1, self.most.max(1))
    }

    /// Threadgroups for `rows` of a matrix and `tiles` of inputs.
    fn rows(self, rows: u32, tiles: u32) -> [u32; 2] {
        [self.cap(rows.div_ceil(ROW_SIMDS)), self.cap(tiles)]
    }
}

/// Inputs that a product's kernel takes at a time: of 1, 4 and 8 the least that holds all, or 8.
pub(super) fn tile_of(inputs: u32) -> u32 {
    match inputs {
        0 | 1 => 1,
        2..=4 => 4,
        _ => 8,
    }
}

/// What the kernels of products take.
fn of_product<'a, B>([matrix, x, out]: [&'a B; 3], inputs: u32) -> Vec<Argument<'a, B>> {
    vec![
        Argument::Buffer(0, matrix, 0),
        Argument::Buffer(1, x, 0),
        Argument::Buffer(2, out, 0),
        Argument::Bytes(3, words(&[inputs])),
    ]
}

/// matrix, x, out: buffers.
pub(super) fn matmul<'a, B>(
    grid: Grid,
    layout: MatrixLayout,
    inputs: usize,
    buffers: [&'a B; 3],
) -> Result<Launch<'a, B>, KernelError> {
    let (rows, inputs) = (narrow("rows of a matrix", layout.rows())?, narrow("inputs", inputs)?);
    let tile = tile_of(inputs);
    Ok(Launch {
        kernel: format!("matmul_{}_{tile}", format_name(layout.format())?),
        arguments: of_product(buffers, inputs),
        groups: grid.rows(rows, inputs.div_ceil(tile)),
        threads: ROW_SIMDS * SIMD,
    })
}

/// Rows and inputs that a threadgroup of a product for many inputs makes, as the kernel declares it.
const GEMM_TILE: u32 = 32;

/// matrix, x, out: buffers.
pub(super) fn gemm<'a, B>(
    grid: Grid,
    layout: MatrixLayout,
    inputs: usize,
    buffers: [&'a B; 3],
) -> Result<Launch<'a, B>, KernelError> {
    let (rows, inputs) = (narrow("rows of a matrix", layout.rows())?, narrow("inputs", inputs)?);
    Ok(Launch {
        kernel: format!("gemm_{}", format_name(layout.format())?),
        arguments: of_product(buffers, inputs),
        groups: [grid.cap(rows.div_ceil(GEMM_TILE)), grid.cap(inputs.div_ceil(GEMM_TILE))],
        threads: 4 * SIMD,
    })
}

/// gate, up, out: buffers.
pub(super) fn swiglu<'a, B>(
    grid: Grid,
    count: usize,
    [gate, up, out]: [&'a B; 3],
) -> Result<Launch<'a, B>, KernelError> {
    let count = narrow("numbers to multiply by gates", count)?;
    Ok(Launch {
        kernel: "swiglu".into(),
        arguments: vec![
            Argument::Buffer(0, gate, 0),
            Argument::Buffer(1, up, 0),
            Argument::Buffer(2, out, 0),
            Argument::Bytes(3, words(&[count])),
        ],
        groups: [grid.cap(count.div_ceil(8 * SIMD)), 1],
        threads: 8 * SIMD,
    })
}

/// Buffers of a pass of experts.
pub(super) struct ExpertBuffers<'a, B> {
    pub(super) experts: &'a B,
    pub(super) tiles: &'a B,
    pub(super) pairs: &'a B,
    pub(super) x: &'a B,
    pub(super) inner: &'a B,
    pub(super) out: &'a B,
}

/// The two launches of a pass: gate and up (of at most `inner` rows), then down (of `hidden`).
pub(super) fn experts<'a, B>(
    grid: Grid,
    tile: u32,
    tiles: u32,
    [inner, hidden]: [u32; 2],
    buffers: &ExpertBuffers<'a, B>,
) -> [Launch<'a, B>; 2] {
    let launch = |name: &str, rows: u32, from: &'a B, to: &'a B| Launch {
        kernel: format!("experts_{name}_{tile}"),
        arguments: vec![
            Argument::Buffer(0, buffers.experts, 0),
            Argument::Buffer(1, buffers.tiles, 0),
            Argument::Buffer(2, buffers.pairs, 0),
            Argument::Buffer(3, from, 0),
            Argument::Buffer(4, to, 0),
            Argument::Bytes(5, words(&[tiles, hidden])),
        ],
        groups: grid.rows(rows, tiles),
        threads: ROW_SIMDS * SIMD,
    };
    [launch("gate_up", inner, buffers.x, buffers.inner), launch("down", hidden, buffers.inner, buffers.out)]
}

/// x, weight, out: buffers.
pub(super) fn rms_norm<'a, B>(
    grid: Grid,
    rows: usize,
    width: usize,
    eps: f32,
    [x, weight, out]: [&'a B; 3],
) -> Result<Launch<'a, B>, KernelError> {
    let (rows, width) = (narrow("rows of a norm", rows)?, narrow("width of a norm", width)?);
    Ok(Launch {
        kernel: "rms_norm".into(),
        arguments: vec![
            Argument::Buffer(0, x, 0),
            Argument::Buffer(1, weight, 0),
            Argument::Buffer(2, out, 0),
            Argument::Bytes(3, words(&[rows, width, eps.to_bits()])),
        ],
        groups: [grid.cap(rows), 1],
        threads: threads_for(width),
    })
}

/// x, cosines, sines: buffers.
pub(super) fn rope<'a, B>(
    grid: Grid,
    rope: &Rope<'_>,
    rows: usize,
    [x, cosines, sines]: [&'a B; 3],
) -> Result<Launch<'a, B>, KernelError> {
    let staged = sixteen("width of a rotation", rope.dim)?;
    if staged > THREADGROUP_BYTES {
        let most = THREADGROUP_BYTES / 4;
        return Err(KernelError::TooLarge { what: "width of a rotation", value: rope.dim, most });
    }
    let heads = narrow("heads to rotate", rows.saturating_mul(rope.heads))?;
    let parameters = [
        narrow("rows to rotate", rows)?,
        narrow("heads of a row", rope.heads)?,
        narrow("floats of a head", rope.head)?,
        narrow("offset of a rotation", rope.offset)?,
        narrow("width of a rotation", rope.dim)?,
        u32::from(rope.interleaved),
    ];
    Ok(Launch {
        kernel: "rope".into(),
        arguments: vec![
            Argument::Buffer(0, x, 0),
            Argument::Buffer(1, cosines, 0),
            Argument::Buffer(2, sines, 0),
            Argument::Bytes(3, words(&parameters)),
            Argument::Threadgroup(0, staged),
        ],
        groups: [grid.cap(heads), 1],
        threads: threads_for(parameters[4] / 2),
    })
}

/// logits, bias, ids, weights, broken: buffers. Without a bias any buffer stands for it.
pub(super) fn route<'a, B>(
    grid: Grid,
    router: &Router<'_>,
    rows: usize,
    [logits, bias, ids, weights, broken]: [&'a B; 5],
) -> Result<Launch<'a, B>, KernelError> {
    let (groups, kept) = router.groups.unwrap_or((1, 1));
    let mut memory = [router.experts, router.experts, groups, router.top_k];
    for bytes in &mut memory {
        *bytes = sixteen("experts of a layer", *bytes)?;
    }
    if memory.iter().fold(0usize, |sum, bytes| sum.saturating_add(*bytes)) > THREADGROUP_BYTES {
        // Scores and keys, and where each expert is a group and all are chosen as much again.
        let most = THREADGROUP_BYTES / 16;
        return Err(KernelError::TooLarge { what: "experts of a layer", value: router.experts, most });
    }
    let experts = narrow("experts of a layer", router.experts)?;
    let parameters = [
        narrow("rows to route", rows)?,
        experts,
        narrow("experts of a row", router.top_k)?,
        u32::from(router.softmax),
        u32::from(router.bias.is_some()),
        narrow("groups of experts", groups)?,
        narrow("groups that are kept", kept)?,
        u32::from(router.normalise),
        router.scale.to_bits(),
    ];
    Ok(Launch {
        kernel: "route".into(),
        arguments: vec![
            Argument::Buffer(0, logits, 0),
            Argument::Buffer(1, bias, 0),
            Argument::Buffer(2, ids, 0),
            Argument::Buffer(3, weights, 0),
            Argument::Buffer(4, broken, 0),
            Argument::Bytes(5, words(&parameters)),
            Argument::Threadgroup(0, memory[0]),
            Argument::Threadgroup(1, memory[1]),
            Argument::Threadgroup(2, memory[2]),
            Argument::Threadgroup(3, memory[3]),
        ],
        groups: [grid.cap(parameters[0]), 1],
        threads: threads_for(experts),
    })
}

/// Threads of a threadgroup that shares `items`: whole SIMD groups, at most 256.
fn threads_for(items: u32) -> u32 {
    items.clamp(1, 256).next_multiple_of(SIMD)
}

/// Bytes of threadgroup memory for some 4-byte numbers: a multiple of 16, at least 16.
fn sixteen(what: &'static str, numbers: usize) -> Result<usize, KernelError> {
    let bytes = numbers.max(1).checked_mul(4).and_then(|bytes| bytes.checked_next_multiple_of(16));
    bytes.ok_or(KernelError::TooLarge { what, value: numbers, most: THREADGROUP_BYTES / 4 })
}
