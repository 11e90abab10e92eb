//! Experts of a layer that share tensors: what they give, and what is refused of them.

#[path = "support/reading.rs"]
mod support;

use std::ops::ControlFlow;
use std::path::Path;

use metaltail_container::convert::{ConvertOptions, Target, convert};
use metaltail_container::synth::{Like, SynthFormat, SynthOptions, synth};
use metaltail_container::{
    Checkpoint, Error, ExpertLayerSpec, Inventory, Part, StackedNames, inspect, verify,
};
use metaltail_quant::{Format, MatrixRef, dequantize};
use support::{EXPERTS, HIDDEN, Shard, WIDTH, hf_shard, inventory, model_dir, values};

const LAYERS: u32 = 2;

fn stacked() -> Inventory {
    let mut inventory = inventory(LAYERS, false);
    for layer in &mut inventory.experts {
        layer.stacked = Some(StackedNames { gate_up: "gate_up_proj", down: "down_proj" });
    }
    inventory
}

fn prefix(layer: u32) -> String {
    format!("model.layers.{layer}.mlp.experts.")
}

/// The checkpoint without its experts.
fn rest(inventory: &Inventory) -> Shard {
    let mut shard = hf_shard(inventory);
    shard.remove(|name| !name.contains(".experts."));
    shard
}

fn bf16(value: f32) -> [u8; 2] {
    ((value.to_bits() >> 16) as u16).to_le_bytes()
}

/// Numbers of one expert's matrix, of which bf16 loses nothing.
fn matrix(layer: &ExpertLayerSpec, expert: u32, part: Part) -> Vec<f32> {
    let (rows, cols) = layer.shape(part);
    values(&layer.name(expert, part), rows * cols)
}

/// Inputs before outputs, gate and up in turn.
fn transposed(inventory: &Inventory) -> Shard {
    let mut shard = rest(inventory);
    for layer in &inventory.experts {
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for expert in 0..EXPERTS {
            let [gate, up, last] = Part::ALL.map(|part| matrix(layer, expert, part));
            for input in 0..HIDDEN {
                for output in 0..WIDTH {
                    gate_up.extend(bf16(gate[output * HIDDEN + input]));
                    gate_up.extend(bf16(up[output * HIDDEN + input]));
                }
            }
            for input in 0..WIDTH {
                (0..HIDDEN).for_each(|output| down.extend(bf16(last[output * WIDTH + input])));
            }
        }
        let (e, prefix) = (EXPERTS as usize, prefix(layer.layer));
        shard.tensor(&format!("{prefix}gate_up_proj"), "BF16", &[e, HIDDEN, 2 * WIDTH], gate_up);
        shard.tensor(&format!("{prefix}down_proj"), "BF16", &[e, WIDTH, HIDDEN], down);
    }
    shard
}

/// The values of E2M1 codes.
const CODES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// A code and a scale for each element and block of a tensor, and the numbers that they are.
fn mx(name: &str, rows: usize, cols: usize) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let draw = values(name, rows * cols);
    let code = |at: usize| (draw[at] * 64.0 + 128.0) as u8 & 15;
    let scale = |block: usize| 120 + (draw[block * 32] * 64.0 + 128.0) as u8 % 12;
    let codes = (0..rows * cols / 2).map(|i| code(2 * i) | code(2 * i + 1) << 4).collect();
    let numbers = (0..rows * cols).map(|at| {
        let (code, scale) = (code(at), i32::from(scale(at / 32)) - 127);
        CODES[usize::from(code & 7)] * if code & 8 == 0 { 1.0 } else { -1.0 } * (scale as f32).exp2()
    });
    (codes, (0..rows * cols / 32).map(scale).collect(), numbers.collect())
}

fn published(inventory: &Inventory) -> Shard {
    let mut shard = rest(inventory);
    for layer in &inventory.experts {
        let prefix = prefix(layer.layer);
        for (name, rows, cols) in [("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)] {
            let (mut codes, mut scales) = (Vec::new(), Vec::new());
            for expert in 0..EXPERTS {
                let (c, s, _) = mx(&format!("{prefix}{expert}{name}"), rows, cols);
                codes.extend(c);
                scales.extend(s);
            }
            let (e, blocks) = (EXPERTS as usize, cols / 32);
            shard.tensor(&format!("{prefix}{name}_blocks"), "U8", &[e, rows, blocks, 16], codes);
            shard.tensor(&format!("{prefix}{name}_scales"), "U8", &[e, rows, blocks], scales);
        }
    }
    shard
}

/// Every second row, from the first or the second on.
fn every_second(numbers: &[f32], first: usize) -> Vec<f32> {
    numbers.chunks(HIDDEN).skip(first).step_by(2).flatten().copied().collect()
}

/// What gate, up and down of the published form are.
fn published_matrix(layer: &ExpertLayerSpec, expert: u32, part: Part) -> Vec<f32> {
    let numbers = |name: &str, rows, cols| mx(&format!("{}{expert}{name}", layer.prefix), rows, cols).2;
    match part {
        Part::Gate => every_second(&numbers("gate_up_proj", 2 * WIDTH, HIDDEN), 0),
        Part::Up => every_second(&numbers("gate_up_proj", 2 * WIDTH, HIDDEN), 1),
        Part::Down => numbers("down_proj", HIDDEN, WIDTH),
    }
}

/// An expert's matrices as kernels get them.
fn found(checkpoint: &Checkpoint, layer: &ExpertLayerSpec, expert: u32) -> [Vec<f32>; 3] {
    let place = checkpoint.expert(layer, expert).unwrap();
    let mut runs: Vec<Vec<u8>> = place.runs.iter().map(|&run| checkpoint.read_extent(run).unwrap()).collect();
    if let Some(repack) = &place.repack {
        let mut made = vec![0; repack.bytes() as usize];
        repack.apply(&runs.iter().map(Vec::as_slice).collect::<Vec<_>>(), &mut made).unwrap();
        runs = vec![made];
    }
    place.parts.map(|at| {
        let weights = &runs[at.weights.run as usize][at.weights.offset as usize..];
        let matrix = MatrixRef::new(at.layout, &weights[..at.layout.weight_bytes()], &[]).unwrap();
        let mut numbers = vec![0.0; at.layout.rows() * at.layout.cols()];
        dequantize(matrix, &mut numbers);
        numbers
    })
}

type Matrix = fn(&ExpertLayerSpec, u32, Part) -> Vec<f32>;

/// Both forms: the files, what their matrices are, tensors and reads an expert.
fn forms() -> [(Shard, Matrix, usize, usize); 2] {
    let inventory = stacked();
    [(transposed(&inventory), matrix, 2, 2), (published(&inventory), published_matrix, 4, 4)]
}

#[test]
fn both_forms_give_every_matrix_and_every_tensor_has_a_use() {
    let inventory = stacked();
    for (shard, wanted, tensors, reads) in forms() {
        let dir = model_dir(&shard);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        for layer in &inventory.experts {
            for expert in 0..layer.count {
                let found = found(&checkpoint, layer, expert);
                for part in Part::ALL {
                    assert_eq!(found[part as usize], wanted(layer, expert, part), "{expert} {part:?}");
                }
            }
        }
        let report = inspect(&checkpoint, &inventory).unwrap();
        assert_eq!(report.census.unused, 0);
        assert!(report.census.layers.iter().all(|layer| layer.runs == reads && !layer.checksummed));
        assert_eq!(shard.names().iter().filter(|name| name.contains(".experts.")).count(), 2 * tensors);
        let verified = verify(&checkpoint, &inventory, &mut |_| {}).unwrap();
        assert!(verified.damage.is_empty() && verified.experts == u64::from(LAYERS * EXPERTS));
    }
}

/// A container has each matrix by itself, with the bytes that the store makes: nothing is repacked any more.
#[test]
fn a_container_holds_what_the_repack_makes() {
    let inventory = stacked();
    for (shard, wanted, ..) in forms() {
        let dir = model_dir(&shard);
        let source = Checkpoint::open(dir.path()).unwrap();
        let keep = ConvertOptions { experts: Target::Keep, rest: Target::Keep, draft_experts: Target::Keep };
        let slab = dir.path().join("slab");
        convert(&source, &inventory, &slab, &keep, &mut |_| ControlFlow::Continue(())).unwrap();
        let container = Checkpoint::open(&slab).unwrap();
        container.check(&inventory).unwrap();
        for layer in &inventory.experts {
            for expert in 0..layer.count {
                let place = container.expert(layer, expert).unwrap();
                assert!(place.repack.is_none() && place.runs.len() == 1 && place.checksum.is_some());
                let stored = source.expert(layer, expert).unwrap().parts.map(|part| part.layout);
                assert_eq!(place.parts.map(|part| part.layout), stored);
                let found = found(&container, layer, expert);
                for part in Part::ALL {
                    assert_eq!(found[part as usize], wanted(layer, expert, part), "{expert} {part:?}");
                }
            }
        }
    }
}

/// A directory with a tensor a matrix is read as such, whatever the family stacks elsewhere.
#[test]
fn matrices_of_their_own_come_first() {
    let inventory = stacked();
    let dir = model_dir(&hf_shard(&inventory));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.check(&inventory).unwrap().unused, 0);
    assert!(checkpoint.expert(&inventory.experts[0], 0).unwrap().repack.is_none());
}

#[test]
fn absent_tensors_are_named() {
    let inventory = stacked();
    for (shard, ..) in forms() {
        for gone in shard.names().into_iter().filter(|name| name.contains("layers.2.mlp.experts.")) {
            let mut shard = shard.clone();
            shard.remove(|name| name != gone);
            let dir = model_dir(&shard);
            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            let error = checkpoint.check(&inventory).unwrap_err();
            assert!(matches!(error, Error::Incomplete(_)), "{error}");
            assert!(error.to_string().contains(&gone) && error.to_string().contains("lacks 1 of"), "{error}");
        }
    }
    // With neither form at all, the tensors of the plainer one are named.
    let dir = model_dir(&rest(&inventory));
    let error = Checkpoint::open(dir.path()).unwrap().check(&inventory).unwrap_err();
    assert!(error.to_string().contains("model.layers.1.mlp.experts.gate_up_proj,"), "{error}");
}

/// One tensor in place of another; the refusal.
fn replaced(shard: &Shard, name: &str, dtype: &str, shape: &[usize], bytes: usize) -> Error {
    let mut shard = shard.clone();
    shard.remove(|other| other != name);
    shard.tensor(name, dtype, shape, vec![0; bytes]);
    let dir = model_dir(&shard);
    refusal(dir.path())
}

fn refusal(dir: &Path) -> Error {
    Checkpoint::open(dir).unwrap().check(&stacked()).unwrap_err()
}

#[test]
fn other_shapes_and_types_are_refused_by_name() {
    let inventory = stacked();
    let (e, name) = (EXPERTS as usize, format!("{}gate_up_proj", prefix(1)));
    let plain = transposed(&inventory);
    let bytes = e * HIDDEN * 2 * WIDTH * 2;
    for shape in [
        &[e, 2 * WIDTH, HIDDEN + 1][..],
        &[e, HIDDEN, WIDTH],
        &[e * HIDDEN, 2 * WIDTH],
        &[e + 1, HIDDEN, 2 * WIDTH],
    ] {
        let bytes = shape.iter().product::<usize>() * 2;
        let error = replaced(&plain, &name, "BF16", shape, bytes);
        assert!(matches!(&error, Error::Shape { tensor, .. } if *tensor == name), "{error}");
    }
    let error = replaced(&plain, &name, "F8_E4M3", &[e, HIDDEN, 2 * WIDTH], bytes / 2);
    assert!(matches!(&error, Error::Dtype { tensor, .. } if *tensor == name), "{error}");

    let published = published(&inventory);
    let (blocks, scales) = (format!("{name}_blocks"), format!("{name}_scales"));
    let inputs = HIDDEN / 32;
    for shape in [&[e, 2 * WIDTH, inputs, 8][..], &[e, 2 * WIDTH, inputs * 16], &[e, WIDTH, inputs, 16]] {
        let error = replaced(&published, &blocks, "U8", shape, shape.iter().product());
        assert!(matches!(&error, Error::Shape { tensor, .. } if *tensor == blocks), "{error}");
    }
    let error = replaced(&published, &scales, "I8", &[e, 2 * WIDTH, inputs], e * 2 * WIDTH * inputs);
    assert!(matches!(&error, Error::Dtype { tensor, .. } if *tensor == scales), "{error}");
}

#[test]
fn widths_that_are_no_whole_blocks_are_refused() {
    let mut inventory = stacked();
    inventory.experts[0].width = WIDTH + 1;
    let dir = model_dir(&published(&stacked()));
    let error = Checkpoint::open(dir.path()).unwrap().check(&inventory).unwrap_err();
    assert!(matches!(error, Error::Layout { .. }), "{error}");
}

/// The forms of a synthetic model hold the same numbers, however a form stores experts.
#[test]
fn a_synthetic_checkpoint_stacks_what_its_container_has_apart() {
    let inventory = stacked();
    let dir = tempfile::tempdir().unwrap();
    let config = serde_json::json!({"model_type": "tiny"});
    let write = |format, name: &str| {
        let base = SynthOptions::new(Like::Tiny, format);
        let options = SynthOptions { experts: Format::Bf16, rest: Format::Bf16, shards: Some(1), ..base };
        let to = dir.path().join(name);
        let report = synth(&to, &config, &inventory, &options, &mut |_| ControlFlow::Continue(())).unwrap();
        let checkpoint = Checkpoint::open(&to).unwrap();
        assert_eq!(checkpoint.check(&inventory).unwrap().unused, 0);
        (checkpoint, report)
    };
    let ((hf, report), (slab, _)) = (write(SynthFormat::Hf, "hf"), write(SynthFormat::Slab, "slab"));
    let files: u64 = hf.files().iter().map(|file| std::fs::metadata(file).unwrap().len()).sum();
    assert_eq!(report.bytes, files);
    for layer in &inventory.experts {
        for expert in 0..layer.count {
            assert!(hf.expert(layer, expert).unwrap().repack.is_some());
            assert_eq!(found(&hf, layer, expert), found(&slab, layer, expert));
        }
    }
}
