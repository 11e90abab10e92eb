//! The last tokens' choices in all layers.

use std::collections::VecDeque;

use super::UsageIdentity;
use crate::policy::Share;
use crate::trace::{Selection, Trace, TraceLayer, TracePhase, TraceRow};

/// Tokens that a sample keeps at most.
pub const SAMPLE_TOKENS: usize = 256;

/// Of a step with more rows, as a prompt has, the last that a sample takes: one prompt must not push out
/// all that was generated before it.
pub const STEP_TOKENS: usize = 32;

/// Where a token chose fewer experts than it may.
pub(super) const NONE: u16 = u16::MAX;

/// Choices by token, oldest first: of every layer `top_k` experts, [`NONE`] for those that are missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    pub(super) top_k: usize,
    /// Values a token.
    pub(super) width: usize,
    pub(super) tokens: VecDeque<Box<[u16]>>,
}

impl Sample {
    pub(super) fn new(identity: &UsageIdentity) -> Sample {
        let top_k = identity.top_k as usize;
        Sample { top_k, width: top_k * identity.layers.len(), tokens: VecDeque::new() }
    }

    pub(super) fn push(&mut self, token: Box<[u16]>) {
        if self.tokens.len() == SAMPLE_TOKENS {
            self.tokens.pop_front();
        }
        self.tokens.push_back(token);
    }

    pub(super) fn extend(&mut self, newer: &Sample) {
        newer.tokens.iter().for_each(|token| self.push(token.clone()));
    }

    /// Every use of the tokens from `from` on, as (layer index, expert).
    pub(super) fn uses(&self, from: usize) -> impl Iterator<Item = (usize, u32)> + '_ {
        self.tokens.iter().skip(from).flat_map(move |token| {
            let layers = token.chunks(self.top_k.max(1)).enumerate();
            layers.flat_map(|(layer, chosen)| {
                chosen.iter().filter(|&&e| e != NONE).map(move |&e| (layer, u32::from(e)))
            })
        })
    }

    /// The sample as a trace, token by token; the tokens before `judged` are prefill, which warms a cache.
    /// Weights are not kept, so that all experts of a token weigh the same.
    pub(super) fn trace(&self, identity: &UsageIdentity, bytes: &[u64], judged: usize) -> Trace {
        let layers = identity.layers.iter().zip(bytes);
        let layers = layers.map(|(&(number, experts), &expert_bytes)| TraceLayer {
            number,
            expert_bytes,
            experts: experts as usize,
        });
        let mut trace = Trace { layers: layers.collect(), rows: Vec::new(), selections: Vec::new() };
        for (number, token) in self.tokens.iter().enumerate() {
            let phase = if number < judged { TracePhase::Prefill } else { TracePhase::Decode };
            for (layer, chosen) in (0u32..).zip(token.chunks(self.top_k.max(1))) {
                let start = trace.selections.len();
                let uses = chosen.iter().filter(|&&expert| expert != NONE);
                trace
                    .selections
                    .extend(uses.map(|&expert| Selection { expert: u32::from(expert), share: Share::EVEN }));
                // At most 256 tokens of 2^20 layers.
                let group = trace.rows.len() as u32;
                let selections = start..trace.selections.len();
                trace.rows.push(TraceRow { layer, phase, group, selections });
            }
        }
        trace
    }
}

/// Tokens of the step that is under way: layers come one after the other, each with all rows. A step that
/// was cut short leaves nothing.
#[derive(Clone, Debug, Default)]
pub(super) struct Staging {
    tokens: Vec<Box<[u16]>>,
    rows: usize,
    /// The layer that must come next.
    next: usize,
}

impl Staging {
    pub(super) fn record(&mut self, at: usize, experts: u32, rows: &[Vec<(u32, f32)>], sample: &mut Sample) {
        if at == 0 {
            let taken = rows.len().min(STEP_TOKENS);
            self.tokens.clear();
            self.tokens.resize(taken, vec![NONE; sample.width].into_boxed_slice());
            (self.rows, self.next) = (rows.len(), 0);
        }
        if at != self.next || rows.len() != self.rows {
            self.tokens.clear();
            self.next = usize::MAX;
            return;
        }
        let skipped = rows.len() - self.tokens.len();
        for (token, row) in self.tokens.iter_mut().zip(&rows[skipped..]) {
            let places = &mut token[at * sample.top_k..(at + 1) * sample.top_k];
            for (place, &(expert, _)) in places.iter_mut().zip(row) {
                *place = u16::try_from(expert).ok().filter(|_| expert < experts).unwrap_or(NONE);
            }
        }
        self.next += 1;
        if self.next * sample.top_k == sample.width {
            self.tokens.drain(..).for_each(|token| sample.push(token));
            self.next = usize::MAX;
        }
    }
}
