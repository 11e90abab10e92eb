//! The oracle: plain code in the order of the sums that `docs/design/formats.md` gives.

mod attention;

use std::sync::Arc;

use metaltail_kernels::{Isa, Kernels, Pool, layer_norm, rms_norm, sigmoid, silu_mul, silu_mul_in_place};
use metaltail_quant::MatrixRef;

use super::{
    Combination, ExpertPass, Indexer, KernelDevice, KernelError, LatentAttention, NO_EXPERT, Norm, Rope,
    Router, Routes, Sizes, Strided,
};

/// [`KernelDevice`] by the scalar kernels of the processor.
///
/// Rotation, routing and attention are written here once more, since `model` lies above this crate; the rules are
/// those of `model/src/rope.rs`, `model/src/ffn/router.rs` and `model/src/attention`, and the tests hold them to
/// examples worked out there, or to another way to the same numbers.
pub struct Reference {
    kernels: Kernels,
    pool: Arc<Pool>,
}

impl Reference {
    /// The scalar kernels on one thread.
    ///
    /// # Errors
    /// None today: every processor has the scalar kernels.
    pub fn new() -> Result<Reference, KernelError> {
        let kernels = Kernels::new(Isa::Scalar)
            .map_err(|error| KernelError::Device { device: "reference", message: error.to_string() })?;
        Ok(Reference::with(kernels, Arc::new(Pool::new(1))))
    }

    /// Kernels of any instruction set, on the threads of `pool`: the same bits, sooner.
    pub fn with(kernels: Kernels, pool: Arc<Pool>) -> Reference {
        Reference { kernels, pool }
    }

    fn product(&self, m: MatrixRef<'_>, x: &[f32], out: &mut [f32]) {
        let rows = m.layout().rows();
        self.kernels.matmul(&self.pool, m, 0..rows, x, x.len() / m.layout().cols(), out, rows);
    }
}

impl KernelDevice for Reference {
    fn name(&self) -> &str {
        "reference"
    }

    fn matmul(&mut self, m: MatrixRef<'_>, x: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        let sizes = Sizes::matmul(m, x, out)?;
        self.product(m, x, &mut out[..sizes.result]);
        Ok(())
    }

    fn gemm(&mut self, m: MatrixRef<'_>, x: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        self.matmul(m, x, out)
    }

    fn swiglu(&mut self, gate: &[f32], up: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        let sizes = Sizes::swiglu(gate, up, out)?;
        silu_mul(gate, up, &mut out[..sizes.result]);
        Ok(())
    }

    fn experts(&mut self, pass: &ExpertPass<'_>, out: &mut [f32]) -> Result<(), KernelError> {
        Sizes::experts(pass, out)?;
        for task in pass.tasks {
            let inner = task.weights.gate.layout().rows();
            let (mut gate, mut up) = (vec![0.0; inner], vec![0.0; inner]);
            for &(input, output) in task.pairs {
                let x = &pass.x[input as usize * pass.hidden..][..pass.hidden];
                self.product(task.weights.gate, x, &mut gate);
                self.product(task.weights.up, x, &mut up);
                silu_mul_in_place(&mut gate, &up);
                let out = &mut out[output as usize * pass.hidden..][..pass.hidden];
                self.product(task.weights.down, &gate, out);
            }
        }
        Ok(())
    }

    fn rms_norm(&mut self, norm: &Norm<'_>, x: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        Sizes::norm(norm, None, x, out)?;
        for_rows(&norm.strided, x, out, |x, out| rms_norm(x, norm.weight, norm.eps, out));
        Ok(())
    }

    fn layer_norm(
        &mut self,
        norm: &Norm<'_>,
        bias: &[f32],
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        Sizes::norm(norm, Some(bias), x, out)?;
        for_rows(&norm.strided, x, out, |x, out| layer_norm(x, norm.weight, bias, norm.eps, out));
        Ok(())
    }

    fn copy(&mut self, strided: &Strided, from: &[f32], to: &mut [f32]) -> Result<(), KernelError> {
        Sizes::copy(strided, from, to)?;
        for_rows(strided, from, to, |from, to| to.copy_from_slice(from));
        Ok(())
    }

    fn add(&mut self, from: &[f32], to: &mut [f32]) -> Result<(), KernelError> {
        Sizes::add(from, to)?;
        to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        Ok(())
    }

    fn combine(&mut self, combination: &Combination<'_>, x: &mut [f32]) -> Result<(), KernelError> {
        let sizes = Sizes::combine(combination, x)?;
        let Combination { weights, top_k, products, shared, width } = *combination;
        for (index, x) in x[..sizes.result].iter_mut().enumerate() {
            let (row, column) = (index / width, index % width);
            let mut sum = 0.0f32;
            for k in row * top_k..(row + 1) * top_k {
                if weights[k] != 0.0 {
                    sum = weights[k].mul_add(products[k * width + column], sum);
                }
            }
            *x += shared.map_or(sum, |shared| sum + shared[index]);
        }
        Ok(())
    }

    fn rope(&mut self, rope: &Rope<'_>, x: &mut [f32]) -> Result<(), KernelError> {
        let sizes = Sizes::rope(rope, x)?;
        let half = rope.dim / 2;
        for (index, head) in x[..sizes.result].chunks_mut(rope.head).enumerate() {
            let angles = index / rope.heads * half;
            let part = &mut head[rope.offset..][..rope.dim];
            let before = part.to_vec();
            for j in 0..half {
                let (a, b) = match rope.interleaved {
                    true => (before[2 * j], before[2 * j + 1]),
                    false => (before[j], before[half + j]),
                };
                let (cos, sin) = (rope.cosines[angles + j], rope.sines[angles + j]);
                part[j] = a * cos - b * sin;
                part[half + j] = b * cos + a * sin;
            }
        }
        Ok(())
    }

    fn route(&mut self, router: &Router<'_>, logits: &[f32]) -> Result<Routes, KernelError> {
        let sizes = Sizes::route(router, logits)?;
        let mut routes =
            Routes { ids: Vec::new(), weights: Vec::new(), broken: Vec::with_capacity(sizes.rows) };
        for logits in logits.chunks(router.experts) {
            let mut chosen = choose(router, logits);
            chosen.resize(router.top_k, (NO_EXPERT, 0.0));
            routes.ids.extend(chosen.iter().map(|(id, _)| id));
            routes.weights.extend(chosen.iter().map(|(_, weight)| weight));
            routes.broken.push(logits.iter().any(|logit| !logit.is_finite()));
        }
        Ok(routes)
    }

    fn attend(
        &mut self,
        attention: &LatentAttention<'_>,
        queries: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        let sizes = Sizes::attend(attention, queries, out)?;
        let heads = queries.chunks(attention.nope + attention.rope);
        for (index, (query, out)) in heads.zip(out[..sizes.result].chunks_mut(attention.value)).enumerate() {
            let positions = &attention.rows[index / attention.heads];
            self.head(attention, positions, index % attention.heads, query, out);
        }
        Ok(())
    }

    fn select(
        &mut self,
        indexer: &Indexer<'_>,
        queries: &[f32],
        weights: &[f32],
    ) -> Result<Vec<Vec<u32>>, KernelError> {
        Sizes::select(indexer, queries, weights)?;
        let rows = queries.chunks(indexer.heads * indexer.dim).zip(weights.chunks(indexer.heads));
        let rows = rows.zip(indexer.counts);
        Ok(rows
            .map(|((queries, weights), count)| self.positions(indexer, *count, queries, weights))
            .collect())
    }
}

/// Every row that is read, with where it goes.
fn for_rows(strided: &Strided, from: &[f32], to: &mut [f32], mut each: impl FnMut(&[f32], &mut [f32])) {
    for row in 0..strided.rows {
        let width = strided.width;
        each(&from[row * strided.from..][..width], &mut to[row * strided.to..][..width]);
    }
}

/// Experts of one row with their weights, ascending by id.
fn choose(router: &Router<'_>, logits: &[f32]) -> Vec<(u32, f32)> {
    // `None` where the logit is damaged: such an expert loses against all others and weighs nothing.
    let scores = scores(router.softmax, logits);
    let choice = |expert: usize| match scores[expert] {
        Some(score) => score + router.bias.map_or(0.0, |bias| bias[expert]),
        None => f32::NEG_INFINITY,
    };
    let choices: Vec<f32> = (0..logits.len()).map(choice).collect();
    let mut order: Vec<usize> = match router.groups {
        Some((groups, kept)) => best_groups(&choices, groups, kept),
        None => (0..choices.len()).collect(),
    };
    order.sort_by(|a, b| choices[*b].total_cmp(&choices[*a]).then(a.cmp(b)));
    order.truncate(router.top_k);
    let score = |expert: usize| scores[expert].unwrap_or(0.0);
    let sum: f32 = order.iter().map(|expert| score(*expert)).sum();
    let weight = |score: f32| if router.normalise { score / (sum + 1e-20) } else { score };
    let mut chosen: Vec<(u32, f32)> =
        order.iter().map(|expert| (*expert as u32, weight(score(*expert)) * router.scale)).collect();
    chosen.sort_by_key(|(expert, _)| *expert);
    chosen
}

fn scores(softmax: bool, logits: &[f32]) -> Vec<Option<f32>> {
    let sound = |logit: &f32| logit.is_finite().then_some(*logit);
    if !softmax {
        return logits.iter().map(|logit| sound(logit).map(sigmoid)).collect();
    }
    let most = logits.iter().filter_map(sound).fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<Option<f32>> =
        logits.iter().map(|logit| sound(logit).map(|l| (l - most).exp())).collect();
    let sum: f32 = powers.iter().flatten().sum();
    powers.into_iter().map(|power| power.map(|power| power / sum)).collect()
}

/// Experts of the groups whose two greatest choices have the greatest sums.
fn best_groups(choices: &[f32], groups: usize, kept: usize) -> Vec<usize> {
    let size = choices.len() / groups;
    let strength = |group: usize| {
        let mut of_group = choices[group * size..][..size].to_vec();
        of_group.sort_by(|a, b| b.total_cmp(a));
        of_group.iter().take(2).copied().reduce(|a, b| a + b).unwrap_or(f32::NEG_INFINITY)
    };
    let strengths: Vec<f32> = (0..groups).map(strength).collect();
    let mut order: Vec<usize> = (0..groups).collect();
    order.sort_by(|a, b| strengths[*b].total_cmp(&strengths[*a]).then(a.cmp(b)));
    order.truncate(kept);
    order.into_iter().flat_map(|group| group * size..(group + 1) * size).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(router: &Router<'_>, logits: &[f32]) -> Routes {
        Reference::new().unwrap().route(router, logits).unwrap()
    }

    fn router(experts: usize, top_k: usize) -> Router<'static> {
        let (softmax, bias, groups) = (false, None, None);
        Router { experts, top_k, softmax, bias, groups, normalise: true, scale: 2.5 }
    }

    #[test]
    fn routing_agrees_with_the_examples_of_the_models_router() {
        let bias = [0.0, 10.0, 0.0, 0.0];
        let biased = route(&Router { bias: Some(&bias), ..router(4, 2) }, &[2.0, -3.0, 1.0, 0.0]);
        assert_eq!(biased.ids, [0, 1]);
        let p = |x: f32| 1.0 / (1.0 + (-x).exp());
        assert!((biased.weights[1] - 2.5 * p(-3.0) / (p(-3.0) + p(2.0))).abs() < 1e-6);
        let grouped = Router { groups: Some((3, 1)), ..router(6, 2) };
        assert_eq!(route(&grouped, &[5.0, -9.0, 2.0, 2.0, -9.0, -9.0]).ids, [2, 3]);
        let broken = route(&router(8, 3), &[f32::NAN; 8]);
        assert_eq!((broken.ids, broken.weights), (vec![0, 1, 2], vec![0.0; 3]));
        assert_eq!(broken.broken, [true]);
    }

    #[test]
    fn where_too_few_are_allowed_the_rest_is_marked() {
        let few = route(&Router { groups: Some((2, 1)), ..router(4, 3) }, &[0.0, 0.0, 1.0, 1.0]);
        assert_eq!(few.ids, [2, 3, NO_EXPERT]);
        assert_eq!(few.weights[2], 0.0);
    }

    #[test]
    fn rotation_agrees_with_the_example_of_the_model() {
        let (cosines, sines) = ([1.0, 1.0], [0.0, 0.0]);
        let rope = Rope {
            heads: 1,
            head: 5,
            offset: 0,
            cosines: &cosines,
            sines: &sines,
            dim: 4,
            interleaved: true,
        };
        let mut head = [1.0, 2.0, 3.0, 4.0, 9.0];
        Reference::new().unwrap().rope(&rope, &mut head).unwrap();
        assert_eq!(head, [1.0, 3.0, 2.0, 4.0, 9.0]);
    }

    #[test]
    fn experts_are_added_as_the_formula_says() {
        let combination = Combination {
            weights: &[2.0, 0.0, 0.5, 3.0],
            top_k: 2,
            products: &[1.0, 2.0, f32::NAN, f32::NAN, 8.0, 10.0, 1.0, 0.0],
            shared: Some(&[0.25, 0.5, 0.75, 1.0]),
            width: 2,
        };
        let mut x = [100.0, 200.0, 300.0, 400.0];
        Reference::new().unwrap().combine(&combination, &mut x).unwrap();
        assert_eq!(x, [102.25, 204.5, 307.75, 406.0]);
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let mut reference = Reference::new().unwrap();
        let norm = |strided| Norm { strided, weight: &[1.0; 2], eps: 0.0 };
        let dense = norm(Strided::dense(2, 2));
        assert!(reference.rms_norm(&dense, &[1.0; 4], &mut [0.0; 4]).is_ok());
        assert!(reference.rms_norm(&dense, &[1.0; 3], &mut [0.0; 4]).is_err());
        assert!(reference.rms_norm(&dense, &[1.0; 4], &mut [0.0; 3]).is_err());
        assert!(reference.layer_norm(&dense, &[1.0; 3], &[1.0; 4], &mut [0.0; 4]).is_err());
        let overlapping = Strided { to: 1, ..Strided::dense(2, 2) };
        assert!(reference.rms_norm(&norm(overlapping), &[1.0; 4], &mut [0.0; 4]).is_err());
        assert!(reference.rms_norm(&norm(Strided::dense(1, 3)), &[1.0; 4], &mut [0.0; 4]).is_err());
        assert!(reference.route(&router(4, 5), &[0.0; 4]).is_err());
        let grouped = Router { groups: Some((3, 1)), ..router(4, 2) };
        assert!(reference.route(&grouped, &[0.0; 4]).is_err());
    }
}
