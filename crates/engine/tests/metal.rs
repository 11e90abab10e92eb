//! The Metal kernels in their place: with the feature `msl-cpu` on the processor, on a Mac on its GPU. Their sums have
//! another order than the processor's, so ids agree as far as one leads by more than a rounding.
#![cfg(any(feature = "msl-cpu", target_os = "macos"))]

mod common;
#[path = "common/synthetic.rs"]
mod synthetic;

use metaltail_container::synth::{Like, SynthFormat};
use metaltail_engine::{
    DeviceKind, DeviceOptions, Engine, EngineError, EngineOptions, ResidencyMode, Session, SlabAllocation,
};
use metaltail_model::CancelFlag;
use synthetic::{INDEX_TOPK, Synthetic, random_ids, settings};

const TOKENS: usize = 12;

/// The device of these tests.
fn metal(residency: ResidencyMode, slabs: SlabAllocation) -> DeviceOptions {
    #[cfg(feature = "msl-cpu")]
    let kind = DeviceKind::SimMetal;
    #[cfg(not(feature = "msl-cpu"))]
    let kind = DeviceKind::Metal;
    DeviceOptions { kind, residency, slabs, ..DeviceOptions::default() }
}

/// An engine on it; none on a Mac whose GPU cannot be used, such as some virtual ones.
fn open(model: &Synthetic, options: &EngineOptions) -> Option<Engine> {
    match model.try_open(options) {
        Err(EngineError::NoDevice { reason, .. }) => {
            println!("SKIPPED: {reason}");
            None
        }
        other => Some(other.unwrap()),
    }
}

/// Greedy ids, and by how much each led over the next.
fn ids_with_margins(engine: &Engine, prompt: &[u32]) -> (Vec<u32>, Vec<f32>) {
    let (mut ids, mut margins) = (Vec::new(), Vec::new());
    let mut session = Session::new(engine);
    let mut next = |logits: &[f32]| {
        let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        let others = logits.iter().enumerate().filter(|(id, _)| *id != best);
        let second = others.map(|(_, logit)| *logit).fold(f32::NEG_INFINITY, f32::max);
        ids.push(best as u32);
        margins.push(logits[best] - second);
        (ids.len() < TOKENS).then_some(best as u32)
    };
    session.follow(prompt, &CancelFlag::new(), &mut next).unwrap();
    (ids, margins)
}

#[test]
fn ids_are_those_of_the_processor() {
    let arms = [(SynthFormat::Slab, ResidencyMode::Set), (SynthFormat::Colibri, ResidencyMode::Walk)];
    for (format, residency) in arms {
        let model = Synthetic::of(Like::Tiny, format);
        let cpu = model.open(&EngineOptions { exact: true, ..settings() });
        let mut compared = 0;
        let device = metal(residency, SlabAllocation::Arena);
        let Some(metal) = open(&model, &EngineOptions { device, cap: Some(6), ..settings() }) else { return };
        for prompt in 0..2 {
            // Long enough that positions are chosen.
            let prompt = random_ids(INDEX_TOPK + 4, 256, prompt);
            let (wanted, margins) = ids_with_margins(&cpu, &prompt);
            let (found, _) = ids_with_margins(&metal, &prompt);
            common::assert_greedy(&found, &wanted, &margins, 1e-3, "Metal kernels");
            assert!(metal.device_figures().unwrap().experts > 0);
            assert!(metal.device_difference().unwrap().is_empty());
            compared += margins.iter().take_while(|margin| **margin >= 1e-3).count();
        }
        assert!(compared > TOKENS, "margins are too small to compare more than {compared} ids");
    }
}

/// Point 10 of `residency.md` on the kernels themselves: whatever moves the bytes and however memory is declared, every
/// logit has the same bits; so with a prompt in pieces.
#[test]
fn logits_have_the_same_bits_whatever_is_declared_cached_loaded_or_cut() {
    let model = Synthetic::tiny();
    let prompt = random_ids(INDEX_TOPK + 2, 256, 3);
    let mut wanted = None;
    let arms = [
        (ResidencyMode::Set, SlabAllocation::Arena, 6, 1, 512),
        (ResidencyMode::Walk, SlabAllocation::PerExpert, 1, 4, 7),
        (ResidencyMode::Set, SlabAllocation::PerExpert, 64, 2, 1),
    ];
    for (residency, slabs, cap, loaders, chunk) in arms {
        let options = EngineOptions {
            device: metal(residency, slabs),
            cap: Some(cap),
            loaders: Some(loaders),
            prefill_chunk: Some(chunk),
            ..settings()
        };
        let Some(engine) = open(&model, &options) else { return };
        let mut bits = Vec::new();
        let mut next = |logits: &[f32]| {
            bits.extend(logits.iter().map(|logit| logit.to_bits()));
            (bits.len() < 3 * logits.len()).then_some(bits.len() as u32 % 251)
        };
        Session::new(&engine).follow(&prompt, &CancelFlag::new(), &mut next).unwrap();
        match &wanted {
            None => wanted = Some(bits),
            Some(wanted) => assert!(bits == *wanted, "{residency:?} {slabs:?} cap {cap}, chunks of {chunk}"),
        }
    }
}

#[test]
fn the_demo_model_continues_as_the_oracle_says() {
    let device = |residency| metal(residency, SlabAllocation::Arena);
    if open(&Synthetic::tiny(), &EngineOptions { device: device(ResidencyMode::Set), ..settings() }).is_none()
    {
        return;
    }
    common::continues_as_the_oracle_says(device(ResidencyMode::Set), 6, (0..1, 24));
    // Shorter: what is declared in the other way is read by the same kernels.
    common::continues_as_the_oracle_says(device(ResidencyMode::Walk), 64, (4..5, 6));
}
