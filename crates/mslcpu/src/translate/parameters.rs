//! The parameters of a kernel: where each value comes from.

use super::Complaints;
use super::tokens::{Token, join, split_commas};

pub(super) const SPACES: [&str; 4] = ["device", "constant", "threadgroup", "thread"];

/// The largest index of a buffer, from Metal's feature set tables.
const LAST_BUFFER: u32 = 30;

/// What the shim needs to call a kernel.
#[derive(Default)]
pub(super) struct Parameters {
    /// An initialiser of `msl::Bind` each.
    pub(super) binds: Vec<String>,
    /// Byte ranges of the attributes, which C++ does not know.
    pub(super) attributes: Vec<(usize, usize)>,
}

/// One parameter, taken apart.
struct Parameter<'a> {
    all: &'a [Token],
    /// What stands before the attribute.
    declaration: &'a [Token],
    /// Name and argument of the attribute.
    attribute: Option<(&'a str, &'a str)>,
    /// Byte range of the attribute.
    range: Option<(usize, usize)>,
}

impl<'a> Parameter<'a> {
    fn new(all: &'a [Token]) -> Parameter<'a> {
        let Some(open) = all.iter().position(|token| token.is("[[")) else {
            return Parameter { all, declaration: all, attribute: None, range: None };
        };
        let text = |k: usize| all.get(k).map_or("", |token| token.text.as_str());
        let close = (open..all.len()).find(|k| all[*k].is("]]")).unwrap_or(all.len() - 1);
        Parameter {
            all,
            declaration: &all[..open],
            attribute: Some((text(open + 1), if text(open + 2) == "(" { text(open + 3) } else { "" })),
            range: Some((all[open].at, all[close].end())),
        }
    }

    fn line(&self) -> usize {
        self.all.first().map_or(0, |token| token.line)
    }

    fn is_pointer(&self) -> bool {
        self.declaration.iter().any(|token| token.is("*") || token.is("&"))
    }

    fn space(&self) -> &'a str {
        let space = self.declaration.iter().find(|token| SPACES.contains(&token.text.as_str()));
        space.map_or("", |token| token.text.as_str())
    }

    /// The type of a parameter that is no pointer.
    fn type_name(&self) -> String {
        let words = &self.declaration[..self.declaration.len().saturating_sub(1)];
        join(words).replace("const ", "")
    }
}

/// Reads the tokens between a kernel's parentheses.
pub(super) fn read(tokens: &[Token], complaints: &mut Complaints<'_>) -> Parameters {
    let all: Vec<Parameter<'_>> =
        split_commas(tokens).into_iter().filter(|part| !part.is_empty()).map(Parameter::new).collect();
    let mut used: Vec<(&str, String)> = Vec::new();
    for parameter in &all {
        if let Some((name @ ("buffer" | "threadgroup"), index)) = parameter.attribute {
            if used.iter().any(|(n, i)| *n == name && i == index) {
                complaints.add(parameter.line(), format!("{name}({index}) is used twice"));
            }
            used.push((name, index.to_owned()));
        }
    }
    let mut read = Parameters::default();
    for parameter in &all {
        read.attributes.extend(parameter.range);
        let (name, index) = match parameter.attribute {
            Some((name, index)) => (name, index.to_owned()),
            None => free_index(parameter, &mut used),
        };
        match bind(parameter, name, &index) {
            Ok(bind) => read.binds.push(bind),
            Err(text) => complaints.add(parameter.line(), text),
        }
    }
    read
}

/// Without an attribute a pointer gets the first index that is free.
fn free_index<'a>(parameter: &Parameter<'_>, used: &mut Vec<(&'a str, String)>) -> (&'a str, String) {
    let name = match (parameter.is_pointer(), parameter.space()) {
        (false, _) => return ("", String::new()),
        (true, "threadgroup") => "threadgroup",
        (true, _) => "buffer",
    };
    let free = (0..=LAST_BUFFER).map(|index| index.to_string());
    let mut free = free.filter(|index| !used.iter().any(|(n, i)| *n == name && i == index));
    let index = free.next().unwrap_or_default();
    used.push((name, index.clone()));
    (name, index)
}

/// The initialiser of one parameter's `msl::Bind`, or what is wrong with it.
fn bind(parameter: &Parameter<'_>, name: &str, index: &str) -> Result<String, String> {
    let declaration = || join(parameter.declaration);
    match name {
        "buffer" if parameter.is_pointer() => {
            if !matches!(parameter.space(), "device" | "constant") {
                return Err(format!("a buffer parameter must be device or constant: {}", declaration()));
            }
            match index.parse::<u32>() {
                Ok(index) if index <= LAST_BUFFER => Ok(format!("{{msl::Buf, {index}}}")),
                _ => Err(format!("a buffer index must be at most {LAST_BUFFER}: {index:?}")),
            }
        }
        "threadgroup" if parameter.is_pointer() => match (parameter.space(), index.parse::<u32>()) {
            ("threadgroup", Ok(index)) => Ok(format!("{{msl::Tg, {index}}}")),
            _ => Err(format!(
                "a threadgroup parameter must be in the threadgroup space and have an index: {}",
                declaration()
            )),
        },
        "" => Err(format!("parameter without an attribute: {}", join(parameter.all))),
        _ => match builtin(name).filter(|_| !parameter.is_pointer()) {
            Some((value, vector)) if fits(&parameter.type_name(), vector) => {
                Ok(format!("{{msl::{value}, 0}}"))
            }
            Some(_) => Err(format!("{name} cannot be of type {}", parameter.type_name())),
            None => Err(format!(
                "[[{name}]] does not fit this parameter or is not known to the shim: {}",
                declaration()
            )),
        },
    }
}

fn fits(type_name: &str, vector: bool) -> bool {
    ["uint", "ushort", "uint32_t", "uint16_t"].iter().any(|scalar| {
        type_name.strip_prefix(scalar).is_some_and(|width| {
            width.is_empty() || vector && !scalar.ends_with("_t") && matches!(width, "2" | "3")
        })
    })
}

/// The shim's name of a built-in value, and whether it may be a vector.
fn builtin(attribute: &str) -> Option<(&'static str, bool)> {
    Some(match attribute {
        "thread_position_in_grid" => ("PosInGrid", true),
        "threadgroup_position_in_grid" => ("TgPos", true),
        "thread_position_in_threadgroup" => ("PosInTg", true),
        "threads_per_threadgroup" | "dispatch_threads_per_threadgroup" => ("TgSize", true),
        "threadgroups_per_grid" => ("GridTgs", true),
        "threads_per_grid" => ("GridThreads", true),
        "thread_index_in_threadgroup" => ("Index", false),
        "thread_index_in_simdgroup" => ("SimdLane", false),
        "simdgroup_index_in_threadgroup" => ("SimdIndex", false),
        "simdgroups_per_threadgroup" | "dispatch_simdgroups_per_threadgroup" => ("SimdCount", false),
        "threads_per_simdgroup" | "thread_execution_width" => ("SimdWidth", false),
        _ => return None,
    })
}
