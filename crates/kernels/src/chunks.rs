//! One buffer filled by several threads, a chunk each.

use crate::Pool;

/// The start of a buffer that tasks write disjoint chunks of.
struct Start<T>(*mut T);

// SAFETY: stands for a `&mut [T]` with `T: Send`; tasks take disjoint chunks of it.
unsafe impl<T: Send> Sync for Start<T> {}

impl<T> Start<T> {
    fn get(&self) -> *mut T {
        self.0
    }
}

impl Pool {
    /// Runs `f(i, chunk)` for every chunk of `chunk_len` elements of `data` (the last may be
    /// shorter), each on one of the pool's threads.
    ///
    /// # Panics
    /// If `chunk_len` is 0; with the first panic of `f`, as [`Pool::run`].
    ///
    /// ```
    /// let mut squares = [0u64; 5];
    /// let pool = metaltail_kernels::Pool::new(2);
    /// pool.for_each_chunk(&mut squares, 2, &|i, chunk| {
    ///     for (j, square) in chunk.iter_mut().enumerate() {
    ///         *square = ((2 * i + j) * (2 * i + j)) as u64;
    ///     }
    /// });
    /// assert_eq!(squares, [0, 1, 4, 9, 16]);
    /// ```
    pub fn for_each_chunk<T: Send>(
        &self,
        data: &mut [T],
        chunk_len: usize,
        f: &(dyn Fn(usize, &mut [T]) + Sync),
    ) {
        assert!(chunk_len > 0, "chunks of no elements");
        let len = data.len();
        let start = Start(data.as_mut_ptr());
        self.run(len.div_ceil(chunk_len), &|i| {
            let from = i * chunk_len;
            let count = chunk_len.min(len - from);
            // SAFETY: from + count <= len, so the chunk lies in `data`, which is borrowed for the
            // whole call; each i is run once and chunks of different i do not overlap.
            let chunk = unsafe { std::slice::from_raw_parts_mut(start.get().add(from), count) };
            f(i, chunk);
        });
    }
}
