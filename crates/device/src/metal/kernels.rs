//! [`KernelDevice`] over any [`Launcher`]: the form in which the Metal kernels are tested.

use metaltail_kernels::ExpertTask;
use metaltail_quant::MatrixRef;

use super::encode::{self, ExpertBuffers, Grid, tile_of};
use super::launch::{Launch, Launcher};
use super::layout::{floats, matrix, narrow, words};
use crate::kernels::{
    ExpertPass, Indexer, KernelDevice, KernelError, LatentAttention, Rope, Router, Routes, Sizes,
};

/// The most threadgroups of a launch in a direction. Metal takes more; a bound keeps positions far from 2³².
const MOST_GROUPS: u32 = 65_535;

/// Metal kernels on host memory: every operation brings its operands to the device and its result back.
pub struct MetalKernels<L: Launcher> {
    pub(super) launcher: L,
    pub(super) grid: Grid,
    around: [usize; 2],
    in_place: bool,
    replaced: Vec<[String; 2]>,
}

impl<L: Launcher> MetalKernels<L> {
    /// Kernels that `launcher` runs.
    pub fn new(launcher: L) -> MetalKernels<L> {
        let grid = Grid { most: MOST_GROUPS };
        MetalKernels { launcher, grid, around: [0, 0], in_place: false, replaced: Vec::new() }
    }

    /// Launches at most this many threadgroups in a direction, so that kernels must loop.
    pub fn with_most_groups(mut self, most: u32) -> Self {
        self.grid = Grid { most };
        self
    }

    /// Puts weights and scales between this many other bytes, as they lie in a file.
    pub fn with_weights_between(mut self, before: usize, behind: usize) -> Self {
        self.around = [before, behind];
        self
    }

    /// Lets kernels read weights and scales where the caller has them, instead of copies.
    pub fn with_weights_in_place(mut self) -> Self {
        self.in_place = true;
        self
    }

    /// Puts `prefix` before the names of all kernels that begin with `kernels`: how tests see that a mistake in
    /// another version of them is found.
    pub fn with_replaced(mut self, kernels: &str, prefix: &str) -> Self {
        self.replaced.push([kernels, prefix].map(str::to_owned));
        self
    }

    /// The launcher.
    pub fn launcher(&mut self) -> &mut L {
        &mut self.launcher
    }

    pub(super) fn run(
        &mut self,
        mut launch: Launch<'_, L::Buffer>,
        reached: &[&L::Buffer],
    ) -> Result<(), KernelError> {
        let other = self.replaced.iter().find(|[kernels, _]| launch.kernel.starts_with(kernels));
        if let Some([_, prefix]) = other {
            launch.kernel.insert_str(0, prefix);
        }
        self.launcher.launch(&launch, reached)
    }

    pub(super) fn of_floats(&mut self, numbers: &[f32]) -> Result<L::Buffer, KernelError> {
        self.launcher.buffer(&floats(numbers))
    }

    /// The floats of a buffer, into a slice of as many.
    pub(super) fn read_into(&mut self, buffer: &L::Buffer, out: &mut [f32]) -> Result<(), KernelError> {
        let bytes = self.launcher.read(buffer)?;
        for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *out = f32::from_le_bytes(*bytes);
        }
        Ok(())
    }

    /// A matrix's bytes on the device, and its entry of a table.
    pub(super) fn place(&mut self, m: MatrixRef<'_>) -> Result<Placed<L::Buffer>, KernelError> {
        if self.in_place {
            return self.reach(m);
        }
        let other = self.around.map(|bytes| vec![0xA5; bytes]);
        let among = |bytes: &[u8]| [&other[0], bytes, &other[1]].concat();
        let (weights, scales) = (among(m.weights()), among(m.scales()));
        let buffers = [self.launcher.buffer(&weights)?, self.launcher.buffer(&scales)?];
        let address = |buffer| self.launcher.address(buffer).wrapping_add(self.around[0] as u64);
        let entry = matrix(m.layout(), address(&buffers[0]), address(&buffers[1]))?;
        Ok(Placed { buffers: buffers.into(), entry })
    }

    /// The entry of a matrix that stays where it is.
    fn reach(&self, m: MatrixRef<'_>) -> Result<Placed<L::Buffer>, KernelError> {
        let address = |bytes| {
            let message = "this device does not reach host memory in place";
            self.launcher
                .host_address(bytes)
                .ok_or(KernelError::Device { device: self.launcher.name(), message: message.into() })
        };
        let entry = matrix(m.layout(), address(m.weights())?, address(m.scales())?)?;
        Ok(Placed { buffers: Vec::new(), entry })
    }

    /// Runs tiles of `tile` pairs at most.
    fn expert_tiles(
        &mut self,
        tables: &Tables<L::Buffer>,
        tile: u32,
        tiles: &[u32],
    ) -> Result<(), KernelError> {
        if tiles.is_empty() {
            return Ok(());
        }
        let list = self.launcher.buffer(&words(tiles))?;
        let count = narrow("tiles of a pass", tiles.len() / 3)?;
        let buffers = ExpertBuffers {
            experts: &tables.experts,
            tiles: &list,
            pairs: &tables.pairs,
            x: &tables.x,
            inner: &tables.inner,
            out: &tables.out,
        };
        let reached: Vec<&L::Buffer> = tables.placed.iter().flat_map(|placed| &placed.buffers).collect();
        for launch in encode::experts(self.grid, tile, count, [tables.widest, tables.hidden], &buffers) {
            self.run(launch, &reached)?;
        }
        Ok(())
    }

    /// Everything that the kernels of a pass read, and where they write.
    fn expert_tables(
        &mut self,
        pass: &ExpertPass<'_>,
        out: &[f32],
    ) -> Result<Tables<L::Buffer>, KernelError> {
        let (mut placed, mut experts, mut pairs) = (Vec::new(), Vec::new(), Vec::new());
        let (mut inner_at, mut widest) = (0usize, 0);
        for task in pass.tasks {
            let weights = [task.weights.gate, task.weights.up, task.weights.down];
            for m in weights {
                let matrix = self.place(m)?;
                experts.extend(&matrix.entry);
                placed.push(matrix);
            }
            experts.extend((inner_at as u64).to_le_bytes());
            experts.extend(words(&[narrow("pairs of a pass", pairs.len() / 2)?, 0]));
            let inner = weights[0].layout().rows();
            widest = widest.max(narrow("rows of a projection", inner)?);
            let too_large = KernelError::TooLarge { what: "intermediates", value: inner, most: usize::MAX };
            inner_at =
                task.pairs.len().checked_mul(inner).and_then(|n| n.checked_add(inner_at)).ok_or(too_large)?;
            pairs.extend(task.pairs.iter().flat_map(|&(input, output)| [input, output]));
        }
        Ok(Tables {
            placed,
            experts: self.launcher.buffer(&experts)?,
            pairs: self.launcher.buffer(&words(&pairs))?,
            x: self.of_floats(pass.x)?,
            // NaN: an intermediate that no thread wrote shows.
            inner: self.of_floats(&vec![f32::NAN; inner_at])?,
            out: self.of_floats(out)?,
            widest,
            hidden: narrow("width of a pass", pass.hidden)?,
        })
    }
}

/// A matrix on the device.
pub(super) struct Placed<B> {
    /// Weights and scales, where they were copied.
    pub(super) buffers: Vec<B>,
    /// Its entry of a table.
    pub(super) entry: Vec<u8>,
}

impl<B> Placed<B> {
    /// What a launch has to be told of.
    pub(super) fn reached(&self) -> Vec<&B> {
        self.buffers.iter().collect()
    }
}

struct Tables<B> {
    placed: Vec<Placed<B>>,
    experts: B,
    pairs: B,
    x: B,
    inner: B,
    out: B,
    widest: u32,
    hidden: u32,
}

/// Tiles of at most `tile` pairs, three numbers each (expert, first pair, pairs), of the tasks that `wanted` takes.
fn tiles(
    tasks: &[ExpertTask<'_>],
    tile: u32,
    wanted: impl Fn(usize) -> bool,
) -> Result<Vec<u32>, KernelError> {
    let mut tiles = Vec::new();
    for (expert, task) in tasks.iter().enumerate().filter(|(_, task)| wanted(task.pairs.len())) {
        let (expert, pairs) =
            (narrow("experts of a pass", expert)?, narrow("pairs of an expert", task.pairs.len())?);
        let firsts = (0..pairs).step_by(tile as usize);
        tiles.extend(firsts.flat_map(|first| [expert, first, tile.min(pairs - first)]));
    }
    Ok(tiles)
}

impl<L: Launcher> KernelDevice for MetalKernels<L> {
    fn name(&self) -> &str {
        self.launcher.name()
    }

    fn matmul(&mut self, m: MatrixRef<'_>, x: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        let sizes = Sizes::matmul(m, x, out)?;
        let placed = self.place(m)?;
        let matrix = self.launcher.buffer(&placed.entry)?;
        let (x, result) = (self.of_floats(x)?, self.of_floats(out)?);
        if sizes.rows > 0 {
            let launch = encode::matmul(self.grid, m.layout(), sizes.rows, [&matrix, &x, &result])?;
            self.run(launch, &placed.reached())?;
        }
        self.read_into(&result, out)
    }

    fn gemm(&mut self, m: MatrixRef<'_>, x: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        let sizes = Sizes::matmul(m, x, out)?;
        let placed = self.place(m)?;
        let matrix = self.launcher.buffer(&placed.entry)?;
        let (x, result) = (self.of_floats(x)?, self.of_floats(out)?);
        if sizes.rows > 0 {
            let launch = encode::gemm(self.grid, m.layout(), sizes.rows, [&matrix, &x, &result])?;
            self.run(launch, &placed.reached())?;
        }
        self.read_into(&result, out)
    }

    fn swiglu(&mut self, gate: &[f32], up: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        let sizes = Sizes::swiglu(gate, up, out)?;
        let buffers = [self.of_floats(gate)?, self.of_floats(up)?, self.of_floats(out)?];
        let [gate, up, result] = &buffers;
        self.run(encode::swiglu(self.grid, sizes.result, [gate, up, result])?, &[])?;
        self.read_into(result, out)
    }

    fn experts(&mut self, pass: &ExpertPass<'_>, out: &mut [f32]) -> Result<(), KernelError> {
        Sizes::experts(pass, out)?;
        let tables = self.expert_tables(pass, out)?;
        // An expert that one row chose, the usual case in decoding, decodes its weights for one row only.
        let (single, several) = (tile_of(1), tile_of(4));
        self.expert_tiles(&tables, single, &tiles(pass.tasks, single, |pairs| pairs == 1)?)?;
        self.expert_tiles(&tables, several, &tiles(pass.tasks, several, |pairs| pairs > 1)?)?;
        self.read_into(&tables.out, out)
    }

    fn rms_norm(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> Result<(), KernelError> {
        let sizes = Sizes::rms_norm(x, weight, out)?;
        let buffers = [self.of_floats(x)?, self.of_floats(weight)?, self.of_floats(out)?];
        let [x, w, result] = &buffers;
        let launch = encode::rms_norm(self.grid, sizes.rows, weight.len(), eps, [x, w, result])?;
        self.run(launch, &[])?;
        self.read_into(result, out)
    }

    fn rope(&mut self, rope: &Rope<'_>, x: &mut [f32]) -> Result<(), KernelError> {
        let sizes = Sizes::rope(rope, x)?;
        let buffers = [self.of_floats(x)?, self.of_floats(rope.cosines)?, self.of_floats(rope.sines)?];
        let [at, cosines, sines] = &buffers;
        let launch = encode::rope(self.grid, rope, sizes.rows, [at, cosines, sines])?;
        self.run(launch, &[])?;
        self.read_into(at, x)
    }

    fn route(&mut self, router: &Router<'_>, logits: &[f32]) -> Result<Routes, KernelError> {
        let sizes = Sizes::route(router, logits)?;
        // All ones: no number of experts, and NaN.
        let unwritten = |numbers: usize| vec![0xFF; numbers * 4];
        let buffers = [
            self.of_floats(logits)?,
            self.of_floats(router.bias.unwrap_or_default())?,
            self.launcher.buffer(&unwritten(sizes.result))?,
            self.launcher.buffer(&unwritten(sizes.result))?,
            self.launcher.buffer(&unwritten(sizes.rows))?,
        ];
        let [logits, bias, ids, weights, broken] = &buffers;
        let launch = encode::route(self.grid, router, sizes.rows, [logits, bias, ids, weights, broken])?;
        self.run(launch, &[])?;
        let mut routes = Routes {
            ids: Vec::new(),
            weights: vec![0.0; sizes.result],
            broken: Vec::with_capacity(sizes.rows),
        };
        self.read_into(weights, &mut routes.weights)?;
        let numbers = |bytes: Vec<u8>| -> Vec<u32> {
            bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
        };
        routes.ids = numbers(self.launcher.read(ids)?);
        for flag in numbers(self.launcher.read(broken)?) {
            let message = || format!("the kernel left {flag:#x} where it says whether a row is broken");
            routes.broken.push(match flag {
                0 => false,
                1 => true,
                _ => return Err(KernelError::Device { device: "metal", message: message() }),
            });
        }
        Ok(routes)
    }

    fn attend(
        &mut self,
        attention: &LatentAttention<'_>,
        queries: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        self.attention(attention, queries, out)
    }

    fn select(
        &mut self,
        indexer: &Indexer<'_>,
        queries: &[f32],
        weights: &[f32],
    ) -> Result<Vec<Vec<u32>>, KernelError> {
        self.selection(indexer, queries, weights)
    }
}
