//! Latent attention, and the choice of positions.
//!
//! The oracle of attention is another way to the same numbers: keys and values built from the latents, in f64.

use metaltail_device::kernels::{Indexer, KernelDevice, LatentAttention, Positions, Reference};
use metaltail_quant::{Format, OwnedMatrix};

use crate::data::{Numbers, Outcome, ROUNDING, near, same, values, written};

/// An attention with everything that it reads.
pub struct Case {
    heads: usize,
    nope: usize,
    rope: usize,
    value: usize,
    kv_b: OwnedMatrix,
    keys: Vec<f32>,
    queries: Vec<f32>,
    rows: Vec<Attended>,
}

/// What a row attends to.
#[derive(Clone)]
enum Attended {
    Below(usize),
    Listed(Vec<u32>),
}

/// Heads, nope, rope, value, latent.
pub type Shape = [usize; 5];

/// One of each, nothing whole, the demo's order of magnitude, DeepSeek's and GLM's proportions with few heads.
const SHAPES: [Shape; 5] =
    [[1, 1, 0, 1, 1], [3, 5, 2, 7, 13], [4, 16, 8, 12, 40], [5, 33, 10, 31, 130], [2, 128, 64, 128, 512]];

/// Formats of kv_b: with and without scales, by row, group and block.
const KV_B: [Format; 6] =
    [Format::F32, Format::Bf16, Format::Int8Row, Format::Int4Row, Format::Int4Group(64), Format::Fp8Block];

impl Case {
    /// `rows` rows that follow each other behind `before` positions. With `listed` every second one has a list, of
    /// about a third of what is there for it.
    pub fn new(shape: Shape, format: Format, before: usize, rows: usize, listed: bool) -> Case {
        let [heads, nope, rope, value, lora] = shape;
        let mut numbers = Numbers::new((before * 8 + rows) as u64 * 1000 + lora as u64 + u64::from(listed));
        let kv_b = numbers.matrix(format, heads * (nope + value), lora);
        let keys = numbers.floats((before + rows) * (lora + rope));
        let queries = numbers.floats(rows * heads * (nope + rope));
        let mut of_row = |row: usize| {
            let count = before + row + 1;
            if !listed || row % 2 == 1 {
                return Attended::Below(count);
            }
            let mut list: Vec<u32> = (0..count as u32).filter(|_| numbers.below(3) == 0).collect();
            // Its own position is always worth attending to.
            if list.last() != Some(&(count as u32 - 1)) {
                list.push(count as u32 - 1);
            }
            Attended::Listed(list)
        };
        let rows = (0..rows).map(&mut of_row).collect();
        Case { heads, nope, rope, value, kv_b, keys, queries, rows }
    }

    fn lora(&self) -> usize {
        self.kv_b.layout().cols()
    }

    /// 1 / √(width of a query), as models have it.
    fn scale(&self) -> f32 {
        ((self.nope + self.rope) as f32).powf(-0.5)
    }

    pub fn run(&self, device: &mut dyn KernelDevice, what: &str) -> Result<Vec<f32>, String> {
        let rows: Vec<Positions<'_>> = self
            .rows
            .iter()
            .map(|row| match row {
                Attended::Below(count) => Positions::Below(*count),
                Attended::Listed(list) => Positions::Listed(list),
            })
            .collect();
        let attention = LatentAttention {
            heads: self.heads,
            nope: self.nope,
            rope: self.rope,
            value: self.value,
            kv_b: self.kv_b.as_ref(),
            scale: self.scale(),
            keys: &self.keys,
            rows: &rows,
        };
        let results = self.rows.len() * self.heads * self.value;
        written(what, results, |out| device.attend(&attention, &self.queries, out))
    }

    /// Exact results, and how far off a device can be.
    fn exact(&self) -> (Vec<f32>, Vec<f64>) {
        let weights = values(&self.kv_b);
        let (mut all, mut bounds) = (Vec::new(), Vec::new());
        for (index, query) in self.queries.chunks(self.nope + self.rope).enumerate() {
            let positions: Vec<usize> = match &self.rows[index / self.heads] {
                Attended::Below(count) => (0..*count).collect(),
                Attended::Listed(list) => list.iter().map(|position| *position as usize).collect(),
            };
            let head = index % self.heads;
            let of_head = &weights[head * (self.nope + self.value) * self.lora()..];
            self.exact_head(of_head, &positions, query, &mut all, &mut bounds);
        }
        (all, bounds)
    }

    /// One head: a sum and the sum of its magnitudes go side by side, for the bound.
    fn exact_head(
        &self,
        weights: &[f64],
        positions: &[usize],
        query: &[f32],
        all: &mut Vec<f32>,
        bounds: &mut Vec<f64>,
    ) {
        let (lora, width) = (self.lora(), self.lora() + self.rope);
        let kept = |position: usize| self.keys[position * width..][..width].iter().map(|v| f64::from(*v));
        let scores: Vec<(f64, f64)> = positions
            .iter()
            .map(|position| {
                let latent: Vec<f64> = kept(*position).take(lora).collect();
                let key = weights.chunks(lora).take(self.nope).map(|row| dot(row, &latent));
                let rotated = kept(*position).skip(lora).map(|v| (v, v.abs()));
                let terms = key.chain(rotated).zip(query).map(|((k, size), q)| {
                    let q = f64::from(*q);
                    (k * q, size * q.abs())
                });
                let scale = f64::from(self.scale());
                let (sum, size) = terms.fold((0.0, 0.0), |all, term| (all.0 + term.0, all.1 + term.1));
                (sum * scale, size * scale)
            })
            .collect();
        let most = scores.iter().map(|score| score.0).fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|score| (score.0 - most).exp()).sum();
        // A score goes through the sums of W_Kᵀ q and of its product with a cached row. An error e of all scores
        // changes a weight by at most a factor of e^2e.
        let error = ROUNDING * (self.nope + width + 32) as f64;
        let score_error = scores.iter().map(|score| score.1 * error).fold(0.0, f64::max);
        let share = 2.0 * score_error + ROUNDING * (2 * positions.len() + lora + 64) as f64;
        let mut mixed = vec![(0.0, 0.0); lora];
        for (position, (score, _)) in positions.iter().zip(&scores) {
            let weight = (score - most).exp() / total;
            for (sum, latent) in mixed.iter_mut().zip(kept(*position)) {
                *sum = (sum.0 + weight * latent, sum.1 + weight * latent.abs());
            }
        }
        for row in weights.chunks(lora).skip(self.nope).take(self.value) {
            let terms = row.iter().zip(&mixed);
            let (value, size) = terms.fold((0.0, 0.0), |(value, size), (w, (sum, sizes))| {
                (value + w * sum, size + w.abs() * sizes)
            });
            all.push(value as f32);
            bounds.push(size * share + ROUNDING * value.abs());
        }
    }
}

/// Σ a·b and Σ |a·b|.
fn dot(a: &[f64], b: &[f64]) -> (f64, f64) {
    let products = a.iter().zip(b).map(|(a, b)| a * b);
    products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
}

/// One to four rows (a token, or drafts to verify), with and without lists.
pub fn agrees_with_built_keys_and_values(device: &mut dyn KernelDevice) -> Outcome {
    for (number, shape) in SHAPES.into_iter().enumerate() {
        for rows in 1..=4 {
            for listed in [false, true] {
                let format = KV_B[(number + rows + usize::from(listed) * 3) % KV_B.len()];
                let before = [0, 9, 40, 300][(number + rows) % 4];
                let case = Case::new(shape, format, before, rows, listed);
                let what = format!("{rows} rows of {shape:?} after {before}, {format}, lists {listed}");
                let (wanted, bounds) = case.exact();
                near(&what, &case.run(device, &what)?, &wanted, |i| bounds[i])?;
            }
        }
    }
    Ok(())
}

/// Every format at every number of rows.
pub fn knows_every_format(device: &mut dyn KernelDevice) -> Outcome {
    for format in KV_B {
        for rows in [1, 2, 5] {
            let case = Case::new([2, 19, 4, 21, 130], format, 6, rows, true);
            let what = format!("{rows} rows, kv_b in {format}");
            let (wanted, bounds) = case.exact();
            near(&what, &case.run(device, &what)?, &wanted, |i| bounds[i])?;
        }
    }
    Ok(())
}

/// A draft's row and the same row in its verification must give the same bits.
pub fn does_not_depend_on_other_rows(device: &mut dyn KernelDevice) -> Outcome {
    let case = Case::new([5, 16, 8, 12, 40], Format::Int8Row, 270, 4, true);
    let all = case.run(device, "four rows")?;
    let (query, result) = (case.queries.len() / 4, case.heads * case.value);
    for row in 0..4 {
        let alone = Case {
            queries: case.queries[row * query..][..query].to_vec(),
            rows: vec![case.rows[row].clone()],
            kv_b: case.kv_b.clone(),
            keys: case.keys.clone(),
            ..case
        };
        let what = format!("row {row} alone");
        same(&what, &alone.run(device, &what)?, &all[row * result..][..result])?;
    }
    Ok(())
}

/// A list of all positions is no list; positions outside it are not read; of none, zeros come.
pub fn reads_what_is_listed(device: &mut dyn KernelDevice) -> Outcome {
    let mut case = Case::new([3, 5, 2, 7, 13], Format::F32, 20, 2, false);
    let all = case.run(device, "all positions")?;
    case.rows = [21, 22].map(|count| Attended::Listed((0..count).collect())).to_vec();
    same("lists of all positions", &case.run(device, "lists")?, &all)?;
    case.rows = vec![Attended::Listed(vec![3, 4, 17]), Attended::Listed(vec![])];
    let few = case.run(device, "short lists")?;
    let width = case.lora() + case.rope;
    for (position, key) in case.keys.chunks_mut(width).enumerate() {
        if ![3, 4, 17].contains(&position) {
            key.fill(f32::NAN);
        }
    }
    same("what is not listed", &case.run(device, "damaged keys")?, &few)?;
    match few[few.len() / 2..].iter().all(|v| *v == 0.0) {
        true => Ok(()),
        false => Err("a row without positions gives something".into()),
    }
}

/// Scores far apart, and a damaged key: the largest wins without overflow, a NaN shows in all heads of its rows.
pub fn stands_extremes(device: &mut dyn KernelDevice) -> Outcome {
    let mut case = Case::new([2, 4, 2, 3, 8], Format::F32, 30, 2, false);
    case.queries.iter_mut().for_each(|v| *v *= 3e4);
    let (wanted, _) = case.exact();
    // One weight is 1, the others 0, so the result is a value.
    let got = case.run(device, "large scores")?;
    near("large scores", &got, &wanted, |i| f64::from(wanted[i].abs()) * 1e-2 + 1e-3)?;
    let width = case.lora() + case.rope;
    case.rows = vec![Attended::Below(10), Attended::Below(20)];
    let sound = case.run(device, "sound keys")?;
    case.keys[15 * width] = f32::NAN;
    let got = case.run(device, "a damaged key")?;
    same("rows that do not read it", &got[..6], &sound[..6])?;
    match got[6..].iter().all(|v| v.is_nan()) {
        true => Ok(()),
        false => Err(format!("a damaged key does not show: {:?}", &got[6..])),
    }
}

/// Numbers whose scores are exact in any order, so that ties are ties on every device.
fn whole(numbers: &mut Numbers, count: usize, most: u32) -> Vec<f32> {
    (0..count).map(|_| numbers.below(2 * most + 1) as f32 - most as f32).collect()
}

fn selections_agree(
    device: &mut dyn KernelDevice,
    what: &str,
    indexer: &Indexer<'_>,
    queries: &[f32],
    weights: &[f32],
) -> Outcome {
    let run = |device: &mut dyn KernelDevice| {
        device.select(indexer, queries, weights).map_err(|error| format!("{what}: {error}"))
    };
    let (got, wanted) = (run(device)?, run(&mut Reference::new().unwrap())?);
    for (row, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
        if let Some(at) = (0..got.len().max(wanted.len())).find(|at| got.get(*at) != wanted.get(*at)) {
            let pair = (got.get(at), wanted.get(at));
            return Err(format!("{what}: choice {at} of row {row} is {:?}, wanted {:?}", pair.0, pair.1));
        }
    }
    if got.len() == wanted.len() { Ok(()) } else { Err(format!("{what}: {} rows", got.len())) }
}

/// Few values make many ties; one value makes nothing else.
pub fn selections_agree_with_the_reference(device: &mut dyn KernelDevice) -> Outcome {
    for (heads, dim, held, top_k) in
        [(1, 4, 1, 1), (4, 16, 40, 7), (16, 64, 257, 64), (4, 4, 1500, 300), (4, 16, 600, 600)]
    {
        for most in [0, 1, 3] {
            for rows in [1, 4] {
                let mut numbers = Numbers::new((held * rows) as u64 + u64::from(most));
                let queries = whole(&mut numbers, rows * heads * dim, most);
                let weights = whole(&mut numbers, rows * heads, 3);
                let keys = whole(&mut numbers, held * dim, most);
                // Later rows see more; the first may see fewer than it could choose.
                let counts: Vec<usize> = (0..rows).map(|row| held - (rows - 1 - row) * held / 3).collect();
                let indexer = Indexer { heads, dim, top_k, keys: &keys, counts: &counts };
                let what = format!("{top_k} of {held}, {rows} rows, values to {most}");
                selections_agree(device, &what, &indexer, &queries, &weights)?;
            }
        }
    }
    Ok(())
}

/// NaN counts as lowest, infinities as what they are, and neighbours differ.
pub fn selections_stand_extremes(device: &mut dyn KernelDevice) -> Outcome {
    let mut keys: Vec<f32> = (0..90u32).map(|i| f32::from_bits(1f32.to_bits() + i * 37 % 89)).collect();
    for (at, bad) in [(5, f32::NAN), (6, f32::INFINITY), (40, f32::NAN), (77, f32::INFINITY)] {
        keys[at] = bad;
    }
    for (top_k, weight) in [(1, 1.0), (2, 1.0), (30, 1.0), (30, -1.0), (86, 1.0), (88, 1.0), (89, -1.0)] {
        let indexer = Indexer { heads: 1, dim: 1, top_k, keys: &keys, counts: &[90] };
        selections_agree(device, &format!("{top_k}, weight {weight}"), &indexer, &[1.0], &[weight])?;
    }
    // ∞ − ∞ is NaN and counts as much as −∞, which a finite key gives where one product overflows.
    let mut keys = vec![0.5f32; 40];
    for at in 0..12 {
        keys[at * 3] = [f32::INFINITY, 3e38, 2e38][at % 3];
    }
    for top_k in 28..40 {
        let indexer = Indexer { heads: 2, dim: 1, top_k, keys: &keys, counts: &[40] };
        selections_agree(device, "∞ − ∞", &indexer, &[1.0, 1e10], &[1.0, -1.0])?;
    }
    Ok(())
}
