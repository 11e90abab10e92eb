//! How many of the experts that a token used could have been known before.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use metaltail_engine::telemetry::{Event, Listener};
use metaltail_model::{ModelEvent, Predictor, Selected};
use serde_json::{Value, json};

/// How experts are guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    /// What the layer chose for the token before.
    LastToken,
    /// The layer's router, before the experts of the layer below were added.
    BeforeExperts,
    /// The layer's router on the output of the layer below.
    LayerOutput,
}

impl Way {
    fn key(self) -> &'static str {
        match self {
            Way::LastToken => "last_token",
            Way::BeforeExperts => "before_experts",
            Way::LayerOutput => "layer_output",
        }
    }
}

impl From<Predictor> for Way {
    fn from(predictor: Predictor) -> Way {
        match predictor {
            Predictor::BeforeExperts => Way::BeforeExperts,
            Predictor::LayerOutput => Way::LayerOutput,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Score {
    expected: u64,
    chosen: u64,
    right: u64,
}

impl Score {
    fn add(&mut self, more: Score) {
        self.expected += more.expected;
        self.chosen += more.chosen;
        self.right += more.right;
    }
}

/// Compares guesses with choices, in steps of one row.
#[derive(Default)]
pub struct Recall(Mutex<State>);

#[derive(Default)]
struct State {
    /// By layer, what the last row chose.
    last: BTreeMap<u32, Vec<u32>>,
    step: Vec<(Way, Score)>,
    scores: BTreeMap<Way, Score>,
}

impl Recall {
    /// Forgets what the last row chose: another sequence begins.
    pub fn begin_sequence(&self) {
        self.with(|state| state.last.clear());
    }

    /// By way: the share of chosen experts that had been guessed, and of guesses that were right.
    pub fn to_json(&self) -> Value {
        self.with(|state| {
            let ratio = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
            let object = state.scores.iter().map(|(way, score)| {
                let (recall, precision) =
                    (ratio(score.right, score.chosen), ratio(score.right, score.expected));
                (
                    way.key().to_owned(),
                    json!({"recall": recall, "precision": precision, "chosen": score.chosen}),
                )
            });
            Value::Object(object.collect())
        })
    }

    /// The same in words; empty where no token was computed alone.
    pub fn to_words(&self) -> String {
        self.with(|state| {
            let share = |score: &Score| 100.0 * score.right as f64 / score.chosen.max(1) as f64;
            let line = |(way, score): (&Way, &Score)| {
                format!("{} {:.1} %", way.key().replace('_', " "), share(score))
            };
            let lines: Vec<String> = state.scores.iter().map(line).collect();
            match lines.is_empty() {
                true => String::new(),
                false => format!("of the experts of one token known before: {}\n", lines.join(", ")),
            }
        })
    }

    fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Listener for Recall {
    fn on_event(&self, event: &Event<'_>) {
        match event {
            Event::Selected(selected) => self.with(|state| state.choose(selected)),
            Event::Model(ModelEvent::Foreseen { predictor, expected, chosen, right, .. }) => {
                let score =
                    Score { expected: *expected as u64, chosen: *chosen as u64, right: *right as u64 };
                self.with(|state| state.step.push(((*predictor).into(), score)));
            }
            Event::Step { rows, .. } => self.with(|state| state.end_step(*rows)),
            _ => {}
        }
    }
}

impl State {
    fn choose(&mut self, selected: &Selected<'_>) {
        let Some(row) = selected.rows.last() else { return };
        let chosen: Vec<u32> = row.iter().map(|&(expert, _)| expert).collect();
        let count = chosen.len() as u64;
        if let Some(last) = self.last.insert(selected.layer, chosen.clone()) {
            let right = chosen.iter().filter(|expert| last.contains(expert)).count() as u64;
            self.step.push((Way::LastToken, Score { expected: last.len() as u64, chosen: count, right }));
        }
    }

    fn end_step(&mut self, rows: usize) {
        for (way, score) in self.step.drain(..).filter(|_| rows == 1) {
            self.scores.entry(way).or_default().add(score);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use metaltail_engine::telemetry::Phase;

    use super::*;

    #[test]
    fn guesses_count_in_steps_of_one_row_and_a_new_sequence_has_no_token_before() {
        let recall = Recall::default();
        let choose = |experts: &[u32]| {
            let rows = [experts.iter().map(|&expert| (expert, 0.5)).collect()];
            recall.on_event(&Event::Selected(&Selected { layer: 3, rows: &rows }));
        };
        let step = |rows| recall.on_event(&Event::Step { phase: Phase::Decode, rows, took: Duration::ZERO });
        let foreseen = |right| {
            let predictor = Predictor::LayerOutput;
            let event = ModelEvent::Foreseen { layer: 3, predictor, expected: 2, chosen: 2, right };
            recall.on_event(&Event::Model(&event));
        };
        choose(&[1, 2]);
        foreseen(0);
        step(4);
        choose(&[2, 5]);
        foreseen(1);
        step(1);
        choose(&[5, 2]);
        foreseen(2);
        step(1);
        recall.begin_sequence();
        choose(&[5, 2]);
        step(1);
        let seen = recall.to_json();
        assert_eq!(seen["last_token"], json!({"recall": 0.75, "precision": 0.75, "chosen": 4}));
        assert_eq!(seen["layer_output"], json!({"recall": 0.75, "precision": 0.75, "chosen": 4}));
        assert!(
            recall.to_words().contains("last token 75.0 %, layer output 75.0 %"),
            "{}",
            recall.to_words()
        );
    }
}
