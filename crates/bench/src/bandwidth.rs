//! What the memory gives: the ceiling of everything that reads weights once.

use std::hint::black_box;
use std::time::Instant;

use metaltail_kernels::Pool;

/// Bytes that one task reads.
const BLOCK: usize = 1 << 20;

/// A buffer larger than the caches, read in full by all threads of a pool.
pub struct Bandwidth {
    words: Vec<u64>,
}

impl Bandwidth {
    /// A buffer of `bytes` bytes, every page touched.
    pub fn new(bytes: usize) -> Self {
        Bandwidth { words: (0..bytes as u64 / 8).collect() }
    }

    /// Reads the buffer once with all threads and says how many bytes a second that was, in GB/s.
    pub fn measure(&self, pool: &Pool) -> f64 {
        let blocks = self.words.chunks(BLOCK / 8).collect::<Vec<_>>();
        let start = Instant::now();
        pool.run(blocks.len(), &|i| {
            black_box(sum(blocks[i]));
        });
        (self.words.len() * 8) as f64 / start.elapsed().as_secs_f64() / 1e9
    }
}

/// Adds four streams side by side, each in eight lanes: loads as wide as the machine has, and more
/// of them under way than one stream would keep.
fn sum(words: &[u64]) -> u64 {
    let (streams, rest) = words.split_at(words.len() / 32 * 32);
    let quarter = streams.len() / 4;
    let stream = |i: usize| streams[i * quarter..(i + 1) * quarter].chunks_exact(8);
    let mut lanes = [[0u64; 8]; 4];
    for (((a, b), c), d) in stream(0).zip(stream(1)).zip(stream(2)).zip(stream(3)) {
        for (lanes, chunk) in lanes.iter_mut().zip([a, b, c, d]) {
            for (lane, word) in lanes.iter_mut().zip(chunk) {
                *lane = lane.wrapping_add(*word);
            }
        }
    }
    lanes.iter().flatten().chain(rest).fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read() {
        let bandwidth = Bandwidth::new(BLOCK * 3);
        assert_eq!(bandwidth.words.chunks(BLOCK / 8).map(sum).sum::<u64>(), {
            let n = bandwidth.words.len() as u64;
            n * (n - 1) / 2
        });
        assert!(bandwidth.measure(&Pool::new(2)) > 0.0);
    }
}
