//! Models on disk: safetensors checkpoints, colibrì directories, the slab container; census, convert, synth.
