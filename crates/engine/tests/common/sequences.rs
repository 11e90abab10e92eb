//! Several sequences on one engine, stepped together.
#![allow(dead_code, reason = "each test file uses its own part")]

use metaltail_engine::{Engine, EngineError};
use metaltail_model::{CancelFlag, KvCache, Phase, Row};

/// Sequences on one engine, each with its cache and what was fed to it so far.
pub struct Sequences<'e> {
    engine: &'e Engine,
    caches: Vec<KvCache>,
}

impl<'e> Sequences<'e> {
    pub fn new(engine: &'e Engine, count: usize) -> Self {
        let caches = (0..count).map(|_| KvCache::new(engine.plan())).collect();
        Sequences { engine, caches }
    }

    /// One step over the next ids of some sequences; bits of the hidden states of each of them.
    pub fn step(&mut self, pieces: &[(usize, &[u32])]) -> Vec<Vec<u32>> {
        self.try_step(pieces, &CancelFlag::new()).unwrap()
    }

    /// The same where it may fail. A single id counts as generated, several as a prompt.
    pub fn try_step(
        &mut self,
        pieces: &[(usize, &[u32])],
        cancel: &CancelFlag,
    ) -> Result<Vec<Vec<u32>>, EngineError> {
        let mut rows = Vec::new();
        for &(sequence, ids) in pieces {
            let first = self.caches[sequence].len();
            let phase = if ids.len() == 1 { Phase::Generation } else { Phase::Prompt };
            rows.extend(ids.iter().enumerate().map(|(i, &token)| Row {
                sequence,
                position: (first + i) as u32,
                token,
                phase,
            }));
        }
        let mut caches: Vec<&mut KvCache> = self.caches.iter_mut().collect();
        let hidden = self.engine.step(&rows, &mut caches, cancel)?;
        let bits: Vec<u32> = hidden.iter().map(|x| x.to_bits()).collect();
        let mut rest = &bits[..];
        let width = self.engine.plan().hidden;
        let bits = pieces
            .iter()
            .map(|(_, ids)| {
                let (own, others) = rest.split_at(ids.len() * width);
                rest = others;
                own.to_vec()
            })
            .collect();
        Ok(bits)
    }

    /// Positions that a sequence holds.
    pub fn len(&self, sequence: usize) -> usize {
        self.caches[sequence].len()
    }

    /// Forgets what a sequence holds from `len` on; how much it holds then.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> usize {
        self.caches[sequence].truncate(len)
    }
}
