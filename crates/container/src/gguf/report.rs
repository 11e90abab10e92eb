//! What a GGUF model holds, for people and programs.

use std::collections::{BTreeMap, HashSet};

use serde::Serialize;

use super::parse::GgufTensor;
use super::roles::{self, Names, file_type, is_single_expert, is_stacked, layer_of, role_of};
use super::set::Gguf;
use super::types::Support;
use super::value::{Scalar, Value};
use crate::census::RoleCensus;

/// Longest text of a metadata value that a report repeats, in characters.
const SHOWN: usize = 200;
const TEMPLATE: &str = "tokenizer.chat_template";

/// What a GGUF model holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GgufReport {
    /// Always `gguf`.
    pub kind: &'static str,
    /// Version of the format.
    pub version: u32,
    /// `general.architecture`.
    pub architecture: Option<String>,
    /// `general.name`.
    pub name: Option<String>,
    /// `general.file_type`: the mix of types that whoever made the file says.
    pub file_type: Option<FileType>,
    /// Elements of all tensors.
    pub parameter_count: u64,
    /// Elements of the tensors of routed experts.
    pub routed_parameter_count: u64,
    /// What the metadata says of the model's shape.
    pub model: Hyperparameters,
    /// The tokenizer in the metadata.
    pub tokenizer: Option<TokenizerReport>,
    /// The chat templates in the metadata.
    pub chat_templates: Vec<TemplateReport>,
    /// Its files.
    pub files: Vec<GgufPartReport>,
    /// Offsets of tensors are multiples of this (first file).
    pub alignment: u64,
    /// Number of tensors.
    pub tensors: usize,
    /// Their bytes, padding apart.
    pub bytes: u64,
    /// Tensors and bytes by role.
    pub roles: BTreeMap<String, RoleCensus>,
    /// Tensors and bytes by element type.
    pub types: BTreeMap<String, TypeCensus>,
    /// Layers with stacked experts.
    pub layers: Vec<GgufExpertLayer>,
    /// All metadata; long texts and arrays are summed up.
    pub metadata: Vec<MetadataEntry>,
    /// What is odd.
    pub notices: Vec<String>,
}

/// A `general.file_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FileType {
    /// The number.
    pub number: u64,
    /// What it stands for, where that is known.
    pub name: Option<&'static str>,
}

/// Numbers of the metadata that every architecture has under the same names; `None` where absent or
/// no whole number (some architectures have one a layer).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Hyperparameters {
    /// `block_count`, draft layers included.
    pub layers: Option<u64>,
    /// `embedding_length`.
    pub hidden: Option<u64>,
    /// `vocab_size`, else the number of tokens.
    pub vocab: Option<u64>,
    /// `context_length`.
    pub max_context: Option<u64>,
    /// `attention.head_count`.
    pub heads: Option<u64>,
    /// `attention.head_count_kv`.
    pub kv_heads: Option<u64>,
    /// `expert_count`.
    pub experts: Option<u64>,
    /// `expert_used_count`.
    pub top_k: Option<u64>,
    /// `expert_shared_count`.
    pub shared_experts: Option<u64>,
    /// `expert_feed_forward_length`.
    pub expert_width: Option<u64>,
    /// `nextn_predict_layers`.
    pub draft_layers: Option<u64>,
}

/// The tokenizer in the metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenizerReport {
    /// `tokenizer.ggml.model`: `gpt2` for byte-level BPE, `llama` for SentencePiece, …
    pub model: String,
    /// `tokenizer.ggml.pre`: the pre-tokenizer.
    pub pre: Option<String>,
    /// Number of tokens.
    pub tokens: Option<usize>,
    /// Number of merges.
    pub merges: Option<usize>,
}

/// A chat template in the metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TemplateReport {
    /// Its name; `None` for the usual one.
    pub name: Option<String>,
    /// Its length in bytes.
    pub bytes: usize,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GgufPartReport {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Tensors in it.
    pub tensors: usize,
}

/// The tensors of one element type.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TypeCensus {
    /// Their number.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Their elements.
    pub parameter_count: u64,
    /// Bits of an element, scales included.
    pub bits_per_weight: f64,
    /// Whether it is computed.
    pub support: Support,
}

/// The stacked experts of one layer: tensors whose last dimension counts experts, so that each
/// holds one slice of every expert.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GgufExpertLayer {
    /// Layer index.
    pub layer: u32,
    /// Number of experts.
    pub experts: u64,
    /// Whether the layer only predicts drafts.
    pub draft: bool,
    /// Types of the slices, in the order of the file.
    pub formats: Vec<String>,
    /// Bytes of one expert: its slices together.
    pub expert_bytes: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Runs of bytes that one expert takes: slices that lie apart.
    pub runs: usize,
}

/// One key of the metadata.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MetadataEntry {
    /// The key.
    pub key: String,
    /// Kind of its value; of an array, `[kind of its items]`.
    pub kind: String,
    /// Items of an array; bytes of a string.
    pub length: Option<usize>,
    /// A number, bool or short text; null for anything longer and for numbers that are not finite.
    pub value: serde_json::Value,
}

impl Gguf {
    /// Says what is in it.
    pub fn report(&self) -> GgufReport {
        let mut notices = Vec::new();
        let model = self.hyperparameters();
        let layers = self.expert_layers(&model, &mut notices);
        let types = self.types();
        for (name, counted) in types.iter().filter(|(_, counted)| counted.support == Support::None) {
            notices.push(format!(
                "{} of type {name}: this program has no arithmetic for it",
                tensors_of(counted.tensors)
            ));
        }
        let single =
            self.tensors().filter(|(_, t)| layer_of(&t.name).is_some_and(|(_, r)| is_single_expert(r)));
        if single.count() > 0 {
            notices.push("experts are stored one tensor each, the form of old files".to_owned());
        }
        let first = &self.parts()[0].header;
        let all = || self.tensors().map(|(_, tensor)| tensor);
        GgufReport {
            kind: "gguf",
            version: first.version,
            architecture: self.text("general.architecture"),
            name: self.text("general.name"),
            file_type: self
                .get("general.file_type")
                .and_then(Value::as_u64)
                .map(|number| FileType { number, name: file_type(number) }),
            parameter_count: all().map(GgufTensor::elements).fold(0, u64::saturating_add),
            routed_parameter_count: all()
                .filter(|tensor| role_of(&tensor.name) == roles::ROUTED)
                .map(GgufTensor::elements)
                .fold(0, u64::saturating_add),
            model,
            tokenizer: self.tokenizer(),
            chat_templates: self.chat_templates(),
            files: self.files(),
            alignment: first.alignment,
            tensors: all().count(),
            // Tensors lie apart inside files, so that the sum is that of file lengths at most.
            bytes: all().map(|tensor| tensor.len).fold(0, u64::saturating_add),
            roles: self.roles(),
            types,
            layers,
            metadata: self.metadata(),
            notices,
        }
    }

    fn text(&self, key: &str) -> Option<String> {
        match self.get(key)? {
            Value::String(text) => Some(text.to_lossy()),
            _ => None,
        }
    }

    fn hyperparameters(&self) -> Hyperparameters {
        let Some(architecture) = self.text("general.architecture") else { return Hyperparameters::default() };
        let number = |key: &str| self.get(&format!("{architecture}.{key}")).and_then(Value::as_u64);
        Hyperparameters {
            layers: number("block_count"),
            hidden: number("embedding_length"),
            vocab: number("vocab_size").or_else(|| self.items("tokenizer.ggml.tokens").map(|n| n as u64)),
            max_context: number("context_length"),
            heads: number("attention.head_count"),
            kv_heads: number("attention.head_count_kv"),
            experts: number("expert_count"),
            top_k: number("expert_used_count"),
            shared_experts: number("expert_shared_count"),
            expert_width: number("expert_feed_forward_length"),
            draft_layers: number("nextn_predict_layers"),
        }
    }

    fn items(&self, key: &str) -> Option<usize> {
        Some(self.get(key)?.as_array()?.len())
    }

    fn tokenizer(&self) -> Option<TokenizerReport> {
        Some(TokenizerReport {
            model: self.text("tokenizer.ggml.model")?,
            pre: self.text("tokenizer.ggml.pre"),
            tokens: self.items("tokenizer.ggml.tokens"),
            merges: self.items("tokenizer.ggml.merges"),
        })
    }

    /// The usual template and the named ones, `tokenizer.chat_template.NAME`.
    fn chat_templates(&self) -> Vec<TemplateReport> {
        let keys = self.parts().iter().flat_map(|part| &part.header.metadata);
        let templates = keys.filter_map(|(key, value)| {
            let name = key.strip_prefix(TEMPLATE)?;
            let name = if name.is_empty() { None } else { Some(name.strip_prefix('.')?.to_owned()) };
            match value {
                Value::String(text) => Some(TemplateReport { name, bytes: text.0.len() }),
                _ => None,
            }
        });
        templates.collect()
    }

    fn files(&self) -> Vec<GgufPartReport> {
        let name = |path: &std::path::Path| {
            path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
        };
        let parts = self.parts().iter().map(|part| GgufPartReport {
            name: name(&part.path),
            bytes: part.len,
            tensors: part.header.tensors.len(),
        });
        parts.collect()
    }

    fn roles(&self) -> BTreeMap<String, RoleCensus> {
        let mut roles: BTreeMap<String, RoleCensus> = BTreeMap::new();
        for (_, tensor) in self.tensors() {
            let role = roles.entry(role_of(&tensor.name).to_owned()).or_default();
            role.tensors += 1;
            role.bytes = role.bytes.saturating_add(tensor.len);
            *role.formats.entry(tensor.kind.name().to_owned()).or_default() += 1;
        }
        roles
    }

    fn types(&self) -> BTreeMap<String, TypeCensus> {
        let mut types: BTreeMap<String, TypeCensus> = BTreeMap::new();
        for (_, tensor) in self.tensors() {
            let kind = tensor.kind;
            let counted = types.entry(kind.name().to_owned()).or_insert(TypeCensus {
                tensors: 0,
                bytes: 0,
                parameter_count: 0,
                bits_per_weight: kind.block_bytes() as f64 * 8.0 / kind.block_elements() as f64,
                support: kind.support(),
            });
            counted.tensors += 1;
            counted.bytes = counted.bytes.saturating_add(tensor.len);
            counted.parameter_count = counted.parameter_count.saturating_add(tensor.elements());
        }
        types
    }

    /// Layers with stacked experts; what does not fit together is a notice.
    fn expert_layers(&self, model: &Hyperparameters, notices: &mut Vec<String>) -> Vec<GgufExpertLayer> {
        let mut layers: BTreeMap<u32, Vec<(usize, &GgufTensor)>> = BTreeMap::new();
        for (part, tensor) in self.tensors() {
            if let Some((layer, rest)) = layer_of(&tensor.name)
                && is_stacked(rest)
            {
                layers.entry(layer).or_default().push((part, tensor));
            }
        }
        let begin = model.layers.unwrap_or(u64::MAX).saturating_sub(model.draft_layers.unwrap_or(0));
        let mut found = Vec::new();
        for (layer, tensors) in layers {
            match expert_layer(layer, u64::from(layer) >= begin, &tensors) {
                Ok(experts) => {
                    if let Some(wanted) = model.experts.filter(|wanted| *wanted != experts.experts) {
                        notices.push(format!(
                            "layer {layer} has {} experts, but expert_count is {wanted}",
                            experts.experts
                        ));
                    }
                    found.push(experts);
                }
                Err(notice) => notices.push(notice),
            }
        }
        found
    }

    /// Every key once: a further part repeats some, and the first part's value is the model's.
    fn metadata(&self) -> Vec<MetadataEntry> {
        let mut seen = HashSet::new();
        let all = self.parts().iter().flat_map(|part| &part.header.metadata);
        all.filter(|(key, _)| seen.insert(key)).map(|(key, value)| entry(key, value)).collect()
    }
}

/// The experts of one layer from its stacked tensors, each with the index of its part.
fn expert_layer(
    layer: u32,
    draft: bool,
    tensors: &[(usize, &GgufTensor)],
) -> Result<GgufExpertLayer, String> {
    // The matrices say how many experts there are; biases and scales follow.
    let experts = tensors.iter().find_map(|(_, tensor)| match *tensor.dims {
        [_, _, experts] => Some(experts),
        _ => None,
    });
    let odd = |tensor: &GgufTensor| {
        format!(
            "tensor {:?} has the shape {:?}, which does not hold one slice of each expert; layer {layer} is left out of the experts",
            tensor.name, tensor.dims
        )
    };
    let Some(experts) = experts else {
        return Err(tensors.first().map(|(_, tensor)| odd(tensor)).unwrap_or_default());
    };
    let (mut formats, mut slices) = (Names::default(), Vec::new());
    for (part, tensor) in tensors {
        let stacked = tensor.dims.last() == Some(&experts)
            && (tensor.dims.len() == 3 || !tensor.name.ends_with(".weight"));
        if !stacked || !tensor.len.is_multiple_of(experts) {
            return Err(odd(tensor));
        }
        formats.add(tensor.kind);
        slices.push((*part, tensor.offset, tensor.len / experts));
    }
    // The first expert's slices, joined where they touch. (With more than one expert, no two do.)
    slices.sort_unstable();
    let apart = |(a, b): &(&(usize, u64, u64), &(usize, u64, u64))| a.0 != b.0 || a.1 + a.2 != b.1;
    let runs = 1 + slices.iter().zip(slices.iter().skip(1)).filter(apart).count();
    let expert_bytes: u64 = slices.iter().map(|slice| slice.2).fold(0, u64::saturating_add);
    Ok(GgufExpertLayer {
        layer,
        experts,
        draft,
        formats: formats.into_vec(),
        expert_bytes,
        bytes: tensors.iter().map(|(_, tensor)| tensor.len).fold(0, u64::saturating_add),
        runs,
    })
}

fn tensors_of(n: usize) -> String {
    format!("{n} tensor{}", if n == 1 { "" } else { "s" })
}

fn entry(key: &str, value: &Value) -> MetadataEntry {
    let (kind, length, value) = match value {
        Value::Scalar(scalar) => (value.kind().to_string(), None, number(*scalar)),
        Value::String(text) => {
            let whole = text.to_lossy();
            let shown = (whole.chars().count() <= SHOWN).then_some(whole);
            (value.kind().to_string(), Some(text.0.len()), shown.into())
        }
        Value::Array(array) => (format!("[{}]", array.kind()), Some(array.len()), serde_json::Value::Null),
    };
    MetadataEntry { key: key.to_owned(), kind, length, value }
}

fn number(scalar: Scalar) -> serde_json::Value {
    match scalar {
        Scalar::Bool(value) => value.into(),
        Scalar::F32(value) => {
            // The fewest digits that read back as the same number.
            value.to_string().parse::<f64>().unwrap_or(f64::from(value)).into()
        }
        Scalar::F64(value) => value.into(),
        Scalar::I8(value) => value.into(),
        Scalar::I16(value) => value.into(),
        Scalar::I32(value) => value.into(),
        Scalar::I64(value) => value.into(),
        Scalar::U8(value) => value.into(),
        Scalar::U16(value) => value.into(),
        Scalar::U32(value) => value.into(),
        Scalar::U64(value) => value.into(),
    }
}
