//! The tensors of a GGUF model as matrices: by canonical name, an expert as slices of stacked tensors.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use metaltail_quant::{Format, GgufFormat, MatrixLayout};

use super::names::{Candidates, candidates};
use super::set::Gguf;
use super::types::TensorType;
use crate::error::Error;
use crate::inventory::{Inventory, Part as Matrix};
use crate::place::{Extent, MatrixPlace};

/// A stored tensor.
#[derive(Debug)]
struct Stored {
    file: u32,
    kind: TensorType,
    /// The fastest first.
    dims: Box<[u64]>,
    /// Within its file and without overlap, as the parser has seen.
    extent: Extent,
}

/// Tensors by their stored names.
#[derive(Debug)]
pub(crate) struct GgufTensors {
    gguf: Gguf,
    by_name: HashMap<String, Stored>,
}

/// Which rows of a stored tensor a matrix is.
struct Part<'a> {
    name: &'a str,
    stored: &'a Stored,
    /// `(number, of how many)`: equal parts along the rows, counted over all further dimensions.
    share: (u64, u64),
    /// Dimensions of the part, the fastest first, for messages.
    dims: &'a [u64],
}

impl GgufTensors {
    pub(crate) fn new(gguf: Gguf) -> GgufTensors {
        let by_name = gguf
            .tensors()
            .map(|(part, tensor)| {
                let file = part as u32;
                let extent = Extent { file, offset: tensor.offset, len: tensor.len };
                (tensor.name.clone(), Stored { file, kind: tensor.kind, dims: tensor.dims.clone(), extent })
            })
            .collect();
        GgufTensors { gguf, by_name }
    }

    /// The headers that they come from.
    pub(crate) fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    /// Number of stored tensors.
    pub(crate) fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Their stored names, in no order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// The stored name of a canonical one, where it is there.
    pub(crate) fn stored_name(&self, canonical: &str) -> Option<&str> {
        self.part(&candidates(canonical)?).map(|part| part.name)
    }

    /// A matrix of `rows × cols`.
    ///
    /// # Errors
    /// An absent tensor, another shape, and a type that is not computed.
    pub(crate) fn locate(&self, canonical: &str, (rows, cols): (usize, usize)) -> Result<MatrixPlace, Error> {
        let found = candidates(canonical);
        let Some(part) = found.as_ref().and_then(|found| self.part(found)) else {
            let names = found.map(|found| found.named());
            let tensor = names.filter(|names| !names.is_empty()).unwrap_or_else(|| canonical.to_owned());
            return Err(Error::MissingTensor { dir: self.path(0), tensor });
        };
        let Part { name, stored, share: (number, of), dims } = part;
        // What a matrix is cut along counts all dimensions but the first.
        let stored_rows = dims.iter().skip(1).try_fold(1u64, |all, dim| all.checked_mul(*dim));
        let fits =
            dims.first() == Some(&(cols as u64)) && stored_rows == (rows as u64).checked_mul(joined(&part));
        if !fits {
            let (file, tensor) = (self.path(stored.file), name.to_owned());
            let wanted = if rows == 1 { vec![cols as u64] } else { vec![cols as u64, rows as u64] };
            return Err(Error::Shape { file, tensor, wanted, got: dims.to_vec() });
        }
        let format = format_of(stored.kind).ok_or_else(|| Error::GgufType {
            file: self.path(stored.file),
            tensor: name.to_owned(),
            kind: stored.kind.name(),
        })?;
        let layout = MatrixLayout::new(format, rows, cols)
            .map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
        let len = layout.weight_bytes() as u64;
        // Equal parts of a tensor that lies in its file, so that nothing overflows.
        if len.checked_mul(of) != Some(stored.extent.len) {
            let (file, tensor) = (self.path(stored.file), name.to_owned());
            return Err(Error::Shape {
                file,
                tensor,
                wanted: vec![cols as u64, rows as u64],
                got: dims.to_vec(),
            });
        }
        let weights = Extent { offset: stored.extent.offset + len * number, len, ..stored.extent };
        Ok(MatrixPlace { layout, weights, scales: None })
    }

    /// Refuses tensors that belong to the computation and that the inventory does not know: with them left out
    /// the numbers would be others. Those of draft layers that are not used are given back.
    ///
    /// # Errors
    /// [`Error::GgufUnused`] with their names.
    pub(crate) fn refuse_unused(&self, inventory: &Inventory) -> Result<Vec<String>, Error> {
        let mut used: HashSet<&str> = HashSet::new();
        used.extend(inventory.tensors.iter().filter_map(|spec| self.stored_name(&spec.name)));
        for layer in &inventory.experts {
            let experts = (0..layer.count).flat_map(|e| Matrix::ALL.map(|matrix| layer.name(e, matrix)));
            used.extend(experts.filter_map(|name| self.stored_name(&name)));
        }
        let mut unused: Vec<&str> = self.names().filter(|name| !used.contains(name)).collect();
        unused.sort_unstable();
        let drafts: HashSet<&str> =
            self.names().filter(|name| name.contains(".nextn.")).filter_map(block_of).collect();
        let draft = |name: &&str| block_of(name).is_some_and(|block| drafts.contains(block));
        let (drafts, others): (Vec<&str>, Vec<&str>) = unused.into_iter().partition(draft);
        // Frequencies of rotation that follow from the metadata.
        let others: Vec<String> = others
            .into_iter()
            .filter(|name| !name.ends_with(".attn_rot_embd.weight"))
            .map(str::to_owned)
            .collect();
        match others.is_empty() {
            true => Ok(drafts.into_iter().map(str::to_owned).collect()),
            false => Err(Error::GgufUnused { file: self.path(0), names: others }),
        }
    }

    /// The first of the candidates that is stored.
    fn part(&self, found: &Candidates) -> Option<Part<'_>> {
        let get = |name: &str| self.by_name.get_key_value(name);
        let stacked = found.slice.as_ref().is_some_and(|slice| self.by_name.contains_key(&slice.stacked));
        if let Some((name, stored)) = found.whole.iter().find_map(|name| get(name)).filter(|_| !stacked) {
            return Some(Part { name, stored, share: (0, 1), dims: &stored.dims });
        }
        let slice = found.slice.as_ref()?;
        let expert = u64::from(slice.expert);
        let within = |stored: &Stored| stored.dims.last().copied().filter(|experts| expert < *experts);
        if let Some((name, stored)) = get(&slice.stacked) {
            let experts = within(stored)?;
            let dims = &stored.dims[..stored.dims.len() - 1];
            return Some(Part { name, stored, share: (expert, experts), dims });
        }
        let (joined, second) = slice.joined.as_ref()?;
        let (name, stored) = get(joined)?;
        let experts = within(stored)?;
        let share = (expert.checked_mul(2)? + u64::from(*second), experts.checked_mul(2)?);
        Some(Part { name, stored, share, dims: &stored.dims[..stored.dims.len() - 1] })
    }

    fn path(&self, file: u32) -> PathBuf {
        self.gguf.parts().get(file as usize).map(|part| part.path.clone()).unwrap_or_default()
    }
}

impl Candidates {
    /// The names under which it was looked for.
    fn named(&self) -> String {
        let stacked = self.slice.iter().map(|slice| &slice.stacked);
        let names: Vec<&str> = match self.slice {
            Some(_) => stacked.map(String::as_str).collect(),
            None => self.whole.iter().map(String::as_str).collect(),
        };
        names.join(" or ")
    }
}

/// Matrices that lie one over the other in one expert's slice: two where gate and up are stored as one.
fn joined(part: &Part<'_>) -> u64 {
    let experts = part.stored.dims.last().copied().unwrap_or(1);
    if part.share.1 == 1 || part.share.1 == experts { 1 } else { 2 }
}

/// `blk.N` of a tensor's name.
fn block_of(name: &str) -> Option<&str> {
    let end = name.strip_prefix("blk.")?.find('.')?;
    Some(&name["blk.".len()..][..end])
}

/// The format of a type that is computed.
pub(super) fn format_of(kind: TensorType) -> Option<Format> {
    match kind.name() {
        "F32" => Some(Format::F32),
        "F16" => Some(Format::F16),
        "BF16" => Some(Format::Bf16),
        name => GgufFormat::ALL.into_iter().find(|format| format.name() == name).map(Format::Gguf),
    }
}
