//! Pressure stall information, as Linux writes it.

/// Percent of the last ten seconds in which some task was stalled, from a line such as
/// `some avg10=1.53 avg60=0.87 avg300=0.73 total=100`.
pub(super) fn some_avg10(text: &str) -> Option<f64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let value = some.split_whitespace().find_map(|field| field.strip_prefix("avg10="))?;
    value.parse::<f64>().ok().filter(|percent| (0.0..=100.0).contains(percent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_some_is_read_and_nonsense_is_no_pressure() {
        let text =
            "some avg10=1.53 avg60=0.87 avg300=0.73 total=10\nfull avg10=0.40 avg60=0 avg300=0 total=1\n";
        assert_eq!(some_avg10(text), Some(1.53));
        assert_eq!(some_avg10("full avg10=0.40"), None);
        assert_eq!(some_avg10("some avg10=NaN"), None);
        assert_eq!(some_avg10(""), None);
    }
}
