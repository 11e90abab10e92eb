//! Text on both sides of the ids: tokenizer, chat template, incremental decoding, stop ids.
//!
//! Everything here reads files that came with a model, so everything here is hostile input: sizes
//! are bounded before reading, templates run on fuel, and a bad file is an error that names it.

use std::io::Read;
use std::path::{Path, PathBuf};

use metaltail_container::{NotRegular, is_out_of_handles, open_regular};

mod detokenizer;
mod stops;
mod template;
mod tokenizer;

pub use detokenizer::Detokenizer;
pub use stops::StopIds;
pub use template::{ChatTemplate, message};
pub use tokenizer::{Tokenizer, check_ids};

/// What can go wrong between text and ids.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file of the model could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The limit of open files is reached.
    #[error("cannot read {}: too many files are open; raise the limit with `ulimit -n` and try again", path.display())]
    OpenFiles {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        #[source]
        source: std::io::Error,
    },
    /// A file's name leads to something that is not a file, which may never end or never begin.
    #[error("{} is {found}, not a regular file; put the model's file in its place", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What is there, with its article.
        found: &'static str,
    },
    /// A link leads nowhere: the model is incomplete, which is not the same as having no such file.
    #[error(
        "{} is a link to {}, which does not exist; fetch that file, or remove the link", path.display(),
        target.display()
    )]
    DanglingLink {
        /// The link.
        path: PathBuf,
        /// Where it leads, as written in it.
        target: PathBuf,
    },
    /// A file is larger than any honest file of its kind.
    #[error(
        "{} is larger than {limit} bytes, the most that is accepted for this file; check that it is \
         what its name says", path.display()
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The largest size accepted, in bytes.
        limit: u64,
    },
    /// A file is not what its name says.
    #[error("{} is not valid: {reason}; fetch the file again from the model's source", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What was wrong, in words.
        reason: String,
    },
    /// What a GGUF file says of its tokenizer or chat template cannot be used.
    #[error("cannot use the tokenizer in {}: {reason}", path.display())]
    Metadata {
        /// The file.
        path: PathBuf,
        /// Why, in words.
        reason: String,
    },
    /// The tokenizer failed on an input.
    #[error("the tokenizer could not {action}: {reason}")]
    Tokenizer {
        /// `encode` or `decode`, with its object.
        action: &'static str,
        /// What the tokenizer said.
        reason: String,
    },
    /// An id that the vocabulary does not have.
    #[error(
        "id {id} at position {position} is outside the vocabulary of {vocab_size} ids; ids from \
         another model's tokenizer cannot be used"
    )]
    IdOutOfRange {
        /// The id.
        id: u32,
        /// Its place in the list, from 0.
        position: usize,
        /// Ids 0 to `vocab_size - 1` are valid.
        vocab_size: usize,
    },
    /// The chat template does not parse.
    #[error("the chat template in {} does not parse: {reason}", path.display())]
    TemplateSyntax {
        /// The file that holds the template.
        path: PathBuf,
        /// The parser's message, with the line.
        reason: String,
    },
    /// The system gave no thread to work on the chat template.
    #[error(
        "no memory to work on the chat template in {}: it takes a thread with a stack of {stack} MiB of address space, \
         of which little is used. Raise the limit (`ulimit -v`) or free memory; `--raw` and `--ids` go without",
        path.display()
    )]
    TemplateThread {
        /// The file that holds the template.
        path: PathBuf,
        /// The stack, in MiB.
        stack: usize,
        /// The operating system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The chat template failed while it rendered.
    #[error("the chat template in {} failed: {reason}; `--raw` goes without a template", path.display())]
    TemplateRender {
        /// The file that holds the template.
        path: PathBuf,
        /// The message, with the line.
        reason: String,
    },
    /// The chat template was still at work when its time was up.
    #[error(
        "the chat template in {} did not end within {seconds} s; `--raw` goes without a template",
        path.display()
    )]
    TemplateLate {
        /// The file that holds the template.
        path: PathBuf,
        /// The time it had, in seconds.
        seconds: f64,
    },
    /// The tokenizer gives ids that the model has no row for.
    #[error(
        "tokenizer.json has the id {largest}, but the model's `vocab_size` is {model_vocab}: the \
         tokenizer belongs to another model; fetch both from the same source"
    )]
    VocabTooSmall {
        /// The tokenizer's largest id.
        largest: usize,
        /// `vocab_size` of the model's configuration; its ids are below that.
        model_vocab: usize,
    },
    /// The chat template refused the conversation (`raise_exception`).
    #[error("the chat template refuses this conversation: {message}")]
    TemplateRefused {
        /// The template's own words.
        message: String,
    },
    /// An end-of-text id of a configuration is not an id.
    #[error("`eos_token_id` of {file} must be an id or a list of ids, got {got}")]
    BadStopId {
        /// `config.json` or `generation_config.json`.
        file: &'static str,
        /// The value found, as JSON.
        got: String,
    },
}

/// Reads a regular file of at most `limit` bytes; `Ok(None)` when there is none by this name.
///
/// Links are followed.
fn read_limited(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, TextError> {
    let fail = |source| match NotRegular::in_error(&source) {
        Some(NotRegular(found)) => TextError::NotAFile { path: path.to_owned(), found },
        None if is_out_of_handles(&source) => TextError::OpenFiles { path: path.to_owned(), source },
        None => TextError::Read { path: path.to_owned(), source },
    };
    let file = match open_regular(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return match std::fs::read_link(path) {
                Ok(target) => Err(TextError::DanglingLink { path: path.to_owned(), target }),
                Err(_) => Ok(None),
            };
        }
        Err(error) => return Err(fail(error)),
    };
    // One byte more than allowed is asked for, so that the length comes from what was read and not
    // from metadata, which is old where a file grows.
    let mut bytes = Vec::new();
    let read = file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(fail)?;
    if read as u64 > limit {
        return Err(TextError::TooLarge { path: path.to_owned(), limit });
    }
    Ok(Some(bytes))
}

/// The demo model's directory, or `None` (and a line that says so) where it is absent.
#[cfg(test)]
fn demo_model() -> Option<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models/hummingbird-56m");
    if dir.join("tokenizer.json").exists() {
        return Some(dir);
    }
    println!("SKIPPED: ../shared is absent");
    None
}

#[cfg(test)]
mod tests;
