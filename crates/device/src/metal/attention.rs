//! Attention and the choice of positions on host memory.

use super::MetalKernels;
use super::encode::{AttentionBuffers, attend, select};
use super::launch::Launcher;
use super::layout::{narrow, words};
use crate::kernels::{Indexer, KernelError, LatentAttention, Positions, Sizes};

/// Of an `AttentionRow`: it has no list.
const NO_LIST: u32 = u32::MAX;

/// `AttentionRow`s, and the lists that they name.
fn table(rows: &[Positions<'_>]) -> Result<(Vec<u32>, Vec<u32>), KernelError> {
    let (mut table, mut lists) = (Vec::new(), Vec::new());
    for positions in rows {
        table.push(narrow("positions of a row", positions.count())?);
        match positions {
            Positions::Below(_) => table.push(NO_LIST),
            Positions::Listed(list) => {
                table.push(narrow("positions of all lists", lists.len())?);
                lists.extend_from_slice(list);
            }
        }
    }
    Ok((table, lists))
}

impl<L: Launcher> MetalKernels<L> {
    /// Poisoned memory for some numbers of an intermediate result: what no thread wrote shows.
    fn intermediate(&mut self, factors: [usize; 3]) -> Result<L::Buffer, KernelError> {
        let floats = factors.iter().try_fold(1usize, |product, factor| product.checked_mul(*factor));
        let too_large =
            KernelError::TooLarge { what: "numbers of an intermediate", value: usize::MAX, most: usize::MAX };
        self.of_floats(&vec![f32::NAN; floats.ok_or(too_large)?])
    }

    pub(super) fn attention(
        &mut self,
        attention: &LatentAttention<'_>,
        queries: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        let sizes = Sizes::attend(attention, queries, out)?;
        if sizes.rows == 0 {
            return Ok(());
        }
        let placed = self.place(attention.kv_b)?;
        let (rows, lists) = table(attention.rows)?;
        let (n, heads, lora) = (sizes.rows, attention.heads, attention.lora());
        let buffers = [
            self.launcher.buffer(&placed.entry)?,
            self.of_floats(queries)?,
            self.of_floats(attention.keys)?,
            self.launcher.buffer(&words(&rows))?,
            self.launcher.buffer(&words(&lists))?,
            self.intermediate([n, heads, lora + attention.rope])?,
            self.intermediate([n, heads, attention.span()])?,
            self.intermediate([n, heads, lora])?,
            self.of_floats(out)?,
        ];
        let [kv_b, queries, keys, rows, lists, absorbed, scores, mixed, result] = &buffers;
        let buffers =
            AttentionBuffers { kv_b, queries, keys, rows, lists, absorbed, scores, mixed, out: result };
        for launch in attend(self.grid, attention, &buffers)? {
            self.run(launch, &placed.reached())?;
        }
        self.read_into(result, out)
    }

    pub(super) fn selection(
        &mut self,
        indexer: &Indexer<'_>,
        queries: &[f32],
        weights: &[f32],
    ) -> Result<Vec<Vec<u32>>, KernelError> {
        let sizes = Sizes::select(indexer, queries, weights)?;
        if sizes.rows == 0 {
            return Ok(Vec::new());
        }
        let counts: Vec<u32> =
            indexer.counts.iter().map(|n| narrow("positions", *n)).collect::<Result<_, _>>()?;
        let buffers = [
            self.of_floats(queries)?,
            self.of_floats(weights)?,
            self.of_floats(indexer.keys)?,
            self.launcher.buffer(&words(&counts))?,
            self.intermediate([sizes.rows, indexer.span(), 1])?,
            self.launcher.buffer(&words(&vec![u32::MAX; sizes.result]))?,
        ];
        for launch in select(self.grid, indexer, buffers.each_ref())? {
            self.run(launch, &[])?;
        }
        let chosen = self.launcher.read(&buffers[5])?;
        let chosen: Vec<u32> =
            chosen.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let rows = chosen.chunks(indexer.top_k).zip(indexer.counts);
        Ok(rows.map(|(row, count)| row[..indexer.top_k.min(*count)].to_vec()).collect())
    }
}
