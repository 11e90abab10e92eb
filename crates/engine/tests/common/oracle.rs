//! A model held against the outputs of an independent implementation.

use std::path::Path;

use metaltail_engine::score;
use metaltail_model::{CancelFlag, MlaForm};

use crate::common::{assert_greedy, exact, floats, greedy, ids, json, open_form};

/// Holds a model against an oracle (a file in the form of `fixtures/oracles/*/oracle.json`): argmax where that is sure, logits within 5e-4, NLL, greedy ids.
pub fn agrees(model: &Path, oracle: &Path, form: MlaForm) {
    let (family, oracle) = (model.display(), json(oracle));
    let engine = open_form(model, &exact(), form);
    let prompt = ids(&oracle["prompt"]);
    let positions: Vec<usize> =
        oracle["logits"].as_object().unwrap().keys().map(|key| key.parse().unwrap()).collect();
    let score = score(&engine, &[prompt], &positions, &CancelFlag::new(), &mut |_| {}).unwrap();

    let margins = floats(&oracle["margin"]);
    let wanted = ids(&oracle["argmax"]);
    assert_eq!(score.argmax[0].len(), wanted.len());
    for (i, margin) in margins.iter().enumerate() {
        if *margin > 1e-3 {
            assert_eq!(score.argmax[0][i], wanted[i], "{family}: position {i}, margin {margin}");
        }
    }
    let mut worst = 0.0f32;
    for (position, row) in &score.logits {
        let wanted = floats(&oracle["logits"][position.to_string()]);
        assert_eq!(row.len(), wanted.len());
        for (a, b) in row.iter().zip(&wanted) {
            worst = worst.max((a - b).abs());
        }
    }
    assert!(worst < 5e-4, "{family}: logits differ by {worst}");
    let nll = oracle["nll"].as_f64().unwrap();
    assert!((score.nll.unwrap() - nll).abs() < 1e-4, "{family}: NLL {:?}, oracle {nll}", score.nll);

    let continuation = &oracle["greedy"];
    let wanted = ids(&continuation["ids"]);
    let found = greedy(&engine, &ids(&continuation["prompt"]), wanted.len());
    assert_greedy(&found, &wanted, &floats(&continuation["margin"]), 1e-3, &family.to_string());
}
