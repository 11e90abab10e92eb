//! Both ways to carry reads out, over real files whose reads pass a hook, on one drive and on several.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use metaltail_container::{ExpertPlace, Extent};
use xxhash_rust::xxh3::xxh3_64;

mod repack;

use crate::io::{ExpertReader, FileReader, IoMode};
use crate::testing::{Fault, Faulty, Recorder, place};
use crate::{ExpertStore, LayerExperts, StoreConfig, StoreError, StoreEvent};

const EXPERTS: u32 = 8;
const WEIGHTS: u64 = 50_000;
const SCALES: u64 = 700;
const LEN: u64 = 100 + EXPERTS as u64 * (WEIGHTS + SCALES);

type Hook = Box<dyn Fn(u32, u64, usize) -> Fault + Send + Sync>;

/// The two files.
fn bytes(file: u32) -> &'static [u8] {
    static FILES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    let mix = |file: u64, i: u64| (i ^ file << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56;
    let file_of = |file| (0..LEN).map(|i| mix(file, i) as u8).collect();
    &FILES.get_or_init(|| [0, 1].map(file_of))[file as usize]
}

/// Two runs, nothing aligned; with the checksum of the undamaged bytes.
fn expert(file: u32, e: u32) -> ExpertPlace {
    let weights = 100 + u64::from(e) * WEIGHTS;
    let scales = 100 + u64::from(EXPERTS) * WEIGHTS + u64::from(e) * SCALES;
    let runs = [Extent { file, offset: weights, len: WEIGHTS }, Extent { file, offset: scales, len: SCALES }];
    let all = bytes(file);
    let whole = runs.map(|r| all[r.offset as usize..][..r.len as usize].to_vec()).concat();
    ExpertPlace { checksum: Some(xxh3_64(&whole)), ..place(&runs) }
}

/// Layers 3 and 4, a file each.
fn layers() -> Vec<LayerExperts> {
    let layer = |l| LayerExperts { layer: l + 3, experts: (0..EXPERTS).map(|e| expert(l, e)).collect() };
    (0..2).map(layer).collect()
}

/// Directories with the same two files, and a hook for the reads of each.
struct Rig {
    dirs: tempfile::TempDir,
    hooks: Vec<Option<Hook>>,
    rates: Vec<Option<f64>>,
    direct: bool,
    layers: Vec<LayerExperts>,
    config: StoreConfig,
}

impl Rig {
    fn new(drives: usize) -> Rig {
        let dirs = tempfile::tempdir().unwrap();
        for drive in 0..drives {
            std::fs::create_dir(dirs.path().join(format!("drive-{drive}"))).unwrap();
            for file in 0..2 {
                std::fs::write(Rig::path(dirs.path(), drive, file), bytes(file)).unwrap();
            }
        }
        let config = StoreConfig { loaders: 3, in_flight: 4, ..StoreConfig::default() };
        let hooks = (0..drives).map(|_| None).collect();
        Rig { dirs, hooks, rates: vec![None; drives], direct: false, layers: layers(), config }
    }

    fn path(dirs: &Path, drive: usize, file: u32) -> PathBuf {
        dirs.join(format!("drive-{drive}/file-{file}"))
    }

    fn hook(&mut self, drive: usize, hook: impl Fn(u32, u64, usize) -> Fault + Send + Sync + 'static) {
        self.hooks[drive] = Some(Box::new(hook));
    }

    fn damage(&self, drive: usize, file: u32, at: u64) {
        let path = Rig::path(self.dirs.path(), drive, file);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[at as usize] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }

    fn open(self, uring: bool) -> (ExpertStore, Arc<Recorder>, tempfile::TempDir) {
        let drive = |(n, hook): (usize, Option<Hook>)| {
            let paths = [0, 1].map(|file| Rig::path(self.dirs.path(), n, file));
            let here = paths.each_ref().map(|path| path.exists().then_some(path.as_path()));
            let reader = FileReader::open_some(&here, self.direct).unwrap();
            let hook = hook.unwrap_or_else(|| Box::new(|_, _, _| Fault::None));
            let reader: Box<dyn ExpertReader> = Box::new(Faulty::new(reader, hook));
            (self.dirs.path().join(format!("drive-{n}")), reader)
        };
        let drives = self.hooks.into_iter().enumerate().map(drive).collect();
        let mode = IoMode {
            direct: self.direct,
            reason: String::new(),
            makeshift: false,
            uring,
            uring_reason: String::new(),
        };
        let recorder = Arc::new(Recorder::default());
        let store = ExpertStore::build(drives, &self.rates, mode, self.layers, self.config, recorder.clone());
        (store.unwrap(), recorder, self.dirs)
    }
}

/// Threads, and an io_uring where there is one.
fn carriers() -> Vec<bool> {
    match crate::probe::uring_works() {
        Ok(()) => vec![false, true],
        Err(why) => {
            println!("SKIPPED: no io_uring: {why}");
            vec![false]
        }
    }
}

/// Fetches all experts of both layers, `rounds` times, and holds them against the files; the errors.
fn fetch(store: &ExpertStore, rounds: usize) -> Vec<StoreError> {
    let mut errors = Vec::new();
    for layer in (0..2).cycle().take(2 * rounds) {
        let all = bytes(layer);
        let ids: Vec<u32> = (0..EXPERTS).collect();
        let (mut fetch, mut came) = (store.fetch(layer + 3, &ids).unwrap(), 0);
        let failed = errors.len();
        loop {
            match fetch.next_batch() {
                Ok(Some(batch)) => {
                    for (_, lease) in &batch {
                        for (i, run) in expert(layer, lease.expert()).runs.iter().enumerate() {
                            assert!(lease.run(i) == &all[run.offset as usize..][..run.len as usize]);
                        }
                    }
                    came += batch.len();
                }
                Ok(None) => break,
                Err(e) => errors.push(e),
            }
        }
        assert_eq!(came + errors.len() - failed, EXPERTS as usize);
    }
    errors
}

fn notices(recorder: &Recorder) -> Vec<String> {
    let text = |event| if let StoreEvent::Notice(text) = event { Some(text) } else { None };
    recorder.take().into_iter().filter_map(text).collect()
}

#[test]
fn parts_of_any_size_give_the_bytes_of_the_file_and_are_all_read() {
    for uring in carriers() {
        for (chunk, parts) in [(None, 2), (Some(1), 14), (Some(16_384), 5), (Some(1 << 30), 2)] {
            for direct in [false, true] {
                let mut rig = Rig::new(1);
                if direct && FileReader::open(&[Rig::path(rig.dirs.path(), 0, 0)], true).is_err() {
                    println!("SKIPPED: no direct reads");
                    continue;
                }
                (rig.direct, rig.config.chunk_bytes) = (direct, chunk);
                let (store, recorder, _dirs) = rig.open(uring);
                assert_eq!(fetch(&store, 1).len(), 0);
                let mut loads = 0;
                for event in recorder.take() {
                    if let StoreEvent::ReadFinished { calls, bytes, ok, .. } = event {
                        loads += 1;
                        let exact = WEIGHTS + SCALES;
                        assert!(ok && if direct { bytes > exact } else { bytes == exact });
                        // A run may begin late in its first page and touch one page more.
                        assert!((parts..=parts + 2).contains(&calls), "{calls} calls, wanted {parts}");
                    }
                }
                assert_eq!(loads, 2 * EXPERTS);
                let [drive] = &store.drives()[..] else { panic!() };
                assert!(drive.bytes >= 16 * (WEIGHTS + SCALES) && !drive.set_aside);
            }
        }
    }
}

#[test]
fn short_interrupted_and_put_off_reads_continue() {
    for uring in carriers() {
        let mut rig = Rig::new(1);
        rig.config.chunk_bytes = Some(8192);
        let call = AtomicU32::new(0);
        rig.hook(0, move |_, _, _| match call.fetch_add(1, Ordering::Relaxed) % 4 {
            0 => Fault::Error(libc::EINTR),
            1 => Fault::Short(1 + call.load(Ordering::Relaxed) as usize * 7 % 3000),
            2 => Fault::Error(libc::EAGAIN),
            _ => Fault::None,
        });
        let (store, _, _dirs) = rig.open(uring);
        assert_eq!(fetch(&store, 2).len(), 0);
    }
}

#[test]
fn faults_keep_their_codes_and_the_other_experts_come() {
    for uring in carriers() {
        for (code, text) in [(libc::EIO, "OS code 5"), (libc::ENOSPC, "OS code 28"), (0, "ends early")] {
            let mut rig = Rig::new(1);
            // In the second part of expert 2's weights.
            rig.config.chunk_bytes = Some(16_384);
            rig.hook(0, move |file, offset, _| match (file, offset, code) {
                (0, 114_688, 0) => Fault::Short(0),
                (0, 114_688, _) => Fault::Error(code),
                _ => Fault::None,
            });
            let (store, recorder, dirs) = rig.open(uring);
            let errors = fetch(&store, 1);
            let [error] = &errors[..] else { panic!("{errors:?}") };
            let path = Rig::path(dirs.path(), 0, 0).display().to_string();
            for part in ["expert 2 of layer 3", &path, "offset 114688", "wanted 16384", "got 0", text] {
                assert!(error.to_string().contains(part), "{part} in {error}");
            }
            let lost = |e: &StoreEvent| matches!(e, StoreEvent::ReadFinished { ok: false, .. });
            assert_eq!(recorder.take().iter().filter(|e| lost(e)).count(), 1);
            assert!(store.drives().iter().all(|drive| !drive.set_aside), "it is the only one");
        }
    }
}

#[test]
fn a_file_cut_short_after_opening_is_an_error_that_says_so() {
    for uring in carriers() {
        let (store, _, dirs) = Rig::new(1).open(uring);
        let file = std::fs::File::options().write(true).open(Rig::path(dirs.path(), 0, 1)).unwrap();
        file.set_len(LEN - 1).unwrap();
        let errors = fetch(&store, 1);
        assert!(
            matches!(&errors[..], [StoreError::EndOfFile { layer: 4, expert: 7, wanted: 700, got: 699, .. }]),
            "{errors:?}"
        );
    }
}

#[test]
fn a_part_that_one_drive_fails_is_read_from_another() {
    for uring in carriers() {
        for uneven in [false, true] {
            let mut rig = Rig::new(2);
            rig.rates[0] = Some(1e15);
            // One file of the first drive fails; its other file does not.
            rig.hook(0, |file, _, _| if file == 1 { Fault::Error(libc::EIO) } else { Fault::None });
            if uneven {
                rig.hook(1, |_, _, _| Fault::Short(5000));
            }
            let (store, recorder, dirs) = rig.open(uring);
            assert_eq!(fetch(&store, 4).len(), 0);
            let notices = notices(&recorder);
            let path = Rig::path(dirs.path(), 0, 1).display().to_string();
            assert!(matches!(&notices[..], [text] if text.contains(&path)), "{notices:?}");
            assert!(store.drives().iter().all(|drive| drive.bytes > 0 && !drive.set_aside));
        }
    }
}

#[test]
fn an_error_comes_only_when_no_drive_is_left() {
    for uring in carriers() {
        let mut rig = Rig::new(2);
        for drive in 0..2 {
            // Expert 5's scales.
            rig.hook(drive, |file, offset, _| match (file, offset == 100 + 8 * WEIGHTS + 5 * SCALES) {
                (1, true) => Fault::Error(libc::EIO),
                _ => Fault::None,
            });
        }
        let (store, _, _dirs) = rig.open(uring);
        let errors = fetch(&store, 1);
        assert!(
            matches!(&errors[..], [StoreError::Read { layer: 4, expert: 5, wanted: 700, .. }]),
            "{errors:?}"
        );
    }
}

#[test]
fn a_drive_that_disappears_is_set_aside_and_everything_still_comes() {
    for uring in carriers() {
        let mut rig = Rig::new(2);
        let reads = AtomicU32::new(0);
        rig.hook(0, move |_, _, _| match reads.fetch_add(1, Ordering::Relaxed) {
            0..=20 => Fault::None,
            _ => Fault::Error(libc::ENODEV),
        });
        let (store, recorder, dirs) = rig.open(uring);
        let name = dirs.path().join("drive-0").display().to_string();
        // How often the drive is asked, and so how soon it has failed often enough, follows from how fast each drive
        // was before: on a busy machine it takes some rounds. Once it was told, nothing more is asked of it.
        let told = || notices(&recorder);
        for round in 0.. {
            assert!(round < 50, "it is asked again and again: {:?}", told());
            let (was_told, before) = (!told().is_empty(), store.drives()[0].reads);
            assert_eq!(fetch(&store, 12).len(), 0);
            if was_told && store.drives()[0].reads == before {
                break;
            }
        }
        assert!(told().iter().all(|text| text.contains(&name)), "{:?}", told());
    }
}

#[test]
fn a_slow_drive_carries_little_beside_a_fast_one() {
    for uring in carriers() {
        for slow in 0..2 {
            let mut rig = Rig::new(2);
            (rig.config.chunk_bytes, rig.config.checksums) = (Some(8192), false);
            rig.hook(slow, move |_, _, _| {
                // The drive, not the test, takes this time.
                std::thread::sleep(Duration::from_millis(5));
                Fault::None
            });
            let (store, _, _dirs) = rig.open(uring);
            assert_eq!(fetch(&store, 4).len(), 0);
            let bytes: Vec<u64> = store.drives().iter().map(|drive| drive.bytes).collect();
            let share = bytes[slow] as f64 / (bytes[0] + bytes[1]) as f64;
            assert!(bytes[slow] > 0 && share <= 0.2, "{share} of {bytes:?}");
        }
    }
}

#[test]
fn a_damaged_copy_is_mended_from_the_other_and_named() {
    for uring in carriers() {
        for damaged in 0..2 {
            let mut rig = Rig::new(2);
            rig.config.chunk_bytes = Some(16_384);
            rig.damage(damaged, 1, 100 + 3 * WEIGHTS + 20_000);
            // Read from it first.
            rig.rates[damaged] = Some(1e15);
            let (store, recorder, dirs) = rig.open(uring);
            assert_eq!(fetch(&store, 3).len(), 0);
            let path = Rig::path(dirs.path(), damaged, 1).display().to_string();
            let notices = notices(&recorder);
            let named = |text: &String| text.contains(&path) && text.contains("expert 3 of layer 4");
            assert!(notices.len() == 1 && notices.iter().all(named), "{notices:?}");
        }
        let rig = Rig::new(2);
        (0..2).for_each(|drive| rig.damage(drive, 1, 100 + 3 * WEIGHTS));
        let (store, _, _dirs) = rig.open(uring);
        let errors = fetch(&store, 1);
        assert!(matches!(&errors[..], [StoreError::Checksum { layer: 4, expert: 3, .. }]), "{errors:?}");
    }
}

#[test]
fn a_model_may_be_split_over_drives() {
    for uring in carriers() {
        let rig = Rig::new(2);
        std::fs::remove_file(Rig::path(rig.dirs.path(), 0, 1)).unwrap();
        std::fs::remove_file(Rig::path(rig.dirs.path(), 1, 0)).unwrap();
        let (store, _, _dirs) = rig.open(uring);
        assert_eq!(fetch(&store, 1).len(), 0);
        let bytes: Vec<u64> = store.drives().iter().map(|drive| drive.bytes).collect();
        assert_eq!(bytes, [8 * (WEIGHTS + SCALES); 2]);
    }
}

#[test]
fn a_store_closes_while_reads_are_under_way() {
    for uring in carriers() {
        for chunk in [None, Some(4096)] {
            let mut rig = Rig::new(2);
            rig.config.chunk_bytes = chunk;
            for drive in 0..2 {
                rig.hook(drive, |_, _, _| {
                    std::thread::sleep(Duration::from_millis(1));
                    Fault::None
                });
            }
            let (store, _, _dirs) = rig.open(uring);
            drop(store.fetch(3, &[0, 1, 2, 3]).unwrap());
            let mut fetch = store.fetch(4, &[0, 1, 2, 3]).unwrap();
            let leases = fetch.next_batch().unwrap().unwrap();
            drop(fetch);
            drop(store);
            // A lease outlives the store with its bytes.
            let (_, lease) = &leases[0];
            let run = expert(1, lease.expert()).runs[0];
            assert!(lease.run(0) == &bytes(1)[run.offset as usize..][..run.len as usize]);
        }
    }
}

#[test]
fn a_load_nobody_waits_for_gives_way_between_its_parts() {
    let (begun, has_begun) = std::sync::mpsc::channel();
    let (go_on, may_go_on) = std::sync::mpsc::channel::<()>();
    let gates = std::sync::Mutex::new((begun, may_go_on));
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut rig = Rig::new(1);
    rig.config = StoreConfig { loaders: 1, staging: 2, chunk_bytes: Some(4096), ..rig.config };
    rig.hook(0, {
        let order = Arc::clone(&order);
        move |file, _, _| {
            let first = order.lock().unwrap().is_empty();
            order.lock().unwrap().push(file);
            if first {
                let gates = gates.lock().unwrap();
                gates.0.send(()).unwrap();
                gates.1.recv_timeout(Duration::from_secs(20)).unwrap();
            }
            Fault::None
        }
    });
    let (store, _, _dirs) = rig.open(false);
    // Thirteen parts of weights and one of scales, of which the first is being read when someone waits.
    store.expect(3, &[0]).unwrap();
    has_begun.recv_timeout(Duration::from_secs(20)).unwrap();
    let mut fetch = store.fetch(4, &[5]).unwrap();
    go_on.send(()).unwrap();
    while fetch.next_batch().unwrap().is_some() {}
    let order = order.lock().unwrap().clone();
    let demanded = order.iter().filter(|&&file| file == 1).count();
    assert!(demanded >= 13, "{order:?}");
    assert_eq!(order[..=demanded], [&[0][..], &vec![1; demanded]].concat(), "a guess was read first");
    drop(fetch);
    store.audit().unwrap();
    assert!(fetch_one(&store, 3, 0));
}

/// Fetches one expert and holds it against the file.
fn fetch_one(store: &ExpertStore, layer: u32, e: u32) -> bool {
    let mut fetch = store.fetch(layer, &[e]).unwrap();
    let batch = fetch.next_batch().unwrap().unwrap();
    let runs = expert(layer - 3, e).runs;
    runs.iter()
        .enumerate()
        .all(|(i, run)| batch[0].1.run(i) == &bytes(layer - 3)[run.offset as usize..][..run.len as usize])
}

#[test]
fn of_what_nobody_waits_for_no_more_is_under_way_than_can_be_read_at_once() {
    for uring in carriers() {
        let mut rig = Rig::new(1);
        rig.config.chunk_bytes = Some(4096);
        rig.config.pinned = (0..2 * EXPERTS).map(|i| (3 + i / EXPERTS, i % EXPERTS)).collect();
        rig.hook(0, |_, _, _| {
            std::thread::sleep(Duration::from_micros(200));
            Fault::None
        });
        let (store, recorder, _dirs) = rig.open(uring);
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        let (mut depth, mut most, mut ended) = (0, 0, 0);
        while ended < 2 * EXPERTS {
            assert!(std::time::Instant::now() < deadline, "pins do not arrive");
            for event in recorder.take() {
                match event {
                    StoreEvent::ReadStarted { .. } => depth += 1,
                    StoreEvent::ReadFinished { .. } => (depth, ended) = (depth - 1, ended + 1),
                    _ => {}
                }
                most = most.max(depth);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let limit = if uring { 4 } else { 3 };
        assert!(most >= 1 && most <= limit, "{most} experts under way with {limit} reads at a time");
        drop(store);
    }
}
