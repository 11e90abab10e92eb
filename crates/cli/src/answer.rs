//! An answer on its way from ids to text: decoding, stop strings, what is new to show.

use metaltail_engine::Flow;
use metaltail_engine::stop::StopStrings;
use metaltail_model::text::{Detokenizer, TextError, Tokenizer};

use crate::exit::{Failure, Kind};
use crate::runtime::text_failure;

/// Text of generated ids, as far as it is certain.
pub struct Answer {
    parts: Option<(Detokenizer, StopStrings)>,
    text: String,
    shown: usize,
    error: Option<TextError>,
}

impl Answer {
    /// An empty answer; without a tokenizer it stays without text.
    ///
    /// # Errors
    /// Stop strings that are empty, or that no tokenizer could find.
    pub fn new(tokenizer: Option<&Tokenizer>, stops: Vec<String>) -> Result<Answer, Failure> {
        if tokenizer.is_none() && !stops.is_empty() {
            let reason = "--stop needs a tokenizer, and the model has none";
            return Err(Failure::new(Kind::Usage, reason));
        }
        let stops = StopStrings::new(stops).map_err(|e| Failure::from_error(Kind::Usage, &e))?;
        let parts = tokenizer.map(|tokenizer| (Detokenizer::new(tokenizer), stops));
        Ok(Answer { parts, text: String::new(), shown: 0, error: None })
    }

    /// Adds one id.
    pub fn take(&mut self, id: u32) -> Flow {
        let Some((detokenizer, stops)) = &mut self.parts else { return Flow::Continue };
        match detokenizer.push(id) {
            Ok(piece) => {
                let passed = stops.push(&piece);
                self.text.push_str(&passed.text);
                if passed.stopped { Flow::Stop } else { Flow::Continue }
            }
            Err(error) => {
                self.error = Some(error);
                Flow::Stop
            }
        }
    }

    /// Adds what was held back; nothing more will come.
    ///
    /// # Errors
    /// Ids that could not be decoded.
    pub fn finish(&mut self) -> Result<(), Failure> {
        if let Some(error) = self.error.take() {
            return Err(text_failure(&error));
        }
        let Some((detokenizer, stops)) = &mut self.parts else { return Ok(()) };
        let rest = detokenizer.flush().map_err(|error| text_failure(&error))?;
        let passed = stops.push(&rest);
        self.text.push_str(&passed.text);
        self.text.push_str(&stops.flush());
        Ok(())
    }

    /// What was added since the last call.
    pub fn fresh(&mut self) -> &str {
        let from = std::mem::replace(&mut self.shown, self.text.len());
        &self.text[from..]
    }

    /// Whether there is a tokenizer.
    pub fn has_text(&self) -> bool {
        self.parts.is_some()
    }

    /// All text so far; none without a tokenizer.
    pub fn text(&self) -> Option<&str> {
        self.has_text().then_some(self.text.as_str())
    }
}
