//! [`KernelDevice`] over any accelerator: every operation brings its operands to the device and its result back.

use metaltail_kernels::{
    Accelerator, Attend, Buffer, Combine, ExpertRows, ExpertTask, ExpertWeights, HeldMatrix, Lists, Op,
    Order, Route, Rows, Select, View,
};
use metaltail_quant::MatrixRef;

use super::{
    Combination, ExpertPass, Indexer, KernelDevice, KernelError, LatentAttention, Norm, Positions, Rope,
    Router, Routes, Sizes, Strided,
};
use crate::residency::{HeldWeights, HoldError, ResidencyDriver};

/// Stands before every operand: a NaN that no computation gives.
const MARK: u32 = 0x7FC0_BEEF;

/// An accelerator on host memory: how its kernels are tested. Experts lie in memory that is declared to it, as a cache
/// has them.
pub struct HostKernels<A: Accelerator, D: ResidencyDriver> {
    // Freed first: it may read the experts until then.
    accelerator: A,
    experts: HeldWeights<D>,
    offset: usize,
    taken: Vec<Buffer>,
}

impl<A: Accelerator, D: ResidencyDriver> HostKernels<A, D> {
    /// The kernels of `accelerator`, to which `experts` declares memory.
    pub fn new(accelerator: A, experts: HeldWeights<D>) -> HostKernels<A, D> {
        HostKernels { accelerator, experts, offset: 0, taken: Vec::new() }
    }

    /// Puts every operand so many numbers behind the beginning of its buffer.
    pub fn with_offset(mut self, numbers: usize) -> HostKernels<A, D> {
        self.offset = numbers;
        self
    }

    /// The accelerator.
    pub fn accelerator(&self) -> &A {
        &self.accelerator
    }

    /// The accelerator, once nothing is in its hands.
    pub fn into_accelerator(self) -> A {
        self.accelerator
    }

    fn device(&self, message: String) -> KernelError {
        KernelError::Device { device: self.accelerator.name(), message }
    }

    /// Does `work`, and gives all memory back that it took, whatever happened.
    fn with_memory<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, KernelError>,
    ) -> Result<T, KernelError> {
        let done = work(self);
        let ended = self.accelerator.wait();
        for buffer in std::mem::take(&mut self.taken) {
            self.accelerator.release(buffer);
        }
        let done = done?;
        ended?;
        Ok(done)
    }

    /// Memory that holds `numbers`, up to its end.
    fn put(&mut self, numbers: &[f32]) -> Result<View, KernelError> {
        let buffer = self.accelerator.buffer(self.offset + numbers.len())?;
        self.taken.push(buffer);
        self.accelerator.write(buffer.view(), &vec![f32::from_bits(MARK); self.offset])?;
        let view = buffer.view().plus(self.offset);
        self.accelerator.write(view, numbers)?;
        Ok(view)
    }

    fn put_ids(&mut self, ids: &[u32]) -> Result<View, KernelError> {
        self.put(&ids.iter().map(|id| f32::from_bits(*id)).collect::<Vec<f32>>())
    }

    /// Nothing may be written before an operand.
    fn check_marks(&mut self, view: View) -> Result<(), KernelError> {
        let mut marks = vec![0; view.at];
        self.accelerator.read_ids(view.buffer.view(), &mut marks)?;
        match marks.iter().rposition(|mark| *mark != MARK) {
            None => Ok(()),
            Some(at) => Err(self.device(format!("number {} before a result was written", view.at - at))),
        }
    }

    fn get(&mut self, view: View, numbers: &mut [f32]) -> Result<(), KernelError> {
        self.check_marks(view)?;
        Ok(self.accelerator.read(view, numbers)?)
    }

    fn get_ids(&mut self, view: View, count: usize) -> Result<Vec<u32>, KernelError> {
        self.check_marks(view)?;
        let mut ids = vec![0; count];
        self.accelerator.read_ids(view, &mut ids)?;
        Ok(ids)
    }

    /// An operation with one result.
    fn compute(&mut self, op: &Op, result: View, out: &mut [f32]) -> Result<(), KernelError> {
        self.accelerator.record(op)?;
        self.accelerator.wait()?;
        self.get(result, out)
    }

    fn product(
        &mut self,
        m: MatrixRef<'_>,
        x: &[f32],
        order: Order,
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        let inputs = Sizes::matmul(m, x, out)?.rows;
        let matrix = self.accelerator.hold(m)?;
        self.with_memory(|this| {
            let (x, result) = (this.put(x)?, this.put(out)?);
            this.compute(&Op::Product { matrix, x, inputs, out: result, order }, result, out)
        })
    }

    fn norm(
        &mut self,
        norm: &Norm<'_>,
        bias: Option<&[f32]>,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        Sizes::norm(norm, bias, x, out)?;
        let Norm { strided: Strided { rows, width, from, to }, eps, .. } = *norm;
        self.with_memory(|this| {
            let (x, weight, result) = (this.put(x)?, this.put(norm.weight)?, this.put(out)?);
            let (from, to) = (Rows { view: x, stride: from }, Rows { view: result, stride: to });
            let op = match bias {
                Some(bias) => Op::LayerNorm { from, to, rows, width, weight, bias: this.put(bias)?, eps },
                None => Op::RmsNorm { from, to, rows, width, weight, eps },
            };
            this.compute(&op, result, out)
        })
    }

    /// Rows that attend to something: lists where any row has one.
    fn attended(
        &mut self,
        attention: &LatentAttention<'_>,
    ) -> Result<(Vec<u32>, Option<Lists>), KernelError> {
        let rows: Vec<&Positions<'_>> = attention.rows.iter().filter(|row| row.count() > 0).collect();
        let counts: Vec<u32> = rows.iter().map(|row| row.count() as u32).collect();
        if rows.iter().all(|row| matches!(row, Positions::Below(_))) {
            return Ok((counts, None));
        }
        let top_k = attention.span();
        let mut lists = Vec::with_capacity(rows.len() * top_k);
        for row in rows {
            lists.extend((0..row.count()).map(|i| row.at(i) as u32));
            // Of a shorter list the rest is not read: no position.
            lists.resize(lists.len().next_multiple_of(top_k), u32::MAX);
        }
        Ok((counts, Some(Lists { chosen: self.put_ids(&lists)?, top_k })))
    }

    fn attend_to_some(
        &mut self,
        attention: &LatentAttention<'_>,
        kv_b: HeldMatrix,
        queries: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        let LatentAttention { heads, nope, rope, value, scale, keys, .. } = *attention;
        let (queries, keys, result) = (self.put(queries)?, self.put(keys)?, self.put(out)?);
        let (counts, lists) = self.attended(attention)?;
        let positions = attention.keys.len() / (attention.lora() + rope);
        let out_view = result;
        let op = Attend {
            heads,
            nope,
            rope,
            value,
            kv_b,
            scale,
            queries,
            keys,
            counts,
            lists,
            positions,
            out: out_view,
        };
        self.compute(&Op::Attend(op), result, out)
    }
}

/// Rows of `width` that `wanted` says yes to.
fn rows_of(numbers: &[f32], width: usize, wanted: impl Fn(usize) -> bool) -> Vec<f32> {
    let rows = numbers.chunks(width).enumerate().filter(|(row, _)| wanted(*row));
    rows.flat_map(|(_, row)| row).copied().collect()
}

impl<A: Accelerator, D: ResidencyDriver> KernelDevice for HostKernels<A, D> {
    fn name(&self) -> &str {
        self.accelerator.name()
    }

    fn matmul(&mut self, m: MatrixRef<'_>, x: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        self.product(m, x, Order::Decode, out)
    }

    fn gemm(&mut self, m: MatrixRef<'_>, x: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        self.product(m, x, Order::Prefill, out)
    }

    fn swiglu(&mut self, gate: &[f32], up: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        let count = Sizes::swiglu(gate, up, out)?.result;
        self.with_memory(|this| {
            let (gate, up, result) = (this.put(gate)?, this.put(up)?, this.put(out)?);
            this.compute(&Op::SwiGlu { gate, up, out: result, count }, result, out)
        })
    }

    fn experts(&mut self, pass: &ExpertPass<'_>, out: &mut [f32]) -> Result<(), KernelError> {
        let inputs = Sizes::experts(pass, out)?.rows;
        let failed = |error: HoldError| KernelError::Device { device: "host", message: error.to_string() };
        let mut held = Vec::new();
        for task in pass.tasks {
            let ExpertWeights { gate, up, down } = task.weights;
            for m in [gate, up, down] {
                held.push(self.experts.hold(m).map_err(failed)?);
            }
        }
        self.with_memory(|this| {
            let (x, result) = (this.put(pass.x)?, this.put(out)?);
            let outputs = out.len() / pass.hidden;
            let rows = ExpertRows { x, inputs, hidden: pass.hidden, out: result, outputs };
            let gone = || KernelError::Device { device: "host", message: "an expert is gone".into() };
            let of = |held| this.experts.matrix(held).ok_or_else(gone);
            let mut tasks = Vec::new();
            for (task, held) in pass.tasks.iter().zip(held.as_chunks::<3>().0) {
                let weights = ExpertWeights { gate: of(held[0])?, up: of(held[1])?, down: of(held[2])? };
                tasks.push(ExpertTask { weights, ..*task });
            }
            this.accelerator.experts(&rows, &tasks)?;
            this.accelerator.wait()?;
            this.get(result, out)
        })
    }

    fn rms_norm(&mut self, norm: &Norm<'_>, x: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        self.norm(norm, None, x, out)
    }

    fn layer_norm(
        &mut self,
        norm: &Norm<'_>,
        bias: &[f32],
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        self.norm(norm, Some(bias), x, out)
    }

    fn copy(&mut self, strided: &Strided, from: &[f32], to: &mut [f32]) -> Result<(), KernelError> {
        Sizes::copy(strided, from, to)?;
        let Strided { rows, width, .. } = *strided;
        self.with_memory(|this| {
            let (x, result) = (this.put(from)?, this.put(to)?);
            let rows_at = |view, stride| Rows { view, stride };
            let (from, into) = (rows_at(x, strided.from), rows_at(result, strided.to));
            this.compute(&Op::Copy { from, to: into, rows, width }, result, to)
        })
    }

    fn add(&mut self, from: &[f32], to: &mut [f32]) -> Result<(), KernelError> {
        let count = Sizes::add(from, to)?.result;
        self.with_memory(|this| {
            let (from, result) = (this.put(from)?, this.put(to)?);
            this.compute(&Op::Add { from, to: result, count }, result, to)
        })
    }

    fn combine(&mut self, combination: &Combination<'_>, x: &mut [f32]) -> Result<(), KernelError> {
        Sizes::combine(combination, x)?;
        let Combination { weights, top_k, products, shared, width } = *combination;
        self.with_memory(|this| {
            let (products, result) = (this.put(products)?, this.put(x)?);
            let shared = shared.map(|shared| this.put(shared)).transpose()?;
            let op = Combine { products, weights: weights.to_vec(), top_k, shared, x: result, width };
            this.compute(&Op::Combine(op), result, x)
        })
    }

    fn rope(&mut self, rope: &Rope<'_>, x: &mut [f32]) -> Result<(), KernelError> {
        let rows = Sizes::rope(rope, x)?.rows;
        let Rope { heads, head, offset, dim, interleaved, .. } = *rope;
        self.with_memory(|this| {
            let (cosines, sines) = (this.put(rope.cosines)?, this.put(rope.sines)?);
            let at = this.put(x)?;
            let op = metaltail_kernels::Rope {
                x: at,
                rows,
                heads,
                head,
                offset,
                dim,
                interleaved,
                cosines,
                sines,
            };
            this.compute(&Op::Rope(op), at, x)
        })
    }

    fn route(&mut self, router: &Router<'_>, logits: &[f32]) -> Result<Routes, KernelError> {
        let sizes = Sizes::route(router, logits)?;
        let Router { experts, top_k, softmax, groups, normalise, scale, .. } = *router;
        // All ones: no number of experts, and NaN.
        let unwritten = |numbers: usize| vec![u32::MAX; numbers];
        self.with_memory(|this| {
            let logits = this.put(logits)?;
            let bias = router.bias.map(|bias| this.put(bias)).transpose()?;
            let ids = this.put_ids(&unwritten(sizes.result))?;
            let weights = this.put_ids(&unwritten(sizes.result))?;
            let broken = this.put_ids(&unwritten(sizes.rows))?;
            let rows = sizes.rows;
            this.accelerator.record(&Op::Route(Route {
                logits,
                rows,
                experts,
                top_k,
                softmax,
                bias,
                groups,
                normalise,
                scale,
                ids,
                weights,
                broken,
            }))?;
            this.accelerator.wait()?;
            let mut routes = Routes { ids: Vec::new(), weights: vec![0.0; sizes.result], broken: Vec::new() };
            this.get(weights, &mut routes.weights)?;
            routes.ids = this.get_ids(ids, sizes.result)?;
            for flag in this.get_ids(broken, rows)? {
                routes.broken.push(match flag {
                    0 => false,
                    1 => true,
                    _ => return Err(this.device(format!("{flag:#x} says whether a row is broken"))),
                });
            }
            Ok(routes)
        })
    }

    fn attend(
        &mut self,
        attention: &LatentAttention<'_>,
        queries: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        let sizes = Sizes::attend(attention, queries, out)?;
        let LatentAttention { heads, nope, rope, value, .. } = *attention;
        // A list of all positions is read as none, so it has to be them.
        let held = attention.keys.len() / (attention.lora() + rope);
        let all = |list: &[u32]| list.len() == held && !list.iter().copied().eq(0..held as u32);
        if attention.rows.iter().any(|row| matches!(row, Positions::Listed(list) if all(list))) {
            return Err(self.device("a list as long as the cache that is not all of it".into()));
        }
        let attends = |row: usize| attention.rows[row].count() > 0;
        let (query, result) = (heads * (nope + rope), heads * value);
        let queries = rows_of(queries, query, attends);
        let mut of_some = rows_of(&out[..sizes.result], result, attends);
        // Behind the results, to see that nothing is written there.
        of_some.extend(&out[sizes.result..]);
        let kv_b = self.accelerator.hold(attention.kv_b)?;
        self.with_memory(|this| this.attend_to_some(attention, kv_b, &queries, &mut of_some))?;
        let mut rest = &of_some[..];
        for (row, out) in out[..sizes.result].chunks_mut(result).enumerate() {
            match attends(row) {
                true => out.copy_from_slice(rest.split_off(..result).unwrap_or_default()),
                false => out.fill(0.0),
            }
        }
        out[sizes.result..].copy_from_slice(rest);
        Ok(())
    }

    fn select(
        &mut self,
        indexer: &Indexer<'_>,
        queries: &[f32],
        weights: &[f32],
    ) -> Result<Vec<Vec<u32>>, KernelError> {
        let sizes = Sizes::select(indexer, queries, weights)?;
        let Indexer { heads, dim, top_k, .. } = *indexer;
        let counts: Vec<u32> = indexer.counts.iter().map(|count| *count as u32).collect();
        self.with_memory(|this| {
            let (queries, weights) = (this.put(queries)?, this.put(weights)?);
            let (keys, chosen) = (this.put(indexer.keys)?, this.put_ids(&vec![u32::MAX; sizes.result])?);
            let select = Select { heads, dim, top_k, queries, weights, keys, counts, chosen };
            this.accelerator.record(&Op::Select(select))?;
            this.accelerator.wait()?;
            let ids = this.get_ids(chosen, sizes.result)?;
            let rows = ids.chunks(top_k).zip(indexer.counts);
            Ok(rows.map(|(row, count)| row[..top_k.min(*count)].to_vec()).collect())
        })
    }
}
