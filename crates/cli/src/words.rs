//! Figures in words for people.

use std::fmt::{Display, Write};

use crate::report::bytes as size;

/// Bytes in words and to the byte: `20.2 MiB (21233664 bytes)`.
pub fn exact_size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} bytes"),
        _ => format!("{} ({bytes} bytes)", size(bytes)),
    }
}

/// A number that JSON shows with the fewest digits that read back as the same `f32`: 0.7, where widening
/// alone gives 0.699999988079071.
pub fn shortest(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}

/// `1 file`, `2 files`.
pub fn count<N: Display + PartialEq + From<u8>>(n: N, noun: &str) -> String {
    let plural = if n == N::from(1) { "" } else { "s" };
    format!("{n} {noun}{plural}")
}

/// Rows with aligned columns: the first column to the left, the others to the right where
/// `numbers` says so.
pub fn table(rows: &[Vec<String>], numbers: &[bool]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let (width, gap) = (widths[column], if column == 0 { "" } else { "  " });
            // Writing to a string does not fail.
            let _ = match numbers.get(column) {
                Some(true) => write!(line, "{gap}{cell:>width$}"),
                _ => write!(line, "{gap}{cell:<width$}"),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// A path as one word of a shell command.
pub fn shell_word(path: &std::path::Path) -> String {
    let text = path.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+,:=@%".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.into_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// What to say of figures that a build without optimisation measured.
pub fn unoptimised() -> Option<String> {
    cfg!(debug_assertions).then(|| {
        "this is a debug build: its measured rates are far below the machine's; build with --release"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        assert_eq!(
            (count(1usize, "set"), count(0u64, "set"), count(2u64, "set")),
            ("1 set".into(), "0 sets".into(), "2 sets".into())
        );
    }

    #[test]
    fn small_sizes_are_not_said_twice() {
        assert_eq!(exact_size(1023), "1023 bytes");
        assert_eq!(exact_size(2048), "2.0 KiB (2048 bytes)");
    }

    #[test]
    fn numbers_keep_their_digits() {
        for (number, shown) in
            [(0.7f32, "0.7"), (0.8, "0.8"), (1.0, "1.0"), (1e-7, "1e-7"), (0.1 + 0.2, "0.3")]
        {
            assert_eq!(serde_json::json!(shortest(number)).to_string(), shown);
            assert_eq!(shortest(number) as f32, number);
        }
    }

    #[test]
    fn columns_are_aligned() {
        let row = |a: &str, b: &str| vec![a.to_owned(), b.to_owned()];
        let text = table(&[row("a", "1"), row("bcd", "20")], &[false, true]);
        assert_eq!(text, "a     1\nbcd  20\n");
    }

    #[test]
    fn a_path_with_spaces_is_quoted() {
        assert_eq!(shell_word("a/b-c.d".as_ref()), "a/b-c.d");
        assert_eq!(shell_word("a b'c".as_ref()), r"'a b'\''c'");
    }
}
