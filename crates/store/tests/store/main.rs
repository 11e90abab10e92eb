//! What the expert store promises to the engine, through its public face.

mod chunks;
mod direct;
mod faults;
mod fetching;
mod rig;
