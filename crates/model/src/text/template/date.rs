//! `strftime` for `strftime_now`, in UTC, with the directives of the C locale.

use minijinja::{Error, ErrorKind};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// 1970-01-01 was a Thursday.
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// A moment in the Gregorian calendar.
struct Moment {
    year: u64,
    /// 0 to 11.
    month: usize,
    /// 1 to 31.
    day: u64,
    /// 0 to 365.
    day_of_year: u64,
    /// Index into [`DAYS`].
    weekday: usize,
    /// Second of the day.
    second: u64,
}

/// Formats the moment `seconds` after 1970-01-01 00:00 UTC.
pub(super) fn strftime(seconds: u64, format: &str) -> Result<String, Error> {
    let moment = moment(seconds);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let padded = directive != Some('-');
        if !padded {
            directive = chars.next();
        }
        match directive.and_then(|directive| moment.field(directive, padded)) {
            Some(field) => out.push_str(&field),
            None => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now does not know a directive of {format:?}"),
                ));
            }
        }
    }
    Ok(out)
}

impl Moment {
    /// One directive's text; `None` for one that is not known.
    fn field(&self, directive: char, padded: bool) -> Option<String> {
        let number = |value: u64, width: usize| {
            if padded { format!("{value:0width$}") } else { value.to_string() }
        };
        let hour = self.second / 3600;
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => number(self.year % 100, 2),
            'm' => number(self.month as u64 + 1, 2),
            'd' => number(self.day, 2),
            'e' => format!("{:>2}", self.day),
            'j' => number(self.day_of_year + 1, 3),
            'B' => MONTHS[self.month].to_owned(),
            'b' | 'h' => MONTHS[self.month][..3].to_owned(),
            'A' => DAYS[self.weekday].to_owned(),
            'a' => DAYS[self.weekday][..3].to_owned(),
            'H' => number(hour, 2),
            'I' => number((hour + 11) % 12 + 1, 2),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'M' => number(self.second / 60 % 60, 2),
            'S' => number(self.second % 60, 2),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month + 1, self.day),
            'T' => {
                format!("{:02}:{:02}:{:02}", hour, self.second / 60 % 60, self.second % 60)
            }
            'Z' => "UTC".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

/// Finds the calendar date by walking 400-year cycles, years and months.
fn moment(seconds: u64) -> Moment {
    const CYCLE_DAYS: u64 = 146_097;
    let days = seconds / 86_400;
    let mut year = 1970 + days / CYCLE_DAYS * 400;
    let mut rest = days % CYCLE_DAYS;
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    while rest >= 365 + u64::from(leap(year)) {
        rest -= 365 + u64::from(leap(year));
        year += 1;
    }
    let day_of_year = rest;
    let february = 28 + u64::from(leap(year));
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while rest >= lengths[month] {
        rest -= lengths[month];
        month += 1;
    }
    let weekday = (days % 7) as usize;
    Moment { year, month, day: rest + 1, day_of_year, weekday, second: seconds % 86_400 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_agree_with_the_calendar() {
        for (seconds, format, want) in [
            (0, "%Y-%m-%d %H:%M:%S %A", "1970-01-01 00:00:00 Thursday"),
            (951_826_554, "%d %b %Y, %-I%p %j", "29 Feb 2000, 12PM 060"),
            (1_735_689_599, "%B %-d, %y %a %T", "December 31, 24 Tue 23:59:59"),
            (4_107_542_400, "%F %e%%", "2100-03-01  1%"),
        ] {
            assert_eq!(strftime(seconds, format).unwrap(), want);
        }
    }

    #[test]
    fn unknown_directives_are_refused() {
        for format in ["%Q", "%", "%-"] {
            assert!(strftime(0, format).is_err(), "{format}");
        }
    }

    #[test]
    fn the_last_second_does_not_overflow() {
        assert!(strftime(u64::MAX, "%F").is_ok());
    }
}
