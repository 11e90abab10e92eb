//! Operations as data: what they compute, what they read and write, and whether that fits.

use super::{Buffer, HeldMatrix};
use crate::experts::ComputeError;

/// Numbers of a buffer from one on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The buffer.
    pub buffer: Buffer,
    /// Its first number, counted in numbers.
    pub at: usize,
}

/// Rows of a buffer: row i begins `i · stride` numbers behind the view's first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Where row 0 begins.
    pub view: View,
    /// From the beginning of a row to that of the next, in numbers.
    pub stride: usize,
}

/// In which order a product adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// That of a product with one input: decoding.
    Decode,
    /// That of tiles of many inputs: prefill. A device may have one order for both.
    Prefill,
}

/// Lists of positions, one a row, as [`Op::Select`] writes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lists {
    /// Positions, `top_k` a row; of a row with fewer the rest is not read.
    pub chosen: View,
    /// Places of a row.
    pub top_k: usize,
}

/// A rotation of heads that lie one after another, row by row, in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rope {
    /// Rows × heads × head numbers.
    pub x: View,
    /// Rows.
    pub rows: usize,
    /// Heads of a row.
    pub heads: usize,
    /// Numbers of a head.
    pub head: usize,
    /// Where in a head the rotated part begins.
    pub offset: usize,
    /// Width of the rotated part, even.
    pub dim: usize,
    /// Whether a pair lies side by side (2j, 2j + 1) and not in two halves. Results are written as halves.
    pub interleaved: bool,
    /// Cosine of every pair, `dim / 2` a row.
    pub cosines: View,
    /// Sine of every pair.
    pub sines: View,
}

/// The choice of experts; the rules are those of `model`'s router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Route {
    /// Rows × experts.
    pub logits: View,
    /// Rows.
    pub rows: usize,
    /// Experts of the layer.
    pub experts: usize,
    /// Experts of a row, at most `experts`.
    pub top_k: usize,
    /// Softmax over all experts, or else the sigmoid of each logit.
    pub softmax: bool,
    /// Added to the score for the choice, not for the weight; one an expert.
    pub bias: Option<View>,
    /// `(groups, groups kept)`: only experts of the groups with the greatest sums of two are chosen.
    pub groups: Option<(usize, usize)>,
    /// Whether the weights of a row are divided by their sum.
    pub normalise: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// Ids, `top_k` a row, ascending; `u32::MAX` where fewer were allowed.
    pub ids: View,
    /// The weight of each.
    pub weights: View,
    /// One a row: 1 where a logit was not finite, else 0.
    pub broken: View,
}

/// The choice of positions (DSA): `score(t) = Σ_h weight_h · max(query_h · key_t / √dim, 0) / √heads`; of every row the
/// `top_k` of highest score, ascending, of equal ones the lowest.
#[derive(Clone, Debug, PartialEq)]
pub struct Select {
    /// Heads.
    pub heads: usize,
    /// Numbers of a query and of a key.
    pub dim: usize,
    /// Positions to choose.
    pub top_k: usize,
    /// Rows × heads × dim, rotated.
    pub queries: View,
    /// Rows × heads.
    pub weights: View,
    /// A key of each position.
    pub keys: View,
    /// Of each row how many positions there are for it, counted from the first.
    pub counts: Vec<u32>,
    /// `top_k` a row.
    pub chosen: View,
}

/// Latent attention in the absorbed form: keys and values are never built.
#[derive(Clone, Debug, PartialEq)]
pub struct Attend {
    /// Query heads.
    pub heads: usize,
    /// Numbers of a query that meet the latent.
    pub nope: usize,
    /// Numbers of a query that meet the rotated key.
    pub rope: usize,
    /// Numbers of a head's value.
    pub value: usize,
    /// Of each head the `nope` rows that make keys of latents, then the `value` rows that make values.
    pub kv_b: HeldMatrix,
    /// Factor on the scores.
    pub scale: f32,
    /// Rows × heads × (nope + rope), rotated.
    pub queries: View,
    /// What the cache holds of each position: the latent, then the rotated key.
    pub keys: View,
    /// Of each row how many positions it attends to, above 0: the first ones, or those of its list.
    pub counts: Vec<u32>,
    /// Lists of positions; a row whose count is below `positions` attends to them.
    pub lists: Option<Lists>,
    /// Positions that the cache holds and lists may name.
    pub positions: usize,
    /// Rows × heads × value.
    pub out: View,
}

/// Adds a layer's experts to the residual stream: `x[r] += (Σ_k weights[r][k] · products[r · top_k + k]) + shared[r]`,
/// k ascending, the sum begun at zero.
#[derive(Clone, Debug, PartialEq)]
pub struct Combine {
    /// Rows × top_k × width. Of a weight of zero the product is not read.
    pub products: View,
    /// Rows × top_k. Zero leaves an expert out.
    pub weights: Vec<f32>,
    /// Experts of a row.
    pub top_k: usize,
    /// Rows × width.
    pub shared: Option<View>,
    /// Rows × width.
    pub x: View,
    /// Width of a row.
    pub width: usize,
}

/// An operation. Memory that it writes is not read by it too, but for `Add`, `Rope` and `Combine`, which change
/// numbers in place.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `out[i · rows + r] = Σ_c m[r][c] · x[i · cols + c]`.
    Product {
        /// The matrix.
        matrix: HeldMatrix,
        /// Inputs × columns.
        x: View,
        /// Inputs.
        inputs: usize,
        /// Inputs × rows.
        out: View,
        /// The order of the sums.
        order: Order,
    },
    /// `to[i] += from[i]`.
    Add {
        /// What is added.
        from: View,
        /// To what.
        to: View,
        /// Numbers.
        count: usize,
    },
    /// Copies rows.
    Copy {
        /// From here.
        from: Rows,
        /// To there.
        to: Rows,
        /// Rows.
        rows: usize,
        /// Numbers of a row.
        width: usize,
    },
    /// `to = from / √(mean(from²) + eps) · weight` of every row.
    RmsNorm {
        /// Rows.
        from: Rows,
        /// Results.
        to: Rows,
        /// How many.
        rows: usize,
        /// Numbers of a row, and weights.
        width: usize,
        /// The weights.
        weight: View,
        /// Added to the mean.
        eps: f32,
    },
    /// `to = (from − mean) / √(variance + eps) · weight + bias` of every row, variance over the width.
    LayerNorm {
        /// Rows.
        from: Rows,
        /// Results.
        to: Rows,
        /// How many.
        rows: usize,
        /// Numbers of a row, weights and biases.
        width: usize,
        /// The weights.
        weight: View,
        /// The biases.
        bias: View,
        /// Added to the variance.
        eps: f32,
    },
    /// A rotation.
    Rope(Rope),
    /// `out[i] = silu(gate[i]) · up[i]`.
    SwiGlu {
        /// Gates.
        gate: View,
        /// Factors.
        up: View,
        /// Results.
        out: View,
        /// Numbers.
        count: usize,
    },
    /// The choice of experts.
    Route(Route),
    /// The choice of positions.
    Select(Select),
    /// Latent attention.
    Attend(Attend),
    /// Experts into the residual stream.
    Combine(Combine),
}

/// Numbers of a buffer that an operation touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The buffer.
    pub buffer: Buffer,
    /// The first.
    pub start: usize,
    /// Behind the last.
    pub end: usize,
}

/// Everything that an operation touches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// What it reads.
    pub reads: Vec<Extent>,
    /// What it writes.
    pub writes: Vec<Extent>,
    /// What it changes in place.
    pub changes: Vec<Extent>,
}

fn misfit(what: impl Into<String>) -> ComputeError {
    ComputeError::Operation { what: what.into() }
}

fn product<const N: usize>(factors: [usize; N]) -> Result<usize, ComputeError> {
    let all = factors.iter().try_fold(1usize, |product, factor| product.checked_mul(*factor));
    all.ok_or_else(|| misfit(format!("{factors:?} numbers are more than an address space has")))
}

impl View {
    /// `numbers` from here on.
    ///
    /// # Errors
    /// More than an address space has.
    pub fn extent(self, numbers: usize) -> Result<Extent, ComputeError> {
        let end = self.at.checked_add(numbers).ok_or_else(|| misfit("a view behind all memory"))?;
        Ok(Extent { buffer: self.buffer, start: self.at, end })
    }

    /// The view `numbers` further on.
    pub fn plus(self, numbers: usize) -> View {
        View { buffer: self.buffer, at: self.at.saturating_add(numbers) }
    }
}

impl Buffer {
    /// The whole buffer.
    pub fn view(self) -> View {
        View { buffer: self, at: 0 }
    }

    /// Rows that lie one after another from the first number on.
    pub fn rows(self, width: usize) -> Rows {
        Rows { view: self.view(), stride: width }
    }
}

impl Rows {
    /// From the first number of the first row to behind the last of the last.
    ///
    /// # Errors
    /// Rows that overlap, or more than an address space has.
    pub fn extent(self, rows: usize, width: usize) -> Result<Extent, ComputeError> {
        if rows > 1 && width > self.stride {
            return Err(misfit(format!("rows of {width} that begin every {} numbers", self.stride)));
        }
        let before = product([rows.saturating_sub(1), self.stride])?;
        let numbers = if rows == 0 { Some(0) } else { before.checked_add(width) };
        self.view.extent(numbers.ok_or_else(|| misfit("rows behind all memory"))?)
    }
}

impl Extent {
    /// Whether both touch a number.
    pub fn overlaps(self, other: Extent) -> bool {
        self.buffer == other.buffer && self.start < other.end && other.start < self.end
    }
}

impl Footprint {
    /// Whether an operation that touches `other` must wait for one that touches this.
    pub fn conflicts(&self, other: &Footprint) -> bool {
        let written =
            |one: &Footprint, two: &Footprint| one.written().any(|a| two.touched().any(|b| a.overlaps(*b)));
        written(self, other) || written(other, self)
    }

    /// What is not as it was afterwards.
    pub fn written(&self) -> impl Iterator<Item = &Extent> {
        self.writes.iter().chain(&self.changes)
    }

    /// All of it.
    pub fn touched(&self) -> impl Iterator<Item = &Extent> {
        self.reads.iter().chain(self.written())
    }
}

impl Op {
    /// Name for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Product { .. } => "a product",
            Op::Add { .. } => "a sum",
            Op::Copy { .. } => "a copy",
            Op::RmsNorm { .. } => "an RMS norm",
            Op::LayerNorm { .. } => "a layer norm",
            Op::Rope(_) => "a rotation",
            Op::SwiGlu { .. } => "a gate",
            Op::Route(_) => "a choice of experts",
            Op::Select(_) => "a choice of positions",
            Op::Attend(_) => "an attention",
            Op::Combine(_) => "a sum of experts",
        }
    }

    /// What it touches.
    ///
    /// # Errors
    /// Sizes that contradict each other, or that no memory has.
    pub fn footprint(&self) -> Result<Footprint, ComputeError> {
        match *self {
            Op::Product { matrix, x, inputs, out, .. } => Ok(Footprint {
                reads: vec![x.extent(product([inputs, matrix.layout.cols()])?)?],
                writes: vec![out.extent(product([inputs, matrix.layout.rows()])?)?],
                ..Footprint::default()
            }),
            Op::Add { from, to, count } => {
                let reads = vec![from.extent(count)?];
                Ok(Footprint { reads, changes: vec![to.extent(count)?], ..Footprint::default() })
            }
            Op::Copy { from, to, rows, width } => Ok(Footprint {
                reads: vec![from.extent(rows, width)?],
                writes: vec![to.extent(rows, width)?],
                ..Footprint::default()
            }),
            Op::RmsNorm { from, to, rows, width, weight, .. } => Ok(Footprint {
                reads: vec![from.extent(rows, width)?, weight.extent(width)?],
                writes: vec![to.extent(rows, width)?],
                ..Footprint::default()
            }),
            Op::LayerNorm { from, to, rows, width, weight, bias, .. } => Ok(Footprint {
                reads: vec![from.extent(rows, width)?, weight.extent(width)?, bias.extent(width)?],
                writes: vec![to.extent(rows, width)?],
                ..Footprint::default()
            }),
            Op::Rope(ref rope) => rope.footprint(),
            Op::SwiGlu { gate, up, out, count } => Ok(Footprint {
                reads: vec![gate.extent(count)?, up.extent(count)?],
                writes: vec![out.extent(count)?],
                ..Footprint::default()
            }),
            Op::Route(ref route) => route.footprint(),
            Op::Select(ref select) => select.footprint(),
            Op::Attend(ref attend) => attend.footprint(),
            Op::Combine(ref combine) => combine.footprint(),
        }
    }

    /// Its footprint, where that lies in memory: `numbers` gives the size of a buffer.
    ///
    /// # Errors
    /// Memory that there is not, or that is smaller; numbers that are read and written by one operation, unless in
    /// place.
    pub fn check(&self, numbers: impl Fn(Buffer) -> Option<usize>) -> Result<Footprint, ComputeError> {
        let footprint = self.footprint()?;
        footprint.within(numbers)?;
        for write in footprint.written() {
            if let Some(read) = footprint.reads.iter().find(|read| read.overlaps(*write)) {
                return Err(misfit(format!("{} reads {read:?} and writes {write:?}", self.name())));
            }
        }
        Ok(footprint)
    }
}

impl Footprint {
    /// Whether all of it lies in memory: `numbers` gives the size of a buffer.
    ///
    /// # Errors
    /// The first that does not.
    pub fn within(&self, numbers: impl Fn(Buffer) -> Option<usize>) -> Result<(), ComputeError> {
        for extent in self.touched() {
            match numbers(extent.buffer) {
                Some(size) if extent.end <= size => {}
                Some(size) => return Err(misfit(format!("{extent:?} of a buffer of {size} numbers"))),
                None => return Err(misfit(format!("{:?}, which there is not", extent.buffer))),
            }
        }
        Ok(())
    }
}

impl Rope {
    fn footprint(&self) -> Result<Footprint, ComputeError> {
        let reaches = self.offset.checked_add(self.dim).is_some_and(|end| end <= self.head);
        if !self.dim.is_multiple_of(2) || !reaches {
            return Err(misfit(format!(
                "a rotation of {} numbers from {} on in a head of {}",
                self.dim, self.offset, self.head
            )));
        }
        let x = self.x.extent(product([self.rows, self.heads, self.head])?)?;
        let angles = product([self.rows, self.dim / 2])?;
        let reads = vec![self.cosines.extent(angles)?, self.sines.extent(angles)?];
        Ok(Footprint { reads, changes: vec![x], ..Footprint::default() })
    }
}

impl Route {
    fn footprint(&self) -> Result<Footprint, ComputeError> {
        let (groups, kept) = self.groups.unwrap_or((1, 1));
        if self.top_k > self.experts || groups == 0 || kept > groups || !self.experts.is_multiple_of(groups) {
            return Err(misfit(format!(
                "{} of {} experts, from {kept} of {groups} groups",
                self.top_k, self.experts
            )));
        }
        let mut reads = vec![self.logits.extent(product([self.rows, self.experts])?)?];
        if let Some(bias) = self.bias {
            reads.push(bias.extent(self.experts)?);
        }
        let chosen = product([self.rows, self.top_k])?;
        let writes =
            vec![self.ids.extent(chosen)?, self.weights.extent(chosen)?, self.broken.extent(self.rows)?];
        Ok(Footprint { reads, writes, ..Footprint::default() })
    }
}

fn most(counts: &[u32]) -> usize {
    counts.iter().copied().max().unwrap_or(0) as usize
}

impl Select {
    /// The most positions that a row chooses from.
    pub fn span(&self) -> usize {
        most(&self.counts)
    }

    fn footprint(&self) -> Result<Footprint, ComputeError> {
        if self.heads == 0 || self.dim == 0 || self.top_k == 0 {
            return Err(misfit("a choice of positions without heads, numbers or places"));
        }
        let rows = self.counts.len();
        Ok(Footprint {
            reads: vec![
                self.queries.extent(product([rows, self.heads, self.dim])?)?,
                self.weights.extent(product([rows, self.heads])?)?,
                self.keys.extent(product([self.span(), self.dim])?)?,
            ],
            writes: vec![self.chosen.extent(product([rows, self.top_k])?)?],
            ..Footprint::default()
        })
    }
}

impl Attend {
    /// Numbers of a latent.
    pub fn lora(&self) -> usize {
        self.kv_b.layout.cols()
    }

    /// The most positions of a row.
    pub fn span(&self) -> usize {
        most(&self.counts)
    }

    fn footprint(&self) -> Result<Footprint, ComputeError> {
        let Attend { heads, nope, rope, value, .. } = *self;
        if heads == 0 || nope == 0 || value == 0 || self.counts.contains(&0) {
            return Err(misfit("an attention without heads, numbers or positions"));
        }
        let too_large = || misfit("an attention larger than an address space");
        let head = nope.checked_add(value).ok_or_else(too_large)?;
        if product([heads, head])? != self.kv_b.layout.rows() || self.span() > self.positions {
            return Err(misfit(format!(
                "an attention of {heads} heads × {head} to {} of {} positions with {} rows of keys and values",
                self.span(),
                self.positions,
                self.kv_b.layout.rows()
            )));
        }
        let rows = self.counts.len();
        let width = self.lora().checked_add(rope).ok_or_else(too_large)?;
        let query = nope.checked_add(rope).ok_or_else(too_large)?;
        let mut reads = vec![
            self.queries.extent(product([rows, heads, query])?)?,
            self.keys.extent(product([self.positions, width])?)?,
        ];
        if let Some(lists) = self.lists {
            reads.push(lists.chosen.extent(product([rows, lists.top_k])?)?);
        }
        let writes = vec![self.out.extent(product([rows, heads, value])?)?];
        Ok(Footprint { reads, writes, ..Footprint::default() })
    }
}

impl Combine {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.weights.len().checked_div(self.top_k).unwrap_or(0)
    }

    fn footprint(&self) -> Result<Footprint, ComputeError> {
        if self.top_k == 0 || !self.weights.len().is_multiple_of(self.top_k) {
            return Err(misfit(format!("{} weights of {} experts a row", self.weights.len(), self.top_k)));
        }
        let x = self.x.extent(product([self.rows(), self.width])?)?;
        let mut reads = vec![self.products.extent(product([self.weights.len(), self.width])?)?];
        if let Some(shared) = self.shared {
            reads.push(shared.extent(product([self.rows(), self.width])?)?);
        }
        Ok(Footprint { reads, changes: vec![x], ..Footprint::default() })
    }
}

#[cfg(test)]
mod tests;
