//! Work made by several threads and taken in order.

use std::num::NonZero;
use std::sync::mpsc::sync_channel;
use std::thread;

/// Threads worth starting for making bytes: what the system allows, but at most 8,
/// since each holds one expert in memory.
pub(crate) fn worker_threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get).min(8)
}

/// Calls `make(i)` for `i` in `0..count` on `threads` threads and `take(i, made)` on this one, in order.
///
/// A worker is at most two items ahead of `take`. The first error ends the work.
pub(crate) fn in_order<T, E>(
    count: usize,
    threads: usize,
    make: impl Fn(usize) -> Result<T, E> + Sync,
    mut take: impl FnMut(usize, T) -> Result<(), E>,
) -> Result<(), E>
where
    T: Send,
    E: Send,
{
    let threads = threads.min(count);
    if threads <= 1 {
        return (0..count).try_for_each(|i| take(i, make(i)?));
    }
    thread::scope(|scope| {
        let mut lanes = Vec::with_capacity(threads);
        for first in 0..threads {
            let (sender, receiver) = sync_channel::<Result<T, E>>(1);
            let make = &make;
            scope.spawn(move || {
                for i in (first..count).step_by(threads) {
                    let made = make(i);
                    let failed = made.is_err();
                    // A closed channel means that the taker met an error and left.
                    if sender.send(made).is_err() || failed {
                        return;
                    }
                }
            });
            lanes.push(receiver);
        }
        for i in 0..count {
            // A worker that panicked closes its lane; the scope passes the panic on when it ends.
            let Ok(made) = lanes[i % threads].recv() else {
                break;
            };
            take(i, made?)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_arrive_in_order_whatever_the_thread_count() {
        for threads in [1, 2, 5, 64] {
            let mut seen = Vec::new();
            let done: Result<(), ()> = in_order(
                23,
                threads,
                |i| Ok(i * i),
                |i, v| {
                    seen.push((i, v));
                    Ok(())
                },
            );
            assert_eq!(done, Ok(()));
            assert_eq!(seen, (0..23).map(|i| (i, i * i)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn an_error_of_either_side_ends_the_work() {
        let made = in_order(100, 3, |i| if i == 40 { Err("make") } else { Ok(i) }, |_, _| Ok(()));
        assert_eq!(made, Err("make"));
        let taken = in_order(100, 3, Ok, |i, _| if i == 7 { Err("take") } else { Ok(()) });
        assert_eq!(taken, Err("take"));
    }
}
