//! Chat templates: a conversation to the prompt its model was trained on.
//!
//! Templates are Jinja as the transformers library runs it; what differs between Python's Jinja and
//! minijinja in output (`tojson`, `True` and `None`, lists) is made to agree here.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use metaltail_container::Checkpoint;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, ErrorKind, Value};
use serde_json::{Map, json};

use super::{TextError, read_limited};
use crate::gguf;

mod apart;
mod date;
mod python;

/// The largest `tokenizer_config.json` accepted, in bytes.
const MAX_CONFIG_BYTES: u64 = 64 << 20;
/// The largest template accepted, in bytes. Published ones are below 50 kB. The stack that templates
/// are compiled on is measured for this size.
const MAX_TEMPLATE_BYTES: u64 = 256 << 10;
/// How long a template may take to compile, and to render. Not all work of a template costs fuel:
/// walking a list that was doubled sixty times costs as much as walking one of two entries.
const PATIENCE: Duration = Duration::from_secs(10);
/// What one rendering may spend: instructions, and 64-byte units of data (256 MB in all). It ends a template
/// that loops, and leaves room for conversations of megabytes.
const FUEL: u64 = 4_000_000;
/// The name of the template in error messages.
const NAME: &str = "chat_template";

/// The special tokens of `tokenizer_config.json` that templates may name.
const TOKEN_VARIABLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A conversation turn, as templates want it.
pub fn message(role: &str, content: &str) -> serde_json::Value {
    json!({"role": role, "content": content})
}

/// A model's chat template, ready to render.
#[derive(Debug)]
pub struct ChatTemplate {
    /// Shared with the threads that render.
    environment: Arc<Environment<'static>>,
    path: PathBuf,
    source: String,
    /// The longest wait for a rendering.
    patience: Duration,
    /// `bos_token`, `eos_token` and the like, as text.
    tokens: Map<String, serde_json::Value>,
}

impl ChatTemplate {
    /// Reads the chat template of a model directory: `chat_template.jinja` where there is one, else
    /// `chat_template` of `tokenizer_config.json`: a text, or a list of `{name, template}` of which
    /// `default` is taken. `Ok(None)` when the model has none.
    ///
    /// # Errors
    /// Unreadable, too large or malformed files, and templates that do not parse.
    pub fn from_dir(dir: &Path) -> Result<Option<ChatTemplate>, TextError> {
        let config_path = dir.join("tokenizer_config.json");
        let malformed = |path: &Path, reason: String| TextError::Malformed { path: path.to_owned(), reason };
        let config: serde_json::Value = match read_limited(&config_path, MAX_CONFIG_BYTES)? {
            None => json!({}),
            Some(bytes) => {
                serde_json::from_slice(&bytes).map_err(|error| malformed(&config_path, error.to_string()))?
            }
        };
        let jinja_path = dir.join("chat_template.jinja");
        if let Some(bytes) = read_limited(&jinja_path, MAX_TEMPLATE_BYTES)? {
            let source =
                String::from_utf8(bytes).map_err(|error| malformed(&jinja_path, error.to_string()))?;
            return Self::parse(source, jinja_path, &config).map(Some);
        }
        match default_template(&config).map_err(|reason| malformed(&config_path, reason))? {
            None => Ok(None),
            Some(source) => Self::parse(source.to_owned(), config_path, &config).map(Some),
        }
    }

    /// The chat template of an opened model: that of its directory, or of a GGUF model's metadata.
    ///
    /// # Errors
    /// As [`ChatTemplate::from_dir`].
    pub fn of(checkpoint: &Checkpoint) -> Result<Option<ChatTemplate>, TextError> {
        let dir = checkpoint.dir();
        let Some(gguf) = checkpoint.gguf() else { return Self::from_dir(dir) };
        let unusable = |reason| TextError::Metadata { path: dir.to_owned(), reason };
        let config = gguf::tokenizer_config(gguf).map_err(unusable)?;
        match default_template(&config).map_err(unusable)? {
            None => Ok(None),
            Some(source) => Self::parse(source.to_owned(), dir.to_owned(), &config).map(Some),
        }
    }

    /// Compiles a template; `config` is where its special tokens are named.
    fn parse(source: String, path: PathBuf, config: &serde_json::Value) -> Result<ChatTemplate, TextError> {
        if source.len() as u64 > MAX_TEMPLATE_BYTES {
            return Err(TextError::TemplateSyntax {
                path,
                reason: format!(
                    "it has {} bytes, more than the {MAX_TEMPLATE_BYTES} that are accepted",
                    source.len()
                ),
            });
        }
        let text = without_generation_tags(&source);
        let compiled = apart::run(PATIENCE, move || {
            let mut environment = environment()?;
            environment.add_template_owned(NAME, text)?;
            Ok::<_, minijinja::Error>(environment)
        });
        let syntax = |reason: String| TextError::TemplateSyntax { path: path.clone(), reason };
        let environment = match compiled {
            Ok(Ok(environment)) => Arc::new(environment),
            Ok(Err(error)) => return Err(syntax(error.to_string())),
            Err(apart::Failure::NoThread { source }) => return Err(no_thread(&path, source)),
            Err(failure) => return Err(syntax(failure.to_string())),
        };
        Ok(ChatTemplate { environment, path, source, patience: PATIENCE, tokens: token_variables(config) })
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders `messages` (objects with `role`, `content`, …) to a prompt. `extra` are further
    /// variables, such as `enable_thinking` or `tools`; they override the model's own.
    ///
    /// # Errors
    /// The template refused the conversation, failed, ran out of fuel or took longer than 10 s. In
    /// the last case its thread cannot be ended and keeps a core busy; the caller should give up on
    /// the template, not try again.
    pub fn render(
        &self,
        messages: &[serde_json::Value],
        add_generation_prompt: bool,
        extra: &Map<String, serde_json::Value>,
    ) -> Result<String, TextError> {
        // transformers always defines `tools` and `documents`, as None where not given.
        let mut variables = Map::new();
        variables.insert("tools".to_owned(), serde_json::Value::Null);
        variables.insert("documents".to_owned(), serde_json::Value::Null);
        variables.extend(self.tokens.iter().map(|(name, token)| (name.clone(), token.clone())));
        variables.insert("messages".to_owned(), messages.into());
        variables.insert("add_generation_prompt".to_owned(), add_generation_prompt.into());
        variables.extend(extra.iter().map(|(name, value)| (name.clone(), value.clone())));
        let environment = Arc::clone(&self.environment);
        // The error is put into words on that thread too: dropping it may be deep.
        let rendered = apart::run(self.patience, move || {
            environment
                .get_template(NAME)
                .and_then(|template| template.render(Value::from(Serde(&variables))))
                .map_err(|error| refusal(&error).ok_or_else(|| error.to_string()))
        });
        let failed = |reason| TextError::TemplateRender { path: self.path.clone(), reason };
        match rendered {
            Ok(Ok(prompt)) => Ok(prompt),
            Ok(Err(Ok(message))) => Err(TextError::TemplateRefused { message }),
            Ok(Err(Err(reason))) => Err(failed(reason)),
            Err(apart::Failure::Late) => {
                Err(TextError::TemplateLate { path: self.path.clone(), seconds: self.patience.as_secs_f64() })
            }
            Err(apart::Failure::NoThread { source }) => Err(no_thread(&self.path, source)),
            Err(failure) => Err(failed(failure.to_string())),
        }
    }
}

/// Too little memory, which is no fault of the template.
fn no_thread(path: &Path, source: std::io::Error) -> TextError {
    TextError::TemplateThread { path: path.to_owned(), stack: apart::STACK_BYTES >> 20, source }
}

/// The template's words, where an error is its refusal and not its failure.
fn refusal(error: &minijinja::Error) -> Option<String> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(Refusal(message)) = current.downcast_ref() {
            return Some(message.clone());
        }
        cause = current.source();
    }
    None
}

/// The words a template gave to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

/// An environment that behaves as the one transformers renders chat templates with.
fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_debug(false);
    environment.set_fuel(Some(FUEL));
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|output, state, value| {
        output.write_str(&python::str(state, value)?).map_err(minijinja::Error::from)
    });
    // These write indented, which for deeply nested values costs the square of the depth and no fuel.
    environment.remove_filter("pprint");
    environment.remove_global("debug");
    environment.add_filter("string", |state: &minijinja::State, value: &Value| python::str(state, value));
    environment.add_filter("tojson", |state: &minijinja::State, value: &Value, options: Kwargs| {
        python::dumps(state, value, &options)
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refusal(message)))
    });
    environment.add_function("strftime_now", |format: String| {
        let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        date::strftime(elapsed.as_secs(), &format)
    });
    Ok(environment)
}

/// `chat_template` of a `tokenizer_config.json`; the error is a reason.
fn default_template(config: &serde_json::Value) -> Result<Option<&str>, String> {
    match config.get("chat_template") {
        None | Some(serde_json::Value::Null) => Ok(None),
        Some(serde_json::Value::String(source)) => Ok(Some(source)),
        Some(serde_json::Value::Array(list)) => {
            let default = list.iter().find(|entry| entry["name"] == "default");
            match default.and_then(|entry| entry["template"].as_str()) {
                Some(source) => Ok(Some(source)),
                None => Err("`chat_template` is a list without a template named `default`".to_owned()),
            }
        }
        Some(_) => Err("`chat_template` must be a text or a list of {name, template}".to_owned()),
    }
}

/// The special tokens by variable name: each a text, or an object with its text in `content`.
fn token_variables(config: &serde_json::Value) -> Map<String, serde_json::Value> {
    TOKEN_VARIABLES
        .iter()
        .filter_map(|name| {
            let token = config.get(name)?;
            let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
            Some(((*name).to_owned(), text.into()))
        })
        .collect()
}

/// Replaces `{% generation %}` blocks by blocks that do nothing. transformers marks the model's own
/// words with them for training; they add nothing to the text, and minijinja does not know them.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else {
            break;
        };
        let (tag, end) = (&rest[start + 2..start + length], start + length + 2);
        let word = tag.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let replacement = match word {
            "generation" => Some(tag.replace(word, "if true")),
            "endgeneration" => Some(tag.replace(word, "endif")),
            _ => None,
        };
        out.push_str(&rest[..start]);
        match replacement {
            Some(tag) => out.extend(["{%", &tag, "%}"]),
            None => out.push_str(&rest[start..end]),
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests;
