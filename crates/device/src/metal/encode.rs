//! From operations to launches: kernel names, arguments, grid shapes, what each launch touches.

mod attention;
mod router;

pub(super) use attention::{Attention, attend, select};
pub(super) use router::route;

use metaltail_kernels::{Combine, ComputeError, Extent, Order, Rope, Rows, View};
use metaltail_quant::MatrixLayout;

use super::launch::{Launch, MOST_BYTES};
use super::layout::{floats, format_name, narrow, too_large, words};

/// Threads of a SIMD group.
const SIMD: u32 = 32;

/// SIMD groups of a threadgroup where each takes rows of a matrix.
const ROW_SIMDS: u32 = 4;

/// Threads of a threadgroup where each takes numbers of its own.
const THREADS: u32 = 8 * SIMD;

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

    /// Threadgroups for rows of `width` numbers.
    fn numbers(self, rows: u32, width: u32) -> [u32; 2] {
        [self.cap(width.div_ceil(THREADS)), self.cap(rows)]
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

/// Rows and inputs that a threadgroup of a product for many inputs makes, as the kernel declares it.
const GEMM_TILE: u32 = 32;

/// `entry` is the matrix's; `x` and `out` are all inputs and all results.
pub(super) fn product(
    grid: Grid,
    order: Order,
    (layout, entry): (MatrixLayout, Vec<u8>),
    inputs: usize,
    [x, out]: [Extent; 2],
) -> Result<Launch, ComputeError> {
    let (rows, inputs) = (narrow("rows of a matrix", layout.rows())?, narrow("inputs", inputs)?);
    let format = format_name(layout.format())?;
    let launch = match order {
        Order::Decode => {
            let tile = tile_of(inputs);
            let groups = grid.rows(rows, inputs.div_ceil(tile));
            Launch::new(format!("matmul_{format}_{tile}"), groups, ROW_SIMDS * SIMD)
        }
        Order::Prefill => {
            let groups = [grid.cap(rows.div_ceil(GEMM_TILE)), grid.cap(inputs.div_ceil(GEMM_TILE))];
            Launch::new(format!("gemm_{format}"), groups, 4 * SIMD)
        }
    };
    Ok(launch.given(entry).reads(x).writes(out).given(words(&[inputs])))
}

/// Gates, factors and results are `count` numbers each.
pub(super) fn swiglu(grid: Grid, [gate, up, out]: [View; 3], count: usize) -> Result<Launch, ComputeError> {
    let numbers = narrow("numbers to multiply by gates", count)?;
    let launch = Launch::new("swiglu", [grid.cap(numbers.div_ceil(THREADS)), 1], THREADS);
    let launch = launch.reads(gate.extent(count)?).reads(up.extent(count)?).writes(out.extent(count)?);
    Ok(launch.given(words(&[numbers])))
}

/// `to += from`.
pub(super) fn add(grid: Grid, from: View, to: View, count: usize) -> Result<Launch, ComputeError> {
    let numbers = narrow("numbers to add", count)?;
    let launch = Launch::new("add", [grid.cap(numbers.div_ceil(THREADS)), 1], THREADS);
    Ok(launch.reads(from.extent(count)?).changes(to.extent(count)?).given(words(&[numbers])))
}

/// The stride of some rows; of one it does not matter.
fn stride(of: Rows, rows: usize) -> Result<u32, ComputeError> {
    if rows > 1 { narrow("stride of rows", of.stride) } else { Ok(0) }
}

/// Rows from one place to another.
pub(super) fn copy(
    grid: Grid,
    [from, to]: [Rows; 2],
    rows: usize,
    width: usize,
) -> Result<Launch, ComputeError> {
    let (count, numbers) = (narrow("rows to copy", rows)?, narrow("width of a row", width)?);
    let launch = Launch::new("copy_rows", grid.numbers(count, numbers), THREADS);
    let launch = launch.reads(from.extent(rows, width)?).writes(to.extent(rows, width)?);
    Ok(launch.given(words(&[count, numbers, stride(from, rows)?, stride(to, rows)?])))
}

/// A norm of rows: with biases a layer's, without the root mean square's.
pub(super) struct Norm {
    pub(super) from: Rows,
    pub(super) to: Rows,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) weight: View,
    pub(super) bias: Option<View>,
    pub(super) eps: f32,
}

pub(super) fn norm(grid: Grid, norm: &Norm) -> Result<Launch, ComputeError> {
    let &Norm { from, to, rows, width, weight, bias, eps } = norm;
    let (count, numbers) = (narrow("rows of a norm", rows)?, narrow("width of a norm", width)?);
    let kernel = if bias.is_some() { "layer_norm" } else { "rms_norm" };
    let mut launch = Launch::new(kernel, [grid.cap(count), 1], threads_for(numbers));
    launch = launch.reads(from.extent(rows, width)?).reads(weight.extent(width)?);
    if let Some(bias) = bias {
        launch = launch.reads(bias.extent(width)?);
    }
    launch = launch.writes(to.extent(rows, width)?);
    Ok(launch.given(words(&[count, numbers, stride(from, rows)?, stride(to, rows)?, eps.to_bits()])))
}

/// A rotation, in place.
pub(super) fn rope(grid: Grid, rope: &Rope) -> Result<Launch, ComputeError> {
    let staged = sixteen("width of a rotation", rope.dim)?;
    if staged > THREADGROUP_BYTES {
        return Err(too_large("width of a rotation", rope.dim, THREADGROUP_BYTES / 4));
    }
    let heads = narrow("heads to rotate", rope.rows.saturating_mul(rope.heads))?;
    let parameters = [
        narrow("rows to rotate", rope.rows)?,
        narrow("heads of a row", rope.heads)?,
        narrow("floats of a head", rope.head)?,
        narrow("offset of a rotation", rope.offset)?,
        narrow("width of a rotation", rope.dim)?,
        u32::from(rope.interleaved),
    ];
    let angles = rope.rows * (rope.dim / 2);
    let launch = Launch::new("rope", [grid.cap(heads), 1], threads_for(parameters[4] / 2));
    let launch = launch.changes(rope.x.extent((rope.rows * rope.heads).saturating_mul(rope.head))?);
    let launch = launch.reads(rope.cosines.extent(angles)?).reads(rope.sines.extent(angles)?);
    Ok(launch.given(words(&parameters)).threadgroup(staged))
}

/// Experts into the residual stream: as many rows at a time as the weights of fit the constants of a launch.
pub(super) fn combine(grid: Grid, combine: &Combine) -> Result<Vec<Launch>, ComputeError> {
    let Combine { products, ref weights, top_k, shared, x, width } = *combine;
    if top_k > MOST_BYTES / 4 {
        return Err(too_large("experts of a row", top_k, MOST_BYTES / 4));
    }
    let block = MOST_BYTES / 4 / top_k;
    let blocks = weights.chunks(block * top_k).enumerate().map(|(number, weights)| {
        let (first, rows) = (number * block, weights.len() / top_k);
        let count = narrow("rows to combine", rows)?;
        let numbers = narrow("width of a row", width)?;
        let launch = Launch::new("combine", grid.numbers(count, numbers), THREADS);
        let launch = launch.reads(products.plus(first * top_k * width).extent(rows * top_k * width)?);
        let launch = match shared {
            Some(shared) => launch.reads(shared.plus(first * width).extent(rows * width)?),
            None => launch.stand_in(products.buffer),
        };
        let launch = launch.changes(x.plus(first * width).extent(rows * width)?).given(floats(weights));
        let top_k = narrow("experts of a row", top_k)?;
        Ok(launch.given(words(&[count, top_k, numbers, u32::from(shared.is_some())])))
    });
    blocks.collect()
}

/// Where the experts of a submission lie.
pub(super) struct Experts {
    /// Bytes of one buffer: an `Expert` each; a `Tile` each, of one pair and of several; a `Pair` each.
    pub(super) table: metaltail_kernels::Buffer,
    /// Where in it each of the four begins, and behind the last, in bytes.
    pub(super) at: [usize; 5],
    /// The most rows of a gate projection.
    pub(super) widest: u32,
    /// Width of an activation.
    pub(super) hidden: u32,
    pub(super) x: Extent,
    pub(super) out: Extent,
}

/// The two launches of `tiles` tiles of at most `tile` pairs, whose intermediates lie in `inner` (bound from
/// `origin` on): gate and up, then down. `list` is the number of the tiles' part of the table.
pub(super) fn experts(
    grid: Grid,
    experts: &Experts,
    (tile, list, tiles): (u32, usize, u32),
    (origin, inner): (View, Extent),
) -> [Launch; 2] {
    let launch = |name: &str, rows: u32| {
        let mut launch =
            Launch::new(format!("experts_{name}_{tile}"), grid.rows(rows, tiles), ROW_SIMDS * SIMD);
        for part in [0, list, 3] {
            let (start, end) = (experts.at[part] / 4, experts.at[part + 1] / 4);
            launch = launch.reads(Extent { buffer: experts.table, start, end });
        }
        launch
    };
    // Places of intermediates count from the first of all tiles.
    let bound = Extent { start: origin.at, ..inner };
    let given = words(&[tiles, experts.hidden]);
    let mut gate_up = launch("gate_up", experts.widest).reads(experts.x).writes(bound).given(given.clone());
    let mut down = launch("down", experts.hidden).reads(bound).writes(experts.out).given(given);
    // Of that only a part is touched.
    gate_up.footprint.writes = vec![inner];
    down.footprint.reads.pop();
    down.footprint.reads.push(inner);
    [gate_up, down]
}

/// Threads of a threadgroup that shares `items`: whole SIMD groups, at most 256.
fn threads_for(items: u32) -> u32 {
    items.clamp(1, 256).next_multiple_of(SIMD)
}

/// Bytes of threadgroup memory for some 4-byte numbers: a multiple of 16, at least 16.
fn sixteen(what: &'static str, numbers: usize) -> Result<usize, ComputeError> {
    let bytes = numbers.max(1).checked_mul(4).and_then(|bytes| bytes.checked_next_multiple_of(16));
    bytes.ok_or_else(|| too_large(what, numbers, THREADGROUP_BYTES / 4))
}
