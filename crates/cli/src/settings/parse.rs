//! Parsers of single values. Every one parses the whole text or refuses it.

use metaltail_store::PAGE;

/// A size in bytes: `24G`, `700M`, `4096`, `2GiB`; K, M and G are powers of 1024.
pub fn size(text: &str) -> Result<u64, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => return Err("a size is a whole number with K, M, G or nothing after it, such as 24G".to_owned()),
    };
    let number: u64 = number
        .parse()
        .map_err(|_| "a size begins with a whole number that fits in 64 bits, such as 24G".to_owned())?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| "the size is larger than 16 EiB, which no machine has".to_owned())
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
pub(super) fn share(text: &str) -> Result<f32, String> {
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
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for bad in ["", "G", "1.5G", "-1", "24 G", "24X", "24GG", "99999999999999999999", "17179869184G", "é"]
        {
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
