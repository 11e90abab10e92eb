//! Persistent threads that share out the tasks of one parallel region.
//!
//! A region is a closure over task numbers. Threads claim numbers from one counter, so a slow
//! thread takes fewer. Between regions a thread spins for some microseconds (the next region of
//! a layer is usually that near) and then sleeps, so that an idle engine burns nothing and a busy
//! neighbour is not starved. The caller works too; it returns when the tasks are done and no
//! thread is inside the closure any more. A thread that wakes late finds no region and sleeps on:
//! nobody waits for it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a thread spins before it sleeps: a futex wake-up costs about as much.
const SPIN: Duration = Duration::from_micros(30);

/// A set of threads for parallel regions.
///
/// One region runs at a time. A region started while another runs (from inside one of its tasks,
/// or from another thread) is done by its caller alone, so nesting cannot deadlock.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    slot: Mutex<Slot>,
    /// Counts regions; changes only under `slot`, read without it while spinning.
    epoch: AtomicUsize,
    /// Workers inside the region; changes only under `slot`.
    active: AtomicUsize,
    /// A region is under way.
    busy: AtomicBool,
    wake: Condvar,
    idle: Condvar,
}

struct Slot {
    region: Option<RegionPtr>,
    sleeping: usize,
    shutdown: bool,
}

/// One region, on the stack of the caller of [`Pool::run`].
struct Region<'a> {
    call: &'a (dyn Fn(usize) + Sync),
    tasks: usize,
    next: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Clone, Copy)]
struct RegionPtr(*const Region<'static>);

// SAFETY: a `Region` may be shared between threads (its closure is Sync, the rest are atomics and
// a mutex), and `run` keeps it alive until no worker holds the pointer.
unsafe impl Send for RegionPtr {}

impl Region<'_> {
    /// Claims and does tasks until none is left.
    fn work(&self) {
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= self.tasks {
                return;
            }
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (self.call)(task))) {
                // The rest need not start; half of the range leaves room for the other threads' claims.
                self.next.store(usize::MAX / 2, Ordering::Relaxed);
                lock(&self.panic).get_or_insert(payload);
            }
        }
    }
}

/// A task cannot panic while a lock is held, so a poisoned lock still guards whole data.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Spins until `ready` or until it is time to sleep.
fn spin(ready: impl Fn() -> bool) {
    let start = Instant::now();
    loop {
        for _ in 0..32 {
            if ready() {
                return;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            return;
        }
    }
}

impl Pool {
    /// Starts `threads − 1` threads (the caller of [`Pool::run`] is the other one); 0 counts as 1.
    ///
    /// Where the system refuses a thread the pool has fewer; see [`Pool::threads`].
    pub fn new(threads: usize) -> Pool {
        let shared = Arc::new(Shared {
            slot: Mutex::new(Slot { region: None, sleeping: 0, shutdown: false }),
            epoch: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            wake: Condvar::new(),
            idle: Condvar::new(),
        });
        let workers = (1..threads)
            .map_while(|i| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new().name(format!("compute-{i}")).spawn(move || shared.serve()).ok()
            })
            .collect();
        Pool { shared, workers }
    }

    /// Threads that work on a region, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(0) … f(tasks − 1)`, each once, in any order and on any thread, and returns when all are done.
    ///
    /// # Panics
    /// With the first panic of a task, after every thread has left the region; tasks not yet begun
    /// are then skipped. The pool stays usable.
    pub fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        let alone = tasks <= 1 || self.workers.is_empty();
        if alone || self.shared.busy.swap(true, Ordering::Acquire) {
            (0..tasks).for_each(f);
            return;
        }
        let region = Region { call: f, tasks, next: AtomicUsize::new(0), panic: Mutex::new(None) };
        self.shared.publish(&region, self.workers.len().min(tasks - 1));
        region.work();
        self.shared.retire();
        self.shared.busy.store(false, Ordering::Release);
        let panic = lock(&region.panic).take();
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

impl Shared {
    fn publish(&self, region: &Region<'_>, helpers: usize) {
        let erased = RegionPtr(std::ptr::from_ref(region).cast());
        let mut slot = lock(&self.slot);
        slot.region = Some(erased);
        self.epoch.fetch_add(1, Ordering::Release);
        // Those that still spin see the epoch; only sleepers cost a system call.
        let wake = slot.sleeping.min(helpers);
        drop(slot);
        for _ in 0..wake {
            self.wake.notify_one();
        }
    }

    /// Takes the region away from latecomers and waits for those inside it.
    fn retire(&self) {
        lock(&self.slot).region = None;
        spin(|| self.active.load(Ordering::Acquire) == 0);
        let mut slot = lock(&self.slot);
        while self.active.load(Ordering::Acquire) != 0 {
            slot = self.idle.wait(slot).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The life of a worker.
    fn serve(&self) {
        let mut seen = 0;
        while let Some(region) = self.next_region(&mut seen) {
            // SAFETY: `next_region` counted this thread as active under the lock while the region was
            // published, and `retire` does not return before the count is back to 0, so the region lives.
            unsafe { &*region.0 }.work();
            let slot = lock(&self.slot);
            let last = self.active.fetch_sub(1, Ordering::Release) == 1;
            drop(slot);
            if last {
                self.idle.notify_one();
            }
        }
    }

    /// Waits for a region not seen yet and enters it; `None` at shutdown.
    fn next_region(&self, seen: &mut usize) -> Option<RegionPtr> {
        loop {
            spin(|| self.epoch.load(Ordering::Acquire) != *seen);
            let mut slot = lock(&self.slot);
            while self.epoch.load(Ordering::Acquire) == *seen && !slot.shutdown {
                slot.sleeping += 1;
                slot = self.wake.wait(slot).unwrap_or_else(PoisonError::into_inner);
                slot.sleeping -= 1;
            }
            if slot.shutdown {
                return None;
            }
            *seen = self.epoch.load(Ordering::Acquire);
            if let Some(region) = slot.region {
                self.active.fetch_add(1, Ordering::Relaxed);
                return Some(region);
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.slot).shutdown = true;
        // Spinners find the flag once their spin ends.
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker cannot panic: tasks are caught.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(pool: &Pool, tasks: usize) -> Vec<usize> {
        let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        pool.run(tasks, &|i| {
            counts[i].fetch_add(1, Ordering::Relaxed);
        });
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_task_runs_once() {
        for threads in [0, 1, 2, 5] {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 3, 100, 1000] {
                assert_eq!(counts(&pool, tasks), vec![1; tasks]);
            }
        }
    }

    #[test]
    fn many_short_regions_lose_no_wakeup() {
        let pool = Pool::new(4);
        for round in 0..5000 {
            assert_eq!(counts(&pool, 3), [1; 3], "round {round}");
        }
    }

    #[test]
    fn sleeping_threads_wake_for_a_region() {
        let pool = Pool::new(2);
        std::thread::sleep(SPIN * 100);
        let both = std::sync::Barrier::new(2);
        // Each task waits for the other, so two threads must have come.
        pool.run(2, &|_| {
            both.wait();
        });
    }

    #[test]
    fn a_region_inside_a_task_runs_inline() {
        let pool = Pool::new(3);
        let total = AtomicUsize::new(0);
        pool.run(8, &|_| {
            pool.run(10, &|_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(total.into_inner(), 80);
    }

    #[test]
    fn regions_of_several_callers_all_finish() {
        let pool = Pool::new(3);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..200 {
                        assert_eq!(counts(&pool, 7), [1; 7]);
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        for threads in [1, 3] {
            let pool = Pool::new(threads);
            for _ in 0..20 {
                let caught = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(50, &|i| {
                        if i == 7 {
                            std::panic::panic_any("task seven");
                        }
                    });
                }));
                assert_eq!(caught.unwrap_err().downcast_ref(), Some(&"task seven"));
                assert_eq!(counts(&pool, 20), [1; 20]);
            }
        }
    }
}
