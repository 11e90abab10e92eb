//! Multi-head latent attention.
//!
//! Each position keeps one latent of `kv_lora` numbers and one rotated key of `rope` numbers that
//! all heads share. With `W_K`, `W_V` the two row blocks of a head in `kv_b_proj`,
//! key = `W_K · latent` and value = `W_V · latent`. The absorbed form never builds them:
//! `q · (W_K · l) = (W_Kᵀ · q) · l` and `Σ p (W_V · l) = W_V · (Σ p l)`.

use std::ops::Range;

use metaltail_kernels::{Kernels, Pool, rms_norm, softmax_in_place};

use crate::attention::Attention;
use crate::attention::indexer::Indexer;
use crate::error::ModelError;
use crate::kv::Stream;
use crate::linear::Linear;
use crate::load::Loader;
use crate::plan::{IndexerUse, KvExpansion, MlaForm, MlaPlan};
use crate::rope::Angles;
use crate::step::{Row, Selection, StepContext};

/// Positions whose keys and values the reconstructed form builds at a time.
const TILE: usize = 256;

/// Queries come compressed (with a norm between) or straight from the hidden state.
enum Query {
    Compressed { a: Linear, norm: Vec<f32>, b: Linear },
    Direct(Linear),
}

/// The map from latents to the keys and values of all heads.
enum Expansion {
    Joint(Linear),
    Split { keys: Linear, values: Linear },
}

impl Expansion {
    fn load(plan: &MlaPlan, name: &dyn Fn(&str) -> String, loader: &Loader<'_>) -> Result<Self, ModelError> {
        Ok(match plan.expansion {
            KvExpansion::Joint => Expansion::Joint(Linear::load(&name("kv_b_proj.weight"), loader)?),
            KvExpansion::Split => Expansion::Split {
                keys: Linear::load(&name("k_b_proj.weight"), loader)?,
                values: Linear::load(&name("v_b_proj.weight"), loader)?,
            },
        })
    }
}

/// Latent attention with its weights.
pub(super) struct Mla {
    plan: MlaPlan,
    query: Query,
    kv_a: Linear,
    kv_a_norm: Vec<f32>,
    expansion: Expansion,
    output: Linear,
    indexer: Option<Indexer>,
}

impl Mla {
    pub(super) fn load(plan: &MlaPlan, prefix: &str, loader: &Loader<'_>) -> Result<Self, ModelError> {
        let name = |part: &str| format!("{prefix}self_attn.{part}");
        let query = match plan.q_lora {
            Some(_) => Query::Compressed {
                a: Linear::load(&name("q_a_proj.weight"), loader)?,
                norm: loader.floats(&name("q_a_layernorm.weight"))?,
                b: Linear::load(&name("q_b_proj.weight"), loader)?,
            },
            None => Query::Direct(Linear::load(&name("q_proj.weight"), loader)?),
        };
        let indexer = match &plan.indexer {
            IndexerUse::Own(indexer) => Some(Indexer::load(indexer, plan, prefix, loader)?),
            IndexerUse::None | IndexerUse::Shared => None,
        };
        Ok(Mla {
            plan: plan.clone(),
            query,
            kv_a: Linear::load(&name("kv_a_proj_with_mqa.weight"), loader)?,
            kv_a_norm: loader.floats(&name("kv_a_layernorm.weight"))?,
            expansion: Expansion::load(plan, &name, loader)?,
            output: Linear::load(&name("o_proj.weight"), loader)?,
            indexer,
        })
    }

    /// Rotated queries (rows × heads × (nope + rope)) and the normed compressed query.
    fn queries(
        &self,
        cx: &StepContext<'_, '_>,
        angles: &[Angles],
        h: &[f32],
    ) -> (Vec<f32>, Option<Vec<f32>>) {
        let n = cx.rows.len();
        let (mut queries, latent) = match &self.query {
            Query::Direct(matrix) => (matrix.forward(cx.kernels, cx.pool, h, n), None),
            Query::Compressed { a, norm, b } => {
                let compressed = a.forward(cx.kernels, cx.pool, h, n);
                let mut latent = vec![0.0; compressed.len()];
                for (row, out) in compressed.chunks(norm.len()).zip(latent.chunks_mut(norm.len())) {
                    rms_norm(row, norm, self.plan.lora_norm_eps, out);
                }
                (b.forward(cx.kernels, cx.pool, &latent, n), Some(latent))
            }
        };
        let head = self.plan.nope + self.plan.rope.dim;
        for (row, angles) in queries.chunks_mut(self.plan.heads * head).zip(angles) {
            for query in row.chunks_mut(head) {
                self.plan.rope.rotate(&mut query[self.plan.nope..], angles);
            }
        }
        (queries, latent)
    }

    /// Writes latents and rotated keys of all rows into the cache.
    fn remember(&self, cx: &mut StepContext<'_, '_>, slot: usize, angles: &[Angles], h: &[f32]) {
        let n = cx.rows.len();
        let lora = self.plan.kv_lora;
        let width = lora + self.plan.rope.dim;
        let compressed = self.kv_a.forward(cx.kernels, cx.pool, h, n);
        for ((row, values), angles) in cx.rows.iter().zip(compressed.chunks(width)).zip(angles) {
            let cache = &mut *cx.caches[row.sequence];
            let kept = cache.streams_mut(slot)[0].row_mut(row.position as usize);
            let eps = self.plan.lora_norm_eps;
            rms_norm(&values[..lora], &self.kv_a_norm, eps, &mut kept[..lora]);
            kept[lora..].copy_from_slice(&values[lora..]);
            self.plan.rope.rotate(&mut kept[lora..], angles);
        }
    }

    /// One head of one row: `query` is nope + rope numbers, `out` the head's value.
    fn absorbed(&self, at: &HeadContext<'_>, query: &[f32], head: usize, out: &mut [f32]) {
        let HeadContext { kernels, pool, keys, selection, row } = *at;
        let lora = self.plan.kv_lora;
        // [W_Kᵀ · q_nope | q_rope], so that one product with a cached row gives the score.
        let mut absorbed = vec![0.0; lora + self.plan.rope.dim];
        let (latent, rotated) = absorbed.split_at_mut(lora);
        match &self.expansion {
            Expansion::Joint(matrix) => {
                let rows = self.key_rows(head);
                kernels.matmul_t(matrix.view(), rows, &query[..self.plan.nope], latent);
            }
            Expansion::Split { keys, .. } => {
                let rows = head * lora..(head + 1) * lora;
                kernels.matmul(pool, keys.view(), rows, &query[..self.plan.nope], 1, latent, lora);
            }
        }
        rotated.copy_from_slice(&query[self.plan.nope..]);
        let count = selection.len(row.position);
        let mut scores: Vec<f32> = (0..count)
            .map(|i| kernels.dot(&absorbed, keys.row(selection.position(i))) * self.plan.scale)
            .collect();
        softmax_in_place(&mut scores);
        let mut mixed = vec![0.0; lora];
        for (i, &weight) in scores.iter().enumerate() {
            kernels.axpy(weight, &keys.row(selection.position(i))[..lora], &mut mixed);
        }
        let (matrix, rows) = self.value_rows(head);
        kernels.matmul(pool, matrix.view(), rows, &mixed, 1, out, self.plan.value);
    }

    /// The same head with keys and values rebuilt, [`TILE`] positions at a time.
    fn reconstructed(&self, at: &HeadContext<'_>, query: &[f32], head: usize, out: &mut [f32]) {
        let HeadContext { kernels, selection, row, keys, .. } = *at;
        let lora = self.plan.kv_lora;
        let nope = self.plan.nope;
        let count = selection.len(row.position);
        let mut scores = Vec::with_capacity(count);
        for start in (0..count).step_by(TILE) {
            let tile = start..count.min(start + TILE);
            let built = self.rebuild_keys(at, tile.clone(), head);
            for (i, key) in tile.zip(built.chunks(nope)) {
                let shared = &keys.row(selection.position(i))[lora..];
                let score = kernels.dot(&query[..nope], key) + kernels.dot(&query[nope..], shared);
                scores.push(score * self.plan.scale);
            }
        }
        softmax_in_place(&mut scores);
        out.fill(0.0);
        for start in (0..count).step_by(TILE) {
            let tile = start..count.min(start + TILE);
            let built = self.rebuild_values(at, tile.clone(), head);
            for (i, value) in tile.zip(built.chunks(self.plan.value)) {
                kernels.axpy(scores[i], value, out);
            }
        }
    }

    /// Rows of the joint matrix that build one head's keys.
    fn key_rows(&self, head: usize) -> Range<usize> {
        let start = head * (self.plan.nope + self.plan.value);
        start..start + self.plan.nope
    }

    /// The matrix that builds values, and one head's rows of it.
    fn value_rows(&self, head: usize) -> (&Linear, Range<usize>) {
        let value = self.plan.value;
        match &self.expansion {
            Expansion::Joint(matrix) => {
                let start = self.key_rows(head).end;
                (matrix, start..start + value)
            }
            Expansion::Split { values, .. } => (values, head * value..(head + 1) * value),
        }
    }

    /// Latents of a tile of selected positions, one after the other.
    fn latents(&self, at: &HeadContext<'_>, tile: Range<usize>) -> Vec<f32> {
        let lora = self.plan.kv_lora;
        tile.flat_map(|i| at.keys.row(at.selection.position(i))[..lora].iter().copied()).collect()
    }

    /// One head's keys of a tile.
    fn rebuild_keys(&self, at: &HeadContext<'_>, tile: Range<usize>, head: usize) -> Vec<f32> {
        let (n, width, lora) = (tile.len(), self.plan.nope, self.plan.kv_lora);
        let latents = self.latents(at, tile);
        let mut out = vec![0.0; n * width];
        match &self.expansion {
            Expansion::Joint(matrix) => {
                let rows = self.key_rows(head);
                at.kernels.matmul(at.pool, matrix.view(), rows, &latents, n, &mut out, width);
            }
            Expansion::Split { keys, .. } => {
                for (latent, key) in latents.chunks(lora).zip(out.chunks_mut(width)) {
                    at.kernels.matmul_t(keys.view(), head * lora..(head + 1) * lora, latent, key);
                }
            }
        }
        out
    }

    /// One head's values of a tile.
    fn rebuild_values(&self, at: &HeadContext<'_>, tile: Range<usize>, head: usize) -> Vec<f32> {
        let (n, width) = (tile.len(), self.plan.value);
        let latents = self.latents(at, tile);
        let mut out = vec![0.0; n * width];
        let (matrix, rows) = self.value_rows(head);
        at.kernels.matmul(at.pool, matrix.view(), rows, &latents, n, &mut out, width);
        out
    }
}

/// What one head of one row reads.
#[derive(Clone, Copy)]
struct HeadContext<'a> {
    kernels: Kernels,
    pool: &'a Pool,
    keys: &'a Stream,
    selection: &'a Selection,
    row: Row,
}

impl Attention for Mla {
    fn forward(
        &self,
        cx: &mut StepContext<'_, '_>,
        slot: usize,
        h: &[f32],
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let angles: Vec<Angles> = cx.rows.iter().map(|row| self.plan.rope.angles(row.position)).collect();
        let (queries, latent) = self.queries(cx, &angles, h);
        self.remember(cx, slot, &angles, h);
        match (&self.plan.indexer, &self.indexer, &latent) {
            (IndexerUse::Own(_), Some(indexer), Some(latent)) => {
                cx.selections = indexer.select(cx, slot, &angles, h, latent);
            }
            (IndexerUse::Shared, _, _) => {}
            _ => cx.selections = vec![Selection::All; cx.rows.len()],
        }
        let heads = self.plan.heads;
        let head_width = self.plan.nope + self.plan.rope.dim;
        let mut values = vec![0.0; cx.rows.len() * heads * self.plan.value];
        {
            let (cx, queries) = (&*cx, &queries);
            cx.pool.for_each_chunk(&mut values, self.plan.value, &|index, value| {
                let (r, head) = (index / heads, index % heads);
                let row = cx.rows[r];
                let at = HeadContext {
                    kernels: cx.kernels,
                    pool: cx.pool,
                    keys: &cx.caches[row.sequence].streams(slot)[0],
                    selection: &cx.selections[r],
                    row,
                };
                let query = &queries[index * head_width..(index + 1) * head_width];
                match self.plan.form {
                    MlaForm::Absorbed => self.absorbed(&at, query, head, value),
                    MlaForm::Reconstructed => self.reconstructed(&at, query, head, value),
                }
            });
        }
        let n = cx.rows.len();
        let rows = self.output.rows();
        cx.kernels.matmul(cx.pool, self.output.view(), 0..rows, &values, n, out, rows);
        Ok(())
    }
}
