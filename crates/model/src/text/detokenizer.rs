//! Ids to text, one id at a time.

use super::{TextError, Tokenizer};

/// What bytes that are not UTF-8 decode to.
const REPLACEMENT: char = '\u{FFFD}';

/// How many trailing replacement characters may still become a character: an unfinished one has at
/// most three bytes, and a decoder shows it as one (byte-level) or as one a byte (byte fallback).
const MAX_UNFINISHED: usize = 3;

/// Ids kept for a decoder that takes back what it showed, before the detokenizer starts afresh.
const MAX_DISAGREEING: usize = 64;

/// Turns generated ids into pieces of text, never half a character.
///
/// A character may be spread over several ids. Text is held back while its tail may still change;
/// [`Detokenizer::flush`] gives out what is left at the end. The pieces and the flush together are
/// what [`Tokenizer::decode`] gives for all ids, special tokens skipped.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    /// Ids under consideration: first those of the last finished piece, kept as context because
    /// some decoders treat the beginning of a text differently, then those not finished yet.
    window: Vec<u32>,
    /// How many ids of `window` are context.
    context: usize,
    /// The text of `window` that was given out.
    shown: String,
}

impl Detokenizer {
    /// A detokenizer at the beginning of a text.
    pub fn new(tokenizer: &Tokenizer) -> Detokenizer {
        Detokenizer { tokenizer: tokenizer.clone(), window: Vec::new(), context: 0, shown: String::new() }
    }

    /// Takes the next id and returns the text that is certain now, often none.
    ///
    /// # Errors
    /// The tokenizer's decoder failed.
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        if !self.tokenizer.has_text(id) {
            return Ok(String::new());
        }
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window, true)?;
        let Some(new) = text.strip_prefix(self.shown.as_str()) else {
            return self.resynchronise();
        };
        let certain = certain_len(new);
        let piece = new[..certain].to_owned();
        if certain == new.len() && !piece.is_empty() {
            self.window.drain(..self.context);
            self.context = self.window.len();
            self.shown = self.tokenizer.decode(&self.window, true)?;
        } else {
            self.shown.push_str(&piece);
        }
        Ok(piece)
    }

    /// Gives out what was held back and begins anew.
    ///
    /// # Errors
    /// The tokenizer's decoder failed.
    pub fn flush(&mut self) -> Result<String, TextError> {
        let text = self.tokenizer.decode(&self.window, true)?;
        let rest = match text.strip_prefix(self.shown.as_str()) {
            Some(rest) => rest.to_owned(),
            None => self.tokenizer.decode(&self.window[self.context..], true)?,
        };
        self.window.clear();
        self.context = 0;
        self.shown.clear();
        Ok(rest)
    }

    /// The decoder no longer shows what was given out. A byte-fallback decoder does so until the
    /// character is complete, so wait; one that never agrees again is restarted at the new ids.
    fn resynchronise(&mut self) -> Result<String, TextError> {
        if self.window.len() - self.context <= MAX_DISAGREEING {
            return Ok(String::new());
        }
        self.window.drain(..self.context);
        self.context = self.window.len();
        self.shown = self.tokenizer.decode(&self.window, true)?;
        Ok(self.shown.clone())
    }
}

/// The length of the part of `text` that later ids cannot change.
fn certain_len(text: &str) -> usize {
    let unfinished = text.chars().rev().take(MAX_UNFINISHED).take_while(|&c| c == REPLACEMENT).count();
    text.len() - unfinished * REPLACEMENT.len_utf8()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn demo() -> Option<Tokenizer> {
        super::super::demo_model().map(|dir| Tokenizer::from_dir(&dir).unwrap())
    }

    /// A byte-fallback tokenizer: 256 byte tokens, then ` word`-like tokens.
    fn byte_fallback() -> Tokenizer {
        let mut vocab = serde_json::Map::new();
        for byte in 0..256 {
            vocab.insert(format!("<0x{byte:02X}>"), byte.into());
        }
        for (i, word) in ["▁a", "b", "▁", "中"].iter().enumerate() {
            vocab.insert((*word).to_owned(), (256 + i).into());
        }
        let json = serde_json::json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true},
        });
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        Tokenizer::from_dir(dir.path()).unwrap()
    }

    fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> (Vec<String>, String) {
        let mut detokenizer = Detokenizer::new(tokenizer);
        let pieces = ids.iter().map(|&id| detokenizer.push(id).unwrap()).collect();
        (pieces, detokenizer.flush().unwrap())
    }

    #[test]
    fn a_character_comes_whole() {
        let Some(tokenizer) = demo() else { return };
        let ids = tokenizer.encode("𝄞🪲").unwrap();
        assert!(ids.len() > 2, "the test needs characters of several ids");
        let (pieces, rest) = pieces(&tokenizer, &ids);
        assert!(pieces.iter().all(|piece| !piece.contains(REPLACEMENT)), "{pieces:?}");
        assert_eq!(pieces.concat(), "𝄞🪲");
        assert_eq!(rest, "");
    }

    #[test]
    fn half_a_character_appears_only_at_the_end() {
        let Some(tokenizer) = demo() else { return };
        let mut ids = tokenizer.encode("x𝄞").unwrap();
        ids.pop();
        let (pieces, rest) = pieces(&tokenizer, &ids);
        assert_eq!(pieces.concat(), "x");
        assert_eq!(rest, "\u{FFFD}");
    }

    #[test]
    fn pieces_add_up_to_the_whole_for_any_ids() {
        let Some(tokenizer) = demo() else { return };
        let size = tokenizer.vocab_size() as u32;
        // A third of the ids from the start of the vocabulary: special tokens and single bytes.
        let id = prop_oneof![0..300u32, 0..size, 0..size + 10];
        proptest!(|(ids in prop::collection::vec(id, 0..120))| {
            let whole = tokenizer.decode(&ids, true).unwrap();
            let (pieces, rest) = pieces(&tokenizer, &ids);
            prop_assert_eq!(pieces.concat() + &rest, whole);
        });
    }

    #[test]
    fn byte_fallback_characters_come_whole_and_spaces_survive() {
        let tokenizer = byte_fallback();
        let mut ids = vec![256, 257, 256, 258];
        ids.extend("中中".bytes().map(u32::from));
        ids.extend([256, 259]);
        let (pieces, rest) = pieces(&tokenizer, &ids);
        assert_eq!(pieces.concat(), "ab a 中中 a中");
        assert_eq!(rest, "");
    }

    #[test]
    fn special_and_unknown_ids_say_nothing() {
        let Some(tokenizer) = demo() else { return };
        let eos = tokenizer.token_to_id("<|endoftext|>").unwrap();
        let (pieces, rest) = pieces(&tokenizer, &[eos, u32::MAX, eos]);
        assert_eq!(pieces.concat() + &rest, "");
    }
}
