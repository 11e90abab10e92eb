//! Experts of a layer in one tensor, outputs before inputs, as Qwen's newer checkpoints have them.

#[path = "support/reading.rs"]
mod reading;

use metaltail_container::{Checkpoint, Error, ExpertLayerSpec, Part};
use reading::{EXPERTS, HIDDEN, Shard, WIDTH};
use tempfile::TempDir;

/// Numbers that tell where they lie: bf16 of their place, modulo what bf16 holds exactly.
fn numbers(count: usize, seed: usize) -> Vec<u8> {
    (0..count).flat_map(|i| half::bf16::from_f32(((i * 7 + seed) % 251) as f32).to_le_bytes()).collect()
}

fn stacked(name: &str, shape: &[usize], shard: &mut Shard) -> Vec<u8> {
    let bytes = numbers(shape.iter().product(), name.len());
    shard.tensor(&format!("model.layers.1.mlp.experts.{name}"), "BF16", shape, bytes.clone());
    bytes
}

/// A directory with the two tensors alone, and their bytes.
fn directory(gate_up: &[usize], down: &[usize]) -> (TempDir, Vec<u8>, Vec<u8>) {
    let mut shard = Shard::default();
    let tensors = (stacked("gate_up_proj", gate_up, &mut shard), stacked("down_proj", down, &mut shard));
    (reading::model_dir(&shard), tensors.0, tensors.1)
}

const GATE_UP: [usize; 3] = [EXPERTS as usize, 2 * WIDTH, HIDDEN];
const DOWN: [usize; 3] = [EXPERTS as usize, HIDDEN, WIDTH];

fn layer() -> ExpertLayerSpec {
    reading::inventory(1, false).experts.remove(0)
}

#[test]
fn each_matrix_is_its_slice() {
    let (dir, gate_up, down) = directory(&GATE_UP, &DOWN);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let layer = layer();
    let matrix = 2 * WIDTH * HIDDEN;
    for expert in 0..EXPERTS {
        let place = checkpoint.expert(&layer, expert).unwrap();
        assert_eq!(place.runs.len(), 2, "gate and up are read as one");
        let e = expert as usize;
        for (part, wanted) in [
            (Part::Gate, &gate_up[2 * e * matrix..(2 * e + 1) * matrix]),
            (Part::Up, &gate_up[(2 * e + 1) * matrix..(2 * e + 2) * matrix]),
            (Part::Down, &down[e * matrix..(e + 1) * matrix]),
        ] {
            let at = place.parts[part as usize].weights;
            let run = checkpoint.read_extent(place.runs[at.run as usize]).unwrap();
            let start = at.offset as usize;
            assert!(run[start..start + matrix] == *wanted, "expert {expert}, {part:?}");
            assert!(checkpoint.has(&layer.name(expert, part)));
        }
    }
}

#[test]
fn other_shapes_and_experts_that_are_not_there_are_refused() {
    let layer = layer();
    let refused = |gate_up: &[usize], down: &[usize], expert: u32| {
        let (dir, ..) = directory(gate_up, down);
        Checkpoint::open(dir.path()).unwrap().expert(&layer, expert).unwrap_err()
    };
    // Inputs before outputs is another form.
    let swapped = [EXPERTS as usize, HIDDEN, 2 * WIDTH + 2];
    assert!(matches!(refused(&swapped, &DOWN, 0), Error::Shape { .. }));
    assert!(matches!(refused(&GATE_UP, &[DOWN[0], DOWN[1], DOWN[2] / 2], 0), Error::Shape { .. }));
    let few = refused(&[2, GATE_UP[1], GATE_UP[2]], &DOWN, 2);
    assert!(matches!(few, Error::MissingTensor { .. }), "{few}");
    let flat = refused(&[GATE_UP[0] * GATE_UP[1], GATE_UP[2]], &DOWN, 0);
    assert!(matches!(flat, Error::MissingTensor { .. }), "{flat}");
}
