//! Latent attention on an accelerator, absorbed, with the choice of positions.

use metaltail_kernels::{Accelerator, Attend, Buffer, HeldMatrix, Lists, Op, Rope, Rows, Select};

use super::hold_floats;
use super::step::{Run, Step};
use crate::attention::KEY_NORM_EPS;
use crate::error::ModelError;
use crate::load::Loader;
use crate::plan::{IndexerPlan, IndexerUse, MlaPlan, RopePairs, RopePlan};

enum Query {
    Compressed { a: HeldMatrix, norm: Buffer, b: HeldMatrix },
    Direct(HeldMatrix),
}

struct Indexer {
    plan: IndexerPlan,
    query: HeldMatrix,
    key: HeldMatrix,
    key_norm: (Buffer, Buffer),
    head_weights: HeldMatrix,
}

/// Latent attention with its weights on a device. What it computes, and why so: `attention/mla.rs`.
pub(super) struct Mla {
    plan: MlaPlan,
    query: Query,
    kv_a: HeldMatrix,
    kv_a_norm: Buffer,
    kv_b: HeldMatrix,
    output: HeldMatrix,
    indexer: Option<Indexer>,
    /// Number of its rotation among those of the model.
    rotation: usize,
}

/// The rotations of a model, each once: layers that share one share its cosines and sines.
#[derive(Default)]
pub(super) struct Rotations(Vec<RopePlan>);

impl Rotations {
    fn number(&mut self, rope: &RopePlan) -> usize {
        self.0.iter().position(|known| known == rope).unwrap_or_else(|| {
            self.0.push(rope.clone());
            self.0.len() - 1
        })
    }
}

impl Mla {
    pub(super) fn load(
        plan: &MlaPlan,
        prefix: &str,
        loader: &Loader<'_>,
        device: &mut dyn Accelerator,
        rotations: &mut Rotations,
    ) -> Result<Mla, ModelError> {
        let name = |part: &str| format!("{prefix}self_attn.{part}");
        let query = match plan.q_lora {
            Some(_) => Query::Compressed {
                a: device.hold(loader.matrix(&name("q_a_proj.weight"))?.as_ref())?,
                norm: hold_floats(device, &loader.floats(&name("q_a_layernorm.weight"))?)?,
                b: device.hold(loader.matrix(&name("q_b_proj.weight"))?.as_ref())?,
            },
            None => Query::Direct(device.hold(loader.matrix(&name("q_proj.weight"))?.as_ref())?),
        };
        let indexer = match &plan.indexer {
            IndexerUse::Own(indexer) => Some(Indexer::load(indexer, prefix, loader, device)?),
            IndexerUse::None | IndexerUse::Shared => None,
        };
        Ok(Mla {
            plan: plan.clone(),
            query,
            kv_a: device.hold(loader.matrix(&name("kv_a_proj_with_mqa.weight"))?.as_ref())?,
            kv_a_norm: hold_floats(device, &loader.floats(&name("kv_a_layernorm.weight"))?)?,
            kv_b: device.hold(loader.matrix(&name("kv_b_proj.weight"))?.as_ref())?,
            output: device.hold(loader.matrix(&name("o_proj.weight"))?.as_ref())?,
            indexer,
            rotation: rotations.number(&plan.rope),
        })
    }

    /// Widths of the rows that a position keeps.
    pub(super) fn streams(&self) -> Vec<usize> {
        let keys = self.indexer.as_ref().map(|indexer| indexer.plan.head_dim);
        std::iter::once(self.plan.kv_lora + self.plan.rope.dim).chain(keys).collect()
    }

    /// Records the attention of all rows of `h` (rows × hidden, normed); the result is rows × hidden.
    pub(super) fn record(
        &self,
        step: &mut Step<'_, '_, '_>,
        device: &mut dyn Accelerator,
        slot: usize,
        h: Buffer,
    ) -> Result<Buffer, ModelError> {
        let plan = &self.plan;
        let (n, head) = (step.rows.len(), plan.nope + plan.rope.dim);
        let (queries, latent) = self.queries(step, device, h)?;
        self.rotate(step, device, (queries, 0..n), (plan.heads, head, plan.nope))?;
        self.remember(step, device, slot, h)?;
        match (&plan.indexer, &self.indexer, latent) {
            (IndexerUse::Own(_), Some(indexer), Some(latent)) => {
                step.lists = self.select(indexer, step, device, slot, (h, latent))?;
            }
            (IndexerUse::Shared, _, _) => {}
            _ => step.lists = None,
        }
        let values = step.scratch.numbers(device, "values", n * plan.heads * plan.value)?;
        for run in step.runs.clone() {
            let row = run.rows.start;
            let lists =
                step.lists.map(|lists| Lists { chosen: lists.chosen.plus(row * lists.top_k), ..lists });
            let most = lists.map_or(u32::MAX, |lists| u32::try_from(lists.top_k).unwrap_or(u32::MAX));
            device.record(&Op::Attend(Attend {
                heads: plan.heads,
                nope: plan.nope,
                rope: plan.rope.dim,
                value: plan.value,
                kv_b: self.kv_b,
                scale: plan.scale,
                queries: queries.view().plus(row * plan.heads * head),
                keys: step.stream(&run, slot, 0)?.view(),
                counts: counts(&run).map(|count| count.min(most)).collect(),
                lists,
                positions: run.end(),
                out: values.view().plus(row * plan.heads * plan.value),
            }))?;
        }
        step.product(device, self.output, values, "attended")
    }

    /// Queries (rows × heads × (nope + rope)), not rotated, and the normed compressed ones.
    fn queries(
        &self,
        step: &mut Step<'_, '_, '_>,
        device: &mut dyn Accelerator,
        h: Buffer,
    ) -> Result<(Buffer, Option<Buffer>), ModelError> {
        match self.query {
            Query::Direct(matrix) => Ok((step.product(device, matrix, h, "queries")?, None)),
            Query::Compressed { a, norm, b } => {
                let (rows, width) = (step.rows.len(), a.layout.rows());
                let compressed = step.product(device, a, h, "compressed query")?;
                let latent = step.scratch.numbers(device, "latent query", rows * width)?;
                let (from, to, eps) = (compressed.rows(width), latent.rows(width), self.plan.lora_norm_eps);
                device.record(&Op::RmsNorm { from, to, rows, width, weight: norm.view(), eps })?;
                Ok((step.product(device, b, latent, "queries")?, Some(latent)))
            }
        }
    }

    /// Rotates a part of each head of some rows of the step, the first of which lie at the beginning of `x`.
    fn rotate(
        &self,
        step: &mut Step<'_, '_, '_>,
        device: &mut dyn Accelerator,
        (x, rows): (Buffer, std::ops::Range<usize>),
        shape: (usize, usize, usize),
    ) -> Result<(), ModelError> {
        self.rotate_at(step, device, (x.rows(shape.0 * shape.1), rows), shape)
    }

    fn rotate_at(
        &self,
        step: &mut Step<'_, '_, '_>,
        device: &mut dyn Accelerator,
        (x, rows): (Rows, std::ops::Range<usize>),
        (heads, head, offset): (usize, usize, usize),
    ) -> Result<(), ModelError> {
        let rope = &self.plan.rope;
        let (cosines, sines) = step.angles(device, (self.rotation, rope))?;
        let first = rows.start * (rope.dim / 2);
        device.record(&Op::Rope(Rope {
            x: x.view,
            rows: rows.len(),
            heads,
            head,
            offset,
            dim: rope.dim,
            interleaved: rope.pairs == RopePairs::Interleaved,
            cosines: cosines.plus(first),
            sines: sines.plus(first),
        }))?;
        Ok(())
    }

    /// Records the rows' latents and rotated keys into the cache.
    fn remember(
        &self,
        step: &mut Step<'_, '_, '_>,
        device: &mut dyn Accelerator,
        slot: usize,
        h: Buffer,
    ) -> Result<(), ModelError> {
        let (lora, dim) = (self.plan.kv_lora, self.plan.rope.dim);
        let width = lora + dim;
        let compressed = step.product(device, self.kv_a, h, "compressed keys")?;
        for run in step.runs.clone() {
            let rows = run.rows.len();
            let at =
                |buffer: Buffer, row: usize| Rows { view: buffer.view().plus(row * width), stride: width };
            let (from, to) = (at(compressed, run.rows.start), at(step.stream(&run, slot, 0)?, run.position));
            let (weight, eps) = (self.kv_a_norm.view(), self.plan.lora_norm_eps);
            device.record(&Op::RmsNorm { from, to, rows, width: lora, weight, eps })?;
            let behind = |rows: Rows| Rows { view: rows.view.plus(lora), ..rows };
            device.record(&Op::Copy { from: behind(from), to: behind(to), rows, width: dim })?;
            self.rotate_at(step, device, (to, run.rows), (1, width, lora))?;
        }
        Ok(())
    }

    /// Keeps the rows' keys and chooses positions; none where every row keeps all that it has.
    fn select(
        &self,
        indexer: &Indexer,
        step: &mut Step<'_, '_, '_>,
        device: &mut dyn Accelerator,
        slot: usize,
        (h, latent): (Buffer, Buffer),
    ) -> Result<Option<Lists>, ModelError> {
        let IndexerPlan { heads, head_dim: dim, top_k } = indexer.plan;
        let n = step.rows.len();
        let keys = step.product(device, indexer.key, h, "indexer keys")?;
        for run in step.runs.clone() {
            let at = |buffer: Buffer, row: usize| Rows { view: buffer.view().plus(row * dim), stride: dim };
            let (from, to) = (at(keys, run.rows.start), at(step.stream(&run, slot, 1)?, run.position));
            let (weight, bias) = (indexer.key_norm.0.view(), indexer.key_norm.1.view());
            let (rows, eps) = (run.rows.len(), KEY_NORM_EPS);
            device.record(&Op::LayerNorm { from, to, rows, width: dim, weight, bias, eps })?;
            self.rotate_at(step, device, (to, run.rows), (1, dim, 0))?;
        }
        if step.rows.iter().all(|row| (row.position as usize) < top_k) {
            return Ok(None);
        }
        let queries = step.product(device, indexer.query, latent, "indexer queries")?;
        self.rotate(step, device, (queries, 0..n), (heads, dim, 0))?;
        let weights = step.product(device, indexer.head_weights, h, "indexer weights")?;
        let chosen = step.scratch.numbers(device, "chosen positions", n.saturating_mul(top_k))?;
        for run in step.runs.clone() {
            let row = run.rows.start;
            device.record(&Op::Select(Select {
                heads,
                dim,
                top_k,
                queries: queries.view().plus(row * heads * dim),
                weights: weights.view().plus(row * heads),
                keys: step.stream(&run, slot, 1)?.view(),
                counts: counts(&run).collect(),
                chosen: chosen.view().plus(row * top_k),
            }))?;
        }
        Ok(Some(Lists { chosen: chosen.view(), top_k }))
    }
}

/// Of each row of a run the positions up to its own.
fn counts(run: &Run) -> impl Iterator<Item = u32> + use<> {
    // A position is below 2^28.
    (run.position..run.end()).map(|position| position as u32 + 1)
}

impl Indexer {
    fn load(
        plan: &IndexerPlan,
        prefix: &str,
        loader: &Loader<'_>,
        device: &mut dyn Accelerator,
    ) -> Result<Indexer, ModelError> {
        let name = |part: &str| format!("{prefix}self_attn.indexer.{part}");
        let key_norm = (
            hold_floats(device, &loader.floats(&name("k_norm.weight"))?)?,
            hold_floats(device, &loader.floats(&name("k_norm.bias"))?)?,
        );
        Ok(Indexer {
            plan: plan.clone(),
            query: device.hold(loader.matrix(&name("wq_b.weight"))?.as_ref())?,
            key: device.hold(loader.matrix(&name("wk.weight"))?.as_ref())?,
            key_norm,
            head_weights: device
                .hold(loader.matrix_f32(&name("weights_proj.weight"), plan.heads)?.as_ref())?,
        })
    }
}
