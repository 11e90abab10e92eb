//! Metal asks for an address space on every pointer and reference; C++ does not.

use super::Complaints;
use super::parameters::SPACES;
use super::tokens::{Token, join};

const TYPES: [&str; 15] = [
    "float", "half", "bfloat", "int", "uint", "uchar", "char", "short", "ushort", "long", "ulong", "bool",
    "void", "const", "size_t",
];

/// Words after which `a * b` or `a & b` declares nothing, or whose declaration needs no space here.
const OTHER_WORDS: [&str; 8] =
    ["return", "else", "case", "typename", "template", "using", "sizeof", "operator"];

/// Finds parameters and plain declarations of built-in types without a space.
pub(super) fn check(tokens: &[Token], complaints: &mut Complaints<'_>) {
    let mut start = 0;
    for (k, token) in tokens.iter().enumerate() {
        if matches!(token.text.as_str(), ";" | "{" | "}" | "(" | "," | ")") {
            let declaration = &tokens[start..k];
            start = k + 1;
            if lacks_space(declaration) {
                complaints.add(
                    declaration[0].line,
                    format!("pointer or reference without an address space: {}", join(declaration)),
                );
            }
        }
    }
}

fn lacks_space(declaration: &[Token]) -> bool {
    let sign = declaration.iter().position(|token| !is_identifier(&token.text) && !token.is("::"));
    let Some(sign) = sign.filter(|sign| *sign > 0) else { return false };
    let (head, rest) = declaration.split_at(sign);
    if !(rest[0].is("*") || rest[0].is("&")) || !head.iter().any(|token| is_type(&token.text)) {
        return false;
    }
    let known =
        |token: &Token| SPACES.contains(&token.text.as_str()) || OTHER_WORDS.contains(&token.text.as_str());
    if head.iter().any(known) {
        return false;
    }
    let qualifier = |token: &&Token| matches!(token.text.as_str(), "const" | "__restrict" | "restrict");
    let mut name = rest[1..].iter().skip_while(qualifier);
    name.next().is_some_and(|token| is_identifier(&token.text))
        && name.next().is_none_or(|token| token.is("=") || token.is("[["))
}

fn is_identifier(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
}

fn is_type(text: &str) -> bool {
    let scalar = text.trim_end_matches("_t").trim_end_matches(|c: char| c.is_ascii_digit());
    TYPES.contains(&scalar) || TYPES.contains(&text)
}
