//! Experts of a layer that share tensors: where one of them lies, and how its matrices are made of it.

use metaltail_quant::{Format, GgufFormat, MatrixLayout};

use crate::error::Error;
use crate::header::Dtype;
use crate::hf::layout;
use crate::index::{Stored as Tensor, TensorIndex};
use crate::inventory::{ExpertLayerSpec, Part, StackedNames};
use crate::place::{ExpertPlace, Extent, RunOffset};
use crate::repack::{MX_CODES, MX_COLS, Repack, Stored};

/// How a checkpoint stores the experts of a layer that its family stacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Two tensors `[experts, inputs, outputs]` of plain numbers; the columns of the first alternate between gate and
    /// up.
    Transposed,
    /// Two tensors of MXFP4 codes, `[experts, outputs, inputs / 32, 16]`, and two of their scales, `[experts, outputs,
    /// inputs / 32]`; the outputs of the first alternate between gate and up.
    Mxfp4,
}

/// What follows the name of a matrix in the names of its codes and scales.
const MXFP4: [&str; 2] = ["_blocks", "_scales"];

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
        // One of them tells, so that the others are missed by name.
        let has = |name: &str, suffix: &str| index.find(&format!("{}{name}{suffix}", spec.prefix)).is_some();
        let blocks = MXFP4.iter().any(|suffix| has(names.gate_up, suffix) || has(names.down, suffix));
        let form = if blocks { Form::Mxfp4 } else { Form::Transposed };
        Some(Stack { spec, names, form })
    }

    /// Canonical names of all its tensors.
    pub fn tensors(&self) -> Vec<String> {
        let suffixes: &[&str] = match self.form {
            Form::Transposed => &[""],
            Form::Mxfp4 => &MXFP4,
        };
        let of = |name| suffixes.iter().map(move |suffix| format!("{}{name}{suffix}", self.spec.prefix));
        [self.names.gate_up, self.names.down].into_iter().flat_map(of).collect()
    }

    /// One expert: what to read of each tensor, and what becomes of it.
    pub fn expert(&self, index: &TensorIndex, expert: u32) -> Result<ExpertPlace, Error> {
        match self.form {
            Form::Transposed => self.transposed(index, expert),
            Form::Mxfp4 => self.mxfp4(index, expert),
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

    fn mxfp4(&self, index: &TensorIndex, expert: u32) -> Result<ExpertPlace, Error> {
        let ExpertLayerSpec { hidden, width, .. } = *self.spec;
        let names = self.tensors();
        // Whole blocks, as the layouts see to.
        let layouts = self.layouts([Format::Gguf(GgufFormat::Mxfp4); 3])?;
        let (inputs, inner) = (hidden / MX_COLS, width / MX_COLS);
        let both = self.twice_width(&names[0])?;
        let shapes: [&[usize]; 4] =
            [&[both, inputs, MX_CODES], &[both, inputs], &[hidden, inner, MX_CODES], &[hidden, inner]];
        let mut runs = Vec::with_capacity(names.len());
        for (name, shape) in names.iter().zip(shapes) {
            let (name, tensor) = index.require(name)?;
            index.check_dtype(name, tensor, Dtype::U8)?;
            runs.push(self.slice(index, (name, tensor), shape, expert)?);
        }
        let at = |run| RunOffset { run, offset: 0 };
        let half = |first| Stored::Mxfp4 { codes: at(0), scales: at(1), first, step: 2 };
        let whole = Stored::Mxfp4 { codes: at(2), scales: at(3), first: 0, step: 1 };
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
