//! One timeline: ids computed so far, and generation from there.

use metaltail_model::{CancelFlag, KvCache, ModelError, Phase as RowPhase, Row};
use serde::Serialize;

use crate::engine::Engine;
use crate::error::EngineError;
use crate::sampler::{Sampler, Sampling};
use crate::telemetry::Phase;

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// A stop id or a stop string.
    Stop,
    /// As many tokens as asked for, or the context is full.
    Length,
    /// Asked to end.
    Cancelled,
}

/// What to generate.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// How to choose a token.
    pub sampling: Sampling,
    /// Tokens at most; up to the end of the context where absent.
    pub max_tokens: Option<usize>,
    /// Ids that end generation.
    pub stop_ids: Vec<u32>,
}

/// What was generated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generation {
    /// Generated ids, a stop id included.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
}

/// Whether to go on after a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Go on.
    Continue,
    /// A stop string was found: end with [`Finish::Stop`].
    Stop,
}

/// Takes the position of a chunk's first row and its hidden states, rows × hidden.
pub type EachChunk<'a> = &'a mut dyn FnMut(usize, &[f32]) -> Result<(), EngineError>;

/// One sequence on an engine.
pub struct Session<'e> {
    engine: &'e Engine,
    kv: KvCache,
    ids: Vec<u32>,
}

impl<'e> Session<'e> {
    /// An empty session.
    pub fn new(engine: &'e Engine) -> Self {
        Session { engine, kv: KvCache::new(engine.plan()).with_most(engine.context()), ids: Vec::new() }
    }

    /// Ids whose rows are computed.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Keeps the longest common beginning with `ids` that can be had and forgets the rest; returns its
    /// length. A model with recurrent layers can go back to where its last prompt step began, or to nothing;
    /// what lies between is computed again by whoever extends the session.
    pub fn rewind_to(&mut self, ids: &[u32]) -> usize {
        let common = self.ids.iter().zip(ids).take_while(|(a, b)| a == b).count();
        let kept = self.kv.truncate(common);
        self.ids.truncate(kept);
        kept
    }

    /// Computes `ids` after what is there, in chunks, and hands the hidden states of each chunk
    /// (rows × hidden, after the final norm) to `each` with the position of its first row.
    ///
    /// # Errors
    /// A context that is too short, ids outside the vocabulary, failed reads, cancellation; the
    /// session then holds the chunks that were completed.
    pub fn extend(
        &mut self,
        ids: &[u32],
        cancel: &CancelFlag,
        each: EachChunk<'_>,
    ) -> Result<(), EngineError> {
        let (context, start) = (self.engine.context(), self.ids.len());
        if start + ids.len() > context {
            return Err(EngineError::PromptTooLong { prompt: start + ids.len(), context });
        }
        for chunk in ids.chunks(self.engine.prefill_chunk()) {
            let first = self.ids.len();
            let hidden = self.step(chunk, RowPhase::Prompt, cancel)?;
            each(first, &hidden)?;
        }
        Ok(())
    }

    /// One step over consecutive ids.
    fn step(&mut self, ids: &[u32], phase: RowPhase, cancel: &CancelFlag) -> Result<Vec<f32>, EngineError> {
        let first = self.ids.len();
        let rows: Vec<Row> = ids
            .iter()
            .enumerate()
            // The context, and so every position, is below 2^28.
            .map(|(i, &token)| Row { sequence: 0, position: (first + i) as u32, token, phase })
            .collect();
        let hidden = self.engine.step(&rows, &mut [&mut self.kv], cancel)?;
        self.ids.extend_from_slice(ids);
        Ok(hidden)
    }

    /// Continues `prompt` (which begins with what the session holds, or replaces its end), telling
    /// `each` every generated id.
    ///
    /// # Errors
    /// An empty or too long prompt, and all that [`Session::extend`] refuses. Cancellation is no
    /// error: it ends the generation with [`Finish::Cancelled`].
    pub fn generate(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        cancel: &CancelFlag,
        each: &mut dyn FnMut(u32) -> Flow,
    ) -> Result<Generation, EngineError> {
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let result = self.prefill_and_decode(prompt, options, cancel, each);
        self.engine.rest();
        result
    }

    fn prefill_and_decode(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        cancel: &CancelFlag,
        each: &mut dyn FnMut(u32) -> Flow,
    ) -> Result<Generation, EngineError> {
        let sampler =
            Sampler::new(options.sampling).map_err(|error| EngineError::Setting(error.to_string()))?;
        let last = match self.prefill(prompt, cancel) {
            Err(EngineError::Model(ModelError::Cancelled)) => {
                return Ok(Generation { ids: Vec::new(), finish: Finish::Cancelled });
            }
            other => other?,
        };
        self.engine.telemetry().begin(Phase::Decode);
        self.decode(last, sampler, options, cancel, each)
    }

    /// Computes what is missing of `prompt`, which is not empty; returns the last row's hidden state.
    fn prefill(&mut self, prompt: &[u32], cancel: &CancelFlag) -> Result<Vec<f32>, EngineError> {
        // The last row's logits are needed, so at least that row is computed again.
        self.rewind_to(&prompt[..prompt.len() - 1]);
        let width = self.engine.plan().hidden;
        let mut last = Vec::new();
        self.engine.telemetry().begin(Phase::Prefill);
        let todo = &prompt[self.ids.len()..];
        self.extend(todo, cancel, &mut |_, hidden| {
            last = hidden[hidden.len() - width..].to_vec();
            Ok(())
        })?;
        Ok(last)
    }

    /// Computes `prompt` and then, one by one, the ids that `next` gives for the logits after the row
    /// before, until it gives none: decoding where somebody else decides what comes, such as a
    /// measurement. Phases are told apart as in [`Session::generate`].
    ///
    /// # Errors
    /// As [`Session::extend`], and an empty prompt.
    pub fn follow(
        &mut self,
        prompt: &[u32],
        cancel: &CancelFlag,
        next: &mut dyn FnMut(&[f32]) -> Option<u32>,
    ) -> Result<(), EngineError> {
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let result = self.prefill(prompt, cancel).and_then(|mut hidden| {
            self.engine.telemetry().begin(Phase::Decode);
            while let Some(id) = next(&self.engine.logits(&hidden)?) {
                let context = self.engine.context();
                if self.ids.len() == context {
                    return Err(EngineError::PromptTooLong { prompt: context + 1, context });
                }
                hidden = self.step(&[id], RowPhase::Generation, cancel)?;
            }
            Ok(())
        });
        self.engine.rest();
        result
    }

    fn decode(
        &mut self,
        mut hidden: Vec<f32>,
        mut sampler: Sampler,
        options: &GenerateOptions,
        cancel: &CancelFlag,
        each: &mut dyn FnMut(u32) -> Flow,
    ) -> Result<Generation, EngineError> {
        let limit = options.max_tokens.unwrap_or(usize::MAX);
        let mut ids = Vec::new();
        while ids.len() < limit {
            if cancel.is_cancelled() {
                return Ok(Generation { ids, finish: Finish::Cancelled });
            }
            let id = sampler.sample(&self.engine.logits(&hidden)?);
            ids.push(id);
            if options.stop_ids.contains(&id) || each(id) == Flow::Stop {
                return Ok(Generation { ids, finish: Finish::Stop });
            }
            if ids.len() == limit || self.ids.len() == self.engine.context() {
                break;
            }
            hidden = match self.step(&[id], RowPhase::Generation, cancel) {
                Err(EngineError::Model(ModelError::Cancelled)) => {
                    return Ok(Generation { ids, finish: Finish::Cancelled });
                }
                other => other?,
            };
        }
        Ok(Generation { ids, finish: Finish::Length })
    }
}
