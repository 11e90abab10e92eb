//! Stop strings over text that arrives in pieces.

/// Looks for stop strings in streamed text and holds back what may be the beginning of one.
///
/// The text ends as soon as a stop string is complete, and is cut where that one began (the one
/// that began first, when several are complete at once). How the text is divided into pieces makes
/// no difference.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

/// An empty stop string, which would end every text before it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a stop string must not be empty; leave it out to stop at the model's own end of text")]
pub struct EmptyStop;

/// What a piece of text led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// Text that is certain now.
    pub text: String,
    /// Whether a stop string is complete: nothing comes after `text`.
    pub stopped: bool,
}

impl StopStrings {
    /// A search for any of `stops`, of which there may be none.
    ///
    /// # Errors
    /// One of them is empty.
    pub fn new(stops: Vec<String>) -> Result<StopStrings, EmptyStop> {
        if stops.iter().any(String::is_empty) {
            return Err(EmptyStop);
        }
        Ok(StopStrings { stops, held: String::new(), stopped: false })
    }

    /// Takes the next piece of text. After a stop nothing passes any more.
    pub fn push(&mut self, text: &str) -> Passed {
        if self.stopped {
            return Passed { text: String::new(), stopped: true };
        }
        self.held.push_str(text);
        if let Some(start) = self.first_complete() {
            self.stopped = true;
            self.held.truncate(start);
            return Passed { text: std::mem::take(&mut self.held), stopped: true };
        }
        let keep = self.held.split_off(self.held.len() - self.possible_beginning());
        Passed { text: std::mem::replace(&mut self.held, keep), stopped: false }
    }

    /// Gives out what was held back, once no more text comes.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Where the stop string begins that is complete first; the earliest of several.
    fn first_complete(&self) -> Option<usize> {
        let found = self.stops.iter().filter_map(|stop| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start))
        });
        found.min().map(|(_, start)| start)
    }

    /// Bytes at the end of `held` that begin a stop string.
    fn possible_beginning(&self) -> usize {
        let longest = |stop: &String| {
            let ends = stop.char_indices().map(|(end, _)| end).skip(1).collect::<Vec<_>>();
            ends.into_iter().rev().find(|&end| self.held.ends_with(&stop[..end])).unwrap_or(0)
        };
        self.stops.iter().map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn strings(stops: &[&str]) -> StopStrings {
        StopStrings::new(stops.iter().map(|stop| (*stop).to_owned()).collect()).unwrap()
    }

    /// The plain search: after which character is a stop string complete, and where did it begin?
    fn cut(text: &str, stops: &[&str]) -> (String, bool) {
        for (at, c) in text.char_indices() {
            let so_far = &text[..at + c.len_utf8()];
            let complete = stops.iter().filter(|stop| so_far.ends_with(**stop));
            if let Some(length) = complete.map(|stop| stop.len()).max() {
                return (so_far[..so_far.len() - length].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    #[test]
    fn a_stop_across_pieces_is_found() {
        let mut stops = strings(&["\nUser:"]);
        assert_eq!(stops.push("Hi\nUs"), Passed { text: "Hi".into(), stopped: false });
        assert_eq!(stops.push("er"), Passed { text: String::new(), stopped: false });
        assert_eq!(stops.push(": x"), Passed { text: String::new(), stopped: true });
        assert_eq!(stops.push("more"), Passed { text: String::new(), stopped: true });
        assert_eq!(stops.flush(), "");
    }

    #[test]
    fn a_false_beginning_is_given_back() {
        let mut stops = strings(&["aab"]);
        assert_eq!(stops.push("aa").text, "");
        assert_eq!(stops.push("a").text, "a");
        assert_eq!(stops.push("c").text, "aac");
        assert_eq!(stops.push("xa").text, "x");
        assert_eq!(stops.flush(), "a");
    }

    #[test]
    fn no_stop_strings_hold_nothing_back() {
        assert_eq!(strings(&[]).push("abc"), Passed { text: "abc".into(), stopped: false });
    }

    #[test]
    fn an_empty_stop_is_refused() {
        assert_eq!(StopStrings::new(vec!["a".into(), String::new()]).unwrap_err(), EmptyStop);
    }

    proptest! {
        #[test]
        fn pieces_stop_where_the_plain_search_does(
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (text, stopped) = cut(&pieces.concat(), &stops);
            let mut streamed = strings(&stops);
            let mut out = String::new();
            let mut stop_seen = false;
            for piece in &pieces {
                let passed = streamed.push(piece);
                out.push_str(&passed.text);
                stop_seen = passed.stopped;
                prop_assert!(text.starts_with(&out), "{out:?} was given out of {text:?}");
            }
            out.push_str(&streamed.flush());
            prop_assert_eq!((out, stop_seen), (text, stopped));
        }
    }
}
