//! Experts of a layer that share tensors: where one of them lies, and how its matrices are made of it.

use metaltail_quant::{Format, MatrixLayout};

use crate::error::Error;
use crate::header::Dtype;
use crate::hf::layout;
use crate::index::{Stored as Tensor, TensorIndex};
use crate::inventory::{ExpertLayerSpec, Part, StackedNames};
use crate::place::{ExpertPlace, Extent, RunOffset};
use crate::repack::{Repack, Stored};

/// How a checkpoint stores the experts of a layer that its family stacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Two tensors `[experts, inputs, outputs]`; the columns of the first alternate between gate and up.
    Transposed,
}

/// The stacked tensors of a layer, where the directory has those rather than a tensor a matrix.
#[derive(Clone, Copy)]
pub(crate) struct Stack<'a> {
    spec: &'a ExpertLayerSpec,
    names: StackedNames,
    form: Form,
}

impl<'a> Stack<'a> {
    /// Finds out how a layer's experts are stored; `None` where each matrix has a tensor of its own.
    pub fn of(index: &TensorIndex, spec: &'a ExpertLayerSpec) -> Option<Stack<'a>> {
        let names = spec.stacked?;
        if index.find(&spec.name(0, Part::Gate)).is_some() {
            return None;
        }
        Some(Stack { spec, names, form: Form::Transposed })
    }

    /// Canonical names of all its tensors.
    pub fn tensors(&self) -> Vec<String> {
        let StackedNames { gate_up, down } = self.names;
        [gate_up, down].map(|name| format!("{}{name}", self.spec.prefix)).to_vec()
    }

    /// One expert: what to read of each tensor, and what becomes of it.
    pub fn expert(&self, index: &TensorIndex, expert: u32) -> Result<ExpertPlace, Error> {
        match self.form {
            Form::Transposed => self.transposed(index, expert),
        }
    }

    fn transposed(&self, index: &TensorIndex, expert: u32) -> Result<ExpertPlace, Error> {
        let ExpertLayerSpec { hidden, width, .. } = *self.spec;
        let names = self.tensors();
        let (gate_up, down) = (index.require(&names[0])?, index.require(&names[1])?);
        let both = self.twice_width(&names[0])?;
        let runs = vec![
            self.slice(index, gate_up, &[hidden, both], expert)?,
            self.slice(index, down, &[width, hidden], expert)?,
        ];
        let (pair, single) = (element(index, gate_up)?, element(index, down)?);
        let layouts = self.layouts([pair, pair, single])?;
        let at = |run| RunOffset { run, offset: 0 };
        let half = |first| Stored::Transposed { at: at(0), pitch: both, first, step: 2 };
        let whole = Stored::Transposed { at: at(1), pitch: hidden, first: 0, step: 1 };
        self.place(runs, layouts, [half(0), half(1), whole])
    }

    /// Outputs of gate and up together.
    fn twice_width(&self, tensor: &str) -> Result<usize, Error> {
        let (rows, cols) = (self.spec.width, self.spec.hidden);
        let too_large = || Error::Memory { tensor: tensor.to_owned(), rows, cols };
        rows.checked_mul(2).ok_or_else(too_large)
    }

    fn layouts(&self, formats: [Format; 3]) -> Result<[MatrixLayout; 3], Error> {
        let of = |part: Part| {
            let (rows, cols) = self.spec.shape(part);
            layout(&self.spec.name(0, part), formats[part as usize], rows, cols)
        };
        Ok([of(Part::Gate)?, of(Part::Up)?, of(Part::Down)?])
    }

    fn place(
        &self,
        runs: Vec<Extent>,
        layouts: [MatrixLayout; 3],
        stored: [Stored; 3],
    ) -> Result<ExpertPlace, Error> {
        let refuse = |source| Error::Repack { tensor: self.tensors().join(", "), source };
        let repack = Repack::new(layouts, stored).map_err(refuse)?;
        let lens: Vec<u64> = runs.iter().map(|run| run.len).collect();
        repack.check(&lens).map_err(refuse)?;
        Ok(ExpertPlace { runs, parts: repack.parts(), checksum: None, repack: Some(Box::new(repack)) })
    }

    /// The bytes of one expert in a tensor whose shape is `[experts, dims…]`.
    fn slice(
        &self,
        index: &TensorIndex,
        (name, tensor): (&str, &Tensor),
        dims: &[usize],
        expert: u32,
    ) -> Result<Extent, Error> {
        let count = u64::from(self.spec.count);
        let wanted: Vec<u64> = [count].into_iter().chain(dims.iter().map(|&dim| dim as u64)).collect();
        if tensor.info.shape[..] != wanted[..] {
            let (file, tensor_name) = (index.path(tensor), name.to_owned());
            return Err(Error::Shape { file, tensor: tensor_name, wanted, got: tensor.info.shape.to_vec() });
        }
        let whole = tensor.extent();
        // The header was checked: the tensor's bytes are its dimensions times the element's width, in its file.
        let len = whole.len / count;
        Ok(Extent { file: whole.file, offset: whole.offset + len * u64::from(expert), len })
    }
}

/// Format of a tensor of plain numbers.
fn element(index: &TensorIndex, (name, tensor): (&str, &Tensor)) -> Result<Format, Error> {
    match tensor.info.dtype {
        Dtype::F32 => Ok(Format::F32),
        Dtype::F16 => Ok(Format::F16),
        Dtype::Bf16 => Ok(Format::Bf16),
        got => Err(Error::Dtype {
            file: index.path(tensor),
            tensor: name.to_owned(),
            wanted: "F32, F16 or BF16",
            got,
        }),
    }
}
