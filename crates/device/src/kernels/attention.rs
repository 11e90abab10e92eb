//! Latent attention and the choice of positions, as operations.

use metaltail_quant::MatrixRef;

use super::check::{KernelError, Sizes, at_least, rows, size};

/// The positions that a row attends to.
#[derive(Clone, Copy, Debug)]
pub enum Positions<'a> {
    /// All below this one.
    Below(usize),
    /// These, as an indexer (DSA) chose them.
    Listed(&'a [u32]),
}

impl Positions<'_> {
    /// How many they are.
    pub fn count(&self) -> usize {
        match self {
            Positions::Below(count) => *count,
            Positions::Listed(list) => list.len(),
        }
    }

    /// The `i`-th of them.
    pub fn at(&self, i: usize) -> usize {
        match self {
            Positions::Below(_) => i,
            Positions::Listed(list) => list[i] as usize,
        }
    }
}

/// Latent attention of the rows of a step, in the absorbed form: keys and values are never built.
#[derive(Clone, Copy, Debug)]
pub struct LatentAttention<'a> {
    /// Query heads, above 0.
    pub heads: usize,
    /// Numbers of a query that meet the latent, above 0.
    pub nope: usize,
    /// Numbers of a query that meet the rotated key.
    pub rope: usize,
    /// Numbers of a head's value, above 0.
    pub value: usize,
    /// Of each head the `nope` rows that make keys of latents, then the `value` rows that make values.
    pub kv_b: MatrixRef<'a>,
    /// Factor on the scores.
    pub scale: f32,
    /// What the cache holds of each position: the latent, then the rotated key.
    pub keys: &'a [f32],
    /// Of each row of the step what it attends to.
    pub rows: &'a [Positions<'a>],
}

impl LatentAttention<'_> {
    /// Numbers of a latent.
    pub fn lora(&self) -> usize {
        self.kv_b.layout().cols()
    }

    /// The most positions of a row.
    pub fn span(&self) -> usize {
        self.rows.iter().map(Positions::count).max().unwrap_or(0)
    }
}

/// The choice of positions: `score(t) = Σ_h weight_h · max(query_h · key_t / √dim, 0) / √heads`, of equal scores the
/// lowest position.
#[derive(Clone, Copy, Debug)]
pub struct Indexer<'a> {
    /// Heads, above 0.
    pub heads: usize,
    /// Numbers of a query and of a key, above 0.
    pub dim: usize,
    /// Positions to choose, above 0.
    pub top_k: usize,
    /// A key of each position.
    pub keys: &'a [f32],
    /// Of each row how many positions there are for it, counted from the first.
    pub counts: &'a [usize],
}

impl Indexer<'_> {
    /// The most positions that a row chooses from.
    pub fn span(&self) -> usize {
        self.counts.iter().copied().max().unwrap_or(0)
    }
}

/// A product of sizes.
fn product<const N: usize>(factors: [usize; N]) -> Option<usize> {
    factors.into_iter().try_fold(1usize, |product, factor| product.checked_mul(factor))
}

fn above_zero(what: &'static str, got: usize) -> Result<(), KernelError> {
    if got == 0 { size(what, "above 0", got) } else { Ok(()) }
}

fn exactly(what: &'static str, wanted: Option<usize>, got: usize) -> Result<(), KernelError> {
    at_least(what, wanted, got)?;
    if wanted == Some(got) { Ok(()) } else { size(what, wanted.unwrap_or(0), got) }
}

impl Sizes {
    /// Of [`super::KernelDevice::attend`].
    ///
    /// # Errors
    /// Sizes that do not fit together, or a position that the cache does not hold.
    pub fn attend(
        attention: &LatentAttention<'_>,
        queries: &[f32],
        out: &[f32],
    ) -> Result<Sizes, KernelError> {
        let LatentAttention { heads, nope, rope, value, kv_b, keys, rows: of_rows, .. } = *attention;
        above_zero("heads of an attention", heads)?;
        above_zero("numbers of a query", nope)?;
        above_zero("numbers of a value", value)?;
        let per_head = nope.checked_add(value);
        let wanted = per_head.and_then(|per_head| product([heads, per_head]));
        exactly("rows of keys and values", wanted, kv_b.layout().rows())?;
        let Some(width) = attention.lora().checked_add(rope) else {
            return Err(KernelError::TooLarge { what: "a rotated key", value: rope, most: usize::MAX });
        };
        let held = rows("cached rows", keys.len(), width)?;
        for positions in of_rows {
            let most = match positions {
                Positions::Below(count) => *count,
                Positions::Listed(list) => list.iter().max().map_or(0, |last| *last as usize + 1),
            };
            at_least("cached positions", Some(most), held)?;
        }
        let query = nope.checked_add(rope).and_then(|query| product([of_rows.len(), heads, query]));
        exactly("queries", query, queries.len())?;
        let result = product([of_rows.len(), heads, value]);
        at_least("the output of an attention", result, out.len())?;
        Ok(Sizes { rows: of_rows.len(), result: result.unwrap_or(0) })
    }

    /// Of [`super::KernelDevice::select`]; `result` counts chosen positions, `top_k` a row.
    ///
    /// # Errors
    /// Sizes that do not fit together, or a position that has no key.
    pub fn select(indexer: &Indexer<'_>, queries: &[f32], weights: &[f32]) -> Result<Sizes, KernelError> {
        let Indexer { heads, dim, top_k, keys, counts } = *indexer;
        above_zero("heads of an indexer", heads)?;
        above_zero("positions to choose", top_k)?;
        let held = rows("keys of an indexer", keys.len(), dim)?;
        at_least("positions of an indexer", Some(indexer.span()), held)?;
        exactly("queries of an indexer", product([counts.len(), heads, dim]), queries.len())?;
        exactly("weights of an indexer", product([counts.len(), heads]), weights.len())?;
        match product([counts.len(), top_k]) {
            Some(result) => Ok(Sizes { rows: counts.len(), result }),
            None => Err(KernelError::TooLarge { what: "chosen positions", value: top_k, most: usize::MAX }),
        }
    }
}
