//! Preprocessed source as tokens, with the place of each.

/// A word, a string, a sign, or one of `::`, `[[`, `]]`.
#[derive(Clone, Debug)]
pub(super) struct Token {
    pub(super) text: String,
    /// Byte offset in the source.
    pub(super) at: usize,
    /// Line of the file that the preprocessor read.
    pub(super) line: usize,
}

impl Token {
    pub(super) fn is(&self, text: &str) -> bool {
        self.text == text
    }

    pub(super) fn end(&self) -> usize {
        self.at + self.text.len()
    }
}

pub(super) fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Cuts `source` into tokens. Line markers (`# 12 "file"`) set the line, pragmas are passed over.
pub(super) fn tokens(source: &str) -> Vec<Token> {
    let mut scanner = Scanner { source, at: 0, line: 1, line_begins: true, attributes: 0 };
    let mut tokens = Vec::new();
    while let Some(token) = scanner.next_token() {
        tokens.push(token);
    }
    tokens
}

struct Scanner<'a> {
    source: &'a str,
    at: usize,
    line: usize,
    line_begins: bool,
    /// `[[` that are open: `]]` closes an attribute only then, since `a[b[i]]` ends in the same signs.
    attributes: usize,
}

impl Scanner<'_> {
    fn rest(&self) -> &[u8] {
        self.source.as_bytes().get(self.at..).unwrap_or_default()
    }

    fn next_token(&mut self) -> Option<Token> {
        loop {
            match *self.rest().first()? {
                b'\n' => {
                    self.line += 1;
                    self.at += 1;
                    self.line_begins = true;
                }
                b'#' if self.line_begins => self.directive(),
                byte if byte.is_ascii_whitespace() => self.at += 1,
                _ => break,
            }
        }
        self.line_begins = false;
        let (start, length) = (self.at, self.length());
        self.at += length;
        let text = String::from_utf8_lossy(&self.source.as_bytes()[start..self.at]).into_owned();
        Some(Token { text, at: start, line: self.line })
    }

    /// A line marker or a pragma.
    fn directive(&mut self) {
        let rest = self.rest();
        let length = rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
        let text = String::from_utf8_lossy(&rest[..length]);
        if let Some(number) = text.split_whitespace().nth(1).and_then(|n| n.parse::<usize>().ok()) {
            // The marker speaks of the next line.
            self.line = number.saturating_sub(1);
        }
        self.at += length;
    }

    /// Bytes of the token that begins here.
    fn length(&mut self) -> usize {
        let rest = self.rest();
        match rest {
            [first, ..] if is_word(*first) => rest.iter().take_while(|byte| is_word(**byte)).count(),
            [quote @ (b'"' | b'\''), ..] => {
                let mut length = 1;
                while length < rest.len() && rest[length] != *quote {
                    length += if rest[length] == b'\\' { 2 } else { 1 };
                }
                rest.len().min(length + 1)
            }
            [b':', b':', ..] => 2,
            [b'[', b'[', ..] => {
                self.attributes += 1;
                2
            }
            [b']', b']', ..] if self.attributes > 0 => {
                self.attributes -= 1;
                2
            }
            // A character outside ASCII stays whole.
            _ => rest.iter().skip(1).take_while(|byte| **byte & 0xC0 == 0x80).count() + 1,
        }
    }
}

/// The token that closes the one at `open`.
pub(super) fn closing(tokens: &[Token], open: usize, opens: &str, closes: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (k, token) in tokens.iter().enumerate().skip(open) {
        if token.is(opens) {
            depth += 1;
        } else if token.is(closes) {
            depth = depth.checked_sub(1)?;
            if depth == 0 {
                return Some(k);
            }
        }
    }
    None
}

/// Splits at the commas that no bracket encloses.
pub(super) fn split_commas(tokens: &[Token]) -> Vec<&[Token]> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0i32, 0);
    for (k, token) in tokens.iter().enumerate() {
        match token.text.as_str() {
            "(" | "[" | "[[" | "<" | "{" => depth += 1,
            ")" | "]" | "]]" | ">" | "}" => depth -= 1,
            "," if depth == 0 => {
                parts.push(&tokens[start..k]);
                start = k + 1;
            }
            _ => {}
        }
    }
    if start < tokens.len() {
        parts.push(&tokens[start..]);
    }
    parts
}

/// The tokens with a space between each two.
pub(super) fn join(tokens: &[Token]) -> String {
    tokens.iter().map(|token| token.text.as_str()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str) -> Vec<String> {
        tokens(source).into_iter().map(|token| token.text).collect()
    }

    #[test]
    fn closing_brackets_of_an_index_are_no_attribute() {
        assert_eq!(
            texts("a[b[i]] x [[buffer(0)]]"),
            ["a", "[", "b", "[", "i", "]", "]", "x", "[[", "buffer", "(", "0", ")", "]]"]
        );
    }

    #[test]
    fn lines_follow_the_markers() {
        let all = tokens("a\n# 40 \"x.metal\" 2\nb\n#pragma unroll\nc");
        assert_eq!(all.iter().map(|token| token.line).collect::<Vec<_>>(), [1, 40, 42]);
    }

    #[test]
    fn text_that_ends_too_early_is_no_panic() {
        for source in ["\"abc", "'\\", "[[", "#", "é\u{301}", "::", "a // b"] {
            tokens(source);
        }
    }
}
