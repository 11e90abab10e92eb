//! Figures in words for people.

use std::fmt::Write;

use crate::report::bytes as size;

/// Bytes in words and to the byte: `20.2 MiB (21233664 bytes)`.
pub fn exact_size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} bytes"),
        _ => format!("{} ({bytes} bytes)", size(bytes)),
    }
}

/// `1 file`, `2 files`.
pub fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
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
    fn small_sizes_are_not_said_twice() {
        assert_eq!(exact_size(1023), "1023 bytes");
        assert_eq!(exact_size(2048), "2.0 KiB (2048 bytes)");
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
