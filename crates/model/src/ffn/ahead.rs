//! What the next sparse layer will probably choose, told to the store before it is asked for.
//!
//! The next layer's router is run on states that are not yet those it will see: the residual stream before
//! this layer's experts were added, or after it, but without the next layer's attention. Both are guesses;
//! they move bytes and never results.

use metaltail_store::ExpertStore;

use crate::observer::{ModelEvent, ModelObserver};

/// What a guess is made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Predictor {
    /// The next router on the states that this layer's experts are computed from.
    BeforeExperts,
    /// The next router on this layer's output.
    LayerOutput,
}

/// Most rows of a step for which guesses are made: more rows use so many experts that the drive has no rest.
const MOST_ROWS: usize = 8;

/// Whether guesses are made in a step, and those that wait to be compared.
#[derive(Debug, Default)]
pub struct Foresight {
    on: bool,
    measure: bool,
    waiting: Vec<Guess>,
}

#[derive(Debug)]
struct Guess {
    layer: u32,
    predictor: Predictor,
    experts: Vec<u32>,
}

impl Foresight {
    /// Nothing is guessed.
    pub fn off() -> Foresight {
        Foresight::default()
    }

    /// The store is told what is expected.
    pub fn on() -> Foresight {
        Foresight { on: true, ..Foresight::default() }
    }

    /// Guesses are made by every predictor and compared, and nothing is loaded for them.
    pub fn measure() -> Foresight {
        Foresight { measure: true, ..Foresight::default() }
    }

    /// Whether a guess is of use now.
    pub(crate) fn wants(&self, rows: usize) -> bool {
        (self.on || self.measure) && rows <= MOST_ROWS
    }

    /// Whether guesses are only compared.
    pub(crate) fn measures(&self) -> bool {
        self.measure
    }

    /// Takes a guess: the store hears of it, and it waits for what will be chosen.
    pub(crate) fn expect(
        &mut self,
        store: &ExpertStore,
        layer: u32,
        predictor: Predictor,
        experts: Vec<u32>,
    ) {
        if self.on {
            // A layer without experts in the store has none to load ahead.
            let _ = store.expect(layer, &experts);
            self.waiting.retain(|guess| guess.layer != layer);
        }
        self.waiting.push(Guess { layer, predictor, experts });
    }

    /// Compares the guesses for a layer with what it chose.
    pub(crate) fn compare(&mut self, layer: u32, chosen: &[u32], observer: &dyn ModelObserver) {
        self.waiting.retain(|guess| {
            if guess.layer != layer {
                return true;
            }
            let right = guess.experts.iter().filter(|expert| chosen.binary_search(expert).is_ok()).count();
            let (predictor, expected, chosen) = (guess.predictor, guess.experts.len(), chosen.len());
            observer.on_model(&ModelEvent::Foreseen { layer, predictor, expected, chosen, right });
            false
        });
    }
}
