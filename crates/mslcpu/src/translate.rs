//! Preprocessed Metal source to C++ for the shim.
//!
//! Most of Metal's language is C++ once clang's vectors and a few macros stand in for its words. What is left is
//! done here: attributes are taken out, threadgroup variables become one copy a group, casts between vectors
//! are spelled out, and each kernel gets a caller that is registered under its name. On the way it finds what
//! Apple's compiler would refuse and C++ would not.

mod parameters;
mod pointers;
mod tokens;

use thiserror::Error;

use tokens::{Token, closing, is_word, join, split_commas, tokens};

/// What the C++ is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be compiled and run.
    Run,
    /// For `clang -fsyntax-only -DMSL_SPACES`, which tells the address spaces of pointers apart. It compiles nothing.
    AddressSpaces,
}

/// What Metal's compiler would refuse, or what the translation does not know.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{}", .0.join("\n"))]
pub struct TranslateError(
    /// Messages, each with file and line.
    pub Vec<String>,
);

/// Messages about one file.
struct Complaints<'a> {
    file: &'a str,
    all: Vec<String>,
}

impl Complaints<'_> {
    fn add(&mut self, line: usize, text: String) {
        self.all.push(format!("{}:{line}: {text}", self.file));
    }
}

/// Translates `source` (the preprocessor's output). Kernels are registered as `prefix` + their name; `file`
/// names the source in messages.
///
/// # Errors
/// Every message about this source.
pub fn translate(source: &str, file: &str, prefix: &str, purpose: Purpose) -> Result<String, TranslateError> {
    let tokens = tokens(source);
    let mut translator = Translator {
        tokens: &tokens,
        prefix,
        purpose,
        complaints: Complaints { file, all: Vec::new() },
        cuts: pragmas(source),
        inserts: Vec::new(),
        callers: String::new(),
        templates: Vec::new(),
        braces: 0,
        parentheses: 0,
    };
    let mut at = 0;
    while at < tokens.len() {
        at = translator.step(at);
    }
    pointers::check(&tokens, &mut translator.complaints);
    translator.finish(source)
}

/// Byte ranges of pragmas: hints to unroll may name macros that are gone by now.
fn pragmas(source: &str) -> Vec<(usize, usize)> {
    let mut at = 0;
    let mut ranges = Vec::new();
    for line in source.split_inclusive('\n') {
        if line.trim_start().starts_with("#pragma") {
            ranges.push((at, at + line.len()));
        }
        at += line.len();
    }
    ranges
}

struct Translator<'a> {
    tokens: &'a [Token],
    prefix: &'a str,
    purpose: Purpose,
    complaints: Complaints<'a>,
    /// Byte ranges to blank.
    cuts: Vec<(usize, usize)>,
    /// Text to put in, by byte offset.
    inserts: Vec<(usize, String)>,
    /// One caller a kernel, behind everything else.
    callers: String,
    /// Kernel templates so far with their binds.
    templates: Vec<(String, Vec<String>)>,
    braces: i32,
    parentheses: i32,
}

impl Translator<'_> {
    fn text(&self, at: usize) -> &str {
        self.tokens.get(at).map_or("", |token| token.text.as_str())
    }

    fn before(&self, at: usize) -> &str {
        at.checked_sub(1).map_or("", |at| self.text(at))
    }

    /// The first token from `at` on that is one of `set`; the last one where there is none.
    fn next(&self, at: usize, set: &[&str]) -> usize {
        let found = (at..self.tokens.len()).find(|k| set.contains(&self.text(*k)));
        found.unwrap_or(self.tokens.len().saturating_sub(1))
    }

    fn at_top(&self) -> bool {
        self.braces == 0 && self.parentheses == 0
    }

    /// Handles the token at `at` and says which comes next.
    fn step(&mut self, at: usize) -> usize {
        let token = &self.tokens[at];
        match token.text.as_str() {
            "{" => self.braces += 1,
            "}" => self.braces -= 1,
            "(" if self.is_vector_cast(at) => {
                // clang has no cast between vectors of different elements; ->* binds as tightly as a cast.
                let cast = format!("msl::Cast<{}>{{}} ->* ", self.text(at + 1));
                self.cuts.push((token.at, self.tokens[at + 2].end()));
                self.inserts.push((token.at, cast));
                return at + 3;
            }
            "(" => self.parentheses += 1,
            ")" => self.parentheses -= 1,
            "threadgroup" if self.before(at) == "[[" => {
                let close = self.next(at, &["]]"]);
                self.cuts.push((self.tokens[at - 1].at, self.tokens[close].end()));
            }
            "threadgroup" if self.braces > 0 && self.parentheses == 0 => {
                return self.threadgroup_variable(at);
            }
            "constant" if self.at_top() => return self.function_constant(at),
            "kernel" if self.at_top() => return self.kernel(at),
            _ => {}
        }
        at + 1
    }

    /// `(float4)` before an operand, not the `(float4)` of a parameter list.
    fn is_vector_cast(&self, at: usize) -> bool {
        let before = self.before(at);
        let after_word = before.as_bytes().first().is_some_and(|byte| is_word(*byte));
        self.text(at + 2) == ")"
            && is_vector(self.text(at + 1))
            && !before.is_empty()
            && (!after_word || before == "return")
            && before != ">"
    }

    /// `threadgroup T name[n];` in a body: one copy for all threads of the group, filled with NaNs at first.
    fn threadgroup_variable(&mut self, at: usize) -> usize {
        let end = self.next(at, &[";", "=", "(", "{"]);
        let declaration = &self.tokens[at + 1..end.max(at + 1)];
        // Sizes may be products; a pointer has its star before them.
        let mut before_sizes = declaration.iter().take_while(|token| !token.is("["));
        if self.text(end) != ";" || before_sizes.any(|token| token.is("*") || token.is("&")) {
            return at + 1;
        }
        let token = &self.tokens[at];
        self.inserts.push((token.at, "static thread_local ".into()));
        if self.purpose == Purpose::AddressSpaces {
            return end + 1;
        }
        self.cuts.push((token.at, token.end()));
        let mut poison = String::new();
        for variable in split_commas(declaration) {
            let name =
                variable.iter().position(|token| token.is("[")).unwrap_or(variable.len()).checked_sub(1);
            let Some(name) = name.map(|name| &variable[name]) else { continue };
            poison += &format!(
                " [[maybe_unused]] bool msl_p{}_{name} = msl::tg_var(&{name}, sizeof({name}));",
                name.at,
                name = name.text
            );
        }
        self.inserts.push((self.tokens[end].end(), poison));
        end + 1
    }

    /// `constant T name [[function_constant(n)]];`
    fn function_constant(&mut self, at: usize) -> usize {
        let end = self.next(at, &[";"]);
        let Some(word) = (at..end).find(|k| self.text(*k) == "function_constant") else { return at + 1 };
        let close = self.next(word, &["]]"]);
        if word < at + 3 || close < word + 3 {
            self.complaints
                .add(self.tokens[at].line, "a function constant without a name or an index".into());
            return end + 1;
        }
        let token = &self.tokens[at];
        let (name, index) = (self.text(word - 2).to_owned(), join(&self.tokens[word + 2..close - 1]));
        self.cuts.push((self.tokens[word - 1].at, self.tokens[end].at));
        self.cuts.push((token.at, token.end()));
        self.inserts.push((token.at, "static ".into()));
        let register = format!(" static msl::Register msl_fc_{name}({index}, sizeof({name}), &{name});");
        self.inserts.push((self.tokens[end].end(), register));
        end + 1
    }

    /// A kernel, a kernel template, or an instantiation of one.
    fn kernel(&mut self, at: usize) -> usize {
        let first = (0..at).rev().find(|k| matches!(self.text(*k), ";" | "}")).map_or(0, |k| k + 1);
        let end = self.next(at, &[";", "{"]);
        let host_name = (first..end).find(|k| self.text(*k) == "host_name");
        // Macros leave the pieces of a string side by side.
        let host = host_name.map(|k| {
            let pieces = self.tokens[k + 1..end].iter().skip(1).take_while(|token| !token.is(")"));
            pieces.map(|token| token.text.trim_matches('"')).collect::<String>()
        });
        match (self.text(end), host) {
            (";", Some(host)) => self.instantiation(at, first, end, &host),
            ("{", host) => {
                if let Some(word) = host_name.filter(|word| *word > 0) {
                    let close = self.next(word, &["]]"]);
                    self.cuts.push((self.tokens[word - 1].at, self.tokens[close].end()));
                }
                self.definition(at, first, end, host)
            }
            _ => at + 1,
        }
    }

    /// `template [[host_name("x")]] [[kernel]] type f<a, b>...;`
    fn instantiation(&mut self, at: usize, first: usize, end: usize, host: &str) -> usize {
        let tokens = self.tokens;
        let stop = match self.before(end) {
            ")" => (at..end).find(|k| tokens[*k].is("(") && closing(tokens, *k, "(", ")") == Some(end - 1)),
            _ => None,
        };
        let stop = stop.unwrap_or(end);
        let open =
            (at..stop).find(|k| tokens[*k].is("<") && closing(tokens, *k, "<", ">") == stop.checked_sub(1));
        let from = open.unwrap_or(stop).saturating_sub(1);
        let name = self.text(from);
        match self.templates.iter().find(|template| template.0 == name) {
            Some((_, binds)) => {
                let binds = binds.clone();
                self.caller(at, &join(&tokens[from..stop]), host, &binds);
            }
            None => {
                let text = format!("no kernel template {name} before this");
                self.complaints.add(tokens[at].line, text);
            }
        }
        self.cuts.push((tokens[first].at, tokens[end].end()));
        end + 1
    }

    fn definition(&mut self, at: usize, first: usize, end: usize, host: Option<String>) -> usize {
        let tokens = self.tokens;
        let takes_argument = ["host_name", "max_total_threads_per_threadgroup"];
        let open = (at..end).find(|k| tokens[*k].is("(") && !takes_argument.contains(&self.before(*k)));
        let Some(open) = open else { return at + 1 };
        let Some(close) = closing(tokens, open, "(", ")") else {
            self.complaints.add(tokens[open].line, "a parameter list that does not end".into());
            return tokens.len();
        };
        let parameters = parameters::read(&tokens[open + 1..close], &mut self.complaints);
        self.cuts.extend(&parameters.attributes);
        let name = self.before(open).to_owned();
        if tokens[first].is("template") {
            self.templates.push((name, parameters.binds));
        } else {
            self.caller(at, &name, host.as_deref().unwrap_or(&name), &parameters.binds);
        }
        close + 1
    }

    /// Registers `function` under `name`.
    fn caller(&mut self, at: usize, function: &str, name: &str, binds: &[String]) {
        let id = self.tokens[at].at;
        if self.purpose == Purpose::AddressSpaces {
            // Instantiates a template.
            self.callers += &format!("[[maybe_unused]] static auto *msl_i{id} = &{function};\n");
            return;
        }
        self.callers += &format!(
            "static void msl_t{id}(msl::Group &g_, msl::Lane &l_) {{ static constexpr msl::Bind b[] = {{{}}}; msl::invoke<b>(&{function}, g_, l_); }}\n\
             static msl::Register msl_r{id}(\"{}{name}\", msl_t{id});\n",
            binds.join(", "),
            self.prefix,
        );
    }

    fn finish(mut self, source: &str) -> Result<String, TranslateError> {
        if !self.complaints.all.is_empty() {
            return Err(TranslateError(self.complaints.all));
        }
        let mut body = source.as_bytes().to_vec();
        for (start, end) in self.cuts {
            for byte in &mut body[start..end] {
                // Lines stay where they are, for messages.
                if *byte != b'\n' {
                    *byte = b' ';
                }
            }
        }
        self.inserts.sort_by_key(|insert| std::cmp::Reverse(insert.0));
        for (at, text) in self.inserts {
            body.splice(at..at, text.into_bytes());
        }
        let body = String::from_utf8_lossy(&body);
        // Each file has a namespace of its own, unless it adds to Metal's.
        let reopens =
            self.tokens.windows(3).any(|w| w[0].is("namespace") && w[1].is("metal") && w[2].is("{"));
        let words = format!("{}{}", self.prefix, self.complaints.file);
        let space: String = words.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let (open, close) =
            if reopens { (String::new(), "") } else { (format!("namespace k{space} {{"), "}") };
        let callers = self.callers;
        Ok(format!(
            "#include \"metal_stdlib\"\n#include \"msl_invoke.hpp\"\n{open}\n{body}\n{callers}{close}\n"
        ))
    }
}

fn is_vector(text: &str) -> bool {
    const SCALARS: [&str; 9] = ["float", "half", "bfloat", "int", "uint", "char", "uchar", "short", "ushort"];
    text.strip_suffix(['2', '3', '4']).is_some_and(|scalar| SCALARS.contains(&scalar))
}

#[cfg(test)]
mod tests;
