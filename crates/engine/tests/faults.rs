//! Damaged weights, failing drives, budgets that cannot be met: an error with its numbers, and an
//! engine that goes on.

mod common;
#[path = "common/synthetic.rs"]
mod synthetic;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use metaltail_container::Extent;
use metaltail_container::synth::{Like, SynthFormat};
use metaltail_engine::{EngineError, EngineOptions, Flow, GenerateOptions, Session, sampler::Sampling};
use metaltail_model::{CancelFlag, ModelError};
use metaltail_store::budget::term;
use metaltail_store::{BudgetError, Direct, StoreError};
use synthetic::{Router, Synthetic, random_ids, settings};

fn file_of(model: &Synthetic, extent: Extent) -> PathBuf {
    model.checkpoint().files()[extent.file as usize].clone()
}

fn writable(path: &PathBuf) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Overwrites rows `rows` of a layer's router with NaN.
fn break_router(model: &Synthetic, layer: u32, rows: std::ops::Range<usize>) {
    let name = format!("model.layers.{layer}.mlp.gate.weight");
    let spec = model.inventory.tensors.iter().find(|spec| spec.name == name).unwrap();
    let at = model.checkpoint().matrix(spec).unwrap().weights;
    assert_eq!(at.len, (spec.rows * spec.cols * 4) as u64, "the router is stored in f32");
    let row = (spec.cols * 4) as u64;
    let bytes = f32::NAN.to_le_bytes().repeat(spec.cols * rows.len());
    let file = writable(&file_of(model, at));
    file.write_all_at(&bytes, at.offset + row * rows.start as u64).unwrap();
}

/// T15. (With checksums on, a slab that was damaged like this is refused before it runs.)
#[test]
fn a_router_that_gives_no_numbers_is_survived_and_reported_once() {
    for rows in [3..4, 0..256] {
        let model = Synthetic::of(Like::Wide, SynthFormat::Slab);
        let sound = common::greedy(&model.open(&settings()), &random_ids(12, 256, 1), 6);
        break_router(&model, 2, rows.clone());
        let answer = |options: &EngineOptions| {
            let ear = Router::cancelling_at(0);
            let engine = model.open_heard(options, ear.clone());
            let ids = common::greedy(&engine, &random_ids(12, 256, 1), 6);
            let figures = engine.telemetry().figures();
            // Eight experts a row and layer are chosen and computed all the same.
            assert_eq!(figures.prefill.selections, 12 * 3 * 8);
            let notices = ear.notices();
            let about: Vec<_> = notices.iter().filter(|text| text.contains("router")).collect();
            assert_eq!(about.len(), 1, "{notices:?}");
            assert!(about[0].contains("layer 2"), "{notices:?}");
            ids
        };
        let unverified = EngineOptions { checksums: Some(false), ..settings() };
        let ids = answer(&unverified);
        assert_eq!(ids.len(), 6);
        assert!(ids.iter().all(|&id| id < 272));
        let other = EngineOptions { cap: Some(0), threads: Some(1), prefill_chunk: Some(1), ..unverified };
        assert_eq!(answer(&other), ids, "damage does not undo determinism");
        if rows.len() > 1 {
            assert_ne!(ids, sound, "without the layer's experts the answer is another");
        }
        let error = model.try_open(&settings()).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("mlp.gate.weight"), "{error}");
    }
}

#[test]
fn a_sound_router_is_not_reported() {
    let ear = Router::cancelling_at(0);
    let engine = Synthetic::of(Like::Wide, SynthFormat::Slab).open_heard(&settings(), ear.clone());
    common::greedy(&engine, &random_ids(12, 256, 1), 2);
    assert!(ear.notices().iter().all(|text| !text.contains("router")));
}

/// Asks for a generation; the store's error.
fn store_error(session: &mut Session<'_>, prompt: &[u32]) -> StoreError {
    let options = GenerateOptions { sampling: Sampling::GREEDY, max_tokens: Some(4), stop_ids: Vec::new() };
    let flag = CancelFlag::new();
    match session.generate(prompt, &options, &flag, &mut |_| Flow::Continue).unwrap_err() {
        EngineError::Model(ModelError::Store(error)) => error,
        other => panic!("not the store's: {other}"),
    }
}

fn ask(session: &mut Session<'_>, prompt: &[u32]) -> Vec<u32> {
    let options = GenerateOptions { sampling: Sampling::GREEDY, max_tokens: Some(4), stop_ids: Vec::new() };
    let flag = CancelFlag::new();
    session.generate(prompt, &options, &flag, &mut |_| Flow::Continue).unwrap().ids
}

fn buffered(cap: usize) -> EngineOptions {
    EngineOptions { direct: Direct::Off, cap: Some(cap), prefill_chunk: Some(4), ..settings() }
}

/// T54: an error says where, and a repaired file is read again.
#[test]
fn a_file_cut_short_under_way_is_named_and_its_repair_noticed() {
    let model = Synthetic::tiny();
    let prompt = random_ids(10, 256, 2);
    let wanted = common::greedy(&model.open(&buffered(0)), &prompt, 4);
    let first = model.runs(2, 0)[0];
    let path = file_of(&model, first);
    for cap in [0, 4] {
        let engine = model.open(&buffered(cap));
        let mut session = Session::new(&engine);
        let whole = fs::read(&path).unwrap();
        writable(&path).set_len(first.offset).unwrap();
        let error = store_error(&mut session, &prompt);
        let text = error.to_string();
        let StoreError::EndOfFile { layer: 2, expert, file, offset, wanted: bytes, got: 0 } = error else {
            panic!("{text}");
        };
        assert_eq!(file, path);
        let run = model_run(&whole, &path, &model, expert);
        assert_eq!((offset, bytes), (run.offset, run.len));
        for part in [format!("expert {expert} of layer 2"), offset.to_string(), bytes.to_string()] {
            assert!(text.contains(&part), "{text} lacks {part}");
        }
        assert!(text.contains(path.to_str().unwrap()), "{text}");
        assert!(session.ids().is_empty(), "a failed step adds nothing");
        assert_eq!(ask(&mut session, &prompt), wanted);
    }
}

/// Repairs the file and finds the run of an expert of layer 2 in it.
fn model_run(whole: &[u8], path: &PathBuf, model: &Synthetic, expert: u32) -> Extent {
    let file = writable(path);
    file.set_len(whole.len() as u64).unwrap();
    file.write_all_at(whole, 0).unwrap();
    model.runs(2, expert)[0]
}

/// A file that is written over in place while it is in use, after its checksums were verified: told at the end of
/// the answer in which it happened, and by the expert's name in the next.
#[test]
fn weights_that_change_under_way_are_told_and_verified_anew() {
    let model = Synthetic::tiny();
    let prompt = random_ids(10, 256, 3);
    let path = file_of(&model, model.runs(3, 0)[0]);
    let engine = model.open(&buffered(0));
    let notices = || engine.telemetry().figures().notices;
    let named = |text: &String| text.contains(path.to_str().unwrap()) && text.contains("written to");
    ask(&mut Session::new(&engine), &prompt);
    assert!(!notices().iter().any(named), "{:?}", notices());
    let file = writable(&path);
    for expert in 0..8 {
        let at = model.runs(3, expert)[0].offset + 1000;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    }
    // Whether it ends well depends on when the change is seen; that it happened is told either way.
    let options = GenerateOptions { sampling: Sampling::GREEDY, max_tokens: Some(4), stop_ids: Vec::new() };
    let mut session = Session::new(&engine);
    let _ = session.generate(&prompt, &options, &CancelFlag::new(), &mut |_| Flow::Continue);
    assert!(notices().iter().any(named), "{:?}", notices());
    let error = store_error(&mut Session::new(&engine), &prompt);
    assert!(matches!(error, StoreError::Checksum { layer: 3, .. }), "{error}");
}

#[test]
fn a_flipped_bit_is_named_and_its_repair_noticed() {
    let model = Synthetic::tiny();
    let prompt = random_ids(10, 256, 3);
    let wanted = common::greedy(&model.open(&buffered(0)), &prompt, 4);
    let path = file_of(&model, model.runs(3, 0)[0]);
    let whole = fs::read(&path).unwrap();
    let mut damaged = whole.clone();
    for expert in 0..8 {
        damaged[model.runs(3, expert)[0].offset as usize + 1000] ^= 0x10;
    }
    let engine = model.open(&buffered(4));
    let mut session = Session::new(&engine);
    writable(&path).write_all_at(&damaged, 0).unwrap();
    let error = store_error(&mut session, &prompt);
    let text = error.to_string();
    let StoreError::Checksum { layer: 3, expert, file, offset, wanted: sum, got } = error else {
        panic!("{text}");
    };
    assert_eq!((&file, offset), (&path, model.runs(3, expert)[0].offset));
    assert_ne!(sum, got);
    for part in [format!("expert {expert} of layer 3"), offset.to_string(), format!("{got:016x}")] {
        assert!(text.contains(&part), "{text} lacks {part}");
    }
    // The damage stays an error: nothing of it was kept.
    store_error(&mut session, &prompt);
    writable(&path).write_all_at(&whole, 0).unwrap();
    assert_eq!(ask(&mut session, &prompt), wanted);
}

#[test]
fn a_drive_that_fails_in_decode_leaves_the_session_as_it_was() {
    let model = Synthetic::tiny();
    let prompt = random_ids(10, 256, 4);
    let engine = model.open(&buffered(0));
    let wanted = common::greedy(&engine, &prompt, 4);
    let mut session = Session::new(&engine);
    let path = file_of(&model, model.runs(1, 0)[0]);
    let whole = fs::read(&path).unwrap();
    let options = GenerateOptions { sampling: Sampling::GREEDY, max_tokens: Some(4), stop_ids: Vec::new() };
    let mut told = Vec::new();
    let result = session.generate(&prompt, &options, &CancelFlag::new(), &mut |id| {
        told.push(id);
        if told.len() == 2 {
            writable(&path).set_len(4096).unwrap();
        }
        Flow::Continue
    });
    assert!(matches!(
        result,
        Err(EngineError::Model(ModelError::Store(StoreError::EndOfFile { layer: 1, .. })))
    ));
    assert_eq!(told, wanted[..2]);
    assert_eq!(session.ids(), [&prompt[..], &wanted[..1]].concat());
    let file = writable(&path);
    file.set_len(whole.len() as u64).unwrap();
    file.write_all_at(&whole, 0).unwrap();
    assert_eq!(ask(&mut session, &prompt), wanted);
}

#[test]
fn a_file_cut_short_before_opening_is_refused() {
    let model = Synthetic::tiny();
    let path = file_of(&model, model.runs(2, 0)[0]);
    let len = fs::metadata(&path).unwrap().len();
    writable(&path).set_len(len - 4096).unwrap();
    let error = model.try_open(&settings()).map(|_| ()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(path.file_name().unwrap().to_str().unwrap()), "{text}");
}

/// T35: refused with the arithmetic.
#[test]
fn a_budget_below_one_slot_is_refused_with_the_sum() {
    let model = Synthetic::tiny();
    let options = EngineOptions { ram: Some(1 << 20), cap: None, ..settings() };
    let error = model.try_open(&options).map(|_| ()).unwrap_err();
    let text = error.to_string();
    let EngineError::Budget(BudgetError::TooSmall { slot, budget }) = error else {
        panic!("{text}");
    };
    assert!(slot >= model.expert_bytes(1));
    assert_eq!(budget.limit, 1 << 20);
    assert!(budget.total() > budget.limit);
    for name in [term::PROGRAM, term::DENSE, term::KV, term::SCRATCH, term::IN_FLIGHT] {
        assert!(budget.terms.iter().any(|term| term.name == name), "{name} is not charged");
        assert!(text.contains(name), "{text} lacks {name}");
    }
}

#[test]
fn a_cap_above_the_budget_is_refused_and_a_default_is_fitted() {
    let model = Synthetic::tiny();
    let bare = model.open(&EngineOptions { cap: Some(0), ..settings() });
    let sum = bare.budget().total();
    assert!(sum < bare.budget().limit);
    let context = Some(bare.resolved().context);
    let tight = |cap| EngineOptions { ram: Some(sum), cap, context, ..settings() };
    let error = model.try_open(&tight(Some(8))).map(|_| ()).unwrap_err();
    assert!(matches!(error, EngineError::Budget(BudgetError::DoesNotFit { setting: "cap", value: 8, .. })));
    let engine = model.open(&tight(Some(0)));
    assert_eq!((engine.resolved().cap, engine.resolved().ram), (0, sum));
    let fitted = model.open(&tight(None));
    assert!(fitted.budget().total() <= sum && fitted.resolved().cap < 8);
    let prompt = random_ids(10, 256, 5);
    assert_eq!(common::greedy(&fitted, &prompt, 3), common::greedy(&bare, &prompt, 3));
}

/// A default gives way to memory, with a notice; what was asked for does not.
#[test]
fn a_default_context_is_shortened_to_fit_and_an_explicit_one_refused() {
    let model = Synthetic::of(Like::Wide, SynthFormat::Slab);
    let usual = model.open(&settings());
    let terms = usual.budget().terms;
    let of = |name| terms.iter().find(|term| term.name == name).map_or(0, |term| term.bytes);
    let ram = Some(of(term::PROGRAM) + of(term::DENSE) + of(term::SCRATCH) + of(term::KV) / 2);
    let tight = EngineOptions { ram, cap: None, ..settings() };
    let engine = model.open(&tight);
    let (short, long) = (engine.context(), usual.context());
    assert!(short < long && short >= 512, "{short} of {long}");
    assert!(engine.telemetry().figures().notices.iter().any(|text| text.contains("context")));
    let explicit = EngineOptions { context: Some(long), ..tight };
    let error = model.try_open(&explicit).map(|_| ()).unwrap_err();
    assert!(matches!(error, EngineError::Budget(BudgetError::TooSmall { .. })), "{error}");
    assert!(error.to_string().contains("--context"), "{error}");
}

/// Nothing can be chosen by such logits: an error, never token 0 for ever.
#[test]
fn logits_that_are_not_numbers_end_the_request() {
    let model = Synthetic::of(Like::Tiny, SynthFormat::Hf);
    let spec = model.inventory.tensors.iter().find(|spec| spec.name == "lm_head.weight").unwrap();
    let at = model.checkpoint().matrix(spec).unwrap().weights;
    let nan = half_nan().repeat(spec.cols);
    writable(&file_of(&model, at)).write_all_at(&nan, at.offset + 7 * nan.len() as u64).unwrap();
    let engine = model.open(&settings());
    let options = GenerateOptions { sampling: Sampling::GREEDY, max_tokens: Some(3), stop_ids: Vec::new() };
    let mut session = Session::new(&engine);
    let prompt = random_ids(5, 256, 1);
    let error = session.generate(&prompt, &options, &CancelFlag::new(), &mut |_| Flow::Continue).unwrap_err();
    assert!(matches!(error, EngineError::NotFinite { id: 7, .. }), "{error}");
}

/// NaN as bfloat16.
fn half_nan() -> [u8; 2] {
    [0xc0, 0x7f]
}

#[test]
fn a_budget_above_the_machine_is_refused() {
    let model = Synthetic::tiny();
    let options = EngineOptions { ram: Some(1 << 60), ..settings() };
    let error = model.try_open(&options).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("kv"), "{error}");
    let EngineError::Limit { refusal, .. } = error else { panic!("{error}") };
    assert!(matches!(*refusal, BudgetError::AboveMachine { .. } | BudgetError::AboveCgroup { .. }));
}
