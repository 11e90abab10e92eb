//! Parsers of single values. Every one parses the whole text or refuses it.

use metaltail_store::PAGE;

/// A size in bytes: `24G`, `1.5T`, `700M`, `4096`, `2GiB`; K, M, G and T are powers of 1024. A part of a byte
/// is left out.
pub fn size(text: &str) -> Result<u64, String> {
    let form = || "a size is a number with K, M, G, T or nothing after it, such as 24G or 1.5T".to_owned();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(form()),
    };
    let (whole, part) = number.split_once('.').map_or((number, None), |(whole, part)| (whole, Some(part)));
    let whole: u64 = whole.parse().map_err(|_| form())?;
    let part = match part {
        None => 0,
        Some(_) if shift == 0 => return Err("a number of bytes is a whole one".to_owned()),
        // Twelve digits after the point are a byte of a terabyte.
        Some(part) if (1..=12).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit()) => {
            let scale = 10u128.pow(part.len() as u32);
            let part: u128 = part.parse().map_err(|_| form())?;
            ((part << shift) / scale) as u64
        }
        Some(_) => return Err(form()),
    };
    let bytes = whole.checked_mul(1 << shift).and_then(|bytes| bytes.checked_add(part));
    bytes.ok_or_else(|| "the size is larger than 16 EiB, which no machine has".to_owned())
}

/// `on`, `off` and their synonyms.
pub fn on_off(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "on" | "true" | "1" => Ok(true),
        "off" | "false" | "0" => Ok(false),
        _ => Err("it is on or off".to_owned()),
    }
}

/// A parser of whole numbers from `MIN` to `MAX`.
pub fn whole<const MIN: u64, const MAX: u64>(text: &str) -> Result<usize, String> {
    let hint = if MIN > 0 { "; leave it out to have it chosen" } else { "" };
    match text.parse::<u64>() {
        Ok(number) if (MIN..=MAX).contains(&number) => usize::try_from(number).map_err(|e| e.to_string()),
        _ => Err(format!("it must be a whole number from {MIN} to {MAX}{hint}")),
    }
}

/// A size of at least one page.
pub(super) fn chunk(text: &str) -> Result<u64, String> {
    match size(text)? {
        bytes if bytes < PAGE => Err(format!("it must be at least {PAGE} bytes, one page")),
        bytes => Ok(bytes),
    }
}

/// A temperature: 0 or more.
pub(super) fn temperature(text: &str) -> Result<f32, String> {
    number(text, |value| value >= 0.0, "0 or more")
}

/// A probability above 0.
pub(super) fn probability(text: &str) -> Result<f32, String> {
    number(text, |value| value > 0.0 && value <= 1.0, "above 0 and at most 1")
}

/// A share from 0 to 1.
pub fn share(text: &str) -> Result<f32, String> {
    number(text, |value| (0.0..=1.0).contains(&value), "between 0 and 1")
}

fn number(text: &str, accept: impl Fn(f32) -> bool, range: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if value.is_finite() && accept(value) => Ok(value),
        _ => Err(format!("it must be a number {range}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("24G", 24 << 30),
            ("700m", 700 << 20),
            ("2GiB", 2 << 30),
            ("1KB", 1024),
            ("1T", 1 << 40),
            ("2tib", 2 << 40),
            ("1.5G", 3 << 29),
            ("0.25K", 256),
            ("0.0001K", 0),
            ("1.333333333333T", 1_466_015_503_700),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for bad in
            ["", "G", "-1", "24 G", "24X", "24GG", "99999999999999999999", "17179869184G", "16777216T", "é"]
        {
            assert!(size(bad).is_err(), "{bad}");
        }
        for bad in ["1.5", "1.", ".5G", "1.G", "1.2.3G", "1..5G", "1.0000000000001G", ".", "1.5B"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn parts_are_at_least_a_page() {
        assert_eq!((chunk("4096"), chunk("2M")), (Ok(4096), Ok(2 << 20)));
        assert!(chunk("4095").unwrap_err().contains("4096") && chunk("x").is_err());
    }

    #[test]
    fn numbers_are_parsed_whole() {
        assert_eq!(temperature("0.7"), Ok(0.7));
        for bad in ["/tmp", "0.7x", "", "nan", "inf", "-1"] {
            assert!(temperature(bad).is_err(), "{bad}");
        }
        assert!(probability("0").is_err() && probability("1").is_ok() && share("0").is_ok());
        assert_eq!((whole::<1, 8>("1"), whole::<1, 8>("8"), whole::<0, 8>("0")), (Ok(1), Ok(8), Ok(0)));
        for bad in ["0", "9", "8 ", "-1", "", "1.0", "18446744073709551616"] {
            assert!(whole::<1, 8>(bad).unwrap_err().contains("from 1 to 8"), "{bad}");
        }
        assert!(on_off("yes").is_err() && on_off("OFF") == Ok(false));
    }
}
