//! The order of locks, checked in debug builds.
//!
//! The slot table's lock is the last one that a thread takes, the bell's aside: loaders and fetches wait for it.
//! What may take long – a device's driver – asks [`assert_free`] first.

#[cfg(all(debug_assertions, not(shuttle)))]
mod held {
    use std::cell::Cell;

    thread_local! {
        static HELD: Cell<u32> = const { Cell::new(0) };
    }

    pub(super) fn add(step: i32) {
        HELD.with(|held| held.set(held.get().wrapping_add_signed(step)));
    }

    pub(super) fn count() -> u32 {
        HELD.with(Cell::get)
    }
}

/// That this thread holds the slot table's lock, from creation to drop.
pub(crate) struct Held(());

impl Held {
    pub(crate) fn new() -> Held {
        #[cfg(all(debug_assertions, not(shuttle)))]
        held::add(1);
        Held(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        #[cfg(all(debug_assertions, not(shuttle)))]
        held::add(-1);
    }
}

/// Says in debug builds whether this thread holds the slot table's lock, and is always false in others.
pub fn table_is_locked() -> bool {
    #[cfg(all(debug_assertions, not(shuttle)))]
    return held::count() > 0;
    #[cfg(not(all(debug_assertions, not(shuttle))))]
    return false;
}

/// Panics in debug builds where this thread holds the slot table's lock.
pub fn assert_free(doing: &str) {
    assert!(!table_is_locked(), "about to {doing} under the slot table's lock");
}
