//! The expert store: arenas, slots, leases, replacement, memory budget and loaders.
