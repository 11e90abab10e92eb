//! Synthetic models in temporary directories, and how to look at what was written.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use metaltail_container::synth::{Like, SynthFormat, SynthOptions, config, synth};
use metaltail_container::{Checkpoint, ExpertLayerSpec, Inventory, Part};
use tempfile::TempDir;

use crate::glm::inventory;

/// A model, its directory and what it must hold.
pub struct Model {
    pub dir: TempDir,
    pub inventory: Inventory,
}

impl Model {
    pub fn open(&self) -> Checkpoint {
        Checkpoint::open(self.dir.path()).unwrap()
    }
}

/// Writes a model with these options.
pub fn model(like: Like, options: &SynthOptions) -> Model {
    let config = config(like, None, None).unwrap();
    let inventory = inventory(&config);
    let dir = TempDir::new().unwrap();
    synth(dir.path(), &config, &inventory, options, &mut |_| ControlFlow::Continue(())).unwrap();
    Model { dir, inventory }
}

/// `tiny` with its usual options.
pub fn tiny(format: SynthFormat) -> Model {
    model(Like::Tiny, &SynthOptions::new(Like::Tiny, format))
}

/// Every file of a directory, except hidden ones, by name.
pub fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries
        .map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap()))
        .filter(|(name, _)| !name.starts_with('.'))
        .collect()
}

/// Weight and scale bytes of one matrix of an expert, read through its place.
pub fn part(checkpoint: &Checkpoint, layer: &ExpertLayerSpec, expert: u32, part: Part) -> (Vec<u8>, Vec<u8>) {
    let place = checkpoint.expert(layer, expert).unwrap();
    let found = &place.parts[part as usize];
    let read = |at: metaltail_container::RunOffset, len: usize| {
        let run = checkpoint.read_extent(place.runs[at.run as usize]).unwrap();
        run[at.offset as usize..][..len].to_vec()
    };
    let weights = read(found.weights, found.layout.weight_bytes());
    let scales = found.scales.map_or(Vec::new(), |at| read(at, found.layout.scale_bytes()));
    (weights, scales)
}
