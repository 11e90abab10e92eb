//! The `metaltail` program.
fn main() {}
